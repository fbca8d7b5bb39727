package exec

import (
	"fmt"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/kernels"
	"github.com/euryale-ml/euryale/vm/internal/ir"
)

// recurrences are what queues compute whose device has such kernels: read.New is told so.
type recurrences interface {
	LSTM(kernels.LSTM) error
	LSTMGrad(kernels.LSTMGrad) error
}

// recurrent returns what computes a layer, and its sizes: all has the shape of its result.
func (e *Executor) recurrent(op ir.LSTM, all ir.Dims) (recurrences, kernels.LSTM, error) {
	l := kernels.LSTM{Steps: all.At(0) - 2, Batch: all.At(1), Size: all.At(2), Reverse: op.Reverse,
		TF32: op.Precision == ir.TF32}
	on, ok := e.device.Main().(recurrences)
	if !ok {
		return nil, l, fmt.Errorf("%w: a %T computes no recurrent layers", backend.ErrUnsupported,
			e.device.Main())
	}
	return on, l, nil
}

// lstm returns the function of a layer.
func (e *Executor) lstm(s *step, op ir.LSTM) (func() error, error) {
	on, l, err := e.recurrent(op, s.Dsts[0].Shape)
	return func() error {
		l := l
		l.Input, l.H0, l.C0, l.Weights = s.args[0], s.args[1], s.args[2], s.args[3]
		l.All, l.Kept = s.dsts[0], s.dsts[1]
		if op.Precision == ir.BF16 {
			l.Rounded = s.dsts[2]
		}
		return on.LSTM(l)
	}, err
}

// lstmGrad returns the function of the gradient of a layer.
func (e *Executor) lstmGrad(s *step, op ir.LSTMGrad) (func() error, error) {
	on, l, err := e.recurrent(ir.LSTM(op), s.Args[0].Shape)
	return func() error {
		g := kernels.LSTMGrad{LSTM: l, DY: s.args[2], DC: s.args[3], Gates: s.dsts[0]}
		g.All, g.Kept, g.Weights = s.args[0], s.args[1], s.args[4]
		if op.Precision == ir.BF16 {
			g.Rounded = s.dsts[1]
		}
		return on.LSTMGrad(g)
	}, err
}
