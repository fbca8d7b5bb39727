package cuda

// Launch is one launch. It is a value that holds everything, so that making one
// costs no allocation.
type Launch struct {
	Entry Entry
	Grid  Size
	Block Size
	Event uintptr // of the driver, to be recorded behind the kernel; 0 for none

	few  [48]uint64
	n    int
	many []uint64 // in place of few
}

// Size is the extent of a grid, in blocks, or of a block, in threads.
type Size struct{ X, Y uint32 }

// Params returns the parameters. Each is one word of 64 bits, or several in a
// row, so that their bytes are what the driver copies to the kernel.
func (c *Launch) Params() []uint64 {
	if c.many != nil {
		return c.many
	}
	return c.few[:c.n]
}

func (c *Launch) pass(words ...uint64) { c.n += copy(c.few[c.n:], words) }

// Launcher starts kernels in order: a stream of a device.
type Launcher interface {
	Launch(Launch) error
}

const (
	threads    = 256     // in a block
	maxBlocks  = 1 << 16 // in a grid: kernels go round where that is too few
	vector     = 16      // bytes one thread moves at once
	fewSources = 8       // of one reduction that reads several at once
)

// MaxSources is how many operands one reduction may have.
const MaxSources = 256

// over divides and rounds up.
func over(n, d int) int { return (n + d - 1) / d }

// blocks returns the size of a grid in which a block does `each` of n.
func blocks(n, each int) uint32 { return uint32(min(max(over(n, each), 1), maxBlocks)) }

// linear is the geometry of kernels that go over elements in vectors; nbytes is
// the size of the operand of which a vector is 16 bytes.
func (c *Launch) linear(nbytes int) {
	c.Grid, c.Block = Size{blocks(nbytes, threads*vector), 1}, Size{threads, 1}
}

// rows is the geometry of kernels that go over rows of width units: a block is
// as wide as a row needs, up to all its threads.
func (c *Launch) rows(rows, width int) {
	x := powerOfTwo(width, threads)
	y := threads / x
	// The y axis of a grid is the short one.
	c.Block = Size{uint32(x), uint32(y)}
	c.Grid = Size{X: min(blocks(width, 4*x), 1<<10), Y: min(blocks(rows, y), 1<<15)}
}

// powerOfTwo returns the smallest power of two from n on, at most limit.
func powerOfTwo(n, limit int) int {
	p := 1
	for p < n && p < limit {
		p *= 2
	}
	return p
}
