package fuse

import (
	"math"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/kernels/simd"
)

// inVectors reports whether vector instructions compute an instruction.
func (h *host) inVectors(c Instr) bool { return h.level > simd.Go && h.hasVectors(c) }

// hasVectors reports whether there are vector instructions for an instruction, on processors that
// have any.
func (h *host) hasVectors(c Instr) bool {
	switch {
	case !c.Type.Float() || c.Op == Where && h.typeOf(c.Args[0]) != c.Type:
		return false
	case c.Type == backend.F32 && c.Op.has(vectors32):
		return true
	}
	return c.Op.has(vectors)
}

// compute returns the step of an instruction. Operands have as many elements as the result, but
// vector instructions also take one element for all.
func (m *evaluator) compute(k int, c Instr) blockFunc {
	for i, x := range c.Args[:c.Op.Operands()] {
		kind := m.values[x].kind
		if kind != m.values[k].kind && !(kind == single && m.inVectors(c)) {
			c.Args[i] = m.each(x)
		}
	}
	do := m.instruction(k, c)
	if m.values[k].kind == perElement {
		return do
	}
	return func(lo, n int) error { return do(lo, m.count(k, n)) }
}

// instruction returns the step that computes the first n elements.
func (m *evaluator) instruction(k int, c Instr) blockFunc {
	t, a := c.Type, c.Args
	switch {
	case m.inVectors(c) && t == backend.F32:
		return inVectors(m.level, m.f32, k, c)
	case m.inVectors(c):
		return inVectors(m.level, m.f64, k, c)
	case c.Op == Cast:
		return m.cast(k, c)
	case c.Op == Where:
		return m.where(k, c)
	case c.Op == Uniform && t == backend.F32:
		return random(m.f32, m.i64, k, a, func(w uint32) float32 { return float32(w>>8) * 0x1p-24 })
	case c.Op == Uniform:
		return random(m.f64, m.i64, k, a, func(w uint32) float64 { return float64(w) * 0x1p-32 })
	case t == backend.F32:
		return loopOf(m.f32, k, c)
	case t == backend.F64:
		return loopOf(m.f64, k, c)
	case t == backend.I32:
		return loopOf(m.i32, k, c)
	}
	return loopOf(m.i64, k, c)
}

// loopOf returns the step of an instruction that is a loop in Go.
func loopOf[T number](v [][]T, k int, c Instr) blockFunc {
	op, a := simd.Op(c.Op), c.Args
	if c.Op.Operands() == 2 {
		return func(_, n int) error {
			simd.BinaryLoop(op, v[k][:n], v[a[0]], v[a[1]])
			return nil
		}
	}
	return func(_, n int) error { simd.UnaryLoop(op, v[k][:n], v[a[0]]); return nil }
}

// inVectors returns the step of an instruction for which there are vector instructions.
func inVectors[T simd.Float](level simd.Level, v [][]T, k int, c Instr) blockFunc {
	op, a := simd.Op(c.Op), c.Args
	switch c.Op.Operands() {
	case 3: // Where
		return func(_, n int) error {
			simd.Where(level, v[k][:n], v[a[0]], v[a[1]], v[a[2]])
			return nil
		}
	case 2:
		return func(_, n int) error {
			simd.Binary(level, op, v[k][:n], v[a[0]], v[a[1]])
			return nil
		}
	}
	return func(_, n int) error { simd.Unary(level, op, v[k][:n], v[a[0]]); return nil }
}

type float interface{ float32 | float64 }

// where returns the step of Where.
func (m *evaluator) where(k int, c Instr) blockFunc {
	switch c.Type {
	case backend.F32:
		return whereOf(m, m.f32, k, c)
	case backend.F64:
		return whereOf(m, m.f64, k, c)
	case backend.I32:
		return whereOf(m, m.i32, k, c)
	}
	return whereOf(m, m.i64, k, c)
}

func whereOf[T any](m *evaluator, v [][]T, k int, c Instr) blockFunc {
	switch m.typeOf(c.Args[0]) {
	case backend.F32:
		return choose(v, m.f32, k, c.Args)
	case backend.F64:
		return choose(v, m.f64, k, c.Args)
	case backend.I32:
		return choose(v, m.i32, k, c.Args)
	}
	return choose(v, m.i64, k, c.Args)
}

func choose[T any, C number](v [][]T, conditions [][]C, k int, args [4]Value) blockFunc {
	return func(_, n int) error {
		d, c, a, b := v[k][:n], conditions[args[0]][:n], v[args[1]][:n], v[args[2]][:n]
		for i := range d {
			if c[i] != 0 {
				d[i] = a[i]
			} else {
				d[i] = b[i]
			}
		}
		return nil
	}
}

type number interface {
	float32 | float64 | int32 | int64
}

// cast returns the step of a Cast.
func (m *evaluator) cast(k int, c Instr) blockFunc {
	switch c.Type {
	case backend.F32:
		return castTo(m, m.f32, k, c, convert[float32], convert[float32], convert[float32],
			convert[float32])
	case backend.F64:
		return castTo(m, m.f64, k, c, convert[float64], convert[float64], convert[float64],
			convert[float64])
	case backend.I32:
		return castTo(m, m.i32, k, c, truncate32[float32], truncate32[float64], convert[int32],
			convert[int32])
	}
	return castTo(m, m.i64, k, c, truncate64[float32], truncate64[float64], convert[int64],
		convert[int64])
}

func castTo[T number](m *evaluator, v [][]T, k int, c Instr, f32 func(float32) T,
	f64 func(float64) T, i32 func(int32) T, i64 func(int64) T) blockFunc {
	switch x := c.Args[0]; m.typeOf(x) {
	case backend.F32:
		return convertEach(v, m.f32, k, x, f32)
	case backend.F64:
		return convertEach(v, m.f64, k, x, f64)
	case backend.I32:
		return convertEach(v, m.i32, k, x, i32)
	default:
		return convertEach(v, m.i64, k, x, i64)
	}
}

func convertEach[T, S number](to [][]T, from [][]S, k, x int, f func(S) T) blockFunc {
	return func(_, n int) error {
		d, s := to[k][:n], from[x][:n]
		for i := range d {
			d[i] = f(s[i])
		}
		return nil
	}
}

// convert is a conversion for which Go has the meaning of Cast.
func convert[T, S number](x S) T { return T(x) }

func truncate32[S float](x S) int32 {
	switch y := math.Trunc(float64(x)); {
	case y != y:
		return 0
	case y >= 0x1p31:
		return math.MaxInt32
	case y < -0x1p31:
		return math.MinInt32
	default:
		return int32(y)
	}
}

func truncate64[S float](x S) int64 {
	switch y := math.Trunc(float64(x)); {
	case y != y:
		return 0
	case y >= 0x1p63:
		return math.MaxInt64
	case y < -0x1p63:
		return math.MinInt64
	default:
		return int64(y)
	}
}

// random returns the step of Uniform. Neighbours often share the words of one counter.
func random[T float](v [][]T, in [][]int64, k int, args [4]Value, f func(uint32) T) blockFunc {
	return func(_, n int) error {
		d := v[k][:n]
		keys, steps, samples, elements := in[args[0]][:n], in[args[1]][:n], in[args[2]][:n],
			in[args[3]][:n]
		var of draw
		var words [4]uint32
		for i := range d {
			next := draw{keys[i], steps[i], samples[i], elements[i] >> 2}
			if i == 0 || next != of {
				of, words = next, next.words()
			}
			d[i] = f(words[elements[i]&3])
		}
		return nil
	}
}

// draw is what four random words follow from.
type draw struct{ key, step, sample, quad int64 }

// words is Philox4x32-10 (Salmon et al., Parallel random numbers: as easy as 1, 2, 3, 2011).
func (d draw) words() [4]uint32 {
	c := [4]uint32{uint32(d.quad), uint32(d.sample), uint32(d.step), uint32(d.step >> 32)}
	k0, k1 := uint32(d.key), uint32(d.key>>32)
	for range philoxRounds {
		p, q := uint64(c[0])*philoxM0, uint64(c[2])*philoxM1
		c = [4]uint32{uint32(q>>32) ^ c[1] ^ k0, uint32(q), uint32(p>>32) ^ c[3] ^ k1, uint32(p)}
		k0, k1 = k0+philoxW0, k1+philoxW1
	}
	return c
}

// The constants of Philox4x32.
//
// Origin: Philox
const (
	philoxRounds = 10
	philoxM0     = 0xD2511F53
	philoxM1     = 0xCD9E8D57
	philoxW0     = 0x9E3779B9
	philoxW1     = 0xBB67AE85
)
