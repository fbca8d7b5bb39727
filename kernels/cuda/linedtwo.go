package cuda

import (
	"math"

	"github.com/euryale-ml/euryale/backend"
)

const (
	linedTwoThreads = 512 // in a block
	// linedTwoLines are those that ranks send to one in a round, at most. Of 8192 to
	// 131072, this many were the best or within 2 % of it for Halved calls, from 1 to 256
	// MiB, on two H200 and on four; 131072 took 12 to 20 % longer for 16 MiB (2026-11-21).
	linedTwoLines = 1 << 16
)

// halves reports whether there is a kernel for a Halved call.
func (x *Exchange) halves() bool {
	return x.Src.DType() == backend.F32 && (x.Half == backend.F16 || x.Half == backend.BF16)
}

// linedTwo is fill of a LinedTwoShot and of a Halved call. Of the latter, an average
// travels; the kernel makes a sum of it.
func (x *Exchange) linedTwo(c *Call, p *Peers) {
	travels, op := x.Src.DType(), x.Op
	if x.Way == Halved {
		travels, op = x.Half, backend.Avg
	}
	c.Entry = Entry{Verb: ways[x.Way].verb, Type: travels.String()}
	some, rounds := p.rounds(over(over(x.Src.Len()*travels.Size(), line), p.Size), min(p.Lines, linedTwoLines))
	c.Grid, c.Block = Size{uint32(min(over(lineThreads*some, linedTwoThreads), p.most())), 1}, Size{linedTwoThreads, 1}
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
