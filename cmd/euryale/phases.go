package main

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/hierarchy"
	"github.com/euryale-ml/euryale/observe"
)

// phaseTimes reports the times of the phases of hierarchical calls, if they are measured
// (EURYALE_HIERARCHY=spans=4096).
type phaseTimes struct {
	from *observe.Recorder
	comm string
	told uint64 // the last call that was reported
}

// newPhaseTimes returns nil if phases are not measured.
func newPhaseTimes(comm backend.Communicator) *phaseTimes {
	h := hierarchical(comm)
	session, ok := backend.As[interface{ Recorder() *observe.Recorder }](comm)
	if h == nil || h.Plan().Options.Spans == 0 || !ok {
		return nil
	}
	return &phaseTimes{from: session.Recorder(), comm: h.Name()}
}

// line returns the mean times that the calls since the last line have spent in each phase
// on this rank, as a comment of a table; "" if there were none. Phases of different slices
// overlap, so their sum is more than a call takes.
func (p *phaseTimes) line() string {
	if p == nil {
		return ""
	}
	total, counted, most := map[string]time.Duration{}, map[uint64]bool{}, 1
	for _, e := range p.parts() {
		phase, rest, _ := strings.Cut(e.Part, " (slice ")
		if _, of, ok := strings.Cut(strings.TrimSuffix(rest, ")"), " of "); ok {
			n, _ := strconv.Atoi(of) // which is a number
			most = max(most, n)
		}
		total[phase] += e.End.Sub(e.Start)
		counted[e.Header.Seq] = true
		p.told = max(p.told, e.Header.Seq)
	}
	if len(counted) == 0 {
		return ""
	}
	var b strings.Builder
	fmt.Fprintf(&b, "#   phases of rank 0 (mean us of %d calls, slices: %d):", len(counted), most)
	sep := " "
	for _, phase := range hierarchy.Phases() {
		if took, ok := total[phase]; ok {
			fmt.Fprintf(&b, "%s%s %.1f", sep, phase, float64(took.Nanoseconds())/1e3/float64(
				len(counted)))
			sep = ", "
		}
	}
	return b.String() + "\n"
}

// parts returns the phases that have ended, of calls after the last line that have lost none.
func (p *phaseTimes) parts() (all []observe.Event) {
	events := slices.DeleteFunc(p.from.Events(), func(e observe.Event) bool {
		return e.Part == "" || e.Comm != p.comm
	})
	last := p.told
	if len(events) > 0 && p.from.Dropped() > 0 {
		last = max(last, events[0].Header.Seq)
	}
	return slices.DeleteFunc(events, func(e observe.Event) bool {
		return e.End.IsZero() || e.Header.Seq <= last
	})
}
