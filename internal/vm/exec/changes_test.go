package exec_test

import (
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/internal/vm/exec"
	"github.com/euryale-ml/euryale/internal/vm/interpret"
	"github.com/euryale-ml/euryale/internal/vm/ir"
	"github.com/euryale-ml/euryale/internal/vm/lower"
	"github.com/euryale-ml/euryale/internal/vm/plan"
	"github.com/euryale-ml/euryale/internal/vm/proof"
	"github.com/euryale-ml/euryale/kernels/fuse"
)

// mutant is a random program with its plan, of which changes are tried.
type mutant struct {
	random
	updates []lower.Update
	plan    *plan.Plan
	want    [][]float64 // by results
	after   [][]float64 // what inputs are in the end
}

// newMutant draws a program with collectives of layers, rows and columns that are folded, and
// updates.
func newMutant(t *testing.T, seed uint64) *mutant {
	t.Helper()
	r := rand.New(rand.NewPCG(seed, 7))
	m := &mutant{random: random{next: r.IntN}}
	m.begin()
	for range 4 + r.IntN(30) {
		switch x := ir.ID(r.IntN(len(m.Values))); r.IntN(6) {
		case 0:
			if !m.integer(x) {
				m.add(ir.Opaque{Index: len(m.Values), Name: "sum", Placed: true}, m.Values[x].Shape,
					m.bounds[x], x)
			}
		case 1:
			m.columns(x)
		case 2:
			m.product(x)
		default:
			m.grow()
		}
	}
	m.want4()
	switch r.IntN(3) {
	case 0:
		m.updates = m.states()
	case 1:
		m.descend()
	}
	limits := plan.Standard()
	if r.IntN(2) == 0 {
		limits = small
	}
	limits.Memory = -r.IntN(2)
	var err error
	solver := lower.Solver{Updates: m.updates}
	if m.plan, err = limits.New(proof.Verify, &m.Program, solver); err != nil {
		t.Fatalf("seed %d: %v", seed, err)
	}
	require.That(t, m.plan.Doubt == nil, "seed %d: %v in\n%v", seed, m.plan.Doubt, m.plan)
	m.expect(t)
	return m
}

// product multiplies a value by itself, computes something from each element of that, and joins
// functions of it.
func (r *random) product(x ir.ID) {
	n, op := ir.ID(len(r.Values)), ir.MatMul{TransB: true}
	shape, err := ir.Product(r.Values[x].Shape, r.Values[x].Shape, op)
	bound := r.bounds[x] * r.bounds[x] * float64(r.Values[x].Shape.Size())
	if err != nil || r.integer(x) || bound*4 > limit || shape.Size() > 200 {
		return
	}
	r.add(op, shape, bound, x, x)
	y, _ := r.like(shape)
	if r.bounds[y] > bound {
		y = n
	}
	r.add(ir.Binary{Op: fuse.Sub}, shape, 2*bound, n, y)
	if r.next(2) == 0 {
		r.add(ir.Unary{Op: fuse.Neg}, shape, 2*bound, n+1)
		r.add(ir.Concat{Axis: 0}, shape.With(0, 2*shape.At(0)), 2*bound, n+1, n+2)
	}
}

// descend subtracts values from some inputs.
func (m *mutant) descend() {
	for i, v := range m.Values {
		if in, ok := v.Op.(ir.Input); ok && ir.ID(i) != m.list && m.next(3) > 0 {
			dw, _ := m.like(v.Shape)
			m.updates = append(m.updates, lower.Update{Input: in.Index, Gradient: dw,
				Rule: func(p *fuse.Program, w, dw fuse.Value, kept []fuse.Value,
					_ func(int) fuse.Value) (fuse.Value, []fuse.Value, error) {
					return p.Do(fuse.Sub, w, dw), kept, nil
				}})
		}
	}
}

// columns folds a value along all axes but the last one, besides a value of its rows.
func (r *random) columns(x ir.ID) {
	shape := r.Values[x].Shape
	last := shape.Len() - 1
	if r.integer(x) || last < 1 || r.bounds[x]*float64(shape.Size())*4 > limit {
		return
	}
	r.rows(x)
	y, _ := r.like(shape)
	if r.bounds[y]*float64(shape.Size()) > limit {
		y = x
	}
	axes := ir.Dims{}
	for axis := range last {
		axes = axes.Insert(axis, axis)
	}
	r.reduceBy(backend.Sum, y, axes)
	r.Results = append(r.Results, ir.ID(len(r.Values)-1), ir.ID(len(r.Values)-2))
}

// expect evaluates the program.
func (m *mutant) expect(t *testing.T) {
	t.Helper()
	outside := interpret.Outside{Opaque: func(v ir.Value, args []interpret.Array) (interpret.Array,
		error) {
		return interpret.Of(v.Shape, negated(valuesOf(args[0]))), nil
	}}
	for _, x := range m.inputs {
		outside.Inputs = append(outside.Inputs, interpret.Of(ir.Of(len(x)), x))
	}
	values := require.Value(interpret.Program(&m.Program, outside))(t)
	for _, id := range m.Results {
		m.want = append(m.want, valuesOf(values[id]))
	}
	m.after = slices.Clone(m.inputs)
	for _, u := range m.updates {
		next := valuesOf(values[u.Gradient])
		for i := range next {
			if u.Rule != nil {
				next[i] = m.inputs[u.Input][i] - next[i]
			}
		}
		m.after[u.Input] = next
	}
}

// change changes one thing of a plan, and says which; "" for nothing.
func change(p *plan.Plan, r *rand.Rand) string {
	i := r.IntN(len(p.Steps))
	s := &p.Steps[i]
	switch r.IntN(12) {
	case 0, 1: // within a step, or one that runs it
		before := &p.Steps[i]
		for k := i; k > 0 && p.Steps[k].Epilogue && r.IntN(2) == 0; k-- {
			before = &p.Steps[k-1]
		}
		refs := slices.Concat(before.Args, before.Dsts)
		return over(p, s.Dsts[r.IntN(len(s.Dsts))].Buffer, refs[r.IntN(len(refs))].Buffer, r)
	case 2: // of other steps
		return over(p, r.IntN(len(p.Buffers)), r.IntN(len(p.Buffers)), r)
	case 3:
		return takePlace(p, i, r)
	case 4, 5: // as if apart said so
		for k := range p.Steps {
			if s := &p.Steps[(i+k)%len(p.Steps)]; isPlaced(s) {
				s.Until = r.IntN(len(p.Steps))
				return fmt.Sprintf("step %d runs until step %d", (i+k)%len(p.Steps), s.Until)
			}
		}
	case 6, 7: // as if ends said so
		s.Epilogue = !s.Epilogue
		return fmt.Sprintf("step %d is an epilogue: %v", i, s.Epilogue)
	case 8:
		if i > 0 {
			p.Steps[i-1], p.Steps[i] = p.Steps[i], p.Steps[i-1]
			renumber(p)
			return fmt.Sprintf("step %d comes before step %d", i, i-1)
		}
	case 9:
		p.Steps = slices.Delete(p.Steps, i, i+1)
		renumber(p)
		return fmt.Sprintf("no step %d", i)
	case 10:
		return readOther(p, s, i, r)
	default:
		return changeLoop(s, i, r)
	}
	return ""
}

// isPlaced reports whether a step may run beside others.
func isPlaced(s *plan.Step) bool {
	op, ok := s.Op.(ir.Opaque)
	return ok && op.Placed
}

// over lays a buffer of the arena over another one, at its beginning most often.
func over(p *plan.Plan, b, under int, r *rand.Rand) string {
	x, y := &p.Buffers[b], &p.Buffers[under]
	if b == under || x.Kind != plan.Arena || y.Kind != plan.Arena {
		return ""
	}
	x.Offset = y.Offset
	if r.IntN(4) == 0 {
		x.Offset += 8 * r.IntN(max(y.Bytes/8, 1))
	}
	p.ArenaBytes = max(p.ArenaBytes, x.Offset+x.Bytes)
	p.ResultBytes = p.ArenaBytes
	return fmt.Sprintf("buffer %d lies at @%d, over buffer %d", b, x.Offset, under)
}

// takePlace makes a result of a step the buffer of an operand, as planning does.
func takePlace(p *plan.Plan, i int, r *rand.Rand) string {
	s := p.Steps[i]
	if len(s.Args) == 0 {
		return ""
	}
	d, a := s.Dsts[r.IntN(len(s.Dsts))].Buffer, s.Args[r.IntN(len(s.Args))].Buffer
	x, y := p.Buffers[d], p.Buffers[a]
	if d == a || x.Kind != plan.Arena || y.Kind != plan.Arena || x.Bytes != y.Bytes {
		return ""
	}
	rename := func(refs []plan.Ref) {
		for k := range refs {
			if refs[k].Buffer == d {
				refs[k].Buffer = a
			}
		}
	}
	for k := range p.Steps {
		rename(p.Steps[k].Dsts)
		rename(p.Steps[k].Args)
	}
	rename(p.Results)
	p.ResultBytes = p.ArenaBytes
	return fmt.Sprintf("buffer %d of step %d is its buffer %d", d, i, a)
}

// readOther makes a step read another value.
func readOther(p *plan.Plan, s *plan.Step, i int, r *rand.Rand) string {
	if i == 0 || len(s.Args) == 0 {
		return ""
	}
	k, from := r.IntN(len(s.Args)), p.Steps[r.IntN(i)]
	if d := from.Dsts[r.IntN(len(from.Dsts))]; d.Shape == s.Args[k].Shape {
		s.Args[k] = d
		return fmt.Sprintf("operand %d of step %d is at buffer %d", k, i, d.Buffer)
	}
	return ""
}

// changeLoop makes a loop compute, read or store something else.
func changeLoop(s *plan.Step, i int, r *rand.Rand) string {
	l, ok := s.Op.(plan.Loop)
	if !ok {
		return ""
	}
	p := *l.Program
	p.Code, p.Inputs, p.Outputs = slices.Clone(p.Code), slices.Clone(p.Inputs),
		slices.Clone(p.Outputs)
	of := &p.Outputs[r.IntN(len(p.Outputs))].Operand
	switch c := &p.Code[r.IntN(len(p.Code))]; {
	case r.IntN(2) == 0 && (c.Op == fuse.Add || c.Op == fuse.Sub || c.Op == fuse.Maximum):
		c.Op = []fuse.Op{fuse.Add, fuse.Sub, fuse.Maximum}[r.IntN(3)]
	case len(p.Inputs) > 0 && r.IntN(2) == 0:
		of = &p.Inputs[r.IntN(len(p.Inputs))]
		fallthrough
	default:
		if len(of.Strides) < 2 {
			return ""
		}
		of.Strides = slices.Clone(of.Strides)
		a, b := r.IntN(len(of.Strides)), r.IntN(len(of.Strides))
		of.Strides[a], of.Strides[b] = of.Strides[b], of.Strides[a]
	}
	if p.Check() != nil {
		return ""
	}
	s.Op = plan.Loop{Program: &p, Ops: l.Ops, Count: l.Count}
	return fmt.Sprintf("the loop of step %d is another one", i)
}

// renumber has values say which steps write them once steps have moved.
func renumber(p *plan.Plan) {
	to := map[int]int{-1: -1}
	for i := range p.Steps {
		s := &p.Steps[i]
		for k := range s.Dsts {
			to[s.Dsts[k].Step], s.Dsts[k].Step = i, i
		}
		if s.Until > 0 {
			s.Until += i
		}
	}
	for i := range p.Steps {
		s := &p.Steps[i]
		if s.Until > 0 {
			s.Until = min(s.Until-i, len(p.Steps)-1)
		}
		for k := range s.Args {
			s.Args[k].Step = to[s.Args[k].Step]
		}
	}
	for i := range p.Results {
		p.Results[i].Step = to[p.Results[i].Step]
	}
}

// changed returns the plan with some changes, and which.
func (m *mutant) changed(r *rand.Rand) (*plan.Plan, string) {
	p := *m.plan
	p.Buffers, p.Results = slices.Clone(p.Buffers), slices.Clone(p.Results)
	p.Steps = slices.Clone(p.Steps)
	for i := range p.Steps {
		s := &p.Steps[i]
		s.Dsts, s.Args = slices.Clone(s.Dsts), slices.Clone(s.Args)
	}
	var all []string
	for n := 1 + r.IntN(2); len(all) < n && len(p.Steps) > 0; {
		if what := change(&p, r); what != "" {
			all = append(all, what)
		}
	}
	return &p, strings.Join(all, ", ")
}

// negating is what executors run collectives by.
type negating struct{}

func (negating) Opaque(int) exec.Opaque { return nil }
func (negating) Placed(int) exec.Placed { return negating{} }
func (negating) Scratch() int           { return 0 }

func (negating) StartOn(q backend.Queue, y, _ backend.Buffer, x ...backend.Buffer) (backend.Work,
	error) {
	p := &fuse.Program{Shape: []int{y.Len()}}
	p.Store(p.Do(fuse.Neg, p.Load(backend.F64, 1)), backend.F64, 1)
	var l fuse.Loop
	var err error
	if queue, ok := q.(fuse.Queue); ok {
		l, err = queue.Fuse(p)
	} else {
		l, err = fuse.Host(p, nil)
	}
	if err != nil {
		return nil, err
	}
	return nil, l.Run([]backend.Buffer{y}, x, backend.Buffer{})
}

// badly compares what a plan computes in the worst order.
func (m *mutant) badly(p *plan.Plan, r *rand.Rand) error {
	w := newWorst(p, m.inputs, r)
	if err := w.run(); err != nil {
		return err
	}
	for i, ref := range p.Results {
		if got := w.gather(ref); !slices.Equal(got, m.want[i]) {
			return fmt.Errorf("result %d is %v, want %v", i, got, m.want[i])
		}
	}
	for i, b := range p.Buffers {
		if b.Kind == plan.Input && !slices.Equal(w.at(i), m.after[b.Index]) {
			return fmt.Errorf("input %d is %v, want %v", b.Index, w.at(i), m.after[b.Index])
		}
	}
	return nil
}

// on compares what a plan computes on a device.
func (m *mutant) on(t *testing.T, device exec.Device, p *plan.Plan) error {
	t.Helper()
	e, err := exec.New(p, device, negating{}, nil)
	if err != nil {
		return err
	}
	defer func() {
		require.Report(t, e.Close())
	}()
	run(t, e, p, m.inputs)
	for i, id := range m.Results {
		v := m.Values[id]
		dst := buffer(v.DType, make([]float64, v.Shape.Size()))
		if err := e.Result(i, dst); err != nil {
			return err
		}
		if got := numbers(dst); !slices.Equal(got, m.want[i]) {
			return fmt.Errorf("result %d is %v, want %v", i, got, m.want[i])
		}
	}
	return nil
}

// changesOf returns how many changes are tried, EURYALE_CHANGES of them, and which is the first.
func changesOf(t *testing.T) (first, n int) {
	t.Helper()
	n = 3000
	if os.Getenv("EURYALE_FULL") == "1" {
		n = 120_000
	}
	if text := os.Getenv("EURYALE_CHANGES"); text != "" {
		from, to, several := strings.Cut(text, "-")
		var err error
		if n, err = strconv.Atoi(from); err == nil && several {
			first = n
			n, err = strconv.Atoi(to)
			n -= first
		}
		require.NoError(t, err)
	}
	return first, n
}

// perPlan is how many changes of each plan are tried.
const perPlan = 50

// TestChangedPlansThatAreProvenComputeTheSame changes plans at random: results lie over operands,
// steps run in others and beside others, in another order, or compute something else. Whatever of
// that is proven computes the same in the worst order in which a device may run it, on the host and
// on a device whose memory the host cannot touch.
func TestChangedPlansThatAreProvenComputeTheSame(t *testing.T) {
	first, n := changesOf(t)
	var m *mutant
	proven, tried, began := 0, 0, time.Now()
	for number := first; number < first+n; number++ {
		if m == nil || number%perPlan == 0 {
			m = newMutant(t, uint64(number/perPlan))
			if err := m.badly(m.plan, rand.New(rand.NewPCG(uint64(number), 8))); err != nil {
				t.Fatalf("the plan of change %d: %v in\n%v", number, err, m.plan)
			}
		}
		r := rand.New(rand.NewPCG(uint64(number), 9))
		p, what := m.changed(r)
		if tried++; proof.Verify(p) != nil {
			continue
		}
		proven++
		err := m.badly(p, r)
		if err == nil && proven%4 == 0 {
			err = m.on(t, exec.Host{}, p)
		}
		if err == nil && proven%16 == 0 {
			device, closed := fake(t)
			err = m.on(t, device, p)
			closed()
		}
		require.Check(t, err == nil, "change %d, %s, is proven: %v in\n%v\ninstead of\n%v", number,
			what, err, p, m.plan)
	}
	t.Logf("%d changes, %d of them proven, in %v", tried, proven, time.Since(began))
}
