package autograd

import (
	"fmt"
	"slices"

	"gorgonia.org/gorgonia"

	"github.com/euryale-ml/euryale/backend"
)

// Stateful is what has state that a checkpoint must hold. A [gorgonia.Solver] may
// be one, and so may the communicator that gradients travel through.
type Stateful interface {
	// State returns a copy, as host memory by names of its own.
	State() (map[string]backend.Buffer, error)
	// SetState takes what State has returned. Names that are not its own are
	// ignored.
	SetState(map[string]backend.Buffer) error
}

// Momentum is stochastic gradient descent with momentum, for parameters on the
// host. Unlike Gorgonia's solvers it lets its state be read, so that training can
// be resumed from a checkpoint with the same bits:
//
//	v = Momentum*v - Rate*dw
//	w += v
//
// with a velocity v for each parameter that begins as zeros. Products are rounded
// before the sum, on every processor. Step sets the gradients to zero, as
// Gorgonia's solvers do, and takes the same parameters in the same order each time.
type Momentum struct {
	Rate, Momentum float64

	velocity []backend.Buffer
}

var (
	_ gorgonia.Solver = (*Momentum)(nil)
	_ Stateful        = (*Momentum)(nil)
)

// Step updates the parameters in place.
//
// Errors: parameters of other lengths or dtypes than in the last Step or in the
// state that was set; ErrUnsupported for those on a device.
func (s *Momentum) Step(params []gorgonia.ValueGrad) error {
	ws, dws := make([]backend.Buffer, len(params)), make([]backend.Buffer, len(params))
	for i, p := range params {
		dw, err := p.Grad()
		if err == nil {
			ws[i], dws[i], err = operands(p.Value(), dw)
		}
		if err != nil {
			return fmt.Errorf("autograd: Momentum: parameter %d %w", i, err)
		}
	}
	if err := s.fit(ws); err != nil {
		return err
	}
	for i, w := range ws {
		if w.DType() == backend.F32 {
			descend(w, dws[i], s.velocity[i], float32(s.Rate), float32(s.Momentum))
		} else {
			descend(w, dws[i], s.velocity[i], s.Rate, s.Momentum)
		}
	}
	return nil
}

// operands returns the memory of a parameter and of its gradient.
func operands(w, dw gorgonia.Value) (x, dx backend.Buffer, err error) {
	if engineOf(w) != nil || engineOf(dw) != nil {
		return x, dx, fmt.Errorf("is on a device: %w: use SGD for these", backend.ErrUnsupported)
	}
	x, dense, err := elements(w)
	if err != nil {
		return x, dx, err
	}
	dx, denseToo, err := elements(dw)
	if err != nil {
		return x, dx, fmt.Errorf("has a gradient that %w", err)
	}
	if !dense || !denseToo || x.DType() != dx.DType() || x.Len() != dx.Len() {
		return x, dx, fmt.Errorf("is %d %v with a gradient of %d %v: both must be contiguous and alike", x.Len(), x.DType(), dx.Len(), dx.DType())
	}
	return x, dx, nil
}

// fit makes the velocities, or checks that they are those of the parameters.
func (s *Momentum) fit(ws []backend.Buffer) error {
	if s.velocity == nil {
		for _, w := range ws {
			zeros := backend.Of(make([]float64, (w.NBytes()+7)/8)).As(w.DType()).Slice(0, w.Len())
			s.velocity = append(s.velocity, zeros)
		}
	}
	if len(ws) != len(s.velocity) {
		return fmt.Errorf("autograd: Momentum: %d parameters, its state is of %d", len(ws), len(s.velocity))
	}
	for i, v := range s.velocity {
		if w := ws[i]; v.Len() != w.Len() || v.DType() != w.DType() {
			return fmt.Errorf("autograd: Momentum: parameter %d is %d %v, its state is of %d %v", i, w.Len(), w.DType(), v.Len(), v.DType())
		}
	}
	return nil
}

func descend[T float32 | float64](w, dw, v backend.Buffer, rate, momentum T) {
	ws, vs, dws := backend.View[T](w), backend.View[T](v), backend.View[T](dw)
	for i, g := range dws {
		vs[i] = T(momentum*vs[i]) - T(rate*g)
		ws[i] += vs[i]
	}
	clear(dws)
}

// velocityOf names the velocity of a parameter in the state.
const velocityOf = "momentum.velocity."

// State implements [Stateful].
func (s *Momentum) State() (map[string]backend.Buffer, error) {
	state := map[string]backend.Buffer{}
	for i, v := range s.velocity {
		state[fmt.Sprint(velocityOf, i)] = backend.Of(slices.Clone(v.Bytes())).As(v.DType())
	}
	return state, nil
}

// SetState implements [Stateful].
func (s *Momentum) SetState(state map[string]backend.Buffer) error {
	s.velocity = nil
	for {
		v, ok := state[fmt.Sprint(velocityOf, len(s.velocity))]
		if !ok {
			return nil
		}
		s.velocity = append(s.velocity, backend.Of(slices.Clone(v.Bytes())).As(v.DType()))
	}
}
