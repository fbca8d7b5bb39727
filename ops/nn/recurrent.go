package nn

import (
	"fmt"
	"slices"
	"strings"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/internal/program"
	"github.com/euryale-ml/euryale/kernels/fuse"
	"github.com/euryale-ml/euryale/ops"
)

// RecurrentOptions are the options of [LSTM] and [GRU]. The zero value goes forward over x of
// [steps, batch, n].
type RecurrentOptions struct {
	// BatchFirst says that x and y are [batch, steps, ...].
	BatchFirst bool
	// Reverse begins with the last step: the other half of a bidirectional layer. Step t of y
	// belongs to step t of x, and hN to step 0.
	Reverse bool
}

// LSTM is one layer of long short-term memory over a sequence, with the weights of PyTorch.
//
//	in   x                 [steps, batch, n]   [batch, steps, n] with BatchFirst
//	     h0, c0            [1, batch, h]
//	     weightIH          [4h, n]             rows of the gates i, f, g and o, in this order
//	     weightHH          [4h, h]
//	     biasIH, biasHH    [4h]
//	out  y                 [steps, batch, h]   [batch, steps, h] with BatchFirst
//	     hN, cN            [1, batch, h]       the state behind the last step
//
//	a = x[t] weightIHᵀ + biasIH + h weightHHᵀ + biasHH
//	c = sigmoid(a_f) c + sigmoid(a_i) tanh(a_g)
//	h = sigmoid(a_o) tanh(c), and y[t] = h
//
// To stack layers, pass y to the next one. A lisp machine needs all results to be used.
//
// Gradient: of all operands, back through all steps. The gradients of the weights are one product
// each over all steps.
// Cost: 8*steps*batch*h*(n+h) operations; backward twice that, and in Gorgonia's machines the
// forward pass once more. weightIH takes one product over all steps, weightHH one for each step.
// GPUs take all steps of F32 in one kernel if h is a multiple of 16 up to 512 and they have a
// multiprocessor for every 16 units of 16 samples.
// Errors: [ops.ErrShape] if shapes do not fit; [ops.ErrDType].
// Source: Hochreiter and Schmidhuber, Long Short-Term Memory, 1997; Gers, Schmidhuber and Cummins,
// Learning to Forget, 2000.
func LSTM(o RecurrentOptions, x, h0, c0, weightIH, weightHH, biasIH, biasHH *gorgonia.Node) (y, hN,
	cN *gorgonia.Node, err error) {
	y, hN, all, err := o.apply("LSTM", x, h0, weightIH, weightHH, biasIH, biasHH, c0)
	if err == nil {
		last := all.Shape()[0] - 1
		cN, err = Slice(0, last, last+1, 1, all)
	}
	return y, hN, cN, err
}

// GRU is one layer of gated recurrent units over a sequence, with the weights of PyTorch.
//
//	in   x                 [steps, batch, n]   [batch, steps, n] with BatchFirst
//	     h0                [1, batch, h]
//	     weightIH          [3h, n]             rows of the gates r, z and n, in this order
//	     weightHH          [3h, h]
//	     biasIH, biasHH    [3h]
//	out  y                 [steps, batch, h]   [batch, steps, h] with BatchFirst
//	     hN                [1, batch, h]       the state behind the last step
//
//	a = x[t] weightIHᵀ + biasIH and b = h weightHHᵀ + biasHH
//	z = sigmoid(a_z + b_z), n = tanh(a_n + sigmoid(a_r + b_r) b_n)
//	h = (1-z) n + z h, and y[t] = h
//
// Gradient, cost (6 in place of 8) and errors: those of [LSTM].
// Source: Cho et al., Learning Phrase Representations using RNN Encoder-Decoder, 2014, with the
// reset gate behind the product, as in cuDNN.
func GRU(o RecurrentOptions, x, h0, weightIH, weightHH, biasIH, biasHH *gorgonia.Node) (y,
	hN *gorgonia.Node, err error) {
	y, hN, _, err = o.apply("GRU", x, h0, weightIH, weightHH, biasIH, biasHH)
	return y, hN, err
}

// apply returns the result of a [recurrentSpec], and the parts of it that are y and hN.
func (o RecurrentOptions) apply(cell string, x ...*gorgonia.Node) (y, hN, all *gorgonia.Node,
	err error) {
	if o.BatchFirst && x[0] != nil && x[0].Dims() == 3 {
		if x[0], err = gorgonia.Transpose(x[0], 1, 0, 2); err != nil {
			return nil, nil, nil, fmt.Errorf("nn: %s: %w", cell, err)
		}
	}
	names := "x h0 weightIH weightHH biasIH biasHH c0"
	if cell == "GRU" {
		names = strings.TrimSuffix(names, " c0")
	}
	if all, err = build(cell, names, recurrentSpec{cell, o.Reverse}, x...); err != nil {
		return nil, nil, nil, err
	}
	steps := all.Shape()[0] - 2
	first, last := 1, steps // h0 comes first, or behind all steps
	if o.Reverse {
		first, last = 0, 0
	}
	if y, err = Slice(0, first, first+steps, 1, all); err != nil {
		return nil, nil, nil, err
	}
	if hN, err = Slice(0, last, last+1, 1, all); err == nil && o.BatchFirst {
		y, err = gorgonia.Transpose(y, 1, 0, 2)
	}
	return y, hN, all, err
}

// recurrentSpec is an [LSTM] or a [GRU] of x, h0, weightIH, weightHH, biasIH and biasHH, and of c0
// for an LSTM. The result is [steps+2, batch, h]: h0 and h of each step, in the order of the steps,
// and the last c of an LSTM, or zeros.
type recurrentSpec struct {
	Cell    string
	Reverse bool
}

// String returns "LSTM", or "LSTM{reverse}".
func (s recurrentSpec) String() string { return s.name("") }

func (s recurrentSpec) name(of string) string {
	if s.Reverse {
		return s.Cell + of + "{reverse}"
	}
	return s.Cell + of
}

// gates returns how many gates the cell has.
func (s recurrentSpec) gates() int {
	if s.Cell == "LSTM" {
		return 4
	}
	return 3
}

func (s recurrentSpec) shape(in []tensor.Shape) (tensor.Shape, error) {
	x, h0 := in[0], in[1]
	if len(x) != 3 || len(h0) != 3 {
		return nil, fmt.Errorf("%w: x has shape %v and h0 %v: want 3 axes", ops.ErrShape, x, h0)
	}
	h, rows := h0[2], s.gates()*h0[2]
	state := tensor.Shape{1, x[1], h}
	want := []tensor.Shape{x, state, {rows, x[2]}, {rows, h}, {rows}, {rows}, state}
	for i, shape := range in {
		if !slices.Equal(shape, want[i]) {
			return nil, fmt.Errorf("%w: %d steps of %d samples of %d, and h0 of %v: %v must be %v",
				ops.ErrShape, x[0], x[1], x[2], h0, in, want[:len(in)])
		}
	}
	return tensor.Shape{x[0] + 2, x[1], h}, nil
}

// gradients are made of the last one, of what each step adds to its gates.
func (s recurrentSpec) gradients(in []tensor.Shape) []gradient {
	n := len(in)
	all := make([]gradient, n, n+1)
	for i, of := range [][]int{{n, 2}, {n, 3}, {n, 0}, {n, result}, {n}, {n}, {n}}[:n] {
		all[i] = gradient{recurrentGradSpec{s, i, in[0][0], in[0][1]}, of}
	}
	of := []int{0, 1, 2, 3, 4, 5, 6}[:n]
	return append(all, gradient{recurrentGatesSpec(s), append(of, dy)})
}

func (s recurrentSpec) program(b *program.Builder, x ...program.Value) program.Value {
	r := s.addInput(b, x)
	if all, _, ok := r.allSteps(); ok {
		return all
	}
	r.run()
	rows := slices.Clone(r.h)
	if s.Reverse {
		slices.Reverse(rows)
	}
	last := r.number(0, r.batch, r.size)
	if r.c != nil {
		last = r.c[r.steps]
	}
	return b.Reshape(b.Concat(0, append(rows, last)...), r.steps+2, r.batch, r.size)
}

// recurrence is the forward pass of a [recurrentSpec] in a program, of matrices [batch, size].
type recurrence struct {
	recurrentSpec
	*program.Builder
	x                  []program.Value // the operands
	steps, batch, size int
	input              program.Value     // x weightIHᵀ + biases of all steps, [steps*batch, ...]
	h, c               []program.Value   // before each step that is taken, and behind the last
	kept               [][]program.Value // what the gradient needs of each step that is taken
}

// addInput computes what the input adds to the gates.
func (s recurrentSpec) addInput(b *program.Builder, x []program.Value) *recurrence {
	shape := b.Of(x[0]).Shape
	r := &recurrence{recurrentSpec: s, Builder: b, x: x, steps: shape[0], batch: shape[1],
		size: b.Of(x[1]).Shape[2]}
	r.h = []program.Value{b.Reshape(x[1], r.batch, r.size)}
	bias := x[4]
	if s.Cell == "LSTM" {
		r.c = []program.Value{b.Reshape(x[6], r.batch, r.size)}
		bias = b.Do(fuse.Add, x[4], x[5])
	}
	rows := b.Reshape(x[0], shape[0]*shape[1], shape[2])
	r.input = b.Do(fuse.Add, b.MatMul(false, true, rows, x[2]), bias)
	return r
}

// allSteps takes all steps at once, where the machine has a kernel for that.
func (r *recurrence) allSteps() (all, kept program.Value, ok bool) {
	if r.c == nil {
		return 0, 0, false
	}
	return r.LSTM(r.Reverse, r.input, r.h[0], r.c[0], r.x[3])
}

// run takes one step after the other.
func (r *recurrence) run() {
	for k := range r.steps {
		input, state := r.step(r.input, r.at(k)), r.MatMul(false, true, r.h[k], r.x[3])
		if r.Cell == "LSTM" {
			r.lstm(input, state)
		} else {
			r.gru(input, state)
		}
	}
}

// lstm takes a step of an LSTM, given what input and state add to the gates.
func (r *recurrence) lstm(input, state program.Value) {
	var gates []program.Value
	for gate, f := range []fuse.Op{fuse.Sigmoid, fuse.Sigmoid, fuse.Tanh, fuse.Sigmoid} {
		sum := r.Do(fuse.Add, r.part(input, gate), r.part(state, gate))
		gates = append(gates, r.Do(f, sum))
	}
	c := r.Do(fuse.Add, r.Do(fuse.Mul, gates[1], r.c[len(r.c)-1]),
		r.Do(fuse.Mul, gates[0], gates[2]))
	tanh := r.Do(fuse.Tanh, c)
	r.c, r.h = append(r.c, c), append(r.h, r.Do(fuse.Mul, gates[3], tanh))
	r.kept = append(r.kept, append(gates, tanh))
}

// gru takes a step of a GRU.
func (r *recurrence) gru(input, state program.Value) {
	sum := func(gate int, state program.Value) program.Value {
		return r.Do(fuse.Add, r.part(input, gate), state)
	}
	var biased []program.Value
	for gate := range 3 {
		biased = append(biased, r.Do(fuse.Add, r.part(state, gate), r.part(r.x[5], gate)))
	}
	h := r.h[len(r.h)-1]
	reset, keep := r.Do(fuse.Sigmoid, sum(0, biased[0])), r.Do(fuse.Sigmoid, sum(1, biased[1]))
	news := r.Do(fuse.Tanh, sum(2, r.Do(fuse.Mul, reset, biased[2])))
	r.h = append(r.h, r.Do(fuse.Add, news, r.Do(fuse.Mul, keep, r.Do(fuse.Sub, h, news))))
	r.kept = append(r.kept, []program.Value{reset, keep, news, biased[2]})
}

// at returns the step that is taken as number k.
func (r *recurrence) at(k int) int {
	if r.Reverse {
		return r.steps - 1 - k
	}
	return k
}

// step returns the rows of step t of a matrix of all steps.
func (r *recurrence) step(x program.Value, t int) program.Value {
	return r.Slice(x, 0, t*r.batch, 1, r.batch)
}

// part returns the columns of a gate, of a matrix or of a bias.
func (r *recurrence) part(x program.Value, gate int) program.Value {
	return r.Slice(x, len(r.Of(x).Shape)-1, gate*r.size, 1, r.size)
}

// number returns a matrix of a number.
func (r *recurrence) number(x float64, shape ...int) program.Value {
	return r.Broadcast(r.Reshape(r.Number(x, r.x[0]), 1, 1), shape...)
}

// recurrentGatesSpec computes what all gradients of a [recurrentSpec] need, from its operands and
// dy. Its rows are, step by step, the gradients of the sums to which the gates apply their
// functions, and behind them the gradient of c0 and zeros. A GRU has first the gradients of the
// input's share of these sums, then of the state's share, and behind them what h0 gets apart from
// the products.
type recurrentGatesSpec recurrentSpec

// String returns "LSTMGates".
func (s recurrentGatesSpec) String() string { return recurrentSpec(s).name("Gates") }

func (s recurrentGatesSpec) shape(in []tensor.Shape) (tensor.Shape, error) {
	gates, steps := recurrentSpec(s).gates(), in[0][0]
	if s.Cell == "GRU" {
		steps *= 2
	}
	return tensor.Shape{(steps + 1) * in[0][1], gates * in[1][2]}, nil
}

func (s recurrentGatesSpec) gradients([]tensor.Shape) []gradient { return nil }

// program goes back through the steps.
func (s recurrentGatesSpec) program(b *program.Builder, x ...program.Value) program.Value {
	operands, dy := x[:len(x)-1], x[len(x)-1]
	r := recurrentSpec(s).addInput(b, operands)
	dy = b.Reshape(dy, (r.steps+2)*r.batch, r.size)
	first := 1 // behind h0
	if s.Reverse {
		first = 0
	}
	if all, kept, ok := r.allSteps(); ok {
		steps := b.Slice(b.Reshape(dy, r.steps+2, r.batch, r.size), 0, first, 1, r.steps)
		return b.LSTMGrad(r.Reverse, all, kept, steps, r.step(dy, r.steps+1), r.x[3])
	}
	r.run()
	input, state := make([]program.Value, r.steps), make([]program.Value, r.steps)
	carry := r.number(0, r.batch, r.size) // the gradient by c, or what h gets apart from products
	if s.Cell == "LSTM" {
		carry = r.step(dy, r.steps+1)
	}
	for k := r.steps - 1; k >= 0; k-- {
		t := r.at(k)
		dh := r.step(dy, first+t)
		if k < r.steps-1 {
			dh = b.Do(fuse.Add, dh, b.MatMul(false, false, state[r.at(k+1)], r.x[3]))
		}
		if s.Cell == "LSTM" {
			input[t], carry = r.lstmGrad(k, dh, carry)
			state[t] = input[t]
		} else {
			input[t], state[t], carry = r.gruGrad(k, b.Do(fuse.Add, dh, carry))
		}
	}
	all := input
	if s.Cell == "GRU" {
		all = append(all, state...)
	}
	gates := recurrentSpec(s).gates()
	return b.Concat(0, append(all, b.Unslice(carry, 1, 0, 1, gates*r.size))...)
}

// lstmGrad returns the gradients of the gates of a step, [batch, 4h], and of c before it.
func (r *recurrence) lstmGrad(k int, dh, dc program.Value) (gates, before program.Value) {
	i, f, g, o, tanh := r.kept[k][0], r.kept[k][1], r.kept[k][2], r.kept[k][3], r.kept[k][4]
	dc = r.Do(fuse.Add, dc, r.tanhGrad(r.Do(fuse.Mul, dh, o), tanh))
	gates = r.Concat(1,
		r.sigmoidGrad(r.Do(fuse.Mul, dc, g), i),
		r.sigmoidGrad(r.Do(fuse.Mul, dc, r.c[k]), f),
		r.tanhGrad(r.Do(fuse.Mul, dc, i), g),
		r.sigmoidGrad(r.Do(fuse.Mul, dh, tanh), o))
	return gates, r.Do(fuse.Mul, dc, f)
}

// gruGrad returns the gradients of the gates of a step, [batch, 3h], by what the input and what the
// state gives to them, and what h before the step gets apart from the products.
func (r *recurrence) gruGrad(k int, dh program.Value) (input, state, before program.Value) {
	reset, keep, news, biased := r.kept[k][0], r.kept[k][1], r.kept[k][2], r.kept[k][3]
	one := r.Number(1, dh)
	dn := r.tanhGrad(r.Do(fuse.Mul, dh, r.Do(fuse.Sub, one, keep)), news)
	dr := r.sigmoidGrad(r.Do(fuse.Mul, dn, biased), reset)
	dz := r.sigmoidGrad(r.Do(fuse.Mul, dh, r.Do(fuse.Sub, r.h[k], news)), keep)
	return r.Concat(1, dr, dz, dn), r.Concat(1, dr, dz, r.Do(fuse.Mul, dn, reset)),
		r.Do(fuse.Mul, dh, keep)
}

// sigmoidGrad and tanhGrad return the gradient by x of y = sigmoid(x) and y = tanh(x).
func (r *recurrence) sigmoidGrad(dy, y program.Value) program.Value {
	return r.Do(fuse.Mul, dy, r.Do(fuse.Mul, y, r.Do(fuse.Sub, r.Number(1, y), y)))
}

func (r *recurrence) tanhGrad(dy, y program.Value) program.Value {
	return r.Do(fuse.Mul, dy, r.Do(fuse.Sub, r.Number(1, y), r.Do(fuse.Square, y)))
}

// recurrentGradSpec is the gradient of a [recurrentSpec] by operand Of, from what a
// [recurrentGatesSpec] gives, and from the operand that it is multiplied with.
type recurrentGradSpec struct {
	Forward          recurrentSpec
	Of, Steps, Batch int
}

// String returns "LSTMGrad0", with the number of the operand.
func (s recurrentGradSpec) String() string { return s.Forward.name(fmt.Sprint("Grad", s.Of)) }

func (s recurrentGradSpec) shape(in []tensor.Shape) (tensor.Shape, error) {
	rows := in[0][1]
	switch s.Of {
	case 0:
		return tensor.Shape{s.Steps, s.Batch, in[1][1]}, nil
	case 2, 3:
		return tensor.Shape{rows, in[1][2]}, nil
	case 4, 5:
		return tensor.Shape{rows}, nil
	}
	return tensor.Shape{1, s.Batch, rows / s.Forward.gates()}, nil
}

func (s recurrentGradSpec) gradients([]tensor.Shape) []gradient { return nil }

func (s recurrentGradSpec) program(b *program.Builder, x ...program.Value) program.Value {
	n := s.Steps * s.Batch
	last := b.Of(x[0]).Shape[0] - s.Batch // of c0, or the rest of h0's gradient
	state := last - n                     // 0 for an LSTM
	first, before := 0, 0                 // the step that is taken first; where h0 is
	if s.Forward.Reverse {
		first, before = s.Steps-1, 1
	}
	rows := func(x program.Value, from, n int) program.Value { return b.Slice(x, 0, from, 1, n) }
	matrix := func(x program.Value, from int) program.Value {
		shape := b.Of(x).Shape
		return rows(b.Reshape(x, shape[0]*shape[1], shape[2]), from, n)
	}
	input, hidden := rows(x[0], 0, n), rows(x[0], state, n)
	besides := func() program.Value {
		return b.Slice(rows(x[0], last, s.Batch), 1, 0, 1,
			b.Of(x[0]).Shape[1]/s.Forward.gates())
	}
	switch s.Of {
	case 0:
		return b.MatMul(false, false, input, x[1])
	case 1:
		dh := b.MatMul(false, false, rows(hidden, first*s.Batch, s.Batch), x[1])
		if s.Forward.Cell == "GRU" {
			dh = b.Do(fuse.Add, dh, besides())
		}
		return dh
	case 2:
		return b.MatMul(true, false, input, matrix(x[1], 0))
	case 3:
		return b.MatMul(true, false, hidden, matrix(x[1], before*s.Batch))
	case 4:
		return sumRows(b, input)
	case 5:
		return sumRows(b, hidden)
	}
	return besides()
}
