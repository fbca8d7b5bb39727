package kernels

import (
	"errors"
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
// except Rounded is f32.
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
	return errors.Join(c.lstm(l, l.All), c.operands(backend.F32, 4*l.Steps*n, l.Input),
		c.operands(backend.F32, n, l.H0, l.C0))
}

// LSTMGrad checks its argument.
func (c Check) LSTMGrad(l LSTMGrad) error {
	n := l.Batch * l.Size
	return errors.Join(c.lstm(l.LSTM, l.Gates), c.operands(backend.F32, n, l.DC),
		c.operands(backend.F32, l.Steps*n, l.DY), c.operands(backend.F32, 4*(l.Steps+1)*n, l.Gates))
}

// lstm checks what an LSTM and its gradient have in common.
func (c Check) lstm(l LSTM, result backend.Buffer) error {
	n, err := l.Batch*l.Size, error(nil)
	if min(l.Steps, l.Batch, l.Size) < 1 {
		return fmt.Errorf("%w: lstm of %d steps, %d samples and %d units", backend.ErrArgument,
			l.Steps, l.Batch, l.Size)
	}
	if l.Rounded.Len() > 0 {
		err = c.operands(backend.BF16, result.Len(), l.Rounded)
	}
	return errors.Join(err, c.operands(backend.F32, 4*l.Size*l.Size, l.Weights),
		c.operands(backend.F32, (l.Steps+2)*n, l.All), c.operands(backend.F32, 5*l.Steps*n, l.Kept))
}

// operands checks operands of n elements.
func (c Check) operands(d backend.DType, n int, all ...backend.Buffer) error {
	for _, b := range all {
		if b.DType() != d || b.Len() != n {
			return fmt.Errorf("%w: lstm: an operand has %d %v, want %d %v", backend.ErrArgument,
				b.Len(), b.DType(), n, d)
		}
	}
	return c.checkDevice("lstm", all...)
}
