package autograd

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/euryale-ml/euryale/backend"
)

// align is where buckets begin in their memory, in bytes: a cache line.
const align = 64

// bucket is gradients that are reduced in one call.
type bucket struct {
	index   int // its place in the order in which buckets leave
	params  []*param
	nbytes  int
	queue   backend.Queue  // where it is reduced; nil for a single rank
	data    backend.Buffer // what is reduced, where the communicator wants it
	near    backend.Buffer // data too, or host memory where the parameters' slots are
	half    backend.DType  // what gradients are rounded to where they are packed, 0 if not
	rounded startFunc      // that of Capabilities, where half is set
	grads   backend.Buffer // where they are packed: near, or in their own memory if rounded
	missing int            // gradients of this step that are not in it yet
	work    backend.Work   // its all-reduce, once it has left

	kernels    backend.Arithmetic // of the host, where gradients there are rounded
	dsts, srcs []backend.Buffer   // for pack, used again in every step

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
	return fmt.Sprintf("bucket %d (%s, ..., %s: %d parameters)", b.index, first, last, len(b.params))
}

// class is what the parameters of a bucket have in common.
type class struct {
	dtype    backend.DType
	onDevice bool
}

func (p *param) class() class { return class{p.dtype, p.engine != nil} }

// plan divides parameters among buckets, each of one class, in the order in
// which the buckets will be full when gradients appear in reverse order. A
// class's first bucket holds up to first bytes, the others up to rest; a
// parameter that is larger has its own bucket.
//
// It is a function of what all ranks have agreed on, and of nothing else.
func plan(params []*param, first, rest int) []*bucket {
	var all []*bucket
	open := map[class]*bucket{} // only looked up, so its order is of no effect
	for _, p := range slices.Backward(params) {
		b, limit := open[p.class()], rest
		if b != nil && b.index == 0 {
			limit = first
		}
		nbytes := p.size * p.dtype.Size()
		if b == nil || b.nbytes+nbytes > limit {
			next := &bucket{}
			if b != nil {
				next.index = b.index + 1 // for now, among those of this class
			}
			all = append(all, next)
			b, open[p.class()] = next, next
		}
		b.params = append(b.params, p)
		b.nbytes += nbytes
	}
	slices.SortFunc(all, func(a, b *bucket) int { return cmp.Compare(b.last(), a.last()) })
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

// span returns the bytes that the buckets take in one piece of memory.
func span(buckets []*bucket) int {
	n := 0
	for _, b := range buckets {
		n += aligned(b.nbytes) + aligned(b.count()*b.half.Size())
	}
	return n
}

func aligned(nbytes int) int { return (nbytes + align - 1) / align * align }

// cut returns n elements from the beginning of memory, and what is behind them.
func cut(memory backend.Buffer, d backend.DType, n int) (part, rest backend.Buffer) {
	nbytes := n * d.Size()
	return memory.Slice(0, nbytes).As(d), memory.Slice(aligned(nbytes), memory.Len())
}

// place gives every bucket its part of memory, and every parameter its slot.
// Parameters on the host have their slots there, so that solvers and Gorgonia
// can use them, also where the communicator is on a device.
func place(buckets []*bucket, memory backend.Buffer) error {
	for _, b := range buckets {
		first := b.params[0]
		b.data, memory = cut(memory, first.dtype, b.count())
		b.near = b.data
		if b.data.Device() && first.engine == nil {
			words := make([]float64, (b.nbytes+7)/8)
			b.near = backend.Of(words).As(first.dtype).Slice(0, b.data.Len())
		}
		b.grads = b.near
		if b.half != 0 {
			b.grads, memory = cut(memory, b.half, b.count())
		}
		at := 0
		for _, p := range b.params {
			if err := p.place(b, b.near.Slice(at, at+p.size), b.grads.Slice(at, at+p.size)); err != nil {
				return fmt.Errorf("parameter %v: %w", p, err)
			}
			at += p.size
		}
	}
	return nil
}

// origin says which bucket a call is of: its number, its first parameter, and a hash of all
// of them, so that ranks which train several models do not add up gradients of different ones.
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
func (b *bucket) staged() bool { return b.near.Addr() != b.data.Addr() }

// pack copies the gradients that are on a device and not in their places yet into
// them, rounded where they are to be, by one call on the engine's queue.
func (b *bucket) pack() error {
	b.dsts, b.srcs = b.dsts[:0], b.srcs[:0]
	for _, p := range b.params {
		if p.src.Len() > 0 {
			b.dsts, b.srcs = append(b.dsts, p.to), append(b.srcs, p.src)
		}
		p.src = backend.Buffer{}
	}
	return b.copy(b.dsts, b.srcs)
}

// unpack overwrites the parameters with their slots.
func (b *bucket) unpack() error {
	b.dsts, b.srcs = b.dsts[:0], b.srcs[:0]
	for _, p := range b.params {
		value, err := p.value()
		if err != nil {
			return err
		}
		b.dsts, b.srcs = append(b.dsts, value), append(b.srcs, p.slot)
	}
	return b.copy(b.dsts, b.srcs)
}

// copy copies buffers where the parameters are.
func (b *bucket) copy(dsts, srcs []backend.Buffer) error {
	e := b.params[0].engine
	switch {
	case len(dsts) == 0:
		return nil
	case e == nil:
		for i, dst := range dsts {
			copy(dst.Bytes(), srcs[i].Bytes())
		}
		return nil
	}
	return e.Queue().MultiTensorCopy(dsts, srcs)
}

// reduce starts a collective on the gradients of the bucket, where they are packed. What
// comes out is in the slots, and of the dtype of the parameters.
func (b *bucket) reduce(comm backend.Communicator, c backend.Collective) (backend.Work, error) {
	if b.half != 0 {
		return b.begin(b.rounded, c, b.grads)
	}
	return b.start(comm, c)
}

// start starts a collective on the bucket.
func (b *bucket) start(comm backend.Communicator, c backend.Collective) (backend.Work, error) {
	return b.begin(comm.Start, c, b.data)
}

// startFunc is a communicator's Start or StartRounded.
type startFunc func(q backend.Queue, c backend.Collective, dst, src backend.Buffer) (backend.Work, error)

// begin starts a collective into the bucket, on its queue, after what the parameters' own
// queue has to write.
func (b *bucket) begin(start startFunc, c backend.Collective, src backend.Buffer) (backend.Work, error) {
	q := b.queue
	if e := b.params[0].engine; e != nil {
		if err := follow(q, e.Queue()); err != nil {
			return nil, err
		}
	}
	if !b.staged() {
		return start(q, c, b.data, src)
	}
	if err := q.Move(b.data, b.near); err != nil {
		return nil, err
	}
	w, err := start(q, c, b.data, src)
	if err != nil {
		return nil, err
	}
	if err := w.Wait(q); err != nil { // it has failed already; who waits for the bucket is told
		return backend.Finished(cmp.Or(w.Join(context.Background()), err)), nil
	}
	return w, q.Move(b.near, b.data)
}

// finish waits for what start started.
func (b *bucket) finish(w backend.Work) error {
	// Without a deadline: a communicator's waits end by themselves.
	err := w.Join(context.Background())
	if b.staged() {
		if lost := drain(b.queue); lost != nil {
			return lost // and not that a gradient is not finite, which would leave out the step alone
		}
	}
	return err
}

// describe writes down all that ranks must have in common, a line for each.
func describe(params []*param, buckets []*bucket, o options) string {
	var s strings.Builder
	fmt.Fprintf(&s, "the reduction is %s\n", o.reduction())
	fmt.Fprintf(&s, "the sizes of buckets are %d and %d bytes\n", o.first, o.rest)
	fmt.Fprintf(&s, "partial averaging is %v, compression %v, parameters may be unused %v\n", o.partial, o.compress != nil, o.unused)
	fmt.Fprintf(&s, "the number of parameters is %d\n", len(params))
	for _, p := range params {
		fmt.Fprintf(&s, "parameter %d is %v\n", p.index, p)
	}
	for _, b := range buckets {
		if b.half != 0 {
			fmt.Fprintf(&s, "gradients of %v are packed as %v\n", b, b.half)
		}
	}
	return s.String()
}
