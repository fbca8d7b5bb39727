package hierarchy

import "fmt"

// Phase is a part of what happens to a slice. Each has its own queue.
type Phase uint8

// The phases, in the order in which a slice goes through them.
const (
	Pack      Phase = iota // chunks are put in the order of devices
	Reduce                 // reduce-scatter inside the machine; of an all-to-all, one inside
	Exchange               // all-to-all on the rail
	Add                    // of what came from each machine
	Broadcast              // all-gather on the rail
	Gather                 // all-gather inside the machine; of root's, a broadcast
	Unpack                 // chunks are put in the order of ranks
	Remainder              // what the ranks do not divide runs flat
	phases
)

var phaseNames = [phases]string{
	"pack", "reduce-scatter inside the machine", "exchange between machines", "add",
	"broadcast between machines", "all-gather inside the machine", "unpack", "flat",
}

// Phases lists every Phase.
func Phases() []Phase {
	all := make([]Phase, phases)
	for i := range all {
		all[i] = Phase(i)
	}
	return all
}

// String returns what happens, as errors and traces print it.
func (p Phase) String() string {
	if p >= phases {
		return fmt.Sprintf("Phase(%d)", uint8(p))
	}
	return phaseNames[p]
}

// slicePhase is a phase of one slice of a call.
type slicePhase struct {
	phase  Phase
	slice  int // from 0
	slices int
}

func (s slicePhase) String() string {
	if s.slices <= 1 {
		return s.phase.String()
	}
	return fmt.Sprintf("%v (slice %d of %d)", s.phase, s.slice+1, s.slices)
}
