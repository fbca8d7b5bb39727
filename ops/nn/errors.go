package nn

// Error is the error of an operation that runs: a value that does not fit its node, or an index or
// label that is out of range. [ops.Cause] extracts it from the error of a Gorgonia machine.
type Error struct {
	Op  string // the operation: "CrossEntropy{ignore -100}"
	Err error  // what happened
}

// Error names the operation: "nn: CrossEntropy{ignore -100}: bad argument: label 1 is 12, ...".
func (e *Error) Error() string { return "nn: " + e.Op + ": " + e.Err.Error() }

// Unwrap returns what happened.
func (e *Error) Unwrap() error { return e.Err }

// Operation returns the operation.
func (e *Error) Operation() string { return e.Op }
