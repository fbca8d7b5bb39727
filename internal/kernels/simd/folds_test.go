package simd

import (
	"fmt"
	"math"
	"math/rand/v2"
	"testing"
)

func TestFoldsAreTheLoop(t *testing.T) {
	t.Run("f32", testFolds[float32])
	t.Run("f64", testFolds[float64])
}

// testFolds compares all levels with the loop, of all lengths, with NaN, infinities and zeros of
// both signs, and checks that nothing around the elements is read or written.
func testFolds[T Float](t *testing.T) {
	const longest, around = 100, 20
	r := rand.New(rand.NewPCG(3, 4))
	edges := []T{0, T(math.Copysign(0, -1)), T(math.NaN()), T(math.Inf(1)), T(math.Inf(-1)),
		0x1p-149}
	for _, level := range Levels()[1:] {
		for n := range longest {
			for kind := range 6 {
				memory := make([]T, longest+2*around)
				for i := range memory {
					memory[i] = T(math.NaN())
				}
				x := memory[around+n%3 : around+n%3+n]
				for i := range x {
					switch kind {
					case 0: // numbers of all signs
						x[i] = T(r.NormFloat64())
					case 1, 2: // only zeros, mostly with one sign
						x[i] = T(math.Copysign(0, float64(kind*2-3)))
						if r.IntN(n) == 0 {
							x[i] = -x[i]
						}
					case 3, 4: // of one sign, and a zero
						if x[i] = T(math.Abs(r.NormFloat64()) * float64(kind*2-7)); r.IntN(n) == 0 {
							x[i] = edges[r.IntN(2)]
						}
					case 5:
						if x[i] = T(r.NormFloat64()); r.IntN(8) == 0 {
							x[i] = edges[r.IntN(len(edges))]
						}
					}
				}
				what := fmt.Sprintf("%v, %d elements, kind %d", level, n, kind)
				checkFolds(t, level, what, x)
			}
		}
	}
}

// checkFolds compares the folds of a level with the loops.
func checkFolds[T Float](t *testing.T, level Level, what string, x []T) {
	t.Helper()
	same(t, what+": sum", []float64{Sum(level, x)}, []float64{Sum(Go, x)})
	if len(x) > 0 {
		same(t, what+": max", []T{Max(level, x)}, []T{Max(Go, x)})
		same(t, what+": min", []T{Min(level, x)}, []T{Min(Go, x)})
	}
	got, want := make([]float64, len(x)+2), make([]float64, len(x)+2)
	for i := range got {
		got[i], want[i] = float64(i)/3, float64(i)/3
	}
	Accumulate(level, got[1:len(x)+1], x)
	Accumulate(Go, want[1:len(x)+1], x)
	same(t, what+": accumulate", got, want)
}

// The order of a sum is the one that its documentation states.
func TestSumHasItsOrder(t *testing.T) {
	x := []float64{1e16, 1, -1e16}
	for i := range 13 {
		x = append(x, float64(i)*0)
	}
	x = append(x, 1) // to the first sum: 1e16 + 1 is 1e16
	for _, level := range Levels() {
		if got := Sum(level, x); got != 1 {
			t.Errorf("%v: the sum is %v, want 1", level, got)
		}
	}
}

func TestSpreadFillsRows(t *testing.T) {
	t.Run("f32", testSpread[float32])
	t.Run("f64", testSpread[float64])
}

func testSpread[T Float](t *testing.T) {
	const around = 20
	for _, level := range Levels() {
		for n := 1; n < 40; n++ {
			for rows := range 4 {
				memory, x := make([]T, rows*n+2*around), []T{3, -1, 2}[:rows]
				Spread(level, memory[around:around+rows*n], x, n)
				for i, got := range memory {
					want := T(0)
					if i >= around && i < around+rows*n {
						want = x[(i-around)/n]
					}
					if got != want {
						t.Fatalf("%v, %d rows of %d: element %d is %v, want %v", level, rows, n,
							i-around, got, want)
					}
				}
			}
		}
	}
}
