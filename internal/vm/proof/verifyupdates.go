package proof

import (
	"fmt"
	"slices"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/vm/ir"
	"github.com/euryale-ml/euryale/internal/vm/plan"
	"github.com/euryale-ml/euryale/kernels/fuse"
)

// compare compares the results of a run with those of the program. The last one is the norm of the
// gradients if they are clipped, which the run with the updates has.
func (r *proof) compare(kind int) error {
	want := r.plan.Program.Results
	if n := len(r.plan.Results); n != len(want) {
		return fmt.Errorf("%d results, the program has %d", n, len(want))
	}
	clips := len(r.plan.Updates) > 0 && r.plan.Updates[0].Limit > 0
	for i := range r.plan.Results {
		norm := clips && i == len(want)-1
		if norm && kind != r.applying() || !norm && kind == plan.Apply {
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
		return plan.Apply
	}
	return r.plan.Accumulation.Kinds() - 1
}

// send notes what leaves in a bucket: until Receive nobody may read it.
func (r *proof) send(i int, op plan.Send, slots []plan.Ref) error {
	for all, _ := r.members(len(r.sent) + 1); all == nil && len(r.sent) < op.Bucket; {
		r.sent = append(r.sent, nil) // of lookups alone
		all, _ = r.members(len(r.sent) + 1)
	}
	if op.Bucket != len(r.sent)+1 {
		return fmt.Errorf("it comes as number %d", len(r.sent))
	}
	var sent []tensor
	for _, s := range slots {
		c := &r.present[r.spaces[s.Buffer]]
		sent = append(sent, c.tensor)
		c.gone = i
	}
	var want []memory
	for update, u := range r.plan.Updates {
		if u.Bucket == op.Bucket {
			for branch := range branches(r.plan.Accumulation) {
				want = append(want, memory{plan.Gradient, update, branch})
			}
		}
	}
	if !slices.EqualFunc(slots, want, func(s plan.Ref, of memory) bool {
		half := r.plan.Updates[of.index].Half
		return memoryOf(&r.plan.Buffers[s.Buffer]) == of && half == op.Half &&
			half == (s.DType == backend.BF16)
	}) {
		return fmt.Errorf("it does not send the gradients %v as their updates say", want)
	}
	r.sent = append(r.sent, sent)
	return nil
}

// receive adds what comes back.
func (r *proof) receive(op plan.Receive) error {
	if op.Bucket > len(r.sent) {
		return fmt.Errorf("nothing has been sent")
	}
	for sums := range slices.Chunk(r.sent[op.Bucket-1], len(branches(r.plan.Accumulation))) {
		r.gives = append(append(r.gives, r.exchanged(op.Bucket, sums...)), sums[1:]...)
	}
	return nil
}

// exchanged is what ranks make of the sums of a gradient in a bucket.
func (r *proof) exchanged(bucket int, sums ...tensor) (x tensor) {
	for _, sum := range sums {
		value := r.number(&term{form: byExchange, bits: uint64(bucket), args: [4]tensor{sum, x}})
		x = tensor{value, r.list(r.size(sum), 1)}
	}
	return x
}

// sums returns what a bucket has of a gradient at its end, of which the last run makes x.
func (r *proof) sums(update int, x tensor) []tensor {
	all := make([]tensor, len(branches(r.plan.Accumulation)))
	for branch := range all[1:] {
		all[branch] = r.outside(memory{plan.Gradient, update, branch}, r.dtype(update), r.size(x))
	}
	all[len(all)-1] = x
	return all
}

// ended compares what a run leaves for the next ones: the sums of gradients, or what updates make
// of them.
func (r *proof) ended(kind int) error {
	last := kind >= r.plan.Accumulation.Kinds()-1
	if kind == r.applying() {
		if err := r.assigned(kind); err != nil {
			return err
		}
	} else {
		for i := range r.plan.Updates {
			sum, to := r.reduced(kind, i, r.wanted[r.gradients[i]])
			if err := r.left(to, r.dtype(i), sum, kind); err != nil {
				return err
			}
		}
	}
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

// assigned compares what variables and states have become with what the program assigns to them.
func (r *proof) assigned(kind int) error {
	p := r.plan.Program
	for _, a := range p.Assigns {
		to := a.To
		for ir.View(p.Values[to].Op) {
			to = p.Values[to].Args[0]
		}
		var of memory
		switch op := p.Values[to].Op.(type) {
		case ir.Input:
			of = memory{plan.Input, op.Index, 0}
		case ir.State:
			of = memory{plan.State, op.Input, op.Vector}
		}
		if err := r.left(of, p.Values[to].DType, r.wanted[a.Value], kind); err != nil {
			return err
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

// reduced returns the gradient of an update after a run: of all runs and ranks after the last one,
// which has exchanged it, and else of some. It returns where it is kept, too.
func (r *proof) reduced(kind, update int, x tensor) (tensor, memory) {
	whole := memory{plan.Gradient, update, 0}
	if kind == plan.Apply {
		n := r.plan.Program.Values[r.gradients[update]].Shape.Size()
		return r.outside(whole, r.dtype(update), n), whole
	}
	sum, to := r.sum(kind, update, x)
	if b := r.plan.Updates[update].Bucket; b > 0 && kind == r.plan.Accumulation.Kinds()-1 {
		return r.exchanged(b, r.sums(update, sum)...), whole
	}
	return sum, to
}

// sum returns the gradient of an update after a run, with those of runs before, and where it is
// kept.
func (r *proof) sum(kind, update int, x tensor) (tensor, memory) {
	a, v := r.plan.Accumulation, r.plan.Program.Values[r.gradients[update]]
	branches, kinds := len(branches(a)), []plan.Sum{{}}
	kept := func(i int) memory {
		if i < branches {
			return memory{plan.Gradient, update, i}
		}
		return memory{plan.PartialSum, update, i - branches}
	}
	if a.Runs > 1 {
		kinds = a.Sums()
	}
	for _, i := range kinds[kind].Add {
		x = r.do(fuse.Add, v.DType, r.outside(kept(i), v.DType, v.Shape.Size()), x)
	}
	return x, kept(kinds[kind].To)
}

// dtype returns the dtype of an update, whatever ranks exchange its gradient in.
func (r *proof) dtype(update int) backend.DType {
	return fuse.Type(r.plan.Program.Values[r.gradients[update]].DType)
}
