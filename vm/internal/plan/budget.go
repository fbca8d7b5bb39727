package plan

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/euryale-ml/euryale/kernels/fuse"
	"github.com/euryale-ml/euryale/vm/internal/ir"
)

// Budget says what a plan does to fit into memory, and what that costs.
type Budget struct {
	Limit int // of all memory of the plan, 0 for none
	Bytes int // of all memory
	Again int // steps that run a second time
	// Extra is the time of these, as a share of the time of a run without them.
	Extra float64
}

// String returns "+9.0 % time for 11.20 of 16.00 GiB".
func (b Budget) String() string {
	const gib = 1 << 30
	of := ""
	if b.Limit > 0 {
		of = fmt.Sprintf(" of %.2f", float64(b.Limit)/gib)
	}
	return fmt.Sprintf("%+.1f %% time for %.2f%s GiB", 100*b.Extra, float64(b.Bytes)/gib, of)
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
	shareInPlace(p)
	lives(p)
	assignOffsets(p)
	return p
}

// Occupied returns the bytes of the plan's memory by its kind: what two buffers have in common
// counts once.
func (p *Plan) Occupied() map[Kind]int {
	bytes, seen := map[Kind]int{Arena: p.ArenaBytes}, map[memory]int{}
	for i := range p.Buffers {
		b := &p.Buffers[i]
		if b.Kind == Arena || b.Kind == Scalar || b.Kind == Setting {
			continue
		}
		if more := b.Bytes - seen[b.memory()]; more > 0 {
			bytes[b.Kind] += more
			seen[b.memory()] += more
		}
	}
	return bytes
}

// bytes returns the bytes of all memory of the plan.
func (p *Plan) bytes() (sum int) {
	for _, n := range p.Occupied() {
		sum += n
	}
	return sum
}

// fitted arranges a plan within the limit of memory. If it takes more, steps whose results lie idle
// for long run a second time, before these are read again. Which steps these are is a choice of the
// least time; see [reruns.choose]. Values do not change: the same steps compute them of the same
// operands.
func (l Limits) fitted(p *Plan) (*Plan, error) {
	if l.Memory == 0 {
		return p.arrange(), nil
	}
	r := newReruns(p)
	plain := r.plan(r.complete(make([]bool, len(p.Buffers))), l.Memory)
	r.beside = plain.bytes() - plain.ArenaBytes
	if l.Memory < 0 {
		return r.least(plain), nil
	} else if plain.Budget.Bytes <= l.Memory {
		return plain, nil
	}
	if p := r.search(l.Memory); p != nil {
		return p, nil
	}
	q := r.least(plain)
	if q.Budget.Bytes > l.Memory {
		return nil, q.tooSmall(plain)
	}
	return q, nil
}

// search returns the plan with the least cost that is found within a limit, nil if none is. Arenas
// may have gaps, so that they take somewhat more than what is in use at once.
func (r *reruns) search(limit int) (best *Plan) {
	sizes, room := r.sizes(), limit-r.beside
	target, low, high := room, 0, room+1 // targets whose arenas fit, and that do not
	for range corrections {
		c := r.choose(target, sizes)
		if c == nil {
			high = target
		} else {
			p := r.plan(c, limit)
			sizes = []int{c.most}
			if p.ArenaBytes > room {
				high, target = target, c.peak-(p.ArenaBytes-room)
			} else {
				low, target = target, target+room-p.ArenaBytes
				if best == nil || p.Budget.Extra < best.Budget.Extra {
					best = p
				}
				if float64(p.Budget.Bytes) > enough*float64(limit) {
					break
				}
			}
		}
		if target <= low || target >= high {
			target = (low + high) / 2
		}
		if high-low < room/100 {
			break
		}
	}
	return best
}

// plan returns the plan of a choice.
func (r *reruns) plan(c *choice, limit int) *Plan {
	p := r.rewritten(c).arrange()
	p.Budget = Budget{max(limit, 0), p.bytes(), len(c.steps), c.cost / r.cost}
	return p
}

// The search for a choice that uses the limit.
const (
	corrections = 6    // tries
	enough      = 0.98 // of the limit
)

// errTooSmall is what every error of a limit is.
var errTooSmall = errors.New("the limit of memory is too small")

// tooSmall is the error of a limit below what the plan needs.
func (p *Plan) tooSmall(plain *Plan) error {
	limit := p.Budget.Limit
	var largest []string
	for _, b := range p.Largest(5) {
		largest = append(largest, fmt.Sprintf("%s (%d bytes)", cmp.Or(b.Name, "a constant"),
			b.Bytes))
	}
	return fmt.Errorf("plan: %w: %d bytes of memory are %d too few: with %d steps that run again it "+
		"takes %d, without %d; at its peak the largest are %s", errTooSmall, limit, p.Budget.Bytes-limit,
		p.Budget.Again, p.Budget.Bytes, plain.Budget.Bytes, strings.Join(largest, ", "))
}

// least returns the plan with the least memory of those that are tried, and of one.
func (r *reruns) least(p *Plan) *Plan {
	var best *choice
	for _, most := range r.sizes() {
		list := r.list(0, most)
		for k := range samples {
			c := r.complete(r.drop(list[:len(list)*(k+1)/samples]))
			if r.measure(c); best == nil || c.peak < best.peak {
				best = c
			}
		}
	}
	if best != nil {
		if q := r.plan(best, p.Budget.Limit); q.ArenaBytes < p.ArenaBytes {
			return q
		}
	}
	return p
}

// reruns are the steps of a plan, whose values do not share memory yet, that may run again.
//
// A buffer that is dropped is not kept while it is idle for longest: what reads it behind that
// reads what its step writes in a second run. That runs before the first of these, and what it
// reads must be kept, or dropped itself. No step runs a third time.
type reruns struct {
	*Plan
	cost   float64 // of all steps
	beside int     // bytes of memory beside the arena
	writer []int   // by buffer: the step that may write it again, -1 for none
	early  []int   // by buffer: the last step that needs it before it is idle
	late   []int   // by buffer: the first one behind that, the number of steps for none
	last   []int   // by buffer: the last of all
	keep   []bool  // by buffer: it may not be dropped, and may be kept for longer
	ends   []bool  // by step: it may run in the product before
	usage  []int   // by step: bytes in use if nothing is dropped
	order  []int   // the buffers that may be dropped, those first that cost least for their bytes
}

// least sizes of what is worth a thought.
const (
	idle     = 3       // steps
	smallest = 1 << 11 // of the bytes of all values
)

func newReruns(p *Plan) *reruns {
	n := len(p.Buffers)
	r := &reruns{Plan: p, writer: make([]int, n), early: make([]int, n), late: make([]int, n),
		last: make([]int, n), keep: make([]bool, n), ends: make([]bool, len(p.Steps))}
	writes := make([]int, n)
	end := len(p.Steps) // of the steps that do not change what comes from outside
	for i, s := range p.Steps {
		r.cost += s.cost()
		r.ends[i] = i > 0 && multiplies(p.Steps[i-1].Op) && follows(&s, p.Steps[i-1].Dsts[0])
		for _, d := range s.Dsts {
			writes[d.Buffer]++
			if k := p.Buffers[d.Buffer].Kind; (k == Input || k == State) && i < end {
				end = i
			}
		}
	}
	uses, all := make([][]int, n), 0
	for b := range p.Buffers {
		r.writer[b], r.keep[b] = -1, true
		if p.Buffers[b].Kind == Arena {
			all += p.Buffers[b].Bytes
		}
	}
	for i, s := range p.Steps {
		again := p.repeats(s, writes)
		for _, d := range s.Dsts {
			uses[d.Buffer] = append(uses[d.Buffer], i)
			if again {
				r.writer[d.Buffer] = i
				r.keep[d.Buffer] = p.Buffers[d.Buffer].Bytes < all/smallest
			}
		}
		for _, a := range s.Args {
			uses[a.Buffer] = append(uses[a.Buffer], i)
		}
	}
	for _, a := range p.Results {
		uses[a.Buffer], r.keep[a.Buffer] = append(uses[a.Buffer], len(p.Steps)), true
	}
	for b, at := range uses {
		r.rest(b, at, end)
	}
	none := r.complete(make([]bool, n))
	r.measure(none)
	r.usage = none.usage
	r.sort()
	return r
}

// repeats reports whether a step may run again: what it reads is there until something else is
// written there, and what it writes is written once.
func (p *Plan) repeats(s Step, writes []int) bool {
	switch s.Op.(type) {
	case ir.Opaque, ir.Put, Send, Receive, Joined:
		return false
	}
	arena := func(a Ref) bool {
		return p.Buffers[a.Buffer].Kind == Arena && writes[a.Buffer] == 1
	}
	return s.Runs == 0 && !slices.ContainsFunc(s.Dsts, func(d Ref) bool { return !arena(d) }) &&
		!slices.ContainsFunc(s.Args, func(a Ref) bool {
			k := p.Buffers[a.Buffer].Kind
			return k == Slot || k == Partial || k == State || k == Arena && !arena(a)
		})
}

// rest finds out when a buffer is idle for longest.
func (r *reruns) rest(b int, at []int, end int) {
	n := len(r.Steps)
	r.late[b] = n
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
	r.keep[b] = r.keep[b] || r.late[b] < n && r.last[b] > end
}

// sort orders the buffers that may be dropped.
func (r *reruns) sort() {
	each, g := make([]float64, len(r.Buffers)), r.grow()
	for b := range r.Buffers {
		if r.keep[b] || r.late[b] == len(r.Steps) {
			continue
		}
		parts, _, cost := g.needs(b)
		saved := r.Buffers[b].Bytes
		for _, p := range parts {
			for _, a := range p.args { // which live longer
				if r.arena(a) && r.kept(a.Buffer, g.dropped) && r.last[a.Buffer] < r.late[b] {
					saved -= r.Buffers[a.Buffer].Bytes
				}
			}
		}
		if saved > 0 {
			each[b] = cost / float64(saved)
			r.order = append(r.order, b)
		}
	}
	slices.SortStableFunc(r.order, func(a, b int) int {
		return cmp.Or(cmp.Compare(each[a], each[b]), cmp.Compare(r.early[a], r.early[b]))
	})
}

// kept reports whether a buffer is kept for steps that run again.
func (r *reruns) kept(b int, dropped []bool) bool {
	return r.keep[b] || r.late[b] < len(r.Steps) && !dropped[b]
}

// arena reports whether a value is the arena's.
func (r *reruns) arena(a Ref) bool { return r.Buffers[a.Buffer].Kind == Arena }

// part is what of a step runs again: all of it, or of a loop what some results need.
type part struct {
	step int
	at   int   // the step before which it runs
	dsts []int // which results
	args []Ref // of the step, and results of its first run
	cost float64
	// of a loop that is not whole, by instruction: dead, whole, or 1 + the result that has it
	code []int
}

const (
	dead  = -1
	whole = 0
)

// part returns what of a step runs again for those results that are wanted. Of a loop, those that
// are there are loaded. A loop that folds runs as a whole: the order of a fold depends on all that
// the loop does.
func (r *reruns) part(step int, wanted, there func(b int) bool) part {
	s := &r.Steps[step]
	p := part{step: step}
	loop, ok := s.Op.(Loop)
	if ok {
		ok = r.divide(&p, loop.Program, wanted, there)
	}
	if !ok {
		p = part{step: step, args: s.Args, cost: s.cost()}
		for j := range s.Dsts {
			p.dsts = append(p.dsts, j)
		}
	}
	return p
}

// divide finds the part of a loop; false if there is none.
func (r *reruns) divide(p *part, loop *fuse.Program, wanted, there func(b int) bool) bool {
	s := &r.Steps[p.step]
	p.code = slices.Repeat([]int{dead}, len(loop.Code))
	has := make([]int, len(loop.Code))
	for j, out := range loop.Outputs {
		b := s.Dsts[j].Buffer
		switch {
		case wanted(b):
			for axis, stride := range out.Strides {
				if out.Folded || stride == 0 && loop.Shape[axis] > 1 {
					return false
				}
			}
			p.dsts, p.code[out.Value] = append(p.dsts, j), whole
		case there(b) && !out.Folded && out.DType == loop.Code[out.Value].Type:
			has[out.Value] = j + 1
		}
	}
	for k := len(loop.Code) - 1; k >= 0; k-- {
		c := &loop.Code[k]
		if p.code[k] == dead {
			continue
		}
		if p.code[k] = has[k]; has[k] > 0 {
			continue
		}
		if c.Op.FoldsRows() {
			return false
		}
		for _, x := range c.Args[:c.Op.Operands()] {
			p.code[x] = whole
		}
	}
	for k, c := range loop.Code {
		switch {
		case p.code[k] > 0:
			p.args = append(p.args, s.Dsts[p.code[k]-1])
		case p.code[k] == whole && c.Op == fuse.Load:
			p.args = append(p.args, s.Args[c.Args[0]])
		}
	}
	of := Step{Args: p.args}
	for _, j := range p.dsts {
		of.Dsts = append(of.Dsts, s.Dsts[j])
	}
	p.cost = float64(of.Bytes())
	return true
}

// loop returns the loop of a part.
func (p part) loop(l Loop) Loop {
	if p.code == nil {
		return l
	}
	q := &fuse.Program{Shape: l.Program.Shape, Indices: l.Program.Indices}
	to := make([]fuse.Value, len(p.code))
	for k, c := range l.Program.Code {
		switch from := p.code[k]; {
		case from == dead:
			continue
		case from > 0:
			out := l.Program.Outputs[from-1]
			to[k] = q.Load(out.DType, out.Strides...)
			continue
		case c.Op == fuse.Load:
			in := l.Program.Inputs[c.Args[0]]
			to[k] = q.Load(in.DType, in.Strides...)
			continue
		}
		for i, x := range c.Args[:c.Op.Operands()] {
			c.Args[i] = to[x]
		}
		q.Code = append(q.Code, c)
		to[k] = len(q.Code) - 1
	}
	for _, j := range p.dsts {
		out := l.Program.Outputs[j]
		q.Store(to[out.Value], out.DType, out.Strides...)
	}
	return Loop{q, l.Ops, l.Count}
}

// choice is which buffers are dropped, and what follows from that.
type choice struct {
	dropped []bool
	steps   []part // that run again, in the order in which they do
	moved   []bool // by step: it runs only then, since nothing else needs it
	cost    float64
	usage   []int // bytes in use, by what runs: steps and parts
	peak    int
	most    int // the bound of what runs again at once
}

// complete finds out what runs again if buffers are dropped, and where.
func (r *reruns) complete(dropped []bool) *choice {
	c := &choice{dropped: dropped, moved: make([]bool, len(r.Steps))}
	wanted, at := slices.Clone(dropped), slices.Clone(r.late)
	for step, s := range slices.Backward(r.Steps) {
		first, early := len(r.Steps), false
		for _, d := range s.Dsts {
			if wanted[d.Buffer] {
				first = min(first, at[d.Buffer])
			}
			early = early || !dropped[d.Buffer] || r.early[d.Buffer] > step
		}
		if first == len(r.Steps) {
			continue
		}
		for first > 0 && r.ends[first] {
			first--
		}
		there := func(b int) bool { return first <= r.early[b] || r.kept(b, dropped) }
		p := r.part(step, func(b int) bool { return wanted[b] }, there)
		p.at = first
		for _, a := range p.args {
			if b := a.Buffer; r.arena(a) && !there(b) {
				wanted[b], at[b] = true, min(at[b], first)
			}
		}
		c.steps = append(c.steps, p)
		if c.cost += p.cost; !early {
			c.moved[step] = true
			c.cost -= s.cost()
		}
	}
	slices.Reverse(c.steps)
	slices.SortStableFunc(c.steps, func(a, b part) int { return cmp.Compare(a.at, b.at) })
	return c
}

// run is a step or a part that runs, with the buffers that it reads and writes: those of parts have
// numbers behind all others.
type run struct {
	step       int
	again      *part // nil for the step itself
	args, dsts []int
}

// runs returns what runs, in order.
func (r *reruns) runs(c *choice) []run {
	n, k := len(r.Buffers), 0
	all := make([]run, 0, len(r.Steps)+len(c.steps))
	for i, s := range r.Steps {
		for ; k < len(c.steps) && c.steps[k].at == i; k++ {
			p := &c.steps[k]
			x := run{step: p.step, again: p}
			for _, a := range p.args {
				b := a.Buffer
				if r.arena(a) && i > r.early[b] && !r.kept(b, c.dropped) {
					b += n
				}
				x.args = append(x.args, b)
			}
			for _, j := range p.dsts {
				x.dsts = append(x.dsts, r.Steps[p.step].Dsts[j].Buffer+n)
			}
			all = append(all, x)
		}
		if c.moved[i] {
			continue
		}
		x := run{step: i}
		for _, a := range s.Args {
			b := a.Buffer
			if c.dropped[b] && i >= r.late[b] {
				b += n
			}
			x.args = append(x.args, b)
		}
		for _, d := range s.Dsts {
			x.dsts = append(x.dsts, d.Buffer)
		}
		all = append(all, x)
	}
	return all
}

// measure finds out how much memory is in use.
func (r *reruns) measure(c *choice) {
	all, n := r.runs(c), len(r.Buffers)
	first, last := slices.Repeat([]int{-1}, 2*n), make([]int, 2*n)
	for i, x := range all {
		for _, list := range [...][]int{x.dsts, x.args} {
			for _, b := range list {
				if last[b] = i; first[b] < 0 {
					first[b] = i
				}
			}
		}
	}
	for _, a := range r.Results {
		last[a.Buffer] = len(all) - 1
	}
	change := make([]int, len(all)+1)
	for b, from := range first {
		if of := &r.Buffers[b%n]; of.Kind == Arena && from >= 0 {
			size := (of.Bytes + alignment - 1) / alignment * alignment
			change[from] += size
			change[last[b]+1] -= size
		}
	}
	c.usage = make([]int, len(all))
	for i := range all {
		if c.usage[i] = change[i]; i > 0 {
			c.usage[i] += c.usage[i-1]
		}
	}
	for i, x := range all { // a loop may write over an operand
		here := c.usage[i]
		if _, ok := r.Steps[x.step].Op.(Loop); ok {
			here -= r.inPlace(x, i, last)
		}
		c.peak = max(c.peak, here)
	}
}

// inPlace returns the bytes of results that a loop can write over operands.
func (r *reruns) inPlace(x run, i int, last []int) (bytes int) {
	n := len(r.Buffers)
	for k, d := range x.dsts {
		for j, a := range x.args {
			from, to := r.Buffers[a%n], r.Buffers[d%n]
			if from.Kind == Arena && last[a] == i && from.Bytes == to.Bytes &&
				from.DType == to.DType && !slices.Contains(x.args[:j], a) &&
				!slices.ContainsFunc(x.dsts[:k], func(before int) bool {
					return r.Buffers[before%n].Bytes == to.Bytes
				}) {
				bytes += to.Bytes
				break
			}
		}
	}
	return bytes
}

// rewritten returns the plan of a choice.
func (r *reruns) rewritten(c *choice) *Plan {
	all, n := r.runs(c), len(r.Buffers)
	q := *r.Plan
	q.Steps, q.Buffers = make([]Step, len(all)), slices.Clone(r.Buffers)
	q.Results = slices.Clone(r.Results)
	to, by := make([]int, 2*n), make([]int, 2*n) // by buffer: its number and its part, if it has one
	at := make([]int, len(r.Steps))
	for b := range n {
		to[b] = b
	}
	for i, x := range all {
		if x.again == nil {
			at[x.step] = i
			continue
		}
		for _, d := range x.dsts {
			of := r.Buffers[d%n]
			q.Buffers = append(q.Buffers, of)
			to[d], by[d] = len(q.Buffers)-1, i
		}
	}
	move := func(refs []Ref, buffers []int) []Ref {
		refs = slices.Clone(refs)
		for k := range refs {
			a := &refs[k]
			if b := buffers[k]; b >= n {
				a.Buffer, a.Step = to[b], by[b]
			} else if a.Step >= 0 {
				a.Step = at[a.Step]
			}
		}
		return refs
	}
	for i, x := range all {
		s := r.Steps[x.step]
		dsts := s.Dsts
		if x.again != nil {
			dsts = nil
			for _, j := range x.again.dsts {
				dsts = append(dsts, s.Dsts[j])
			}
			s.Args = x.again.args
			if l, ok := s.Op.(Loop); ok {
				s.Op = x.again.loop(l)
			}
		}
		s.Dsts, s.Args = move(dsts, x.dsts), move(s.Args, x.args)
		q.Steps[i] = s
	}
	for k := range q.Results {
		if s := &q.Results[k].Step; *s >= 0 {
			*s = at[*s]
		}
	}
	return &q
}

// sizes returns bounds of what runs again at once. Small ones keep much, and large ones need memory
// for what they compute again.
func (r *reruns) sizes() (all []int) {
	sum, largest := 0, 0
	for _, b := range r.order {
		sum, largest = sum+r.Buffers[b].Bytes, max(largest, r.Buffers[b].Bytes)
	}
	for most := sum; most >= largest && len(all) < bounds; most = most * 2 / 3 {
		all = append(all, most)
	}
	return all
}

// bounds is how many bounds are tried, samples how many parts of a list before a search between
// two of them, and returned how many buffers may be taken from the list in the end.
const bounds, samples, returned = 12, 8, 32

// choose returns the choice of the least cost with at most so many bytes in use, for bounds of what
// runs again at once; nil if none is found.
func (r *reruns) choose(target int, sizes []int) (best *choice) {
	var last []int // dropped by the best choice
	for _, most := range sizes {
		list := r.list(target, most)
		try := func(n int) (c *choice, dear bool) {
			c = r.complete(r.drop(list[:n]))
			dear = best != nil && c.cost >= best.cost
			if r.measure(c); c.peak > target {
				c = nil
			}
			return c, dear
		}
		var c *choice
		dear, low, high := false, 0, 0
		for k := 1; k <= samples && c == nil && !dear; k++ {
			low, high = high, len(list)*k/samples
			c, dear = try(high)
		}
		for c != nil && low+1 < high {
			if x, _ := try((low + high) / 2); x != nil {
				c, high = x, (low+high)/2
			} else {
				low = (low + high) / 2
			}
		}
		if c != nil && (best == nil || c.cost < best.cost) {
			best, last = c, list[:high]
			best.most = most
		}
	}
	if best != nil {
		best = r.giveBack(best, last, target)
	}
	return best
}

// giveBack keeps of what is dropped what has room.
func (r *reruns) giveBack(c *choice, list []int, target int) *choice {
	for _, b := range list[max(0, len(list)-returned):] {
		dropped := slices.Clone(c.dropped)
		dropped[b] = false
		x := r.complete(dropped)
		if r.measure(x); x.peak <= target && x.cost < c.cost {
			x.most, c = c.most, x
		}
	}
	return c
}

func (r *reruns) drop(list []int) []bool {
	dropped := make([]bool, len(r.Buffers))
	for _, b := range list {
		dropped[b] = true
	}
	return dropped
}

// list returns buffers that may be dropped so that at most so many bytes are computed again at
// once, and that are idle while more than the target is in use: in their order.
func (r *reruns) list(target, most int) (list []int) {
	over := make([]int, len(r.usage)+1) // before each step, steps with more
	for i, bytes := range r.usage {
		if over[i+1] = over[i]; bytes > target {
			over[i+1]++
		}
	}
	g := r.grow()
	for _, b := range r.order {
		if over[r.late[b]] > over[r.early[b]+1] && g.add(b, most) {
			list = append(list, b)
		}
	}
	return list
}

// growth finds out what runs again at once: parts that read of each other.
type growth struct {
	*reruns
	dropped []bool
	wanted  []bool  // by buffer: a part writes it
	readers [][]int // by buffer that is kept: the parts that read it
	of      []int   // by step: the next one of those that run at once, itself for the last
	bytes   []int   // of all of these, by the last
}

func (r *reruns) grow() *growth {
	n, steps := len(r.Buffers), len(r.Steps)
	g := &growth{r, make([]bool, n), make([]bool, n), make([][]int, n), make([]int, steps),
		make([]int, steps)}
	for i := range g.of {
		g.of[i] = i
	}
	return g
}

// root returns the last of the steps that run with one.
func (g *growth) root(step int) int {
	for g.of[step] != step {
		g.of[step] = g.of[g.of[step]]
		step = g.of[step]
	}
	return step
}

// needs returns the parts that run again for a buffer if it is dropped, what they write, and what
// they cost.
func (g *growth) needs(b int) (parts []part, news []int, cost float64) {
	g.dropped[b] = true
	defer func() { g.dropped[b] = false }()
	news = append(news, b)
	wanted := func(b int) bool { return g.wanted[b] || slices.Contains(news, b) }
	there := func(b int) bool { return g.kept(b, g.dropped) }
	for k := 0; k < len(news); k++ {
		p := g.part(g.writer[news[k]], wanted, there)
		for _, a := range p.args {
			if g.arena(a) && !there(a.Buffer) && !wanted(a.Buffer) {
				news = append(news, a.Buffer)
			}
		}
		parts, cost = append(parts, p), cost+p.cost
	}
	return parts, news, cost
}

// add drops a buffer, unless more bytes would then be computed again at once.
func (g *growth) add(b, most int) bool {
	parts, news, _ := g.needs(b)
	steps := slices.Clone(g.readers[b])
	for _, p := range parts {
		steps = append(steps, p.step)
		for _, a := range p.args {
			if g.arena(a) && g.wanted[a.Buffer] {
				steps = append(steps, g.writer[a.Buffer])
			}
		}
	}
	bytes := 0
	for i, s := range steps {
		steps[i] = g.root(s)
	}
	slices.Sort(steps)
	for _, s := range slices.Compact(steps) {
		bytes += g.bytes[s]
	}
	for _, x := range news {
		bytes += g.Buffers[x].Bytes
	}
	if bytes > most {
		return false
	}
	for _, s := range steps {
		g.of[s] = steps[0]
	}
	g.bytes[steps[0]], g.dropped[b] = bytes, true
	for _, x := range news {
		g.wanted[x] = true
	}
	for _, p := range parts {
		for _, a := range p.args {
			if g.arena(a) && g.kept(a.Buffer, g.dropped) {
				g.readers[a.Buffer] = append(g.readers[a.Buffer], p.step)
			}
		}
	}
	return true
}
