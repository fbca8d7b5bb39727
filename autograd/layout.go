package autograd

import (
	"cmp"
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
	data    backend.Buffer
	missing int          // gradients of this step that are not in it yet
	work    backend.Work // its all-reduce, once it has left
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

// plan divides parameters among buckets, each of one dtype, in the order in
// which the buckets will be full when gradients appear in reverse order. A
// dtype's first bucket holds up to first bytes, the others up to rest; a
// parameter that is larger has a bucket of its own.
//
// It is a function of what all ranks have agreed on, and of nothing else.
func plan(params []*param, first, rest int) []*bucket {
	var all []*bucket
	open := map[backend.DType]*bucket{} // only looked up, so its order is of no effect
	for _, p := range slices.Backward(params) {
		b, limit := open[p.dtype], rest
		if b != nil && b.index == 0 {
			limit = first
		}
		nbytes := p.size * p.dtype.Size()
		if b == nil || b.nbytes+nbytes > limit {
			next := &bucket{}
			if b != nil {
				next.index = b.index + 1 // for now, among those of this dtype
			}
			all = append(all, next)
			b, open[p.dtype] = next, next
		}
		b.params = append(b.params, p)
		b.nbytes += nbytes
	}
	slices.SortFunc(all, func(a, b *bucket) int { return cmp.Compare(b.last(), a.last()) })
	for i, b := range all {
		b.index = i
	}
	return all
}

// last is the number of the parameter that fills the bucket.
func (b *bucket) last() int { return b.params[len(b.params)-1].index }

// span returns the bytes that the buckets take in one piece of memory.
func span(buckets []*bucket) int {
	n := 0
	for _, b := range buckets {
		n += (b.nbytes + align - 1) / align * align
	}
	return n
}

// place gives every bucket its part of memory, and every parameter its slot.
func place(buckets []*bucket, memory backend.Buffer) {
	for _, b := range buckets {
		b.data = memory.Slice(0, b.nbytes).As(b.params[0].dtype)
		at := 0
		for _, p := range b.params {
			p.place(b, b.data.Slice(at, at+p.size))
			at += p.size
		}
		memory = memory.Slice((b.nbytes+align-1)/align*align, memory.Len())
	}
}

// describe writes down all that ranks must have in common, a line for each.
func describe(params []*param, o options) string {
	var s strings.Builder
	fmt.Fprintf(&s, "the reduction is %v\n", o.op)
	fmt.Fprintf(&s, "the sizes of buckets are %d and %d bytes\n", o.first, o.rest)
	fmt.Fprintf(&s, "the number of parameters is %d\n", len(params))
	for _, p := range params {
		fmt.Fprintf(&s, "parameter %d is %v\n", p.index, p)
	}
	return s.String()
}
