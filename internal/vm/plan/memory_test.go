package plan

import (
	"slices"
	"testing"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/internal/vm/ir"
	"github.com/euryale-ml/euryale/internal/vm/lower"
	"github.com/euryale-ml/euryale/kernels/fuse"
)

// TestArenaHasNoGapsAroundWhatStays: a residual stays while what is larger comes and goes beside
// it. Large buffers at the lowest places would leave no place below it for one that lives beside
// two of them, as a norm between an MLP and an attention.
func TestArenaHasNoGapsAroundWhatStays(t *testing.T) {
	p := &Plan{Steps: make([]Step, 12)}
	for _, b := range [][3]int{{2, 0, 11}, {3, 1, 3}, {3, 3, 4}, {4, 5, 6}, {1, 6, 8}, {3, 8, 10},
		{3, 10, 11}} {
		p.Buffers = append(p.Buffers, Buffer{Bytes: 1024 * b[0], First: b[1], Last: b[2]})
	}
	if assignOffsets(p); p.ArenaBytes != 1024*8 {
		t.Errorf("the arena has %d bytes, of which %d are in use at a time: %+v", p.ArenaBytes,
			slices.Max(p.usage()), p.Buffers)
	}
}

// layered returns a network of so many layers of a width, and the updates of its weights. Each
// gradient is alone in its bucket.
func layered(layers, width int) (*program, []lower.Update) {
	p, weights, x := &program{}, []ir.ID{}, []ir.ID{}
	square := ir.Of(width, width)
	x = append(x, p.input(0, width, width))
	for i := range layers {
		weights = append(weights, p.input(1+i, width, width))
		x = append(x, p.unary(fuse.Tanh, p.add(ir.MatMul{}, square, x[i], weights[i])))
	}
	var updates []lower.Update
	dy := p.unary(fuse.Exp, x[layers])
	for i, w := range slices.Backward(weights) {
		dw := p.add(ir.MatMul{TransA: true}, square, x[i], dy)
		updates = append(updates, lower.Update{Input: 1 + i, Gradient: dw, Kept: 1,
			Bucket: layers - i, Rule: descent})
		dy = p.unary(fuse.Exp, p.add(ir.MatMul{TransB: true}, square, dy, w))
	}
	p.Results = []ir.ID{p.add(ir.Reduce{Op: backend.Sum, Axes: ir.Of(0, 1)}, ir.Of(), dy)}
	p.Precision = ir.BF16
	return p, updates
}

// TestValuesLieWhereGradientsWillBe: those in BF16, such as copies of weights, that are read for
// the last time before a gradient is computed lie in its memory. Not if gradients stay from run to
// run, or no ranks exchange them.
func TestValuesLieWhereGradientsWillBe(t *testing.T) {
	const layers, width = 5, 16
	arena := map[string]int{}
	for name, test := range map[string]struct {
		there  int
		change func(s *lower.Solver)
	}{
		"exchanged": {layers - 1, func(*lower.Solver) {}},
		"of one rank": {0, func(s *lower.Solver) {
			for i := range s.Updates {
				s.Updates[i].Bucket = 0
			}
		}},
		"several": {0, func(s *lower.Solver) { s.Accumulation.Runs = 2 }},
		"apart":   {0, func(s *lower.Solver) { s.Accumulation.Apart = true }},
	} {
		p, updates := layered(layers, width)
		solver := lower.Solver{Updates: updates}
		test.change(&solver)
		planned, err := Trained(&p.Program, solver)
		if err == nil {
			err = planned.Doubt
		}
		require.That(t, err == nil, "%s: %v", name, err)
		there := 0
		for _, b := range planned.Buffers {
			if b.Kind == Gradient && b.DType == backend.BF16 {
				there++
			}
		}
		require.Check(t, there == test.there, "%s: %d lie there, want %d:\n%v", name, there,
			test.there, planned)
		arena[name] = planned.ArenaBytes
	}
	require.Check(t, arena["exchanged"] < arena["apart"], "the arenas are %v", arena)
}

// TestVerifyFindsValuesThatGradientsOverwrite: a value may not lie in the memory of a gradient that
// is computed before it is read, or while it is.
func TestVerifyFindsValuesThatGradientsOverwrite(t *testing.T) {
	p, updates := layered(5, 16)
	planned := require.Value(New(&p.Program, updates...))(t)
	for i, b := range planned.Buffers {
		if b.Kind != Gradient || b.DType != backend.BF16 {
			continue
		}
		broken := *planned
		broken.Buffers = slices.Clone(planned.Buffers)
		broken.Buffers[i].Index = 0 // the first that is computed
		require.Fails(t, "Verify", Verify(&broken), "over")
	}
}

// TestLargestHasEachMemoryOnce: a value in the memory of a gradient takes none.
func TestLargestHasEachMemoryOnce(t *testing.T) {
	p, updates := layered(5, 16)
	planned := require.Value(New(&p.Program, updates...))(t)
	gradients := 0
	for _, b := range planned.Largest(len(planned.Buffers)) {
		if b.Kind != Gradient {
			continue
		}
		if gradients++; b.DType == backend.BF16 {
			t.Errorf("it has %+v", b)
		}
	}
	require.Check(t, gradients == len(updates), "it has the memory of %d gradients, want %d",
		gradients, len(updates))
}
