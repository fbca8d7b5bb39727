package kernels

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/euryale-ml/euryale/backend"
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

// agree compares by value: with the sign of zero, and any NaN like another;
// within ulps units in the last place.
func agree[T backend.Element](got, want T, ulps float64) bool {
	g, w := value(got), value(want)
	if g != g || w != w {
		return g != g && w != w
	}
	if g == w {
		return math.Signbit(g) == math.Signbit(w)
	}
	if ulps == 0 || math.IsInf(g, 0) || math.IsInf(w, 0) {
		return false
	}
	return math.Abs(g-w) <= ulps*math.Abs(w)*epsilon[T]() || math.Abs(g-w) < 1e-7
}

// slack is how many units in the last place a function may be off.
func slack(rounded bool) float64 {
	if rounded {
		return 4
	}
	return 0
}

func epsilon[T backend.Element]() float64 {
	switch backend.DTypeOf[T]() {
	case backend.F16:
		return 0x1p-10
	case backend.BF16:
		return 0x1p-7
	case backend.F32:
		return 0x1p-23
	}
	return 0x1p-52
}

// unaryMeaning is the formula of an op on elements of T.
func unaryMeaning[T backend.Element](op backend.UnaryOp, e T) T {
	x := value(e)
	switch op {
	case backend.Neg:
		if backend.DTypeOf[T]().Float() {
			return round[T](-x)
		}
		return round[T](0 - x)
	case backend.Abs:
		return round[T](math.Abs(x))
	case backend.Sign:
		switch {
		case x > 0:
			return round[T](1)
		case x < 0:
			return round[T](-1)
		}
		return e
	case backend.Square:
		return round[T](x * x)
	case backend.Cube:
		square := value(wide[T](x * x))
		return round[T](square * x)
	case backend.Relu:
		if x < 0 {
			return round[T](0)
		}
		return e
	case backend.Inv:
		return round[T](1 / x)
	case backend.Sqrt:
		return round[T](math.Sqrt(x))
	case backend.InvSqrt:
		return round[T](1 / value(wide[T](math.Sqrt(x))))
	case backend.Ceil:
		return round[T](math.Ceil(x))
	case backend.Floor:
		return round[T](math.Floor(x))
	case backend.Exp:
		return round[T](math.Exp(x))
	case backend.Expm1:
		return round[T](math.Expm1(x))
	case backend.Log:
		return round[T](math.Log(x))
	case backend.Log2:
		return round[T](math.Log2(x))
	case backend.Log1p:
		return round[T](math.Log1p(x))
	case backend.Tanh:
		return round[T](math.Tanh(x))
	case backend.Sigmoid:
		return round[T](1 / (1 + math.Exp(-x)))
	case backend.Softplus:
		if x > 500 {
			return e
		}
		return round[T](math.Log1p(math.Exp(x)))
	}
	panic(op)
}

// wide rounds to the type that T is computed in.
func wide[T backend.Element](x float64) float64 {
	switch backend.DTypeOf[T]() {
	case backend.F64, backend.I32, backend.I64, backend.U8:
		return x
	}
	return float64(float32(x))
}

func binaryMeaning[T backend.Element](op backend.BinaryOp, a, b T) T {
	x, y := value(a), value(b)
	is := map[bool]T{true: round[T](1), false: round[T](0)}
	switch op {
	case backend.Add:
		return round[T](x + y)
	case backend.Sub:
		return round[T](x - y)
	case backend.Mul:
		return round[T](x * y)
	case backend.Div:
		if !backend.DTypeOf[T]().Float() && y == 0 {
			return round[T](0)
		}
		return round[T](x / y)
	case backend.Pow:
		return round[T](math.Pow(x, y))
	case backend.Minimum:
		return round[T](min(x, y))
	case backend.Maximum:
		return round[T](max(x, y))
	case backend.Less:
		return is[x < y]
	case backend.LessEqual:
		return is[x <= y]
	case backend.Greater:
		return is[x > y]
	case backend.GreaterEqual:
		return is[x >= y]
	case backend.Equal:
		return is[x == y]
	case backend.NotEqual:
		return is[x != y]
	}
	panic(op)
}

func testUnary[T backend.Element](t *testing.T) {
	d := backend.DTypeOf[T]()
	for _, op := range backend.UnaryOps() {
		for offset, n := range lengths {
			x := numbers[T](n, uint64(op))
			before := slices.Clone(x)
			dst, intact := guarded[T](n, offset%4)
			err := Host{}.Unary(op, backend.Of(dst), backend.Of(x))
			if !op.Takes(d) {
				if !errors.Is(err, backend.ErrUnsupported) {
					t.Errorf("%v: %v", op, err)
				}
				continue
			}
			if err != nil || !intact() {
				t.Fatalf("%v of %d: error %v, guards whole: %v", op, n, err, intact())
			}
			ulps := slack(op.Rounded())
			for i := range dst {
				if want := unaryMeaning(op, before[i]); !agree(dst[i], want, ulps) {
					t.Fatalf("%v(%v) = %v, want %v", op, value(x[i]), value(dst[i]), value(want))
				}
			}
			if err := (Host{}).Unary(op, backend.Of(x), backend.Of(x)); err != nil ||
				!sameBits(x, dst) {
				t.Fatalf("%v of %d in place differs: %v", op, n, err)
			}
		}
	}
}

func sameBits[T backend.Element](x, y []T) bool {
	return slices.Equal(backend.Of(x).Bytes(), backend.Of(y).Bytes())
}

func TestUnaryIsTheFormula(t *testing.T) {
	forEachDType(t, testUnary[backend.Float16], testUnary[backend.BFloat16], testUnary[float32],
		testUnary[float64],
		testUnary[int32], testUnary[int64], testUnary[byte])
}

func testBinary[T backend.Element](t *testing.T) {
	d := backend.DTypeOf[T]()
	for _, op := range backend.BinaryOps() {
		for offset, n := range lengths {
			x, y := numbers[T](n, uint64(op)), numbers[T](n, uint64(op)+99)
			dst, intact := guarded[T](n, offset%4)
			err := Host{}.Binary(op, backend.Of(dst), backend.Of(x), backend.Of(y))
			if !op.Takes(d) {
				if !errors.Is(err, backend.ErrUnsupported) {
					t.Errorf("%v: %v", op, err)
				}
				continue
			}
			if err != nil || !intact() {
				t.Fatalf("%v of %d: error %v, guards whole: %v", op, n, err, intact())
			}
			ulps := slack(op.Rounded())
			for i := range dst {
				if want := binaryMeaning(op, x[i], y[i]); !agree(dst[i], want, ulps) {
					t.Fatalf("%v(%v, %v) = %v, want %v", op, value(x[i]), value(y[i]),
						value(dst[i]), value(want))
				}
			}
			testScalar(t, op, x)
			if err := (Host{}).Binary(op, backend.Of(y), backend.Of(x),
				backend.Of(y)); err != nil || !sameBits(y, dst) {
				t.Fatalf("%v of %d in place differs: %v", op, n, err)
			}
		}
	}
}

func testScalar[T backend.Element](t *testing.T, op backend.BinaryOp, x []T) {
	for _, s := range []float64{0, 1, 3, 7} {
		for _, reverse := range []bool{false, true} {
			dst, intact := guarded[T](len(x), 1)
			if err := (Host{}).BinaryScalar(op, backend.Of(dst), backend.Of(x), s,
				reverse); err != nil || !intact() {
				t.Fatalf("%v: error %v, guards whole: %v", op, err, intact())
			}
			for i := range dst {
				a, b := x[i], round[T](s)
				if reverse {
					a, b = b, a
				}
				if want := binaryMeaning(op, a, b); !agree(dst[i], want, slack(op.Rounded())) {
					t.Fatalf("%v(%v, %v) = %v, want %v", op, value(a), value(b), value(dst[i]),
						value(want))
				}
			}
		}
	}
}

func TestBinaryIsTheFormula(t *testing.T) {
	forEachDType(t, testBinary[backend.Float16], testBinary[backend.BFloat16], testBinary[float32],
		testBinary[float64],
		testBinary[int32], testBinary[int64], testBinary[byte])
}

func testFill[T backend.Element](t *testing.T) {
	for _, n := range lengths {
		dst, intact := guarded[T](n, 1)
		if err := (Host{}).Fill(backend.Of(dst), 7); err != nil || !intact() {
			t.Fatalf("fill: error %v, guards whole: %v", err, intact())
		}
		for i := range dst {
			if dst[i] != exact[T](7) {
				t.Fatalf("dst[%d] is %v", i, dst[i])
			}
		}
	}
}

func TestFill(t *testing.T) {
	forEachDType(t, testFill[backend.Float16], testFill[backend.BFloat16], testFill[float32],
		testFill[float64],
		testFill[int32], testFill[int64], testFill[byte])
	var once [1]backend.Float16
	// Just over the midpoint of 1 and its successor; rounding to 32 bits first
	// would make it the midpoint, and that even.
	if err := (Host{}).Fill(backend.Of(once[:]), 1+0x1p-11+0x1p-40); err != nil ||
		once[0] != 0x3c01 {
		t.Errorf("fill rounds twice: %#x %v", once[0], err)
	}
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
			if dst[i] != src[at] {
				t.Fatalf("%v: element %d is %v, want %v", c, i, dst[i], src[at])
			}
		}
	}
}

func TestCopyStridedIsTheLoop(t *testing.T) {
	forEachDType(t, testCopyStrided[backend.Float16], testCopyStrided[backend.BFloat16],
		testCopyStrided[float32],
		testCopyStrided[float64], testCopyStrided[int32], testCopyStrided[int64],
		testCopyStrided[byte])
}

func TestArgumentsOfArithmeticAreChecked(t *testing.T) {
	all := make([]float32, 9)
	a, b, overlapping := backend.Of(all[:4]), backend.Of(make([]float32, 5)), backend.Of(all[2:6])
	i := backend.Of(make([]int32, 4))
	device := backend.OnDevice(backend.F32, 0x1000, 4)
	h, onDevice := Host{}, Check{Device: true}
	for name, err := range map[string]error{
		"fill device":        h.Fill(device, 1),
		"fill fraction":      h.Fill(i, 0.5),
		"fill too large":     h.Fill(i, 1<<31),
		"fill NaN":           h.Fill(i, math.NaN()),
		"fill byte":          h.Fill(backend.Of(make([]byte, 1)), -1),
		"fill nothing":       h.Fill(backend.Buffer{}, 1),
		"unary op":           h.Unary(0, a, a),
		"unary lengths":      h.Unary(backend.Neg, a, b),
		"unary dtypes":       h.Unary(backend.Neg, a, i),
		"unary device":       h.Unary(backend.Neg, a, device),
		"unary overlap":      h.Unary(backend.Neg, a, overlapping),
		"binary op":          h.Binary(99, a, a, a),
		"binary lengths":     h.Binary(backend.Add, a, a, b),
		"binary overlap":     h.Binary(backend.Add, a, overlapping, a),
		"scalar of integers": h.BinaryScalar(backend.Add, i, i, 0.5, false),
		"strided past":       h.CopyStrided(a, b, []int{4}, []int{2}),
		"strided lengths":    h.CopyStrided(a, b, []int{3}, []int{1}),
		"strided axes":       h.CopyStrided(a, b, []int{4}, nil),
		"strided negative":   h.CopyStrided(a, b, []int{4}, []int{-1}),
		"strided overlap":    h.CopyStrided(a, overlapping, []int{4}, []int{1}),
		"strided many axes":  h.CopyStrided(a, b, make([]int, 9), make([]int, 9)),
		"move lengths":       onDevice.Move(a, b),
		"move host":          h.Move(a, device),
		"host on device":     onDevice.Unary(backend.Neg, a, a),
	} {
		if !errors.Is(err, backend.ErrArgument) {
			t.Errorf("%s: %v", name, err)
		}
	}
	for name, err := range map[string]error{
		"exp of integers": h.Unary(backend.Exp, i, i),
		"pow of integers": h.Binary(backend.Pow, i, i, i),
	} {
		if !errors.Is(err, backend.ErrUnsupported) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if err := onDevice.Move(device, a); err != nil {
		t.Error(err)
	}
}

func TestArithmeticAllocatesNothing(t *testing.T) {
	for _, d := range []backend.DType{backend.F16, backend.F32, backend.I64} {
		a := backend.Of(make([]byte, 4096)).As(d)
		b := backend.Of(make([]byte, 4096)).As(d)
		shape, strides := []int{b.Len() / 2, 2}, []int{1, b.Len() / 2}
		var h Host
		allocs := testing.AllocsPerRun(10, func() {
			if errors.Join(h.Fill(a, 1), h.Unary(backend.Neg, a, a), h.Binary(backend.Add, a, a, b),
				h.BinaryScalar(backend.Mul, a, a, 2, false),
				h.CopyStrided(a, b, shape, strides)) != nil {
				t.Error("failed")
			}
		})
		if allocs != 0 {
			t.Errorf("%v: %v allocations", d, allocs)
		}
	}
}

func BenchmarkArithmetic(b *testing.B) {
	const n = 1 << 16
	x, y := backend.Of(make([]float32, n)), backend.Of(make([]float32, n))
	var h Host
	for name, f := range map[string]func() error{
		"add":       func() error { return h.Binary(backend.Add, y, y, x) },
		"mulscalar": func() error { return h.BinaryScalar(backend.Mul, y, x, 2, false) },
		"exp":       func() error { return h.Unary(backend.Exp, y, x) },
		"transpose": func() error { return h.CopyStrided(y, x, []int{256, 256}, []int{1, 256}) },
	} {
		b.Run(fmt.Sprintf("%s/%d", name, n), func(b *testing.B) {
			b.SetBytes(4 * n)
			for b.Loop() {
				if err := f(); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
