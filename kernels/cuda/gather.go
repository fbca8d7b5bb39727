package cuda

import (
	"fmt"
	"slices"

	"github.com/euryale-ml/euryale/backend"
)

// maxAxes is how many axes may be left after those that lie next to each other
// in both tensors have become one.
const maxAxes = 6

// tile is the side of a transposition's tiles; shorter axes are gathered.
const tile = 32

// axes are the lengths of a tensor and the strides of its elements in the
// source, slowest first.
type axes struct {
	dims, strides [maxAxes]int
	n             int
}

// Gather makes a strided tensor contiguous. dst has the shape dims:
//
//	for i in dims { dst[i...] = src[i[0]*strides[0] + i[1]*strides[1] + ...] }
//
// A permutation of axes permutes the strides, a broadcast has stride 0, and
// repeating elements along an axis is a broadcast axis after it. Strides are in
// elements and not negative. The buffers do not overlap.
func (k Kernels) Gather(dst, src backend.Buffer, dims, strides []int) error {
	if err := checkGather(dst, src, dims, strides); err != nil {
		return err
	}
	if dst.Len() == 0 {
		return nil
	}
	a, err := merge(dims, strides)
	if err != nil {
		return err
	}
	if a.n == 0 || a.n == 1 && a.strides[0] == 1 {
		return k.Copy(dst, src.Slice(0, dst.Len()))
	}
	if fast := a.transposed(); fast >= 0 {
		return k.transpose(dst, src, a, fast)
	}
	return k.gather(dst, src, a)
}

// Permute permutes the axes of src, which has the shape dims and is contiguous:
// axis i of dst is axis perm[i] of src.
func (k Kernels) Permute(dst, src backend.Buffer, dims, perm []int) error {
	if len(perm) != len(dims) || !isPermutation(perm) {
		return fmt.Errorf("%w: permute: %v is not a permutation of %d axes", backend.ErrArgument, perm, len(dims))
	}
	strides := make([]int, len(dims))
	stride := 1
	for i := len(dims) - 1; i >= 0; i-- {
		strides[i] = stride
		stride *= dims[i]
	}
	toDims, toStrides := make([]int, len(dims)), make([]int, len(dims))
	for i, p := range perm {
		toDims[i], toStrides[i] = dims[p], strides[p]
	}
	return k.Gather(dst, src, toDims, toStrides)
}

func isPermutation(perm []int) bool {
	sorted := slices.Sorted(slices.Values(perm))
	for i, p := range sorted {
		if p != i {
			return false
		}
	}
	return true
}

func checkGather(dst, src backend.Buffer, dims, strides []int) error {
	if len(dims) != len(strides) {
		return fmt.Errorf("%w: gather of %d axes with %d strides", backend.ErrArgument, len(dims), len(strides))
	}
	n, last := 1, 0
	for i, d := range dims {
		if d < 0 || strides[i] < 0 {
			return fmt.Errorf("%w: gather of shape %v with strides %v: nothing may be negative", backend.ErrArgument, dims, strides)
		}
		n *= d
		last += (d - 1) * strides[i]
	}
	if dst.Len() != n {
		return fmt.Errorf("%w: gather of shape %v into %d elements", backend.ErrArgument, dims, dst.Len())
	}
	if n > 0 && last >= src.Len() {
		return fmt.Errorf("%w: gather of shape %v with strides %v reads element %d of %d", backend.ErrArgument, dims, strides, last, src.Len())
	}
	if src.DType() != dst.DType() || !dst.DType().Valid() {
		return fmt.Errorf("%w: gather from %v to %v: the dtypes must be the same", backend.ErrArgument, src.DType(), dst.DType())
	}
	if err := check.Zero(dst); err != nil {
		return err
	}
	return check.Zero(src)
}

// merge leaves out axes of length 1 and joins axes whose elements follow each
// other in the source as they do in the destination.
func merge(dims, strides []int) (axes, error) {
	var a axes
	for i := range dims {
		if dims[i] == 1 {
			continue
		}
		if last := a.n - 1; last >= 0 && a.strides[last] == dims[i]*strides[i] {
			a.dims[last] *= dims[i]
			a.strides[last] = strides[i]
			continue
		}
		if a.n == maxAxes {
			return axes{}, fmt.Errorf("%w: gather of shape %v with strides %v: more than %d axes that cannot be joined", backend.ErrUnsupported, dims, strides, maxAxes)
		}
		a.dims[a.n], a.strides[a.n] = dims[i], strides[i]
		a.n++
	}
	return a, nil
}

// transposed returns the axis that is the fastest of the source but not of the
// destination, where both that and the destination's are long enough for tiles;
// else -1.
func (a axes) transposed() int {
	last := a.n - 1
	if a.strides[last] <= 1 || a.dims[last] < tile/2 {
		return -1
	}
	for i := range last {
		if a.strides[i] == 1 && a.dims[i] >= tile/2 {
			return i
		}
	}
	return -1
}

// gather goes along rows of the destination. Where they are rows of the source
// too, they are moved in units that may be wider than an element.
func (k Kernels) gather(dst, src backend.Buffer, a axes) error {
	size := dst.DType().Size()
	last := a.n - 1
	unit := size
	if a.strides[last] == 1 {
		all := word(dst) | word(src) | uint64(a.dims[last]*size)
		for _, s := range a.strides[:last] {
			all |= uint64(s * size)
		}
		unit = unitOf(all)
	}
	width := a.dims[last] * size / unit
	rows := dst.NBytes() / (width * unit)
	c := Call{Entry: Entry{Verb: "gather", Type: unitTypes[unit]}}
	c.rows(rows, width)
	c.pass(word(dst), word(src), uint64(rows), uint64(width), uint64(a.strides[last]))
	const outer = maxAxes - 1
	for i := range outer {
		c.few[c.n+i], c.few[c.n+outer+i] = 1, 0
	}
	for i := range last {
		at := c.n + outer - last + i
		c.few[at], c.few[at+outer] = uint64(a.dims[i]), uint64(a.strides[i]*size/unit)
	}
	c.n += 2 * outer
	return k.launcher.Launch(c)
}

// transpose goes along tiles of the last axis and the source's fastest.
func (k Kernels) transpose(dst, src backend.Buffer, a axes, fast int) error {
	const batch = maxAxes - 2
	var to [maxAxes]int // the destination's strides
	stride := 1
	for i := a.n - 1; i >= 0; i-- {
		to[i] = stride
		stride *= a.dims[i]
	}
	last := a.n - 1
	m, n := a.dims[fast], a.dims[last]
	batches := dst.Len() / (m * n)
	c := Call{Entry: Entry{Verb: "transpose", Type: unitTypes[dst.DType().Size()]}}
	c.Block = Size{tile, 8}
	c.Grid = Size{blocks(batches*over(m, tile)*over(n, tile), 1), 1}
	c.pass(word(dst), word(src), uint64(m), uint64(n), uint64(to[fast]), uint64(a.strides[last]), uint64(batches))
	for i := range batch {
		c.few[c.n+i] = 1
	}
	at := c.n + batch - (a.n - 2)
	for i := range last {
		if i == fast {
			continue
		}
		c.few[at], c.few[at+batch], c.few[at+2*batch] = uint64(a.dims[i]), uint64(to[i]), uint64(a.strides[i])
		at++
	}
	c.n += 3 * batch
	return k.launcher.Launch(c)
}
