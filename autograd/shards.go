package autograd

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"gorgonia.org/gorgonia"

	"github.com/euryale-ml/euryale/backend"
)

// span is elements from one up to another.
type span struct{ from, to int }

// chunkUnit is what lengths of chunks are multiples of, in elements: so that those of F32 begin at
// multiples of 16 bytes, by which kernels of GPUs load.
const chunkUnit = 4

// chunkOf returns a rank's chunk of n elements that P ranks divide: all are equally long, so that
// the last ones may reach over the end.
func chunkOf(n, rank, P int) span {
	chunk := (n + P - 1) / P
	if P > 1 {
		chunk = (chunk + chunkUnit - 1) / chunkUnit * chunkUnit
	}
	return span{rank * chunk, (rank + 1) * chunk}
}

// Shards divides the buckets among the ranks, and returns which elements of each parameter this
// rank has, from one up to another, in row-major order: it is to update these, and its solver to
// keep vectors for these ([Fusion.Vectors]). Parameters are whole on all ranks between steps. It is
// nil for a single rank, which has all. Start takes reduce-scatters and all-gathers of a bucket
// then: a reduce-scatter leaves the combined gradients of this rank's elements where they are in
// the slots, an all-gather gives all ranks what these places have.
//
// Save gathers the solver's vectors, one after the other, and Load takes the rank's part of them:
// a checkpoint does not depend on who has what.
//
// Errors: ErrUnsupported for [WithTree], whose branches are added by all-reduces, and for a
// compression with residuals, which are of whole buckets.
func (x *Buckets) Shards() ([][2]int, error) {
	d := x.d
	if len(d.queues) == 0 {
		return nil, nil
	}
	refuse := func(why string) error {
		return d.named(fmt.Errorf("%w: shards: %s", backend.ErrUnsupported, why))
	}
	if d.tree != nil {
		return nil, refuse("with WithTree ranks add branches of a tree by all-reduces: leave one " +
			"of the two out")
	}
	if _, stateful := d.compression(); stateful {
		return nil, refuse("the residuals of the compression are of whole buckets: compress to " +
			"16 bits, or not at all")
	}
	d.sharded = true
	all := make([][2]int, len(d.params))
	for i, p := range d.params {
		s := d.shardOf(p, d.comm.Rank())
		all[i] = [2]int{s.from, s.to}
	}
	return all, nil
}

// shardOf returns which elements of a parameter a rank has.
func (d *DataParallel) shardOf(p *param, rank int) span {
	at := 0
	for _, other := range p.bucket.params[:slices.Index(p.bucket.params, p)] {
		at += other.size
	}
	s := chunkOf(p.bucket.count(), rank, d.comm.Size())
	return span{min(max(s.from-at, 0), p.size), min(max(s.to-at, 0), p.size)}
}

// callOf is the call of a kind that exchanges a bucket.
func (d *DataParallel) callOf(b *bucket, kind backend.Kind) backend.Collective {
	c := d.reduction(b)
	if kind == backend.AllReduce {
		return c
	}
	c.Kind, c.State = kind, 0
	if !kind.Reduces() {
		c.Op = backend.Sum
	}
	return c
}

// Whole returns what belongs to all elements of a parameter, of which this rank has its shard. It
// is collective.
func (x *Buckets) Whole(param int, shard backend.Buffer) (backend.Buffer, error) {
	if !x.d.sharded {
		return shard, nil
	}
	return x.d.gatherShards(x.d.params[param], shard)
}

// gatherShards is Whole. Ranks send the same number of bytes.
func (d *DataParallel) gatherShards(p *param, mine backend.Buffer) (backend.Buffer, error) {
	most, size := 0, p.dtype.Size()
	for r := range d.comm.Size() {
		s := d.shardOf(p, r)
		most = max(most, s.to-s.from)
	}
	note := make([]byte, most*size)
	copy(note, mine.Bytes())
	notes, err := gather(backend.Label(d.comm, backend.ForSave), note)
	if err != nil {
		return backend.Buffer{}, err
	}
	whole := room(p.dtype, p.size)
	for r, note := range notes {
		s := d.shardOf(p, r)
		copy(whole.Bytes()[s.from*size:s.to*size], note)
	}
	return whole, nil
}

// owned returns the tensors of a checkpoint that a solver keeps for parameters, with these.
func (d *DataParallel) owned(model map[string]stored, solver gorgonia.Solver) (map[string]*param,
	error) {
	owner, err := ownerIn(solver)
	of := map[string]*param{}
	for name := range model {
		if i, ok := owner(name); ok && i < len(d.params) {
			of[name] = d.params[i]
		}
	}
	return of, err
}

// unsharded makes the solver's vectors in a checkpoint whole on rank 0, unless a rank has a
// problem. It is collective.
func (d *DataParallel) unsharded(model map[string]stored, solver gorgonia.Solver,
	problem error) error {
	if !d.sharded {
		return problem
	}
	var of map[string]*param
	if problem == nil {
		of, problem = d.owned(model, solver)
	}
	names := slices.Sorted(maps.Keys(of))
	if err := agree(d.comm, strings.Join(names, "\n"), problem); err != nil {
		return err
	}
	for _, name := range names {
		whole, err := d.gatherShards(of[name], model[name].Data)
		if err != nil {
			return err
		}
		if d.comm.Rank() == 0 {
			model[name] = vector(whole)
		}
	}
	return nil
}

// takeShards replaces the solver's vectors in a checkpoint by this rank's shards. What does not fit
// stays, for others to refuse.
func (d *DataParallel) takeShards(model map[string]stored, solver gorgonia.Solver) error {
	if !d.sharded {
		return nil
	}
	of, err := d.owned(model, solver)
	for name, p := range of {
		if whole := model[name].Data; whole.Len() == p.size {
			s := d.shardOf(p, d.comm.Rank())
			model[name] = vector(clone(whole.Slice(s.from, s.to)))
		}
	}
	return err
}

// keptFor returns memory like what a solver keeps for a parameter, given memory like all of it.
func (d *DataParallel) keptFor(p *param, whole backend.Buffer) backend.Buffer {
	if !d.sharded || whole.Len() != p.size {
		return whole
	}
	s := d.shardOf(p, d.comm.Rank())
	return whole.Slice(s.from, s.to)
}
