package cuda

import (
	"fmt"

	"github.com/euryale-ml/euryale/backend"
)

// A long axis is summed in segments, by several blocks, where there are too few
// sums to keep a device busy otherwise. This depends on the shape alone, as the
// order of additions must.
const (
	rowSegment    = 8192 // elements of a contiguous axis
	columnSegment = 512  // elements of another
	fewSums       = 1024
)

// segment returns how much of the summed axis of [outer, n, inner] one block
// does.
func segment(outer, n, inner int) int {
	switch {
	case outer*inner >= fewSums:
		return n
	case inner == 1:
		return min(n, rowSegment)
	}
	return min(n, columnSegment)
}

// sumScratch returns the number of elements Sum needs besides dst and src.
func sumScratch(outer, n, inner int) int {
	if outer*inner == 0 {
		return 0
	}
	scratch := 0
	for s := segment(outer, n, inner); s < n; s = segment(outer, n, inner) {
		n = over(n, s)
		scratch += outer * n * inner
	}
	return scratch
}

// Sum adds up the middle axis of src [outer, n, inner] into dst [outer, inner]:
//
//	for o, c { dst[o, c] = sum over i of src[o, i, c] }
//
// The order of the additions is a fixed tree that depends on the shape alone. A
// full sum has outer = inner = 1. scratch is of the same type and has
// [sumScratch] elements.
func (k Kernels) Sum(dst, src backend.Buffer, outer, n, inner int, scratch backend.Buffer) error {
	d := dst.DType()
	if outer < 0 || n < 0 || inner < 0 || src.Len() != outer*n*inner || dst.Len() != outer*inner || src.DType() != d {
		return fmt.Errorf("%w: sum of [%d, %d, %d]: source is %d %v, destination is %d %v",
			backend.ErrArgument, outer, n, inner, src.Len(), src.DType(), dst.Len(), d)
	}
	if !arithmetic(d) {
		return fmt.Errorf("%w: no kernel sum of %v", backend.ErrUnsupported, d)
	}
	if need := sumScratch(outer, n, inner); need > 0 && (scratch.Len() < need || scratch.DType() != d) {
		return fmt.Errorf("%w: sum of [%d, %d, %d] needs %d %v of scratch, got %d %v",
			backend.ErrArgument, outer, n, inner, need, d, scratch.Len(), scratch.DType())
	}
	if n == 0 {
		return k.Zero(dst)
	}
	for _, b := range []backend.Buffer{dst, src, scratch} {
		if err := check.Zero(b); b.Len() > 0 && err != nil {
			return err
		}
	}
	if dst.Len() == 0 {
		return nil
	}
	for {
		s := segment(outer, n, inner)
		if s == n {
			return k.sumSegments(dst, src, outer, n, inner, s)
		}
		sums := outer * over(n, s) * inner
		partial := scratch.Slice(0, sums)
		if err := k.sumSegments(partial, src, outer, n, inner, s); err != nil {
			return err
		}
		src, n, scratch = partial, over(n, s), scratch.Slice(sums, scratch.Len())
	}
}

// sumSegments sums each segment of s elements of the middle axis.
func (k Kernels) sumSegments(dst, src backend.Buffer, outer, n, inner, s int) error {
	segments := over(n, s)
	c := Launch{Entry: Entry{Verb: "sumrows", Type: dst.DType().String()}}
	if inner == 1 {
		x := powerOfTwo(s, threads)
		c.Block = Size{uint32(x), uint32(threads / x)}
		c.Grid = Size{blocks(outer*segments, threads/x), 1}
		c.pass(word(dst), word(src), uint64(outer), uint64(n), uint64(s))
		return k.launcher.Launch(c)
	}
	c.Entry.Verb = "sumcolumns"
	x := powerOfTwo(inner, 32)
	c.Block = Size{uint32(x), uint32(threads / x)}
	c.Grid = Size{blocks(outer*segments*over(inner, x), 1), 1}
	c.pass(word(dst), word(src), uint64(outer), uint64(n), uint64(inner), uint64(s))
	return k.launcher.Launch(c)
}
