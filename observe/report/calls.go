package report

import (
	"cmp"
	"maps"
	"slices"
)

// callLine is a row of the table of calls: the medians of those that steps repeat.
type callLine struct {
	What       string  `json:"call"`
	Bytes      int64   `json:"bytes"`
	Millis     float64 `json:"ms"`      // while all ranks were in it, and in no call before it
	WaitMillis float64 `json:"wait_ms"` // of the first rank, for the last one
	Rate       float64 `json:"gb_per_s"`
	Slow       bool    `json:"slow"`
}

const (
	mostCallLines = 30
	// leastBytes are what calls have whose rates are compared: those of smaller ones are latency.
	leastBytes = 1 << 20
	// slowRate is the part of the median rate below which a call counts as slow.
	slowRate = 0.5
)

// exchanges returns the table of calls of all ranks, those that take longest first.
func exchanges(traces []*trace) (all []callLine) {
	type taken struct{ took, wait nanos }
	calls := map[callID]taken{}
	for _, t := range traces {
		before := map[string]nanos{} // the end of the call before, by group
		for _, c := range t.calls {
			if !c.syncs() {
				continue
			}
			known, free := calls[c.id()], max(c.last, before[c.Args.Group])
			calls[c.id()] = taken{max(known.took, c.endTime()-free, 0),
				max(known.wait, min(c.last, c.endTime())-c.Start)}
			before[c.Args.Group] = c.endTime()
		}
	}
	lines := map[string][]taken{}
	sizes := map[string]int64{}
	for _, c := range traces[0].calls {
		if some, ok := calls[c.id()]; ok && c.syncs() {
			what := c.signature()
			lines[what], sizes[what] = append(lines[what], some), c.Args.Bytes
		}
	}
	var rates []float64
	for _, what := range slices.Sorted(maps.Keys(lines)) {
		var took, wait []nanos
		for _, one := range lines[what] {
			took, wait = append(took, one.took), append(wait, one.wait)
		}
		line := callLine{What: what, Bytes: sizes[what], Millis: median(took).Millis(),
			WaitMillis: median(wait).Millis()}
		if n := median(took); n > 0 {
			line.Rate = float64(line.Bytes) / float64(n)
		}
		if len(took) > 1 {
			all = append(all, line)
		}
		if len(took) > 1 && line.Bytes >= leastBytes && line.Rate > 0 {
			rates = append(rates, line.Rate)
		}
	}
	for i := range all {
		all[i].Slow = len(rates) > 2 && all[i].Bytes >= leastBytes && all[i].Rate > 0 &&
			all[i].Rate < slowRate*median(rates)
	}
	slices.SortStableFunc(all, func(a, b callLine) int { return cmp.Compare(b.Millis, a.Millis) })
	return all[:min(len(all), mostCallLines)]
}
