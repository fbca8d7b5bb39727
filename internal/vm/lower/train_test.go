package lower

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/internal/vm/interpret"
	"github.com/euryale-ml/euryale/internal/vm/ir"
	"github.com/euryale-ml/euryale/kernels/fuse"
)

// momentum is a rule that keeps a vector.
func momentum(p *fuse.Program, w, dw fuse.Value, kept []fuse.Value,
	setting func(i int) fuse.Value) (fuse.Value, []fuse.Value, error) {
	v := p.Do(fuse.Add, p.Do(fuse.Mul, kept[0], setting(1)), dw)
	return p.Do(fuse.Sub, w, p.Do(fuse.Mul, setting(0), v)), []fuse.Value{v}, nil
}

// stepping trains two variables of 6 elements on some ranks, by programs and by definition.
type stepping struct {
	programs []*ir.Program // of steps, by rank
	solvers  []Solver      // by rank
	first    *ir.Program   // of a run, with its gradients as results
	w, v     [2][]float64  // as the definition has them
	ours     []map[ir.Op]interpret.Array
	inputs   [][]interpret.Array
}

const rate, decay, scale = 0.5, 0.25, 0.5

// newStepping draws how ranks train.
func newStepping(t *testing.T, r *rand.Rand) (s *stepping, what string) {
	p, matrix, vector := &ir.Program{}, ir.Of(2, 3), ir.Of(6)
	add := func(op ir.Op, shape ir.Dims, args ...ir.ID) ir.ID {
		return p.Add(ir.Value{Op: op, Args: args, Shape: shape, DType: backend.F32})
	}
	w0, w1, x := add(ir.Input{}, matrix), add(ir.Input{Index: 1}, vector),
		add(ir.Input{Index: 2}, matrix)
	flat := add(ir.Reshape{}, vector, x)
	gradients := []ir.ID{add(ir.Binary{Op: fuse.Mul}, matrix, add(ir.Reshape{}, matrix, w1), x),
		add(ir.Binary{Op: fuse.Sub}, vector, flat, add(ir.Reshape{}, vector, w0))}
	p.Results = gradients
	ranks, level, tree := 1+r.IntN(3), r.IntN(3), r.IntN(2) == 0
	limit, apart, runs := float64(4*r.IntN(2)), r.IntN(2) == 0, 1+r.IntN(4)
	if ranks == 1 || tree || apart {
		level = 0
	}
	if tree {
		runs = ranks + r.IntN(20) // of all
	}
	s = &stepping{first: p}
	done, chunk := 0, (11+ranks)/ranks+r.IntN(2)
	for rank := range ranks {
		a := Accumulation{Runs: runs, Apart: apart}
		if tree {
			end := runs * (rank + 1) / ranks
			a = Accumulation{Runs: end - done, Tree: true, First: done, All: runs, Apart: apart}
			done = end
		}
		solver := Solver{Accumulation: a, Scale: scale, Limit: limit,
			Parts: level > 0 && limit > 0}
		for i, gradient := range gradients {
			u := Update{Input: i, Gradient: gradient, Kept: 1, Bucket: min(1, ranks-1),
				Rule: momentum}
			if level > 0 {
				u.Shard = &Shard{Chunk: chunk, Rank: rank, Ranks: ranks, First: 6 * i,
					FullyShard: level == 2}
				u.Shard.From = min(max(rank*chunk-6*i, 0), 6)
				u.Shard.To = min(max((rank+1)*chunk-6*i, 0), 6)
			}
			solver.Updates = append(solver.Updates, u)
		}
		run := require.Value(fullyShard(p, solver.Updates))(t)
		step := require.Value(Train(run, solver))(t)
		require.NoError(t, step.Check())
		s.programs, s.solvers = append(s.programs, step.Program), append(s.solvers, solver)
		number := func(x float64) interpret.Array {
			return interpret.Of(ir.Dims{}, []float64{x})
		}
		s.ours = append(s.ours, map[ir.Op]interpret.Array{ir.Setting{}: number(rate),
			ir.Setting{Index: 1}: number(decay)})
		s.inputs = append(s.inputs, make([]interpret.Array, 3))
	}
	for i := range 2 {
		s.w[i], s.v[i] = integers(r), make([]float64, 6)
		for rank, kept := range s.ours {
			from, to := s.of(rank, i)
			kept[ir.State{Input: i}] = interpret.Of(ir.Of(to-from), s.v[i][from:to])
			s.inputs[rank][i] = interpret.Of(ir.Of(6), slices.Clone(s.w[i]))
		}
	}
	return s, fmt.Sprintf("%d ranks, %d runs, tree %v, apart %v, level %d, limit %v", ranks, runs,
		tree, apart, level, limit)
}

// of returns which elements of a variable a rank updates.
func (s *stepping) of(rank, variable int) (from, to int) {
	if of := s.solvers[rank].Updates[variable].Shard; of != nil {
		return of.From, of.To
	}
	return 0, 6
}

// memory is what a rank has of variables and inputs.
func (s *stepping) memory(rank int) []interpret.Array {
	all := slices.Clone(s.inputs[rank])
	for i, u := range s.solvers[rank].Updates {
		if u.Shard.FullySharded() {
			all[i].Data = all[i].Data[u.Shard.From:u.Shard.To]
		}
	}
	return all
}

// integers are elements whose sums are exact.
func integers(r *rand.Rand) (all []float64) {
	for range 6 {
		all = append(all, float64(r.IntN(9)-4))
	}
	return all
}

// step makes a step by definition, and one of the programs.
func (s *stepping) step(t *testing.T, r *rand.Rand) {
	var sums [2][6]float64
	ranks := len(s.programs)
	add := func(rank int) { // a run's gradients, as its own program has them
		s.inputs[rank][2] = interpret.Of(ir.Of(6), integers(r))
		values, err := interpret.Program(s.first, interpret.Outside{Inputs: s.inputs[rank]})
		require.NoError(t, err)
		for i, of := range s.first.Results {
			for k, x := range values[of].Data {
				sums[i][k] += x.Value
			}
		}
	}
	run := func(kind func(a Accumulation) int, ranks ...int) {
		all := &interpret.Ranks{Programs: s.programs}
		for rank := range s.programs {
			all.Outside = append(all.Outside, interpret.Outside{Inputs: s.memory(rank),
				Kept: s.ours[rank], Opaque: func(v ir.Value, _ []interpret.Array) (
					interpret.Array, error) {
					return all.Sum(v) // of squares
				}})
		}
		var leave []func()
		for _, rank := range ranks {
			p := s.programs[rank]
			for _, a := range p.Assigns {
				if a.Runs.Has(kind(s.solvers[rank].Accumulation)) {
					x := require.Value(all.Value(rank, a.Value))(t)
					leave = append(leave, func() { s.leave(rank, a.To, x) })
				}
			}
		}
		for _, f := range leave {
			f()
		}
	}
	var everyone []int
	for rank := range ranks {
		everyone = append(everyone, rank)
		a := s.solvers[rank].Accumulation
		_, of := a.Sums()
		for _, kind := range of[:len(of)-1] {
			add(rank)
			run(func(Accumulation) int { return kind }, rank)
		}
		add(rank)
	}
	run(func(a Accumulation) int { return a.Kinds() - 1 }, everyone...)
	if s.solvers[0].Accumulation.Apart {
		run(func(Accumulation) int { return ir.Apply }, everyone...)
	}
	factor, norm := scale, 0.0
	for i := range sums {
		for _, x := range sums[i] {
			norm += scale * x * scale * x
		}
	}
	if limit := s.solvers[0].Limit; limit > 0 && math.Sqrt(norm) > limit {
		factor *= limit / math.Sqrt(norm)
	}
	for i := range sums {
		for k, x := range sums[i] {
			s.v[i][k] = decay*s.v[i][k] + factor*x
			s.w[i][k] -= rate * s.v[i][k]
		}
	}
}

// leave gives a variable, or this rank's shard of one, a state or a sum another value. All ranks
// read the whole variable, of which each may have a shard.
func (s *stepping) leave(rank int, to ir.ID, x interpret.Array) {
	p, at := s.programs[rank], 0
	for ir.View(p.Values[to].Op) {
		if slice, ok := p.Values[to].Op.(ir.Slice); ok {
			at = slice.Start
		}
		to = p.Values[to].Args[0]
	}
	in, variable := p.Values[to].Op.(ir.Input)
	if !variable {
		s.ours[rank][p.Values[to].Op] = x
		return
	}
	if s.solvers[rank].Updates[in.Index].Shard.FullySharded() {
		at, _ = s.of(rank, in.Index)
	}
	for other := range s.programs {
		if other == rank || s.solvers[rank].Updates[0].Shard.FullySharded() {
			copy(s.inputs[other][in.Index].Data[at:], x.Data)
		}
	}
}

// TestAStepIsItsDefinition: whatever runs, ranks, shards and limits of the norm a step has, its
// program leaves in variables and states what the rule makes of the sum of all gradients, but
// for rounding.
func TestAStepIsItsDefinition(t *testing.T) {
	for seed := range uint64(200) {
		r := rand.New(rand.NewPCG(seed, 8))
		s, what := newStepping(t, r)
		for step := range 3 {
			s.step(t, r)
			for rank := range s.programs {
				for i := range 2 {
					from, _ := s.of(rank, i)
					at := fmt.Sprintf("seed %d, step %d of %s: rank %d, %d", seed, step, what,
						rank, i)
					same(t, at, s.inputs[rank][i].Data, s.w[i])
					same(t, at+", state", s.ours[rank][ir.State{Input: i}].Data, s.v[i][from:])
				}
			}
		}
	}
}

// same compares numbers that rounding decides.
func same(t *testing.T, what string, got []interpret.Number, want []float64) {
	t.Helper()
	for k, x := range got {
		require.That(t, (math.Abs(x.Value-want[k]) <= 1e-5*(1+math.Abs(want[k]))),
			"%s: element %d is %v, want %v", what, k, x, want[k])
	}
}
