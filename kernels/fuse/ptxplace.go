package fuse

import (
	"fmt"
	"math/bits"
	"strconv"

	"github.com/euryale-ml/euryale/backend"
)

// coordinates is where in the loop a thread is: its coordinates along some axes, behind those of
// another place.
type coordinates struct {
	before  *coordinates
	axes    []int
	coords  []string
	offsets map[string]string // of operands, by their strides along the axes
}

// op completes the name of an instruction on indices: "add.u" is "add.u32".
func (w *writer) op(name string) string {
	if w.word == b64 {
		return name + "64"
	}
	return name + "32"
}

// toWord returns a 32-bit register as an index.
func (w *writer) toWord(r string) string {
	if w.word == b64 {
		return w.get(b64, "cvt.u64.u32", r)
	}
	return r
}

// place writes the coordinates of element i along axes, where the innermost axis of the loop
// counts in lanes.
func (w *writer) place(before *coordinates, axes []int, i string) *coordinates {
	at := &coordinates{before: before, axes: axes, coords: make([]string, len(axes)),
		offsets: map[string]string{}}
	for k := len(axes) - 1; k >= 0; k-- {
		inner := axes[k] == len(w.l.shape)-1
		extent := w.l.shape[axes[k]]
		if inner {
			extent /= w.lanes
		}
		at.coords[k] = i
		if k > 0 {
			i, at.coords[k] = w.split(i, extent)
		}
		if inner && w.lanes > 1 {
			at.coords[k] = w.get(w.word, w.op("mul.lo.u"), at.coords[k], strconv.Itoa(w.lanes))
		}
	}
	return at
}

// divide writes i / d for i below 2^31: by a multiplication, since devices have no division of
// integers.
func (w *writer) divide(i string, d int) string {
	if d&(d-1) == 0 {
		return w.get(w.word, w.op("shr.u"), i, strconv.Itoa(bits.TrailingZeros(uint(d))))
	}
	if w.word == b64 {
		return w.get(b64, "div.u64", i, strconv.Itoa(d))
	}
	// With d <= 2^s, i*m >> 31+s is exact for i < 2^31, and m < 2^32.
	s := bits.Len(uint(d))
	m := (uint64(1)<<(31+s))/uint64(d) + 1
	high := w.get(b32, "mul.hi.u32", i, strconv.FormatUint(m, 10))
	return w.get(b32, "shr.u32", high, strconv.Itoa(s-1))
}

// offset returns the offset of a place in elements, "" for 0.
func (w *writer) offset(strides []int, at *coordinates) string {
	if at == nil {
		return ""
	}
	own := make([]int, len(at.axes))
	for k, axis := range at.axes {
		own[k] = strides[axis]
	}
	// What comes before may differ where these are the same.
	key := fmt.Sprint(strides)
	if r, ok := at.offsets[key]; ok {
		return r
	}
	r := w.offset(strides, at.before)
	for k, stride := range own {
		switch {
		case stride == 0:
		case r == "" && stride == 1:
			r = at.coords[k]
		case r == "":
			r = w.get(w.word, w.op("mul.lo.s"), at.coords[k], strconv.Itoa(stride))
		default:
			r = w.get(w.word, w.op("mad.lo.s"), at.coords[k], strconv.Itoa(stride), r)
		}
	}
	at.offsets[key] = r
	return r
}

// address writes the address of an operand's element at a place.
func (w *writer) address(m memory, d backend.DType, strides []int, at *coordinates) string {
	base := m.base
	if base == "" {
		base = w.get(b64, "ld.param.u64", fmt.Sprintf("[%s]", w.param(m.param)))
		base = w.get(b64, "cvta.to.global.u64", base)
	}
	if m.offset > 0 {
		base = w.get(b64, "add.s64", base, strconv.Itoa(m.offset))
	}
	switch r := w.offset(strides, at); {
	case r == "":
		return base
	case w.word == b64:
		return w.get(b64, "mad.lo.s64", r, strconv.Itoa(d.Size()), base)
	default:
		return w.get(b64, "mad.wide.s32", r, strconv.Itoa(d.Size()), base)
	}
}

// access says how the lanes of an operand are reached: count elements in each access, and the
// number of accesses.
func (w *writer) access(d backend.DType, strides []int) (count, accesses int) {
	last := len(strides) - 1
	if strides[last] == 0 {
		return 1, 1
	}
	if strides[last] != 1 {
		return 1, w.lanes
	}
	for _, s := range strides[:last] {
		if s%w.lanes != 0 {
			return 1, w.lanes
		}
	}
	count = min(w.lanes, Alignment/d.Size())
	if d.Size() == 1 { // PTX has vectors of up to four
		count = min(count, 4)
	}
	return count, w.lanes / count
}

// cell is how PTX moves an element: its type, and the register.
func cell(d backend.DType) (name string, c class) {
	switch d {
	case backend.F32:
		return "f32", f32
	case backend.F64:
		return "f64", f64
	case backend.I32:
		return "u32", b32
	case backend.I64:
		return "u64", b64
	case backend.U8:
		return "u8", b32
	}
	return "u16", b16
}

// load writes the loads of an operand: a register for each lane, or one for all.
func (w *writer) load(m memory, d backend.DType, strides []int, at *coordinates) []string {
	count, accesses := w.access(d, strides)
	address := w.address(m, d, strides, at)
	name, c := cell(d)
	var cells []string
	for i := range accesses {
		byteOffset := i * count * strides[len(strides)-1] * d.Size()
		if d == backend.BF16 && count > 1 { // the upper halves of F32
			words := w.regs(b32, count/2)
			w.line("ld.global%s.u32 %s, [%s+%d];", vectorSuffix(len(words)), vectorOf(words),
				address, byteOffset)
			for _, word := range words {
				low, high := w.get(b32, "shl.b32", word, "16"), w.get(b32, "and.b32", word,
					"-65536")
				cells = append(cells, w.get(f32, "mov.b32", low), w.get(f32, "mov.b32", high))
			}
			continue
		}
		group := w.regs(c, count)
		cells = append(cells, group...)
		if count == 8 { // halves, in words
			words := w.regs(b32, 4)
			w.line("ld.global.v4.u32 %s, [%s+%d];", vectorOf(words), address, byteOffset)
			for v, word := range words {
				w.line("mov.b32 %s, %s;", vectorOf(group[2*v:2*v+2]), word)
			}
			continue
		}
		w.line("ld.global%s.%s %s, [%s+%d];", vectorSuffix(count), name, vectorOf(group), address,
			byteOffset)
	}
	if d == backend.BF16 && count > 1 {
		return cells
	}
	for v := range cells {
		cells[v] = w.widen(d, cells[v])
	}
	return cells
}

// store writes the stores of an output.
func (w *writer) store(m memory, d backend.DType, strides []int, values []string, at *coordinates) {
	count, accesses := w.access(d, strides)
	address := w.address(m, d, strides, at)
	name, _ := cell(d)
	for i := range accesses {
		lane := func(v int) string { return values[min(i*count+v, len(values)-1)] }
		byteOffset := i * count * strides[len(strides)-1] * d.Size()
		if d == backend.BF16 && count > 1 && w.ampere { // two at once, the upper one first
			words := make([]string, count/2)
			for k := range words {
				words[k] = w.get(b32, "cvt.rn.bf16x2.f32", lane(2*k+1), lane(2*k))
			}
			w.line("st.global%s.u32 [%s+%d], %s;", vectorSuffix(len(words)), address, byteOffset,
				vectorOf(words))
			continue
		}
		group := make([]string, count)
		for v := range group {
			group[v] = w.narrow(d, lane(v))
		}
		if count == 8 {
			words := w.regs(b32, 4)
			for v, word := range words {
				w.line("mov.b32 %s, %s;", word, vectorOf(group[2*v:2*v+2]))
			}
			w.line("st.global.v4.u32 [%s+%d], %s;", address, byteOffset, vectorOf(words))
			continue
		}
		w.line("st.global%s.%s [%s+%d], %s;", vectorSuffix(count), name, address, byteOffset,
			vectorOf(group))
	}
}

func vectorSuffix(count int) string {
	if count == 1 {
		return ""
	}
	return fmt.Sprintf(".v%d", count)
}

func vectorOf(group []string) string {
	if len(group) == 1 {
		return group[0]
	}
	s := "{" + group[0]
	for _, r := range group[1:] {
		s += ", " + r
	}
	return s + "}"
}

// indexValue writes an index expression: a register for each lane, or one for all.
func (w *writer) indexValue(strides []int, at *coordinates) []string {
	r := w.offset(strides, at)
	switch {
	case r == "":
		r = w.get(b64, "mov.u64", "0")
	case w.word == b32:
		r = w.get(b64, "cvt.s64.s32", r)
	}
	inner := strides[len(strides)-1]
	lanes := []string{r}
	for v := 1; v < w.lanes && inner != 0; v++ {
		lanes = append(lanes, w.get(b64, "add.s64", r, strconv.Itoa(v*inner)))
	}
	return lanes
}
