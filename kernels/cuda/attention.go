package cuda

import (
	"fmt"
	"math"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/kernels"
)

// headSizes are the head sizes that attention.cu has kernels for. Other heads are padded in shared
// memory.
var headSizes = map[backend.DType][]int{
	backend.F64:  {64, 256},
	backend.F32:  {64, 128, 256},
	backend.BF16: {32, 64, 128, 256},
}

// attentionRows is how many queries, or keys, a block has: see attention.cu.
var attentionRows = map[backend.DType]int{backend.F64: 16, backend.F32: 32, backend.BF16: 64}

// attentionThreads is how many threads a block of attention.cu has.
const attentionThreads = 128

// Attention computes what [kernels.Attention] says: on tensor cores for bf16 from compute
// capability 8.0 on. Scores are not kept: it needs no memory besides the results.
//
// Errors: those of [kernels.Check]; [backend.ErrUnsupported] for heads of more than 256 elements.
func (k Kernels) Attention(a kernels.Attention) error {
	c, err := attentionCall("attention", &a, check.Attention(a), a.Queries)
	if err != nil {
		return err
	}
	c.rowsOf(a.Y)
	c.pass(word(a.LSE))
	c.rowsOf(a.Q, a.K, a.V)
	c.heads(&a)
	return k.launcher.Launch(c)
}

// AttentionGrad computes what [kernels.AttentionGrad] says, in two launches without atomics.
//
// Errors: as those of Attention.
func (k Kernels) AttentionGrad(a kernels.AttentionGrad) error {
	ofQ, err := attentionCall("attentiongradq", &a.Attention, check.AttentionGrad(a), a.Queries)
	if err != nil {
		return err
	}
	ofQ.rowsOf(a.DQ)
	ofQ.pass(word(a.Sums))
	ofQ.rowsOf(a.Y)
	ofQ.pass(word(a.LSE))
	ofQ.rowsOf(a.Q, a.K, a.V, a.DY)
	ofQ.heads(&a.Attention)
	ofKV, err := attentionCall("attentiongradkv", &a.Attention, nil, a.Keys)
	if err != nil {
		return err
	}
	ofKV.rowsOf(a.DK, a.DV)
	ofKV.pass(word(a.LSE), word(a.Sums))
	ofKV.rowsOf(a.Q, a.K, a.V, a.DY)
	ofKV.heads(&a.Attention)
	if err := k.launcher.Launch(ofQ); err != nil {
		return err
	}
	return k.launcher.Launch(ofKV)
}

// attentionCall returns the call of a kernel whose blocks share n rows of each head.
func attentionCall(verb string, a *kernels.Attention, wrong error, n int) (Launch, error) {
	if wrong != nil {
		return Launch{}, wrong
	}
	if f := a.Filled(); f.Group > 1 || f.ValueSize != f.Size || f.SoftCap > 0 ||
		f.Mask.Buffer.Len() > 0 || f.Lengths.Len() > 0 {
		return Launch{}, fmt.Errorf("%w: attention with groups of heads, values of another width, "+
			"a soft cap, a mask or lengths on a device", backend.ErrUnsupported)
	}
	d := a.Y.Buffer.DType()
	for _, size := range headSizes[d] {
		if a.Size <= size {
			grid := Size{uint32(over(n, attentionRows[d])), uint32(min(a.Batch*a.Heads, 1<<15))}
			return Launch{Entry: Entry{Verb: verb, Op: fmt.Sprint(size), Type: d.String()},
				Grid: grid, Block: Size{attentionThreads, 1}}, nil
		}
	}
	return Launch{}, fmt.Errorf("%w: attention with heads of %d elements: up to 256 on a device",
		backend.ErrUnsupported, a.Size)
}

func (c *Launch) rowsOf(operands ...kernels.HeadRows) {
	for _, r := range operands {
		c.pass(word(r.Buffer), uint64(r.Batch), uint64(r.Head), uint64(r.Row))
	}
}

func (c *Launch) heads(a *kernels.Attention) {
	causal := uint64(0)
	if a.Causal {
		causal = 1
	}
	c.pass(uint64(a.Batch), uint64(a.Heads), uint64(a.Queries), uint64(a.Keys), uint64(a.Size),
		causal, math.Float64bits(a.Scale))
}
