package exec

import (
	"fmt"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/kernels"
	"github.com/euryale-ml/euryale/internal/vm/ir"
)

// recurrences are what queues compute whose device has such kernels: read.New is told so.
type recurrences interface {
	LSTM(kernels.LSTM) error
	LSTMGrad(kernels.LSTMGrad) error
}

// recurrent returns the function of a recurrent layer, or of its gradient.
func (e *Executor) recurrent(s *step, op ir.LSTM) (func() error, error) {
	on, ok := e.device.Main().(recurrences)
	if !ok {
		return nil, fmt.Errorf("%w: a %T computes no recurrent layers", backend.ErrUnsupported,
			e.device.Main())
	}
	all := s.Dsts[0].Shape
	if op.Grad {
		all = s.Args[0].Shape
	}
	l := kernels.LSTM{Steps: all.At(0) - 2, Batch: all.At(1), Size: all.At(2), Reverse: op.Reverse,
		TF32: op.Precision == ir.TF32}
	return func() error {
		l, x := l, s.args
		if i := ir.Rounded(op); i > 0 {
			l.Rounded = s.dsts[i]
		}
		if op.Grad {
			l.All, l.Kept, l.Weights = x[0], x[1], x[4]
			return on.LSTMGrad(kernels.LSTMGrad{LSTM: l, DY: x[2], DC: x[3], Gates: s.dsts[0]})
		}
		l.Input, l.H0, l.C0, l.Weights, l.All, l.Kept = x[0], x[1], x[2], x[3], s.dsts[0], s.dsts[1]
		return on.LSTM(l)
	}, nil
}
