package kernels

import (
	"math"
	"testing"

	"github.com/x448/float16"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/testing/require"
)

func TestWidenF16IsExactForEveryValue(t *testing.T) {
	for i := range 1 << 16 {
		want := float16.Frombits(uint16(i)).Float32()
		got := widen(backend.Float16(i))
		require.That(t, (math.Float32bits(got) == math.Float32bits(want) || want != want) &&
			(want == want) == (got == got), "widen(%#04x) = %v, want %v", i, got, want)
	}
}

// widen and narrow are the conversions of one element.

func widen[H half](h H) float32 {
	var out [1]float32
	widenAll(out[:], []H{h})
	return out[0]
}

func narrow[H half](f float32) H {
	var out [1]H
	narrowAll(out[:], []float32{f})
	return out[0]
}

// neighbours yields floats around every boundary of every 16-bit float: the
// value, the midpoint to the next one, and the floats beside both.
func neighbours(f func(float32), widen func(uint16) float32) {
	for i := range 1<<16 - 1 {
		a, b := widen(uint16(i)), widen(uint16(i+1))
		if a != a || b != b {
			continue
		}
		mid := float32((float64(a) + float64(b)) / 2)
		for _, x := range []float32{a, mid, math.Nextafter32(mid, 0),
			math.Nextafter32(mid, float32(math.Inf(1))),
			math.Nextafter32(mid, float32(math.Inf(-1))), math.Nextafter32(a, 0)} {
			f(x)
		}
	}
}

func TestNarrowF16RoundsToNearestEven(t *testing.T) {
	neighbours(func(x float32) {
		want := float16.Fromfloat32(x).Bits()
		if got := narrow[backend.Float16](x); uint16(got) != want {
			t.Fatalf("narrow(%v %#x) = %#04x, want %#04x", x, math.Float32bits(x), got, want)
		}
	}, func(b uint16) float32 { return float16.Frombits(b).Float32() })
	for _, x := range []float32{65504, 65519.996, 65520, 1e30, float32(math.Inf(1)),
		float32(math.Inf(-1)), 1e-30, -1e-30} {
		if got, want := uint16(narrow[backend.Float16](x)),
			float16.Fromfloat32(x).Bits(); got != want {
			t.Errorf("narrow(%v) = %#04x, want %#04x", x, got, want)
		}
	}
}

// nearestBF16 is the definition: of the two neighbours, the nearer, or the even
// one.
func nearestBF16(x float32) uint16 {
	down := uint16(math.Float32bits(x) >> 16)
	lo := float64(math.Float32frombits(uint32(down) << 16))
	hi := float64(math.Float32frombits(uint32(down+1) << 16))
	if math.IsInf(hi, 0) {
		hi = math.Copysign(0x1p128, lo)
	}
	toLo, toHi := math.Abs(float64(x)-lo), math.Abs(hi-float64(x))
	if toLo < toHi || toLo == toHi && down&1 == 0 {
		return down
	}
	return down + 1
}

func TestNarrowBF16RoundsToNearestEven(t *testing.T) {
	neighbours(func(x float32) {
		if math.IsInf(float64(x), 0) {
			return
		}
		if got, want := uint16(narrow[backend.BFloat16](x)), nearestBF16(x); got != want {
			t.Fatalf("narrow(%v %#x) = %#04x, want %#04x", x, math.Float32bits(x), got, want)
		}
	}, func(b uint16) float32 { return math.Float32frombits(uint32(b) << 16) })
}

func TestNarrowKeepsNaN(t *testing.T) {
	for _, bits := range []uint32{0x7f800001, 0x7fc00000, 0xff800001, 0x7fffffff, 0x7f801000} {
		nan := math.Float32frombits(bits)
		got := widen(narrow[backend.Float16](nan))
		require.Check(t, got != got, "f16 of NaN %#x is %v", bits, got)
		if got := widen(narrow[backend.BFloat16](nan)); got == got {
			t.Errorf("bf16 of NaN %#x is %v", bits, got)
		}
	}
}

// A double that lies just above the midpoint of two halves must not be rounded
// down because a float32 in between takes it for the midpoint.
func TestCastFromF64RoundsOnce(t *testing.T) {
	mid := 1 + 0x1p-11
	cases := map[float64]uint16{
		mid: 0x3c00, mid + 0x1p-40: 0x3c01, mid - 0x1p-40: 0x3c00,
		-(mid + 0x1p-40): 0xbc01, 0x1p-25: 0, 0x1p-25 + 0x1p-60: 1, 1e300: 0x7c00, -1e300: 0xfc00,
	}
	for x, want := range cases {
		dst := make([]backend.Float16, 1)
		require.NoError(t, (Host{}).Cast(backend.Of(dst), backend.Of([]float64{x})))
		require.Check(t, uint16(dst[0]) == want, "f16(%v) = %#04x, want %#04x", x, dst[0], want)
	}
}
