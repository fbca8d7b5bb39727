package report

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
)

// trainStep is one period of the calls of all ranks.
type trainStep struct {
	Number   int       `json:"step"` // from 1, counting the steps in the traces
	Millis   float64   `json:"ms"`
	Late     []float64 `json:"late"` // milliseconds behind the median rank, by rank
	from, to nanos
	calls    []*event
}

const (
	longestPeriod = 2048    // the largest number of calls of a rank in a step
	mostCompared  = 1 << 15 // calls of a rank in which a period is looked for
	mostTimes     = 1 << 23 // numbers, of ranks in steps
	mostReasons   = 4       // calls that only a slow step has
)

// cut cuts the traces of a generation into steps; none if their calls do not repeat. after is the
// number of steps in earlier generations.
func (j *Job) cut(traces []*trace, after int) (all []*trainStep) {
	ends, gone := traces[0].ends(), 0
	if most := max(mostTimes/max(j.size, 1)-after, 0); len(ends) > most {
		gone = len(ends) - most
		j.remark("there are more steps than a page shows: the first %d are left out", gone)
		ends = ends[gone:]
	}
	number := make(map[callID]int, len(ends))
	for i, end := range ends {
		s := &trainStep{Number: after + gone + i, Late: make([]float64, j.size)}
		for _, t := range traces {
			if c := t.common[end]; c != nil {
				s.to = max(s.to, c.endTime())
			}
		}
		if i > 0 {
			s.from = all[i-1].to
			s.Millis = (s.to - s.from).Millis()
		}
		all, number[end] = append(all, s), i
	}
	meet(traces)
	for _, t := range traces {
		at := 0
		for _, c := range t.calls {
			if at < len(all) {
				all[at].calls = append(all[at].calls, c)
				all[at].Late[t.rank] += c.behind.Millis()
			}
			if i, ok := number[c.id()]; ok && c.isCall() {
				at = i + 1
			}
		}
	}
	return all[min(1, len(all)):] // anything before the first end is not a whole step
}

// meet computes how late ranks are for the calls that they share.
func meet(traces []*trace) {
	groups := map[callID][]*event{}
	for _, t := range traces {
		for _, c := range t.calls {
			if c.syncs() {
				groups[c.id()] = append(groups[c.id()], c)
			}
		}
	}
	for _, met := range groups {
		slices.SortFunc(met, func(a, b *event) int { return cmp.Compare(a.Start, b.Start) })
		for _, c := range met {
			c.last = met[len(met)-1].Start
			c.behind = max(c.Start-met[(len(met)-1)/2].Start, 0)
		}
	}
}

// ends returns the last call of each step. Buckets of gradients give the number of steps; for calls
// without buckets, the repetition does.
func (t *trace) ends() (ids []callID) {
	var calls []*event
	var names []string
	for _, c := range t.calls {
		if c.isCall() {
			calls, names = append(calls, c), append(names, c.signature())
		}
	}
	p, times := 0, 0
	for _, name := range names {
		if strings.Contains(name, "DataParallel.Sync: ") && strings.Contains(name, ", bucket 0 ") {
			times++
		}
	}
	if times < 2 {
		if p = period(names); p == 0 {
			return nil
		}
		times = len(calls) / p
	}
	first := opening(calls, names, float64(times))
	began := 0 // the last step
	for i := 1; i < len(calls); i++ {
		if names[i] == first || first == "" && i%p == 0 {
			ids, began = append(ids, calls[i-1].id()), i
		}
	}
	if n := len(ids); n > 1 { // it ends like most steps
		usual := t.common[ids[n/2]].signature()
		if i := slices.Index(names[began:], usual); i >= 0 {
			ids = append(ids, calls[began+i].id())
		}
	}
	return ids
}

// period returns the number of names after which nearly all repeat, 0 if they do not.
func period(names []string) int {
	shares, best := []float64{0}, 0.0
	names = names[:min(len(names), mostCompared)]
	for p := 1; p <= min(len(names)/2, longestPeriod); p++ {
		same := 0
		for i := range len(names) - p {
			if names[i] == names[i+p] {
				same++
			}
		}
		shares = append(shares, float64(same)/float64(len(names)-p))
		best = max(best, shares[p])
	}
	const enough, close = 0.5, 0.95 // validation and checkpoints come in between
	if best < enough {
		return 0
	}
	return slices.IndexFunc(shares, func(share float64) bool { return share >= close*best })
}

// opening returns the call that comes first in a step. Among the calls that each step has once, it
// is the one after the longest pause. There may be none.
func opening(calls []*event, names []string, steps float64) (first string) {
	pauses := map[string][]nanos{}
	for i := 1; i < len(calls); i++ {
		pauses[names[i]] = append(pauses[names[i]], calls[i].Start-calls[i-1].endTime())
	}
	longest := nanos(-1 << 62)
	for _, name := range slices.Sorted(maps.Keys(pauses)) {
		some := pauses[name]
		if n := float64(len(some)); n < 0.7*steps || n > 1.3*steps {
			continue
		}
		if pause := median(some); pause > longest {
			first, longest = name, pause
		}
	}
	return first
}

// purpose says what a call was made for: "DataParallel.Save: allgather".
func purpose(c *event) string {
	if !c.isCall() {
		return "part"
	}
	text, _, _ := strings.Cut(c.Args.What, " of ")
	if strings.HasPrefix(text, "replay ") { // its number follows
		return "replay"
	}
	return text
}

// slowFrom is the number of medians from which on a step counts as slow.
const slowFrom = 1.1

// slow is a step that took longer than most.
type slow struct {
	*trainStep
	Times float64 // of the median
	Why   string
}

// slowest returns the slowest steps, n at most, and the median of all.
func slowest(all []*trainStep, n int) (some []slow, middle *trainStep) {
	if len(all) == 0 {
		return nil, nil
	}
	sorted := slices.SortedStableFunc(slices.Values(all), func(a, b *trainStep) int {
		return cmp.Compare(b.Millis, a.Millis)
	})
	middle = sorted[len(sorted)/2]
	for _, s := range sorted[:min(n, len(sorted)/2)] {
		if s.Millis > slowFrom*middle.Millis {
			some = append(some, slow{s, s.Millis / middle.Millis, s.why(middle)})
		}
	}
	return some, middle
}

// why says what differs in a step from the middle one.
func (s *trainStep) why(middle *trainStep) string {
	var reasons []string
	rank := 0
	for r, late := range s.Late {
		if late > s.Late[rank] {
			rank = r
		}
	}
	if behind := s.Late[rank] - middle.Late[rank]; behind > (s.Millis-middle.Millis)/4 {
		reasons = append(reasons, fmt.Sprintf("rank %d began its calls %.3g ms late", rank,
			s.Late[rank]))
	}
	var more []string
	usual := map[string]bool{}
	for _, c := range middle.calls {
		usual[purpose(c)] = true
	}
	for _, c := range s.calls {
		if what := purpose(c); !usual[what] && len(more) < mostReasons &&
			!slices.Contains(more, what) {
			more = append(more, what)
		}
	}
	if len(more) > 0 {
		reasons = append(reasons, "it also has "+strings.Join(more, ", "))
	}
	if len(reasons) == 0 {
		return "all ranks took longer"
	}
	return strings.Join(reasons, "; ")
}

// median returns the middle value.
func median[T cmp.Ordered](some []T) T {
	sorted := slices.Sorted(slices.Values(some))
	return sorted[len(sorted)/2]
}
