package layers

import (
	"fmt"
	"hash/fnv"
	"math"
	"math/rand/v2"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/terms"
	"github.com/euryale-ml/euryale/ops"
)

// Builder builds the graph of one rank. All ranks call the same methods in the same order. After an
// error methods do nothing, and [Builder.Err] and [Builder.Grad] return it. Each method refuses a
// zero Node with a [backend.ErrArgument].
//
// Ranks that are goroutines of one process hold the lock of euryale.Run while they build. Building
// is not collective.
type Builder struct {
	graph      *gorgonia.ExprGraph
	layout     *Layout
	dtype      tensor.Dtype
	seed       uint64
	batches    int    // of whose samples a loss is the mean
	mean       bool   // gradients are averaged: by a tree, or by autograd's default
	sums       bool   // ranks add up gradients
	shares     bool   // whether there is a CrossEntropy, a share of that mean
	counted    string // targets whose number it divides by, "" for none
	padded     string // tokens that have padding, "" for none
	routes     string // a MoE that knows of no padding
	tables     []*Table
	terms      *terms.Terms // what the graph says, nil for nothing
	learnables []Node
	frozen     gorgonia.Nodes // learnables that are not to be learnt
	inputs     gorgonia.Nodes // whose gradients are wanted, too: rows of tables
	names      map[string]bool
	// of learnables, or nil
	values func(name string, shape []int) (x backend.Buffer, behind int, err error)
	freeze func(name string) bool // of learnables, or nil
	err    error
}

// NewBuilder returns a builder of a graph, for a layout. Learnables are of dtype, Float32 or
// Float64, and begin with values that the seed determines.
func NewBuilder(graph *gorgonia.ExprGraph, layout *Layout, dtype tensor.Dtype,
	seed uint64) *Builder {
	b := &Builder{graph: graph, layout: layout, dtype: dtype, seed: seed, names: map[string]bool{}}
	if b.err = backend.Given("layers.NewBuilder", "graph", graph, "layout", layout); b.err != nil {
		return b
	}
	b.batches = layout.DP
	if dtype != tensor.Float32 && dtype != tensor.Float64 {
		b.err = fmt.Errorf("layers: %w: learnables of %v: use Float32 or Float64", ops.ErrDType,
			dtype)
	}
	return b
}

// Batches sets how many batches like the graph's a step has: [Builder.CrossEntropy] is a share of
// the mean over all their samples. The default is one for each replica. Call it before the loss:
//   - with n times the replicas, to accumulate n runs: [Builder.Training] has vm.Accumulate(n);
//   - with 1 for vm.WithTree and vm.WithElastic, whose gradients are a mean over micro-batches.
//     For nothing else: gradients are averaged then, and where they are sums, as on other layouts,
//     the checkpoints do not fit.
//
// Errors: [backend.ErrArgument] for other numbers, and after the loss.
func (b *Builder) Batches(n int) {
	b.apply("Batches", func() (Node, error) {
		switch {
		case n < 1 || n > 1 && n%b.layout.DP != 0:
			return Node{}, fmt.Errorf("%w: %d batches: give a multiple of the %d replicas, or 1 "+
				"for a tree", backend.ErrArgument, n, b.layout.DP)
		case b.shares:
			return Node{}, fmt.Errorf("%w: there is a CrossEntropy already: call it before",
				backend.ErrArgument)
		}
		b.batches, b.mean = n, n == 1
		return Node{}, nil
	})
}

// Begin sets the first values of learnables that are made from now on: values returns all elements
// of a learnable's whole shape, as floats, or the zero Buffer if it is to be drawn. They are in
// row-major order, but the first axes, behind of them, come behind the others: 1 for a matrix that
// is transposed. It is called once for each learnable, on every rank, and may map a file: a rank
// looks only at its part, and converts that on all cores. The learnable may keep the memory, which
// nothing writes if the elements are of 16 bits. What is frozen ([Builder.Freeze]) stays what
// it is then, a variable of 16-bit floats with these axes, in a graph of Float32.
func (b *Builder) Begin(values func(name string, shape []int) (x backend.Buffer, behind int,
	err error)) {
	b.values = values
}

// Freeze says which learnables that are made from now on are not learnt: they are variables of the
// graph, and among [Builder.Frozen], not [Builder.Learnables]. nil freezes none.
func (b *Builder) Freeze(frozen func(name string) bool) { b.freeze = frozen }

// Frozen returns the learnables that are not learnt, in the order in which they were made: give
// them to vm.WithFrozen, so that a device need not compare them with the host's in each run.
func (b *Builder) Frozen() gorgonia.Nodes { return b.frozen }

// Graph returns the graph.
func (b *Builder) Graph() *gorgonia.ExprGraph { return b.graph }

// Err returns the first error, which names the operation.
func (b *Builder) Err() error { return b.err }

// Apply adds an operation of another package: f returns its result, placed by [Place]. Errors name
// the operation. After an error Apply does not call f.
func (b *Builder) Apply(name string, f func() (Node, error)) Node {
	return b.apply(name, f, "f", f)
}

// apply calls f, unless there was an error before, and adds the operation's name to its error.
// operands are what f needs, as names and values, none of which may be nil: they include each Node
// of a caller.
func (b *Builder) apply(name string, f func() (Node, error), operands ...any) Node {
	if b.err != nil {
		return Node{}
	}
	for i, o := range operands {
		if n, ok := o.(Node); ok {
			operands[i] = n.Node
		}
	}
	n, err := Node{}, backend.Given("", operands...)
	if err == nil {
		n, err = f()
	}
	if err != nil {
		b.err = fmt.Errorf("layers: %s: %w", name, err)
		return Node{}
	}
	return n
}

// Init draws the first value of an element of a learnable. It must be finite.
type Init func(r *rand.Rand) float64

// Normal draws from a normal distribution of mean 0.
func Normal(deviation float64) Init {
	return func(r *rand.Rand) float64 { return r.NormFloat64() * deviation }
}

// Constant gives every element the value x.
func Constant(x float64) Init { return func(*rand.Rand) float64 { return x } }

// Undivided is the axis of a learnable that every rank of the Tensor group has whole.
const Undivided = -1

// Learn returns a learnable of a shape, which the Tensor group shards along an axis, or not
// (Undivided). It is Copied over the Sequence group, since the exchange of gradients adds up those
// of ranks with different positions; over the Tensor group it is Split, or Replicated. Operations
// of this package that take a Replicated learnable and an x of another placement make it Copied.
//
// The node and its tensor in a checkpoint have the name. The name, the seed and the shape determine
// the values.
//
// Errors: [backend.ErrArgument] if the name is taken, or if init draws a number that is not finite;
// [ops.ErrShape] if the axis does not exist or is shorter than the Tensor group.
func (b *Builder) Learn(name string, init Init, axis int, shape ...int) Node {
	return b.apply("Learn "+name, func() (Node, error) {
		n := Node{place: [2]Placement{Copied, Replicated}}
		switch {
		case b.names[name]:
			return n, fmt.Errorf("%w: there is another learnable of this name: give each its own",
				backend.ErrArgument)
		case axis >= len(shape) || axis < Undivided:
			return n, fmt.Errorf("%w: shape %v has no axis %d", ops.ErrShape, shape, axis)
		case axis != Undivided && shape[axis] < b.layout.TP:
			return n, fmt.Errorf("%w: axis %d of shape %v is sharded among %d ranks, and each "+
				"needs a part: use fewer ranks", ops.ErrShape, axis, shape, b.layout.TP)
		}
		b.names[name] = true
		if axis != Undivided {
			n.place[Tensor], n.parts[Tensor] = Split(axis), backend.Even(shape[axis], b.layout.TP)
		}
		value, begun, err := b.first(name, init, axis, shape)
		if err != nil {
			return n, err
		}
		variable := b.variable(name, value)
		if n.Node, err = b.widened(variable, begun); err != nil {
			return n, err
		}
		if axis != Undivided && b.layout.TP > 1 { // for who reads the value
			b.says().Parts[name] = true
		}
		if b.frozes(name) {
			b.frozen = append(b.frozen, variable)
		} else {
			b.learnables = append(b.learnables, n)
		}
		return n, nil
	}, "init", init)
}

// drawn returns n values that a seed and a name determine.
func drawn[T float32 | float64](seed uint64, name string, init Init, n int) (_ []T, err error) {
	h := fnv.New64a()
	h.Write([]byte(name))
	r := rand.New(rand.NewPCG(seed, h.Sum64()))
	values := make([]T, n)
	for i := range values {
		if values[i], err = draw[T](init, r); err != nil {
			return nil, err
		}
	}
	return values, nil
}

// draw draws a number, which must be finite as it is stored: training could not go on from others.
func draw[T float32 | float64](init Init, r *rand.Rand) (T, error) {
	x := init(r)
	if kept := float64(T(x)); math.IsNaN(kept) || math.IsInf(kept, 0) {
		return 0, fmt.Errorf("%w: its Init has drawn %v, which is not finite in %T: check the "+
			"deviation or the constant", backend.ErrArgument, x, T(x))
	}
	return T(x), nil
}

// draw draws a number for a learnable of the builder's dtype.
func (b *Builder) draw(init Init, r *rand.Rand) (float64, error) {
	if b.dtype == tensor.Float32 {
		x, err := draw[float32](init, r)
		return float64(x), err
	}
	return draw[float64](init, r)
}

// converted returns numbers as T, the same memory if they are.
func converted[T, S float32 | float64](numbers []S) []T {
	if same, ok := any(numbers).([]T); ok {
		return same
	}
	other := make([]T, len(numbers))
	for i, v := range numbers {
		other[i] = T(v)
	}
	return other
}

// sliceAxis returns the elements start to end of an axis.
func sliceAxis[T any](values []T, shape []int, axis, start, end int) []T {
	if end-start == shape[axis] {
		return values
	}
	behind := size(shape[axis+1:])
	row := shape[axis] * behind
	part := make([]T, 0, len(values)/shape[axis]*(end-start))
	for at := 0; at < len(values); at += row {
		part = append(part, values[at+start*behind:at+end*behind]...)
	}
	return part
}

// variable returns a variable with a value.
func (b *Builder) variable(name string, value *tensor.Dense) *gorgonia.Node {
	return gorgonia.NewTensor(b.graph, value.Dtype(), value.Dims(),
		gorgonia.WithShape(value.Shape()...), gorgonia.WithName(name), gorgonia.WithValue(value))
}

// tensor returns values as a tensor of the builder's dtype.
func (b *Builder) tensor(shape []int, values []float64) *tensor.Dense {
	var backing any = values
	if b.dtype == tensor.Float32 {
		backing = converted[float32](values)
	}
	return tensor.New(tensor.WithShape(shape...), tensor.WithBacking(backing))
}

// Constant returns numbers that nothing changes, of the builder's dtype.
func (b *Builder) Constant(shape []int, numbers []float64) *gorgonia.Node {
	return b.graph.Constant(b.tensor(shape, numbers))
}

// learnableFor returns a learnable as an operation with x needs it: with a gradient that is a sum
// over the Tensor group if the ranks of the group have different gradients of x.
func (b *Builder) learnableFor(w, x Node) (Node, error) {
	if w.place[Tensor] == Replicated && x.place[Tensor] != Replicated {
		return b.convert(w, Tensor, Copied)
	}
	return w, nil
}

// learnFor makes a learnable that every rank of the Tensor group has whole, as an operation with x
// needs it.
func (b *Builder) learnFor(x Node, name string, init Init, shape ...int) (Node, error) {
	w := b.Learn(name, init, Undivided, shape...)
	if b.err != nil {
		return Node{}, b.err
	}
	return b.learnableFor(w, x)
}

// sharded checks an operand that meets learnables: over the Sequence group, the ranks' gradients
// must add up to the learnable's.
func sharded(operand string, x Node) error {
	if p := x.place[Sequence]; !p.split() && p != Copied {
		return misplaced(operand, x, Sequence, Split(max(0, min(1, x.Dims()-2))), Copied)
	}
	return nil
}

// Learnables returns the learnables in the order in which they were made.
func (b *Builder) Learnables() gorgonia.Nodes {
	nodes := make(gorgonia.Nodes, len(b.learnables))
	for i, n := range b.learnables {
		nodes[i] = n.Node
	}
	return nodes
}

// Parameters returns the number of elements of all learnables, of the whole model.
func (b *Builder) Parameters() int {
	total := 0
	for _, w := range b.learnables {
		n := size(w.Shape())
		if p := w.place[Tensor]; p.split() {
			whole := 0
			for _, part := range w.parts[Tensor] {
				whole += part
			}
			n = n / w.Shape()[p] * whole
		}
		total += n
	}
	return total
}

// Sharded returns the axis of each learnable that the Tensor group shards, by name, for
// autograd.WithParts: other learnables are the same on all ranks of the group.
func (b *Builder) Sharded() map[string]int {
	axes := map[string]int{}
	for _, w := range b.learnables {
		if p := w.place[Tensor]; p.split() {
			axes[w.Name()] = int(p)
		}
	}
	return axes
}
