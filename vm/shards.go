package vm

import (
	"fmt"
	"slices"

	"gorgonia.org/gorgonia"

	"github.com/euryale-ml/euryale/autograd"
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/residence"
	"github.com/euryale-ml/euryale/internal/vm/ir"
	"github.com/euryale-ml/euryale/internal/vm/lower"
)

// Shards says what ranks that train together shard: each keeps only a part.
type Shards uint8

// What ranks may shard.
const (
	// SolverState is what the solver keeps for the learnables: two vectors like these for Adam.
	SolverState Shards = 1 << iota
	// Gradients are what ranks exchange; this stage needs SolverState. A rank has whole buckets
	// only until they are exchanged, among the values of a run, and no memory for all gradients.
	Gradients
	// Parameters are the learnables; this stage needs the other two. Between their uses a rank has
	// only its part of them.
	Parameters
)

// WithShards splits memory among the ranks of [WithDataParallel], for models whose training does
// not fit into one rank's. If ranks are added in rank order, the learnables are bitwise identical
// to those without it, except tables whose rows are exchanged without shards (WithDataParallel).
// Hierarchical communicators add the last elements of a bucket, fewer than there are ranks, in
// another order, unless the ranks shard the bucket.
//
// With SolverState each rank updates its part of each bucket, and has the solver's state for that
// part only: 1/P with P ranks, and at most 8 elements more for a bucket. A reduce-scatter of each
// bucket replaces its all-reduce, and the updated learnables are all-gathered: stage 1 of ZeRO
// (Rajbhandari et al., arXiv:1910.02054), with the reduce-scatter of fairring. Gradients and
// Parameters are its stages 2 and 3, as in FSDP (Zhao et al., arXiv:2304.11277). docs/shards.md
// gives the memory by stage; [Machine.Summary] gives the memory of a machine.
//
// With Parameters the values of learnables are not whole between runs: [Machine.Pull], Averaged and
// Close gather them on the host, and so do Load, Check and Hash, but not Save. All that gather are
// collective, so with [WithElastic] Close does not. Pull before another machine, SaveWeights or the
// program itself reads them: the elements of other ranks are NaN until then, and machines and
// SaveWeights refuse them. With
// [WithPrecision] BF16 the same is true on every stage for learnables that only matrix
// multiplications read. The ranks gather these in BF16: half the bytes, with bitwise identical
// results, since matrix multiplications read no more. Without Parameters they do so once in a run,
// before a learnable's first use, except with [Accumulate] or with a communicator on another
// device.
//
// WithShards works with groups, [ClipNorm], [Accumulate], moving averages (solver.EMA),
// autograd.WithParts, and compression to 16 bits, which then rounds once instead of twice. With
// ClipNorm ranks add up squares: the last bits of the norm's float64 may differ from those without
// shards. With Accumulate sums of gradients are whole between runs, so Gradients saves nothing.
//
// With [WithElastic] each shard has a copy on another rank, so that none is lost with a rank: of P
// ranks each keeps the solver's state, and with Parameters the learnables, of one part of P/2,
// rounded down, and says how many bytes these are. Gradients saves nothing. Learnables are gathered
// in F32, in each micro-batch of the rank that has most. docs/elastic.md says more.
//
// In a checkpoint each rank has a file with its own shards. Load takes each rank's part from the
// files of any number of ranks, with or without shards: docs/checkpoints.md. The solver's own State
// returns the part of this rank, and [Machine.Averaged] is collective.
//
// Cost: a rank sends and receives as many bytes as for all-reduces, with Parameters half as many
// more, and copies each learnable once; its updates take 1/P of the time. A bucket is updated and
// gathered while the gradients of the layers before it are computed. The last bucket is scattered
// beside updates of others, and gathered while their learnables get their values; it is exposed as
// far as it takes longer. With ClipNorm all all-gathers are exposed, since updates wait for all
// gradients. With Parameters the first bucket is exposed, and each other one is gathered while the
// one before it is read.
//
// New returns ErrArgument without other ranks and for a stage without those before it;
// ErrUnsupported with [WithTree], with compressions that keep residuals, and for Gradients where
// the machine runs on the host and the communicator on a device.
func WithShards(what Shards) Option {
	return func(m *Machine) {
		m.once("WithShards")
		m.shards = what
	}
}

// check refuses what cannot be sharded.
func (what Shards) check(alone, elastic bool) error {
	switch {
	case what == 0:
		return nil
	case what > SolverState|Gradients|Parameters || what&(what+1) != 0:
		return fmt.Errorf("vm: WithShards: %w: %b: give SolverState, SolverState|Gradients, or "+
			"these and Parameters, since a rank updates the elements whose gradients it has",
			backend.ErrArgument, what)
	case elastic:
		return nil
	case alone:
		return fmt.Errorf("vm: WithShards: %w: there are no other ranks: use WithDataParallel, too",
			backend.ErrArgument)
	}
	return nil
}

// sharding is how ranks shard the learnables of a solver. Its lists are by learnable.
type sharding struct {
	parts        []autograd.Shard // what this rank updates, nil for all
	fullySharded []bool           // the rank keeps only its part
	half         []bool           // of these: the ranks gather it in BF16
	partial      []bool           // the host has only this rank's part
	// buckets are in the plan's memory; what is gathered in BF16 stays so between steps
	placed, persistent bool
	mirrored
}

// mirrored is how a rank of an elastic training updates a part of each learnable, which another
// rank updates, too. The lists are by learnable.
type mirrored struct {
	on     bool
	whole  bool             // between steps all ranks have all of each learnable
	device bool             // own is not the learnables' memory
	own    []backend.Buffer // the elements that this rank updates, if all are whole
	read   []bool           // from the learnable, whose elements the host may have changed
}

// shard shards the learnables among ranks, given the bucket of each. No parts are left if each
// rank updates all.
func (m *Machine) shard(buckets []int) (err error) {
	s, n, full := m.solver, len(buckets), m.shards&Parameters != 0
	s.mirrored, s.partial, m.micro.Idles = mirrored{}, make([]bool, n), false
	if s.parts = nil; m.shards == 0 || m.ranks == 1 {
		return nil
	}
	s.half, s.fullySharded = m.halved(), make([]bool, n)
	s.placed = m.shards&Gradients != 0 && !m.micro.Keeps() // sums stay from run to run
	s.persistent = !full
	whole := map[int]bool{} // buckets, of which all is gathered in one precision
	for i, bucket := range buckets {
		whole[bucket] = whole[bucket] || !s.half[i]
	}
	for i, bucket := range buckets {
		s.half[i] = !whole[bucket]
		s.fullySharded[i] = s.half[i] || full
	}
	shards := m.ranks // of Summarize
	if m.elastic != nil {
		shards /= 2
	}
	if m.parallel != nil {
		if s.parts, err = m.parallel.exchange.Shards(s.placed, s.fullySharded); err != nil {
			return fmt.Errorf("vm: WithShards: %w", err)
		}
	} else if shards > 1 {
		for _, n := range s.learnables {
			s.parts = append(s.parts, autograd.ShardOf(n.Shape().TotalSize(), 0, shards))
		}
	}
	if m.elastic != nil && s.parts != nil {
		s.mirrored = mirrored{true, !full, m.device != nil && !full, make([]backend.Buffer, n),
			make([]bool, n)}
		m.micro.Idles = full
	}
	return nil
}

// halved reports which learnables ranks may gather in BF16: those that nothing reads in F32. On
// stages without Parameters they are gathered once in a step, so not where a step has several runs,
// which would gather them again, and not where gradients are copied to the communicator's device.
// Elastic ranks gather in F32: one that goes on alone gathers nothing.
func (m *Machine) halved() []bool {
	var inputs []int
	var gradients []ir.ID
	staged := m.device == nil && m.parallel != nil && m.parallel.comm.Device().Name() != "host"
	apply := m.precision == BF16 && !m.micro.Tree && (m.shards&Parameters != 0 ||
		!m.micro.Several() && !staged)
	for _, n := range m.solver.learnables {
		gradient, ok := m.read.Value(n.Deriv())
		input := slices.Index(m.read.Inputs, n)
		apply = apply && ok && input >= 0 // else updates says what is wrong
		inputs, gradients = append(inputs, input), append(gradients, gradient)
	}
	if !apply {
		return make([]bool, len(inputs))
	}
	return lower.Halved(&m.read.Program, inputs, gradients...)
}

// apart returns the learnables that ranks may gather in BF16: they have buckets of their own. A
// single rank gathers nothing, and ranks may run other numbers of micro-batches of a tree.
func (m *Machine) apart() (nodes gorgonia.Nodes, err error) {
	if m.shards == 0 || m.precision != BF16 || m.parallel.comm.Size() == 1 || m.micro.Tree {
		return nil, nil
	}
	if err := m.readGraph(); err != nil {
		return nil, err
	}
	for i, ok := range m.halved() {
		if ok {
			nodes = append(nodes, m.solver.learnables[i])
		}
	}
	return nodes, nil
}

// shard returns what this rank updates of a learnable, nil for all.
func (s *sharding) shard(learnable int) *lower.Shard {
	if s.parts == nil {
		return nil
	}
	of, half := s.parts[learnable], s.half[learnable]
	return &lower.Shard{From: of.From, To: of.To, Chunk: of.Chunk, Rank: of.Rank, Ranks: of.Ranks,
		First: of.First, Placed: s.placed, FullyShard: s.fullySharded[learnable],
		Half: half, Persistent: half && s.persistent, Mirrored: s.on}
}

// ownOf returns the elements of a learnable that this rank updates: on a device they are apart.
func (s *solving) ownOf(learnable int) backend.Buffer {
	of := s.params[learnable].Slice(s.parts[learnable].From, s.parts[learnable].To)
	switch own := &s.own[learnable]; {
	case !s.device:
		*own = of
	case !s.read[learnable]:
		*own, s.read[learnable] = residence.Clone(of), true
	}
	return s.own[learnable]
}

// reread makes the next run take what this rank updates from learnables that the host gets.
func (s *solving) reread(all inputs, wanted func(input) bool) {
	if s == nil || !s.device {
		return
	}
	for _, in := range all {
		if i := slices.Index(s.learnables, in.node); i >= 0 && wanted(in) {
			s.read[i] = false
		}
	}
}

// division names what this rank updates of learnables that have mirrors.
func (s *solving) division() string {
	if s == nil || !s.on {
		return ""
	}
	return fmt.Sprint(s.parts)
}

// copied returns how many bytes the solver keeps on this rank, and on one that updates everything.
func (s *solving) copied() (here, all int) {
	for i, n := range s.learnables {
		size := s.fusion.Kept(i) * int(n.Dtype().Size())
		if len(s.fullySharded) > 0 && s.fullySharded[i] {
			size += int(n.Dtype().Size())
		}
		all += size * n.Shape().TotalSize()
		if here += size * n.Shape().TotalSize(); s.on {
			here += size * (s.parts[i].To - s.parts[i].From - n.Shape().TotalSize())
		}
	}
	return here, all
}

// ownBuffers returns the plan's buffers of the elements that this rank updates, by learnable, -1
// for none.
func (s *solving) ownBuffers() []int {
	all := slices.Repeat([]int{-1}, len(s.learnables))
	for _, v := range s.states {
		if s.on && v.vector == s.fusion.Kept(v.learnable) {
			all[v.learnable] = v.buffer
		}
	}
	return all
}

// shards reports whether ranks shard the learnables.
func (s *solving) shards() bool { return s != nil && s.parts != nil }

// ofThisRank returns the learnables, or this rank's shards of them.
func (s *solving) ofThisRank() []backend.Buffer {
	if s.parts == nil {
		return s.params
	}
	s.kept = s.kept[:0]
	for i, w := range s.params {
		s.kept = append(s.kept, w.Slice(s.parts[i].From, s.parts[i].To))
	}
	return s.kept
}

// allElements returns what belongs to all elements of a learnable, of which this rank may have a
// shard.
func (s *solving) allElements(p *parallel, n *gorgonia.Node, mine backend.Buffer) (backend.Buffer,
	error) {
	if s.parts == nil {
		return mine, nil
	}
	all, err := p.exchange.Unsharded(slices.Index(s.learnables, n), mine)
	if err != nil {
		err = fmt.Errorf("vm: WithShards: %w", err)
	}
	return all, err
}

// own returns what a plan has of a variable's elements: this rank's shard, if ranks shard the
// learnables.
func (in input) own(memory backend.Buffer) backend.Buffer {
	if in.shard == nil {
		return memory
	}
	return memory.Slice(in.shard.From, in.shard.To)
}

// shardOf returns the shard of a variable that this machine shards, nil for others.
func (s *solving) shardOf(n *gorgonia.Node) *lower.Shard {
	if !s.shards() {
		return nil
	}
	if i := slices.Index(s.learnables, n); i >= 0 && s.fullySharded[i] {
		return s.shard(i)
	}
	return nil
}

// gatherShards fills the host tensors of learnables that ranks shard with the elements of all
// ranks, unless no step has changed them since. It is collective.
func (s *solving) gatherShards(p *parallel, wanted func(input) bool) error {
	if !s.shards() {
		return nil
	}
	for i, n := range s.learnables {
		in := input{node: n, shape: n.Shape(), written: true, shard: s.shardOf(n)}
		if !s.partial[i] || !wanted(in) {
			continue
		}
		memory, err := in.memory()
		if err == nil {
			var all backend.Buffer
			all, err = s.allElements(p, n, in.own(memory))
			residence.Write(memory, all)
		}
		if err != nil {
			return err
		}
		s.partial[i] = false
	}
	return nil
}
