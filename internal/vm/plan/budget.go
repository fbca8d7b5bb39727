package plan

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/vm/ir"
	"github.com/euryale-ml/euryale/kernels/fuse"
)

// Budget says what a plan does to fit into memory, and what that costs.
type Budget struct {
	Limit          int // of all memory of the plan, 0 for none
	Bytes          int // of all memory
	Rematerialized int // steps that run a second time
	// Extra is the time of these, as a share of the time of a run without them.
	Extra float64
}

// String returns "+9.0 % time for 11.20 of 16.00 GiB".
func (b Budget) String() string {
	const gib = 1 << 30
	return fmt.Sprintf("%+.1f %% time for %.2f of %.2f GiB", 100*b.Extra, float64(b.Bytes)/gib,
		float64(b.Limit)/gib)
}

// intensity is how many operations of a product take as long as a byte of memory's traffic: the
// order of steps by cost needs no better estimate. An H100 has 20 in F32 and 250 in BF16.
const intensity = 64

// cost estimates how long a step takes, in bytes of memory's traffic.
func (s Step) cost() float64 { return float64(s.FLOPs())/intensity + float64(s.Bytes()) }

// arrange gives the values of a plan their memory. It returns the plan.
func (p *Plan) arrange() *Plan {
	countProducts(p)
	epilogues(p)
	p.overlap()
	shareInPlace(p)
	lives(p)
	p.fillGradients()
	assignOffsets(p)
	return p
}

// Occupied returns the bytes of the plan's memory by its kind: what two buffers have in common
// counts once.
func (p *Plan) Occupied() map[Kind]int {
	bytes, seen := map[Kind]int{Arena: p.ArenaBytes}, map[memory]int{}
	for i := range p.Buffers {
		b := &p.Buffers[i]
		if b.Kind == Arena || b.Kind == Scalar || b.Kind == Setting || b.Within > 0 {
			continue
		}
		n := b.Bytes
		if b.Kind == Gradient && p.Updates[b.Index].Half {
			n *= 2 // buckets have room for F32
		}
		if more := n - seen[b.memory()]; more > 0 {
			bytes[b.Kind] += more
			seen[b.memory()] += more
		}
	}
	return bytes
}

// occupied returns the bytes of all memory of the plan.
func (p *Plan) occupied() (sum int) {
	for _, n := range p.Occupied() {
		sum += n
	}
	return sum
}

// ErrTooSmall is wrapped by the error of a limit of memory that no plan keeps.
var ErrTooSmall = errors.New("plan: too little memory")

// fitted arranges a plan within the limit of memory. If it takes more, steps whose results are idle
// for long run a second time, before these are read again; see [remat]. Values do not change: the
// same steps compute them of the same operands.
func (l Limits) fitted(p *Plan) (*Plan, error) {
	if l.Memory == 0 {
		return p.arrange(), nil
	}
	r := newRemat(p)
	plain := r.plan(nil)
	if l.Memory > 0 && plain.Budget.Bytes <= l.Memory {
		plain.Budget.Limit = l.Memory
		return plain, nil
	}
	best, least := r.choose(plain, l.Memory)
	if best != nil {
		best.Budget.Limit = max(l.Memory, 0)
		return best, nil
	}
	var largest []string
	for _, b := range least.Largest(5) {
		largest = append(largest, fmt.Sprintf("%s (%d bytes)", cmp.Or(b.Name, "a constant"),
			b.Bytes))
	}
	b := least.Budget
	return nil, fmt.Errorf("%w: %d bytes are %d too few: the plan takes %d with %d steps "+
		"rematerialized (%+.0f %% time), and %d without; the largest at its peak are %s: take "+
		"smaller batches, a loss in tiles, or a larger limit", ErrTooSmall, l.Memory,
		b.Bytes-l.Memory, b.Bytes, b.Rematerialized, 100*b.Extra, plain.Budget.Bytes,
		strings.Join(largest, ", "))
}

// remat is rematerialization: which steps of a plan, whose values do not share memory yet, may run
// again.
//
// A buffer that is dropped is not kept while it is idle for longest: what reads it behind that
// reads a copy, which its step writes in a second run. That comes before the first of these, and
// what it reads must be kept, or be a copy itself. No step runs a third time.
//
// What costs less to compute again than to load is none of this: [lower.Rematerialize] puts it into
// the loops that read it, before there are steps, whatever the limit. A limit has to know all steps
// and lives, and products are not computed in loops.
type remat struct {
	*Plan
	cost   float64 // of all steps
	writer []int   // by buffer: the step that may write it again, -1 for none
	early  []int   // by buffer: the last step that needs it before it is idle
	late   []int   // by buffer: the first one behind that, the number of steps for none
	last   []int   // by buffer: the last of all
	keep   []bool  // by buffer: it may not be dropped, and may be kept for longer
	ends   []bool  // by step: it may run in the product before
	order  []int   // the buffers that may be dropped, those first that cost least for their bytes
}

// What is worth a thought.
const (
	idle     = 3       // steps
	smallest = 1 << 11 // of the bytes of all values
)

func newRemat(p *Plan) *remat {
	n := len(p.Buffers)
	r := &remat{Plan: p, writer: slices.Repeat([]int{-1}, n), early: make([]int, n),
		late: slices.Repeat([]int{len(p.Steps)}, n), last: make([]int, n),
		keep: slices.Repeat([]bool{true}, n), ends: make([]bool, len(p.Steps))}
	writes, uses, all := make([]int, n), make([][]int, n), 0
	// by buffer: the step that changes it, of what comes from outside, or what it is computed of
	ends := slices.Repeat([]int{len(p.Steps)}, n)
	for i, s := range p.Steps {
		r.cost += s.cost()
		r.ends[i] = i > 0 && multiplies(p.Steps[i-1].Op) && follows(&s, p.Steps[i-1].Dsts[0])
		for _, d := range s.Dsts {
			writes[d.Buffer]++
			uses[d.Buffer] = append(uses[d.Buffer], i)
			switch b := p.Buffers[d.Buffer]; b.Kind {
			case Input:
				ends[d.Buffer] = min(ends[d.Buffer], i)
			case Arena:
				if _, exchange := s.Op.(Send); !exchange { // which is memory for others' values
					all += b.Bytes
				}
			}
		}
		for _, a := range s.Args {
			uses[a.Buffer] = append(uses[a.Buffer], i)
		}
	}
	for i, s := range p.Steps {
		if p.repeats(s, writes) {
			end := len(p.Steps)
			for _, a := range s.Args {
				end = min(end, ends[a.Buffer])
			}
			for _, d := range s.Dsts {
				ends[d.Buffer] = end
				r.writer[d.Buffer] = i
				r.keep[d.Buffer] = p.Buffers[d.Buffer].Bytes < all/smallest
			}
		}
	}
	for _, a := range p.Results {
		uses[a.Buffer], r.keep[a.Buffer] = append(uses[a.Buffer], len(p.Steps)), true
	}
	for b, at := range uses {
		r.rest(b, at, ends[b])
	}
	r.sort()
	return r
}

// repeats reports whether a step may be rematerialized: what it reads is there until something else
// is written there, and what it writes is written once.
func (p *Plan) repeats(s Step, writes []int) bool {
	switch s.Op.(type) {
	case ir.Opaque, ir.Put, Send, Receive, Joined:
		return false
	}
	once := func(a Ref) bool { return p.arena(a) && writes[a.Buffer] == 1 }
	return s.Runs == 0 && !slices.ContainsFunc(s.Dsts, func(d Ref) bool { return !once(d) }) &&
		!slices.ContainsFunc(s.Args, func(a Ref) bool {
			switch b := p.Buffers[a.Buffer]; b.Kind {
			case Gradient, PartialSum, State, FullBucket, OwnShard:
				return true
			case Unsharded: // and again before another step
				u := p.Updates[b.Index]
				return !u.Shard.FullySharded() || p.allGathers(u.Bucket) > 1
			case Arena:
				return !once(a)
			}
			return false
		})
}

// allGathers returns how often a bucket is gathered.
func (p *Plan) allGathers(bucket int) (n int) {
	for _, s := range p.Steps {
		if op, ok := s.Op.(Send); ok && op.Kind == backend.AllGather && op.Bucket == bucket {
			n++
		}
	}
	return n
}

// arena reports whether a value is the arena's.
func (p *Plan) arena(a Ref) bool { return p.Buffers[a.Buffer].Kind == Arena }

// rest finds out when a buffer is idle for longest, of the steps that use it.
func (r *remat) rest(b int, at []int, end int) {
	if len(at) == 0 {
		return
	}
	longest := idle - 1
	r.early[b], r.last[b] = at[len(at)-1], at[len(at)-1]
	for k, i := range at[1:] {
		if i-at[k] > longest {
			longest, r.early[b], r.late[b] = i-at[k], at[k], i
		}
	}
	r.keep[b] = r.keep[b] || r.late[b] < len(r.Steps) && r.last[b] > end
}

// sort orders the buffers that may be dropped. What has to be kept for longer then is not saved.
func (r *remat) sort() {
	each, g := make([]float64, len(r.Buffers)), r.grow()
	for b := range r.Buffers {
		if r.keep[b] || r.late[b] == len(r.Steps) {
			continue
		}
		saved, cost := float64(r.Buffers[b].Bytes), 0.0
		steps, _ := g.needs(b)
		for _, s := range steps {
			cost += s.cost()
			for _, a := range s.Args {
				if longer := r.late[b] - max(r.early[b], r.last[a.Buffer]); r.arena(a) &&
					r.kept(a.Buffer, g.dropped) && longer > 0 {
					saved -= float64(r.Buffers[a.Buffer].Bytes*longer) /
						float64(r.late[b]-r.early[b])
				}
			}
		}
		if saved > 0 {
			each[b] = cost / saved
			r.order = append(r.order, b)
		}
	}
	slices.SortStableFunc(r.order, func(a, b int) int {
		return cmp.Or(cmp.Compare(each[a], each[b]), cmp.Compare(r.early[a], r.early[b]))
	})
}

// kept reports whether a buffer is kept for steps that are rematerialized.
func (r *remat) kept(b int, dropped []bool) bool {
	return r.keep[b] || r.late[b] < len(r.Steps) && !dropped[b]
}

// rematStep is a step, or the part of a loop, that is rematerialized.
type rematStep struct {
	Step
	of int // the step
	at int // the step before which it runs
}

// rematerialize returns what of a step is rematerialized for those results that are wanted. Of a
// loop, those that are there are loaded. A loop that folds runs as a whole: the order of a fold
// depends on all that the loop does.
func (r *remat) rematerialize(step int, wanted, there func(b int) bool) rematStep {
	s := r.Steps[step]
	l, ok := s.Op.(Loop)
	if !ok {
		return rematStep{s, step, 0}
	}
	from, ok := l.sources(s.Dsts, wanted, there)
	if !ok {
		return rematStep{s, step, 0}
	}
	part := &fuse.Program{Shape: l.Program.Shape, Indices: l.Program.Indices}
	dsts, args, outs := s.Dsts, s.Args, l.Program.Outputs
	s.Dsts, s.Args = nil, nil
	to := make([]fuse.Value, len(from))
	for k, c := range l.Program.Code {
		switch {
		case from[k] == unused:
		case from[k] >= 0:
			to[k] = part.Load(outs[from[k]].DType, outs[from[k]].Strides...)
			s.Args = append(s.Args, dsts[from[k]])
		case c.Op == fuse.Load:
			in := l.Program.Inputs[c.Args[0]]
			to[k] = part.Load(in.DType, in.Strides...)
			s.Args = append(s.Args, args[c.Args[0]])
		default:
			for i, x := range c.Args[:c.Op.Operands()] {
				c.Args[i] = to[x]
			}
			to[k] = len(part.Code)
			part.Code = append(part.Code, c)
		}
	}
	for j, out := range outs {
		if wanted(dsts[j].Buffer) {
			part.Store(to[out.Value], out.DType, out.Strides...)
			s.Dsts = append(s.Dsts, dsts[j])
		}
	}
	s.Op = Loop{part, l.Ops, l.Count}
	return rematStep{s, step, 0}
}

// Where a value of a part of a loop comes from, if not from a result of the loop.
const (
	computed = -1
	unused   = -2
)

// sources returns where each value of a loop comes from in the part that computes the results which
// are wanted; false if there is no such part.
func (l Loop) sources(dsts []Ref, wanted, there func(b int) bool) (from []int, ok bool) {
	from = slices.Repeat([]int{unused}, len(l.Program.Code))
	stored := slices.Repeat([]int{computed}, len(from))
	for j, out := range l.Program.Outputs {
		if b := dsts[j].Buffer; wanted(b) {
			if out.Folded || !distinct(l.Program.Shape, out.Strides) {
				return nil, false
			}
			from[out.Value] = computed
		} else if there(b) && !out.Folded && out.DType == l.Program.Code[out.Value].Type {
			stored[out.Value] = j
		}
	}
	for k, c := range slices.Backward(l.Program.Code) {
		if from[k] == unused {
			continue
		}
		if from[k] = stored[k]; from[k] >= 0 {
			continue
		}
		if c.Op.FoldsRows() {
			return nil, false
		}
		for _, x := range c.Args[:c.Op.Operands()] {
			from[x] = computed
		}
	}
	return from, true
}

// distinct reports whether each element of a loop has its own place.
func distinct(shape, strides []int) bool {
	for axis, size := range shape {
		if size > 1 && strides[axis] == 0 {
			return false
		}
	}
	return true
}

// complete returns what is rematerialized if buffers are dropped, in the order of the steps, what
// is left of their first runs, which have no Op if nobody needs them, and what it costs. The
// buffers of copies have numbers behind all others.
func (r *remat) complete(dropped []bool) (steps []rematStep, firsts []Step, cost float64) {
	firsts = slices.Clone(r.Steps)
	wanted, at := slices.Clone(dropped), slices.Clone(r.late)
	for step, s := range slices.Backward(r.Steps) {
		first, early := len(r.Steps), 0
		before := func(b int) bool { return !dropped[b] || r.early[b] > step }
		for _, d := range s.Dsts {
			if wanted[d.Buffer] {
				first = min(first, at[d.Buffer])
			}
			if before(d.Buffer) {
				early++
			}
		}
		if first == len(r.Steps) {
			continue
		}
		for r.ends[first] {
			first--
		}
		there := func(b int) bool { return first <= r.early[b] || r.kept(b, dropped) }
		x := r.rematerialize(step, func(b int) bool { return wanted[b] }, there)
		x.at, x.Rematerialized = first, true
		switch cost += x.cost(); early {
		case len(s.Dsts):
		case 0:
			firsts[step].Op, cost = nil, cost-s.cost()
		default:
			firsts[step] = r.rematerialize(step, before, func(int) bool { return false }).Step
			cost += firsts[step].cost() - s.cost()
		}
		x.Dsts, x.Args = slices.Clone(x.Dsts), slices.Clone(x.Args)
		for k := range x.Dsts {
			x.Dsts[k].Buffer += len(r.Buffers)
		}
		for k := range x.Args {
			if b := x.Args[k].Buffer; r.arena(x.Args[k]) && !there(b) {
				wanted[b], at[b] = true, min(at[b], first)
				x.Args[k].Buffer += len(r.Buffers)
			}
		}
		steps = append(steps, x)
	}
	slices.Reverse(steps)
	return steps, firsts, cost
}

// plan returns the plan in which buffers are dropped.
func (r *remat) plan(drop []int) *Plan {
	dropped := r.dropped(drop)
	steps, firsts, cost := r.complete(dropped)
	slices.SortStableFunc(steps, func(a, b rematStep) int { return cmp.Compare(a.at, b.at) })
	w := newRewriting(r.Plan)
	k := 0
	for i, s := range firsts {
		for ; k < len(steps) && steps[k].at == i; k++ {
			w.step(steps[k].Step)
		}
		if s.Op == nil {
			continue
		}
		s.Dsts, s.Args = slices.Clone(s.Dsts), slices.Clone(s.Args)
		for k, a := range s.Args {
			if b := a.Buffer; dropped[b] && i >= r.late[b] {
				s.Args[k].Buffer += len(r.Buffers)
			}
		}
		w.at[i] = len(w.Steps)
		w.step(s)
	}
	w.Results = slices.Clone(r.Results)
	w.move(w.Results)
	p := w.Plan.arrange()
	p.Budget = Budget{0, p.occupied(), len(steps), cost / r.cost}
	return p
}

func (r *remat) dropped(list []int) []bool {
	dropped := make([]bool, len(r.Buffers))
	for _, b := range list {
		dropped[b] = true
	}
	return dropped
}

// rewriting makes a plan of the steps of another.
type rewriting struct {
	Plan
	at, to, by []int // by step: its new number; by copy: the number of its buffer, and its writer's
}

func newRewriting(p *Plan) *rewriting {
	n := len(p.Buffers)
	w := &rewriting{*p, make([]int, len(p.Steps)), make([]int, n), make([]int, n)}
	w.Steps, w.Buffers = nil, slices.Clone(p.Buffers)
	return w
}

// step adds a step.
func (w *rewriting) step(s Step) {
	w.move(s.Args)
	for k := range s.Dsts {
		d := &s.Dsts[k]
		if b := d.Buffer - len(w.to); b >= 0 {
			w.to[b], w.by[b], d.Buffer = len(w.Buffers), len(w.Steps), len(w.Buffers)
			w.Buffers = append(w.Buffers, w.Buffers[b])
		}
		d.Step = len(w.Steps)
	}
	w.Steps = append(w.Steps, s)
}

// move says where values of the other plan are.
func (w *rewriting) move(refs []Ref) {
	for k := range refs {
		a := &refs[k]
		if b := a.Buffer - len(w.to); b >= 0 {
			a.Buffer, a.Step = w.to[b], w.by[b]
		} else if a.Step >= 0 {
			a.Step = w.at[a.Step]
		}
	}
}

// tries bounds how many plans are made for one bound of what is rematerialized at once, and bounds
// how many of these are tried. The least memory is what a plan for one of so many limits takes.
const tries, bounds, limits = 8, 12, 16

// choose returns the plan of the least cost that fits, of those that are tried, nil if none does,
// and the one with the least memory, which is what fits if the limit is negative. Where the limit
// is less, what is found for it may take more. So that no limit is refused and a smaller one kept,
// the least is found for limits that do not depend on this one, and decides.
func (r *remat) choose(plain *Plan, limit int) (best, least *Plan) {
	outside := plain.Budget.Bytes - plain.ArenaBytes
	_, least = r.within(plain, outside)
	if limit >= 0 {
		if best, _ = r.within(plain, limit); best != nil && least.Budget.Bytes <= limit {
			return best, least
		}
	}
	plans := []*Plan{least}
	for k := range limits - 1 {
		fits, smallest := r.within(plain, outside+plain.ArenaBytes*(k+1)/limits)
		plans = append(plans, cmp.Or(fits, smallest), smallest)
	}
	least = slices.MinFunc(plans, func(a, b *Plan) int { return a.Budget.Bytes - b.Budget.Bytes })
	if limit < 0 {
		return least, least
	}
	plans = slices.DeleteFunc(append(plans, cmp.Or(best, least)), func(p *Plan) bool {
		return p.Budget.Bytes > limit
	})
	if least.Budget.Bytes > limit {
		return nil, least
	}
	return slices.MinFunc(plans, func(a, b *Plan) int {
		return cmp.Compare(a.Budget.Extra, b.Budget.Extra)
	}), least
}

// within returns the plan of the least cost that keeps a limit, of those that are tried, nil if
// none does, and the one with the least memory. Each bound of what is rematerialized at once makes
// another list of what may be dropped. Small ones keep much, and large ones need memory for what
// they compute again.
func (r *remat) within(plain *Plan, limit int) (best, least *Plan) {
	sum, largest := 0, 0
	for _, b := range r.order {
		sum, largest = sum+r.Buffers[b].Bytes, max(largest, r.Buffers[b].Bytes)
	}
	least = plain
	order := r.sorted(plain, limit)
	for k, most := 0, sum; k < bounds && most >= largest; k, most = k+1, most*2/3 {
		list := r.list(order, most)
		n, over := 0, plain.Budget.Bytes-limit
		for range tries {
			for ; over > 0 && n < len(list); n++ { // it saves that much at most
				over -= r.Buffers[list[n]].Bytes
			}
			if _, _, cost := r.complete(r.dropped(list[:n])); best != nil &&
				cost/r.cost >= best.Budget.Extra {
				break
			}
			p := r.plan(list[:n])
			if p.Budget.Bytes < least.Budget.Bytes {
				least = p
			}
			if over = p.Budget.Bytes - limit; over <= 0 {
				best = p
			}
			if over <= 0 || n == len(list) {
				break
			}
		}
	}
	return best, least
}

// sorted puts buffers that are idle while the plain plan takes more than the limit before others.
func (r *remat) sorted(plain *Plan, limit int) []int {
	room := limit - (plain.Budget.Bytes - plain.ArenaBytes)
	above := make([]int, len(r.Steps)+1) // before each step, steps that take more
	for i, n := range plain.usage() {
		if above[i+1] = above[i]; n > room {
			above[i+1]++
		}
	}
	useless := func(b int) int {
		if above[r.early[b]+1] == above[r.late[b]] {
			return 1
		}
		return 0
	}
	order := slices.Clone(r.order)
	slices.SortStableFunc(order, func(a, b int) int { return useless(a) - useless(b) })
	return order
}

// list returns buffers of an order that may be dropped so that at most so many bytes are computed
// again at once.
func (r *remat) list(order []int, most int) (list []int) {
	g := r.grow()
	for _, b := range order {
		if g.add(b, most) {
			list = append(list, b)
		}
	}
	return list
}

// growth finds out what is rematerialized at once: steps that read copies of each other.
type growth struct {
	*remat
	dropped []bool
	copied  []bool  // by buffer: it has a copy
	readers [][]int // by buffer that is kept: the steps that read it again
	joint   []int   // by step: those that run at once have the same number, of one of them
	bytes   []int   // by that number: of all copies that these write
}

func (r *remat) grow() *growth {
	n, steps := len(r.Buffers), len(r.Steps)
	g := &growth{r, make([]bool, n), make([]bool, n), make([][]int, n), make([]int, steps),
		make([]int, steps)}
	for i := range g.joint {
		g.joint[i] = i
	}
	return g
}

// needs returns what is rematerialized if a buffer is dropped, too, and what has a copy then.
func (g *growth) needs(b int) (steps []rematStep, copies []int) {
	g.dropped[b] = true
	defer func() { g.dropped[b] = false }()
	copies = append(copies, b)
	wanted := func(b int) bool { return g.copied[b] || slices.Contains(copies, b) }
	there := func(b int) bool { return g.kept(b, g.dropped) }
	for k := 0; k < len(copies); k++ {
		x := g.rematerialize(g.writer[copies[k]], wanted, there)
		for _, a := range x.Args {
			if g.arena(a) && !there(a.Buffer) && !wanted(a.Buffer) {
				copies = append(copies, a.Buffer)
			}
		}
		steps = append(steps, x)
	}
	return steps, copies
}

// add drops a buffer, unless more bytes would then be computed again at once.
func (g *growth) add(b, most int) bool {
	steps, copies := g.needs(b)
	joint := []int{g.joint[g.writer[b]]}
	for _, s := range g.readers[b] {
		joint = append(joint, g.joint[s])
	}
	for _, x := range steps {
		joint = append(joint, g.joint[x.of])
		for _, a := range x.Args {
			if g.arena(a) && g.copied[a.Buffer] {
				joint = append(joint, g.joint[g.writer[a.Buffer]])
			}
		}
	}
	slices.Sort(joint)
	joint = slices.Compact(joint)
	bytes := 0
	for _, s := range joint {
		bytes += g.bytes[s]
	}
	for _, x := range copies {
		bytes += g.Buffers[x].Bytes
	}
	if bytes > most {
		return false
	}
	for s, of := range g.joint {
		if slices.Contains(joint, of) {
			g.joint[s] = joint[0]
		}
	}
	g.bytes[joint[0]], g.dropped[b] = bytes, true
	for _, x := range copies {
		g.copied[x] = true
	}
	for _, x := range steps {
		for _, a := range x.Args {
			if g.arena(a) && g.kept(a.Buffer, g.dropped) {
				g.readers[a.Buffer] = append(g.readers[a.Buffer], x.of)
			}
		}
	}
	return true
}
