package proof

import (
	"fmt"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/vm/ir"
	"github.com/euryale-ml/euryale/internal/vm/plan"
)

// compare compares the results of a run with those of the program. The last one is the norm of the
// gradients if they are clipped, which the run with the updates has.
func (r *proof) compare(kind int) error {
	want := r.plan.Program.Results
	if n := len(r.plan.Results); n != len(want) {
		return fmt.Errorf("%d results, the program has %d", n, len(want))
	}
	for i := range r.plan.Results {
		norm := r.plan.Limit > 0 && i == len(want)-1
		if norm && kind != r.applying() || !norm && kind >= ir.Idle {
			continue
		}
		ref := &r.plan.Results[i]
		if err := r.fits(ref, ref.Span()); err != nil {
			return fmt.Errorf("result %d: %w", i, err)
		}
		if b := &r.plan.Buffers[ref.Buffer]; b.Kind == plan.Arena &&
			b.Offset+b.Bytes > r.plan.ResultBytes {
			return fmt.Errorf("result %d lies at %d, behind the %d bytes of results",
				i, b.Offset, r.plan.ResultBytes)
		}
		at, err := r.find(ref)
		if err != nil {
			return fmt.Errorf("result %d: %w", i, err)
		}
		v := &r.plan.Program.Values[want[i]]
		places := strided(ref.Offset, ref.Shape, ref.Strides)
		got := r.read(at.tensor, &places)
		if ref.Shape != v.Shape || ref.DType != v.DType || got != r.wanted[want[i]] {
			return fmt.Errorf("result %d in a run of kind %d is not %v of %s",
				i, kind, v.Op, v.Name)
		}
	}
	return nil
}

// applying is the kind of the run with the updates.
func (r *proof) applying() int {
	if r.plan.Accumulation.Apart {
		return ir.Apply
	}
	return r.plan.Accumulation.Kinds() - 1
}

// ended compares what a run leaves for the next ones with what the program assigns.
func (r *proof) ended(kind int) error {
	p := r.plan.Program
	for _, a := range p.Assigns {
		if !a.Runs.Has(kind) {
			continue
		}
		to := a.To
		for ir.View(p.Values[to].Op) {
			to = p.Values[to].Args[0]
		}
		if err := r.left(memoryOfLeaf(p.Values[to].Op), p.Values[to].DType, r.wanted[a.Value],
			kind); err != nil {
			return err
		}
	}
	last := kind >= r.plan.Accumulation.Kinds()-1 && kind != ir.Idle
	for i := range r.plan.Buffers {
		b, c := &r.plan.Buffers[i], &r.present[i]
		outside := b.Kind == plan.Input || b.Kind == plan.State
		switch {
		case c.step < 0 || r.spaces[i] != i:
		case outside:
			return fmt.Errorf("step %d changes %s", c.step, b.Name)
		case !last && (b.Kind == plan.Gradient || b.Kind == plan.PartialSum):
			return fmt.Errorf("step %d writes over %s", c.step, b.Name)
		}
	}
	return nil
}

// left compares what lies in memory after a run with what must lie there.
func (r *proof) left(of memory, d backend.DType, x tensor, kind int) error {
	n := r.origin(of, 0)
	if int(n) >= len(r.buffers) || r.buffers[n] == 0 {
		return fmt.Errorf("no step updates kind %d of variable %d", of.kind, of.index)
	}
	i := r.buffers[n] - 1
	if b := &r.plan.Buffers[i]; b.DType != d || r.present[i].tensor != x {
		return fmt.Errorf("%s is not what it must be after a run of kind %d", b.Name, kind)
	}
	r.present[i].step = -1 // it may change
	return nil
}
