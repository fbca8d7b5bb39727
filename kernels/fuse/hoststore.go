package fuse

import (
	"slices"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/kernels"
)

// direct says whether an output is computed where it is stored.
type direct struct {
	possible bool
	value    Value
	inputs   []int // those that are read after the value is computed
	now      bool  // in the run under way
}

// directOf says which outputs can be computed where they are stored.
func (h *host) directOf(k int, out Output) direct {
	v := out.Value
	first := slices.IndexFunc(h.p.Outputs, func(o Output) bool { return !o.Folded && o.Value == v })
	c := h.p.Code[v]
	if out.Folded || first != k || !c.Op.computes() && c.Op != Load || c.Op.FoldsRows() ||
		c.Type != out.DType ||
		h.values[v] != (extent{perElement, false}) ||
		h.located(h.cursor(h.layout.outputs[k], false)) == nil {
		return direct{}
	}
	d := direct{possible: true, value: v}
	for x, last := range h.lastUses() {
		if in := h.p.Code[x]; in.Op == Load && (c.Op == Load || last > v && h.borrowed(x)) {
			d.inputs = append(d.inputs, in.Args[0])
		}
	}
	return d
}

// decide checks whether the output would overwrite an input that is read later: an output may be
// the memory of an input.
func (d *direct) decide(dst backend.Buffer, src []backend.Buffer) {
	d.now = d.possible
	for _, k := range d.inputs {
		d.now = d.now && !overlap(dst, src[k])
	}
}

func overlap(a, b backend.Buffer) bool {
	return a.Addr() < b.Addr()+uintptr(b.NBytes()) && b.Addr() < a.Addr()+uintptr(a.NBytes())
}

// toOutput makes a step compute value k in the memory of its output, if there is one where it can.
func (m *evaluator) toOutput(k Value, do blockFunc) blockFunc {
	o := slices.IndexFunc(m.direct, func(d direct) bool { return d.possible && d.value == k })
	if o < 0 {
		return do
	}
	located := m.located(m.cursor(m.layout.outputs[o], false))
	return func(lo, n int) error {
		if m.direct[o].now {
			at := located(lo)
			m.set(k, m.dst[o].Slice(at, at+n))
		} else {
			m.set(k, m.own[k])
		}
		return do(lo, n)
	}
}

// store returns the step that stores a value.
func (m *evaluator) store(k int, out Output) blockFunc {
	strides, value := m.layout.outputs[k], out.Value
	kind := m.values[value].kind
	rows := m.rows != nil && kind != perElement && strides[len(strides)-1] == 0 // once for each row
	if !rows || kind == single && !m.cut {
		value = m.each(value)
	}
	do := m.storeTo(k, m.cursor(strides, rows), value, Type(out.DType), out.DType)
	return func(lo, n int) error {
		switch {
		case m.direct[k].now:
			return nil
		case rows:
			return do(lo/m.inner, n/m.inner)
		}
		return do(lo, n)
	}
}

// storeTo returns the step that stores a value of type t to output k.
func (m *evaluator) storeTo(k int, to *cursor, value Value, t, d backend.DType) blockFunc {
	if located := m.located(to); located != nil {
		return func(lo, n int) error {
			at := located(lo)
			return narrow(m.dst[k].Slice(at, at+n), m.get(value, t, n))
		}
	}
	raw := -1
	if t != d {
		raw = m.extra(d, m.block)
	}
	return func(lo, n int) error {
		from := m.get(value, t, n)
		if raw >= 0 {
			if err := narrow(m.own[raw].Slice(0, n), from); err != nil {
				return err
			}
			from = m.own[raw].Slice(0, n)
		}
		to.seek(lo)
		scatter(m.dst[k], from, to)
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
