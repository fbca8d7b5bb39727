package plan

import (
	"math"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/kernels/fuse"
	"github.com/euryale-ml/euryale/vm/internal/ir"
)

// Squares is the index of the [ir.Opaque] that replaces a rank's sum of squares by that of all
// ranks with parts of the variables.
const Squares = -1

// maxNumbers is how many numbers one loop adds up: a [fuse.Program] has at most 64 operands.
const maxNumbers = 60

// clip appends what finds the norm of all gradients, in f64, and returns the factor that makes it
// at most the updates' limit: NaN if the norm is not finite, so that no update takes place. The
// norm is the last result.
func (l *layouter) clip(updates []Update, gradients []Ref) Ref {
	limit := updates[0].Limit
	var sums []Ref
	for i, dw := range gradients {
		if !updates[i].Uncounted && !updates[i].Shard.empty() {
			sums = append(sums, l.squares(i, dw))
		}
	}
	total := func(b *loopBuilder, sum fuse.Value) []fuse.Value { return []fuse.Value{sum} }
	for len(sums) > maxNumbers {
		n := maxNumbers
		sums = append(sums[n:], l.numbers(sums[:n], total)[0])
	}
	if updates[0].Parts {
		mine, all := l.numbers(sums, total)[0], l.result(ir.Dims{}, backend.F64, "norm")
		l.plan.Steps = append(l.plan.Steps,
			Step{Op: ir.Opaque{Index: Squares, Name: "sum of the squares of all parts",
				Placed: true}, Dsts: []Ref{all}, Args: []Ref{mine}, Name: "norm"})
		sums = []Ref{all}
	}
	results := l.numbers(sums, func(b *loopBuilder, sum fuse.Value) []fuse.Value {
		p := b.program
		number := func(x float64) fuse.Value { return p.Const(backend.F64, x) }
		norm := p.Do(fuse.Sqrt, sum)
		factor := p.Do(fuse.Where, p.Do(fuse.Greater, norm, number(limit)),
			p.Do(fuse.Div, number(limit), norm), number(1))
		finite := p.Do(fuse.LessEqual, norm, number(math.MaxFloat64))
		return []fuse.Value{norm, p.Do(fuse.Where, finite, factor, number(math.NaN()))}
	})
	l.plan.Norm = len(l.plan.Results)
	l.plan.Results = append(l.plan.Results, results[0])
	return results[1]
}

// squares appends the sum of the squares of a gradient. The loop has one axis, or the gradient's
// axes if that has gaps.
func (l *layouter) squares(update int, dw Ref) Ref {
	dw = flat(dw)
	axes := ir.Dims{}
	for axis := range dw.Shape.Len() {
		axes = axes.Insert(axis, axis)
	}
	b := newLoop(dw.Shape, axes)
	x := b.program.Cast(backend.F64, l.gradient(b, update, dw))
	x = b.program.Do(fuse.Mul, x, x)
	b.fold(backend.Sum, x, l.result(ir.Dims{}, backend.F64, "norm"))
	l.join("norm", "squares", b)
	return b.dsts[0]
}

// numbers appends a loop of one element over the sum of numbers, and returns its results.
func (l *layouter) numbers(of []Ref, results func(b *loopBuilder,
	sum fuse.Value) []fuse.Value) []Ref {
	b := newLoop(ir.Dims{}, ir.Dims{})
	var sum fuse.Value
	if len(of) == 0 { // other ranks have all shards
		sum = b.program.Const(backend.F64, 0)
	}
	for i, r := range of {
		if x := b.load(l.plan, r); i == 0 {
			sum = x
		} else {
			sum = b.program.Do(fuse.Add, sum, x)
		}
	}
	var all []Ref
	for _, x := range results(b, sum) {
		r := l.result(ir.Dims{}, backend.F64, "norm")
		b.store(x, r)
		all = append(all, r)
	}
	l.plan.Steps = append(l.plan.Steps, b.newStep("norm", "norm"))
	return all
}

// clipped adds the product of a gradient and the factor to the loop of an update, and returns
// whether the update takes place, too.
func (l *layouter) clipped(b *loopBuilder, dw fuse.Value, of, factor Ref) (scaled,
	finite fuse.Value) {
	factor.Shape, factor.Strides = of.Shape, zeros(of.Shape.Len())
	f := b.load(l.plan, factor)
	return b.program.Do(fuse.Mul, dw, b.program.Cast(fuse.Type(of.DType), f)),
		b.program.Do(fuse.Equal, f, f)
}
