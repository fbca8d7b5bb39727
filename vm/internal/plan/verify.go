package plan

import (
	"errors"
	"fmt"
	"slices"

	"github.com/euryale-ml/euryale/vm/internal/ir"
)

// Verify runs a plan on paper: it follows which step has last written each byte of the arena,
// and returns an error if a step reads anything but what the writer of its operand has left,
// or writes over an operand that it still reads. It does so for each kind of run.
//
// It shares no code with what makes plans. It costs a look at all earlier steps for each
// operand.
func Verify(p *Plan) error {
	for kind := range p.Accumulation.Kinds() {
		for i, s := range p.Steps {
			if !s.Runs.Has(kind) {
				continue
			}
			if err := p.verify(kind, i, s); err != nil {
				return fmt.Errorf("plan: step %d, %v of %s: %w", i, s.Op, s.Name, err)
			}
		}
	}
	last := p.Accumulation.Kinds() - 1
	for i, r := range p.Results {
		if err := p.intact(last, r, len(p.Steps)); err != nil {
			return fmt.Errorf("plan: result %d: %w", i, err)
		}
		if b := p.Buffers[r.Buffer]; b.Kind == Arena && b.Offset+b.Bytes > p.ResultBytes {
			return fmt.Errorf("plan: result %d lies at %d, behind the %d bytes of results", i, b.Offset, p.ResultBytes)
		}
	}
	return nil
}

func (p *Plan) verify(kind, i int, s Step) error {
	for _, a := range s.Args {
		if err := p.intact(kind, a, i); err != nil {
			return err
		}
	}
	for j, d := range s.Dsts {
		b := p.Buffers[d.Buffer]
		_, joined := s.Op.(Joined)
		switch {
		case d.Step != i:
			return fmt.Errorf("it writes a value of step %d", d.Step)
		case (joined && b.Written || b.Kind == Slot || b.Kind == Partial) && d.Dense():
			continue
		case b.Kind != Arena || b.Offset < 0 || b.Offset+b.Bytes > p.ArenaBytes || !fills(s, d):
			return errors.New("it writes outside of the arena, or with gaps")
		}
		for _, a := range s.Args {
			if p.overlap(a, d) && !aligned(s, j, a) {
				return fmt.Errorf("it writes over an operand, at %d", b.Offset)
			}
		}
		if s.Epilogue && slices.ContainsFunc(p.Steps[i-1].Args, func(a Ref) bool { return p.overlap(a, d) }) {
			return fmt.Errorf("it writes over an operand of the product before it, at %d", b.Offset)
		}
		for _, other := range s.Dsts[:j] {
			if p.overlap(other, d) {
				return fmt.Errorf("it writes two results at %d", b.Offset)
			}
		}
	}
	return nil
}

// fills reports whether a result has no gaps: attention may exchange axes.
func fills(s Step, d Ref) bool {
	switch s.Op.(type) {
	case ir.Attention, ir.AttentionGrad:
		return d.Span() == d.Shape.Size()
	}
	return d.Dense()
}

// intact returns an error if the value is not in its memory when a step of a kind of run begins.
func (p *Plan) intact(kind int, r Ref, step int) error {
	b := p.Buffers[r.Buffer]
	if first, end := r.Offset*r.DType.Size(), (r.Offset+r.Span())*r.DType.Size(); first < 0 || end > b.Bytes {
		return fmt.Errorf("an operand of shape %v reaches over bytes %d to %d of %d", r.Shape, first, end, b.Bytes)
	}
	if b.Kind != Arena && (b.Kind != Slot || r.Step < 0) { // a sum of runs before is from outside
		return p.unwritten(kind, r, step)
	}
	for i := step - 1; i >= 0; i-- {
		if !p.Steps[i].Runs.Has(kind) {
			continue
		}
		for _, d := range p.Steps[i].Dsts {
			if p.overlap(r, d) && (i != r.Step || r.Buffer != d.Buffer) {
				return fmt.Errorf("the value of step %d is read, but step %d has written over it", r.Step, i)
			}
			if p.overlap(r, d) {
				return nil
			}
		}
	}
	return fmt.Errorf("the value of step %d is read before it is written", r.Step)
}

// unwritten returns an error if a step before has written the buffer of a value from outside.
func (p *Plan) unwritten(kind int, r Ref, step int) error {
	for i, s := range p.Steps[:step] {
		for _, d := range s.Dsts {
			if d.Buffer == r.Buffer && s.Runs.Has(kind) {
				return fmt.Errorf("%s is read as it was before the run, but step %d has updated it", p.text(r), i)
			}
		}
	}
	return nil
}

// overlap reports whether the buffers of two values share bytes.
func (p *Plan) overlap(x, y Ref) bool {
	a, b := p.Buffers[x.Buffer], p.Buffers[y.Buffer]
	if a.Kind == Slot {
		return b.Kind == Slot && a.Index == b.Index
	}
	return a.Kind == Arena && b.Kind == Arena && a.Offset < b.Offset+b.Bytes && b.Offset < a.Offset+a.Bytes
}

// aligned reports whether a step reads each element of an operand only where it writes it.
func aligned(s Step, j int, a Ref) bool {
	loop, ok := s.Op.(Loop)
	d := s.Dsts[j]
	return ok && !loop.Program.Outputs[j].Folded && a.Buffer == d.Buffer && a.Offset == d.Offset && a.Shape == d.Shape && a.Dense() && a.DType.Size() == d.DType.Size()
}
