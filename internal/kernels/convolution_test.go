package kernels

import (
	"errors"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/kernels/simd"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/internal/workers"
)

// TestConvolutionIsAProductOfPatches compares all passes with Im2Col, Multiply and Col2Im.
func TestConvolutionIsAProductOfPatches(t *testing.T) {
	c := Convolution{
		Images: Images{Batch: 2, C: 3, H: 7, W: 6, OutH: 4, OutW: 3, KernelH: 3, KernelW: 2,
			PadH: 1, PadW: 2, StrideH: 1, StrideW: 2, DilationH: 2, DilationW: 3},
		Filters: 4, DType: backend.F64,
	}
	nx, nw, ny := c.lengths()
	x, w, dy := make([]float64, nx), make([]float64, nw), make([]float64, ny)
	for n, s := range [][]float64{x, w, dy} {
		for i := range s {
			s[i] = float64((i*(n+3)+i/5)%7 - 3)
		}
	}
	patches, places := make([]float64, c.patches()), c.OutH*c.OutW
	require.NoError(t, (Host{}).Im2Col(backend.Of(patches), backend.Of(x), c.Images))
	matrix := func(data []float64, pitch int, transposed bool) Matrix {
		return Matrix{Buffer: backend.Of(data), Pitch: pitch, Transposed: transposed}
	}
	y, dx, dw := make([]float64, ny), make([]float64, nx), make([]float64, nw)
	for b := range c.Batch { // y = w patches^T, dw += dy patches, dpatches = dy^T w
		of := patches[b*places*c.Columns():][:places*c.Columns()]
		from := b * c.Filters * places
		require.NoError(t, errors.Join(Host{}.Multiply(Product{M: c.Filters, N: places,
			K: c.Columns(), Alpha: 1, A: matrix(w, c.Columns(), false), B: matrix(of, c.Columns(),
				true), C: matrix(y[from:], places, false)}), Host{}.Multiply(Product{M: c.Filters,
			N: c.Columns(), K: places, Alpha: 1, Beta: 1, A: matrix(dy[from:], places, false),
			B: matrix(of, c.Columns(), false), C: matrix(dw, c.Columns(), false)}),
			Host{}.Multiply(Product{M: places, N: c.Columns(), K: c.Filters, Alpha: 1,
				A: matrix(dy[from:], places, true), B: matrix(w, c.Columns(), false), C: matrix(of,
					c.Columns(), false)})))
	}
	require.NoError(t, (Host{}).Col2Im(backend.Of(dx), backend.Of(patches), c.Images))
	for _, test := range []struct {
		pass Pass
		a, b []float64
		want []float64
	}{{Forward, x, w, y}, {InputGradient, dy, w, dx}, {FilterGradient, x, dy, dw}} {
		c.Pass = test.pass
		got := make([]float64, len(test.want))
		require.NoError(t, (Host{}).Convolve(c, backend.Of(got), backend.Of(test.a),
			backend.Of(test.b)))
		require.Check(t, slices.Equal(got, test.want), "%v is %v, want %v", test.pass, got,
			test.want)
	}
}

// plainly computes a convolution with the loops that define it.
func plainly[T float](v *Convolution, dst, a, b []T) {
	clear(dst)
	planes, filters := v.C/v.Parts(), v.Filters/v.Parts()
	for n := range v.Batch * v.Filters * v.OutH * v.OutW {
		image, filter := n/(v.OutW*v.OutH)/v.Filters, n/(v.OutW*v.OutH)%v.Filters
		top, left := n/v.OutW%v.OutH*v.StrideH-v.PadH, n%v.OutW*v.StrideW-v.PadW
		x, weight := (image*v.C+filter/filters*planes)*v.H*v.W, filter*v.Columns()
		for range planes {
			for kh := range v.KernelH {
				h := top + kh*v.DilationH
				for w := left; w < left+v.KernelW*v.DilationW; w += v.DilationW {
					if h >= 0 && h < v.H && w >= 0 && w < v.W {
						switch at := x + h*v.W + w; v.Pass {
						case Forward:
							dst[n] += a[at] * b[weight]
						case InputGradient:
							dst[at] += a[n] * b[weight]
						case FilterGradient:
							dst[weight] += a[at] * b[n]
						}
					}
					weight++
				}
			}
			x += v.H * v.W
		}
	}
}

// convolutions are of one image and of several in a unit, of bands of rows, with padding, strides
// and dilations, with places that see no pixel and pixels that no place sees.
var convolutions = []Convolution{
	{Images: Images{Batch: 3, C: 2, H: 5, W: 7, OutH: 5, OutW: 7, KernelH: 3, KernelW: 3, PadH: 1,
		PadW: 1, StrideH: 1, StrideW: 1, DilationH: 1, DilationW: 1}, Filters: 5},
	{Images: Images{Batch: 17, C: 3, H: 7, W: 7, OutH: 7, OutW: 7, KernelH: 3, KernelW: 3, PadH: 1,
		PadW: 1, StrideH: 1, StrideW: 1, DilationH: 1, DilationW: 1}, Filters: 13},
	{Images: Images{Batch: 2, C: 3, H: 7, W: 6, OutH: 4, OutW: 3, KernelH: 3, KernelW: 2, PadH: 1,
		PadW: 2, StrideH: 1, StrideW: 2, DilationH: 2, DilationW: 3}, Filters: 4},
	{Images: Images{Batch: 2, C: 1, H: 9, W: 40, OutH: 3, OutW: 38, KernelH: 3, KernelW: 3,
		StrideH: 3, StrideW: 1, DilationH: 1, DilationW: 1}, Filters: 2},
	{Images: Images{Batch: 1, C: 40, H: 16, W: 17, OutH: 17, OutW: 18, KernelH: 8, KernelW: 8,
		PadH: 4, PadW: 4, StrideH: 1, StrideW: 1, DilationH: 1, DilationW: 1}, Filters: 1},
	{Images: Images{Batch: 2, C: 2, H: 2, W: 3, OutH: 6, OutW: 7, KernelH: 1, KernelW: 1, PadH: 2,
		PadW: 2, StrideH: 1, StrideW: 1, DilationH: 1, DilationW: 1}, Filters: 2},
	{Images: Images{Batch: 2, C: 2, H: 8, W: 8, OutH: 3, OutW: 3, KernelH: 2, KernelW: 1, PadH: 0,
		PadW: 0, StrideH: 3, StrideW: 3, DilationH: 1, DilationW: 1}, Filters: 3},
	{Images: Images{Batch: 5, C: 6, H: 7, W: 5, OutH: 7, OutW: 5, KernelH: 3, KernelW: 3, PadH: 1,
		PadW: 1, StrideH: 1, StrideW: 1, DilationH: 1, DilationW: 1}, Filters: 9, Groups: 3},
	{Images: Images{Batch: 2, C: 4, H: 70, W: 61, OutH: 35, OutW: 60, KernelH: 3, KernelW: 2,
		PadH: 0, PadW: 0, StrideH: 2, StrideW: 1, DilationH: 1, DilationW: 1}, Filters: 8,
		Groups: 4},
	{Images: Images{Batch: 2, C: 3, H: 9, W: 7, OutH: 8, OutW: 4, KernelH: 3, KernelW: 2, PadH: 2,
		PadW: 1, StrideH: 1, StrideW: 2, DilationH: 2, DilationW: 3}, Filters: 3, Groups: 3},
	{Images: Images{Batch: 3, C: 2, H: 3, W: 4, OutH: 6, OutW: 7, KernelH: 1, KernelW: 2, PadH: 2,
		PadW: 3, StrideH: 1, StrideW: 1, DilationH: 1, DilationW: 1}, Filters: 6, Groups: 2},
	{Images: Images{Batch: 2, C: 3, H: 11, W: 10, OutH: 5, OutW: 4, KernelH: 5, KernelW: 4, PadH: 2,
		PadW: 1, StrideH: 2, StrideW: 2, DilationH: 1, DilationW: 1}, Filters: 6, Groups: 3},
	{Images: Images{Batch: 2, C: 2, H: 14, W: 13, OutH: 4, OutW: 6, KernelH: 3, KernelW: 3, PadH: 1,
		PadW: 2, StrideH: 3, StrideW: 2, DilationH: 2, DilationW: 2}, Filters: 2, Groups: 2},
	{Images: Images{Batch: 1, C: 2, H: 9, W: 20, OutH: 4, OutW: 6, KernelH: 2, KernelW: 4, PadH: 0,
		PadW: 1, StrideH: 2, StrideW: 3, DilationH: 3, DilationW: 1}, Filters: 2, Groups: 2},
	// Blocks of planes, of some images and of bands of rows, and weights that lie badly for caches.
	{Images: Images{Batch: 6, C: 130, H: 3, W: 3, OutH: 3, OutW: 3, KernelH: 3, KernelW: 3,
		PadH: 1, PadW: 1, StrideH: 1, StrideW: 1, DilationH: 1, DilationW: 1}, Filters: 57},
	{Images: Images{Batch: 1, C: 116, H: 16, W: 17, OutH: 16, OutW: 17, KernelH: 3, KernelW: 3,
		PadH: 1, PadW: 1, StrideH: 1, StrideW: 1, DilationH: 1, DilationW: 1}, Filters: 63},
	{Images: Images{Batch: 7, C: 128, H: 5, W: 5, OutH: 2, OutW: 2, KernelH: 4, KernelW: 4,
		StrideH: 1, StrideW: 1, DilationH: 1, DilationW: 1}, Filters: 36},
	{Images: Images{Batch: 3, C: 240, H: 3, W: 4, OutH: 3, OutW: 4, KernelH: 3, KernelW: 3, PadH: 1,
		PadW: 1, StrideH: 1, StrideW: 1, DilationH: 1, DilationW: 1}, Filters: 124, Groups: 2},
	// Phases of pixels: some see no window, padding is wider than the window, groups.
	{Images: Images{Batch: 3, C: 130, H: 5, W: 6, OutH: 3, OutW: 3, KernelH: 3, KernelW: 3, PadH: 1,
		PadW: 1, StrideH: 2, StrideW: 2, DilationH: 1, DilationW: 1}, Filters: 57},
	{Images: Images{Batch: 3, C: 2, H: 5, W: 7, OutH: 6, OutW: 5, KernelH: 3, KernelW: 2, PadH: 5,
		PadW: 4, StrideH: 2, StrideW: 3, DilationH: 1, DilationW: 1}, Filters: 3},
	{Images: Images{Batch: 3, C: 6, H: 11, W: 9, OutH: 4, OutW: 5, KernelH: 5, KernelW: 1, PadH: 3,
		PadW: 0, StrideH: 3, StrideW: 2, DilationH: 1, DilationW: 1}, Filters: 4, Groups: 2},
	{Images: Images{Batch: 0, C: 2, H: 2, W: 3, OutH: 2, OutW: 3, KernelH: 1, KernelW: 1,
		StrideH: 1, StrideW: 1, DilationH: 1, DilationW: 1}, Filters: 2},
}

// TestConvolutionsAreThePlainLoops: sums of small integers are exact.
func TestConvolutionsAreThePlainLoops(t *testing.T) {
	pool := workers.New(3)
	defer pool.Close()
	for n, c := range convolutions {
		for _, c.Pass = range []Pass{Forward, InputGradient, FilterGradient} {
			convolutionIsPlain[float32](t, n, pool, c)
			convolutionIsPlain[float64](t, n, nil, c)
		}
	}
}

func convolutionIsPlain[T float](t *testing.T, n int, pool *workers.Pool, c Convolution) {
	t.Helper()
	x, w, y := c.lengths()
	of := map[Pass][3]int{Forward: {y, x, w}, InputGradient: {x, y, w},
		FilterGradient: {w, x, y}}[c.Pass]
	var operands [3][]T // the result has a guard of 16 elements
	for i := range operands {
		operands[i] = make([]T, of[i]+16)
		for k := range operands[i] {
			operands[i][k] = T((k*(i+3)+k/5)%7 - 3)
		}
	}
	want, before := make([]T, of[0]), operands[0]
	a, b := operands[1][:of[1]:of[1]], operands[2][:of[2]:of[2]]
	plainly(&c, want, a, b)
	for _, level := range simd.Levels() {
		got := slices.Clone(before)
		convolve(pool, level, &c, got[:of[0]:of[0]], a, b)
		require.Check(t, slices.Equal(got[:of[0]], want),
			"convolution %d: %v of %T at level %v is not that of the plain loops", n, c.Pass, got,
			level)
		require.Check(t, slices.Equal(got[of[0]:], before[of[0]:]),
			"convolution %d: %v of %T at level %v writes behind its result", n, c.Pass, got, level)
	}
}

// TestPixelsThatAreNotFiniteMakeNoOtherSumsSo: those that a place does not see count for nothing.
func TestPixelsThatAreNotFiniteMakeNoOtherSumsSo(t *testing.T) {
	kind := func(x float32) float64 { // the sums of others are of small integers
		if math.IsNaN(float64(x)) {
			return 1e9
		}
		return float64(x)
	}
	for n, c := range convolutions {
		for _, c.Pass = range []Pass{Forward, InputGradient, FilterGradient} {
			x, w, y := c.lengths()
			of := map[Pass][3]int{Forward: {y, x, w}, InputGradient: {x, y, w},
				FilterGradient: {w, x, y}}[c.Pass]
			a, b := make([]float32, of[1]), make([]float32, of[2])
			for i := range b {
				b[i] = float32(i%3) + 1
			}
			for _, wrong := range []float64{math.Inf(1), math.NaN()} {
				for i := range a {
					if a[i] = float32(i%5) - 2; i%(1+len(a)/3) == 0 {
						a[i] = float32(wrong)
					}
				}
				want, got := make([]float32, of[0]), make([]float32, of[0])
				plainly(&c, want, a, b)
				convolve(nil, simd.Best(), &c, got, a, b)
				for i := range want {
					if kind(got[i]) != kind(want[i]) {
						t.Errorf("convolution %d: %v with %v is %v at %d, want %v", n, c.Pass,
							wrong, got[i], i, want[i])
						break
					}
				}
			}
		}
	}
}

// The bits are the same as with one worker, and with a pool nothing is allocated.
func TestConvolutionsHaveTheSameBitsWithAnyNumberOfWorkers(t *testing.T) {
	c := Convolution{Images: Images{Batch: 40, C: 4, H: 14, W: 14, OutH: 14, OutW: 14, KernelH: 3,
		KernelW: 3, PadH: 1, PadW: 1, StrideH: 1, StrideW: 1, DilationH: 1, DilationW: 1},
		Filters: 8}
	sameBits(t, c)
	c.Batch, c.C, c.Filters, c.StrideH, c.OutH = 9, 128, 60, 2, 7 // blocks and phases
	sameBits(t, c)
}

func sameBits(t *testing.T, c Convolution) {
	nx, nw, ny := c.lengths()
	random := rand.New(rand.NewPCG(1, 2))
	numbers := func(n int) []float32 {
		x := make([]float32, n)
		for i := range x {
			x[i] = float32(random.NormFloat64())
		}
		return x
	}
	x, w, dy := numbers(nx), numbers(nw), numbers(ny)
	for _, c.Pass = range []Pass{Forward, InputGradient, FilterGradient} {
		a, b, n := x, w, ny
		switch c.Pass {
		case InputGradient:
			a, n = dy, nx
		case FilterGradient:
			b, n = dy, nw
		}
		want := make([]float32, n)
		convolve(nil, simd.Best(), &c, want, a, b)
		for size := 1; size <= 4; size++ {
			pool, got := workers.New(size), make([]float32, n)
			convolve(pool, simd.Best(), &c, got, a, b)
			if !slices.Equal(got, want) {
				t.Errorf("%v by %d workers has other bits", c.Pass, size)
			}
			if n := testing.AllocsPerRun(1, func() {
				convolve(pool, simd.Best(), &c, got, a, b)
			}); size == 1 && n > 0 {
				t.Errorf("%v: %v allocations", c.Pass, n)
			}
			pool.Close()
		}
	}
}

// TestConvolutionsOfBF16AreThoseOfF32Rounded: sums are of f32, and an epilogue sees them rounded.
func TestConvolutionsOfBF16AreThoseOfF32Rounded(t *testing.T) {
	pool := workers.New(2)
	defer pool.Close()
	for n, c := range convolutions {
		for _, c.Pass = range []Pass{Forward, InputGradient, FilterGradient} {
			x, w, y := c.lengths()
			of := map[Pass][3]int{Forward: {y, x, w}, InputGradient: {x, y, w},
				FilterGradient: {w, x, y}}[c.Pass]
			var wide, half [3]backend.Buffer
			for i := range wide {
				numbers := make([]float32, of[i])
				for k := range numbers {
					numbers[k] = float32((k*(i+3)+k/5)%7 - 3)
				}
				wide[i] = backend.Of(numbers)
				half[i] = backend.Of(make([]backend.BFloat16, of[i]))
				cast(half[i], wide[i])
			}
			plainly(&c, backend.View[float32](wide[0]), backend.View[float32](wide[1]),
				backend.View[float32](wide[2]))
			want := make([]backend.BFloat16, of[0])
			cast(backend.Of(want), wide[0])
			c.DType, c.Epilogue = backend.BF16, &seen{result: half[0]}
			require.NoError(t, (Host{pool}).Convolve(c, half[0], half[1], half[2]))
			require.Check(t, slices.Equal(backend.View[backend.BFloat16](half[0]), want) &&
				slices.Equal(c.Epilogue.(*seen).elements, want),
				"convolution %d: %v is not the rounded one of f32", n, c.Pass)
		}
	}
}

// seen is an epilogue that notes the result.
type seen struct {
	result   backend.Buffer
	elements []backend.BFloat16
}

func (s *seen) Divides(int, int) bool  { return true }
func (s *seen) Elements(int, int, int) {}
func (s *seen) All() {
	s.elements = slices.Clone(backend.View[backend.BFloat16](s.result))
}

func TestConvolutionsThatDoNotFitAreRefused(t *testing.T) {
	c := Convolution{Images: small, Filters: 2, DType: backend.F32}
	x, w, y := backend.Of(make([]float32, 9)), backend.Of(make([]float32, 8)),
		backend.Of(make([]float32, 8))
	require.Report(t, (Host{}).Convolve(c, y, x, w))
	for name, wrong := range map[string]func(c *Convolution){
		"three filters": func(c *Convolution) { c.Filters = 3 },
		"another dtype": func(c *Convolution) { c.DType = backend.F64 },
		"another pass":  func(c *Convolution) { c.Pass = InputGradient },
		"no such pass":  func(c *Convolution) { c.Pass = FilterGradient + 1 },
		"a stride of 0": func(c *Convolution) { c.StrideW = 0 },
	} {
		c := c
		if wrong(&c); !errors.Is((Host{}).Convolve(c, y, x, w), backend.ErrArgument) {
			t.Errorf("%s: no error", name)
		}
	}
}
