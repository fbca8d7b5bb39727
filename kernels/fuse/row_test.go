package fuse_test

import (
	"math"
	"math/rand/v2"
	"os"
	"strings"
	"testing"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/testing/fusetest"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/kernels/fuse"
)

// rowPrograms are layers that fold rows.
var rowPrograms = map[string]func(d backend.DType, rows, n int) *fuse.Program{
	"softmax": fusetest.SoftMax, "layer norm": fusetest.LayerNorm,
	"layer norm gradient": fusetest.LayerNormGrad, "cross-entropy": fusetest.CrossEntropy,
}

// Rows of a few threads, of a warp, of a block, of the largest block, and longer than threads can
// keep.
func TestRowsOfAllLengths(t *testing.T) {
	long := os.Getenv("EURYALE_FULL") != ""
	for name, program := range rowPrograms {
		for seed, shape := range [][2]int{{3, 1}, {40, 2}, {300, 5}, {9, 32}, {9, 33}, {5, 128},
			{3, 129}, {3, 1000}, {2, 4096}, {2, 5001}, {1, 9000}, {1, 16388}, {1, 17001}} {
			for _, d := range []backend.DType{backend.F32, backend.F64, backend.BF16} {
				if d != backend.F32 && shape[1] > 200 && !long {
					continue // the machine is slow
				}
				p := program(d, shape[0], shape[1])
				t.Run(name, func(t *testing.T) {
					for _, vectors := range []bool{false, true} {
						if shape[1] > 1000 && vectors != (seed%2 == 0) && !long {
							continue // shorter rows go both ways
						}
						emulate(t, fusetest.New(rand.New(rand.NewPCG(uint64(seed), 6)), p), vectors,
							capability(seed))
					}
					run(t, fusetest.New(rand.New(rand.NewPCG(uint64(seed), 6)), p))
				})
			}
		}
	}
}

// Outputs are folded across rows: of a part of a block, of several blocks, and of blocks that have
// several rows.
func TestRowsAreFoldedAcross(t *testing.T) {
	shapes := [][2]int{{3, 1}, {1, 7}, {90, 5}, {20, 260}, {3, 1000}}
	if os.Getenv("EURYALE_FULL") != "" {
		shapes = append(shapes, [2]int{1070, 1000}, [2]int{3200, 33})
	}
	for seed, shape := range shapes {
		for _, d := range []backend.DType{backend.F32, backend.F64, backend.BF16} {
			if d != backend.F32 && shape[0]*shape[1] > 500 {
				continue // the machine is slow
			}
			p := fusetest.LayerNormGrads(d, shape[0], shape[1])
			for _, vectors := range []bool{false, true} {
				emulate(t, fusetest.New(rand.New(rand.NewPCG(uint64(seed), 8)), p), vectors,
					capability(seed))
			}
			run(t, fusetest.New(rand.New(rand.NewPCG(uint64(seed), 8)), p))
		}
	}
}

// A softmax adds up to one, on the host and on a device.
func TestSoftMaxOfRows(t *testing.T) {
	const rows, n = 3, 2000
	p := fusetest.SoftMax(backend.F32, rows, n)
	x, y := make([]float32, rows*n), make([]float32, rows*n)
	for i := range x {
		x[i] = float32(math.Sin(float64(i)) * 10)
	}
	loop := require.Value(fuse.Host(p, nil))(t)
	require.NoError(t, loop.Run([]backend.Buffer{backend.Of(y)}, []backend.Buffer{backend.Of(x)},
		backend.Buffer{}))
	for row := range rows {
		sum := 0.0
		for _, e := range y[row*n : (row+1)*n] {
			sum += float64(e)
		}
		require.Check(t, math.Abs(sum-1) <= 1e-5, "row %d adds up to %v", row, sum)
	}
}

func TestWrongRowsAreRefused(t *testing.T) {
	for name, build := range map[string]func(p *fuse.Program){
		"no axis": func(p *fuse.Program) {
			p.Shape = nil
			p.Store(p.Do(fuse.SumRow, p.Const(backend.F32, 1)), backend.F32)
		},
		"another fold": func(p *fuse.Program) {
			p.Reduced = []bool{false, true}
			x := p.Load(backend.F32, 3, 1)
			p.Fold(backend.Sum, p.Do(fuse.Sub, x, p.Do(fuse.MaxRow, x)), backend.F32, 1, 0)
		},
		"a fold across long rows": func(p *fuse.Program) {
			p.Shape, p.Reduced = []int{2, fuse.MaxFoldedRow + 1}, []bool{true, false}
			x := p.Load(backend.F32, p.Shape[1], 1)
			p.Fold(backend.Sum, p.Do(fuse.Sub, x, p.Do(fuse.MaxRow, x)), backend.F32, 0, 1)
		},
		"elements stored once": func(p *fuse.Program) {
			x := p.Load(backend.F32, 3, 1)
			p.Store(p.Do(fuse.Sub, x, p.Do(fuse.MaxRow, x)), backend.F32, 1, 0)
		},
		"rows stored at one place": func(p *fuse.Program) {
			p.Store(p.Do(fuse.MaxRow, p.Load(backend.F32, 3, 1)), backend.F32, 0, 0)
		},
	} {
		p := &fuse.Program{Shape: []int{2, 3}}
		build(p)
		require.Fails(t, name, p.Check(), backend.ErrArgument)
	}
}

// What only the values behind a fold need is on its way while rows are folded; gains and what is
// folded are not asked for twice.
func TestLateOperandsOfRowsArePrefetched(t *testing.T) {
	const n = 256
	p := &fuse.Program{Shape: []int{8, n}}
	x, late, gain := p.Load(backend.F32, n, 1), p.Load(backend.F32, n, 1), p.Load(backend.F32, 0, 1)
	p.Store(p.Do(fuse.Add, p.Do(fuse.Mul, p.Do(fuse.Sub, x, p.Do(fuse.SumRow, x)), gain), late),
		backend.F32, n, 1)
	k := require.Value(fuse.PTX(p, true, 80))(t)
	if got, want := strings.Count(k.Text, "prefetch.global.L2"),
		strings.Count(k.Text, "ld.global.v4.f32")/3; got != want || want == 0 {
		t.Errorf("%d prefetches for %d vectors of an operand", got, want)
	}
}
