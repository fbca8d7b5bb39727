package program

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/internal/vm/ir"
	"github.com/euryale-ml/euryale/kernels/fuse"
)

// builder are the primitives of a [Builder] that are not kernels.
type builder interface {
	Of(x Value) Tensor
	Number(number float64, like Value) Value
	Do(f fuse.Op, x ...Value) Value
	Cast(d backend.DType, x Value) Value
	Locate(axis int, x Value) Value
	Select(axis int, labels, x, y Value) Value
	Reduce(op backend.ReduceOp, x Value, axes ...int) Value
	Reshape(x Value, shape ...int) Value
	Permute(x Value, axes ...int) Value
	Broadcast(x Value, shape ...int) Value
	Slice(x Value, axis, start, step, n int) Value
	Unslice(x Value, axis, start, step, n int) Value
	Concat(axis int, x ...Value) Value
}

// plain evaluates at once, by index: the oracle of plans.
type plain struct{ values []plainValue }

// size returns the number of elements of a shape, and with the shape with n elements of an axis.
func size(shape []int) int { return ir.Of(shape...).Size() }

func with(shape []int, axis, n int) []int { return ir.Of(shape...).With(axis, n).Slice() }

type plainValue struct {
	shape []int
	data  []float64
}

func (p *plain) add(shape []int, at func(i []int) float64) Value {
	v := plainValue{shape: shape}
	index := make([]int, len(shape))
	for range size(shape) {
		v.data = append(v.data, at(index))
		for axis := len(shape) - 1; axis >= 0; axis-- {
			if index[axis]++; index[axis] < shape[axis] {
				break
			}
			index[axis] = 0
		}
	}
	p.values = append(p.values, v)
	return Value(len(p.values) - 1)
}

// at returns the element at an index of a shape that the value is repeated to.
func (p *plain) at(x Value, i []int) float64 {
	v, k := p.values[x], 0
	i = i[len(i)-len(v.shape):]
	for axis, n := range v.shape {
		if k *= n; n > 1 {
			k += i[axis]
		}
	}
	return v.data[k]
}

func (p *plain) Of(x Value) Tensor { return Tensor{slices.Clone(p.values[x].shape), backend.F64} }

func (p *plain) Number(number float64, _ Value) Value {
	return p.add(nil, func([]int) float64 { return number })
}

func (p *plain) common(x ...Value) []int {
	var shapes [][]int
	for _, v := range x {
		shapes = append(shapes, p.values[v].shape)
	}
	return Common(shapes...)
}

func (p *plain) Do(f fuse.Op, x ...Value) Value {
	return p.add(p.common(x...), func(i []int) float64 {
		a := p.at(x[0], i)
		switch f {
		case fuse.Abs:
			return max(a, -a)
		case fuse.Add:
			return a + p.at(x[1], i)
		case fuse.Sub:
			return a - p.at(x[1], i)
		}
		if a != 0 { // Where
			return p.at(x[1], i)
		}
		return p.at(x[2], i)
	})
}

func (p *plain) Cast(_ backend.DType, x Value) Value {
	return p.add(p.values[x].shape, func(i []int) float64 { return p.at(x, i) })
}

func (p *plain) Locate(axis int, x Value) Value {
	return p.add(p.values[x].shape, func(i []int) float64 {
		if p.at(x, i) != 0 {
			return float64(i[axis])
		}
		return float64(p.values[x].shape[axis])
	})
}

func (p *plain) Select(axis int, labels, x, y Value) Value {
	return p.add(p.common(labels, x, y), func(i []int) float64 {
		if int(p.at(labels, i)) == i[axis] {
			return p.at(x, i)
		}
		return p.at(y, i)
	})
}

func (p *plain) Reduce(op backend.ReduceOp, x Value, axes ...int) Value {
	of := p.values[x].shape
	shape := slices.Clone(of)
	for _, axis := range axes {
		shape[axis] = 1
	}
	return p.add(shape, func(to []int) float64 {
		var all []float64
		p.add(of, func(i []int) float64 {
			same := true
			for axis, k := range i {
				same = same && (shape[axis] == 1 || k == to[axis])
			}
			if same {
				all = append(all, p.at(x, i))
			}
			return 0
		})
		y := all[0]
		for _, v := range all[1:] {
			switch op {
			case backend.Max:
				y = max(y, v)
			case backend.Min:
				y = min(y, v)
			default:
				y += v
			}
		}
		return y
	})
}

func (p *plain) Reshape(x Value, shape ...int) Value {
	p.values = append(p.values, plainValue{slices.Clone(shape), p.values[x].data})
	return Value(len(p.values) - 1)
}

func (p *plain) Permute(x Value, axes ...int) Value {
	from := make([]int, len(axes))
	var shape []int
	for _, a := range axes {
		shape = append(shape, p.values[x].shape[a])
	}
	return p.add(shape, func(i []int) float64 {
		for k, a := range axes {
			from[a] = i[k]
		}
		return p.at(x, from)
	})
}

func (p *plain) Broadcast(x Value, shape ...int) Value {
	return p.add(slices.Clone(shape), func(i []int) float64 { return p.at(x, i) })
}

func (p *plain) Slice(x Value, axis, start, step, n int) Value {
	return p.add(with(p.values[x].shape, axis, n), func(i []int) float64 {
		from := slices.Clone(i)
		from[axis] = start + i[axis]*step
		return p.at(x, from)
	})
}

func (p *plain) Unslice(x Value, axis, start, step, n int) Value {
	taken := p.values[x].shape[axis]
	return p.add(with(p.values[x].shape, axis, n), func(i []int) float64 {
		from := slices.Clone(i)
		k := i[axis] - start
		if from[axis] = k / step; k < 0 || k%step != 0 || from[axis] >= taken {
			return 0
		}
		return p.at(x, from)
	})
}

func (p *plain) Concat(axis int, x ...Value) Value {
	n := 0
	for _, v := range x {
		n += p.values[v].shape[axis]
	}
	return p.add(with(p.values[x[0]].shape, axis, n), func(i []int) float64 {
		from := slices.Clone(i)
		k := 0
		for ; from[axis] >= p.values[x[k]].shape[axis]; k++ {
			from[axis] -= p.values[x[k]].shape[axis]
		}
		return p.at(x[k], from)
	})
}

// drawn adds some random primitives on small integers, and returns the last of them.
func drawn(seed uint64, b builder, x ...Value) Value {
	rng := rand.New(rand.NewPCG(seed, 7))
	any := func() Value { return x[len(x)-1-rng.IntN(min(len(x), 5))] }
	for range 3 + rng.IntN(12) {
		v := any()
		shape := b.Of(v).Shape
		axis := rng.IntN(len(shape))
		n := shape[axis]
		like := func() Value { // another value that fits
			w := any()
			for k, m := range b.Of(w).Shape {
				if len(b.Of(w).Shape) != len(shape) || m != shape[k] && m != 1 && shape[k] != 1 {
					return b.Number(float64(rng.IntN(3)-1), v)
				}
			}
			return w
		}
		switch rng.IntN(13) {
		case 0:
			v = b.Do(fuse.Abs, v)
		case 1, 2:
			v = b.Do([]fuse.Op{fuse.Add, fuse.Sub}[rng.IntN(2)], v, like())
		case 3:
			w := like()
			v = b.Do(fuse.Where, v, w, b.Number(1, w))
		case 4, 5:
			v = b.Reduce([]backend.ReduceOp{backend.Sum, backend.Max}[rng.IntN(2)], v, len(shape)-1)
		case 6:
			v = b.Reduce(backend.Sum, v, []int{0, 1, 2, 3}[:1+axis]...)
		case 7:
			start := rng.IntN(n)
			v = b.Slice(v, axis, start, 1, 1+rng.IntN(n-start))
		case 8:
			v = b.Unslice(v, axis, 1, 2, 2*n+1)
		case 9:
			v = b.Concat(axis, v, v, b.Broadcast(b.Slice(v, axis, 0, 1, 1), shape...))
		case 10:
			v = b.Permute(v, rng.Perm(len(shape))...)
			if to := b.Of(v).Shape; rng.IntN(2) == 0 {
				v = b.Reshape(v, 1, to[0]*to[1], to[2])
			}
		case 12: // the first place along an axis where v is not 0, a number of its own
			first := b.Reduce(backend.Min, b.Locate(axis, v), axis)
			v = b.Do(fuse.Add, v, b.Cast(backend.F64, first))
		case 11:
			v = b.Select(axis, b.Number(float64(rng.IntN(2)), v), v, b.Do(fuse.Add, v, v))
		}
		if size(b.Of(v).Shape) < 3000 {
			x = append(x, v)
		}
	}
	return x[len(x)-1]
}

// ready returns a program that is ready to run.
func ready(t *testing.T, in []Tensor, out Tensor,
	build func(b *Builder, x ...Value) Value) *Host {
	t.Helper()
	p := require.Value(New(t.Name(), in, out, build))(t)
	return require.Value(p.Host())(t)
}

// TestProgramsAreThePlainEvaluation: random programs give the numbers of the plainest evaluation,
// in each of three runs.
func TestProgramsAreThePlainEvaluation(t *testing.T) {
	for seed := range uint64(3000) {
		rng := rand.New(rand.NewPCG(seed, 1))
		p := &plain{}
		var in []Tensor
		var src []backend.Buffer
		var x []Value
		for range 1 + rng.IntN(3) {
			shape := []int{1 + rng.IntN(4), 1 + rng.IntN(3), 1 + rng.IntN(5)}
			v := p.add(shape, func([]int) float64 { return float64(rng.IntN(7) - 3) })
			x = append(x, v)
			in = append(in, Tensor{shape, backend.F64})
			src = append(src, backend.Of(slices.Clone(p.values[v].data)))
		}
		want := p.values[drawn(seed, p, x...)]
		host := ready(t, in, Tensor{want.shape, backend.F64},
			func(b *Builder, x ...Value) Value { return drawn(seed, b, x...) })
		for range 3 {
			got := make([]float64, size(want.shape))
			if err := host.Run(backend.Of(got), src...); err != nil {
				t.Fatalf("seed %d: %v", seed, err)
			}
			if !slices.Equal(got, want.data) {
				t.Fatalf("seed %d: %v is %v, want %v", seed, want.shape, got, want.data)
			}
		}
	}
}

// TestLoopsOfPrograms: what runs over the same elements, or rows of them, is one loop. What is a
// view of an operand is copied to the result without a step.
func TestLoopsOfPrograms(t *testing.T) {
	matrix, rows := Tensor{[]int{70, 900}, backend.F32}, Tensor{[]int{70, 1}, backend.I64}
	images := Tensor{[]int{2, 3, 6, 6}, backend.F32}
	window := Window{Kernel: [2]int{2, 2}, Stride: [2]int{2, 2}, Dilation: [2]int{1, 1}}
	for _, test := range []struct {
		name    string
		in      []Tensor
		program func(b *Builder, x ...Value) Value
		steps   int
	}{
		{"softmax of rows", []Tensor{matrix}, func(b *Builder, x ...Value) Value {
			return SoftMax(b, x[0], 1, false)
		}, 1},
		{"softmax of columns", []Tensor{matrix}, func(b *Builder, x ...Value) Value {
			return SoftMax(b, x[0], 0, false)
		}, 3},
		{"softmax of long rows", []Tensor{{[]int{2, 9000}, backend.F32}},
			func(b *Builder, x ...Value) Value { return SoftMax(b, x[0], 1, false) }, 3},
		{"gradient of a norm", []Tensor{matrix, matrix}, func(b *Builder, x ...Value) Value {
			return NormalizedGrad(b, x[0], x[1], 1e-5, 1)
		}, 1},
		{"sums across rows", []Tensor{matrix}, func(b *Builder, x ...Value) Value {
			z, _ := Normalized(b, x[0], 1e-5, 1)
			return Sum(b, z, 0)
		}, 1},
		{"numbers of each row", []Tensor{matrix, rows}, func(b *Builder, x ...Value) Value {
			inside := With(b, fuse.Less, x[1], 5)
			sum := b.Do(fuse.Exp, Sum(b, b.Do(fuse.Exp, x[0]), 1))
			return b.Do(fuse.Mul, x[0], b.Do(fuse.Where, inside, sum, b.Number(0, sum)))
		}, 1},
		{"numbers", []Tensor{matrix}, func(b *Builder, x ...Value) Value {
			share := b.Do(fuse.Inv, With(b, fuse.Maximum, Sum(b, x[0], 0, 1), 1))
			return b.Do(fuse.Mul, x[0], share)
		}, 3},
		{"pool", []Tensor{images}, func(b *Builder, x ...Value) Value {
			return AveragePool(b, x[0], window, Border{})
		}, 2},
		{"slice", []Tensor{matrix}, func(b *Builder, x ...Value) Value {
			return b.Slice(x[0], 1, 5, 2, 40)
		}, 0},
		{"operand", []Tensor{matrix}, func(b *Builder, x ...Value) Value { return x[0] }, 0},
	} {
		var out Tensor
		b := &Builder{To: &ir.Program{}}
		var x []Value
		for _, in := range test.in {
			x = append(x, b.Add(ir.Input{}, ir.Of(in.Shape...), in.DType))
		}
		out = b.Of(test.program(b, x...))
		if host := ready(t, test.in, out, test.program); len(host.plan.Steps) != test.steps {
			t.Errorf("%s: %d steps, want %d", test.name, len(host.plan.Steps), test.steps)
		}
	}
}

// TestBuffersThatDoNotFitAreRefused: before anything is written.
func TestBuffersThatDoNotFitAreRefused(t *testing.T) {
	in := Tensor{[]int{2, 3}, backend.F32}
	host := ready(t, []Tensor{in}, in, func(b *Builder, x ...Value) Value {
		return b.Do(fuse.Exp, x[0])
	})
	six, five, wide := backend.Of(make([]float32, 6)), backend.Of(make([]float32, 5)),
		backend.Of(make([]float64, 6))
	for _, test := range [][]backend.Buffer{{six}, {six, five}, {five, six}, {six, wide},
		{wide, six}, {six, six, six}} {
		if err := host.Run(test[0], test[1:]...); !errors.Is(err, backend.ErrArgument) {
			t.Errorf("%v: %v", fmt.Sprint(test), err)
		}
	}
	if _, err := New("sum", []Tensor{in}, in, func(b *Builder, x ...Value) Value {
		return b.Add(ir.Binary{Op: fuse.Add}, ir.Of(in.Shape...), in.DType, x[0])
	}); !errors.Is(err, backend.ErrArgument) {
		t.Errorf("a sum of one operand: %v", err)
	}
}
