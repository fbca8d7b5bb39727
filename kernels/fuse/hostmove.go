package fuse

import (
	"slices"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/kernels"
)

// load returns the step that loads an input. A run of memory whose elements are computed
// in their own type is not copied: the value is that memory. The value of an output is
// copied, since the memory may be that of another output, which is stored first.
func (h *host) load(k int, c Instr) step {
	input := c.Args[0]
	d, own := h.p.Inputs[input].DType, h.get(k, c.Type, h.block)
	from := h.cursor(h.layout.inputs[input], h.alike(k))
	stored := slices.ContainsFunc(h.p.Outputs, func(o Output) bool { return o.Value == k })
	if from.dense() {
		if d == c.Type && !stored {
			return func(lo, n int) error { h.set(k, h.src[input].Slice(lo, lo+n)); return nil }
		}
		return func(lo, n int) error { return widen(own.Slice(0, n), h.src[input].Slice(lo, lo+n)) }
	}
	raw := own
	if d != c.Type {
		raw = backend.Of(make([]float64, h.block)).As(d).Slice(0, h.block)
	}
	return func(lo, n int) error {
		from.seek(lo)
		gather(raw.Slice(0, n), h.src[input], from)
		if d == c.Type {
			return nil
		}
		return widen(own.Slice(0, n), raw.Slice(0, n))
	}
}

// widen converts elements to the type in which they are computed.
func widen(dst, src backend.Buffer) error {
	if dst.DType() == src.DType() {
		return kernels.Host{}.Copy(dst, src)
	}
	if src.DType() != backend.U8 {
		return kernels.Host{}.Cast(dst, src)
	}
	d, s := backend.View[int32](dst), backend.View[byte](src)
	for i, x := range s {
		d[i] = int32(x)
	}
	return nil
}

// gather copies elements from the cursor on into a block; elements are only moved.
func gather(block, from backend.Buffer, c *cursor) {
	switch block.DType().Size() {
	case 1:
		gatherOf(backend.View[byte](block), backend.View[byte](from), c)
	case 2:
		gatherOf(backend.View[backend.Float16](block), backend.View[backend.Float16](from), c)
	case 4:
		gatherOf(backend.View[float32](block), backend.View[float32](from), c)
	case 8:
		gatherOf(backend.View[float64](block), backend.View[float64](from), c)
	}
}

func gatherOf[T any](block, from []T, c *cursor) {
	for stride := c.run(); len(block) > 0; {
		at, n := c.next(len(block))
		switch stride {
		case 0:
			fill(block[:n], from[at])
		case 1:
			copy(block[:n], from[at:])
		default:
			for i := range block[:n] {
				block[i] = from[at+i*stride]
			}
		}
		block = block[n:]
	}
}

// scatter is the way back from a block to an output.
func scatter(to, block backend.Buffer, c *cursor) {
	switch block.DType().Size() {
	case 1:
		scatterOf(backend.View[byte](to), backend.View[byte](block), c)
	case 2:
		scatterOf(backend.View[backend.Float16](to), backend.View[backend.Float16](block), c)
	case 4:
		scatterOf(backend.View[float32](to), backend.View[float32](block), c)
	case 8:
		scatterOf(backend.View[float64](to), backend.View[float64](block), c)
	}
}

func scatterOf[T any](to, block []T, c *cursor) {
	for stride := c.run(); len(block) > 0; {
		at, n := c.next(len(block))
		if stride == 1 {
			copy(to[at:], block[:n])
		} else {
			for i, x := range block[:n] {
				to[at+i*stride] = x
			}
		}
		block = block[n:]
	}
}

// index returns the step that computes an index expression.
func (h *host) index(k int, c Instr) step {
	from := h.cursor(h.layout.indices[c.Args[0]], h.alike(k))
	return func(lo, n int) error {
		from.seek(lo)
		for block := h.i64[k][:n]; len(block) > 0; {
			at, count := from.next(len(block))
			for i := range block[:count] {
				block[i] = int64(at + i*from.run())
			}
			block = block[count:]
		}
		return nil
	}
}

// store returns the step that stores a value.
func (h *host) store(k int, out Output) step {
	t, strides, value := Type(out.DType), h.layout.outputs[k], out.Value
	once := h.alike(value) && strides[len(strides)-1] == 0
	if !once {
		value = h.each(value)
	}
	to := h.cursor(strides, once)
	do := h.storeTo(k, to, value, t, out.DType)
	if once {
		return h.once(value, do)
	}
	return do
}

// storeTo returns the step that stores a value of type t to output k.
func (h *host) storeTo(k int, to *cursor, value Value, t, d backend.DType) step {
	if to.dense() {
		return func(lo, n int) error { return narrow(h.dst[k].Slice(lo, lo+n), h.get(value, t, n)) }
	}
	raw := backend.Of(make([]float64, h.block)).As(d).Slice(0, h.block)
	return func(lo, n int) error {
		from := h.get(value, t, n)
		if t != d {
			if err := narrow(raw.Slice(0, n), from); err != nil {
				return err
			}
			from = raw.Slice(0, n)
		}
		to.seek(lo)
		scatter(h.dst[k], from, to)
		return nil
	}
}

// narrow converts values to the type of an output.
func narrow(dst, src backend.Buffer) error {
	if dst.DType() == src.DType() {
		return kernels.Host{}.Copy(dst, src)
	}
	if dst.DType() != backend.U8 {
		return kernels.Host{}.Cast(dst, src)
	}
	d, s := backend.View[byte](dst), backend.View[int32](src)
	for i, x := range s {
		d[i] = byte(x)
	}
	return nil
}
