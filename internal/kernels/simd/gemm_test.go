package simd

import (
	"fmt"
	"math"
	"slices"
	"testing"

	"github.com/euryale-ml/euryale/backend"
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
			for _, k := range []int{0, 1, 7, 2*lanes[T](level) + 9} {
				for flags := range 8 {
					p := product[T](level, m, n, k, flags&1 != 0, flags&2 != 0)
					p.Beta = T(flags >> 2 * 2)
					checkProduct(t, level, p)
					checkFew(t, level, p)
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
	checkFew(t, level, p)
	checkCopied[T](t, level, m, n%(CopyWidth[T]()+1))
	checkTransposed[T](t, level, m, n)
}

// guard is how many elements lie before and after what a product may write, and between its rows.
const guard = 3

// product returns one of small integers, of the transpose of A, and a packed B, if it is so wished.
func product[T Float](level Level, m, n, k int, transposed, packed bool) *Product[T] {
	p := &Product[T]{
		M: m, N: n, K: k, A: make([]T, m*k), C: make([]T, m*(n+guard)+2*guard),
		ARow: k, AStep: 1, BStep: n, CPitch: n + guard, Alpha: 0.5,
	}
	if transposed {
		p.ARow, p.AStep = 1, m
	}
	b := make([]T, k*n)
	if packed {
		width := PanelWidth[T](level)
		p.BStep, p.BPanel = width, width*k
		b = make([]T, (n+width-1)/width*p.BPanel)
	}
	for i := range p.A {
		p.A[i] = T(i*7%11 - 5)
	}
	for i := range b {
		b[i] = T(i*5%13 - 6)
	}
	p.B = backend.Of(b)
	for i := range p.C {
		p.C[i] = T(i%17 - 8)
	}
	return p
}

// checkFew checks what is for few rows alone: a B of 16 bits, and dot products.
func checkFew[T Float](t *testing.T, level Level, p *Product[T]) {
	t.Helper()
	if p.M > FewRows || p.BPanel > 0 || p.K*p.N == 0 {
		return
	}
	if p.AStep == 1 {
		checkDots(t, level, p, backend.Of(p.A), p.B)
	}
	b, is := any(backend.View[T](p.B)).([]float32)
	if !is {
		return
	}
	defer func(b backend.Buffer) { p.B = b }(p.B)
	p.B = narrowed[backend.BFloat16](b)
	checkProduct(t, level, p)
	if a := any(p.A).([]float32); p.AStep == 1 {
		checkDots(t, level, p, narrowed[backend.BFloat16](a), p.B)
	}
	p.B = narrowed[backend.Float16](b)
	checkProduct(t, level, p)
	if a := any(p.A).([]float32); p.AStep == 1 {
		checkDots(t, level, p, narrowed[backend.Float16](a), p.B)
	}
}

func narrowed[H half](x []float32) backend.Buffer {
	y := make([]H, len(x))
	Narrow(Go, y, x)
	return backend.Of(y)
}

// checkDots multiplies rows of a with rows of b as if they were columns.
func checkDots[T Float](t *testing.T, level Level, p *Product[T], a, b backend.Buffer) {
	t.Helper()
	left, right, c := make([]T, a.Len()), make([]T, b.Len()), slices.Clone(p.C)
	load(left, a, 0)
	load(right, b, 0)
	d := Dots[T]{M: p.M, N: p.N, K: p.K, A: a, B: b, ARow: p.K, BColumn: p.K, C: c[guard:],
		CPitch: p.CPitch, Alpha: p.Alpha, Beta: p.Beta}
	want := slices.Clone(c)
	for i := range p.M {
		for j := range p.N {
			sum, to := T(0), guard+i*p.CPitch+j
			for k := range p.K {
				sum += left[i*p.K+k] * right[j*p.K+k]
			}
			want[to] = p.Alpha * sum
			if p.Beta != 0 {
				want[to] += p.Beta * c[to]
			} else {
				c[to] = T(math.NaN())
			}
		}
	}
	d.Multiply(level)
	for i := range c {
		if c[i] != want[i] {
			t.Fatalf("dots, %d x %d x %d of %v, beta %v: element %d is %v, want %v", p.M, p.N, p.K,
				a.DType(), p.Beta, i, c[i], want[i])
		}
	}
}

// checkProduct multiplies and compares with the sums; where Beta is 0, C holds NaN before.
func checkProduct[T Float](t *testing.T, level Level, p *Product[T]) {
	t.Helper()
	want, right := append([]T(nil), p.C...), make([]T, p.B.Len())
	load(right, p.B, 0)
	width := PanelWidth[T](level)
	for i := range p.M {
		for j := range p.N {
			b, c := j, guard+i*p.CPitch+j
			if p.BPanel > 0 {
				b = j/width*p.BPanel + j%width
			}
			sum := T(0)
			for k := range p.K {
				sum += p.A[i*p.ARow+k*p.AStep] * right[k*p.BStep+b]
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
	p.C = all
	for i := range all {
		if all[i] != want[i] {
			t.Fatalf("%d x %d x %d, A by %d and %d, B of %v, panels of %d, beta %v: element %d "+
				"is %v, want %v", p.M, p.N, p.K, p.ARow, p.AStep, p.B.DType(), p.BPanel, p.Beta, i,
				all[i], want[i])
		}
	}
}
