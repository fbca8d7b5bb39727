package cuda

import (
	"fmt"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/kernels"
)

// Kernels is the arithmetic of one launcher, in its order.
type Kernels struct {
	launcher Launcher
}

// New returns the kernels that l launches.
func New(l Launcher) Kernels { return Kernels{l} }

// check is what all calls are checked with.
var check = kernels.Check{Device: true}

// The types of kernels that only move units of memory.
var unitTypes = [...]string{1: "b8", 2: "b16", 4: "b32", 8: "b64", 16: "b128"}

func word(b backend.Buffer) uint64 { return uint64(b.Addr()) }

// Zero implements [backend.Arithmetic].
func (k Kernels) Zero(dst backend.Buffer) error {
	return k.Fill(dst, 0)
}

// Fill: for i { dst[i] = bits }, as many of the low ones as an element has. dst may also be memory
// of the host, by its address on the device.
func (k Kernels) Fill(dst backend.Buffer, bits uint64) error {
	if err := check.Zero(dst); err != nil || dst.Len() == 0 {
		return err
	}
	c := Launch{Entry: Entry{Verb: "fill", Type: unitTypes[dst.DType().Size()]}}
	c.linear(dst.NBytes())
	c.pass(word(dst), uint64(dst.Len()), bits)
	return k.launcher.Launch(c)
}

// Copy implements [backend.Arithmetic]. Buffers that overlap are copied by one
// block: right, but slow.
func (k Kernels) Copy(dst, src backend.Buffer) error {
	if err := check.Copy(dst, src); err != nil {
		return err
	}
	n := dst.NBytes()
	if n == 0 || dst.Addr() == src.Addr() {
		return nil
	}
	c := Launch{Entry: Entry{Verb: "copy", Type: "b8"}}
	// Large copies go faster with several accesses of a thread under way, small
	// ones with more blocks.
	each := threads * vector
	if n > 4<<20 {
		each *= 4
	}
	c.Grid, c.Block = Size{blocks(n, each), 1}, Size{threads, 1}
	if dst.Addr() < src.Addr()+uintptr(n) && src.Addr() < dst.Addr()+uintptr(n) {
		c.Entry.Verb = "move"
		c.Grid, c.Block = Size{1, 1}, Size{1024, 1}
	}
	c.pass(word(dst), word(src), uint64(n))
	return k.launcher.Launch(c)
}

// Copy2D implements [backend.Arithmetic].
func (k Kernels) Copy2D(dst backend.Buffer, dstPitch int, src backend.Buffer, srcPitch, width,
	rows int) error {
	if err := check.Copy2D(dst, dstPitch, src, srcPitch, width, rows); err != nil {
		return err
	}
	if width == 0 || rows == 0 {
		return nil
	}
	size := dst.DType().Size()
	unit := unitOf(uint64(dst.Addr()) | uint64(src.Addr()) | uint64(dstPitch*size) | uint64(
		srcPitch*size) | uint64(width*size))
	units := func(elements int) uint64 { return uint64(elements * size / unit) }
	c := Launch{Entry: Entry{Verb: "copy2d", Type: unitTypes[unit]}}
	c.rows(rows, width*size/unit)
	c.pass(word(dst), units(dstPitch), word(src), units(srcPitch), units(width), uint64(rows))
	return k.launcher.Launch(c)
}

// unitOf returns the widest unit that divides everything or-ed together.
func unitOf(all uint64) int { return int(min((all|vector)&-(all|vector), vector)) }

// Cast implements [backend.Arithmetic].
func (k Kernels) Cast(dst, src backend.Buffer) error {
	if err := check.Cast(dst, src); err != nil {
		return err
	}
	from, to := src.DType(), dst.DType()
	if from == to && from.Size() > 2 {
		return k.Copy(dst, src)
	}
	if dst.Len() == 0 {
		return nil
	}
	c := Launch{Entry: Entry{Verb: "cast", Op: from.String(), Type: to.String()}}
	c.linear(min(dst.NBytes(), src.NBytes()))
	c.pass(word(dst), word(src), uint64(dst.Len()))
	return k.launcher.Launch(c)
}

// Divide implements [backend.Arithmetic].
func (k Kernels) Divide(dst, src backend.Buffer, n int) error {
	if err := check.Divide(dst, src, n); err != nil || dst.Len() == 0 {
		return err
	}
	c := Launch{Entry: Entry{Verb: "divide", Type: dst.DType().String()}}
	c.linear(dst.NBytes())
	c.pass(word(dst), word(src), uint64(dst.Len()), uint64(n))
	return k.launcher.Launch(c)
}

// Reduce implements [backend.Arithmetic], for up to [MaxSources] sources.
func (k Kernels) Reduce(op backend.ReduceOp, dst backend.Buffer, srcs ...backend.Buffer) error {
	if err := check.Reduce(op, dst, srcs...); err != nil {
		return err
	}
	if len(srcs) > MaxSources {
		return fmt.Errorf("%w: reduce of %d sources: a device takes %d at most",
			backend.ErrUnsupported, len(srcs), MaxSources)
	}
	if dst.Len() == 0 {
		return nil
	}
	c := Launch{Entry: Entry{Verb: "reduce", Op: op.String(), Type: dst.DType().String()}}
	if len(srcs) <= fewSources {
		c.linear(dst.NBytes())
		c.pass(word(dst), uint64(dst.Len()), uint64(len(srcs)))
		for i, src := range srcs {
			c.few[c.n+i] = word(src)
		}
		c.n += fewSources
		return k.launcher.Launch(c)
	}
	c.Entry.Verb = "reducemany"
	c.Grid, c.Block = Size{blocks(dst.Len(), threads), 1}, Size{threads, 1}
	c.many = make([]uint64, 3+MaxSources)
	c.many[0], c.many[1], c.many[2] = word(dst), uint64(dst.Len()), uint64(len(srcs))
	for i, src := range srcs {
		c.many[3+i] = word(src)
	}
	return k.launcher.Launch(c)
}
