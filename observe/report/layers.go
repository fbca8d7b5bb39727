package report

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/euryale-ml/euryale/observe/internal/chrome"
)

// layerLine is a row of the table of layers: a layer on a rank, in recorded steps, without its
// waits for calls.
type layerLine struct {
	Layer        string  `json:"layer"`
	Rank         int     `json:"rank"`
	Millis       float64 `json:"ms"`        // the median of the last steps
	PastMillis   float64 `json:"past_ms"`   // the median of the fastest quarter of all steps
	OthersMillis float64 `json:"others_ms"` // the median of other ranks' Millis, then; 0 for none
	Slow         bool    `json:"slow"`
}

const (
	leastSteps = 8    // to compare a layer with its past
	lastPart   = 10   // of the steps are the last ones: one of so many
	slowLayer  = 1.25 // times its past, or other ranks' time: from there on it is slow
	leastSlow  = 0.01 // of a usual step: what a slow layer takes longer
)

// layers returns the table of layers, slow ones first, and those that take longest. step is the
// time of a usual step.
func layers(traces []*trace, step float64) (all []layerLine) {
	now, in := map[string][]float64{}, []string(nil) // of the ranks of a generation; those of rows
	for _, t := range traces {
		for layer, times := range t.layers() {
			if len(times) < leastSteps {
				continue
			}
			last := median(times[len(times)-max(len(times)/lastPart, leastSteps/2):])
			past := slices.Sorted(slices.Values(times))[len(times)/8]
			all = append(all, layerLine{Layer: layer, Rank: t.rank, Millis: last, PastMillis: past})
			key := fmt.Sprint(t.generation, " ", layer)
			now[key], in = append(now[key], last), append(in, key)
		}
	}
	for i := range all {
		l := &all[i]
		others := slices.Clone(now[in[i]])
		at := slices.Index(others, l.Millis)
		if others = slices.Delete(others, at, at+1); len(others) > 0 {
			l.OthersMillis = median(others)
		}
		l.Slow = l.longer() >= leastSlow*step && (l.Millis > slowLayer*l.PastMillis ||
			len(others) > 0 && l.Millis > slowLayer*l.OthersMillis)
	}
	slices.SortFunc(all, func(a, b layerLine) int {
		switch {
		case a.Slow != b.Slow:
			return map[bool]int{true: -1, false: 1}[a.Slow]
		case a.Slow:
			return cmp.Compare(b.longer(), a.longer())
		}
		return cmp.Or(cmp.Compare(b.Millis, a.Millis), cmp.Compare(a.Layer, b.Layer), a.Rank-b.Rank)
	})
	return all[:min(len(all), mostCallLines)]
}

// longer returns for how much longer it takes than it did, or than on other ranks.
func (l *layerLine) longer() float64 {
	longer := l.Millis - l.PastMillis
	if l.OthersMillis > 0 {
		longer = max(longer, l.Millis-l.OthersMillis)
	}
	return longer
}

// layers returns the milliseconds of each layer in the steps, in their order.
func (t *trace) layers() map[string][]float64 {
	type replay struct {
		layer string
		callID
	}
	number, all := map[replay]int{}, map[string][]float64{}
	for _, c := range t.calls {
		if c.Category != chrome.Layer {
			continue
		}
		r, times := replay{c.Name, c.id()}, all[c.Name]
		i, known := number[r]
		if !known {
			i, times = len(times), append(times, 0)
			number[r], all[c.Name] = i, times
		}
		times[i] += c.Args.Busy.Millis()
	}
	return all
}
