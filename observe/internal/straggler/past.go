package straggler

import "time"

// AllRanks is the Rank of a Verdict on all ranks, compared with their own past.
const AllRanks = -1

// Past is the fastest that a training has been.
type Past struct{ fastest Tally }

const (
	// leastSlower is by how much the last steps must be slower than the fastest ones: on a shared
	// machine the same steps differ by a tenth.
	leastSlower = 0.25
	// filled is how much of its steps a tally of the last ones must have.
	filled = 0.8
)

// Add looks at a tally of the last steps after each step.
func (p *Past) Add(recent *Tally) {
	f := &p.fastest
	if recent.steps >= filled/(1-recent.Keep) &&
		(f.steps == 0 || recent.time/recent.steps < f.time/f.steps) {
		*f = recent.Copy()
	}
}

// Verdict returns why steps have become slower on all ranks, if they have.
func (p *Past) Verdict(recent *Tally) (v Verdict, slower bool) {
	f := &p.fastest
	if f.steps == 0 || recent.time/recent.steps < (1+leastSlower)*f.time/f.steps {
		return v, false
	}
	more := func(of func(s *sums) float64) (mean float64) { // a step, on each rank
		for r := range recent.ranks {
			mean += of(&recent.ranks[r])/recent.steps - of(&f.ranks[r])/f.steps
		}
		return mean / float64(len(recent.ranks))
	}
	step := recent.time / recent.steps
	late := step - f.time/f.steps
	v = Verdict{Rank: AllRanks, Late: time.Duration(late), Share: late / step, Cause: Waiting,
		Heap: recent.ranks[0].heap}
	if more(func(s *sums) float64 { return s.cpu }) >= late/2 {
		v.Cause = Computation
	}
	most := leastCause * late
	for c := range Noted {
		if x := more(func(s *sums) float64 { return s.noted[c] }); x > most {
			most, v.Cause = x, Cause(c)
		}
	}
	return v, true
}
