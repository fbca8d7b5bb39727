package autograd

import (
	"fmt"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// SGD is stochastic gradient descent, w -= Rate * dw, for parameters anywhere:
// Gorgonia's own solvers set gradients to zero from the host, which faults in
// the memory of a device. On the host it computes the bits of Gorgonia's
// VanillaSolver. It has no state.
//
// Step overwrites the gradients.
type SGD struct{ Rate float64 }

var _ gorgonia.Solver = SGD{}

// Step updates the parameters in place.
func (s SGD) Step(params []gorgonia.ValueGrad) error {
	for i, p := range params {
		dw, err := p.Grad()
		if err == nil {
			err = s.update(p.Value(), dw)
		}
		if err != nil {
			return fmt.Errorf("autograd: SGD: parameter %d: %w", i, err)
		}
	}
	return nil
}

func (s SGD) update(w, dw gorgonia.Value) error {
	switch w := w.(type) {
	case *gorgonia.F32:
		if dw, ok := dw.(*gorgonia.F32); ok {
			*w += gorgonia.F32(float32(-s.Rate) * float32(*dw))
			return nil
		}
	case *gorgonia.F64:
		if dw, ok := dw.(*gorgonia.F64); ok {
			*w += gorgonia.F64(-s.Rate * float64(*dw))
			return nil
		}
	case *tensor.Dense:
		if dw, ok := dw.(*tensor.Dense); ok {
			return s.updateTensor(w, dw)
		}
	}
	return fmt.Errorf("a %T with a gradient of type %T: they must be the same, tensor.Dense, F32 or F64", w, dw)
}

func (s SGD) updateTensor(w, dw *tensor.Dense) error {
	var rate any = -s.Rate
	if w.Dtype() == tensor.Float32 {
		rate = float32(-s.Rate)
	}
	if _, err := tensor.Mul(dw, rate, tensor.UseUnsafe()); err != nil {
		return err
	}
	_, err := tensor.Add(w, dw, tensor.UseUnsafe())
	return err
}
