package vm_test

import (
	"errors"
	"fmt"
	"math"
	"reflect"
	"slices"
	"strings"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/autograd/solver"
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/kernels"
	"github.com/euryale-ml/euryale/internal/kernels/simd"
	"github.com/euryale-ml/euryale/internal/vm/interpret"
	"github.com/euryale-ml/euryale/internal/vm/ir"
	"github.com/euryale-ml/euryale/internal/vm/lower"
	"github.com/euryale-ml/euryale/internal/vm/read"
	"github.com/euryale-ml/euryale/kernels/fuse"
)

// plainRun trains a graph without a plan: value by value, and by the solver's Step.
type plainRun struct {
	read   *read.Graph
	values map[node]interpret.Array // of variables
	solver solver.Solver            // nil without one
	params []*trajectory
	sums   [][][]part // of gradients, by runs of a step and by learnables
	micro  int        // runs of a step
	// average makes a part of a gradient the mean over ranks.
	average func(p part) error
	// tables says by learnables which rows ranks exchange: nil if they exchange whole gradients.
	tables []lower.Table
}

// part is a term of a gradient that ranks exchange apart: it leaves in a bucket, or is what lookups
// add, of which rows travel.
type part struct {
	interpret.Array
	rows bool
}

// newPlainRun begins with the present values of the variables.
func newPlainRun(built gradedGraph, solver solver.Solver, micro int) (*plainRun, error) {
	r, err := read.New(built.Graph, true, read.Norms{}, nil)
	if err != nil {
		return nil, err
	}
	ref := &plainRun{
		read: r, values: map[node]interpret.Array{}, solver: solver, micro: micro,
	}
	for _, n := range r.Inputs {
		ref.values[n] = arrayOf(n.Value())
	}
	if solver != nil {
		for _, n := range built.learnables {
			ref.params = append(ref.params, newTrajectory(n, ref.values[n]))
		}
	}
	return ref, nil
}

// run evaluates the graph, takes the solver's step if it is the last of one, and returns the
// values of nodes.
func (r *plainRun) run(nodes gorgonia.Nodes) (seen []interpret.Array, err error) {
	outside := interpret.Outside{Opaque: r.opaque}
	for _, n := range r.read.Inputs {
		outside.Inputs = append(outside.Inputs, r.values[n])
	}
	for _, random := range r.read.Randoms {
		random.State[0], random.State[1] = int64(random.Step()), int64(random.First())
	}
	for _, c := range r.read.Constants {
		outside.Constants = append(outside.Constants, arrayOf(c))
	}
	values, err := interpret.Program(&r.read.Program, outside)
	if err != nil {
		return nil, err
	}
	of := func(n node) interpret.Array {
		id, ok := r.read.Value(n)
		if !ok {
			err = fmt.Errorf("%v has no value", n)
			return interpret.Array{}
		}
		return values[id]
	}
	for _, n := range nodes {
		seen = append(seen, of(n))
	}
	if r.solver != nil {
		var gradients [][]part
		for i, p := range r.params {
			parts, apart := r.apart(values, p.node, i)
			err = errors.Join(err, apart)
			gradients = append(gradients, parts)
		}
		if err == nil {
			err = r.step(gradients)
		}
	}
	return seen, err
}

// apart returns the gradient of a learnable by the terms that ranks exchange apart. Each of them is
// rounded before they cancel.
func (r *plainRun) apart(values []interpret.Array, n node, at int) ([]part, error) {
	id, ok := r.read.Value(n.Deriv())
	if !ok {
		return nil, fmt.Errorf("the gradient of %v has no value", n)
	}
	if r.tables == nil || r.tables[at].Rows == 0 || r.tables[at].Alone {
		return []part{{values[id], r.tables != nil && r.tables[at].Alone}}, nil
	}
	within := func(id ir.ID) ir.Value {
		v := r.read.Program.Values[id]
		for v.Op == (ir.Reshape{}) {
			v = r.read.Program.Values[v.Args[0]]
		}
		return v
	}
	var parts []part
	lookups := 0
	if sum := within(id); sum.Op == (ir.Binary{Op: fuse.Add}) {
		for _, a := range sum.Args {
			rows := within(a).Op == ir.GatherGrad{}
			if parts = append(parts, part{values[a], rows}); rows {
				lookups++
			}
		}
	}
	if lookups != 1 {
		return nil, fmt.Errorf("the gradient of %v has %d terms of lookups, want 1", n, lookups)
	}
	return parts, nil
}

// step adds gradients up, and applies the sums of the last run.
func (r *plainRun) step(gradients [][]part) error {
	if r.sums = append(r.sums, gradients); len(r.sums) < r.micro {
		return nil
	}
	var all []gorgonia.ValueGrad
	for i, p := range r.params {
		dtype, _ := read.DType(p.node.Dtype())
		var parts []interpret.Array
		for k, of := range gradients[i] {
			var runs []interpret.Array
			for _, run := range r.sums {
				runs = append(runs, run[i][k].Array)
			}
			of.Array = sumOf(dtype, runs)
			if r.average != nil {
				if err := r.average(of); err != nil {
					return err
				}
			}
			parts = append(parts, of.Array)
		}
		sum := parts[0]
		if len(parts) > 1 {
			sum = sumOf(dtype, parts)
		}
		p.give(sum)
		all = append(all, p)
	}
	r.sums = nil
	err := r.solver.Step(all)
	for _, p := range r.params {
		r.values[p.node] = p.present()
	}
	return err
}

// sumOf adds arrays up, in a dtype.
func sumOf(d backend.DType, terms []interpret.Array) interpret.Array {
	sum := interpret.Array{Shape: terms[0].Shape, Data: slices.Clone(terms[0].Data)}
	for k := range sum.Data {
		var all []interpret.Number
		for _, t := range terms {
			all = append(all, t.Data[k])
		}
		sum.Data[k] = interpret.Sum(d, all...)
	}
	return sum
}

// corners are how many signs a trajectory has: those of the bounds of its last gradients.
const corners = 8

// trajectory is a learnable by which a solver steps, with the gradient and with those at the
// ends of its bounds, one behind the other. Solvers work element by element, and in each
// gradient they are monotone.
type trajectory struct {
	node  *gorgonia.Node
	shape ir.Dims
	steps int
	w, dw *tensor.Dense
	rough []bool    // by elements: whether a gradient so far had a bound
	moved []float64 // by elements: the sizes that it had
}

func newTrajectory(n node, a interpret.Array) *trajectory {
	size := (1 + corners) * len(a.Data)
	t := &trajectory{
		node: n, shape: a.Shape,
		rough: make([]bool, len(a.Data)), moved: make([]float64, len(a.Data)),
		w:  tensor.New(tensor.Of(n.Dtype()), tensor.WithShape(size)),
		dw: tensor.New(tensor.Of(n.Dtype()), tensor.WithShape(size)),
	}
	for i := range size {
		set(t.w, i, a.Data[i%len(a.Data)].Value)
	}
	return t
}

// Value implements gorgonia.Valuer.
func (t *trajectory) Value() gorgonia.Value { return t.w }

// Grad implements gorgonia.ValueGrad.
func (t *trajectory) Grad() (gorgonia.Value, error) { return t.dw, nil }

// give sets the gradient of the next step.
func (t *trajectory) give(a interpret.Array) {
	for i := range t.dw.Len() {
		g, corner := a.Data[i%len(a.Data)], i/len(a.Data)-1
		x := g.Value
		switch {
		case corner < 0:
			t.rough[i] = t.rough[i] || g.Err > 0
			t.moved[i] += math.Abs(elements(t.w)[i])
		case corner>>(t.steps%3)&1 == 0:
			x += g.Err
		default:
			x -= g.Err
		}
		set(t.dw, i, x)
	}
	t.steps++
}

// present returns the learnable, whose bounds come from the corners, and a few roundings.
func (t *trajectory) present() interpret.Array {
	w := elements(t.w)
	n := t.shape.Size()
	a := interpret.Of(t.shape, w[:n])
	unit := 0x1p-50
	if t.node.Dtype() == tensor.Float32 {
		unit = 0x1p-21
	}
	for i := range a.Data {
		e := &a.Data[i]
		for c := range corners {
			e.Err = max(e.Err, 1.5*math.Abs(w[(1+c)*n+i]-e.Value))
		}
		if t.rough[i] {
			e.Err += unit * (math.Abs(e.Value) + t.moved[i])
		}
		if math.IsNaN(e.Err) {
			e.Err = math.Inf(1)
		}
	}
	return a
}

// The dtypes of 16-bit floats.
var (
	bfloat16 = tensor.Dtype{Type: reflect.TypeFor[backend.BFloat16]()}
	float16  = tensor.Dtype{Type: reflect.TypeFor[backend.Float16]()}
)

func set(t *tensor.Dense, i int, x float64) {
	switch data := t.Data().(type) {
	case []float64:
		data[i] = x
	case []float32:
		data[i] = float32(x)
	case []int:
		data[i] = int(x)
	case []backend.BFloat16:
		data[i] = backend.BFloat16(simd.NarrowBF16(float32(x)))
	case []backend.Float16:
		data[i] = backend.Float16(simd.NarrowF16(float32(x)))
	}
}

// elements returns the elements of a value in row-major order.
func elements(v gorgonia.Value) []float64 {
	if isEmpty(v.Shape()) {
		return nil
	}
	switch x := rowMajor(v).Data().(type) {
	case []float64:
		return slices.Clone(x)
	case []float32:
		return widened(x)
	case []int:
		return widened(x)
	case []backend.BFloat16:
		return widenedHalves(backend.Of(x))
	case []backend.Float16:
		return widenedHalves(backend.Of(x))
	case []int64:
		return widened(x)
	case []bool:
		wide := make([]float64, len(x))
		for i, yes := range x {
			wide[i] = map[bool]float64{true: 1}[yes]
		}
		return wide
	case float64:
		return []float64{x}
	case float32:
		return []float64{float64(x)}
	case int:
		return []float64{float64(x)}
	}
	panic(fmt.Sprintf("elements of %T", v.Data()))
}

// isEmpty reports whether tensors of a shape have no elements: package tensor cannot read them, and
// makes them only of a slice.
func isEmpty(shape tensor.Shape) bool { return slices.Contains(shape, 0) }

func emptyOf(dt tensor.Dtype, shape tensor.Shape) *tensor.Dense {
	backing := reflect.MakeSlice(reflect.SliceOf(dt.Type), 0, 0).Interface()
	return tensor.New(tensor.WithShape(shape...), tensor.WithBacking(backing))
}

func widened[T float32 | int | int64](data []T) []float64 {
	to := make([]float64, len(data))
	for i, x := range data {
		to[i] = float64(x)
	}
	return to
}

// widenedHalves returns floats of 16 bits.
func widenedHalves(x backend.Buffer) []float64 {
	wide := make([]float32, x.Len())
	if err := (kernels.Host{}).Cast(backend.Of(wide), x); err != nil {
		panic(err)
	}
	return widened(wide)
}

func arrayOf(v gorgonia.Value) interpret.Array {
	return interpret.Of(ir.Of(v.Shape()...), elements(v))
}

// filled returns a new value for a node, with some elements.
func filled(n node, data func(i int) float64) gorgonia.Value {
	shape := n.Shape()
	if n.IsScalar() && len(shape) == 0 {
		if n.Dtype() == tensor.Float32 {
			return gorgonia.NewF32(float32(data(0)))
		}
		return gorgonia.NewF64(data(0))
	}
	if isEmpty(shape) {
		return emptyOf(n.Dtype(), shape)
	}
	t := tensor.New(tensor.Of(n.Dtype()), tensor.WithShape(shape...))
	for i := range t.Len() {
		set(t, i, data(i))
	}
	return t
}

// opaque runs the Do of an operation on new tensors. Collectives add and move elements, so that
// those of the bounds are bounds of the result. Nothing is known of other operations, unless
// their operands are exact.
func (r *plainRun) opaque(v ir.Value, args []interpret.Array) (interpret.Array, error) {
	o := r.read.Opaques[v.Op.(ir.Opaque).Index]
	do := func(of func(interpret.Number) float64) ([]float64, error) {
		var values []gorgonia.Value
		for i, n := range o.Args {
			values = append(values, filled(n, func(k int) float64 { return of(args[i].Data[k]) }))
		}
		y, err := o.Op.Do(values...)
		if err != nil {
			return nil, fmt.Errorf("%v: %w", o.Node, err)
		}
		return elements(y), nil
	}
	y, err := do(func(x interpret.Number) float64 { return x.Value })
	if err != nil {
		return interpret.Array{}, err
	}
	result := interpret.Of(v.Shape, y)
	if strings.HasSuffix(reflect.Indirect(reflect.ValueOf(o.Op)).Type().PkgPath(), "/ops") {
		unit := 0x1p-50
		if o.Node.Dtype() == tensor.Float32 {
			unit = 0x1p-21
		}
		errs, err := do(func(x interpret.Number) float64 {
			short := math.Abs(x.Value) < 1<<16 && x.Value*16 == math.Trunc(x.Value*16)
			if short && x.Err == 0 {
				return 0
			}
			return x.Err + unit*math.Abs(x.Value)
		})
		if err != nil {
			return result, err
		}
		for i := range result.Data {
			result.Data[i].Err = math.Abs(errs[i])
		}
		return result, nil
	}
	for _, a := range args {
		if slices.ContainsFunc(a.Data, func(x interpret.Number) bool { return x.Err > 0 }) {
			for i := range result.Data {
				result.Data[i].Err = math.Inf(1)
			}
		}
	}
	return result, nil
}
