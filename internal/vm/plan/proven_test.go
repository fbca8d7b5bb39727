package plan

import (
	"cmp"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/internal/vm/ir"
	"github.com/euryale-ml/euryale/internal/vm/lower"
	"github.com/euryale-ml/euryale/kernels/fuse"
)

// centred is the program in which a plan once ran a step before the one whose result it reads: an
// early value that a product reads, and again an element-wise value that depends on a reduction.
func centred() *program {
	p := &program{}
	x, b, w := p.input(0, 6, 5), p.input(1, 6, 5), p.input(2, 5, 4)
	sum := func(x ir.ID) ir.ID {
		return p.add(ir.Reduce{Op: backend.Sum, Axes: ir.Of(0, 1)}, ir.Dims{}, x)
	}
	less := p.binary(fuse.Sub, x, b)
	h := p.unary(fuse.Tanh, p.add(ir.MatMul{}, ir.Of(6, 4), less, w))
	level := sum(x)
	wide := p.add(ir.Broadcast{}, ir.Of(6, 5), p.add(ir.Reshape{}, ir.Of(1, 1), level))
	p.Results = []ir.ID{p.binary(fuse.Add, p.binary(fuse.Add, level, sum(h)),
		sum(p.binary(fuse.Mul, less, wide)))}
	return p
}

// TestNoMergeClosesACycle: groups stay in an order in which each comes behind those that it needs,
// whatever merges.
func TestNoMergeClosesACycle(t *testing.T) {
	programs := []*program{centred()}
	for seed := range uint64(300) {
		programs = append(programs, random(rand.New(rand.NewPCG(seed, 1)), 9))
	}
	for i, p := range programs {
		lowered := require.Value(lower.Run(&p.Program, 0))(t)
		g := Standard().newGrouping(lowered, lowered.Users(), nil, false)
		for x := g.order.first; x != nil; x = x.next {
			for _, m := range x.members {
				for _, before := range g.needs[m] {
					if y := g.of[before]; y != x && y.place >= x.place {
						t.Fatalf("program %d: a group that another one needs comes behind it", i)
					}
				}
			}
		}
		_, err := g.ordered()
		require.Check(t, err == nil, "program %d: %v", i, err)
	}
}

// TestACycleIsAnError: groups that need each other have no order.
func TestACycleIsAnError(t *testing.T) {
	p := &program{}
	x := p.input(0, 4, 4)
	y := p.unary(fuse.Exp, x)
	z := p.binary(fuse.Add, y, p.add(ir.MatMul{}, ir.Of(4, 4), y, y))
	p.Results = []ir.ID{z}
	g := Standard().newGrouping(&p.Program, p.Users(), nil, false)
	first, last := g.of[y], g.of[z]
	first.members = append(first.members, last.members...)
	g.of[z] = first
	require.Fails(t, "g.ordered", require.Err(g.ordered()), "needs its own result")
}

// random returns a program of values in a random order that read each other at random, of some
// kinds: from the tenth one on collectives and more products are among them.
func random(r *rand.Rand, kinds int) *program {
	p := &program{}
	n := 2 + r.IntN(3)
	square := ir.Of(n, n)
	values := []ir.ID{p.input(0, n, n), p.input(1, n, n), p.input(2, n, n)}
	any := func() ir.ID { return values[max(0, len(values)-1-r.IntN(min(len(values), 12)))] }
	for range 5 + r.IntN(30) {
		x, axis := any(), r.IntN(2)
		along := func(op backend.ReduceOp) ir.ID {
			y := p.add(ir.Reduce{Op: op, Axes: ir.Of(axis)}, ir.Of(n), x)
			return p.add(ir.Broadcast{}, square, p.add(ir.Reshape{}, square.With(axis, 1), y))
		}
		switch r.IntN(kinds) {
		case 0:
			x = p.add(ir.MatMul{TransA: r.IntN(2) == 0}, square, x, any())
		case 1:
			x = along(backend.Sum)
		case 2:
			x = along(backend.Max)
		case 3:
			x = p.add(ir.Permute{Axes: ir.Of(1, 0)}, square, x)
		case 4:
			joined := p.add(ir.Concat{Axis: axis}, square.With(axis, 2*n), x, any())
			x = p.add(ir.Slice{Axis: axis, Start: r.IntN(2), Step: 1 + r.IntN(2)}, square, joined)
		case 5:
			x = p.unary([]fuse.Op{fuse.Neg, fuse.Square, fuse.Tanh}[r.IntN(3)], x)
		case 6:
			total := p.add(ir.Reduce{Op: backend.Sum, Axes: ir.Of(0, 1)}, ir.Dims{}, x)
			x = p.add(ir.Broadcast{}, square, p.add(ir.Reshape{}, ir.Of(1, 1), total))
		case 9, 10:
			x = p.add(ir.MatMul{TransB: r.IntN(2) == 0}, square, x, values[r.IntN(3)])
		case 11, 12:
			x = p.add(ir.Opaque{Index: len(values), Name: "op", Placed: r.IntN(4) > 0}, square, x)
		default:
			x = p.binary([]fuse.Op{fuse.Add, fuse.Sub, fuse.Mul}[r.IntN(3)], x, any())
		}
		values = append(values, x)
	}
	for range 1 + r.IntN(3) {
		p.Results = append(p.Results, any())
	}
	return p
}

// TestPlansOfRandomProgramsAreProven: also those with updates, for each way to add up and exchange
// gradients.
func TestPlansOfRandomProgramsAreProven(t *testing.T) {
	for seed := range uint64(1000) {
		r := rand.New(rand.NewPCG(seed, 2))
		p := random(r, 9)
		var s lower.Solver
		a := []lower.Accumulation{{}, {Runs: 1 + r.IntN(5)}, {Runs: 1 + r.IntN(5), Tree: true},
			{Runs: 1 + r.IntN(5), Tree: true, First: r.IntN(4), All: 9}}[r.IntN(4)]
		limit, buckets := float64(r.IntN(2)), r.IntN(2)
		a.Apart = r.IntN(2) == 0
		if a.All > 0 { // among ranks
			buckets = 1
		}
		for i := range r.IntN(4) {
			s.Accumulation, s.Limit, s.Scale = a, limit, 0.5
			s.Updates = append(s.Updates, lower.Update{Input: i, Kept: 1, Rule: descent,
				Gradient: ir.ID(r.IntN(len(p.Values))), Bucket: buckets * (1 + i/2)})
			if p.Values[s.Updates[i].Gradient].Shape.Size() != p.Values[i].Shape.Size() {
				s.Updates[i].Gradient = ir.ID(i)
			}
		}
		for i := len(s.Updates); i < 3; i++ { // of the inputs
			if r.IntN(3) > 0 {
				p.Frozen = append(p.Frozen, ir.Input{Index: i})
			}
		}
		limits := Standard()
		limits.Memory = -r.IntN(2)
		planned, err := limits.New(prove, &p.Program, s)
		if err == nil {
			err = cmp.Or(planned.Doubt, planned.Program.Check())
		}
		if err == nil {
			_, err = Plain(&p.Program, s)
		}
		require.That(t, err == nil, "program %d: %v in\n%v", seed, err, planned)
	}
}

// TestWhatIsComputedOnceIsProven: of other leaves, or of another function of them, it is found.
func TestWhatIsComputedOnceIsProven(t *testing.T) {
	p := &program{}
	x, v, w := p.input(0, 8, 8), p.input(1, 8, 8), p.input(2, 8, 8)
	p.Results = []ir.ID{p.product(x, p.binary(fuse.Sub, v, p.unary(fuse.Exp, w)))}
	p.Frozen = []ir.Op{ir.Input{Index: 1}, ir.Input{Index: 2}}
	for what, damage := range map[string]func(o *Once){
		"":              func(*Once) {},
		"another leaf":  func(o *Once) { o.Leaves[0] = ir.Input{} },
		"another order": func(o *Once) { slices.Reverse(o.Leaves) },
		"a constant":    func(o *Once) { o.Leaves[0] = ir.Constant{Index: 1} },
		"another function": func(o *Once) {
			q := &program{}
			q.Results = []ir.ID{q.binary(fuse.Sub, q.input(0, 8, 8), q.input(1, 8, 8))}
			o.Plan = q.planned(t)
		},
	} {
		planned := p.planned(t)
		require.That(t, len(planned.Once) == 1 && len(planned.Steps) == 1, "%v", planned)
		damage(&planned.Once[0])
		if err := Verify(planned); (err == nil) != (what == "") {
			t.Errorf("%s: %v", what, err)
		}
	}
}

// TestEveryOtherOperandIsNoticed: a step of a plan that reads another value than it should,
// computes something else, or comes elsewhere is found, unless the plan computes the same.
func TestEveryOtherOperandIsNoticed(t *testing.T) {
	for seed := range uint64(60) {
		r := rand.New(rand.NewPCG(seed, 3))
		p := random(r, 9)
		p.Results = append(p.Results, ir.ID(len(p.Values)-1))
		limits := Standard()
		limits.Memory = -int(seed % 2)
		planned := require.Value(limits.New(prove, &p.Program, lower.Solver{Updates: []lower.Update{
			{Input: 0, Gradient: 1, Kept: 1, Rule: descent},
			{Input: 1, Gradient: 2, Kept: 1, Rule: descent}}}))(t)
		for i, s := range planned.Steps {
			for k, a := range s.Args {
				for j, before := range planned.Steps[:i] {
					if before.Op.String() == "loop copy" { // which may be of the same value
						continue
					}
					for _, b := range before.Dsts {
						// a loop has the strides by which it reads
						loads := b.Buffer == a.Buffer && b.Step == a.Step
						if _, loop := s.Op.(Loop); b.Shape != a.Shape || b.DType != a.DType ||
							b == a || loop && loads || planned.Buffers[b.Buffer].Kind != Arena {
							continue
						}
						noticed(t, planned,
							fmt.Sprintf("program %d: step %d reads the value of step %d", seed, i,
								j), func(s []Step) { s[i].Args[k] = b })
					}
				}
			}
			if op, ok := s.Op.(ir.MatMul); ok && s.Args[0].Shape != s.Args[1].Shape {
				op.TransA = !op.TransA
				noticed(t, planned, "another product", func(s []Step) { s[i].Op = op })
			}
			if i > 0 && slices.ContainsFunc(s.Args, func(a Ref) bool { return a.Step == i-1 }) {
				noticed(t, planned, fmt.Sprintf("step %d comes before step %d", i, i-1),
					func(s []Step) { s[i], s[i-1] = s[i-1], s[i] })
			}
			if loop, ok := s.Op.(Loop); ok {
				for at, c := range loop.Program.Code {
					if c.Op != fuse.Add || limits.Memory < 0 { // which nobody may read
						continue
					}
					other := *loop.Program
					other.Code = slices.Clone(other.Code)
					other.Code[at].Op = fuse.Sub
					noticed(t, planned, "another instruction", func(s []Step) {
						s[i].Op = Loop{Program: &other}
					})
				}
			}
		}
	}
}

// noticed damages a copy of a plan.
func noticed(t *testing.T, p *Plan, what string, damage func(s []Step)) {
	t.Helper()
	broken := *p
	broken.Steps = slices.Clone(p.Steps)
	for i := range broken.Steps {
		broken.Steps[i].Dsts, broken.Steps[i].Args = slices.Clone(broken.Steps[i].Dsts),
			slices.Clone(broken.Steps[i].Args)
	}
	damage(broken.Steps)
	err := Verify(&broken)
	require.Check(t, err != nil, "%s: not noticed in\n%v\ninstead of\n%v", what, &broken, p)
}

// instead makes operation number k of some that are equal another one in what a plan must compute.
func instead(op ir.Op, k int, other ir.Op) func(p *Plan) {
	return func(p *Plan) {
		of := *p.Program
		of.Values = slices.Clone(of.Values)
		for i, v := range of.Values {
			if v.Op == op {
				if k--; k == -1 {
					of.Values[i].Op = other
				}
			}
		}
		p.Program = &of
	}
}

// TestWhatUpdatesMustDoIsProven: a step of a solver that is left out, applies the wrong gradient or
// is clipped by another norm is found.
func TestWhatUpdatesMustDoIsProven(t *testing.T) {
	solver := lower.Solver{Accumulation: lower.Accumulation{Runs: 4}, Scale: 0.25, Limit: 3}
	p, dv, dw := backward()
	p.Results = []ir.ID{dv}
	for i, gradient := range []ir.ID{dv, dw} {
		solver.Updates = append(solver.Updates, lower.Update{Input: 1 + i, Gradient: gradient,
			Kept: 1, Rule: descent})
	}
	const norm, changed = "result 1 in a run of kind 2 is not sqrt of norm", "not what it must be"
	for _, test := range []struct {
		what, want string
		damage     func(p *Plan)
	}{
		{"no update", changed, func(p *Plan) { p.Steps = p.Steps[:len(p.Steps)-1] }},
		{"no norm", "is not sqrt of norm", func(p *Plan) { p.Results[1] = p.Results[0] }},
		{"another limit", changed, instead(ir.ScalarOf(3), 0, ir.ScalarOf(2))},
		{"the norm of another scale", norm, instead(ir.ScalarOf(0.25), 1, ir.ScalarOf(2))},
		{"another scale", changed, instead(ir.ScalarOf(0.25), 2, ir.ScalarOf(2))},
		{"another gradient", changed, instead(ir.PartialSum{}, 0, ir.PartialSum{Index: 1})},
		{"another sum", changed, instead(ir.Binary{Op: fuse.Add}, 0, ir.Binary{Op: fuse.Sub})},
		{"another setting", changed, instead(ir.Setting{}, 0, ir.Setting{Index: 1})},
		{"another vector", "changes state 0", instead(ir.State{Input: 2}, 0, ir.State{Input: 1})},
		{"no guard", changed, instead(ir.Binary{Op: fuse.Equal}, 0, ir.Binary{Op: fuse.Less})},
	} {
		planned := require.Value(Trained(&p.Program, solver))(t)
		test.damage(planned)
		require.Fails(t, test.what, Verify(planned), test.want)
	}
}

// TestUpdatesAreProvenByTheirRules: a plan that was made with another rule is found.
func TestUpdatesAreProvenByTheirRules(t *testing.T) {
	p, dv, _ := backward()
	var plans []*Plan
	for _, rule := range []lower.Rule{descent, func(p *fuse.Program, w, dw fuse.Value,
		kept []fuse.Value, setting func(i int) fuse.Value) (fuse.Value, []fuse.Value, error) {
		return p.Do(fuse.Add, w, p.Do(fuse.Mul, setting(0), dw)), kept, nil
	}} {
		planned := p.planned(t, lower.Update{Input: 1, Gradient: dv, Kept: 1, Rule: rule})
		plans = append(plans, planned)
	}
	plans[0].Program = plans[1].Program
	require.Fails(t, "Verify", Verify(plans[0]), "is not what it must be")
}

// TestAnEffectThatNobodyReadsIsProven: an operation with an effect that is left out, runs twice or
// before another one is found, although no result depends on it.
func TestAnEffectThatNobodyReadsIsProven(t *testing.T) {
	p := &program{}
	x := p.input(0, 4)
	for i, name := range []string{"a", "b"} {
		p.add(ir.Opaque{Index: i, Name: name}, ir.Of(4), x)
	}
	planned := p.planned(t)
	noticed(t, planned, "two effects in another order", func(s []Step) {
		s[0].Op, s[1].Op = s[1].Op, s[0].Op
	})
	noticed(t, planned, "an effect twice", func(s []Step) { s[1].Op = s[0].Op })
	planned.Steps = planned.Steps[:1]
	require.Fails(t, "an effect is left out", Verify(planned), "effect")
}

// TestAPlanThatIsNotProvenIsReplacedByThePlainOne: with the reason; without a plain one that is
// proven there is none.
func TestAPlanThatIsNotProvenIsReplacedByThePlainOne(t *testing.T) {
	p := centred()
	damaged := func(of func(plain bool) bool) (*Plan, error) {
		return proven(prove, func(plain bool) (*Plan, error) {
			q, err := lower.Run(&p.Program, 0)
			if err != nil {
				return nil, err
			}
			made, err := Standard().planned(q, q, nil, lower.Solver{}, plain)
			if err == nil && of(plain) {
				made.Results[0] = made.Steps[0].Dsts[0]
			}
			return made, err
		})
	}
	got, err := damaged(func(plain bool) bool { return !plain })
	require.That(t, err == nil && got.Doubt != nil && strings.Contains(got.Doubt.Error(),
		"result 0"), "%v %v", got, err)
	want, err := Plain(&p.Program, lower.Solver{})
	require.Check(t, err == nil && got.String() == want.String(), "%v %v, want\n%v", got, err, want)
	if got, err := damaged(func(bool) bool { return true }); err == nil {
		t.Errorf("%v is not proven", got)
	}
	failing := errors.New("no plan")
	_, err = proven(prove, func(bool) (*Plan, error) { return nil, failing })
	require.Fails(t, "proven", err, failing)
}

// TestPlainPlansHaveAStepForEachValue: and memory for each, which no other one has.
func TestPlainPlansHaveAStepForEachValue(t *testing.T) {
	p := centred()
	plain := require.Value(Plain(&p.Program, lower.Solver{}))(t)
	bytes := 0
	for i, s := range plain.Steps {
		loop, ok := s.Op.(Loop)
		require.Check(t, (!ok || loop.Count == 1) && !s.Epilogue, "step %d is %v", i, s.Op)
		bytes += (s.Bytes() + Alignment - 1) / Alignment * Alignment
	}
	for i, b := range plain.Buffers {
		for _, c := range plain.Buffers[:i] {
			require.Check(t, b.Kind != Arena || c.Kind != Arena || b.Offset >= c.Offset+c.Bytes ||
				c.Offset >= b.Offset+b.Bytes, "%s and %s lie in one place", b.Name, c.Name)
		}
	}
}

// recurrence is the backward pass of a recurrence: values that are read soon, and again at the end.
func recurrence(steps int) *program {
	p := &program{}
	w, one := p.input(0, 4, 4), p.add(ir.Broadcast{}, ir.Of(4, 4), p.add(ir.Reshape{}, ir.Of(1, 1),
		p.input(1)))
	h := p.input(2, 4, 4)
	var all []ir.ID
	for range steps {
		h = p.unary(fuse.Tanh, p.binary(fuse.Add, p.add(ir.MatMul{}, ir.Of(4, 4), h, w), one))
		all = append(all, h)
	}
	dh := one
	for _, h := range slices.Backward(all) {
		dz := p.binary(fuse.Mul, dh, p.binary(fuse.Sub, one, p.unary(fuse.Square, h)))
		p.Results = append(p.Results, p.add(ir.Reduce{Op: backend.Sum, Axes: ir.Of(0)},
			ir.Of(4), dz))
		dh = p.binary(fuse.Add, one, p.add(ir.MatMul{TransB: true}, ir.Of(4, 4), dz, w))
	}
	return p
}
