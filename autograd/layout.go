package autograd

import (
	"cmp"
	"context"
	"fmt"
	"slices"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/residence"
)

// align is where buckets begin in their memory, in bytes: a cache line.
const align = 64

// bucket is gradients that are reduced in one call.
type bucket struct {
	index  int // its place in the order in which buckets leave
	params []*param
	nbytes int
	queue  backend.Queue  // where it is reduced; nil for a single rank
	data   backend.Buffer // the result, on the communicator's device, or what is reduced in place
	host   backend.Buffer // what the parameters' slots are in: data if that is the host's
	sums   backend.Buffer // what is reduced with WithTree: data is the first of its branches
	onHost backend.Buffer // the same for host
	// all of its memory, in which the ranks have chunks of one length: see [Buckets.Shards]
	whole, wholeOnHost backend.Buffer
	half               backend.Buffer // in place of data: see [Buckets.Halve]
	shard              span           // of elements: this rank's chunk
	missing            int            // gradients of this step that are not in it yet
	work               backend.Work   // its all-reduce, once it has left

	sync *backend.Origin // of the calls that reduce it
}

// String names a bucket by what is in it.
func (b *bucket) String() string {
	first, last := b.params[0].name, b.params[len(b.params)-1].name
	switch len(b.params) {
	case 1:
		return fmt.Sprintf("bucket %d (%s)", b.index, first)
	case 2:
		return fmt.Sprintf("bucket %d (%s, %s)", b.index, first, last)
	}
	return fmt.Sprintf("bucket %d (%s, ..., %s: %d parameters)", b.index, first, last,
		len(b.params))
}

// class is which parameters may be in one bucket.
type class struct {
	dtype                backend.DType
	apart, early, parted bool
}

// almostEmpty is the part of a bucket's size, as a divisor, that is not worth an all-reduce.
const almostEmpty = 16

// plan distributes parameters among buckets, each of one class, in the order in
// which the buckets will be full when gradients appear in reverse order. A
// dtype's first bucket holds up to first bytes, the others up to rest; a
// parameter that does not fit has another bucket, or joins one that is almost empty.
//
// It depends only on what all ranks have agreed on. If each step exchanges one bucket, joined is
// false and no bucket is filled beyond its size.
func plan(params []*param, first, rest int, joined bool) []*bucket {
	var all []*bucket
	open := map[class]*bucket{} // only looked up, so its order is of no effect
	for _, p := range slices.Backward(params) {
		of := class{p.dtype, p.apart, p.early, p.parted}
		b, limit := open[of], rest
		if b != nil && b.index == 0 {
			limit = first
		}
		nbytes := p.size * p.dtype.Size()
		if b == nil || b.nbytes+nbytes > limit && !(joined && b.nbytes <= limit/almostEmpty) {
			next := &bucket{}
			if b != nil {
				next.index = b.index + 1 // for now, among those of this class
			}
			all = append(all, next)
			b, open[of] = next, next
		}
		b.params = append(b.params, p)
		b.nbytes += nbytes
	}
	slices.SortFunc(all, func(a, b *bucket) int {
		if early := a.params[0].early; early != b.params[0].early {
			if early {
				return -1
			}
			return 1
		}
		return cmp.Compare(b.last(), a.last())
	})
	for i, b := range all {
		b.index = i
		b.sync = b.origin(backend.ForSync)
	}
	return all
}

// last is the number of the parameter that fills the bucket.
func (b *bucket) last() int { return b.params[len(b.params)-1].index }

// count returns the elements of a bucket.
func (b *bucket) count() int { return b.nbytes / b.params[0].dtype.Size() }

// bytesFor returns the bytes that the buckets of P ranks take in one piece of memory, each the
// given number of times.
func bytesFor(buckets []*bucket, times, P int) int {
	n := 0
	for _, b := range buckets {
		n += aligned(b.room(times, P) * b.params[0].dtype.Size())
	}
	return n
}

// room returns how many elements the memory of a bucket of P ranks has for the given number of
// sums.
func (b *bucket) room(times, P int) int {
	return max(b.count()*times, chunkOf(b.count(), 0, P).to*P)
}

func aligned(nbytes int) int { return (nbytes + align - 1) / align * align }

// splitOff returns n elements from the beginning of memory, and what is behind them.
func splitOff(memory backend.Buffer, d backend.DType, n int) (part, rest backend.Buffer) {
	nbytes := n * d.Size()
	return memory.Slice(0, nbytes).As(d), memory.Slice(aligned(nbytes), memory.Len())
}

// assignSlots gives every bucket its part of memory, and every parameter its slot.
// Slots are on the host, so that solvers and Gorgonia can use them, also where the
// communicator is on a device. This rank of P sends own sums of each gradient, and others up to
// most.
func assignSlots(buckets []*bucket, memory backend.Buffer, own, most, rank, P int) {
	for _, b := range buckets {
		n := b.count()
		b.whole, memory = splitOff(memory, b.params[0].dtype, b.room(most, P))
		b.wholeOnHost, b.shard = b.whole, chunkOf(n, rank, P)
		if b.whole.Device() {
			b.wholeOnHost = residence.Zeros(b.whole.DType(), b.whole.Len())
		}
		b.sums, b.onHost = b.whole.Slice(0, n*own), b.wholeOnHost.Slice(0, n*own)
		b.data, b.host = b.sums.Slice(0, n), b.onHost.Slice(0, n)
		at := 0
		for _, p := range b.params {
			p.bucket, p.slot = b, b.host.Slice(at, at+p.size)
			p.view = p.viewOf(p.slot)
			at += p.size
		}
	}
}

// slots returns n elements from number at on of each of the sums in a memory.
func (b *bucket) slots(memory backend.Buffer, at, n int) (all []backend.Buffer) {
	for ; at < memory.Len(); at += b.count() {
		all = append(all, memory.Slice(at, at+n))
	}
	return all
}

// operands returns what a call writes and reads of the bucket's memory, on the communicator's
// device or on the host.
func (b *bucket) operands(c backend.Collective, onHost bool) (dst, src backend.Buffer) {
	whole, sums, data := b.whole, b.sums, b.data
	if onHost {
		whole, sums, data = b.wholeOnHost, b.onHost, b.host
	}
	switch {
	case c.Kind == backend.ReduceScatter:
		return whole.Slice(b.shard.from, b.shard.to), whole
	case c.Kind == backend.AllGather:
		return whole, whole.Slice(b.shard.from, b.shard.to)
	case c.Association == backend.Tree:
		return data, sums
	case b.half.Len() > 0:
		return b.half, b.half
	}
	return data, data
}

// origin says which bucket a call belongs to: its number, its first parameter, and a hash of all of
// them, so that ranks that train several models do not add up gradients of different models.
func (b *bucket) origin(purpose backend.Purpose) *backend.Origin {
	return &backend.Origin{
		Purpose: purpose, Ordinal: uint32(1 + b.index),
		Name: backend.MakeName(b.params[0].name), Shape: backend.LayoutOf(fmt.Sprint(b.params)),
	}
}

// slot is the slot of the bucket's calls: 0 is for those that have none.
func (b *bucket) slot() int { return b.index + 1 }

// staged reports whether the bucket is copied to the communicator's device and
// back.
func (b *bucket) staged() bool { return b.data.Device() }

// unpack overwrites the parameters with their slots.
func (b *bucket) unpack() error {
	for _, p := range b.params {
		value, err := p.value()
		if err != nil {
			return err
		}
		residence.Write(value, p.slot)
	}
	return nil
}

// start starts a collective on the bucket, on its queue.
func (b *bucket) start(comm backend.Communicator, c backend.Collective) (backend.Work, error) {
	q := b.queue
	dst, src := b.operands(c, false)
	if !b.staged() {
		return comm.Start(q, c, dst, src)
	}
	to, from := b.operands(c, true)
	if err := q.Move(src, from); err != nil {
		return nil, err
	}
	w, err := comm.Start(q, c, dst, src)
	if err != nil {
		return nil, err
	}
	if err := w.Wait(q); err != nil { // it has failed already; who waits for the bucket is told
		return backend.Finished(cmp.Or(w.Join(context.Background()), err)), nil
	}
	return w, q.Move(to, dst)
}

// finish waits for what start started.
func (b *bucket) finish(w backend.Work) error {
	// Without a deadline: a communicator's waits end by themselves.
	err := w.Join(context.Background())
	if b.staged() {
		if lost := drain(b.queue); lost != nil {
			// rather than that a gradient is not finite, which would only skip the step
			return lost
		}
	}
	return err
}

// drain waits for a queue.
func drain(q backend.Queue) error {
	done, err := q.Record()
	if err != nil {
		return err
	}
	return done.Join(context.Background())
}

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

// before returns how many elements of a bucket come before those of a parameter.
func (b *bucket) before(p *param) (n int) {
	for _, other := range b.params[:slices.Index(b.params, p)] {
		n += other.size
	}
	return n
}
