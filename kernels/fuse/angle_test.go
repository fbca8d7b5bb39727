package fuse_test

import (
	"math"
	"math/rand/v2"
	"testing"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/testing/fusetest"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/kernels/fuse"
)

// TestSinesOfLargeNumbersAreRight compares sines and cosines of numbers up to the largest ones, on
// the host and of the PTX, with sums of 1400 bits. Some numbers are next to multiples of pi/2.
func TestSinesOfLargeNumbersAreRight(t *testing.T) {
	near := []float64{math.Ldexp(6381956970095103, 797), math.MaxFloat64, 0x1p1023, 0x1p31, 1e22,
		1e300}
	r := rand.New(rand.NewPCG(3, 4))
	for range 300 {
		near = append(near, math.Ldexp(1+r.Float64(), 29+r.IntN(994)))
		near = append(near, math.Ldexp(1+r.Float64(), 28+r.IntN(6)))
	}
	single := []float64{math.MaxFloat32, 0x1p127, 0x1p30, 16367173 * 0x1p72, 12671187 * 0x1p65}
	for range 300 {
		single = append(single, float64(float32(math.Ldexp(1+r.Float64(), 28+r.IntN(99)))))
	}
	for _, d := range []backend.DType{backend.F32, backend.F64} {
		x := near
		if d == backend.F32 {
			x = single
		}
		for i, e := range x {
			if i%2 == 1 {
				x[i] = -e
			}
		}
		x = append(x, math.Inf(1), math.Inf(-1), math.NaN())
		for _, o := range []fuse.Op{fuse.Sin, fuse.Cos} {
			for engine, got := range wavesOf(t, o, d, x) {
				for i, e := range x {
					want := fusetest.Wave(e, o == fuse.Cos)
					if off := units(d, got[i], want); off >= 4 {
						t.Errorf("%v: %v(%v) of %v is %v, want %v", engine, o, e, d, got[i], want)
					}
				}
			}
		}
	}
}

// wavesOf computes one function on each engine.
func wavesOf(t *testing.T, o fuse.Op, d backend.DType, x []float64) map[string][]float64 {
	t.Helper()
	p := &fuse.Program{Shape: []int{len(x)}}
	p.Store(p.Do(o, p.Load(d, 1)), d, 1)
	src, got := backend.Of(x), map[string][]float64{}
	if d == backend.F32 {
		src = backend.Of(singles(x))
	}
	for _, engine := range []string{"host", "ptx"} {
		dst := backend.Of(make([]float64, len(x))).As(d).Slice(0, len(x))
		if engine == "ptx" {
			c := &fusetest.Case{Program: p, Dst: []backend.Buffer{dst}, Src: []backend.Buffer{src}}
			emulate(t, c, true, fuse.Ampere)
		} else {
			loop, err := fuse.Host(p, nil)
			if err == nil {
				err = loop.Run([]backend.Buffer{dst}, []backend.Buffer{src}, backend.Buffer{})
			}
			require.NoError(t, err)
		}
		got[engine] = doubles(dst)
	}
	return got
}

func singles(x []float64) []float32 {
	y := make([]float32, len(x))
	for i, e := range x {
		y[i] = float32(e)
	}
	return y
}

func doubles(b backend.Buffer) []float64 {
	if b.DType() == backend.F64 {
		return backend.View[float64](b)
	}
	var y []float64
	for _, e := range backend.View[float32](b) {
		y = append(y, float64(e))
	}
	return y
}
