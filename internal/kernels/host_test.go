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

// lengths hold the boundaries of a block.
var lengths = []int{0, 1, 31, 32, 33, block - 1, block, block + 1, 3*block + 7}

// exact converts small integers between float64 and any type.
func exact[T backend.Element](x float64) T {
	switch p := any(new(T)).(type) {
	case *backend.Float16:
		*p = narrow[backend.Float16](float32(x))
		return any(*p).(T)
	case *backend.BFloat16:
		*p = narrow[backend.BFloat16](float32(x))
		return any(*p).(T)
	case *float32:
		return any(float32(x)).(T)
	case *float64:
		return any(x).(T)
	case *int32:
		return any(int32(x)).(T)
	case *int64:
		return any(int64(x)).(T)
	default:
		return any(byte(x)).(T)
	}
}

// guarded returns n elements with guard elements around them, and a check that
// the guards are whole.
func guarded[T backend.Element](n, offset int) ([]T, func() bool) {
	const guard = 8
	all := make([]T, guard+offset+n+guard)
	for i := range all {
		all[i] = exact[T](99)
	}
	intact := func() bool {
		for i, x := range all {
			if (i < guard+offset || i >= guard+offset+n) && x != exact[T](99) {
				return false
			}
		}
		return true
	}
	return all[guard+offset : guard+offset+n], intact
}

func reference(op backend.ReduceOp, xs []float64, float bool) float64 {
	acc := xs[0]
	for _, x := range xs[1:] {
		switch op {
		case backend.Sum, backend.Avg:
			acc += x
		case backend.Prod:
			acc *= x
		case backend.Min:
			acc = min(acc, x)
		case backend.Max:
			acc = max(acc, x)
		}
	}
	if op == backend.Avg {
		acc /= float64(len(xs))
		if !float {
			acc = math.Trunc(acc)
		}
	}
	return acc
}

func testReduce[T backend.Element](t *testing.T) {
	float := backend.DTypeOf[T]().Float()
	rnd := rand.New(rand.NewPCG(1, 2))
	for _, op := range backend.ReduceOps() {
		for _, sources := range []int{1, 2, 3, 4, 8} {
			for _, n := range lengths {
				for _, alias := range []int{-1, 0, sources - 1} {
					values := make([][]float64, sources)
					srcs := make([]backend.Buffer, sources)
					slices_ := make([][]T, sources)
					for s := range srcs {
						values[s] = make([]float64, n)
						slices_[s], _ = guarded[T](n, s%3)
						for i := range n {
							// exact in every type, also as a product of 8
							values[s][i] = float64(rnd.IntN(4))
							if op == backend.Prod {
								values[s][i] = float64(rnd.IntN(2) + 1)
							}
							if op == backend.Prod && sources == 8 && s > 5 {
								values[s][i] = 1
							}
							slices_[s][i] = exact[T](values[s][i])
						}
						srcs[s] = backend.Of(slices_[s])
					}
					dst, intact := guarded[T](n, 1)
					if alias >= 0 {
						dst, intact = slices_[alias], func() bool { return true }
					}
					require.NoError(t, (Host{}).Reduce(op, backend.Of(dst), srcs...))
					column := make([]float64, sources)
					for i := range n {
						for s := range column {
							column[s] = values[s][i]
						}
						if want := exact[T](reference(op, column, float)); dst[i] != want {
							t.Fatalf("%v of %d sources, n=%d, alias %d, element %d: %v, want %v",
								op, sources, n, alias, i, dst[i], want)
						}
					}
					require.That(t, intact(),
						"%v of %d sources, n=%d: wrote outside the destination", op, sources, n)
				}
			}
		}
	}
}

func TestReduceIsTheLoop(t *testing.T) {
	t.Run("f16", testReduce[backend.Float16])
	t.Run("bf16", testReduce[backend.BFloat16])
	t.Run("f32", testReduce[float32])
	t.Run("f64", testReduce[float64])
	t.Run("i32", testReduce[int32])
	t.Run("i64", testReduce[int64])
	t.Run("u8", testReduce[byte])
}

func TestReduceAccumulatesHalvesIn32Bits(t *testing.T) {
	big := narrow[backend.Float16](40000)
	xs := []backend.Float16{big}
	dst := make([]backend.Float16, 1)
	b := backend.Of(xs)
	require.NoError(t, (Host{}).Reduce(backend.Avg, backend.Of(dst), b, b, b, b))
	if dst[0] != big {
		t.Errorf("average of four 40000 is %v", widen(dst[0]))
	}
}

func TestMinMaxPropagateNaNAndOrderZeros(t *testing.T) {
	nan, neg := math.NaN(), math.Copysign(0, -1)
	for _, op := range []backend.ReduceOp{backend.Min, backend.Max} {
		dst := make([]float64, 3)
		require.NoError(t, (Host{}).Reduce(op, backend.Of(dst), backend.Of([]float64{nan, 1, 0}),
			backend.Of([]float64{1, nan, neg})))
		require.Check(t, dst[0] != dst[0] && dst[1] != dst[1] && math.Signbit(dst[2]) == (op ==
			backend.Min), "%v gives %v", op, dst)
	}
}

func TestAverageOfBytesByMoreRanksThanAByteCounts(t *testing.T) {
	srcs := slices.Repeat([]backend.Buffer{backend.Of([]byte{1})}, 256)
	dst := []byte{7}
	err := (Host{}).Reduce(backend.Avg, backend.Of(dst), srcs...)
	require.Check(t, err == nil && dst[0] == 0, "%v %v", dst, err)
}

func TestCopy2DSplitsAndConcatenates(t *testing.T) {
	src := []int32{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11} // [2, 6]
	dst, intact := guarded[int32](6, 0)
	require.NoError(t, (Host{}).Copy2D(backend.Of(dst), 3, backend.Of(src[2:]), 6, 3, 2))
	want := []int32{2, 3, 4, 8, 9, 10}
	require.Check(t, slices.Equal(dst, want) && intact(), "got %v, want %v", dst, want)
}

func TestScale(t *testing.T) {
	f := []float32{1, -2, 3}
	i := []int32{5, -5, 7}
	h := []backend.Float16{exact[backend.Float16](3)}
	err := errors.Join((Host{}).Scale(backend.Of(f), backend.Of(f), 0.5),
		(Host{}).Scale(backend.Of(i), backend.Of(i), 0.5), (Host{}).Scale(backend.Of(h),
			backend.Of(h), 0.25))
	if err != nil || !slices.Equal(f, []float32{.5, -1, 1.5}) ||
		!slices.Equal(i, []int32{2, -2, 3}) || widen(h[0]) != .75 {
		t.Errorf("%v %v %v %v", f, i, widen(h[0]), err)
	}
}

func TestCastBetweenAllFloats(t *testing.T) {
	values := []float64{0, 1, -2, 0.5, 96}
	make_ := map[backend.DType]func() backend.Buffer{
		backend.F16: func() backend.Buffer {
			return floats[backend.Float16](values)
		}, backend.BF16: func() backend.Buffer { return floats[backend.BFloat16](values) },
		backend.F32: func() backend.Buffer {
			return floats[float32](values)
		}, backend.F64: func() backend.Buffer { return floats[float64](values) },
	}
	for from, source := range make_ {
		for to, destination := range make_ {
			want := destination()
			dst := destination()
			clear(dst.Bytes())
			if err := (Host{}).Cast(dst, source()); err != nil ||
				!slices.Equal(dst.Bytes(), want.Bytes()) {
				t.Errorf("%v to %v: %v, %v", from, to, dst.Bytes(), err)
			}
		}
	}
}

func floats[T backend.Element](values []float64) backend.Buffer {
	xs := make([]T, len(values))
	for i, v := range values {
		xs[i] = exact[T](v)
	}
	return backend.Of(xs)
}

func TestArgumentsAreChecked(t *testing.T) {
	a, b, i := backend.Of(make([]float32, 4)), backend.Of(make([]float32, 5)),
		backend.Of(make([]int32, 4))
	device := backend.OnDevice(backend.F32, 0x1000, 4)
	h := Host{}
	for name, err := range map[string]error{
		"copy lengths":    h.Copy(a, b),
		"copy dtypes":     h.Copy(a, i),
		"copy device":     h.Copy(a, device),
		"zero device":     h.Zero(device),
		"cast lengths":    h.Cast(a, b),
		"cast integer":    h.Cast(a, i),
		"scale lengths":   h.Scale(a, b, 2),
		"reduce nothing":  h.Reduce(backend.Sum, a),
		"reduce lengths":  h.Reduce(backend.Sum, a, a, b),
		"reduce op":       h.Reduce(backend.ReduceOp(9), a, a),
		"copy2d pitch":    h.Copy2D(a, 1, b, 2, 2, 2),
		"copy2d negative": h.Copy2D(a, 2, b, 2, -1, 2),
		"copy2d dst":      h.Copy2D(a, 3, b, 2, 2, 2),
		"copy2d src":      h.Copy2D(a, 2, b, 4, 2, 2),
		"copy2d dtypes":   h.Copy2D(a, 2, i, 2, 2, 2),
		"no dtype":        h.Copy(backend.Buffer{}, backend.Buffer{}),
		"host on device":  Check{Device: true}.Copy(a, a),
	} {
		require.Fails(t, name, err, backend.ErrArgument)
	}
}

func BenchmarkReduce(b *testing.B) {
	for _, d := range []backend.DType{backend.F32, backend.F64, backend.BF16, backend.F16} {
		for _, sources := range []int{2, 4, 8} {
			b.Run(fmt.Sprintf("%v/%d", d, sources), func(b *testing.B) {
				const n = 1 << 16
				srcs := make([]backend.Buffer, sources)
				for i := range srcs {
					srcs[i] = backend.Of(make([]byte, n*d.Size())).As(d)
				}
				b.SetBytes(int64(n * d.Size() * sources))
				for b.Loop() {
					require.NoError(b, (Host{}).Reduce(backend.Sum, srcs[0], srcs...))
				}
			})
		}
	}
}

func TestKernelsAllocateNothing(t *testing.T) {
	for _, d := range []backend.DType{backend.F16, backend.BF16, backend.F32, backend.I64} {
		a := backend.Of(make([]byte, 4096)).As(d)
		srcs := []backend.Buffer{a, a, a}
		var h Host
		allocs := testing.AllocsPerRun(10, func() {
			if errors.Join(h.Reduce(backend.Avg, a, srcs...), h.Scale(a, a, 2),
				h.Copy(a, a)) != nil {
				t.Error("failed")
			}
		})
		require.Check(t, allocs == 0, "%v: %v allocations", d, allocs)
	}
}
