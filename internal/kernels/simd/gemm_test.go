package simd

import (
	"fmt"
	"math"
	"testing"
)

// TestMultiplyIsTheLoop compares each tile with the sums of small integers, which are exact.
func TestMultiplyIsTheLoop(t *testing.T) {
	for _, level := range Levels() {
		t.Run(fmt.Sprint("f32/", level), func(t *testing.T) {
			multiplyIsTheLoop[float32](t, level)
		})
		t.Run(fmt.Sprint("f64/", level), func(t *testing.T) {
			multiplyIsTheLoop[float64](t, level)
		})
	}
}

func multiplyIsTheLoop[T Float](t *testing.T, level Level) {
	width := PanelWidth[T](level)
	for m := 1; m <= 13; m++ {
		for _, n := range []int{1, 3, lanes[T](level), width - 1, width, 2*width + 5, 8*width + 1} {
			for _, k := range []int{0, 1, 7} {
				for flags := range 8 {
					p := product[T](level, m, n, k, flags&1 != 0, flags&2 != 0)
					p.Beta = T(flags >> 2 * 2)
					checkProduct(t, level, p)
				}
			}
		}
	}
}

// FuzzMultiply tries products of any shape, and the copies that pack their operands.
func FuzzMultiply(f *testing.F) {
	f.Add(uint8(14), uint8(33), uint8(9), uint8(3))
	f.Fuzz(func(t *testing.T, m, n, k, flags uint8) {
		for _, level := range Levels() {
			fuzzMultiply[float32](t, level, int(m), int(n), int(k%32), flags)
			fuzzMultiply[float64](t, level, int(m), int(n), int(k%32), flags)
		}
	})
}

func fuzzMultiply[T Float](t *testing.T, level Level, m, n, k int, flags uint8) {
	p := product[T](level, m, n, k, flags&1 != 0, flags&2 != 0)
	p.Beta = T(flags >> 2 % 3)
	checkProduct(t, level, p)
	checkCopied[T](t, level, m, n%(CopyWidth[T]()+1))
	checkTransposed[T](t, level, m, n)
}

// guard is how many elements lie before and after what a product may write, and between its rows.
const guard = 3

// product returns one of small integers, of the transpose of A, and a packed B, if it is so wished.
func product[T Float](level Level, m, n, k int, transposed, packed bool) *Product[T] {
	p := &Product[T]{
		M: m, N: n, K: k, A: make([]T, m*k), B: make([]T, k*n), C: make([]T, m*(n+guard)+2*guard),
		ARow: k, AStep: 1, BStep: n, CPitch: n + guard, Alpha: 0.5,
	}
	if transposed {
		p.ARow, p.AStep = 1, m
	}
	if packed {
		width := PanelWidth[T](level)
		p.BStep, p.BPanel = width, width*k
		p.B = make([]T, (n+width-1)/width*p.BPanel)
	}
	for i := range p.A {
		p.A[i] = T(i*7%11 - 5)
	}
	for i := range p.B {
		p.B[i] = T(i*5%13 - 6)
	}
	for i := range p.C {
		p.C[i] = T(i%17 - 8)
	}
	return p
}

// checkProduct multiplies and compares with the sums; where Beta is 0, C holds NaN before.
func checkProduct[T Float](t *testing.T, level Level, p *Product[T]) {
	t.Helper()
	want := append([]T(nil), p.C...)
	width := PanelWidth[T](level)
	for i := range p.M {
		for j := range p.N {
			b, c := j, guard+i*p.CPitch+j
			if p.BPanel > 0 {
				b = j/width*p.BPanel + j%width
			}
			sum := T(0)
			for k := range p.K {
				sum += p.A[i*p.ARow+k*p.AStep] * p.B[k*p.BStep+b]
			}
			want[c] = p.Alpha*sum + p.Beta*want[c]
			if p.Beta == 0 {
				p.C[c] = T(math.NaN())
			}
		}
	}
	all := p.C
	p.C = p.C[guard:]
	Multiply(level, p)
	for i := range all {
		if all[i] != want[i] {
			t.Fatalf("%d x %d x %d, A by %d and %d, panels of %d, beta %v: element %d is %v, "+
				"want %v", p.M, p.N, p.K, p.ARow, p.AStep, p.BPanel, p.Beta, i, all[i], want[i])
		}
	}
}
