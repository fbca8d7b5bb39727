package models

import (
	"cmp"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"

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

// draw chooses a token by its logit.
func (s Sampling) draw(logits []float32, r *rand.Rand) (int, error) {
	best := 0
	for i, x := range logits {
		if x > logits[best] || logits[best] != logits[best] {
			best = i
		}
	}
	if x := float64(logits[best]); math.IsNaN(x) || math.IsInf(x, 0) {
		return 0, fmt.Errorf("the largest logit is %v", x)
	}
	if s.Temperature == 0 {
		return best, nil
	}
	c := candidates{make([]float64, len(logits)), make([]int, len(logits))}
	total := 0.0
	for i, x := range logits {
		c.tokens[i] = i
		if w := math.Exp(float64(x-logits[best]) / s.Temperature); w > 0 { // and not NaN
			c.weights[i] = w
			total += w
		}
	}
	k, p := min(cmp.Or(s.TopK, len(logits)), len(logits)), cmp.Or(s.TopP, 1)
	tokens := c.tokens
	if k < len(tokens) || p < 1 {
		tokens, total = c.likeliest(k, p, total)
	}
	at := r.Float64() * total
	for _, token := range tokens {
		if at -= c.weights[token]; at < 0 {
			return token, nil
		}
	}
	return best, nil // of a sum that is rounded
}

// candidates are tokens and their weights, which are by token.
type candidates struct {
	weights []float64
	tokens  []int
}

// likeliest returns the k likeliest tokens, and of these the fewest that have a share p of their
// weight, the likeliest first, with their weight. total is the weight of all.
func (c *candidates) likeliest(k int, p, total float64) (tokens []int, weight float64) {
	all := len(c.tokens)
	for i := all/2 - 1; i >= 0; i-- { // a heap
		c.sink(i, all)
	}
	share, n := p*total, 0
	if k < all {
		share = math.Inf(1)
	}
	for ; n < k && weight < share; n++ {
		weight += c.take(all - n)
	}
	if k < all {
		total = weight
	}
	tokens, weight = c.tokens[all-n:], 0
	slices.Reverse(tokens)
	for i, token := range tokens {
		if weight += c.weights[token]; weight >= p*total {
			return tokens[:i+1], weight
		}
	}
	return tokens, weight
}

// take moves the likeliest of n tokens of the heap behind the others, and returns its weight.
func (c *candidates) take(n int) float64 {
	c.tokens[0], c.tokens[n-1] = c.tokens[n-1], c.tokens[0]
	c.sink(0, n-1)
	return c.weights[c.tokens[n-1]]
}

// sink makes tokens i to n a heap if those behind i are.
func (c *candidates) sink(i, n int) {
	before := func(a, b int) bool { // equal ones in the order of their numbers
		x, y := c.tokens[a], c.tokens[b]
		return c.weights[x] > c.weights[y] || c.weights[x] == c.weights[y] && x < y
	}
	for {
		child := 2*i + 1
		if child >= n {
			return
		}
		if child+1 < n && before(child+1, child) {
			child++
		}
		if !before(child, i) {
			return
		}
		c.tokens[i], c.tokens[child] = c.tokens[child], c.tokens[i]
		i = child
	}
}
