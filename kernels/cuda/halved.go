package cuda

import (
	"math"

	"github.com/euryale-ml/euryale/backend"
)

const halvedThreads = 512 // in a block

// halves reports whether there is a kernel for a Halved call.
func (x *Exchange) halves() bool {
	return x.Src.DType() == backend.F32 && (x.Half == backend.F16 || x.Half == backend.BF16)
}

// halved is fill of a Halved call. An average travels; the kernel makes a sum of it.
func (x *Exchange) halved(c *Call, p *Peers) {
	c.Entry = Entry{Verb: ways[Halved].verb, Type: x.Half.String()}
	some, rounds := p.rounds(over(over(x.Src.Len()*x.Half.Size(), line), p.Size))
	c.Grid, c.Block = Size{uint32(min(over(lineThreads*some, halvedThreads), p.most())), 1}, Size{halvedThreads, 1}
	p.pass(c, backend.Avg)
	factor := 1.0
	if x.Op == backend.Sum {
		factor = float64(p.Size)
	}
	c.pass(word(x.Dst), word(x.Src), uint64(x.Src.Len()), uint64(some), uint64(rounds), math.Float64bits(factor))
}
