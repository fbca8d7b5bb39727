package models

import (
	"cmp"
	"fmt"
	"math"
	"math/rand/v2"

	"github.com/euryale-ml/euryale/backend"
)

// Sampling says how the next token is chosen. The zero value takes the likeliest one, until the
// context is full.
type Sampling struct {
	// Temperature divides the logits. 0 takes the likeliest token, the first of equal ones.
	Temperature float64
	// TopK leaves the K likeliest tokens; 0 leaves all.
	TopK int
	// TopP leaves, of those, the fewest tokens whose probabilities add up to P; 0 and 1 leave all.
	TopP float64
	Seed uint64
	// Stop are tokens that end a row. They are not given to the caller.
	Stop []int
	Max  int // tokens of a row; 0 is as many as the context has room for
}

func (s Sampling) check() error {
	if !(s.Temperature >= 0) || math.IsInf(s.Temperature, 1) || s.TopK < 0 || !(s.TopP >= 0 &&
		s.TopP <= 1) || s.Max < 0 {
		return fmt.Errorf("%w: temperature %v, top-k %d, top-p %v, at most %d tokens",
			backend.ErrArgument, s.Temperature, s.TopK, s.TopP, s.Max)
	}
	return nil
}

// likeliest returns the token of the largest logit, the first of equal ones.
func likeliest(logits []float32) (int, error) {
	best := 0
	for i, x := range logits {
		if x > logits[best] || logits[best] != logits[best] {
			best = i
		}
	}
	return best, finite(logits[best])
}

// finite returns an error for a largest logit that is not.
func finite(largest float32) error {
	if x := float64(largest); math.IsNaN(x) || math.IsInf(x, 0) {
		return fmt.Errorf("the largest logit is %v", x)
	}
	return nil
}

// draw chooses a token by its logit.
func (s Sampling) draw(logits []float32, r *rand.Rand) (int, error) {
	best, err := likeliest(logits)
	if err != nil || s.Temperature == 0 {
		return best, err
	}
	k, p := min(cmp.Or(s.TopK, len(logits)), len(logits)), cmp.Or(s.TopP, 1)
	c := largest(logits, k, logits[best])
	n, total := 0, 0.0
	for _, x := range c {
		if x.weight = math.Exp(float64(x.logit) / s.Temperature); x.weight > 0 {
			c[n] = x
			n++
			total += x.weight
		}
	}
	c = c[:n]
	if k == len(logits) && p == 1 {
		at := r.Float64() * total
		for _, x := range c {
			if at -= x.weight; at < 0 {
				return x.token, nil
			}
		}
		return best, nil // of a sum that is rounded
	}
	if p < 1 {
		c = c.first(len(c), p*total)
		total = 0
		for _, x := range c {
			total += x.weight
		}
	}
	c = c.first(len(c), r.Float64()*total)
	return c[len(c)-1].token, nil
}

// candidate is a token that may be drawn.
type candidate struct {
	weight float64
	logit  float32 // less the largest one
	token  int
}

// before reports whether a is likelier than b: equal ones come in the order of their numbers.
func (a candidate) before(b candidate) bool {
	return a.logit > b.logit || a.logit == b.logit && a.token < b.token
}

type candidates []candidate

// largest returns the k likeliest tokens, without weights: in the order of their numbers if these
// are all. It keeps up to twice as many, so that one pass finds them.
func largest(logits []float32, k int, most float32) candidates {
	c, floor := make(candidates, 0, min(2*k, len(logits))), float32(math.Inf(-1))
	for token, x := range logits {
		x -= most
		if !(x > floor) { // or NaN
			continue
		}
		if len(c) == 2*k {
			c = c.first(k, math.Inf(1))
			if floor = c[k-1].logit; !(x > floor) {
				continue
			}
		}
		c = append(c, candidate{0, x, token})
	}
	if k < len(logits) {
		c = c.first(k, math.Inf(1))
	}
	return c
}

// first returns the k likeliest candidates, or fewer that have a weight together, with the least
// likely one at the end. It moves them to the front by parting as quicksort does, but goes on in
// one part alone.
func (c candidates) first(k int, weight float64) candidates {
	lo, hi := 0, len(c)
	for hi-lo > 1 {
		at, sum := c[lo:hi].part()
		at += lo
		switch {
		case at-lo >= k || sum >= weight:
			hi = at
		case at-lo+1 >= k || sum+c[at].weight >= weight:
			return c[:at+1]
		default:
			k, weight = k-(at-lo+1), weight-(sum+c[at].weight)
			lo = at + 1
		}
	}
	return c[:hi]
}

// part moves what is likelier than one candidate before that. It returns the candidate's place, and
// the weight of what comes before.
func (c candidates) part() (at int, sum float64) {
	last, middle := len(c)-1, len(c)/2
	if c[middle].before(c[0]) {
		c[0], c[middle] = c[middle], c[0]
	}
	if c[last].before(c[middle]) {
		c[last], c[middle] = c[middle], c[last]
	}
	if c[middle].before(c[0]) {
		c[0], c[middle] = c[middle], c[0]
	}
	c[middle], c[last] = c[last], c[middle] // the median of three
	pivot := c[last]
	for i, x := range c[:last] {
		if x.before(pivot) {
			c[i], c[at] = c[at], x
			sum += x.weight
			at++
		}
	}
	c[last], c[at] = c[at], pivot
	return at, sum
}
