package cuda

import (
	"math"

	"github.com/euryale-ml/euryale/backend"
)

const (
	warp         = 32
	ll128Threads = 512 // in a block, at most
	// ll128Lines are those that ranks send to one in a round, at most: the best number, or
	// near it, at most sizes (bench/results/2026-11/2026-11-21-h200x4-linedtwo.txt), also of
	// Halved calls (bench/results/2026-11/2026-11-21-h200x4-wire.txt).
	ll128Lines = 1 << 16
)

// halves reports whether there is a kernel for a Halved call.
func (x *PeerCall) halves() bool {
	return x.Src.DType() == backend.F32 && (x.Half == backend.F16 || x.Half == backend.BF16)
}

// ll128TwoShot fills in the call of an LL128TwoShot or Halved exchange. A Halved one sends the
// average and the kernel turns it into a sum, so that no 16-bit sum overflows.
func (x *PeerCall) ll128TwoShot(c *Launch, p *Peers) {
	travels, op := x.Src.DType(), x.Op
	if x.Way == Halved {
		travels, op = x.Half, backend.Avg
	}
	c.Entry = Entry{Verb: ways[x.Way].verb, Type: travels.String()}
	some, rounds := p.rounds(over(over(x.Src.Len()*travels.Size(), line), p.Size),
		min(p.Lines, ll128Lines))
	// Small blocks first, so that the lines of a round reach the links from all of them:
	// on four H200, up to 5 % faster than as few blocks as hold them from 512 KiB to 8 MiB;
	// on two, 2 % faster to 3 % slower.
	threads := lineThreads * some
	blocks := min(over(threads, warp), p.most())
	c.Grid = Size{uint32(blocks), 1}
	c.Block = Size{uint32(min(over(over(threads, blocks), warp)*warp, ll128Threads)), 1}
	p.pass(c, op)
	c.pass(word(x.Dst), word(x.Src), uint64(x.Src.Len()), uint64(some), uint64(rounds))
	if x.Way != Halved {
		return
	}
	factor := 1.0
	if x.Op == backend.Sum {
		factor = float64(p.Size)
	}
	c.pass(math.Float64bits(factor))
}
