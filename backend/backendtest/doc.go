// Package backendtest is the suite that every [backend.Communicator] must pass:
// leaves and wrappers, inside this module and outside.
//
//	func TestCommunicator(t *testing.T) {
//		backendtest.Run(t, backendtest.Options{New: backendtest.Over(host.Backend{})})
//	}
//
// Ranks are goroutines of the test, or processes ([RunRank]). Results are compared bit for bit with
// a plain loop in rank order, written apart from package kernels, on memory with guards around
// every operand. The rest of the suite is about order (queues, groups, back-to-back calls) and
// about ends: wrong arguments, ranks that disagree, abort, close, timeout, the loss of a rank.
//
// A normal run takes every pair of parameter values and every boundary size;
// EURYALE_FULL=1 takes the full product, more group sizes, and repeats more. The race detector does
// not follow loops of the suite over memory that only one goroutine has (go:norace), which would
// take most of its time.
//
// A scenario is a function that returns an error, not one that takes a
// testing.T, so that the suite's own tests can show that broken communicators
// are caught. Package reference, below this one, is the communicator they break.
package backendtest
