package main

import (
	"fmt"
	"strings"
	"time"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/backend/hierarchy"
)

// phaseTimes reports the times of the phases of hierarchical calls, if they are measured
// (EURYALE_HIERARCHY=spans=4096).
type phaseTimes struct {
	from *hierarchy.Communicator
	told int // the last call that was reported
}

// newPhaseTimes returns nil if phases are not measured.
func newPhaseTimes(comm backend.Communicator) *phaseTimes {
	h := hierarchical(comm)
	if h == nil || h.Plan().Options.Spans == 0 {
		return nil
	}
	return &phaseTimes{from: h}
}

// line returns the mean times that the calls since the last line have spent in each phase
// on this rank, as a comment of a table; "" if there were none. Phases of different slices
// overlap, so their sum is more than a call takes.
func (p *phaseTimes) line() string {
	if p == nil {
		return ""
	}
	spans := p.from.Spans()
	last := p.told
	if len(spans) == p.from.Plan().Options.Spans { // the oldest call may have lost phases
		last = max(last, spans[0].Call)
	}
	total, counted, slices := map[hierarchy.Phase]time.Duration{}, map[int]bool{}, 0
	for _, s := range spans {
		p.told = max(p.told, s.Call)
		if s.Call > last {
			total[s.Phase] += s.End.Sub(s.Start)
			counted[s.Call] = true
			slices = max(slices, s.Slice+1)
		}
	}
	if len(counted) == 0 {
		return ""
	}
	var b strings.Builder
	fmt.Fprintf(&b, "#   phases of rank 0 (mean us of %d calls, slices: %d):", len(counted), slices)
	sep := " "
	for _, phase := range hierarchy.Phases() {
		if took, ok := total[phase]; ok {
			fmt.Fprintf(&b, "%s%v %.1f", sep, phase, float64(took.Nanoseconds())/1e3/float64(len(counted)))
			sep = ", "
		}
	}
	return b.String() + "\n"
}
