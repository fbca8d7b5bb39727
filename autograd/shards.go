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

// Shard is which elements of a parameter a rank updates: those in row-major order from number From
// up to To, which may be none. They are this rank's chunk of a bucket of Ranks chunks, in which the
// parameter's elements are those from number First on.
type Shard struct{ From, To, Chunk, Rank, Ranks, First int }

// Shards divides the buckets among the ranks, and returns what this rank has of each parameter: it
// is to update these elements, and its solver to keep vectors for these ([Fusion.Vectors]).
// Parameters are whole on all ranks between steps. It is nil for a single rank, which has all.
// Start takes reduce-scatters and all-gathers of a bucket then: a reduce-scatter leaves the
// combined gradients of this rank's chunk where they are in the slots, an all-gather gives all
// ranks what these places have.
//
// lent says that the caller has memory for each call: the buckets give theirs back, and there are
// no slots. gathers says that it has memory for all-gathers, at least.
//
// Save gathers the solver's vectors, one after the other, and Load takes the rank's part of them:
// a checkpoint does not depend on which rank has which shard.
//
// Errors: ErrUnsupported for [WithTree], whose branches are added by all-reduces, for a compression
// with residuals, which are of whole buckets, and for lent memory of the host where the
// communicator is on a device.
func (x *Buckets) Shards(lent, gathers bool) ([]Shard, error) {
	d := x.d
	if len(d.queues) == 0 {
		return nil, nil
	}
	refuse := func(why string) error {
		return d.named(fmt.Errorf("%w: shards: %s", backend.ErrUnsupported, why))
	}
	_, stateful := d.compression()
	switch {
	case d.tree != nil:
		return nil, refuse("with WithTree ranks add branches of a tree by all-reduces: leave one " +
			"of the two out")
	case stateful:
		return nil, refuse("the residuals of the compression are of whole buckets: compress to " +
			"16 bits, or not at all")
	case (lent || gathers) && x.on == nil && d.buckets[0].staged():
		return nil, refuse("gradients are computed on the host, and the communicator is on a " +
			"device: compute on that device, or divide the solver's state alone")
	}
	d.sharded = true
	all := make([]Shard, len(d.params))
	for i, p := range d.params {
		of := d.shardOf(p, d.comm.Rank())
		chunk := p.bucket.shard.to - p.bucket.shard.from
		all[i] = Shard{of.from, of.to, chunk, d.comm.Rank(), d.comm.Size(), p.bucket.before(p)}
	}
	if !lent {
		return all, nil
	}
	return all, d.lend()
}

// lend gives the memory of the buckets back.
func (d *DataParallel) lend() error {
	if d.memory.Len() == 0 {
		return nil
	}
	err := d.comm.Free(d.memory)
	d.memory, d.grads, d.planned.slots = backend.Buffer{}, nil, nil
	for _, b := range d.buckets {
		*b = bucket{index: b.index, params: b.params, nbytes: b.nbytes, queue: b.queue,
			shard: b.shard, sync: b.sync}
		for _, p := range b.params {
			p.slot, p.slots, p.view = backend.Buffer{}, nil, nil
		}
	}
	return err
}

// before returns how many elements of a bucket come before those of a parameter.
func (b *bucket) before(p *param) (n int) {
	for _, other := range b.params[:slices.Index(b.params, p)] {
		n += other.size
	}
	return n
}

// shardOf returns which elements of a parameter a rank has.
func (d *DataParallel) shardOf(p *param, rank int) span {
	at := p.bucket.before(p)
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

// Unsharded returns what belongs to all elements of a parameter, of which this rank has its shard.
// It is collective.
func (x *Buckets) Unsharded(param int, shard backend.Buffer) (backend.Buffer, error) {
	if !x.d.sharded {
		return shard, nil
	}
	return x.d.gatherShards(x.d.params[param], shard)
}

// gatherShards is Unsharded. Ranks send the same number of bytes.
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
