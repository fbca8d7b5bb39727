package proof

import (
	"fmt"
	"math"
	"slices"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/kernels/fuse"
	"github.com/euryale-ml/euryale/vm/internal/ir"
	"github.com/euryale-ml/euryale/vm/internal/plan"
)

// compare compares the results of a run with those of the program.
func (r *proof) compare(kind int) error {
	want := r.results
	norm := len(want)
	if n := len(r.plan.Results); n != norm && (n != norm+1 || r.plan.Norm != norm) {
		return fmt.Errorf("%d results, the program has %d", n, norm)
	}
	for i := range r.plan.Results {
		if i == norm {
			continue // see clipping
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
	applies := last && (kind == plan.Apply || !r.plan.Accumulation.Apart)
	gradients := make([]tensor, len(r.plan.Updates))
	for i := range gradients {
		sum, to := r.reduced(kind, i)
		if gradients[i] = sum; applies {
			continue
		}
		if err := r.left(to, r.dtype(i), sum, kind); err != nil {
			return err
		}
	}
	if applies {
		if err := r.updated(gradients, kind); err != nil {
			return err
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
func (r *proof) reduced(kind, update int) (tensor, memory) {
	whole := memory{plan.Gradient, update, 0}
	if kind == plan.Apply {
		n := r.plan.Program.Values[r.gradient(update)].Shape.Size()
		return r.outside(whole, r.dtype(update), n), whole
	}
	sum, to := r.sum(kind, update)
	if b := r.plan.Updates[update].Bucket; b > 0 && kind == r.plan.Accumulation.Kinds()-1 {
		return r.exchanged(b, r.sums(update, sum)...), whole
	}
	return sum, to
}

// sum returns the gradient of an update after a run, with those of runs before, and where it is
// kept.
func (r *proof) sum(kind, update int) (tensor, memory) {
	a, id := r.plan.Accumulation, r.gradient(update)
	v, x := r.plan.Program.Values[id], r.wanted[id]
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

// updated adds what variables and the vectors of solvers must be in the end.
func (r *proof) updated(gradients []tensor, kind int) error {
	for i := range r.plan.Updates {
		u, d := &r.plan.Updates[i], r.dtype(i)
		gradients[i] = r.withLookups(i, r.shardOf(u.Shard, gradients[i]))
		if s := u.Scale; s != 0 && s != 1 {
			gradients[i] = r.do(fuse.Mul, d, gradients[i], r.float(d, s, r.size(gradients[i])))
		}
	}
	factor, err := r.clipping(gradients)
	if err != nil {
		return err
	}
	for i := range r.plan.Updates {
		if err := r.update(i, gradients[i], factor, r.dtype(i), kind); err != nil {
			return err
		}
	}
	return nil
}

// gradient returns the gradient of an update in a run: one of the last results of the program.
func (r *proof) gradient(update int) ir.ID { return r.gradients[update] }

// dtype returns the dtype of an update, whatever ranks exchange its gradient in.
func (r *proof) dtype(update int) backend.DType {
	if r.plan.Updates[update].Half {
		return backend.F32
	}
	return r.plan.Program.Values[r.gradient(update)].DType
}

// trace is an update of n elements by the rule of a group: a loop over the variable, what is kept
// for it, the gradient and some settings.
type trace struct {
	group, kept int
	dtype       backend.DType
	loop        fuse.Program
	settings    []int
	values      []fuse.Value // what becomes of the variable and of what is kept
}

// trace returns what an update does.
func (r *proof) trace(u *plan.Update, d backend.DType) (*trace, error) {
	for _, t := range r.traces {
		if t.group == u.Group && t.kept == u.Kept && t.dtype == d {
			return t, nil
		}
	}
	t, operands := &trace{group: u.Group, kept: u.Kept, dtype: d}, 0
	t.loop = fuse.Program{Shape: []int{1}, Code: make([]fuse.Instr, 0, 16)}
	load := func() fuse.Value {
		t.loop.Code = append(t.loop.Code, fuse.Instr{Op: fuse.Load, Type: fuse.Type(d),
			Args: [4]fuse.Value{operands}})
		operands++
		return len(t.loop.Code) - 1
	}
	w, kept := load(), make([]fuse.Value, u.Kept)
	for k := range kept {
		kept[k] = load()
	}
	value, kept, err := u.Rule(&t.loop, w, load(), kept, func(i int) fuse.Value {
		t.settings = append(t.settings, i)
		return load()
	})
	t.values, r.traces = append([]fuse.Value{value}, kept...), append(r.traces, t)
	return t, err
}

// update compares what a variable and what is kept for it have become with what an update makes of
// them.
func (r *proof) update(update int, dw, factor tensor, d backend.DType, kind int) error {
	u := &r.plan.Updates[update]
	switch {
	case u.Rule == nil:
		return r.left(memory{plan.Input, u.Input, 0}, d, dw, kind)
	case empty(u.Shard) && u.Shard.FullyShard:
		return nil
	case empty(u.Shard):
		return r.left(memory{plan.Input, u.Input, 0}, d, r.gathered(update, tensor{}), kind)
	}
	t, err := r.trace(u, d)
	if err != nil {
		return err
	}
	n := r.size(dw)
	all, one := r.list(n, 1), r.list(1, n)
	if u.Limit > 0 {
		factor.layout = one
		dw = r.do(fuse.Mul, d, dw, r.cast(d, backend.F64, factor))
	}
	of := func(k int) memory {
		if k == 0 {
			return memory{plan.Input, u.Input, 0}
		}
		return memory{plan.State, u.Input, k - 1}
	}
	r.loads = r.loads[:0]
	for k := range 1 + u.Kept {
		r.loads = append(r.loads, tensor{r.origin(of(k), d), all})
	}
	r.loads[0] = r.shardOf(u.Shard, r.loads[0])
	r.loads = append(r.loads, dw)
	for _, i := range t.settings {
		r.loads = append(r.loads, tensor{r.origin(memory{plan.Setting, i, 0}, d), one})
	}
	t.loop.Shape[0] = n
	values := r.valueNumbers.run(&t.loop, r.loads)
	for k, x := range t.values {
		y := values[x]
		if u.Limit > 0 {
			y = r.do(fuse.Where, d, r.do(fuse.Equal, backend.F64, factor, factor), y, r.loads[k])
		}
		if k == 0 && u.Shard != nil && !u.Shard.FullyShard {
			y = r.gathered(update, y)
		}
		if err := r.left(of(k), d, y, kind); err != nil {
			return err
		}
	}
	return nil
}

// cast returns x in another dtype.
func (r *proof) cast(to, from backend.DType, x tensor) tensor {
	if fuse.Type(to) == fuse.Type(from) {
		return x
	}
	return r.do(fuse.Cast, to, x)
}

// clipping returns the factor that bounds the norm of the gradients, and proves the norm: its
// square must be a sum of the squares of each gradient that counts, in any order.
func (r *proof) clipping(gradients []tensor) (factor tensor, err error) {
	if len(r.plan.Updates) == 0 || r.plan.Updates[0].Limit == 0 {
		return factor, nil
	}
	at, err := r.find(&r.plan.Results[r.plan.Norm])
	if err != nil {
		return factor, fmt.Errorf("the norm of the gradients: %w", err)
	}
	norm := at.tensor
	root := r.made.keys[norm.value]
	if root.op != fuse.Sqrt {
		return factor, fmt.Errorf("the norm of the gradients is no root")
	}
	var want []tensor
	for i, x := range gradients {
		if u := r.plan.Updates[i]; !u.Uncounted && !empty(u.Shard) {
			x = r.cast(backend.F64, r.dtype(i), x)
			all := func(int) bool { return true }
			squares := r.do(fuse.Mul, backend.F64, x, x)
			of, _ := r.fold(backend.Sum, backend.F64, squares, []int{r.size(x)}, all)
			want = append(want, tensor{of, r.list(1, 1)})
		}
	}
	if want == nil {
		want = []tensor{r.float(backend.F64, 0, 1)}
	}
	sum := root.args[0]
	if r.plan.Updates[0].Parts {
		sum = r.parts[sum.value]
	}
	got := r.leaves(sum)
	if !equalSets(got, want) {
		return factor, fmt.Errorf("the norm of the gradients adds up the squares of %d, not of "+
			"the %d that count", len(got), len(want))
	}
	return r.factor(norm), nil
}

// factor is what makes a norm at most the limit: NaN if it is not finite.
func (r *proof) factor(norm tensor) tensor {
	number := func(x float64) tensor { return r.float(backend.F64, x, 1) }
	limit := number(r.plan.Updates[0].Limit)
	larger := r.do(fuse.Greater, backend.F64, norm, limit)
	f := r.do(fuse.Where, backend.F64, larger, r.do(fuse.Div, backend.F64, limit, norm), number(1))
	finite := r.do(fuse.LessEqual, backend.F64, norm, number(math.MaxFloat64))
	return r.do(fuse.Where, backend.F64, finite, f, number(math.NaN()))
}

// equalSets reports whether two lists have the same tensors, each as often.
func equalSets(x, y []tensor) bool {
	count := map[tensor]int{}
	for _, t := range x {
		count[t]++
	}
	for _, t := range y {
		count[t]--
	}
	for _, n := range count {
		if n != 0 {
			return false
		}
	}
	return true
}

// withLookups adds to what comes back of a gradient what lookups add.
func (r *proof) withLookups(update int, dw tensor) tensor {
	of, d := r.plan.Updates[update].Lookups, r.dtype(update)
	if of == nil {
		return dw
	}
	rows := r.wanted[r.lookups[update]]
	if of.Weight != 1 {
		rows = r.do(fuse.Mul, d, rows, r.float(d, of.Weight, r.size(rows)))
	}
	if of.Alone {
		return rows
	}
	return r.do(fuse.Add, d, dw, rows)
}
