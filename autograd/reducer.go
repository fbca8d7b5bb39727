package autograd

import (
	"errors"
	"fmt"

	"github.com/euryale-ml/euryale/autograd/internal/checkpoint"
	"github.com/euryale-ml/euryale/autograd/solver"
	"github.com/euryale-ml/euryale/backend"
)

// reducer exchanges buckets with other ranks, for Sync and for machines of package vm.
type reducer struct {
	comm     backend.Communicator
	gradComm backend.Communicator // for gradients: comm, or a compression around it
	op       backend.ReduceOp
	half     bool            // gradients are in BF16, in which they travel: see Halve
	tree     *tree           // of the micro-batches of a machine; nil without WithTree
	scale    float64         // of what ranks have added
	mirrors  *mirrors        // the ranks' parts of buckets; nil without withMirrors
	alone    bool            // between steps ranks have only their shards of parameters
	buckets  []*bucket       // in the order in which they leave
	queues   []backend.Queue // where buckets are reduced, by turns; none for a single rank
	memory   backend.Buffer  // of the buckets
}

// openQueues gives every bucket its queue: one for all, or several in turn if that lets the
// communicator work on several buckets at once. A compression uses one scratch memory for all
// calls, so it gains nothing.
func (d *reducer) openQueues() error {
	n := 1
	if d.gradComm == d.comm {
		n = max(n, d.comm.Capabilities().InFlight)
	}
	for range min(n, len(d.buckets)) {
		q, err := backend.UrgentQueue(d.comm.Device())
		if err != nil {
			return err
		}
		d.queues = append(d.queues, q)
	}
	for i, b := range d.buckets {
		b.queue = d.queues[i%len(d.queues)]
	}
	return nil
}

// alloc returns the memory of the buckets.
func (d *reducer) alloc(nbytes int) (backend.Buffer, error) {
	if d.comm.Size() > 1 {
		return d.comm.Alloc(nbytes)
	}
	return d.comm.Device().Alloc(nbytes) // no other rank needs it
}

// exchange runs a collective on the parameters of a bucket.
func (d *reducer) exchange(b *bucket, c backend.Collective) error {
	for _, p := range b.params {
		if err := p.load(p.node.Value()); err != nil {
			return err
		}
	}
	work, err := b.start(d.comm, c)
	if err == nil {
		err = b.finish(work)
	}
	if err != nil {
		return fmt.Errorf("%v of %v: %w", c, b, err)
	}
	return b.unpack()
}

// reduction is the call that combines the gradients of a bucket.
func (d *reducer) reduction(b *bucket) backend.Collective {
	c := backend.Collective{Kind: backend.AllReduce, Op: d.op, State: b.slot(), Origin: b.sync}
	if d.tree != nil {
		c.Op, c.Association, c.Splits = backend.Sum, backend.Tree, d.tree.splits
	}
	if d.half { // what a compression makes of the call
		c.Original = backend.Original{Op: c.Op, DType: backend.F32}
		c.Op = backend.Avg
	}
	return c
}

// callOf returns the call of a kind that exchanges a bucket.
func (d *reducer) callOf(b *bucket, kind backend.Kind) backend.Collective {
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

// shardOf returns which elements of a parameter a rank has.
func (d *reducer) shardOf(p *param, rank int) span {
	at := p.bucket.before(p)
	s := chunkOf(p.bucket.count(), rank, d.comm.Size())
	if d.mirrors != nil {
		s = d.mirrors.now[rank].in(p.bucket.count())
	}
	return span{min(max(s.from-at, 0), p.size), min(max(s.to-at, 0), p.size)}
}

// gatherShards is Unsharded for a purpose.
func (d *reducer) gatherShards(purpose backend.Purpose, p *param, mine backend.Buffer) (
	backend.Buffer, error) {
	regions := make([]checkpoint.Region, d.comm.Size())
	for r := range regions {
		s := d.shardOf(p, r)
		regions[r] = checkpoint.All([]int{p.size})
		regions[r].From, regions[r].N = s.from, s.to-s.from
	}
	return joinRegions(backend.Label(d.comm, purpose), p.dtype, regions, mine)
}

// free frees the memory of d.
func (d *reducer) free() error {
	var all error
	for _, q := range d.queues {
		all = errors.Join(all, q.Close())
	}
	if d.gradComm != d.comm {
		all = errors.Join(all, d.gradComm.Close())
	}
	if d.memory.Len() == 0 {
		return all
	}
	if d.comm.Size() > 1 {
		return errors.Join(all, d.comm.Free(d.memory))
	}
	return errors.Join(all, d.comm.Device().Free(d.memory))
}

// describer is a communicator that describes everything that the bits of its results depend on.
type describer interface{ Describe() string }

// resumer is a describer that can resume from the state of others, such as earlier versions.
type resumer interface{ Resumes(description string) bool }

// compressor describes how gradients are compressed.
func (d *reducer) compressor() string {
	if c, ok := backend.As[describer](d.gradComm); ok {
		return c.Describe()
	}
	if d.gradComm != d.comm {
		return fmt.Sprintf("%T", d.gradComm)
	}
	return "nothing"
}

// compression returns the state of the compression, if it has any.
func (d *reducer) compression() (solver.Stateful, bool) {
	return backend.As[solver.Stateful](d.gradComm)
}

// borrowed is a communicator whose owner closes it.
type borrowed struct{ backend.Base }

var _ backend.Wrapper = borrowed{}

// Close does nothing.
func (borrowed) Close() error { return nil }

// StartChecked implements [backend.CheckedStarter].
func (b borrowed) StartChecked(q backend.Queue, what backend.Collective, count int, dst,
	src backend.Buffer) (backend.Work, error) {
	return b.Pass(q, what, count, dst, src)
}

// freeBuckets frees the memory of the buckets. It is collective: a communicator gives freed memory
// to its device when all ranks allocate next.
func (d *reducer) freeBuckets() error {
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

// rotation averages the parameters of buckets in turn: see [WithPartial].
type rotation struct {
	on   bool
	turn int // the bucket that comes next
}

// average averages the next buckets.
func (r *rotation) average(d *reducer, buckets int) error {
	for range buckets {
		b := d.buckets[r.turn]
		c := backend.Collective{Kind: backend.AllReduce, Op: backend.Avg, Exact: true,
			State: b.slot(), Origin: b.origin(backend.ForAverage)}
		if err := d.exchange(b, c); err != nil {
			return err
		}
		r.turn = (r.turn + 1) % len(d.buckets)
	}
	return nil
}
