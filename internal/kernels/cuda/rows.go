package cuda

import (
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/kernels"
)

// Geometry of rows.cu.
const (
	rowStrip = 256 // columns of a row that a warp does
	rowWarps = 8   // of a block
	// of addrows at most, about as many as are under way on an H100: each reads all indices
	rowsBlocks = 1024
)

// The bits of a NaN, which stands where an index is out of range.
const (
	nan32 = 0x7fc00000
	nan64 = 0x7ff8000000000000
	nanB  = 0x7fc07fc0 // two of BF16, F16
	nanF  = 0x7e007e00
)

// TakeRows has the meaning of [kernels.Host.TakeRows].
func (k Kernels) TakeRows(dst, src, indices backend.Buffer, r kernels.Rows) error {
	if err := check.TakeRows(dst, src, indices, r); err != nil || dst.Len() == 0 {
		return err
	}
	return k.launcher.Launch(copyRows("takerows", dst, src, indices, r))
}

// AddRows has the meaning and bits of [kernels.Host.AddRows]. A block reads all indices and adds
// the rows that are in its part of the table: besides dst and the rows, up to 1,024 times the
// indices are read, out of the second-level cache.
func (k Kernels) AddRows(dst, src, indices backend.Buffer, r kernels.Rows) error {
	if err := check.AddRows(dst, src, indices, r); err != nil || dst.Len() == 0 {
		return err
	}
	c := rowsCall("addrows", dst, src, indices, r)
	across := over(r.Width, rowStrip) * r.Before
	part := max(over(r.Count, max(rowsBlocks/across, 1)), rowWarps)
	c.Grid = Size{blocks(r.Count, part), min(blocks(across, 1), 1<<15)}
	c.pass(uint64(part))
	return k.launcher.Launch(c)
}

// PutRows has the meaning and bits of [kernels.Host.PutRows].
func (k Kernels) PutRows(dst, src, indices backend.Buffer, r kernels.Rows) error {
	if err := check.PutRows(dst, src, indices, r); err != nil || src.Len() == 0 {
		return err
	}
	return k.launcher.Launch(copyRows("putrows", dst, src, indices, r))
}

// copyRows copies rows as words of 4 bytes.
func copyRows(verb string, dst, src, indices backend.Buffer, r kernels.Rows) Launch {
	r.Width = r.Width * dst.DType().Size() / 4
	c := rowsCall(verb, dst, src, indices, r)
	c.Entry.Type = "u32"
	c.Grid = Size{blocks(r.Before*indices.Len(), rowWarps), min(blocks(r.Width, rowStrip), 1<<15)}
	nan := map[backend.DType]uint64{backend.F64: nan64, backend.F32: nan32 | nan32<<32,
		backend.BF16: nanB | nanB<<32, backend.F16: nanF | nanF<<32}
	c.pass(nan[dst.DType()])
	return c
}

func rowsCall(verb string, dst, src, indices backend.Buffer, r kernels.Rows) Launch {
	c := Launch{Entry: Entry{Verb: verb, Op: indices.DType().String(), Type: dst.DType().String()},
		Block: Size{threads, 1}}
	c.pass(word(dst), word(src), word(indices))
	for _, n := range []int{indices.Len(), r.Before, r.Count, r.Width} {
		c.pass(uint64(n))
	}
	return c
}
