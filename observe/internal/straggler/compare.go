package straggler

import (
	"cmp"
	"slices"
	"time"
)

// Sample is what a rank tells of a step.
type Sample struct {
	Process int64         // the same for ranks that are goroutines of one process
	Time    time.Duration // from the exchange of the step before, to that of this one
	Exposed time.Duration // of Time: blocked in collectives
	CPU     time.Duration // used by its process
	Heap    int64         // bytes in use
	For     int           // the rank that it has waited for longest, since the last step's sample
	Waited  time.Duration // for that one
	Slower
	Noted [Noted]time.Duration
}

// Numbers is how many numbers a Sample is.
const Numbers = 12 + Noted

// Put returns the sample as [Numbers] numbers, for an exchange.
func (s *Sample) Put() []float64 {
	all := append(make([]float64, 0, Numbers), float64(s.Process), s.Time.Seconds(),
		s.Exposed.Seconds(), s.CPU.Seconds(), float64(s.Heap), float64(s.For), s.Waited.Seconds(),
		s.GPU.Seconds(), s.Layer, s.InIt.Seconds(), float64(s.Bucket), s.OfIt.Seconds())
	for _, d := range s.Noted {
		all = append(all, d.Seconds())
	}
	return all
}

// Get returns the sample of what Put has returned.
func Get(numbers []float64) Sample {
	d := func(i int) time.Duration { return time.Duration(numbers[i] * float64(time.Second)) }
	s := Sample{Process: int64(numbers[0]), Time: d(1), Exposed: d(2), CPU: d(3),
		Heap: int64(numbers[4]), For: int(numbers[5]), Waited: d(6),
		Slower: Slower{d(7), numbers[8], d(9), int(numbers[10]), d(11)}}
	for i := range s.Noted {
		s.Noted[i] = d(Numbers - Noted + i)
	}
	return s
}

// busy is the time that the rank was not in collectives.
func (s *Sample) busy() time.Duration { return max(s.Time-s.Exposed, 0) }

// Comparison is a step of all ranks. It may be used for one step after the other.
type Comparison struct {
	Samples []Sample
	Behind  []time.Duration // the rank in the middle, of two the first: how much later each was

	longest time.Duration // of the ranks' times
	caused  []float64     // nanoseconds for which others were blocked in collectives for a rank
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
