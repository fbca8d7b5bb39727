package straggler

import (
	"slices"
	"time"
)

// Slower is what of a rank's recorded steps takes longer than it did: see [Level].
type Slower struct {
	GPU    time.Duration // in all, without exchanges
	Layer  float64       // the number of the layer that has become slower by most, 0 for none
	InIt   time.Duration // of that layer
	Bucket int           // likewise, from 1, 0 for none
	OfIt   time.Duration // of the exchange of that bucket, with the wait for other ranks
}

// Level follows how long something takes in each step. The zero value has seen none.
type Level struct {
	last    [sustained]time.Duration
	steps   int
	fastest time.Duration
}

// leastLonger is what of a step something must take longer.
const leastLonger = 0.05

// sustained is for how many steps something must be slower, or must have been faster.
const sustained = 3

// Add adds a step, and returns by how much each of the last ones was slower than the fastest ones
// in a row were; 0 if that is less than a quarter.
func (l *Level) Add(d time.Duration) time.Duration {
	l.last[l.steps%sustained] = d
	if l.steps++; l.steps < sustained {
		return 0
	}
	if most := slices.Max(l.last[:]); l.fastest == 0 || most < l.fastest {
		l.fastest = most
	}
	more := slices.Min(l.last[:]) - l.fastest
	if more < max(leastLate, time.Duration(leastSlower*float64(l.fastest))) {
		return 0
	}
	return more
}

// slower adds to verdicts what takes longer than it did: of GPUs of ranks, stragglers or not, and
// of a bucket.
func (t *Tally) slower(all []Verdict) []Verdict {
	step, most := t.time/t.steps, time.Duration(0)
	matters := func(d time.Duration) bool { return d > 0 && float64(d) >= leastLonger*step }
	// A rank that waits for another one takes longer for a bucket, too, and the other one does not.
	bucket, ofIt := t.ranks[0].slower.Bucket, t.ranks[0].slower.OfIt
	for r := range t.ranks {
		s := &t.ranks[r].slower
		more := max(s.GPU, s.InIt)
		most = max(most, more)
		if ofIt = min(ofIt, s.OfIt); s.Bucket != bucket {
			bucket, ofIt = 0, 0
		}
		if !matters(more) {
			continue
		}
		at := slices.IndexFunc(all, func(v Verdict) bool { return v.Rank == r })
		if at < 0 {
			at = len(all)
			all = append(all, Verdict{Rank: r, Cause: Device, Share: float64(more) / step})
		}
		if all[at].More = more; 2*s.InIt > more {
			all[at].Layer = t.Layer(s.Layer)
		}
	}
	if matters(ofIt) && ofIt >= most {
		all = append(all, Verdict{Rank: AllRanks, Cause: Exchange, Bucket: bucket, More: ofIt,
			Share: float64(ofIt) / step})
	}
	return all
}
