package kernels

import (
	"testing"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/testing/require"
)

// matrixOf returns rows x columns small integers of dtype d, which begin with `seed`, in rows of
// pitch elements, as they are or transposed, and the numbers themselves.
func matrixOf(t *testing.T, d backend.DType, batch, rows, columns, more, seed int,
	transposed bool) (Matrix, []float64) {
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
	require.NoError(t, (Host{}).Cast(b, backend.Of(numbers)))
	return b
}

func TestMultiplyRefusesWhatDoesNotFit(t *testing.T) {
	f32 := func(n int) backend.Buffer { return backend.Of(make([]float32, n)) }
	good := Product{M: 2, N: 3, K: 4, Alpha: 1, A: Matrix{Buffer: f32(8), Pitch: 4},
		B: Matrix{Buffer: f32(12), Pitch: 3}, C: Matrix{Buffer: f32(6), Pitch: 3}}
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
		require.Fails(t, "Host.Multiply", (Host{}).Multiply(p), backend.ErrArgument, want)
	}
	require.NoError(t, (Host{}).Multiply(good))
}
