package fuse

import (
	_ "embed"
	"fmt"
	"math"
	"strconv"
	"strings"

	"github.com/euryale-ml/euryale/backend"
)

// widen writes the conversion of a loaded element to the type in which it is computed.
func (w *writer) widen(d backend.DType, r string) string {
	switch d {
	case backend.F16:
		return w.get(f32, "cvt.f32.f16", r)
	case backend.BF16:
		high := w.get(b32, "shl.b32", w.get(b32, "cvt.u32.u16", r), "16")
		return w.get(f32, "mov.b32", high)
	}
	return r
}

// narrow writes the conversion of a value to the type of an output.
func (w *writer) narrow(d backend.DType, r string) string {
	switch d {
	case backend.F16:
		return w.get(b16, "cvt.rn.f16.f32", r)
	case backend.BF16:
		if w.ampere {
			return w.get(b16, "cvt.rn.bf16.f32", r)
		}
		b := w.get(b32, "mov.b32", r)
		odd := w.get(b32, "and.b32", w.get(b32, "shr.u32", b, "16"), "1")
		up := w.get(b32, "add.s32", w.get(b32, "add.s32", b, "32767"), odd)
		quiet := w.get(b32, "or.b32", b, "4194304")
		up = w.get(b32, "selp.b32", quiet, up, w.get(pred, "setp.nan.f32", r, r))
		return w.get(b16, "cvt.u16.u32", w.get(b32, "shr.u32", up, "16"))
	}
	return r
}

// literal returns a constant of a type as PTX writes it.
func literal(t backend.DType, x float64) string {
	switch t {
	case backend.F32:
		return fmt.Sprintf("0f%08X", math.Float32bits(float32(x)))
	case backend.F64:
		return fmt.Sprintf("0d%016X", math.Float64bits(x))
	}
	return strconv.FormatInt(int64(x), 10)
}

// constant writes a constant.
func (w *writer) constant(c Instr) string {
	text := literal(c.Type, c.float())
	if !c.Type.Float() {
		text = strconv.FormatInt(int64(c.Bits), 10)
		if c.Type == backend.I32 {
			text = strconv.FormatInt(int64(int32(c.Bits)), 10)
		}
	}
	return w.get(classOf(c.Type), "mov."+typeName(c.Type), text)
}

// operation writes one operation on one lane.
func (w *writer) operation(c Instr, args []string) string {
	t := c.Type
	switch {
	case c.Op.Rounded():
		return w.function(c, args)
	case c.Op == Cast:
		return w.cast(t, w.p.Code[c.Args[0]].Type, args[0])
	case c.Op == Where:
		return w.where(t, w.p.Code[c.Args[0]].Type, args)
	case c.Op == Uniform:
		return w.uniform(t, args, 1)[0]
	case c.Op.has(compares):
		name := map[Op]string{Less: "lt", LessEqual: "le", Greater: "gt", GreaterEqual: "ge",
			Equal: "eq", NotEqual: "ne"}[c.Op]
		if t.Float() && c.Op == NotEqual {
			name = "neu" // also with a NaN
		}
		p := w.get(pred, "setp."+name+"."+typeName(t), args...)
		return w.get(classOf(t), "selp."+typeName(t), literal(t, 1), literal(t, 0), p)
	case t.Float() && len(args) == 1:
		return w.unaryFloat(c.Op, t, args[0])
	case t.Float():
		return w.binaryFloat(c.Op, t, args[0], args[1])
	case len(args) == 1:
		return w.unaryInt(c.Op, t, args[0])
	}
	return w.binaryInt(c.Op, t, args[0], args[1])
}

func (w *writer) unaryFloat(o Op, t backend.DType, x string) string {
	c, name := classOf(t), typeName(t)
	switch o {
	case Neg, Abs:
		return w.get(c, o.String()+"."+name, x)
	case Sign:
		down := w.get(c, "selp."+name, literal(t, -1), x, w.get(pred, "setp.lt."+name, x,
			literal(t, 0)))
		return w.get(c, "selp."+name, literal(t, 1), down, w.get(pred, "setp.gt."+name, x,
			literal(t, 0)))
	case Square:
		return w.get(c, "mul.rn."+name, x, x)
	case Cube:
		return w.get(c, "mul.rn."+name, w.get(c, "mul.rn."+name, x, x), x)
	case Relu:
		return w.get(c, "selp."+name, literal(t, 0), x, w.get(pred, "setp.lt."+name, x,
			literal(t, 0)))
	case Inv:
		return w.get(c, "rcp.rn."+name, x)
	case Sqrt:
		return w.get(c, "sqrt.rn."+name, x)
	case InvSqrt:
		return w.get(c, "rcp.rn."+name, w.get(c, "sqrt.rn."+name, x))
	case Ceil:
		return w.get(c, "cvt.rpi."+name+"."+name, x)
	case Floor:
		return w.get(c, "cvt.rmi."+name+"."+name, x)
	}
	w.err = fmt.Errorf("fuse: %w: %v of %v has no instruction: add a case, or a function to "+
		"functions.cu", backend.ErrUnsupported, o, t)
	return x
}

func (w *writer) binaryFloat(o Op, t backend.DType, x, y string) string {
	c, name := classOf(t), typeName(t)
	switch o {
	case Minimum, Maximum: // the instructions order zeros, and most leave NaNs out
		if w.ampere && t == backend.F32 {
			return w.get(c, o.String()[:3]+".NaN."+name, x, y)
		}
		less := w.get(c, o.String()[:3]+"."+name, x, y)
		return w.get(c, "selp."+name, w.get(c, "add.rn."+name, x, y), less,
			w.get(pred, "setp.nan."+name, x, y))
	}
	return w.get(c, o.String()+".rn."+name, x, y)
}

func (w *writer) unaryInt(o Op, t backend.DType, x string) string {
	c, name := classOf(t), typeName(t)
	switch o {
	case Neg:
		return w.get(c, "neg."+name, x)
	case Abs:
		return w.get(c, "max."+name, x, w.get(c, "neg."+name, x))
	case Sign:
		return w.get(c, "min."+name, w.get(c, "max."+name, x, "-1"), "1")
	case Square:
		return w.get(c, "mul.lo."+name, x, x)
	case Cube:
		return w.get(c, "mul.lo."+name, w.get(c, "mul.lo."+name, x, x), x)
	}
	return w.get(c, "max."+name, x, "0") // Relu
}

func (w *writer) binaryInt(o Op, t backend.DType, x, y string) string {
	c, name := classOf(t), typeName(t)
	switch o {
	case Minimum, Maximum:
		return w.get(c, o.String()[:3]+"."+name, x, y)
	case Mul:
		return w.get(c, "mul.lo."+name, x, y)
	case Div: // by 0 is 0, and by -1 may overflow
		zero, less := w.get(pred, "setp.eq."+name, y, "0"), w.get(pred, "setp.eq."+name, y, "-1")
		safe := w.get(c, "selp."+name, "1", w.get(c, "selp."+name, "1", y, less), zero)
		quotient := w.get(c, "div."+name, x, safe)
		quotient = w.get(c, "selp."+name, w.get(c, "neg."+name, x), quotient, less)
		return w.get(c, "selp."+name, "0", quotient, zero)
	}
	return w.get(c, o.String()+"."+name, x, y)
}

func (w *writer) where(t, condition backend.DType, args []string) string {
	compare := "setp.ne."
	if condition.Float() {
		compare = "setp.neu."
	}
	p := w.get(pred, compare+typeName(condition), args[0], literal(condition, 0))
	return w.get(classOf(t), "selp."+typeName(t), args[1], args[2], p)
}

func (w *writer) cast(to, from backend.DType, x string) string {
	c, conversion := classOf(to), typeName(to)+"."+typeName(from)
	switch {
	case to == from:
		return x
	case to.Float() && from.Float() && to.Size() > from.Size():
		return w.get(c, "cvt."+conversion, x)
	case to.Float():
		return w.get(c, "cvt.rn."+conversion, x)
	case from.Float(): // devices saturate
		whole := w.get(c, "cvt.rzi."+conversion, x)
		return w.get(c, "selp."+typeName(to), "0", whole, w.get(pred, "setp.nan."+typeName(from),
			x, x))
	}
	return w.get(c, "cvt."+conversion, x)
}

// uniform writes Philox4x32-10: see [Uniform] and draw. One lane takes the word that its element
// has, four lanes take all words of the counter of the first.
func (w *writer) uniform(t backend.DType, args []string, lanes int) []string {
	halves := func(r string) (low, high string) {
		low, high = w.reg(b32), w.reg(b32)
		w.line("mov.b64 {%s, %s}, %s;", low, high, r)
		return low, high
	}
	k0, k1 := halves(args[0])
	c2, c3 := halves(args[1])
	c1, _ := halves(args[2])
	c0, _ := halves(w.get(b64, "shr.s64", args[3], "2"))
	words := w.philox([4]string{c0, c1, c2, c3}, k0, k1)
	numbers := make([]string, lanes)
	for v := range numbers {
		word := words[v]
		if lanes == 1 {
			number, _ := halves(args[3])
			odd := w.get(pred, "setp.ne.s32", w.get(b32, "and.b32", number, "1"), "0")
			upper := w.get(pred, "setp.ne.s32", w.get(b32, "and.b32", number, "2"), "0")
			word = w.get(b32, "selp.b32", w.get(b32, "selp.b32", words[3], words[2], odd),
				w.get(b32, "selp.b32", words[1], words[0], odd), upper)
		}
		if t == backend.F32 {
			x := w.get(f32, "cvt.rn.f32.u32", w.get(b32, "shr.u32", word, "8"))
			numbers[v] = w.get(f32, "mul.rn.f32", x, literal(t, 0x1p-24))
		} else {
			numbers[v] = w.get(f64, "mul.rn.f64", w.get(f64, "cvt.rn.f64.u32", word),
				literal(t, 0x1p-32))
		}
	}
	return numbers
}

// philox writes the rounds on a counter, and returns the random words.
func (w *writer) philox(c [4]string, k0, k1 string) [4]string {
	unsigned := func(x uint32) string { return strconv.FormatUint(uint64(x), 10) }
	for round := range philoxRounds {
		if round > 0 {
			k0, k1 = w.get(b32, "add.s32", k0, unsigned(philoxW0)),
				w.get(b32, "add.s32", k1, unsigned(philoxW1))
		}
		high0, low0 := w.get(b32, "mul.hi.u32", c[0], unsigned(philoxM0)),
			w.get(b32, "mul.lo.s32", c[0], unsigned(philoxM0))
		high1, low1 := w.get(b32, "mul.hi.u32", c[2], unsigned(philoxM1)),
			w.get(b32, "mul.lo.s32", c[2], unsigned(philoxM1))
		c = [4]string{
			w.get(b32, "xor.b32", w.get(b32, "xor.b32", high1, c[1]), k0), low1,
			w.get(b32, "xor.b32", w.get(b32, "xor.b32", high0, c[3]), k1), low0,
		}
	}
	return c
}

//go:embed functions.ptx
var functions string

// functionOf returns the text of the function of an instruction, between its braces.
func functionOf(c Instr) (body string, ok bool) {
	_, body, ok = strings.Cut(functions, fmt.Sprintf(" %v_%v(\n", c.Op, c.Type))
	if !ok {
		return "", false
	}
	_, body, _ = strings.Cut(body, "\n{\n")
	body, _, ok = strings.Cut(body, "\n}\n")
	return body, ok
}

// functionLines returns how many lines of functions an instruction adds to a kernel.
func functionLines(c Instr) int {
	if !c.Op.Rounded() {
		return 0
	}
	body, _ := functionOf(c)
	return strings.Count(body, "\n")
}

// function copies an elementary function: its parameters become moves from the arguments,
// its result a move to a new register, and its end a jump behind it.
func (w *writer) function(c Instr, args []string) string {
	body, ok := functionOf(c)
	if !ok && w.err == nil {
		w.err = fmt.Errorf("%w: functions.ptx has no %v of %v: make ptx", backend.ErrUnsupported,
			c.Op, c.Type)
	}
	result, end, name := w.reg(classOf(c.Type)), w.label(), typeName(c.Type)
	body = strings.ReplaceAll(body, "$L__BB", w.label()+"_")
	w.line("{")
	for line := range strings.Lines(body) {
		line = strings.TrimSpace(line)
		switch {
		case strings.HasPrefix(line, "ld.param."):
			register, param, _ := strings.Cut(strings.TrimPrefix(line, "ld.param."+name), ", [")
			number, _ := strconv.Atoi(param[strings.LastIndexByte(param, '_')+1 : len(param)-2])
			line = fmt.Sprintf("mov.%s %s, %s;", name, strings.TrimSpace(register), args[number])
		case strings.HasPrefix(line, "st.param."):
			_, value, _ := strings.Cut(line, "], ")
			line = fmt.Sprintf("mov.%s %s, %s", name, result, value)
		case line == "ret;":
			line = fmt.Sprintf("bra.uni %s;", end)
		}
		w.line("%s", line)
	}
	w.line("}")
	w.line("%s:", end)
	return result
}
