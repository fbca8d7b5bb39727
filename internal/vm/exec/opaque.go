package exec

import (
	"fmt"

	"github.com/euryale-ml/euryale/backend"
)

// Graph has the operations that only the graph knows, by [ir.Opaque.Index].
type Graph interface {
	Opaque(index int) Opaque
	Placed(index int) Placed
}

// Opaque runs an operation that only its Do method knows.
type Opaque interface {
	// Arg returns the memory of operand i, into which the executor copies it, in row-major
	// order.
	Arg(i int) backend.Buffer
	// Call runs the operation and returns the memory of its result, in row-major order.
	Call() (backend.Buffer, error)
}

// Placed runs an operation that only the graph knows where its operands are: see vm.DeviceOp.
type Placed interface {
	// Scratch returns how many bytes of memory StartOn needs for itself.
	Scratch() int
	// StartOn starts y = op(x...) on q, nil for the host, and returns what may fail later, nil if
	// nothing can.
	StartOn(q backend.Queue, y, scratch backend.Buffer, x ...backend.Buffer) (backend.Work, error)
}

// startPlaced returns the function of an operation that runs where its operands are.
func (e *Executor) startPlaced(s *step, o Placed) func() error {
	e.needs = max(e.needs, o.Scratch())
	return func() error {
		q, beside := e.device.Main(), s.beside && o.Scratch() == 0 && e.side != nil
		if beside {
			q = e.side
			if err := follow(q, e.device.Main()); err != nil {
				return err
			}
		}
		w, err := o.StartOn(q, s.dsts[0], e.scratch, s.args...)
		if w != nil {
			e.exchanges.others = append(e.exchanges.others, w)
		}
		s.away = beside
		return err
	}
}

// follow orders a queue behind what was started on another one.
func follow(q, before backend.Queue) error {
	done, err := before.Record()
	if err != nil {
		return err
	}
	return q.Wait(done)
}

// overlap makes steps wait for the operations of the graph that run beside those before them.
func (e *Executor) overlap() (err error) {
	d, ok := e.device.(*queued)
	for _, s := range e.steps {
		if !ok || s.Until == 0 {
			continue
		}
		if e.side == nil {
			if e.side, err = backend.UrgentQueue(d.device); err != nil {
				return err
			}
		}
		end := e.steps[s.Until+1]
		run := end.run
		end.run = func() error {
			if s.away {
				s.away = false
				if err := follow(d.Main(), e.side); err != nil {
					return err
				}
			}
			return run()
		}
	}
	return nil
}

// callByDo copies the operands to where the operation has them, runs it, and copies its result.
func (e *Executor) callByDo(s *step, o Opaque) (func() error, error) {
	fetch := make([]func() error, len(s.Args))
	for i := range s.Args {
		var err error
		if fetch[i], err = e.fetch(s, i, o.Arg(i)); err != nil {
			return nil, err
		}
	}
	return func() error {
		if err := e.all(fetch); err != nil {
			return err
		}
		result, err := o.Call()
		if err != nil {
			return err
		}
		if dst := s.dsts[0]; result.DType() != dst.DType() || result.Len() != dst.Len() {
			return fmt.Errorf("its Do gives %d elements of %v, the graph was built for %d of %v",
				result.Len(), result.DType(), dst.Len(), dst.DType())
		}
		if err := e.device.Move(s.dsts[0], result); err != nil {
			return err
		}
		return e.device.Join() // the operation may write over its result
	}, nil
}

// fetch returns what starts to copy operand i to host memory, in row-major order.
func (e *Executor) fetch(s *step, i int, to backend.Buffer) (func() error, error) {
	r := s.Args[i]
	if r.Dense() {
		return func() error { return e.device.Move(to, s.args[i]) }, nil
	}
	l, err := e.copies(r, r.Shape.Strides())
	if err != nil {
		return nil, err
	}
	dst := []backend.Buffer{to}
	if e.device.Host() {
		return func() error { return l.Run(dst, s.args[i:i+1], backend.Buffer{}) }, nil
	}
	if dst[0], err = e.alloc(r.DType, r.Shape.Size()); err != nil {
		return nil, err
	}
	return func() error {
		if err := l.Run(dst, s.args[i:i+1], e.scratch); err != nil {
			return err
		}
		return e.device.Move(to, dst[0])
	}, nil
}

// all starts everything and waits.
func (e *Executor) all(start []func() error) error {
	for _, f := range start {
		if err := f(); err != nil {
			return err
		}
	}
	return e.device.Join()
}
