package autograd

import (
	"fmt"
	"slices"

	"github.com/euryale-ml/euryale/autograd/internal/checkpoint"
	"github.com/euryale-ml/euryale/backend"
)

// span is elements from one up to another.
type span struct{ from, to int }

// chunkUnit divides the lengths of chunks, in elements, so that chunks of BF16 begin at multiples
// of 16 bytes, the unit in which GPU kernels load.
const chunkUnit = 8

// chunkOf returns a rank's chunk of n elements that P ranks divide: all are equally long, so the
// last ones may extend past the end.
func chunkOf(n, rank, P int) span {
	chunk := (n + P - 1) / P
	if P > 1 {
		chunk = (chunk + chunkUnit - 1) / chunkUnit * chunkUnit
	}
	return span{rank * chunk, (rank + 1) * chunk}
}

// Shard says which elements of a parameter a rank updates: in row-major order, those from number
// From up to To, possibly none. They are in chunk Rank of a bucket of Ranks chunks, each of Chunk
// elements, in which the parameter's elements begin at number First.
type Shard struct{ From, To, Chunk, Rank, Ranks, First int }

// Shards divides the buckets among the ranks, and returns this rank's shard of each parameter: the
// rank must update these elements, and its solver must keep vectors for them
// ([solver.Fusion.Vectors]). The result is nil for a single rank, which has all. Start then takes
// reduce-scatters and all-gathers of a bucket: a reduce-scatter leaves the combined gradients of
// this rank's chunk at their places in the slots, an all-gather gives all ranks the content of
// these places.
//
// lent says that the caller has memory for each call: the buckets free theirs, and there are no
// slots; the first call is then collective. alone says of which parameters ranks have only their
// shards between steps, all of a bucket or none: the caller gathers these itself, in its own
// memory. All other parameters are whole on all ranks between steps.
//
// Save writes this rank's shards of parameters and of the solver's vectors to the rank's own file.
// Load reads the rank's shards from the files of any number of ranks.
//
// Errors: ErrUnsupported for [WithTree], whose branches are added by all-reduces, for a compression
// with residuals, which belong to whole buckets, and for lent host memory if the communicator is on
// a device.
func (x *Buckets) Shards(lent bool, alone []bool) ([]Shard, error) {
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
		return nil, refuse("the residuals of WithCompression are of whole buckets: compress to " +
			"16 bits, or not at all")
	case (lent || slices.Contains(alone, true)) && x.on == nil && d.buckets[0].staged():
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
	d.tape.grads, x.slots = nil, nil
	return all, d.lend()
}

// lend frees the memory of the buckets. It is collective: a communicator gives freed memory to its
// device when all ranks allocate next.
func (d *reducer) lend() error {
	if d.memory.Len() == 0 {
		return nil
	}
	err := d.comm.Free(d.memory)
	if err == nil && d.comm.Size() > 1 {
		// a rank that has failed meanwhile is in Agree, too
		err = Agree(backend.Label(d.comm, backend.ForMachine), "buckets are given back", nil)
		if err == nil {
			_, err = d.comm.Alloc(0)
		}
	}
	d.memory = backend.Buffer{}
	for _, b := range d.buckets {
		*b = bucket{index: b.index, params: b.params, nbytes: b.nbytes, queue: b.queue,
			shard: b.shard, sync: b.sync}
		for _, p := range b.params {
			p.slot, p.view = backend.Buffer{}, nil
		}
	}
	return err
}

// ShardOf returns the shard of a rank of a parameter of n elements that is alone in its bucket.
func ShardOf(n, rank, ranks int) Shard {
	s := chunkOf(n, rank, ranks)
	return Shard{min(s.from, n), min(s.to, n), s.to - s.from, rank, ranks, 0}
}

// before returns how many elements of a bucket come before those of a parameter.
func (b *bucket) before(p *param) (n int) {
	for _, other := range b.params[:slices.Index(b.params, p)] {
		n += other.size
	}
	return n
}

// Unsharded returns the values for all elements of a parameter, given this rank's shard of them. It
// is collective.
func (x *Buckets) Unsharded(param int, shard backend.Buffer) (backend.Buffer, error) {
	if !x.d.sharded {
		return shard, nil
	}
	return x.d.gatherShards(backend.ForPull, x.d.params[param], shard)
}

// gatherParams gives all ranks the whole parameters after each has loaded its shard.
func (d *contents) gatherParams() error {
	for _, p := range d.params {
		if !d.sharded {
			break
		}
		value, err := p.value()
		if err != nil {
			return err
		}
		all, err := d.gatherShards(backend.ForLoad, p, d.regionOf(p).Of(value))
		if err != nil {
			return err
		}
		copy(value.Bytes(), all.Bytes())
	}
	return nil
}

// regionOf returns which elements this rank keeps of a parameter, and of what belongs to it element
// by element.
func (d *contents) regionOf(p *param) checkpoint.Region {
	r := checkpoint.All(p.dims())
	if d.parts != nil {
		r = d.parts.regionOf(p, d.parts.comm.Rank())
	}
	if d.sharded {
		s := d.shardOf(p, d.comm.Rank())
		r.From, r.N = s.from, s.to-s.from
	}
	return r
}
