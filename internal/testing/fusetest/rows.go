package fusetest

import (
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/kernels/fuse"
)

// SoftMax is a softmax of rows of n elements.
func SoftMax(d backend.DType, rows, n int) *fuse.Program {
	p := &fuse.Program{Shape: []int{rows, n}}
	x := p.Load(d, n, 1)
	e := p.Do(fuse.Exp, p.Do(fuse.Sub, x, p.Do(fuse.MaxRow, x)))
	p.Store(p.Do(fuse.Div, e, p.Do(fuse.SumRow, e)), d, n, 1)
	return p
}

// LayerNorm is a layer norm of rows of n elements, with gain and bias; the mean and the inverse of
// the deviation are outputs, too.
func LayerNorm(d backend.DType, rows, n int) *fuse.Program {
	p := &fuse.Program{Shape: []int{rows, n}}
	x, gain, bias := p.Load(d, n, 1), p.Load(d, 0, 1), p.Load(d, 0, 1)
	z, mean, inverse := normalised(p, x, n)
	p.Store(p.Do(fuse.Add, p.Do(fuse.Mul, z, gain), bias), d, n, 1)
	p.Store(mean, d, 1, 0)
	p.Store(inverse, d, 1, 0)
	return p
}

// normalised adds x by the mean and deviation of its rows.
func normalised(p *fuse.Program, x fuse.Value, n int) (z, mean, inverse fuse.Value) {
	t := p.Code[x].Type
	share := p.Const(t, 1/float64(n))
	mean = p.Do(fuse.Mul, p.Do(fuse.SumRow, x), share)
	away := p.Do(fuse.Sub, x, mean)
	variance := p.Do(fuse.Mul, p.Do(fuse.SumRow, p.Do(fuse.Square, away)), share)
	inverse = p.Do(fuse.InvSqrt, p.Do(fuse.Add, variance, p.Const(t, 1e-5)))
	return p.Do(fuse.Mul, away, inverse), mean, inverse
}

// LayerNormGrad is dx of LayerNorm from x, dy and the gain.
func LayerNormGrad(d backend.DType, rows, n int) *fuse.Program {
	p := &fuse.Program{Shape: []int{rows, n}}
	x, dy, gain := p.Load(d, n, 1), p.Load(d, n, 1), p.Load(d, 0, 1)
	z, _, inverse := normalised(p, x, n)
	share := p.Const(p.Code[x].Type, 1/float64(n))
	dz := p.Do(fuse.Mul, dy, gain)
	mean := p.Do(fuse.Mul, p.Do(fuse.SumRow, dz), share)
	along := p.Do(fuse.Mul, p.Do(fuse.SumRow, p.Do(fuse.Mul, dz, z)), share)
	p.Store(p.Do(fuse.Mul, p.Do(fuse.Sub, p.Do(fuse.Sub, dz, mean), p.Do(fuse.Mul, z, along)),
		inverse), d, n, 1)
	return p
}

// LayerNormGrads is LayerNormGrad with the gradients of gain and bias, and of a bias that was added
// to x, and the largest sum of a row for each column.
func LayerNormGrads(d backend.DType, rows, n int) *fuse.Program {
	p := LayerNormGrad(d, rows, n)
	t := p.Code[0].Type
	x, dy := fuse.Value(0), fuse.Value(1)
	z, _, _ := normalised(p, x, n)
	p.Reduced = []bool{true, false}
	p.Fold(backend.Sum, p.Do(fuse.Mul, dy, z), t, 0, 1)
	p.Fold(backend.Avg, dy, t, 0, 1)
	p.Fold(backend.Max, p.Do(fuse.SumRow, dy), t, 0, 1)
	p.Fold(backend.Sum, p.Outputs[0].Value, t, 0, 1)
	return p
}

// CrossEntropy is the loss of each row of logits by its label, and the gradient.
func CrossEntropy(d backend.DType, rows, n int) *fuse.Program {
	p := &fuse.Program{Shape: []int{rows, n}}
	x, label := p.Load(d, n, 1), p.Load(backend.I64, 1, 0)
	t := p.Code[x].Type
	away := p.Do(fuse.Sub, x, p.Do(fuse.MaxRow, x))
	log := p.Do(fuse.Sub, away, p.Do(fuse.Log, p.Do(fuse.SumRow, p.Do(fuse.Exp, away))))
	chosen := p.Do(fuse.Equal, label, p.Index(0, 1))
	p.Store(p.Do(fuse.Neg, p.Do(fuse.SumRow, p.Do(fuse.Where, chosen, log, p.Const(t, 0)))), d,
		1, 0)
	probability := p.Do(fuse.Exp, log)
	p.Store(p.Do(fuse.Where, chosen, p.Do(fuse.Add, probability, p.Const(t, -1)), probability), d,
		n, 1)
	return p
}

// FoldBeside subtracts from rows their sums, and folds an operand that nothing else reads across
// rows.
func FoldBeside(rows, n int) *fuse.Program {
	p := &fuse.Program{Shape: []int{rows, n}, Reduced: []bool{true, false}}
	x, y := p.Load(backend.F32, n, 1), p.Load(backend.F32, n, 1)
	p.Store(p.Do(fuse.Sub, x, p.Do(fuse.SumRow, x)), backend.F32, n, 1)
	p.Fold(backend.Sum, p.Do(fuse.Tanh, y), backend.F32, 0, 1)
	return p
}

// UnreadFold doubles what each row has one element of, where no output is computed from a fold of
// rows: threads of a row meet nowhere else.
func UnreadFold(rows, n int) *fuse.Program {
	p := &fuse.Program{Shape: []int{rows, n}}
	x, row := p.Load(backend.F32, n, 1), p.Load(backend.F32, 1, 0)
	p.Do(fuse.SumRow, x)
	p.Store(p.Do(fuse.Mul, x, row), backend.F32, n, 1)
	p.Store(p.Do(fuse.Add, row, row), backend.F32, 1, 0)
	return p
}
