package kernels

import (
	"errors"
	"fmt"
	"math"
	"strings"
	"testing"

	"github.com/euryale-ml/euryale/backend"
)

// matrixOf returns rows x columns small integers of dtype d, which begin with `seed`, in rows of
// pitch elements, as they are or transposed, and the numbers themselves.
func matrixOf(t *testing.T, d backend.DType, batch, rows, columns, more, seed int, transposed bool) (Matrix, []float64) {
	t.Helper()
	inRows, inColumns := rows, columns
	if transposed {
		inRows, inColumns = columns, rows
	}
	m := Matrix{Pitch: inColumns + more, Transposed: transposed}
	m.Stride = inRows*m.Pitch + more
	wide := make([]float64, batch*m.Stride)
	numbers := make([]float64, batch*rows*columns)
	for i := range numbers {
		b, r, c := i/(rows*columns), i/columns%rows, i%columns
		numbers[i] = float64((i*7+seed)%11 - 5)
		row, column := m.Steps()
		wide[b*m.Stride+r*row+c*column] = numbers[i]
	}
	m.Buffer = castTo(t, d, wide)
	return m, numbers
}

// castTo returns numbers as a buffer of d.
func castTo(t *testing.T, d backend.DType, numbers []float64) backend.Buffer {
	t.Helper()
	b := backend.Of(make([]float64, len(numbers))).As(d).Slice(0, len(numbers))
	if err := (Host{}).Cast(b, backend.Of(numbers)); err != nil {
		t.Fatal(err)
	}
	return b
}

// widened returns the elements of a buffer.
func widened(t *testing.T, b backend.Buffer) []float64 {
	t.Helper()
	numbers := make([]float64, b.Len())
	if err := (Host{}).Cast(backend.Of(numbers), b); err != nil {
		t.Fatal(err)
	}
	return numbers
}

func TestMultiplyIsTheTripleLoop(t *testing.T) {
	for _, types := range [][2]backend.DType{
		{backend.F64, backend.F64}, {backend.F32, backend.F32}, {backend.F16, backend.F16},
		{backend.BF16, backend.BF16}, {backend.F16, backend.F32}, {backend.BF16, backend.F32},
	} {
		for _, shape := range [][4]int{{1, 1, 1, 1}, {1, 3, 5, 2}, {2, 4, 65, 3}, {3, 2, 130, 7}, {1, 5, 1, 9}, {2, 3, 4, 0}} {
			for flags := range 4 {
				for _, beta := range []float64{0, 2} {
					batch, M, N, K := shape[0], shape[1], shape[2], shape[3]
					p := Product{Batch: batch, M: M, N: N, K: K, Alpha: 0.5, Beta: beta}
					var a, b []float64
					p.A, a = matrixOf(t, types[0], batch, M, K, 2, 1, flags&1 != 0)
					p.B, b = matrixOf(t, types[0], batch, K, N, 1, 3, flags&2 != 0)
					c, before := matrixOf(t, types[1], batch, M, N, 3, 5, false)
					if p.C = c; beta == 0 {
						nans := make([]float64, c.Buffer.Len())
						for i := range nans {
							nans[i] = math.NaN()
						}
						p.C.Buffer = castTo(t, types[1], nans)
					}
					if err := (Host{}).Multiply(p); err != nil {
						t.Fatal(err)
					}
					got := widened(t, p.C.Buffer)
					for i := range before {
						n, r, col := i/(M*N), i/N%M, i%N
						want := beta * before[i]
						for k := range K {
							want += 0.5 * a[(n*M+r)*K+k] * b[(n*K+k)*N+col]
						}
						if g := got[n*p.C.Stride+r*p.C.Pitch+col]; g != want {
							t.Fatalf("%v of %v, transposed %02b, beta %v: element %d is %v, want %v", shape, types, flags, beta, i, g, want)
						}
					}
				}
			}
		}
	}
}

func TestMultiplyWritesOnlyTheResult(t *testing.T) {
	c := make([]float32, 3*8)
	for i := range c {
		c[i] = -1
	}
	a, b := backend.Of([]float32{1, 2, 3, 4}), backend.Of([]float32{1, 0, 0, 1})
	p := Product{M: 2, N: 2, K: 2, Alpha: 1, A: Matrix{Buffer: a, Pitch: 2}, B: Matrix{Buffer: b, Pitch: 2}, C: Matrix{Buffer: backend.Of(c[8:]), Pitch: 8}}
	if err := (Host{}).Multiply(p); err != nil {
		t.Fatal(err)
	}
	want := "[-1 -1 -1 -1 -1 -1 -1 -1 1 2 -1 -1 -1 -1 -1 -1 3 4 -1 -1 -1 -1 -1 -1]"
	if got := fmt.Sprint(c); got != want {
		t.Errorf("got %s, want %s", got, want)
	}
}

func TestMultiplyRefusesWhatDoesNotFit(t *testing.T) {
	f32 := func(n int) backend.Buffer { return backend.Of(make([]float32, n)) }
	good := Product{M: 2, N: 3, K: 4, Alpha: 1, A: Matrix{Buffer: f32(8), Pitch: 4}, B: Matrix{Buffer: f32(12), Pitch: 3}, C: Matrix{Buffer: f32(6), Pitch: 3}}
	for want, change := range map[string]func(p *Product){
		"negative":           func(p *Product) { p.K = -1 },
		"one dtype":          func(p *Product) { p.A.Buffer = backend.Of(make([]float64, 8)) },
		"A takes 8 elements": func(p *Product) { p.A.Buffer = f32(7) },
		"a pitch of 2":       func(p *Product) { p.B.Pitch = 2 },
		"C takes 6 elements": func(p *Product) { p.C.Buffer = f32(5) },
		"transposed":         func(p *Product) { p.C.Transposed = true },
		"overlap":            func(p *Product) { p.Batch, p.C.Stride, p.C.Buffer = 2, 5, f32(11) },
	} {
		p := good
		change(&p)
		if err := (Host{}).Multiply(p); !errors.Is(err, backend.ErrArgument) || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want an error of the argument with %q", err, want)
		}
	}
	if err := (Host{}).Multiply(good); err != nil {
		t.Error(err)
	}
}
