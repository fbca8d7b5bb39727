package fuse_test

import (
	"encoding/binary"
	"fmt"
	"math"
	"math/bits"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/euryale-ml/euryale/internal/testing/require"
)

// machine runs the PTX that package fuse writes: blocks one after the other, the threads of a block
// in turns between barriers. Registers are 64 bits. Memory that is not of a region, or not aligned
// to the access, ends a run.
type machine struct {
	entries map[string]*code
	regions []region
}

// region is memory of a kernel at an address.
type region struct {
	base  uint64
	bytes []byte
}

// code is an entry.
type code struct {
	params    map[string]int
	registers int
	shared    int // bytes
	steps     []instruction
}

// instruction returns the number of the next one; see next, barrier and exit.
type instruction func(t *thread) int

const (
	next    = -1
	barrier = -2
	exit    = -3
)

// thread is one of a block.
type thread struct {
	m              *machine
	r              []uint64
	params         []uint64
	shared         []byte
	tid, cta, ctas uint64
	block          []thread
	given          uint64 // to others of the warp
	at             int
	done           bool
}

// launch runs an entry.
func (m *machine) launch(entry string, blocks, threads int, params []uint64) error {
	c := m.entries[entry]
	if c == nil || len(c.params) != len(params) {
		return fmt.Errorf("no entry %s of %d parameters", entry, len(params))
	}
	for b := range blocks {
		shared := make([]byte, c.shared)
		all := make([]thread, threads)
		for i := range all {
			all[i] = thread{m: m, r: make([]uint64, c.registers), params: params, shared: shared,
				tid: uint64(i), cta: uint64(b), ctas: uint64(blocks), block: all}
		}
		if err := c.run(all); err != nil {
			return fmt.Errorf("%s, block %d: %w", entry, b, err)
		}
	}
	return nil
}

// run runs the threads of a block to their ends.
func (c *code) run(all []thread) (err error) {
	defer func() {
		if wrong := recover(); wrong != nil {
			err = fmt.Errorf("%v", wrong)
		}
	}()
	for running := len(all); running > 0; {
		waiting := 0
		for i := range all {
			t := &all[i]
			if t.done {
				continue
			}
			if c.until(t) == exit {
				t.done = true
				running--
			} else {
				waiting++
			}
		}
		if waiting != 0 && waiting != len(all) {
			return fmt.Errorf("%d of %d threads are at a barrier", waiting, len(all))
		}
	}
	return nil
}

// until runs a thread up to a barrier or its end.
func (c *code) until(t *thread) int {
	for {
		to := c.steps[t.at](t)
		t.at++
		switch {
		case to == barrier || to == exit:
			return to
		case to >= 0:
			t.at = to
		}
	}
}

// memory returns the bytes of an access.
func (t *thread) memory(shared bool, address uint64, size int) []byte {
	if address%uint64(size) != 0 {
		panic(fmt.Sprintf("an access of %d bytes at %#x", size, address))
	}
	if shared {
		return t.shared[address : address+uint64(size)]
	}
	for _, r := range t.m.regions {
		if at := address - r.base; address >= r.base && at+uint64(size) <= uint64(len(r.bytes)) {
			return r.bytes[at : at+uint64(size)]
		}
	}
	panic(fmt.Sprintf("an access of %d bytes at %#x, which is no operand's", size, address))
}

// ---- the text ----

// parser reads one entry. Scopes are the registers of nested braces.
type parser struct {
	code   *code
	scopes []map[string]int
	labels map[string]int
	fix    []func()
}

var (
	entryName   = regexp.MustCompile(`^\.visible \.entry (\w+)\($`)
	paramName   = regexp.MustCompile(`^\.param \.u64 (\w+),?$`)
	registers   = regexp.MustCompile(`^\.reg \.\w+\s+(%\w+)<(\d+)>;$`)
	sharedBytes = regexp.MustCompile(`^\.shared \.align 8 \.b8 held\[(\d+)\];$`)
	// clang takes the upper half of a register by a scope with its own register.
	upperHalf = regexp.MustCompile(`^{ \.reg \.b32 tmp; mov\.b64 {tmp, (%\w+)}, (%\w+); }$`)
	statement = regexp.MustCompile(`^(?:@(!?)(%\w+) )?([a-z][\w.]*)(?:\s+(.*))?;$`)
)

func parse(t *testing.T, text string) *machine {
	t.Helper()
	m := &machine{entries: map[string]*code{}}
	var p *parser
	for line := range strings.Lines(text) {
		line = strings.TrimSpace(line)
		if name := entryName.FindStringSubmatch(line); name != nil {
			p = &parser{code: &code{params: map[string]int{}}, labels: map[string]int{}}
			m.entries[name[1]] = p.code
		} else if p != nil {
			p.line(t, line)
		}
	}
	return m
}

func (p *parser) line(t *testing.T, line string) {
	t.Helper()
	switch {
	case line == "" || line == ")" || strings.HasPrefix(line, ".maxntid") ||
		strings.HasPrefix(line, ".minnctapersm"):
	case sharedBytes.MatchString(line):
		p.code.shared, _ = strconv.Atoi(sharedBytes.FindStringSubmatch(line)[1])
	case line == "{":
		p.scopes = append(p.scopes, map[string]int{})
	case line == "}":
		if p.scopes = p.scopes[:len(p.scopes)-1]; len(p.scopes) == 0 {
			for _, fix := range p.fix {
				fix()
			}
		}
	case strings.HasSuffix(line, ":"):
		p.labels[strings.TrimSuffix(line, ":")] = len(p.code.steps)
	case paramName.MatchString(line):
		p.code.params[paramName.FindStringSubmatch(line)[1]] = len(p.code.params)
	case registers.MatchString(line):
		found := registers.FindStringSubmatch(line)
		n, _ := strconv.Atoi(found[2])
		for i := range n {
			p.scopes[len(p.scopes)-1][found[1]+strconv.Itoa(i)] = p.code.registers
			p.code.registers++
		}
	case upperHalf.MatchString(line):
		found := upperHalf.FindStringSubmatch(line)
		p.code.steps = append(p.code.steps,
			p.instruction("shr.u64", []string{found[1], found[2], "32"}))
	default:
		p.statement(t, line)
	}
}

// statement adds one instruction, with its guard.
func (p *parser) statement(t *testing.T, line string) {
	t.Helper()
	found := statement.FindStringSubmatch(line)
	require.That(t, found != nil, "not PTX: %s", line)
	step := p.instruction(found[3], split(found[4]))
	require.That(t, step != nil, "not known: %s", line)
	if found[2] != "" {
		guard, on, do := p.register(found[2]), uint64(1), step
		if found[1] == "!" {
			on = 0
		}
		step = func(t *thread) int {
			if t.r[guard] == on {
				return do(t)
			}
			return next
		}
	}
	p.code.steps = append(p.code.steps, step)
}

// split separates operands at commas outside braces.
func split(text string) (list []string) {
	depth, from := 0, 0
	for i, c := range text + "," {
		switch {
		case c == '{':
			depth++
		case c == '}':
			depth--
		case c == ',' && depth == 0:
			list = append(list, strings.TrimSpace(text[from:i]))
			from = i + 1
		}
	}
	return list
}

func (p *parser) register(name string) int {
	for i := len(p.scopes) - 1; i >= 0; i-- {
		if r, ok := p.scopes[i][name]; ok {
			return r
		}
	}
	panic("no register " + name)
}

// group returns the registers of {a, b}, or of a.
func (p *parser) group(text string) (list []int) {
	for _, name := range split(strings.Trim(text, "{}")) {
		list = append(list, p.register(name))
	}
	return list
}

// operand returns what reads a register, a special register or a constant.
func (p *parser) operand(text string) func(t *thread) uint64 {
	switch {
	case text == "%tid.x":
		return func(t *thread) uint64 { return t.tid }
	case text == "%ctaid.x":
		return func(t *thread) uint64 { return t.cta }
	case text == "%nctaid.x":
		return func(t *thread) uint64 { return t.ctas }
	case text[0] == '%':
		r := p.register(text)
		return func(t *thread) uint64 { return t.r[r] }
	}
	x := constant(text)
	return func(*thread) uint64 { return x }
}

func constant(text string) uint64 {
	if text == "held" {
		return 0
	}
	if strings.HasPrefix(text, "0f") || strings.HasPrefix(text, "0d") {
		x, err := strconv.ParseUint(text[2:], 16, 64)
		if err != nil {
			panic(err)
		}
		return x
	}
	if x, err := strconv.ParseInt(text, 10, 64); err == nil {
		return uint64(x)
	}
	x, err := strconv.ParseUint(text, 10, 64)
	if err != nil {
		panic(err)
	}
	return x
}

// shuffle adds the first half of an exchange among a warp, which all threads of a block do, and
// returns the other one. The fourth operand has the segments of the warp above its clamp.
func (p *parser) shuffle(mode string, args []string) instruction {
	dst, x, other, segment := p.register(args[0]), p.operand(args[1]), constant(args[2]),
		constant(args[3])>>8
	p.code.steps = append(p.code.steps, func(t *thread) int {
		t.given = x(t)
		return barrier
	})
	return func(t *thread) int {
		from := t.tid ^ other
		if mode == "idx" {
			from = t.tid&^31 | t.tid&segment | other
		}
		t.r[dst] = t.block[from].given
		return barrier
	}
}

// instruction returns one instruction, nil if it is not known.
func (p *parser) instruction(op string, args []string) instruction {
	parts := strings.Split(op, ".")
	switch parts[0] {
	case "ret":
		return func(*thread) int { return exit }
	case "bar":
		return func(*thread) int { return barrier }
	case "bra":
		to := new(int)
		p.fix = append(p.fix, func() {
			at, ok := p.labels[args[0]]
			if !ok {
				panic("no label " + args[0])
			}
			*to = at
		})
		return func(*thread) int { return *to }
	case "ld", "st":
		return p.access(parts, args)
	case "prefetch":
		address := p.operand(strings.Trim(args[0], "[]"))
		return func(t *thread) int {
			t.memory(false, address(t), 1)
			return next
		}
	case "shfl":
		return p.shuffle(parts[2], args)
	case "mov":
		if args[0][0] == '{' || args[1][0] == '{' {
			return p.halves(widthOf(parts)/2, args)
		}
	}
	f := evaluator(parts)
	if f == nil {
		return nil
	}
	dst := p.register(args[0])
	var from [3]func(t *thread) uint64
	for i := range from {
		from[i] = func(*thread) uint64 { return 0 }
		if i+1 < len(args) {
			from[i] = p.operand(args[i+1])
		}
	}
	return func(t *thread) int {
		t.r[dst] = f(from[0](t), from[1](t), from[2](t))
		return next
	}
}

// halves returns a move between a register and two of half its width.
func (p *parser) halves(width int, args []string) instruction {
	mask := uint64(1)<<width - 1
	if args[0][0] == '{' {
		halves, from := p.group(args[0]), p.operand(args[1])
		return func(t *thread) int {
			x := from(t)
			t.r[halves[0]], t.r[halves[1]] = x&mask, x>>width
			return next
		}
	}
	dst, halves := p.register(args[0]), p.group(args[1])
	return func(t *thread) int {
		t.r[dst] = t.r[halves[0]]&mask | t.r[halves[1]]&mask<<width
		return next
	}
}

// widthOf returns the bits of an instruction's type.
func widthOf(parts []string) int {
	width, err := strconv.Atoi(parts[len(parts)-1][1:])
	if err != nil {
		panic(err)
	}
	return width
}

// access returns a load or a store.
func (p *parser) access(parts, args []string) instruction {
	size := widthOf(parts) / 8
	if parts[1] == "param" {
		dst, number := p.register(args[0]), p.code.params[strings.Trim(args[1], "[]")]
		return func(t *thread) int { t.r[dst] = t.params[number]; return next }
	}
	shared, place, data := parts[1] == "shared", args[1], args[0]
	if parts[0] == "st" {
		place, data = args[0], args[1]
	}
	base, offset, _ := strings.Cut(strings.Trim(place, "[]"), "+")
	from, plus, group := p.operand(base), constant(offset), p.group(data)
	return func(t *thread) int {
		memory := t.memory(shared, from(t)+plus, size*len(group))
		for i, r := range group {
			var word [8]byte
			cell := memory[i*size : (i+1)*size]
			if parts[0] == "ld" {
				copy(word[:], cell)
				t.r[r] = binary.LittleEndian.Uint64(word[:])
			} else {
				binary.LittleEndian.PutUint64(word[:], t.r[r])
				copy(cell, word[:])
			}
		}
		return next
	}
}

// ---- what instructions compute ----

type function = func(a, b, c uint64) uint64

// evaluator returns what an instruction computes from its operands' bits.
func evaluator(parts []string) function {
	t := parts[len(parts)-1]
	switch parts[0] {
	case "cvt":
		return conversion(parts[1:])
	case "setp":
		return comparison(parts[1], t)
	case "selp":
		return func(a, b, c uint64) uint64 {
			if c&1 != 0 {
				return a
			}
			return b
		}
	case "mov", "cvta":
		return func(a, _, _ uint64) uint64 { return a }
	}
	if len(parts) > 1 && parts[1] == "NaN" { // which is not left out
		parts[0] += ".NaN"
	}
	if f := floating(parts[0], t == "f32"); slices.Contains(parts, "sat") {
		return func(a, b, c uint64) uint64 {
			x := to32(f(a, b, c))
			return from32(float32(min(1, ignoreNaN(0, x, max(0, x)))))
		}
	}
	if t == "f32" || t == "f64" {
		return floating(parts[0], t == "f32")
	}
	return integral(parts)
}

func floating(op string, single bool) function {
	f := map[string]func(a, b, c float64) float64{
		"add": func(a, b, _ float64) float64 {
			return a + b
		}, "sub": func(a, b, _ float64) float64 { return a - b },
		"mul": func(a, b, _ float64) float64 {
			return a * b
		}, "div": func(a, b, _ float64) float64 { return a / b },
		"fma": math.FMA, "rcp": func(a, _, _ float64) float64 { return 1 / a },
		"sqrt": func(a, _, _ float64) float64 {
			return math.Sqrt(a)
		}, "ex2": func(a, _, _ float64) float64 { return math.Exp2(a) },
		"abs": func(a, _, _ float64) float64 {
			return math.Abs(a)
		}, "neg": func(a, _, _ float64) float64 { return -a },
		"min": func(a, b, _ float64) float64 { return ignoreNaN(a, b, min(a, b)) },
		"max": func(a, b, _ float64) float64 { return ignoreNaN(a, b, max(a, b)) },
		"min.NaN": func(a, b, _ float64) float64 {
			return min(a, b)
		}, "max.NaN": func(a, b, _ float64) float64 { return max(a, b) },
	}[op]
	switch {
	case f == nil:
		return nil
	case single: // through float64, which rounds the same but for fma
		return func(a, b, c uint64) uint64 { return from32(float32(f(to32(a), to32(b), to32(c)))) }
	}
	return func(a, b, c uint64) uint64 {
		return math.Float64bits(f(math.Float64frombits(a), math.Float64frombits(b),
			math.Float64frombits(c)))
	}
}

func to32(x uint64) float64   { return float64(math.Float32frombits(uint32(x))) }
func from32(x float32) uint64 { return uint64(math.Float32bits(x)) }

// ignoreNaN is how PTX treats NaNs in min and max.
func ignoreNaN(a, b, result float64) float64 {
	switch {
	case a != a:
		return b
	case b != b:
		return a
	}
	return result
}

// extend returns the integer of a type that a register holds.
func extend(t string, x uint64) uint64 {
	switch t {
	case "s32":
		return uint64(int64(int32(x)))
	case "u32", "b32":
		return uint64(uint32(x))
	case "u16":
		return uint64(uint16(x))
	}
	return x
}

// cut returns a result as a register of a type holds it.
func cut(t string, x uint64) uint64 {
	if strings.HasSuffix(t, "32") {
		return uint64(uint32(x))
	}
	return x
}

func integral(parts []string) function {
	op, t := parts[0], parts[len(parts)-1]
	signed, wide, width := t[0] == 's', parts[1] == "wide", uint64(64)
	if strings.HasSuffix(t, "32") {
		width = 32
	}
	f := map[string]function{
		"add": func(a, b, _ uint64) uint64 { return a + b }, "sub": func(a, b, _ uint64) uint64 {
			return a - b
		},
		"mul": func(a, b, _ uint64) uint64 { return a * b }, "mad": func(a, b, c uint64) uint64 {
			return a*b + c
		},
		"and": func(a, b, _ uint64) uint64 { return a & b }, "or": func(a, b, _ uint64) uint64 {
			return a | b
		},
		"xor": func(a, b, _ uint64) uint64 { return a ^ b }, "neg": func(a, _, _ uint64) uint64 {
			return -a
		},
		"not": func(a, _, _ uint64) uint64 { return ^a & 1 },
		"shl": func(a, b, _ uint64) uint64 { return a << b },
		"div": func(a, b, _ uint64) uint64 { return quotient(signed, a, b) },
		"min": func(a, b, _ uint64) uint64 { return pick(signed, a, b, true) },
		"max": func(a, b, _ uint64) uint64 { return pick(signed, a, b, false) },
		"shr": func(a, b, _ uint64) uint64 {
			if signed {
				return uint64(int64(a) >> b)
			}
			return a >> b
		},
	}[op]
	if op == "mul" && parts[1] == "hi" {
		f = func(a, b, _ uint64) uint64 {
			high, low := bits.Mul64(a, b)
			return high<<(64-width) | low>>width
		}
	}
	if f == nil {
		return nil
	}
	return func(a, b, c uint64) uint64 {
		if wide {
			return f(extend(t, a), extend(t, b), c)
		}
		return cut(t, f(extend(t, a), extend(t, b), extend(t, c)))
	}
}

func quotient(signed bool, a, b uint64) uint64 {
	if signed {
		return uint64(int64(a) / int64(b))
	}
	return a / b
}

func pick(signed bool, a, b uint64, less bool) uint64 {
	if (signed && int64(a) < int64(b) || !signed && a < b) == less {
		return a
	}
	return b
}

// comparison returns 1 or 0. Comparisons of floats that end in u are also true of a NaN.
func comparison(op, t string) function {
	truth := func(b bool) uint64 {
		if b {
			return 1
		}
		return 0
	}
	if t[0] != 'f' {
		return func(a, b, _ uint64) uint64 {
			a, b = extend(t, a), extend(t, b)
			less := a < b
			if t[0] == 's' {
				less = int64(a) < int64(b)
			}
			return truth(holds(op, less, a == b, !less && a != b))
		}
	}
	return func(a, b, _ uint64) uint64 {
		x, y := math.Float64frombits(a), math.Float64frombits(b)
		if t == "f32" {
			x, y = to32(a), to32(b)
		}
		name, unordered := strings.CutSuffix(op, "u")
		if x != x || y != y {
			return truth(unordered || op == "nan")
		}
		return truth(holds(name, x < y, x == y, x > y))
	}
}

func holds(op string, less, equal, greater bool) bool {
	return map[string]bool{"lt": less, "le": less || equal, "gt": greater, "ge": greater ||
		equal, "eq": equal, "ne": !equal}[op]
}

// conversion is cvt of [rounding], destination and source.
func conversion(parts []string) function {
	rounding, d, s := "", parts[len(parts)-2], parts[len(parts)-1]
	if len(parts) == 3 {
		rounding = parts[0]
	}
	read := func(x uint64) float64 { return math.Float64frombits(x) }
	switch s {
	case "f32":
		read = to32
	case "f16":
		read = func(x uint64) float64 { return half(uint16(x)) }
	}
	switch {
	case d == "bf16":
		return func(a, _, _ uint64) uint64 { return toBrain(a) }
	case d == "bf16x2":
		return func(a, b, _ uint64) uint64 { return toBrain(a)<<16 | toBrain(b) }
	case s[0] != 'f' && d[0] != 'f':
		return func(a, _, _ uint64) uint64 { return cut(d, extend(s, a)) }
	case s[0] != 'f':
		return func(a, _, _ uint64) uint64 { return fromInteger(d, s[0] == 's', extend(s, a)) }
	case d == "f16":
		return func(a, _, _ uint64) uint64 { return toHalf(float32(read(a))) }
	case d[0] == 'f':
		round := map[string]func(float64) float64{"rpi": math.Ceil, "rmi": math.Floor,
			"rzi": math.Trunc, "rni": math.RoundToEven}[rounding]
		return func(a, _, _ uint64) uint64 {
			x := read(a)
			if round != nil {
				x = round(x)
			}
			if d == "f32" {
				return from32(float32(x))
			}
			return math.Float64bits(x)
		}
	}
	return func(a, _, _ uint64) uint64 { return saturate(d, math.Trunc(read(a))) }
}

// toBrain rounds the bits of a float32 to bfloat16, as a GPU does: a NaN becomes one with all bits
// set but the sign.
func toBrain(x uint64) uint64 {
	if f := to32(x); f != f {
		return 0x7fff
	}
	return (x + 0x7fff + x>>16&1) >> 16
}

func fromInteger(d string, signed bool, x uint64) uint64 {
	switch {
	case d == "f32" && signed:
		return from32(float32(int64(x)))
	case d == "f32":
		return from32(float32(x))
	case signed:
		return math.Float64bits(float64(int64(x)))
	}
	return math.Float64bits(float64(x))
}

// saturate converts to an integer as a GPU does; NaN gives a number that nobody should use.
func saturate(d string, x float64) uint64 {
	least, most := int64(math.MinInt64), int64(math.MaxInt64)
	if d == "s32" {
		least, most = math.MinInt32, math.MaxInt32
	}
	switch {
	case x != x:
		return cut(d, uint64(least))
	case x <= float64(least):
		return cut(d, uint64(least))
	case x >= float64(most):
		return cut(d, uint64(most))
	}
	return cut(d, uint64(int64(x)))
}
