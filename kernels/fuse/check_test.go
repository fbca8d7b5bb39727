package fuse

import (
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/kernels/simd"
	"github.com/euryale-ml/euryale/internal/testing/require"
)

// tanhGradient is the program of the package's documentation.
func tanhGradient(rows, columns int) *Program {
	p := &Program{Shape: []int{rows, columns}, Reduced: []bool{true, false}}
	x, b, dy := p.Load(backend.F32, columns, 1), p.Load(backend.F32, 0, 1),
		p.Load(backend.F32, columns, 1)
	t := p.Do(Tanh, p.Do(Add, x, b))
	dx := p.Do(Mul, dy, p.Do(Sub, p.Const(backend.F32, 1), p.Do(Square, t)))
	p.Store(dx, backend.F32, columns, 1)
	p.Fold(backend.Sum, dx, backend.F32, 0, 1)
	return p
}

func TestProgramsPrintAllOfThemselves(t *testing.T) {
	const want = `loop [64 10] reduce 0
in0 = f32 [10 1]
in1 = f32 [0 1]
in2 = f32 [10 1]
%0 = load f32 in0
%1 = load f32 in1
%2 = load f32 in2
%3 = add f32 %0 %1
%4 = tanh f32 %3
%5 = const f32 1
%6 = square f32 %4
%7 = sub f32 %5 %6
%8 = mul f32 %2 %7
out0 = %8 f32 [10 1]
out1 = sum %8 f32 [0 1]
`
	p := tanhGradient(64, 10)
	got := p.String()
	require.Check(t, got == want, "got\n%s", got)
	require.NoError(t, p.Check())
}

func TestWrongProgramsAreRefused(t *testing.T) {
	for name, wrong := range map[string]func(p *Program){
		"no outputs":       func(p *Program) { p.Outputs = nil },
		"empty axis":       func(p *Program) { p.Shape[0] = 0 },
		"too large":        func(p *Program) { p.Shape[0], p.Shape[1] = 1<<40, 1<<40 },
		"nine axes":        func(p *Program) { p.Shape = slices.Repeat([]int{1}, 9) },
		"reduced":          func(p *Program) { p.Reduced = []bool{true} },
		"input strides":    func(p *Program) { p.Inputs[1].Strides = []int{1} },
		"negative strides": func(p *Program) { p.Inputs[1].Strides = []int{-1, 1} },
		"large strides":    func(p *Program) { p.Inputs[1].Strides = []int{1 << 60, 1} },
		"input dtype":      func(p *Program) { p.Inputs[1].DType = 0 },
		"loaded type":      func(p *Program) { p.Inputs[1].DType = backend.F64 },
		"unknown input":    func(p *Program) { p.Code[0].Args[0] = 3 },
		"unknown index": func(p *Program) {
			p.Code[0] = Instr{Op: Index, Type: backend.I64}
		},
		"index strides":        func(p *Program) { p.Indices = [][]int{{1}} },
		"unknown operation":    func(p *Program) { p.Code[4].Op = 0 },
		"tanh of integers":     func(p *Program) { p.Code[4].Type = backend.I32 },
		"half in the middle":   func(p *Program) { p.Code[4].Type = backend.F16 },
		"operand too late":     func(p *Program) { p.Code[3].Args[1] = 3 },
		"operand of no value":  func(p *Program) { p.Code[3].Args[1] = -1 },
		"operand's type":       func(p *Program) { p.Code[5].Type = backend.F64 },
		"number of operands":   func(p *Program) { p.Do(Add, 1) },
		"output of no value":   func(p *Program) { p.Outputs[0].Value = 9 },
		"output dtype":         func(p *Program) { p.Outputs[0].DType = backend.F64 },
		"output repeats":       func(p *Program) { p.Outputs[0].Strides = []int{0, 1} },
		"folded does not":      func(p *Program) { p.Outputs[1].Strides = []int{10, 1} },
		"folded repeats":       func(p *Program) { p.Outputs[1].Strides = []int{0, 0} },
		"unknown fold":         func(p *Program) { p.Outputs[1].Op = 77 },
		"uniform of floats":    func(p *Program) { p.Do(Uniform, 0, 1, 2, 3) },
		"too many operands":    func(p *Program) { p.Inputs = slices.Repeat(p.Inputs, 21) },
		"where without values": func(p *Program) { p.Do(Where) },
	} {
		p := tanhGradient(64, 10)
		wrong(p)
		require.Fails(t, name, p.Check(), backend.ErrArgument)
	}
}

func TestOperationsHaveNamesAndTypes(t *testing.T) {
	seen := map[string]bool{}
	for _, o := range append(Ops(), Load, Const, Index) {
		name := o.String()
		require.Check(t, o.Valid() && !seen[name] && name != "" && !strings.Contains(name, "(") &&
			!o.Gives(backend.BF16), "%d is %q", o, name)
		seen[name] = true
	}
	require.Check(t, len(seen) == elementwise+3, "%d operations", len(seen))
	require.Check(t, !Op(0).Valid() && !opEnd.Valid() && !Op(255).Valid(),
		"operations that do not exist are valid")
	require.Check(t, Pow.Operands() == 2 && Tanh.Operands() == 1 && Erf.Rounded() &&
		!Add.Rounded() && Pow.Rounded() && !Where.Rounded(), "operations are taken for others")
}

// TestVectorsAreWhatTheTableSays: where a processor has vectors, package simd has the operations
// that are marked, and no others.
func TestVectorsAreWhatTheTableSays(t *testing.T) {
	for _, o := range Ops() {
		f := simd.Op(o)
		single := simd.Unary[float32](simd.Best(), f, nil, nil) ||
			simd.Binary[float32](simd.Best(), f, nil, nil, nil)
		double := simd.Unary[float64](simd.Best(), f, nil, nil) ||
			simd.Binary[float64](simd.Best(), f, nil, nil, nil)
		wantDouble := o.has(vectors)
		if wantSingle := wantDouble || o.has(vectors32); o != Where && simd.Best() > simd.Go &&
			(single != wantSingle || double != wantDouble) {
			t.Errorf("%v: vectors of f32 %v, of f64 %v", o, single, double)
		}
	}
}

// TestMissingInstruction: an operation that nobody has written in PTX is an error with its name.
func TestMissingInstruction(t *testing.T) {
	w := newWriter("loop", &Program{}, &layout{}, false)
	w.unaryFloat(Sin, backend.F64, "%x")
	require.Check(t, errors.Is(w.err, backend.ErrUnsupported) && strings.Contains(w.err.Error(),
		"sin of f64"), "the error is %v", w.err)
}
