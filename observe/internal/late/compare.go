package late

import (
	"cmp"
	"slices"
	"time"
)

// Comparison is a step of all ranks. It may be used for one step after the other.
type Comparison struct {
	Samples []Sample
	Behind  []time.Duration // the rank in the middle, of two the first: how much later each was

	longest time.Duration // of the ranks' times
	caused  []float64     // nanoseconds for which others stood in collectives for a rank
	order   []int         // of ranks, by the time that they were busy
	waits   []time.Duration
}

// Compare takes the numbers of all ranks, which end with what [Sample.Put] has returned.
func (c *Comparison) Compare(told [][]float64) {
	c.Samples, c.order, c.longest = c.Samples[:0], c.order[:0], 0
	for r, numbers := range told {
		s := Get(numbers[len(numbers)-Numbers:])
		c.Samples, c.order = append(c.Samples, s), append(c.order, r)
		c.longest = max(c.longest, s.Time)
	}
	slices.SortStableFunc(c.order, func(a, b int) int {
		return cmp.Compare(c.Samples[a].busy(), c.Samples[b].busy())
	})
	n := len(told)
	c.Behind, c.caused = slices.Grow(c.Behind[:0], n)[:n], slices.Grow(c.caused[:0], n)[:n]
	c.blame(c.Samples[c.order[(n-1)/2]].busy())
}

// blame divides the time in which ranks wait among those for which they do: as long as some are
// ready and some are not, those that are not share it. A rank may also be late in the middle of a
// collective; that, the others have seen.
func (c *Comparison) blame(middle time.Duration) {
	before, share, n := c.Samples[c.order[0]].busy(), 0.0, len(c.order)
	for i, r := range c.order {
		busy := c.Samples[r].busy()
		share += float64(busy-before) * float64(i) / float64(n-i)
		behind, caused := c.seen(r)
		c.caused[r], c.Behind[r] = max(share, caused), max(busy-middle, behind, 0)
		before = busy
	}
}

// seen returns for how long the other rank in the middle has waited for a rank, and all together.
func (c *Comparison) seen(rank int) (behind time.Duration, caused float64) {
	c.waits = c.waits[:0]
	for r := range c.Samples {
		if s := &c.Samples[r]; r != rank && s.For == rank {
			c.waits = append(c.waits, s.Waited)
			caused += float64(s.Waited)
		}
	}
	others := len(c.Samples) - 1
	if len(c.waits) <= others/2 {
		return 0, caused
	}
	slices.Sort(c.waits)
	return c.waits[len(c.waits)-1-others/2], caused
}
