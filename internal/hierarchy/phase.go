package hierarchy

import "fmt"

// phase is a part of what happens to a slice. Each has its own queue.
type phase uint8

// The phases, in the order in which a slice goes through them.
const (
	packPhase      phase = iota // chunks are put in the order of devices
	reducePhase                 // reduce-scatter inside the machine; of an all-to-all, one inside
	exchangePhase               // all-to-all on the rail
	addPhase                    // of what came from each machine
	broadcastPhase              // all-gather on the rail
	gatherPhase                 // all-gather inside the machine; of root's, a broadcast
	unpackPhase                 // chunks are put in the order of ranks
	remainderPhase              // what the ranks do not divide runs flat
	phases
)

var phaseNames = [phases]string{
	"pack", "reduce-scatter inside the machine", "exchange between machines", "add",
	"broadcast between machines", "all-gather inside the machine", "unpack", "flat",
}

// String returns what happens, as errors and traces print it.
func (p phase) String() string {
	if p >= phases {
		return fmt.Sprintf("Phase(%d)", uint8(p))
	}
	return phaseNames[p]
}

// slicePhase is a phase of one slice of a call.
type slicePhase struct {
	phase  phase
	slice  int // from 0
	slices int
}

func (s slicePhase) String() string {
	if s.slices <= 1 {
		return s.phase.String()
	}
	return fmt.Sprintf("%v (slice %d of %d)", s.phase, s.slice+1, s.slices)
}
