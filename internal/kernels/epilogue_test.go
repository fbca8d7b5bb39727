package kernels

import (
	"sync/atomic"
	"testing"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/internal/workers"
)

// doubling is an epilogue that doubles each element.
type doubling struct {
	data    []float32
	divides bool
	inParts atomic.Int64 // elements
}

func (d *doubling) Divides(int, int) bool { return d.divides }

func (d *doubling) Elements(lo, hi, _ int) {
	for i := range d.data[lo:hi] {
		d.data[lo+i] *= 2
	}
	d.inParts.Add(int64(hi - lo))
}

func (d *doubling) All() {
	for i := range d.data {
		d.data[i] *= 2
	}
}

// TestEpiloguesFollowTheirProduct: each element is finished before it is doubled, once, in parts or
// afterwards.
func TestEpiloguesFollowTheirProduct(t *testing.T) {
	pool := workers.New(2)
	defer pool.Close()
	h := Host{Workers: pool}
	ones := func(n int) backend.Buffer {
		x := make([]float32, n)
		for i := range x {
			x[i] = 1
		}
		return backend.Of(x)
	}
	check := func(what string, d *doubling, inParts bool, err error) {
		t.Helper()
		require.NoError(t, err)
		for i, x := range d.data[1:] {
			if x != d.data[0] || x == 0 {
				t.Fatalf("%s: element %d is %v, and element 0 %v", what, i+1, x, d.data[0])
			}
		}
		if want := map[bool]int{true: len(d.data)}[inParts]; d.inParts.Load() != int64(want) {
			t.Errorf("%s: %d elements are doubled in parts, want %d", what, d.inParts.Load(), want)
		}
	}
	for _, shape := range []struct {
		batch, m, n, k int
		rows           bool // whether parts have whole rows
	}{{1, 64, 128, 64, true}, {70, 13, 33, 17, true}, {1, 600, 32, 100, true}, {1, 96, 640, 96,
		false}} {
		for _, divides := range []bool{true, false} {
			d := &doubling{data: make([]float32, shape.batch*shape.m*shape.n), divides: divides}
			check("product", d, divides && shape.rows, h.Multiply(Product{
				Batch: shape.batch, M: shape.m, N: shape.n, K: shape.k, Alpha: 1, Epilogue: d,
				A: Matrix{Buffer: ones(shape.batch * shape.m * shape.k), Pitch: shape.k,
					Stride: shape.m * shape.k},
				B: Matrix{Buffer: ones(shape.k * shape.n), Pitch: shape.n},
				C: Matrix{Buffer: backend.Of(d.data), Pitch: shape.n, Stride: shape.m * shape.n},
			}))
		}
	}
	for _, images := range []struct {
		side  int
		pass  Pass
		whole bool // whether parts have whole images
	}{{4, Forward, true}, {20, InputGradient, true}, {60, Forward, false}, {4, FilterGradient,
		false}} {
		c := Convolution{
			Images: Images{
				Batch: 20, C: 20, H: images.side, W: images.side, OutH: images.side,
				OutW:    images.side,
				KernelH: 1, KernelW: 1, StrideH: 1, StrideW: 1, DilationH: 1, DilationW: 1,
			},
			Filters: 20, Pass: images.pass, DType: backend.F32,
		}
		x, w, y := c.lengths()
		n := [...][3]int{Forward: {y, x, w}, InputGradient: {x, y, w},
			FilterGradient: {w, x, y}}[images.pass]
		d := &doubling{data: make([]float32, n[0]), divides: true}
		c.Epilogue = d
		check(images.pass.String(), d, images.whole, h.Convolve(c, backend.Of(d.data), ones(n[1]),
			ones(n[2])))
	}
}
