package straggler

import (
	"bytes"
	"cmp"
	"fmt"
	"io"
	"slices"
	"time"
)

// Tally adds up the samples of all ranks. The zero value is one of all steps.
type Tally struct {
	// Keep is what of the steps so far counts beside the next one, 15/16 for about the last 16
	// steps. 0 counts all steps alike.
	Keep  float64
	Layer func(number float64) string // its name
	steps float64
	time  float64 // of the steps
	ranks []sums
}

// sums are what the samples of a rank add up to, in nanoseconds.
type sums struct {
	late, caused, exposed, cpu float64
	noted                      [Noted]float64
	heap, process              int64
	slower                     Slower // in the last step
}

// Copy returns a copy, which goes on by itself.
func (t *Tally) Copy() Tally {
	c := *t
	c.ranks = slices.Clone(t.ranks)
	return c
}

// Add adds a step.
func (t *Tally) Add(c *Comparison) {
	if t.ranks == nil {
		t.ranks = make([]sums, len(c.Samples))
	}
	if t.Keep > 0 {
		t.fade()
	}
	t.steps++
	t.time += float64(c.longest)
	for r := range c.Samples {
		s, sum := &c.Samples[r], &t.ranks[r]
		sum.late += float64(c.Behind[r])
		sum.caused += c.caused[r]
		sum.exposed += float64(s.Exposed + c.longest - s.Time) // the exchange waited for the last
		sum.cpu += float64(s.CPU)
		sum.heap, sum.process, sum.slower = s.Heap, s.Process, s.Slower
		for c, d := range s.Noted {
			sum.noted[c] += float64(d)
		}
	}
}

// fade makes all steps so far count less.
func (t *Tally) fade() {
	t.steps, t.time = t.steps*t.Keep, t.time*t.Keep
	for r := range t.ranks {
		s := &t.ranks[r]
		for _, x := range []*float64{&s.late, &s.caused, &s.exposed, &s.cpu} {
			*x *= t.Keep
		}
		for c := range s.noted {
			if s.noted[c] *= t.Keep; s.noted[c] < 1 { // processors are slow with what is near 0
				s.noted[c] = 0
			}
		}
	}
}

// median is the one in the middle, the first of two.
func median[T cmp.Ordered](of []T) T {
	sorted := slices.Sorted(slices.Values(of))
	return sorted[(len(sorted)-1)/2]
}

// Who is late: by more than the rank in the middle, since those who are late by turns are the
// jitter of any machine.
const (
	leastLate  = 20 * time.Microsecond
	leastPart  = 0.01 // of a step
	leastMore  = 0.25 // of all lateness
	leastShare = 0.1  // of exposed time
	// leastCause is what of the lateness a cause must explain.
	leastCause = 0.4
)

// Verdicts returns the ranks that were late, the worst first, and then what takes longer than it
// did.
func (t *Tally) Verdicts() (all []Verdict) {
	if t.steps == 0 {
		return nil
	}
	for r := range t.ranks {
		s := &t.ranks[r]
		late := t.more(r, func(s *sums) float64 { return s.late })
		v := Verdict{Rank: r, Late: time.Duration(late / t.steps), Heap: s.heap, Share: t.share(s)}
		if v.Late < leastLate || late < max(leastPart*t.time, leastMore*s.late) ||
			v.Share < leastShare {
			continue
		}
		v.Cause = t.cause(r, late)
		all = append(all, v)
	}
	slices.SortStableFunc(all, func(a, b Verdict) int { return cmp.Compare(b.Share, a.Share) })
	return t.slower(all)
}

// cause returns why a rank was late: what it has noted more of than the rank in the middle, as far
// as that explains its lateness.
func (t *Tally) cause(r int, late float64) Cause {
	s, most, cause := &t.ranks[r], 0.0, Waiting
	for c := range Noted {
		more := min(t.more(r, func(s *sums) float64 { return s.noted[c] }), late)
		if more > most && more >= leastCause*late {
			most, cause = more, Cause(c)
		}
	}
	ranks := 0 // of its process
	for i := range t.ranks {
		if t.ranks[i].process == s.process {
			ranks++
		}
	}
	if cause == Waiting && (ranks > 1 || s.cpu == 0 || // nobody knows what it has computed
		t.more(r, func(s *sums) float64 { return s.cpu }) >= late/2) {
		return Computation
	}
	return cause
}

// more returns by how much a number of a rank is above that of the rank in the middle.
func (t *Tally) more(r int, of func(s *sums) float64) float64 {
	all := make([]float64, len(t.ranks))
	for i := range t.ranks {
		all[i] = of(&t.ranks[i])
	}
	return all[r] - median(all)
}

// Of returns the time of a step, and for a rank the part of it that it was blocked in collectives
// and the part that it caused of the time that all ranks did.
func (t *Tally) Of(rank int) (step time.Duration, exposed, caused float64) {
	s := &t.ranks[rank]
	return time.Duration(t.time / t.steps), s.exposed / t.time, t.share(s)
}

// share is what of the time that ranks were blocked in collectives was for a rank.
func (t *Tally) share(s *sums) float64 {
	exposed := 0.0
	for r := range t.ranks {
		exposed += t.ranks[r].exposed
	}
	return min(s.caused/max(exposed, 1), 1)
}

// mostLines is how long a report is at most.
const mostLines = 10

// Report writes who was late, and why, in at most ten lines, in one piece.
func (t *Tally) Report(w io.Writer) error {
	var b bytes.Buffer
	if t.steps == 0 || len(t.ranks) < 2 {
		fmt.Fprintf(&b, "euryale: lateness: no steps of several ranks\n")
	} else {
		all, exposed := t.Verdicts(), 0.0
		for r := range t.ranks {
			exposed += t.ranks[r].exposed / t.time / float64(len(t.ranks))
		}
		fmt.Fprintf(&b, "euryale: lateness of %d ranks: a step takes %s ms, %.0f %% of it "+
			"blocked in collectives\n", len(t.ranks),
			millis(time.Duration(t.time/t.steps)), 100*exposed)
		for i, v := range all {
			if i == mostLines-2 && len(all) > mostLines-1 {
				fmt.Fprintf(&b, "  and %d more ranks\n", len(all)-i)
				break
			}
			fmt.Fprintf(&b, "  %v\n", v)
		}
		if len(all) == 0 {
			fmt.Fprintf(&b, "  no rank was late\n")
		}
	}
	_, err := w.Write(b.Bytes())
	return err
}
