package kernels

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/testing/require"
)

// forEachDType runs a generic test for every dtype.
func forEachDType(t *testing.T, f16, bf16, f32, f64, i32, i64, u8 func(*testing.T)) {
	for i, test := range []func(*testing.T){f16, bf16, f32, f64, i32, i64, u8} {
		t.Run(backend.DTypes()[i].String(), test)
	}
}

// value converts any element to float64.
func value[T backend.Element](x T) float64 {
	switch x := any(x).(type) {
	case backend.Float16:
		return float64(widen(x))
	case backend.BFloat16:
		return float64(widen(x))
	case float32:
		return float64(x)
	case float64:
		return x
	case int32:
		return float64(x)
	case int64:
		return float64(x)
	default:
		return float64(any(x).(byte))
	}
}

// round converts a float64 to T: floats to nearest even, once; integers wrap.
func round[T backend.Element](x float64) T {
	switch p := any(new(T)).(type) {
	case *backend.Float16:
		return any(narrow[backend.Float16](toOdd(x))).(T)
	case *backend.BFloat16:
		return any(narrow[backend.BFloat16](toOdd(x))).(T)
	case *int32:
		*p = int32(int64(x))
		return any(*p).(T)
	case *byte:
		*p = byte(int64(x))
		return any(*p).(T)
	default:
		return exact[T](x)
	}
}

// numbers returns n values of T, with everything special that it has.
func numbers[T backend.Element](n int, seed uint64) []T {
	special := []float64{0, 1, 2, 3, 200, -1, -2, -7}
	if backend.DTypeOf[T]().Float() {
		special = append(special, math.Copysign(0, -1), math.Inf(1), math.Inf(-1), math.NaN(), 0.1,
			-0.3, 1e-7, 6e4, -5e-5)
	}
	rng := rand.New(rand.NewPCG(seed, 1))
	xs := make([]T, n)
	for i := range xs {
		x := special[rng.IntN(len(special))]
		if rng.IntN(2) == 0 {
			x = float64(rng.IntN(41) - 20)
			if backend.DTypeOf[T]().Float() {
				x += rng.Float64()
			}
		}
		xs[i] = round[T](x)
	}
	return xs
}

// agree compares by value: with the sign of zero, and any NaN like another.
func agree[T backend.Element](got, want T) bool {
	g, w := value(got), value(want)
	if g != g || w != w {
		return g != g && w != w
	}
	return g == w && math.Signbit(g) == math.Signbit(w)
}

func testDivide[T backend.Element](t *testing.T) {
	for offset, n := range lengths {
		for _, by := range []int{1, 3, 7, 256} {
			x := numbers[T](n, uint64(n))
			dst, intact := guarded[T](n, offset%4)
			err := Host{}.Divide(backend.Of(dst), backend.Of(x), by)
			if err != nil || !intact() {
				t.Fatalf("%d over %d: error %v, guards whole: %v", n, by, err, intact())
			}
			for i := range dst {
				if want := round[T](value(x[i]) / float64(by)); !agree(dst[i], want) {
					t.Fatalf("%v over %d is %v, want %v", value(x[i]), by, value(dst[i]),
						value(want))
				}
			}
			if err := (Host{}).Divide(backend.Of(x), backend.Of(x), by); err != nil ||
				!slices.Equal(backend.Of(x).Bytes(), backend.Of(dst).Bytes()) {
				t.Fatalf("%d over %d in place differs: %v", n, by, err)
			}
		}
	}
}

func TestDivideIsTheQuotient(t *testing.T) {
	forEachDType(t, testDivide[backend.Float16], testDivide[backend.BFloat16], testDivide[float32],
		testDivide[float64], testDivide[int32], testDivide[int64], testDivide[byte])
}

func testCopyStrided[T backend.Element](t *testing.T) {
	src := make([]T, 2*3*4*5)
	for i := range src {
		src[i] = exact[T](float64(i))
	}
	for _, c := range []struct{ shape, strides []int }{
		{nil, nil},
		{[]int{7}, []int{1}},
		{[]int{7}, []int{3}},
		{[]int{4, 5}, []int{5, 1}},
		{[]int{5, 4}, []int{1, 5}},
		{[]int{5, 3, 4}, []int{1, 20, 5}},
		{[]int{3, 2, 5, 4}, []int{20, 60, 1, 5}},
		{[]int{3, 4, 5}, []int{5, 0, 1}},
		{[]int{2, 1, 3}, []int{60, 1000, 20}},
		{[]int{2, 0, 3}, []int{60, 1, 20}},
		{[]int{1, 1, 1, 1, 1, 1, 2, 3}, []int{9, 9, 9, 9, 9, 9, 60, 2}},
	} {
		n := 1
		for _, d := range c.shape {
			n *= d
		}
		dst, intact := guarded[T](n, 1)
		if err := (Host{}).CopyStrided(backend.Of(dst), backend.Of(src), c.shape,
			c.strides); err != nil || !intact() {
			t.Fatalf("%v: error %v, guards whole: %v", c, err, intact())
		}
		for i := range dst {
			at, rest := 0, i
			for axis := len(c.shape) - 1; axis >= 0; axis-- {
				at += rest % c.shape[axis] * c.strides[axis]
				rest /= c.shape[axis]
			}
			require.That(t, dst[i] == src[at], "%v: element %d is %v, want %v", c, i, dst[i],
				src[at])
		}
	}
}

func TestCopyStridedIsTheLoop(t *testing.T) {
	forEachDType(t, testCopyStrided[backend.Float16], testCopyStrided[backend.BFloat16],
		testCopyStrided[float32], testCopyStrided[float64], testCopyStrided[int32],
		testCopyStrided[int64], testCopyStrided[byte])
}

func TestArgumentsOfArithmeticAreChecked(t *testing.T) {
	all := make([]float32, 9)
	a, b, overlapping := backend.Of(all[:4]), backend.Of(make([]float32, 5)), backend.Of(all[2:6])
	device := backend.OnDevice(backend.F32, 0x1000, 4)
	h, onDevice := Host{}, Check{Device: true}
	for name, err := range map[string]error{
		"divide by 0":       h.Divide(a, a, 0),
		"divide lengths":    h.Divide(a, b, 2),
		"divide device":     h.Divide(a, device, 2),
		"strided past":      h.CopyStrided(a, b, []int{4}, []int{2}),
		"strided lengths":   h.CopyStrided(a, b, []int{3}, []int{1}),
		"strided axes":      h.CopyStrided(a, b, []int{4}, nil),
		"strided negative":  h.CopyStrided(a, b, []int{4}, []int{-1}),
		"strided overlap":   h.CopyStrided(a, overlapping, []int{4}, []int{1}),
		"strided many axes": h.CopyStrided(a, b, make([]int, 9), make([]int, 9)),
		"move lengths":      onDevice.Move(a, b),
		"move host":         h.Move(a, device),
		"host on device":    onDevice.Divide(a, a, 2),
	} {
		require.Fails(t, name, err, backend.ErrArgument)
	}
	require.NoError(t, onDevice.Move(device, a))
}

func TestArithmeticAllocatesNothing(t *testing.T) {
	for _, d := range []backend.DType{backend.F16, backend.F32, backend.I64} {
		a := backend.Of(make([]byte, 4096)).As(d)
		b := backend.Of(make([]byte, 4096)).As(d)
		shape, strides := []int{b.Len() / 2, 2}, []int{1, b.Len() / 2}
		var h Host
		allocs := testing.AllocsPerRun(10, func() {
			if errors.Join(h.Divide(a, a, 2), h.CopyStrided(a, b, shape, strides)) != nil {
				t.Error("failed")
			}
		})
		require.Check(t, allocs == 0, "%v: %v allocations", d, allocs)
	}
}

func BenchmarkArithmetic(b *testing.B) {
	const n = 1 << 16
	x, y := backend.Of(make([]float32, n)), backend.Of(make([]float32, n))
	var h Host
	for name, f := range map[string]func() error{
		"divide":    func() error { return h.Divide(y, x, 3) },
		"transpose": func() error { return h.CopyStrided(y, x, []int{256, 256}, []int{1, 256}) },
	} {
		b.Run(fmt.Sprintf("%s/%d", name, n), func(b *testing.B) {
			b.SetBytes(4 * n)
			for b.Loop() {
				require.NoError(b, f())
			}
		})
	}
}
