package nn

import (
	"fmt"
	"math"
	"slices"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/program"
	"github.com/euryale-ml/euryale/kernels/fuse"
	"github.com/euryale-ml/euryale/ops"
)

// RotaryOptions say which of the first m elements [Rotary] turns together.
type RotaryOptions struct {
	// Interleaved pairs elements 2i and 2i+1, as GPT-J does; else i and i+m/2 are a pair, as in
	// LLaMA and GPT-NeoX.
	Interleaved bool
}

// Rotary turns pairs of elements of the last axis by angles that encode the position: rotary
// position embeddings.
//
//	in   x         [d..., n]
//	     cos, sin  [e..., m/2]   of the angles of the pairs; e is broadcast to d
//	out  y         [d..., n]     pair (a, b) is (a cos - b sin, a sin + b cos)
//
// Elements from m on stay unchanged.
//
// [RotaryAngles] makes cos and sin. For heads, x [batch, heads, positions, n] takes angles
// [positions, m/2], and [batch, positions, heads, n] takes [positions, 1, m/2].
//
// Gradient: dx is dy turned back. Angles have none.
// Cost: a pass over x, and a copy.
// Errors: [ops.ErrShape] if x has more than 7 axes or shapes do not fit; [ops.ErrDType].
// Source: Su et al., RoFormer: Enhanced Transformer with Rotary Position Embedding, 2021.
func Rotary(o RotaryOptions, x, cos, sin *gorgonia.Node) (*gorgonia.Node, error) {
	return build("Rotary", "x cos sin", rotarySpec{o, false}, x, cos, sin)
}

// RotaryAngles returns the cosines and sines of the angles of positions first, first+1, ...: pair i
// of position p is turned by p * base**(-2i/m).
//
//	out  cos, sin  [positions, m/2]   of dtype dt, Float32 or Float64
//
// base is 10000 in most models. Angles are computed in float64.
//
// Errors: [backend.ErrArgument] if positions or m are below 1, m is odd, or base is not positive;
// [ops.ErrDType].
func RotaryAngles(dt tensor.Dtype, base float64, first, positions, m int) (cos, sin *tensor.Dense,
	err error) {
	switch {
	case !isFloat(dt):
		return nil, nil, fmt.Errorf("nn: RotaryAngles: %w: %v: %v", ops.ErrDType, dt, floats)
	case positions < 1 || m < 1 || m%2 > 0 || !(base > 0):
		return nil, nil, fmt.Errorf("nn: RotaryAngles: %w: %d positions of %d elements, base %v",
			backend.ErrArgument, positions, m, base)
	}
	tables := make([]*tensor.Dense, 2)
	for k, f := range []func(float64) float64{math.Cos, math.Sin} {
		wide, narrow := make([]float64, positions*m/2), make([]float32, positions*m/2)
		for i := range wide {
			at, pair := i/(m/2), i%(m/2)
			wide[i] = f(float64(first+at) * math.Pow(base, -float64(2*pair)/float64(m)))
			narrow[i] = float32(wide[i])
		}
		var data any = wide
		if dt == tensor.Float32 {
			data = narrow
		}
		tables[k] = tensor.New(tensor.WithShape(positions, m/2), tensor.WithBacking(data))
	}
	return tables[0], tables[1], nil
}

// rotarySpec is [Rotary] of x, cos and sin, or, if Back is set, its gradient of dy, cos and sin.
type rotarySpec struct {
	RotaryOptions
	Back bool
}

// String returns "Rotary{interleaved false, back false}".
func (s rotarySpec) String() string {
	return fmt.Sprintf("Rotary{interleaved %v, back %v}", s.Interleaved, s.Back)
}

func (s rotarySpec) shape(in []tensor.Shape) (tensor.Shape, error) {
	x, cos, sin := in[0], in[1], in[2]
	last := len(x) - 1
	if last >= 0 && len(cos) > 0 && last < backend.MaxAxes-1 && slices.Equal(cos, sin) &&
		2*cos[len(cos)-1] <= x[last] {
		d, err := broadcast(x[:last], cos[:len(cos)-1])
		if err == nil && slices.Equal(d, x[:last]) {
			return x.Clone(), nil
		}
	}
	return nil, fmt.Errorf("%w: x has shape %v, cos %v and sin %v: want (d..., n), and for both "+
		"angles (e..., m/2), where e is broadcast to d", ops.ErrShape, x, cos, sin)
}

func (s rotarySpec) gradients([]tensor.Shape) []gradient {
	return []gradient{{rotarySpec{s.RotaryOptions, !s.Back}, []int{dy, 1, 2}}, {}, {}}
}

func (s rotarySpec) program(b *program.Builder, x ...program.Value) program.Value {
	of, cos, sin := x[0], x[1], x[2]
	shape, angles := b.Of(of).Shape, b.Of(cos).Shape
	last, half := len(shape)-1, angles[len(angles)-1]
	second, step := half, 1
	if s.Interleaved {
		second, step = 1, 2
	}
	if s.Back {
		sin = b.Do(fuse.Neg, sin)
	}
	a, c := b.Slice(of, last, 0, step, half), b.Slice(of, last, second, step, half)
	real := b.Do(fuse.Sub, b.Do(fuse.Mul, a, cos), b.Do(fuse.Mul, c, sin))
	imaginary := b.Do(fuse.Add, b.Do(fuse.Mul, a, sin), b.Do(fuse.Mul, c, cos))
	turned := []program.Value{real, imaginary}
	if s.Interleaved {
		pair := append(slices.Clone(shape[:last]), half, 1)
		both := b.Concat(last+1, b.Reshape(real, pair...), b.Reshape(imaginary, pair...))
		turned = []program.Value{b.Reshape(both, append(shape[:last:last], 2*half)...)}
	}
	if n := shape[last]; n > 2*half {
		turned = append(turned, b.Slice(of, last, 2*half, 1, n-2*half))
	}
	return b.Concat(last, turned...)
}
