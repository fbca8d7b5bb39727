package backend

import (
	"fmt"
	"strings"
)

// Capabilities says what a [Communicator] is made of, and what it offers beyond the interface. The
// zero value is right for one that offers nothing more. All fields but Verify and LocalRanks are
// the same on every rank.
type Capabilities struct {
	// Backend is the name of the backend that made the communicator.
	Backend string
	// Members are the job's ranks that the group consists of; nil if it does not know.
	Members Members
	// LocalRanks is how many ranks of the job, not only of the group, are on this rank's machine
	// and share its cores; 0 if it does not know.
	LocalRanks int
	// InFlight is the number of queues that large calls are worth spreading over: the communicator
	// works on several calls at once if they are on different queues and share no memory. 0 and 1
	// mean that more queues gain nothing. Results are the same on any queues.
	InFlight int
	// Direct says that all ranks send every other rank its part of an operand at once, not round a
	// ring: calls have fewer messages that wait for each other.
	Direct bool

	// Tree lists the types, if any, whose all-reduces it can also add in the [Association] Tree. It
	// refuses such calls of other types.
	Tree []DType
	// Branches says that such sums may have Splits.
	Branches bool

	// Rows reports whether it runs an AllToAll with Rows, of count elements of dtype d, in one pass
	// over the operands; otherwise the caller must pack and join them. nil means never.
	Rows func(c Collective, d DType, count int) bool

	// Verify makes calls that are started from now on compare their headers across the ranks, or
	// not. It is nil if the communicator cannot compare them: Init then compares them, by an
	// all-gather before each call.
	Verify func(on bool)

	// Transport returns the dtype that operands travel in, in a call of count elements of dtype d:
	// d itself, or c.AllowHalf where the communicator uses the permission. The communicator then
	// rounds every operand once, and accumulates an average in 32 bits and rounds that once; a sum
	// is the average times Size. nil means always d.
	Transport func(c Collective, d DType, count int) DType
}

// TransportOf returns what Transport does, also where it is nil.
func (c Capabilities) TransportOf(what Collective, d DType, count int) DType {
	if c.Transport == nil {
		return d
	}
	return c.Transport(what, d, count)
}

// RunsRows returns what Rows does, also where it is nil.
func (c Capabilities) RunsRows(what Collective, d DType, count int) bool {
	return c.Rows != nil && c.Rows(what, d, count)
}

// String lists them on one line: "backend host, 4 ranks, compares calls".
func (c Capabilities) String() string {
	list := []string{"backend " + c.Backend}
	if c.Backend == "" {
		list[0] = "unknown backend"
	}
	if c.Members != nil {
		list = append(list, fmt.Sprintf("%d ranks", len(c.Members)))
	}
	if c.InFlight > 1 {
		list = append(list, fmt.Sprintf("%d calls in flight", c.InFlight))
	}
	for _, can := range []struct {
		what string
		it   bool
	}{
		{"adds in a tree", len(c.Tree) > 0},
		{"cuts and joins rows", c.Rows != nil},
		{"compares calls", c.Verify != nil},
		{"sends 16 bits where allowed", c.Transport != nil},
	} {
		if can.it {
			list = append(list, can.what)
		}
	}
	return strings.Join(list, ", ")
}
