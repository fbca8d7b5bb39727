package cuda

import (
	"errors"
	"fmt"
	"math/bits"
	"slices"

	"github.com/euryale-ml/euryale/backend"
)

// maxAxes is how many axes may be left after those that lie next to each other
// in both tensors have become one.
const maxAxes = 6

// axes are the lengths of a tensor and the strides of its elements in the
// source, slowest first. size is the size of an element, in bytes.
type axes struct {
	dims, strides [maxAxes]int
	n             int
	size          int
}

// CopyStrided implements [backend.Arithmetic]. More than 6 axes that cannot be joined are
// [backend.ErrUnsupported].
func (k Kernels) CopyStrided(dst, src backend.Buffer, dims, strides []int) error {
	if err := check.CopyStrided(dst, src, dims, strides); err != nil {
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
	if dst.NBytes() >= maxIndex {
		return k.halves(dst, src, a)
	}
	if run := a.run(dst, src); run.n > 0 {
		return k.gatherRuns(dst, src, run)
	}
	a = a.widen(dst, src)
	if fast := a.transposed(); fast >= 0 {
		return k.transpose(dst, src, a, fast)
	}
	if fast := a.planes(); fast >= 0 {
		return k.planes(dst, src, a, fast)
	}
	return k.gatherElements(dst, src, a)
}

// halves gathers what is too large for one launch.
func (k Kernels) halves(dst, src backend.Buffer, a axes) error {
	half, row := a.dims[0]/2, dst.Len()/a.dims[0]
	rest := a
	a.dims[0], rest.dims[0] = half, a.dims[0]-half
	return errors.Join(
		k.CopyStrided(dst.Slice(0, half*row), src, a.dims[:a.n], a.strides[:a.n]),
		k.CopyStrided(dst.Slice(half*row, dst.Len()), src.Slice(half*a.strides[0], src.Len()),
			rest.dims[:a.n], a.strides[:a.n]))
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
			return axes{}, fmt.Errorf("%w: gather of shape %v with strides %v: more than %d axes "+
				"that cannot be joined", backend.ErrUnsupported, dims, strides, maxAxes)
		}
		a.dims[a.n], a.strides[a.n] = dims[i], strides[i]
		a.n++
	}
	return a, nil
}

// widen makes runs of elements that stay together the elements, in the widest
// unit that the addresses allow.
func (a axes) widen(dst, src backend.Buffer) axes {
	a.size = dst.DType().Size()
	last := a.n - 1
	if a.strides[last] != 1 {
		return a
	}
	all := word(dst) | word(src) | uint64(a.dims[last]*a.size)
	for _, s := range a.strides[:last] {
		all |= uint64(s * a.size)
	}
	unit := unitOf(all)
	for i := range last {
		a.strides[i] = a.strides[i] * a.size / unit
	}
	a.dims[last] = a.dims[last] * a.size / unit
	if a.dims[last] == 1 {
		a.n--
	}
	a.size = unit
	return a
}

// run returns the axes in bytes where runs of them stay together that are long, but
// not aligned; else none.
func (a axes) run(dst, src backend.Buffer) axes {
	const long = vector
	size, last := dst.DType().Size(), a.n-1
	if a.strides[last] != 1 || a.dims[last]*size < long {
		return axes{}
	}
	all := word(dst) | word(src) | uint64(a.dims[last]*size)
	for i, s := range a.strides[:last] {
		all |= uint64(s * size)
		a.strides[i] = s * size
	}
	if unitOf(all) == vector {
		return axes{}
	}
	a.dims[last], a.size = a.dims[last]*size, 1
	return a
}

// transposed returns the axis that is the fastest of the source but not of the
// destination, where both that and the destination's are long enough for tiles;
// else -1.
func (a axes) transposed() int {
	const short = 16
	last := a.n - 1
	if a.strides[last] <= 1 || a.dims[last] < short {
		return -1
	}
	for i := range last {
		if a.strides[i] == 1 && a.dims[i] >= short {
			return i
		}
	}
	return -1
}

// planes returns the axis that is the fastest of the source but not of the destination,
// where one of these two is short, and next to the other on its side: the source is split
// by it, or joined. Else it returns -1. Planes are long enough for their ends, parts of 32
// bytes, to be a sixteenth of them at most. Elements of 8 bytes are as fast to join with
// gather (bench/results/2026-11/2026-11-22-h200-kernels.txt).
func (a axes) planes() int {
	const short, long = 16, 1024 // elements, bytes
	last := a.n - 1
	if a.strides[last] <= 1 || a.size > 8 {
		return -1
	}
	for i := range last {
		if a.strides[i] != 1 {
			continue
		}
		split := a.dims[i] < short && a.dims[last]*a.size >= long && a.strides[last] == a.dims[i]
		join := a.size < 8 && a.dims[last] < short && a.dims[i]*a.size >= long && i == last-1
		if split || join {
			return i
		}
	}
	return -1
}

// maxIndex bounds what the kernels divide: see Divisor in gather.cu.
const maxIndex = 1 << 31

// passAxes passes axes as divisors, and their strides: as many as there is room
// for, those in front of length 1.
func (c *Launch) passAxes(room int, dims []int, strides ...[]int) {
	unused := room - len(dims)
	for range unused {
		c.passDivisor(1)
	}
	for _, d := range dims {
		c.passDivisor(d)
	}
	for _, s := range strides {
		c.n += unused
		for _, stride := range s {
			c.pass(uint64(stride))
		}
	}
}

// passDivisor passes what divides by d: d, the multiplier and the shift.
func (c *Launch) passDivisor(d int) {
	shift := 31 + bits.Len(uint(d-1))
	multiplier := (1<<shift + uint64(d) - 1) / uint64(d)
	c.pass(uint64(d)|multiplier<<32, uint64(shift))
}

// The threads of a block of gather, and the elements of each.
const (
	gatherThreads = 128
	gatherEach    = 4
)

// gatherElements goes along the destination.
func (k Kernels) gatherElements(dst, src backend.Buffer, a axes) error {
	n := dst.NBytes() / a.size
	c := Launch{Entry: Entry{Verb: "gather", Type: unitTypes[a.size]}}
	c.Grid, c.Block = Size{uint32(over(n, gatherThreads*gatherEach)), 1}, Size{gatherThreads, 1}
	c.pass(word(dst), word(src), uint64(n), uint64(a.strides[0]))
	c.passAxes(maxAxes-1, a.dims[1:a.n], a.strides[1:a.n])
	c.passTurns(a)
	return k.launcher.Launch(c)
}

// gatherRuns goes along the destination in vectors, of which the first and the last
// may lie there in part.
func (k Kernels) gatherRuns(dst, src backend.Buffer, a axes) error {
	vectors := over(int(word(dst)%vector)+dst.NBytes(), vector)
	c := Launch{Entry: Entry{Verb: "gather", Op: "runs", Type: "b8"}}
	c.Grid, c.Block = Size{uint32(over(vectors, gatherThreads)), 1}, Size{gatherThreads, 1}
	c.pass(word(dst), word(src), uint64(dst.NBytes()), uint64(a.strides[0]))
	c.passAxes(maxAxes-1, a.dims[1:a.n], a.strides[1:a.n])
	c.passTurns(a)
	return k.launcher.Launch(c)
}

// passTurns passes the order of the blocks: see Turns in gather.cu.
func (c *Launch) passTurns(a axes) {
	blocks, count := int(c.Grid.X), 1
	outer := 1
	if i := a.n - 3; i >= 0 && a.strides[i] < a.strides[i+1] {
		count = a.dims[i]
		for _, d := range a.dims[:i] {
			outer *= d
		}
	}
	rows := blocks / (outer * count)
	c.passDivisor(max(count*rows, 1))
	c.passDivisor(count)
	c.pass(uint64(rows), uint64(outer*count*rows))
}

// tiling is the geometry of a transposition: the threads of a block, the elements of a
// tile along the source's fastest axis and the destination's, and how many columns a tile
// shares with the next one.
type tiling struct {
	block, tile Size
	shared      int
}

// The tilings of transpose and of transpose_wide, by the size of an element in bytes.
var (
	plain = [...]tiling{
		1: {Size{32, 8}, Size{124, 288}, 32},
		2: {Size{32, 8}, Size{62, 144}, 16},
		4: {Size{64, 4}, Size{64, 128}, 8},
		8: {Size{32, 8}, Size{32, 64}, 4},
	}
	wide = [...]tiling{
		1:  {Size{16, 16}, Size{256, 128}, 0},
		2:  {Size{16, 16}, Size{128, 128}, 0},
		4:  {Size{16, 16}, Size{64, 64}, 0},
		8:  {Size{16, 16}, Size{32, 64}, 0},
		16: {Size{16, 16}, Size{16, 64}, 0},
	}
)

// The order of the tiles of a transposition: see Tiles in gather.cu. Of operands that the L2
// cache holds the order makes no difference to memory, and tiles that are less high are done
// last: they fill the multiprocessors that would else wait for the last ones. 16 matrices of 1047
// x 1001 bytes are 7 % faster so. For 256 MiB those were 3 % slower. Bands of about the same
// height made bytes in rows of 1001 up to 6 % faster there, where one of nine rows had been a
// band of its own (H200, bench/results/2026-11/2026-11-22-h200-tiles.txt).
const (
	bandHeight = 8        // rows of tiles that are done at a time, about
	cached     = 32 << 20 // bytes of both operands
)

// others are the axes of a permutation that are neither the last nor the source's
// fastest, with their strides. stride is the stride of the source's fastest axis in the
// destination.
func (a axes) others(fast int) (dims, dst, src []int, stride int) {
	last := a.n - 1
	var to [maxAxes]int // the destination's strides
	n := 1
	for i := last; i >= 0; i-- {
		to[i] = n
		n *= a.dims[i]
	}
	rest := func(x [maxAxes]int) []int { return slices.Delete(x[:last], fast, fast+1) }
	return rest(a.dims), rest(to), rest(a.strides), to[fast]
}

// transpose goes along tiles of the last axis and the source's fastest.
func (k Kernels) transpose(dst, src backend.Buffer, a axes, fast int) error {
	last := a.n - 1
	m, n, from := a.dims[fast], a.dims[last], a.strides[last]
	dims, dsts, srcs, step := a.others(fast)

	// The strides of the destination are multiples of n.
	all := word(dst) | word(src) | uint64(a.size*m) | uint64(a.size*n) | uint64(a.size*from)
	for _, s := range srcs {
		all |= uint64(a.size * s)
	}
	c := Launch{Entry: Entry{Verb: "transpose", Type: unitTypes[a.size]}}
	var t tiling
	if unitOf(all) == vector {
		c.Entry.Op, t = "wide", wide[a.size]
	} else {
		t = plain[a.size]
	}
	across, down := over(max(n-t.shared, 1), int(t.tile.Y)-t.shared), over(m, int(t.tile.X))
	matrices := dst.NBytes() / (m * n * a.size)
	c.Grid, c.Block = Size{uint32(matrices * across * down), 1}, t.block
	if m%int(t.tile.X) != 0 && down > 1 && 2*dst.NBytes() <= cached {
		down--
	}
	height := over(down, max((down+bandHeight/2)/bandHeight, 1))
	c.pass(word(dst), word(src), uint64(m), uint64(n), uint64(step), uint64(from))
	c.passDivisor(across * height)
	c.pass(uint64(height)|uint64(across)<<32, uint64(down)|uint64(matrices*across*down)<<32)
	c.passDivisor(across * down)
	c.passAxes(maxAxes-2, dims, dsts, srcs)
	return k.launcher.Launch(c)
}

// Pieces of planes, in bytes: see Planes and Joined in gather.cu.
const (
	splitBytes = 16 << 10 // of all planes, that a block splits
	joinBytes  = 8 << 10  // the same, that it joins
	sector     = 32       // what a piece shares with the next one
	planeWord  = 8        // what a thread of a split accesses at a time
	banks      = 128      // of shared memory
	blockOf3   = 4 << 10  // pixels of three planes that a block joins
)

// planes goes along pieces of planes: the axis of them is either the source's fastest or
// the last.
func (k Kernels) planes(dst, src backend.Buffer, a axes, fast int) error {
	if a.dims[fast] < a.dims[a.n-1] {
		return k.split(dst, src, a, fast)
	}
	return k.join(dst, src, a, fast)
}

func (k Kernels) split(dst, src backend.Buffer, a axes, fast int) error {
	count, n := a.dims[fast], a.dims[a.n-1]
	dims, dsts, srcs, stride := a.others(fast)
	each := (splitBytes/powerOfTwo(count, 16) - sector) / a.size // a multiple of sectors
	pieces := over(n, each)
	c := Launch{Entry: Entry{Verb: "transpose", Op: "split", Type: unitTypes[a.size]}}
	c.Grid, c.Block = Size{uint32(dst.NBytes() / (count * n * a.size) * pieces), 1},
		Size{threads, 1}
	c.pass(word(dst), word(src), uint64(n), uint64(stride))
	c.passDivisor(count)
	// words that lie in different banks, or a sector
	run := max(banks/planeWord/(count&-count), sector/planeWord)
	c.pass(uint64(each), uint64(bits.Len(uint(run))-1))
	c.passDivisor(pieces)
	c.passAxes(maxAxes-2, dims, dsts, srcs)
	return k.launcher.Launch(c)
}

// join has its own kernel for three planes of bytes.
func (k Kernels) join(dst, src backend.Buffer, a axes, fast int) error {
	last := a.n - 1
	count, n := a.dims[last], a.dims[fast]
	dims, dsts, srcs, _ := a.others(fast)
	c := Launch{Entry: Entry{Verb: "transpose", Op: "join", Type: unitTypes[a.size]},
		Block: Size{threads, 1}}
	c.pass(word(dst), word(src), uint64(n), uint64(a.strides[last]))
	pieces := over(n, blockOf3)
	if count == 3 && a.size == 1 {
		c.Entry.Op = "pixels"
	} else {
		each := joinBytes / count / sector * sector // bytes of a plane, without those shared
		pieces = over(n-vector/a.size, each/a.size)
		c.passDivisor(count)
		// those shared, and one as planes may begin anywhere in theirs
		c.passDivisor(each/vector + 2)
		if a.size == 1 {
			c.Block.X = threads / 2
		}
	}
	c.Grid = Size{uint32(dst.NBytes() / (count * n * a.size) * pieces), 1}
	c.passDivisor(pieces)
	c.passAxes(maxAxes-2, dims, dsts, srcs)
	return k.launcher.Launch(c)
}
