package cuda

import (
	"fmt"
	"math"
	"strings"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/kernels"
)

// headSizes are the head sizes that attention.cu has kernels for, and limitedSizes those with soft
// caps and masks. Other heads are padded in shared memory.
var (
	headSizes = map[backend.DType][]int{
		backend.F64:  {64, 256},
		backend.F32:  {64, 128, 256},
		backend.BF16: {32, 64, 128, 256},
	}
	limitedSizes = map[backend.DType][]int{
		backend.F64:  {256},
		backend.F32:  {64, 128, 256},
		backend.BF16: {256},
	}
)

// attentionRows is how many queries, or keys, a block has: see attention.cu.
var attentionRows = map[backend.DType]int{backend.F64: 16, backend.F32: 32, backend.BF16: 64}

// attentionThreads is how many threads a block of attention.cu has.
const attentionThreads = 128

// Attention computes what [kernels.Attention] says: on tensor cores for bf16 from compute
// capability 8.0 on, unless it has a soft cap or a mask, or is a gradient of appended queries.
// Scores are not kept: it needs no memory besides the results.
//
// Errors: those of [kernels.Check]; [backend.ErrUnsupported] for heads of more than 256 elements,
// and for lengths and starts of I32.
func (k Kernels) Attention(a kernels.Attention) error {
	wrong := check.Attention(a)
	a = a.Filled()
	c, err := attentionCall("attention", &a, wrong, a.Batch*a.Heads, a.Queries)
	if err != nil {
		return err
	}
	c.rowsOf(a.Y)
	c.pass(word(a.LSE))
	c.rowsOf(a.Q, a.K, a.V)
	c.heads(&a)
	return k.launcher.Launch(c)
}

// fewKeys is how many keys all warps of a block of attention_few.cu have in a step, by the size of
// a head. fewParts is how many blocks can share keys, and bestParts with how many calls are
// fastest.
var fewKeys = map[int]int{64: 4 * 32, 128: 4 * 16}

const fewParts, bestParts = 32, 16

// FitsFewQueries reports whether [Kernels.FewQueries] computes attention: of bf16 without cap and
// mask, whose rows are read in vectors, with up to [FewRows] queries that share a head of keys.
func FitsFewQueries(a kernels.Attention) bool {
	a = a.Filled()
	vectors := true
	for _, r := range []kernels.HeadRows{a.Q, a.K, a.V} {
		vectors = vectors && (r.Batch|r.Head|r.Row)%fewRowsChunk == 0 && r.Buffer.Addr()%vector == 0
	}
	return vectors && a.Y.Buffer.DType() == backend.BF16 && a.SoftCap == 0 &&
		a.Mask.Buffer.Len() == 0 && a.Queries*a.Group <= FewRows &&
		(a.Size|a.ValueSize)%fewRowsChunk == 0 && max(a.Size, a.ValueSize) <= 128 &&
		a.Batch*a.Heads/a.Group <= fewRowsBlocks
}

// PrefersFewQueries reports whether FewQueries is faster than Attention where it fits: for many
// keys, and heads that do not fill the device or are wide
// (bench/results/2026-11/2026-11-30-decode.md).
func PrefersFewQueries(a kernels.Attention) bool {
	a = a.Filled()
	return a.Keys >= 512 && (a.Batch*a.Heads <= fewRowsBlocks/4 ||
		a.Group > 1 && max(a.Size, a.ValueSize) > 64)
}

// FewQueries is Attention where it fits, with the workspace of FewRows.
//
// Errors: as those of Attention.
func (k Kernels) FewQueries(a kernels.Attention, workspace backend.Buffer) error {
	return k.FewQueriesIn(a, workspace, bestParts)
}

// FewQueriesIn is FewQueries with keys in so many parts at most.
func (k Kernels) FewQueriesIn(a kernels.Attention, workspace backend.Buffer, parts int) error {
	wrong := check.Attention(a)
	a = a.Filled()
	shared := a.Batch * a.Heads / a.Group
	c, err := attentionCall("attendfew", &a, wrong, shared, 1)
	if err != nil {
		return err
	}
	size := 64
	if max(a.Size, a.ValueSize) > size {
		size = 128
	}
	c.Entry.Op = fmt.Sprint(size)
	c.Grid.X = uint32(max(min(parts, over(a.Keys, fewKeys[size]), fewRowsBlocks/shared), 1))
	c.rowsOf(a.Y)
	c.pass(word(a.LSE))
	c.rowsOf(a.Q, a.K, a.V)
	c.heads(&a)
	c.pass(word(workspace)+4*fewRowsBlocks, word(workspace))
	return k.launcher.Launch(c)
}

// AttentionGrad computes what [kernels.AttentionGrad] says, in two launches without atomics.
//
// Errors: as those of Attention.
func (k Kernels) AttentionGrad(a kernels.AttentionGrad) error {
	wrong := check.AttentionGrad(a)
	a.Attention = a.Filled()
	ofQ, err := attentionCall("attentiongradq", &a.Attention, wrong, a.Batch*a.Heads, a.Queries)
	if err != nil {
		return err
	}
	ofQ.rowsOf(a.DQ)
	ofQ.pass(word(a.Sums))
	ofQ.rowsOf(a.Y)
	ofQ.pass(word(a.LSE))
	ofQ.rowsOf(a.Q, a.K, a.V, a.DY)
	ofQ.heads(&a.Attention)
	ofKV, err := attentionCall("attentiongradkv", &a.Attention, nil, a.Batch*a.Heads/a.Group,
		a.Keys)
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

// attentionCall returns the call of a kernel whose blocks share n rows of each of the heads.
func attentionCall(verb string, a *kernels.Attention, wrong error, heads, n int) (Launch, error) {
	if wrong != nil {
		return Launch{}, wrong
	}
	for _, b := range []backend.Buffer{a.Lengths, a.Starts} {
		if b.Len() > 0 && b.DType() != backend.I64 {
			return Launch{}, fmt.Errorf("%w: attention with lengths or starts of %v: of i64 only "+
				"on a device", backend.ErrUnsupported, b.DType())
		}
	}
	d := a.Y.Buffer.DType()
	sizes := headSizes[d]
	gradient := strings.HasPrefix(verb, "attentiongrad")
	if a.SoftCap > 0 || a.Mask.Buffer.Len() > 0 || a.Appended && gradient {
		sizes = limitedSizes[d]
	}
	for _, size := range sizes {
		if max(a.Size, a.ValueSize) <= size {
			grid := Size{uint32(over(n, attentionRows[d])), uint32(min(heads, 1<<15))}
			return Launch{Entry: Entry{Verb: verb, Op: fmt.Sprint(size), Type: d.String()},
				Grid: grid, Block: Size{attentionThreads, 1}}, nil
		}
	}
	return Launch{}, fmt.Errorf("%w: attention with heads of %d elements: up to 256 on a device",
		backend.ErrUnsupported, max(a.Size, a.ValueSize))
}

func (c *Launch) rowsOf(operands ...kernels.HeadRows) {
	for _, r := range operands {
		c.pass(word(r.Buffer), uint64(r.Batch), uint64(r.Head), uint64(r.Row))
	}
}

func (c *Launch) heads(a *kernels.Attention) {
	causal := flag(a.Causal)
	if causal > 0 && a.Appended {
		causal = 2
	}
	c.pass(uint64(a.Batch), uint64(a.Heads), uint64(a.Queries), uint64(a.Keys), uint64(a.Size),
		causal, math.Float64bits(a.Scale), uint64(a.Group), uint64(a.ValueSize),
		math.Float64bits(a.SoftCap))
	m, mask, lengths, starts := a.Mask, uint64(0), uint64(0), uint64(0)
	if m.Buffer.Len() > 0 {
		mask = word(m.Buffer)
	}
	if a.Lengths.Len() > 0 {
		lengths = word(a.Lengths)
	}
	if a.Starts.Len() > 0 {
		starts = word(a.Starts)
	}
	c.pass(mask, uint64(m.Batch), uint64(m.Head), uint64(m.Row), uint64(m.Key), uint64(a.Window),
		lengths, starts)
}

func flag(on bool) uint64 {
	if on {
		return 1
	}
	return 0
}
