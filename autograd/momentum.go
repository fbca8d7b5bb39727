package autograd

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/backend"
)

// Stateful is what has state that a checkpoint must hold. A [gorgonia.Solver] may
// be one, and so may the communicator that gradients travel through.
type Stateful interface {
	// State returns a copy, as host memory by names of its own. Names, dtypes and
	// lengths are the same on every rank.
	State() (map[string]backend.Buffer, error)
	// SetState takes what State has returned. Names that are not its own are
	// ignored.
	SetState(map[string]backend.Buffer) error
}

// Checker is what is [Stateful] and says beforehand whether it would take a state, so
// that a Load that fails changes nothing.
type Checker interface {
	Stateful
	// CheckState returns why SetState of this state would fail, or calls after it. of
	// is like what the state is of: of a solver the parameters in the order of New, of
	// a communicator the operands of slots 1, 2 and so on; only lengths and dtypes
	// have a meaning.
	CheckState(state map[string]backend.Buffer, of []backend.Buffer) error
}

// Momentum is stochastic gradient descent with momentum, for parameters anywhere.
// Unlike Gorgonia's solvers it lets its state be read, so that training can be resumed
// from a checkpoint with the same bits:
//
//	v = Momentum*v - Rate*dw
//	w += v
//
// with a velocity v for each parameter, where that is, which begins as zeros. Products
// are rounded before the sum, on every processor. Step sets the gradients to zero, as
// Gorgonia's solvers do, and takes the same parameters in the same order each time.
//
// Close gives back velocities on a device.
type Momentum struct {
	Rate, Momentum float64

	velocity []velocity
}

var (
	_ gorgonia.Solver = (*Momentum)(nil)
	_ Checker         = (*Momentum)(nil)
)

// velocity is that of one parameter.
type velocity struct {
	backend.Buffer
	engine engine // of its device, nil on the host
}

// operands are a parameter and its gradient.
type operands struct {
	w, dw  backend.Buffer
	engine engine // of the device where both are, nil on the host
}

// Step updates the parameters in place.
//
// Errors: parameters of other lengths or dtypes than in the last Step or in the
// state that was set; a gradient that is not where its parameter is.
func (s *Momentum) Step(params []gorgonia.ValueGrad) error {
	all := make([]operands, len(params))
	for i, p := range params {
		dw, err := p.Grad()
		if err == nil {
			all[i], err = operandsOf(p.Value(), dw)
		}
		if err != nil {
			return fmt.Errorf("autograd: Momentum: parameter %d %w", i, err)
		}
	}
	if err := s.fit(all); err != nil {
		return err
	}
	for i, o := range all {
		if err := s.update(o, &s.velocity[i]); err != nil {
			return fmt.Errorf("autograd: Momentum: parameter %d: %w", i, err)
		}
	}
	return nil
}

func (s *Momentum) update(o operands, v *velocity) error {
	switch {
	case o.engine != nil:
		return s.updateOnDevice(o, v)
	case o.w.DType() == backend.F32:
		descend(o.w, o.dw, v.Buffer, float32(s.Rate), float32(s.Momentum))
	default:
		descend(o.w, o.dw, v.Buffer, s.Rate, s.Momentum)
	}
	return nil
}

// updateOnDevice is descend in kernels.
func (s *Momentum) updateOnDevice(o operands, v *velocity) error {
	if err := v.moveTo(o.engine); err != nil {
		return err
	}
	k, err := arithmetic(o.engine.Queue())
	if err != nil {
		return err
	}
	for _, step := range []func() error{
		func() error { return k.Scale(v.Buffer, v.Buffer, s.Momentum) },
		func() error { return k.Scale(o.dw, o.dw, s.Rate) },
		func() error { return k.Binary(backend.Sub, v.Buffer, v.Buffer, o.dw) },
		func() error { return k.Binary(backend.Add, o.w, o.w, v.Buffer) },
		func() error { return k.Zero(o.dw) },
	} {
		if err := step(); err != nil {
			return err
		}
	}
	return nil
}

// moveTo moves a velocity that is on the host to a device.
func (v *velocity) moveTo(e engine) error {
	if v.engine != nil {
		return nil
	}
	memory, err := e.Device().Alloc(v.NBytes())
	if err != nil {
		return err
	}
	onHost := v.Buffer
	v.Buffer, v.engine = memory.As(v.DType()), e
	if err := move(e.Queue(), v.Buffer, onHost); err != nil {
		return err
	}
	return drain(e.Queue()) // the host memory is in use until then
}

// toHost returns a copy.
func (v *velocity) toHost() (backend.Buffer, error) {
	if v.engine == nil {
		return backend.Of(slices.Clone(v.Bytes())).As(v.DType()), nil
	}
	onHost := zeros(v.Buffer)
	if err := move(v.engine.Queue(), onHost, v.Buffer); err != nil {
		return onHost, err
	}
	return onHost, drain(v.engine.Queue())
}

// zeros returns host memory like b, aligned for every dtype.
func zeros(b backend.Buffer) backend.Buffer {
	return backend.Of(make([]float64, (b.NBytes()+7)/8)).As(b.DType()).Slice(0, b.Len())
}

// operandsOf returns the memory of a parameter and of its gradient.
func operandsOf(w, dw gorgonia.Value) (o operands, err error) {
	o.engine = engineOf(w)
	if e := engineOf(dw); e != o.engine {
		return o, fmt.Errorf("is not where its gradient is: move one of them")
	}
	if o.w, err = memoryOf(o.engine, w); err != nil {
		return o, err
	}
	if o.dw, err = memoryOf(o.engine, dw); err != nil {
		return o, fmt.Errorf("has a gradient that %w", err)
	}
	if o.w.DType() != o.dw.DType() || o.w.Len() != o.dw.Len() {
		return o, fmt.Errorf("is %d %v with a gradient of %d %v: they must be alike", o.w.Len(), o.w.DType(), o.dw.Len(), o.dw.DType())
	}
	return o, nil
}

// memoryOf returns the memory of a contiguous value, on the device of e or, if that is
// nil, on the host.
func memoryOf(e engine, v gorgonia.Value) (backend.Buffer, error) {
	if e != nil {
		return onDevice(e, v.(*tensor.Dense))
	}
	memory, dense, err := elements(v)
	if err == nil && !dense {
		err = errors.New("is not contiguous")
	}
	return memory, err
}

// fit makes the velocities, or checks that they are those of the parameters.
func (s *Momentum) fit(all []operands) error {
	if s.velocity == nil {
		for _, o := range all {
			s.velocity = append(s.velocity, velocity{Buffer: zeros(o.w)})
		}
	}
	if len(all) != len(s.velocity) {
		return fmt.Errorf("autograd: Momentum: %d parameters, its state is of %d", len(all), len(s.velocity))
	}
	for i, v := range s.velocity {
		switch o := all[i]; {
		case v.Len() != o.w.Len() || v.DType() != o.w.DType():
			return fmt.Errorf("autograd: Momentum: parameter %d is %d %v, its state is of %d %v", i, o.w.Len(), o.w.DType(), v.Len(), v.DType())
		case v.engine != nil && v.engine != o.engine:
			return fmt.Errorf("autograd: Momentum: parameter %d is not where it was in the last Step: use another Momentum", i)
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

// State implements [Stateful]. It waits for devices.
func (s *Momentum) State() (map[string]backend.Buffer, error) {
	state := map[string]backend.Buffer{}
	for i := range s.velocity {
		v, err := s.velocity[i].toHost()
		if err != nil {
			return nil, fmt.Errorf("autograd: Momentum: velocity %d: %w", i, err)
		}
		state[fmt.Sprint(velocityOf, i)] = v
	}
	return state, nil
}

// SetState implements [Stateful]. Where it returns an error for the state, nothing has
// changed.
func (s *Momentum) SetState(state map[string]backend.Buffer) error {
	stored, err := velocitiesIn(state)
	if err != nil {
		return err
	}
	if err := s.Close(); err != nil {
		return err
	}
	for _, v := range stored {
		s.velocity = append(s.velocity, velocity{Buffer: backend.Of(slices.Clone(v.Bytes())).As(v.DType())})
	}
	return nil
}

// CheckState implements [Checker]: there is a velocity for each parameter, in their order,
// but for those that Step is not given; and none before the first Step.
func (s *Momentum) CheckState(state map[string]backend.Buffer, params []backend.Buffer) error {
	stored, err := velocitiesIn(state)
	if err != nil {
		return err
	}
	left := params
	for i, v := range stored {
		at := slices.IndexFunc(left, func(w backend.Buffer) bool { return v.Len() == w.Len() && v.DType() == w.DType() })
		if at < 0 {
			return fmt.Errorf("%w: autograd: Momentum: velocity %d of the state is %d %v: none of the last %d of %d parameters is like it",
				backend.ErrArgument, i, v.Len(), v.DType(), len(left), len(params))
		}
		left = left[at+1:]
	}
	if n := len(s.velocity); n > 0 && len(stored) > 0 && n != len(stored) {
		return fmt.Errorf("%w: autograd: Momentum: a state of %d velocities for a solver of %d", backend.ErrArgument, len(stored), n)
	}
	return nil
}

// velocitiesIn returns the velocities of a state, in order.
func velocitiesIn(state map[string]backend.Buffer) (stored []backend.Buffer, err error) {
	for name := range state {
		if !strings.HasPrefix(name, velocityOf) {
			continue
		}
		v, ok := state[fmt.Sprint(velocityOf, len(stored))]
		if !ok {
			return nil, fmt.Errorf("%w: autograd: Momentum: the state has no velocity %d, and others after it", backend.ErrArgument, len(stored))
		}
		if err := floats(v); err != nil {
			return nil, fmt.Errorf("%w: autograd: Momentum: velocity %d %w", backend.ErrArgument, len(stored), err)
		}
		stored = append(stored, v)
	}
	return stored, nil
}

// Close forgets the velocities, and gives back those that are on a device. Close it
// before the engine.
func (s *Momentum) Close() error {
	var all error
	for _, v := range s.velocity {
		if v.engine != nil {
			all = errors.Join(all, drain(v.engine.Queue()), v.engine.Device().Free(v.As(backend.U8)))
		}
	}
	s.velocity = nil
	return all
}
