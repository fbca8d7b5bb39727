package simd

import (
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"slices"
	"testing"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/testing/require"
)

// meaning has functions of which the digits, or the range, of those of package math are too few.
var meaning = map[Op]func(x float64) float64{
	Exp: exp,
	Expm1: func(x float64) float64 {
		if x > 40 {
			return exp(x)
		}
		return math.Expm1(x)
	},
	Log: func(x float64) float64 { return log2(x) * math.Ln2 },
	Sigmoid: func(x float64) float64 {
		if x < 0 {
			return exp(x) / (1 + exp(x))
		}
		return 1 / (1 + math.Exp(-x))
	},
}

// meaningOf returns what a function of a type means: in float64 if it is rounded, else the loop.
func meaningOf[T Float](op Op) func(x T) float64 {
	f := meaning[op]
	if f == nil {
		f, _ = rounded(op)
	}
	if f != nil {
		return func(x T) float64 { return f(float64(x)) }
	}
	return func(x T) float64 {
		one := []T{x}
		UnaryLoop(op, one, one)
		return float64(one[0])
	}
}

// inVectors returns the functions of one operand, and of two, that have vector instructions.
func inVectors[T Float]() (unary, binary []Op) {
	for op := Neg; op <= Erf; op++ {
		if Unary[T](Best(), op, nil, nil) {
			unary = append(unary, op)
		}
		if Binary[T](Best(), op, nil, nil, nil) {
			binary = append(binary, op)
		}
	}
	return unary, binary
}

// exp is right where math.Exp overflows too early, and where it loses digits of subnormal numbers.
func exp(x float64) float64 {
	if math.Abs(x) < 700 {
		return math.Exp(x)
	}
	half := math.Exp(x / 2)
	return half * half
}

// specials are where functions have edges.
func specials() []float64 {
	list := []float64{
		0, 1, 2, 0.5, math.Sqrt2, math.Sqrt2 / 2, math.Inf(1), math.NaN(), math.MaxFloat32,
		math.MaxFloat64, 0x1p-126, 0x1p-149, 0x1p-1022, 0x1p-1074,
		0x1.fffffcp-127, 0x1p-127, 88.722839, 88.72284, 87.3365, 103.97208, 103.97209, 104,
		709.782712893384, 709.7827128933841, 745.13, 745.14, 17.3, 18, 9.01, 9.02, 0.93, 0.9299999,
		4, 3.92, 3.8, 20, 40, 36.7, 0.34657359, 0.34657362, 0.25, 1e-8, 1e-20, 1 - 0x1p-24, 1 +
			0x1p-23, 1 - 0x1p-53, 8388607.5, 4194304.5, 1e10,
	}
	for _, x := range list {
		list = append(list, -x)
	}
	return list
}

func samples[T Float](n int) []T {
	r := rand.New(rand.NewPCG(1, 2))
	var list []T
	for _, x := range specials() {
		list = append(list, T(x))
	}
	for range n {
		list = append(list, T(r.NormFloat64()*20), T(r.NormFloat64()), T(math.Ldexp(2*r.Float64()-1,
			r.IntN(280)-150)), T(1+math.Ldexp(2*r.Float64()-1, -r.IntN(20))))
	}
	return list
}

// unitsOff returns how far a result is from another one, in units of its last place, 0 if it is the
// nearest.
func unitsOff[T Float](got T, want float64) float64 {
	if rounded := T(want); got == rounded || got != got && rounded != rounded {
		return 0
	}
	least, digits := -126, 23
	if _, double := any(got).(float64); double {
		least, digits = -1022, 52
	}
	if math.IsInf(want, 0) || got != got || want != want {
		return math.Inf(1)
	}
	if want != 0 {
		least = max(least, math.Ilogb(want))
	}
	return math.Ldexp(math.Abs(float64(got)-want), digits-least)
}

// The bounds of Unary, in units of the last place.
const (
	bound32 = 3
	bound64 = 4
)

func TestFunctionsAreAccurate(t *testing.T) {
	single, _ := inVectors[float32]()
	for _, op := range single {
		t.Run("f32", func(t *testing.T) { checkFunction(t, op, samples[float32](3000), bound32) })
	}
	double, _ := inVectors[float64]()
	for _, op := range double {
		t.Run("f64", func(t *testing.T) { checkFunction(t, op, samples[float64](3000), bound64) })
	}
}

// All float32 are operands once, which takes ten minutes of two cores, or a sample of them. The log
// has the largest errors, which the documentation of Unary has.
func TestFunctionsAreAccurateEverywhere(t *testing.T) {
	const block = 1 << 14
	step := 1 << 15
	if os.Getenv("EURYALE_FULL") != "" {
		step = 1
	}
	all, _ := inVectors[float32]()
	for _, op := range all {
		if f, _ := rounded(op); f == nil {
			continue
		}
		t.Run(fmt.Sprint(op), func(t *testing.T) {
			t.Parallel()
			x, worst := make([]float32, block), 0.0
			for first := 0; first < 1<<32; first += step * block {
				for i := range x {
					x[i] = math.Float32frombits(uint32(first + i*step + i%step))
				}
				worst = max(worst, checkFunction(t, op, x, bound32))
			}
			t.Logf("off by up to %.2f units of the last place", worst)
		})
	}
}

// checkFunction compares the results of all levels with the meaning, and with each other, and
// returns the largest error in units of the last place.
func checkFunction[T Float](t *testing.T, op Op, x []T, bound float64) (worst float64) {
	mean := meaningOf[T](op)
	var first []T
	for _, level := range Levels()[1:] {
		got := make([]T, len(x))
		require.That(t, Unary(level, op, got, x), "%v has no %v", level, op)
		if first != nil {
			same(t, fmt.Sprint(level, " ", op), got, first)
			continue
		}
		first = got
		for i, y := range got {
			want := mean(x[i])
			off := unitsOff(y, want)
			worst = max(worst, off)
			if f, _ := rounded(op); off > bound || f == nil && off > 0 || y == 0 &&
				math.Signbit(float64(y)) != math.Signbit(want) {
				t.Fatalf("%v: %v(%v) is %v, want %v: off by %.2f units of the last place", level,
					op, x[i], y, want, off)
			}
		}
	}
	return worst
}

// same compares bits, except those of a NaN.
func same[T Float](t *testing.T, what string, got, want []T) {
	t.Helper()
	for i, y := range got {
		require.That(t, bitsOf(y) == bitsOf(want[i]) || y != y && want[i] != want[i],
			"%s: element %d is %v, want %v", what, i, y, want[i])
	}
}

func bitsOf[T Float](x T) uint64 {
	if x, ok := any(x).(float32); ok {
		return uint64(math.Float32bits(x))
	}
	return math.Float64bits(float64(x))
}

func TestBinaryIsTheLoop(t *testing.T) {
	t.Run("f32", testBinary[float32])
	t.Run("f64", testBinary[float64])
}

func testBinary[T Float](t *testing.T) {
	s := specials()
	var x, y []T
	for _, a := range s {
		for _, b := range s {
			x, y = append(x, T(a)), append(y, T(b))
		}
	}
	got, want := make([]T, len(x)), make([]T, len(x))
	for _, level := range Levels()[1:] {
		_, all := inVectors[T]()
		for _, op := range all {
			require.Check(t, Binary(level, op, got, x, y), "%v has no %v", level, op)
			BinaryLoop(op, want, x, y)
			same(t, fmt.Sprint(level, " ", op), got, want)
		}
		Where(level, got, x, y, x)
		for i := range want {
			if want[i] = x[i]; x[i] != 0 {
				want[i] = y[i]
			}
		}
		same(t, fmt.Sprint(level, " where"), got, want)
	}
}

// All lengths and offsets, with operands that repeat, in place, and with elements around that
// nothing may touch.
func TestFunctionsKeepToTheirElements(t *testing.T) {
	t.Run("f32", testGuards[float32])
	t.Run("f64", testGuards[float64])
}

func testGuards[T Float](t *testing.T) {
	const longest, around = 150, 40
	memory := make([]T, longest+2*around)
	x, scalar := make([]T, longest), make([]T, Repeat)
	for i := range x {
		x[i] = T(i%13) + 1
	}
	for i := range scalar {
		scalar[i] = 3
	}
	// The results of dst[i] = x[i] - 3, 3 - x[i], x[i] ? 3 : x[i] and sqrt(x[i]).
	runs := []struct {
		run  func(level Level, dst, x []T) bool
		want func(x T) T
	}{
		{func(l Level, dst, x []T) bool { return Binary(l, Sub, dst, x, scalar) },
			func(x T) T { return x - 3 }},
		{func(l Level, dst, x []T) bool { return Binary(l, Sub, dst, scalar, x) },
			func(x T) T { return 3 - x }},
		{func(l Level, dst, x []T) bool { return Where(l, dst, x, scalar, x) }, func(T) T {
			return 3
		}},
		{func(l Level, dst, x []T) bool { return Unary(l, Sqrt, dst, x) }, func(x T) T {
			return T(math.Sqrt(float64(x)))
		}},
		{func(l Level, dst, x []T) bool { return Unary(l, Relu, dst, x) }, func(x T) T {
			return x
		}},
	}
	for _, level := range Levels()[1:] {
		for n := range longest {
			for k, r := range runs {
				for i := range memory {
					memory[i] = -7
				}
				at := around - n%5
				dst := memory[at : at+n : at+n]
				if n%2 == 0 {
					copy(dst, x)
					r.run(level, dst, dst)
				} else {
					r.run(level, dst, x[:n:n])
				}
				for i, got := range memory {
					want := T(-7)
					if i >= at && i < at+n {
						want = r.want(x[i-at])
					}
					if got != want {
						t.Fatalf("%v, run %d, %d elements: element %d is %v, want %v", level, k, n,
							i-at, got, want)
					}
				}
			}
		}
	}
}

// FuzzFunctions gives functions and folds elements of any bits, at any place.
func FuzzFunctions(f *testing.F) {
	f.Add(uint8(10), uint8(3), []byte("elements of any bits, of which there are more than a "+
		"vector has and less than two have: 0123456789abcdef"))
	f.Fuzz(func(t *testing.T, op, offset uint8, data []byte) {
		t.Run("f32", func(t *testing.T) {
			fuzzFunctions[float32](t, op, int(offset)%64, data, bound32)
		})
		t.Run("f64", func(t *testing.T) {
			fuzzFunctions[float64](t, op, int(offset)%64, data, bound64)
		})
	})
}

func fuzzFunctions[T Float](t *testing.T, op uint8, offset int, data []byte, bound float64) {
	d := backend.DTypeOf[T]()
	nbytes := len(data) / 3 / d.Size() * d.Size()
	at := func(i int) operand {
		return operandOf(d, data[i*nbytes:(i+1)*nbytes], (offset+i*d.Size())%17)
	}
	x, y, c := backend.View[T](at(0).at), backend.View[T](at(1).at), backend.View[T](at(2).at)
	ones, twos := inVectors[T]()
	if len(ones) == 0 {
		return // there are no vector instructions
	}
	unary, binary := ones[int(op)%len(ones)], twos[int(op)%len(twos)]
	both, chosen := make([]T, len(x)), slices.Clone(y)
	BinaryLoop(binary, both, x, y)
	for i := range x {
		if c[i] != 0 {
			chosen[i] = x[i]
		}
	}
	checkFunction(t, unary, x, bound)
	for _, level := range Levels()[1:] {
		check := func(what any, want []T, run func(dst []T)) {
			dst := operandOf(d, make([]byte, nbytes), offset)
			run(backend.View[T](dst.at))
			if same(t, fmt.Sprint(level, " ", what), backend.View[T](dst.at), want); !dst.intact() {
				t.Fatalf("%v %v: wrote around %d elements", level, what, len(want))
			}
		}
		one := make([]T, len(x))
		Unary(level, unary, one, x)
		check(unary, one, func(dst []T) { Unary(level, unary, dst, x) })
		check(binary, both, func(dst []T) { Binary(level, binary, dst, x, y) })
		check("where", chosen, func(dst []T) { Where(level, dst, c, x, y) })
		checkFolds(t, level, fmt.Sprint(level), x)
	}
}

func TestGoHasNoVectors(t *testing.T) {
	x := []float32{1}
	require.Check(t, !Unary(Go, Exp, x, x) && !Binary(Go, Add, x, x, x) && !Where(Go, x, x, x, x) &&
		x[0] == 1, "a level without vectors has computed")
}

func TestShortOperandsPanic(t *testing.T) {
	defer func() {
		require.Check(t, recover() != nil, "an operand of 3 elements for 20 was taken")
	}()
	x := make([]float32, 20)
	Binary(Best(), Add, x, x, x[:3])
}
