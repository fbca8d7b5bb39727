package cuda

import (
	"fmt"
	"math"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/kernels"
)

var _ kernels.Sparse = Kernels{}

// What sparse.cu has.
const (
	selectTile   = threads * 16 // elements of a block
	combineTile  = 8192         // likewise
	cutWords     = 2            // before the words of the tiles
	sampleBins   = 1 << 13
	digitBins    = 2048 + 1024 + 1024
	selectKeeps  = 1
	selectsClips = 2
	selectMay    = 4
)

// A sample of 1 in 1024 elements, 32768 of the 2^25 of a large bucket, says what is
// as large as the k-th, up to a few standard deviations. With twice as many, an H200 takes
// 12 us longer for a top-k of such a bucket, whether of 1 or of 5 %: what fewer of them
// leave as candidates costs less than to read them
// (bench/results/2026-11/2026-11-21-h200-sparse-kernels.txt).
const (
	samples     = 1 << 15
	fewest      = 8 // elements for each sample
	deviations  = 3
	moreSamples = 8
)

// selecting is where a top-k keeps what it needs, in words of 8 bytes.
type selecting struct {
	cut, counts, digits, head, last int // last is where the second cut is
	cleared                         int // all of this
	sample, values, index           int // values and index of the candidates
	words                           int
	room                            int // candidates
	// the rank that a sample's element must have, 0 without a sample
	samples, rank int
}

// tiles returns the blocks of a selection.
func tiles(n int) int { return over(n, selectTile) }

func selectingOf(s *kernels.Selection) selecting {
	n := s.X.Len()
	p := selecting{counts: over(cutWords+tiles(n), 2) * 2} // vectors are read there
	if s.K == 0 {
		p.cleared, p.words = p.counts, p.counts
		return p
	}
	p.samples = min(samples, n/fewest)
	if s.Dense.Len() == 0 && p.samples > 0 {
		p.rank, p.room = sampled(n, s.K, p.samples)
	}
	p.digits = p.counts + sampleBins/2
	p.head = p.digits + digitBins/2
	p.last = p.head + kernels.HeadWords
	p.cleared = p.last + cutWords + tiles(n)
	p.sample = over(p.cleared, 2) * 2 // likewise
	p.values = p.sample + over(p.samples, 4)*2
	p.index = p.values + over(p.room, 2)
	p.words = p.index + over(p.room, 2)
	return p
}

// sampled returns which element of a sample, by magnitude, is below the k-th of n
// with a probability of 0.998 or more, and how many candidates are above it with the
// same one: 0 where that is most of the vector, and a list is no shorter.
func sampled(n, k, samples int) (rank, room int) {
	expected := float64(k) / float64(n) * float64(samples)
	rank = int(math.Ceil(expected+deviations*math.Sqrt(expected))) + moreSamples
	// There may be as many again as half of them that are equal to the rank-th.
	most := 1.5 * (float64(rank) + deviations*math.Sqrt(float64(rank)))
	room = int(most/float64(samples)*float64(n)) + selectTile
	if room > n/2 {
		return 0, 0
	}
	return rank, room
}

// SelectScratch implements [kernels.Sparse].
func (k Kernels) SelectScratch(s *kernels.Selection) int { return 8 * selectingOf(s).words }

// Select implements [kernels.Sparse]. A threshold takes two launches, a top-k ten.
func (k Kernels) Select(s *kernels.Selection) error {
	if err := check.Select(s); err != nil {
		return err
	}
	p := selectingOf(s)
	if err := scratch(s.Scratch, p.words); err != nil {
		return err
	}
	if err := k.clearHead(s, p); err != nil {
		return err
	}
	if s.K == 0 {
		return k.pick(s, s.Out, s.Dense, s.X, p.at(s, p.cut), 0)
	}
	return k.topK(s, p)
}

func scratch(b backend.Buffer, words int) error {
	if b.NBytes() < 8*words || b.Addr()%vector != 0 {
		return fmt.Errorf("%w: select with %d bytes of scratch at %#x: it needs %d, at a "+
			"multiple of %d",
			backend.ErrArgument, b.NBytes(), b.Addr(), 8*words, vector)
	}
	return nil
}

// at is the address of a word of the scratch.
func (p selecting) at(s *kernels.Selection, words int) uint64 {
	return word(s.Scratch) + 8*uint64(words)
}

// clearHead clears the head, and the words that count.
func (k Kernels) clearHead(s *kernels.Selection, p selecting) error {
	above := uint64(s.Above)
	if s.K > 0 && p.rank == 0 {
		above = math.MaxUint32 // no candidates
	}
	c := Launch{Entry: Entry{Verb: "begin", Type: unitTypes[8]}}
	c.Grid, c.Block = Size{blocks(p.cleared, threads), 1}, Size{threads, 1}
	c.pass(word(s.Out.Head), uint64(s.Out.Head.Len()), uint64(s.Fingerprint), word(s.Scratch),
		uint64(p.cleared),
		word(s.Notes), uint64(s.Notes.Len()), above)
	return k.launcher.Launch(c)
}

// pick goes over the vector once, by the cut at an address.
func (k Kernels) pick(s *kernels.Selection, out kernels.Message, dense, x backend.Buffer,
	cut uint64, how uint64) error {
	if s.Saturate {
		how |= selectsClips
	}
	c := Launch{Entry: Entry{Verb: "select", Type: out.Values.DType().String()}}
	c.Grid, c.Block = Size{uint32(tiles(s.X.Len())), 1}, Size{threads, 1}
	c.passMessage(out)
	c.pass(word(dense), word(x), word(s.Residual), uint64(s.X.Len()), how, cut)
	return k.launcher.Launch(c)
}

func (c *Launch) passMessage(m kernels.Message) {
	c.pass(word(m.Head), word(m.Values), word(m.Index), uint64(m.Values.Len()))
}

// topK finds candidates, the k-th of them, and takes those that are larger.
func (k Kernels) topK(s *kernels.Selection, p selecting) error {
	list := p.candidates(s)
	first, last := p.at(s, p.cut), p.at(s, p.last)
	v := s.Residual // after the candidates were found
	if v.Len() == 0 {
		v = s.X
	}
	for _, step := range []func() error{
		func() error { return k.bound(s, p) },
		func() error { return k.pick(s, list, backend.Buffer{}, s.X, first, selectKeeps) },
		func() error { return k.digits(s, p, list, v) },
		func() error { return k.findCutoff(s, p, list) },
		func() error { return k.takeCandidates(s, list, p, last) },
		func() error {
			x := v
			if s.Residual.Len() > 0 {
				x = backend.Buffer{} // it is in the residual
			}
			return k.pick(s, s.Out, s.Dense, x, last, selectMay)
		},
	} {
		if err := step(); err != nil {
			return err
		}
	}
	return nil
}

// candidates is the list of them.
func (p selecting) candidates(s *kernels.Selection) kernels.Message {
	at := func(d backend.DType, words, n int) backend.Buffer {
		return backend.OnDevice(d, uintptr(p.at(s, words)), n)
	}
	return kernels.Message{Head: at(backend.I64, p.head, kernels.HeadWords),
		Values: at(backend.F32, p.values, p.room), Index: at(backend.I32, p.index, p.room)}
}

// bound sets the cut of the candidates.
func (k Kernels) bound(s *kernels.Selection, p selecting) error {
	if p.rank == 0 {
		return nil
	}
	c := Launch{Entry: Entry{Verb: "sample", Type: "f32"}}
	c.Grid, c.Block = Size{blocks(p.samples, threads), 1}, Size{threads, 1}
	c.pass(p.at(s, p.counts), p.at(s, p.sample), word(s.X), word(s.Residual), uint64(s.X.Len()),
		uint64(p.samples), p.at(s, p.cut))
	if err := k.launcher.Launch(c); err != nil {
		return err
	}
	c = oneBlock("bound")
	c.pass(p.at(s, p.cut), p.at(s, p.counts), p.at(s, p.sample), uint64(p.samples), uint64(p.rank))
	return k.launcher.Launch(c)
}

func oneBlock(verb string) Launch {
	return Launch{Entry: Entry{Verb: verb, Type: unitTypes[4]}, Grid: Size{1, 1},
		Block: Size{threads, 1}}
}

// histogramBlocks keep a device busy with a whole vector, and find a list of a
// hundredth of it without much ado.
const histogramBlocks = 512

// digits counts the bits of the candidates, or of all, in three steps.
func (k Kernels) digits(s *kernels.Selection, p selecting, list kernels.Message,
	v backend.Buffer) error {
	for step := range 3 {
		c := Launch{Entry: Entry{Verb: "histogram", Type: unitTypes[4]}}
		c.Grid, c.Block = Size{min(blocks(v.Len(), selectTile), histogramBlocks), 1},
			Size{threads, 1}
		c.pass(p.at(s, p.digits), uint64(step))
		c.passMessage(list)
		c.pass(word(v), uint64(v.Len()), uint64(s.K), p.at(s, p.cut))
		if err := k.launcher.Launch(c); err != nil {
			return err
		}
	}
	return nil
}

func (k Kernels) findCutoff(s *kernels.Selection, p selecting, list kernels.Message) error {
	c := oneBlock("cut")
	c.pass(p.at(s, p.last), p.at(s, p.digits))
	c.passMessage(list)
	c.pass(uint64(s.K), p.at(s, p.cut))
	return k.launcher.Launch(c)
}

// takeCandidates moves candidates to the message.
func (k Kernels) takeCandidates(s *kernels.Selection, list kernels.Message, p selecting,
	cut uint64) error {
	if p.room == 0 {
		return nil
	}
	how := uint64(0)
	if s.Saturate {
		how = selectsClips
	}
	c := Launch{Entry: Entry{Verb: "take", Type: s.Out.Values.DType().String()}}
	c.Grid, c.Block = Size{uint32(tiles(p.room)), 1}, Size{threads, 1}
	c.passMessage(s.Out)
	c.passMessage(list)
	c.pass(word(s.Residual), how, cut)
	return k.launcher.Launch(c)
}

// Combine implements [kernels.Sparse].
func (k Kernels) Combine(dst backend.Buffer, m kernels.Messages, divisor int) error {
	if err := check.Combine(dst, m, divisor); err != nil || dst.Len() == 0 {
		return err
	}
	c := Launch{Entry: Entry{Verb: "combine", Op: m.DType.String(), Type: dst.DType().String()}}
	c.Grid, c.Block = Size{uint32(over(dst.Len(), combineTile)), 1}, Size{threads, 1}
	c.pass(word(dst), uint64(dst.Len()), word(m.All), uint64(m.NBytes), uint64(m.Ranks),
		uint64(m.Values), uint64(m.Index),
		uint64(m.Capacity), uint64(divisor))
	return k.launcher.Launch(c)
}

// NotFinite implements [kernels.Sparse].
func (k Kernels) NotFinite(note, x backend.Buffer) error {
	if err := check.NotFinite(note, x); err != nil {
		return err
	}
	if err := k.Zero(note); err != nil || x.Len() == 0 {
		return err
	}
	c := Launch{Entry: Entry{Verb: "notfinite", Type: x.DType().String()}}
	c.linear(x.NBytes())
	c.pass(word(note), word(x), uint64(x.Len()))
	return k.launcher.Launch(c)
}
