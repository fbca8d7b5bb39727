package fuse

import (
	"fmt"
	"strconv"
	"strings"

	"github.com/euryale-ml/euryale/backend"
)

// class is a class of registers.
type class string

// The classes, with their names in PTX. The names of registers differ from those of copied
// functions.
const (
	pred class = "vp"
	b16  class = "vh"
	b32  class = "vr"
	b64  class = "vl"
	f32  class = "vf"
	f64  class = "vd"
)

var classTypes = []struct {
	class class
	name  string
}{{pred, "pred"}, {b16, "b16"}, {b32, "b32"}, {b64, "b64"}, {f32, "f32"}, {f64, "f64"}}

// classOf returns the class of values of a type.
func classOf(t backend.DType) class {
	return map[backend.DType]class{backend.F32: f32, backend.F64: f64, backend.I32: b32,
		backend.I64: b64}[t]
}

// writer writes one entry.
type writer struct {
	ampere  bool // whether the device is one
	name    string
	p       *Program
	l       *layout
	lanes   int
	word    class // of indices and offsets in elements: b32 where they fit
	inputs  []memory
	outputs []memory
	params  int
	shared  bool // whether threads fold together
	held    int  // elements of shared memory that each has, 1 if it is 0
	threads int  // of a block
	beside  int  // blocks that a multiprocessor has at once, which bounds registers; 0 for any

	body   strings.Builder
	used   map[class]int
	labels int
	err    error
}

// memory is where an operand begins: a parameter of the entry, and bytes behind it, or the address
// in a register.
type memory struct {
	param, offset int
	base          string
}

func newWriter(name string, p *Program, l *layout, ampere bool) *writer {
	w := &writer{ampere: ampere, name: name, p: p, l: l, lanes: 1, word: b32, used: map[class]int{},
		threads: threads}
	w.params = len(p.Outputs) + len(p.Inputs) + 1
	for k := range p.Outputs {
		w.outputs = append(w.outputs, memory{param: k})
	}
	for k := range p.Inputs {
		w.inputs = append(w.inputs, memory{param: len(p.Outputs) + k})
	}
	all, _ := l.size()
	if all >= 1<<30 {
		w.word = b64
	}
	for _, strides := range l.all() {
		last := 0
		for k, s := range strides {
			last += max(s, -s) * (l.shape[k] - 1)
		}
		if last >= 1<<30 {
			w.word = b64
		}
	}
	return w
}

func (w *writer) line(format string, args ...any) {
	w.body.WriteByte('\t')
	fmt.Fprintf(&w.body, format, args...)
	w.body.WriteByte('\n')
}

// reg returns a new register.
func (w *writer) reg(c class) string {
	w.used[c]++
	return "%" + string(c) + strconv.Itoa(w.used[c]-1)
}

// regs returns n new registers.
func (w *writer) regs(c class, n int) []string {
	list := make([]string, n)
	for i := range list {
		list[i] = w.reg(c)
	}
	return list
}

func (w *writer) label() string {
	w.labels++
	return fmt.Sprintf("$L%d", w.labels)
}

// get writes an instruction with a new register for its result. It writes most lines, so it formats
// nothing.
func (w *writer) get(c class, instruction string, args ...string) string {
	r := w.reg(c)
	for _, text := range []string{"\t", instruction, " ", r} {
		w.body.WriteString(text)
	}
	for _, arg := range args {
		w.body.WriteString(", ")
		w.body.WriteString(arg)
	}
	w.body.WriteString(";\n")
	return r
}

// entry returns the whole entry.
func (w *writer) entry() string {
	var b strings.Builder
	fmt.Fprintf(&b, ".visible .entry %s(\n", w.name)
	for k := range w.params {
		if k > 0 {
			b.WriteString(",\n")
		}
		fmt.Fprintf(&b, "\t.param .u64 %s", w.param(k))
	}
	fmt.Fprintf(&b, "\n)\n.maxntid %d, 1, 1\n", w.threads)
	if w.beside > 0 {
		fmt.Fprintf(&b, ".minnctapersm %d\n", w.beside)
	}
	b.WriteString("{\n")
	for _, c := range classTypes {
		if n := w.used[c.class]; n > 0 {
			fmt.Fprintf(&b, "\t.reg .%s %%%s<%d>;\n", c.name, c.class, n)
		}
	}
	if w.shared {
		fmt.Fprintf(&b, "\t.shared .align 8 .b8 held[%d];\n", 8*w.threads*max(w.held, 1))
	}
	b.WriteString(w.body.String())
	b.WriteString("\tret;\n}\n")
	return b.String()
}

func (w *writer) param(k int) string { return fmt.Sprintf("%s_param_%d", w.name, k) }
