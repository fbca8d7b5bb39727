package kernels

import (
	"fmt"

	"github.com/euryale-ml/euryale/backend"
)

// LSTM is a layer of long short-term memory over Steps, of Batch samples and Size units, from what
// the input adds to the gates:
//
//	for k, the steps from the first one on, or with Reverse from the last one on {
//		a = Input[k] + h[k] weightsᵀ
//		i, f, g, o = sigmoid(a_i), sigmoid(a_f), tanh(a_g), sigmoid(a_o)
//		Kept[k] = c[k], i, f, g, o
//		c[k+1] = f c[k] + i g
//		h[k+1] = o tanh(c[k+1])
//	}
//
// h[0] and c[0] are H0 and C0. All is h, in the order of time, and the last c behind it. Everything
// is f32 but Rounded.
type LSTM struct {
	Steps, Batch, Size int
	Reverse            bool
	// TF32 permits products to round their operands to 10 bits of mantissa.
	TF32 bool

	Input   backend.Buffer // [Steps, Batch, 4, Size], in the order of time
	H0, C0  backend.Buffer // [Batch, Size]
	Weights backend.Buffer // [4, Size, Size]

	All  backend.Buffer // [Steps+2, Batch, Size]
	Kept backend.Buffer // [Steps, 5, Batch, Size], in the order in which steps are taken
	// Rounded is All in BF16. If it is not empty, products round their operands to BF16.
	Rounded backend.Buffer
}

// LSTMGrad is the gradient of an [LSTM], from All and Kept, the gradient DY of its h behind each
// step, and DC of its last c:
//
//	for k, the steps from the last one back {
//		dh = DY[k] + Gates[k+1] weights
//		dc = dc + dh o (1 - tanh(c[k+1])²)
//		Gates[k] = dc g i (1-i), dc c[k] f (1-f), dc i (1-g²), dh tanh(c[k+1]) o (1-o)
//		dc = dc f
//	}
//
// Behind all steps Gates has dc, and zeros for the other three gates. Rounded is Gates in BF16.
type LSTMGrad struct {
	LSTM
	DY    backend.Buffer // [Steps, Batch, Size], in the order of time
	DC    backend.Buffer // [Batch, Size]
	Gates backend.Buffer // [Steps+1, Batch, 4, Size], in the order of time
}

// LSTM checks its argument.
func (c Check) LSTM(l LSTM) error {
	n := l.Batch * l.Size
	return c.lstm(l, map[string]sized{"input": {l.Input, 4 * l.Steps * n}, "h0": {l.H0, n},
		"c0": {l.C0, n}}, (l.Steps+2)*n)
}

// LSTMGrad checks its argument.
func (c Check) LSTMGrad(l LSTMGrad) error {
	n := l.Batch * l.Size
	return c.lstm(l.LSTM, map[string]sized{"dy": {l.DY, l.Steps * n}, "dc": {l.DC, n},
		"gates": {l.Gates, 4 * (l.Steps + 1) * n}}, 4*(l.Steps+1)*n)
}

// sized is an operand and how many elements it must have.
type sized struct {
	buffer backend.Buffer
	want   int
}

// lstm checks what an LSTM and its gradient have in common, and others of their operands.
func (c Check) lstm(l LSTM, others map[string]sized, rounded int) error {
	n := l.Batch * l.Size
	if l.Steps < 1 || l.Batch < 1 || l.Size < 1 {
		return fmt.Errorf("%w: lstm of %d steps, %d samples and %d units", backend.ErrArgument,
			l.Steps, l.Batch, l.Size)
	}
	others["weights"] = sized{l.Weights, 4 * l.Size * l.Size}
	others["all"], others["kept"] = sized{l.All, (l.Steps + 2) * n}, sized{l.Kept, 5 * l.Steps * n}
	for name, o := range others {
		if o.buffer.DType() != backend.F32 || o.buffer.Len() != o.want {
			return fmt.Errorf("%w: lstm: %s has %d %v, want %d f32", backend.ErrArgument, name,
				o.buffer.Len(), o.buffer.DType(), o.want)
		}
		if err := c.checkDevice("lstm", o.buffer); err != nil {
			return err
		}
	}
	if r := l.Rounded; r.Len() > 0 && (r.DType() != backend.BF16 || r.Len() != rounded) {
		return fmt.Errorf("%w: lstm: rounded has %d %v, want %d bf16", backend.ErrArgument,
			r.Len(), r.DType(), rounded)
	}
	return nil
}
