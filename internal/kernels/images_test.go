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

// A 3x3 image, windows of 2x2 with padding 1 and stride 2: 2x2 places.
var small = Images{Batch: 1, C: 1, H: 3, W: 3, OutH: 2, OutW: 2, KernelH: 2, KernelW: 2, PadH: 1,
	PadW: 1, StrideH: 2, StrideW: 2, DilationH: 1, DilationW: 1}

func TestPatchesOfASmallImage(t *testing.T) {
	x := []float32{1, 2, 3, 4, 5, 6, 7, 8, 9}
	patches := make([]float32, 16)
	require.NoError(t, (Host{}).Im2Col(backend.Of(patches), backend.Of(x), small))
	want := []float32{0, 0, 0, 1, 0, 0, 2, 3, 0, 4, 0, 7, 5, 6, 8, 9}
	require.Check(t, slices.Equal(patches, want), "patches are %v, want %v", patches, want)
	back := make([]float32, 9)
	require.NoError(t, (Host{}).Col2Im(backend.Of(back), backend.Of(patches), small))
	if !slices.Equal(back, x) { // each pixel is in one patch
		t.Errorf("patches add up to %v, want %v", back, x)
	}
}

func TestLargestPixelsOfASmallImage(t *testing.T) {
	x := []float64{1, 5, 5, 4, 2, 6, 4, 8, 7}
	y, dx := make([]float64, 4), make([]float64, 9)
	require.NoError(t, (Host{}).MaxPool(backend.Of(y), backend.Of(x), small))
	want := []float64{1, 5, 4, 8}
	require.Check(t, slices.Equal(y, want), "the largest pixels are %v, want %v", y, want)
	require.NoError(t, (Host{}).MaxPoolGrad(backend.Of(dx), backend.Of(x), backend.Of([]float64{1,
		2, 3, 4}), small))
	// the first of equal ones
	if want := []float64{1, 2, 0, 3, 0, 0, 0, 4, 0}; !slices.Equal(dx, want) {
		t.Errorf("the gradient is %v, want %v", dx, want)
	}
}

// TestPoolsPassNaNAndInfinities: as in PyTorch, a window with NaN gives NaN and its gradient goes
// to the last one, a window of -Inf gives -Inf and its gradient goes to the first pixel of the
// image.
func TestPoolsPassNaNAndInfinities(t *testing.T) {
	nan, inf := math.NaN(), math.Inf(1)
	square := Images{
		Batch: 1, C: 1, H: 2, W: 2, OutH: 1, OutW: 1,
		KernelH: 2, KernelW: 2, StrideH: 2, StrideW: 2, DilationH: 1, DilationW: 1,
	}
	padded := square
	padded.PadH, padded.PadW = 1, 1
	for _, c := range []struct {
		of    Images
		x     []float64
		y     float64
		at    int // of the gradient
		alsoY float64
		alsoX int // the same of the rectified pool, -1 for no gradient
	}{
		{square, []float64{nan, nan, nan, nan}, nan, 3, nan, 3},
		{square, []float64{1, nan, nan, 2}, nan, 2, nan, 2},
		{square, []float64{nan, 5, 6, 7}, nan, 0, nan, 0},
		{square, []float64{inf, -inf, nan, inf}, nan, 2, nan, 2},
		{square, []float64{-inf, -inf, -inf, -inf}, -inf, 0, 0, -1},
		{square, []float64{1, inf, inf, -inf}, inf, 1, inf, 1},
		{square, []float64{-inf, 0, -1, -inf}, 0, 1, 0, -1},
		{padded, []float64{-inf, 1, 1, 1}, -inf, 0, 0, -1},
		{padded, []float64{nan, 1, 1, 1}, nan, 0, nan, 0},
	} {
		for _, rectified := range []bool{false, true} {
			c.of.Rectified = rectified
			if rectified {
				c.y, c.at = c.alsoY, c.alsoX
			}
			y, dx, want := make([]float64, 1), make([]float64, 4), make([]float64, 4)
			if c.at >= 0 {
				want[c.at] = 3
			}
			x, dy := backend.Of(c.x), backend.Of([]float64{3})
			require.NoError(t, errors.Join(Host{}.MaxPool(backend.Of(y), x, c.of),
				Host{}.MaxPoolGrad(backend.Of(dx), x, dy, c.of)))
			require.Check(t, sameNumber(y[0], c.y) && slices.Equal(dx, want),
				"%v, %+v: the pool is %v and its gradient %v, want %v and %v", c.x, c.of, y, dx,
				c.y, want)
		}
	}
}

func sameNumber[T float](x, y T) bool { return x == y || x != x && y != y }

// TestRectifiedPools: negative pixels are seen as zeros, and have no gradient where they are the
// first of those.
func TestRectifiedPools(t *testing.T) {
	i := Images{Batch: 1, C: 1, H: 1, W: 6, OutH: 1, OutW: 3, KernelH: 1, KernelW: 2, StrideH: 1,
		StrideW: 2, DilationH: 1, DilationW: 1, Rectified: true}
	x := []float32{-1, 2, -3, 0, 0, -4}
	y, dx := make([]float32, 3), make([]float32, 6)
	require.NoError(t, errors.Join(Host{}.MaxPool(backend.Of(y), backend.Of(x), i),
		Host{}.MaxPoolGrad(backend.Of(dx), backend.Of(x), backend.Of([]float32{5, 6, 7}), i)))
	require.Check(t, slices.Equal(y, []float32{2, 0, 0}) && slices.Equal(dx, []float32{0, 5, 0, 0,
		7, 0}), "the pool is %v and its gradient %v", y, dx)
}

// TestPoolsAreTheLoop compares random pools and their gradients with the loops that define them.
func TestPoolsAreTheLoop(t *testing.T) {
	r := rand.New(rand.NewPCG(7, 8))
	pool := workers.New(2)
	defer pool.Close()
	up := func(n int) int { return 1 + r.IntN(n) }
	for range 400 {
		i := Images{
			Batch: up(2), C: up(70), H: up(9), W: up(40), OutH: up(5), OutW: up(20), KernelH: up(3),
			KernelW: up(3), PadH: r.IntN(2), PadW: r.IntN(2),
			StrideH: up(3), StrideW: up(3), DilationH: up(2), DilationW: up(2), Rectified: r.IntN(
				2) == 0,
		}
		if r.IntN(2) == 0 { // most pools are like this
			i.KernelH, i.KernelW, i.StrideH, i.StrideW, i.DilationH, i.DilationW, i.PadH,
				i.PadW = 2, 2, 2, 2, 1, 1, 0, 0
			i.OutH, i.OutW = i.H/2, i.W/2
		}
		x, dy, strange := make([]float32, i.pixels()), make([]float32, i.places()), r.IntN(3) == 0
		for n := range x {
			x[n] = float32(r.IntN(9) - 5)
			if strange && r.IntN(3) > 0 {
				x[n] = float32([]float64{math.NaN(), math.Inf(1), math.Inf(-1),
					math.Inf(-1)}[r.IntN(4)])
			}
		}
		for n := range dy {
			dy[n] = float32(r.IntN(9) - 4)
		}
		y, dx := poolLoop(i, x, dy)
		for _, level := range simd.Levels() {
			gotY, gotDX := make([]float32, len(y)), make([]float32, len(dx))
			runPools(pool, level, pooling[float32]{Images: i, x: x, y: gotY})
			runPools(pool, level, pooling[float32]{Images: i, x: x, y: dy, dx: gotDX})
			require.That(t, slices.EqualFunc(gotY, y, sameNumber) && slices.Equal(gotDX, dx),
				"%v of %+v: the pool is %v and its gradient %v, want %v and %v", level, i, gotY,
				gotDX, y, dx)
		}
	}
}

// poolLoop returns the largest pixels of windows, and the gradient.
func poolLoop(i Images, x, dy []float32) (y, dx []float32) {
	dx = make([]float32, len(x))
	for place := range dy {
		plane, oh, ow := place/(i.OutH*i.OutW), place/i.OutW%i.OutH, place%i.OutW
		most, at := float32(math.Inf(-1)), -1
		for k := range i.KernelH * i.KernelW {
			h, w := oh*i.StrideH-i.PadH+k/i.KernelW*i.DilationH,
				ow*i.StrideW-i.PadW+k%i.KernelW*i.DilationW
			if h < 0 || h >= i.H || w < 0 || w >= i.W {
				continue
			}
			pixel := (plane*i.H+h)*i.W + w
			seen := x[pixel]
			if i.Rectified {
				seen = max(seen, 0)
			}
			if at < 0 || seen > most || seen != seen {
				most, at = seen, pixel
			}
		}
		if y = append(y, most); at >= 0 && (!i.Rectified || !(x[at] < 0)) {
			dx[at] += dy[place]
		}
	}
	return y, dx
}

// TestColumnsAndImagesAreAdjoint: <Im2Col x, p> = <x, Col2Im p>, also for windows that overlap.
func TestColumnsAndImagesAreAdjoint(t *testing.T) {
	i := Images{Batch: 2, C: 3, H: 7, W: 6, OutH: 4, OutW: 3, KernelH: 3, KernelW: 2, PadH: 1,
		PadW: 2, StrideH: 1, StrideW: 2, DilationH: 2, DilationW: 3}
	x, p := make([]float64, i.pixels()), make([]float64, i.patches())
	for n := range x {
		x[n] = float64(n%7 - 3)
	}
	for n := range p {
		p[n] = float64(n%5 - 2)
	}
	forward, backward := make([]float64, len(p)), make([]float64, len(x))
	require.NoError(t, errors.Join((Host{}).Im2Col(backend.Of(forward), backend.Of(x), i),
		(Host{}).Col2Im(backend.Of(backward), backend.Of(p), i)))
	left, right := 0.0, 0.0
	for n := range p {
		left += forward[n] * p[n]
	}
	for n := range x {
		right += x[n] * backward[n]
	}
	require.Check(t, left == right && left != 0, "the products are %v and %v, want equal ones",
		left, right)
}

func TestImagesThatDoNotFitAreRefused(t *testing.T) {
	x := backend.Of(make([]float32, 9))
	require.Fails(t, "too few patches", (Host{}).Im2Col(backend.Of(make([]float32, 15)), x, small),
		backend.ErrArgument)
	wrong := small
	wrong.StrideH = 0
	require.Fails(t, "a stride of 0", (Host{}).MaxPool(backend.Of(make([]float32, 4)), x, wrong),
		backend.ErrArgument)
	require.Fails(t, "integers", (Host{}).MaxPool(backend.Of(make([]int32, 4)),
		backend.Of(make([]int32, 9)), small), backend.ErrUnsupported)
}
