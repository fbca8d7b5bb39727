package models

import (
	"cmp"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"

	"github.com/euryale-ml/euryale/backend"
)

// Sampling says how the next token is chosen. The zero value does what the folder of the model
// says, as [Model.Sampling] returns it: often it takes the likeliest token, until one of
// [Config].EOS.
type Sampling struct {
	// NoDefaults takes all fields as they stand. Without it, the folder's generation_config.json
	// gives those that are zero: a Temperature only if it has do_sample, and TopK, TopP and MinP
	// only if there is a Temperature.
	NoDefaults bool
	// Greedy takes the likeliest token, whatever the folder says of draws: it needs no Temperature.
	Greedy bool
	// Temperature divides the logits. 0 takes the likeliest token, the first of equal ones.
	Temperature float64
	// TopK leaves the K likeliest tokens; 0 leaves all.
	TopK int
	// TopP leaves, of those, the fewest tokens whose probabilities add up to P; 0 and 1 leave all.
	TopP float64
	// MinP leaves, of those, the tokens that have at least this share of the likeliest one's
	// probability; 0 leaves all.
	MinP float64
	// RepetitionPenalty divides the logits of tokens that the row has, its prompt included, and
	// multiplies negative ones, before all else. 0 and 1 change nothing.
	RepetitionPenalty float64
	Seed              uint64
	// Stop are tokens that end a row, which the caller does not get. nil stands for the folder's,
	// and with NoDefaults for none. A list without elements is none.
	Stop []int
	Max  int // tokens of a row; 0 is as many as the context has room for
	// MaxLength is for the tokens of a prompt and its continuation, if Max is 0.
	MaxLength int
}

func (s Sampling) check() error {
	if s.Greedy && s.Temperature != 0 {
		return fmt.Errorf("%w: Greedy, with a temperature of %v, by which tokens are drawn: leave "+
			"one out", backend.ErrArgument, s.Temperature)
	}
	if !(s.Temperature >= 0 && s.RepetitionPenalty >= 0 && min(s.TopP, s.MinP) >= 0 &&
		max(s.TopP, s.MinP) <= 1) || math.IsInf(s.Temperature+s.RepetitionPenalty, 1) ||
		min(s.TopK, s.Max, s.MaxLength) < 0 {
		return fmt.Errorf("%w: temperature %v, top-k %d, top-p %v, min-p %v, repetition penalty "+
			"%v, at most %d tokens, with the prompt %d: use finite numbers from 0 on, and a top-p "+
			"and min-p of at most 1", backend.ErrArgument, s.Temperature, s.TopK, s.TopP, s.MinP,
			s.RepetitionPenalty, s.Max, s.MaxLength)
	}
	return nil
}

// penalizes reports whether tokens that a row has get other logits.
func (s Sampling) penalizes() bool { return s.RepetitionPenalty != 0 && s.RepetitionPenalty != 1 }

// penalized returns the logits of a row, in its own memory if they change.
func (s Sampling) penalized(logits []float32, t *text) []float32 {
	if !s.penalizes() {
		return logits
	}
	t.logits = append(t.logits[:0], logits...)
	for _, token := range t.tokens {
		if x := logits[token]; x < 0 {
			t.logits[token] = x * float32(s.RepetitionPenalty)
		} else {
			t.logits[token] = x / float32(s.RepetitionPenalty)
		}
	}
	return t.logits
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

// draw chooses a token by its logit. room is for candidates, from call to call.
func (s Sampling) draw(logits []float32, r *rand.Rand, room *candidates) (int, error) {
	best, err := likeliest(logits)
	if err != nil || s.Temperature == 0 {
		return best, err
	}
	k, p := min(cmp.Or(s.TopK, len(logits)), len(logits)), cmp.Or(s.TopP, 1)
	if k == len(logits) && p == 1 && s.MinP == 0 {
		return s.drawOfAll(logits, best, r), nil
	}
	room.keep(logits, k, logits[best])
	c, n, total := *room, 0, 0.0
	for _, x := range c {
		if x.weight = s.weight(x.logit); x.weight > 0 {
			c[n] = x
			n++
			total += x.weight
		}
	}
	if c = c[:n]; p < 1 {
		c = c.first(n, p*total)
	}
	total, n = 0, 0
	for _, x := range c {
		if x.weight >= s.MinP { // the likeliest one has 1
			c[n] = x
			n++
			total += x.weight
		}
	}
	c = c[:n]
	c = c.first(n, r.Float64()*total)
	return int(c[len(c)-1].token), nil
}

// drawOfAll is draw without top-k and top-p. It computes weights twice, which takes less time than
// storing them.
func (s Sampling) drawOfAll(logits []float32, best int, r *rand.Rand) int {
	total := 0.0
	for _, x := range logits {
		if w := s.weight(x - logits[best]); w > 0 { // and not NaN
			total += w
		}
	}
	at := r.Float64() * total
	for token, x := range logits {
		if w := s.weight(x - logits[best]); w > 0 {
			if at -= w; at < 0 {
				return token
			}
		}
	}
	return best // of a sum that is rounded
}

// weight returns a number proportional to the probability of a token, by its logit less the
// largest.
func (s Sampling) weight(logit float32) float64 {
	return math.Exp(float64(logit) / s.Temperature)
}

// candidate is a token that may be drawn.
type candidate struct {
	weight float64
	logit  float32 // less the largest one
	token  int32
}

// before reports whether a is likelier than b: equal ones come in the order of their numbers.
func (a candidate) before(b candidate) bool {
	return a.logit > b.logit || a.logit == b.logit && a.token < b.token
}

type candidates []candidate

// keep makes c the k likeliest tokens, without weights. It takes up to twice as many, so that one
// pass finds them.
func (c *candidates) keep(logits []float32, k int, most float32) {
	x, floor := slices.Grow((*c)[:0], min(2*k, len(logits))), float32(math.Inf(-1))
	for token, logit := range logits {
		if logit -= most; !(logit > floor) { // or NaN
			continue
		}
		if len(x) == 2*k {
			x = x.first(k, math.Inf(1))
			if floor = x[k-1].logit; !(logit > floor) {
				continue
			}
		}
		x = append(x, candidate{0, logit, int32(token)})
	}
	*c = x.first(k, math.Inf(1))
}

// first returns the k likeliest candidates, or fewer that together have a weight, with the least
// likely one at the end. It moves them to the front by partitioning like quicksort, but continues
// in only one part.
func (c candidates) first(k int, weight float64) candidates {
	if len(c) <= k && math.IsInf(weight, 1) {
		return c
	}
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

// part moves what is likelier than one candidate in front of it. It returns the candidate's place,
// and the weight of what comes before.
func (c candidates) part() (at int, sum float64) {
	last, middle := len(c)-1, len(c)/2
	for _, p := range [][2]int{{0, middle}, {middle, last}, {0, middle}} { // sorts three
		if c[p[1]].before(c[p[0]]) {
			c[p[0]], c[p[1]] = c[p[1]], c[p[0]]
		}
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
