package graphs

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/layers"
	"github.com/euryale-ml/euryale/ops/nn"
)

// Next returns a number from 0 up to n, as rand.IntN does.
type Next = func(n int) int

// Graph is a graph as it was drawn.
type Graph struct {
	DType  tensor.Dtype
	Values []Value // operands come before their users; the last one is the loss
	Kept   []int   // values that somebody wants to see
	Whole  bool    // whether all operations are exact for integers
}

// Value is a variable, or the result of an operation.
type Value struct {
	Op    string // "" for a variable
	Args  []int
	Shape tensor.Shape
	// Limit is what the integers of a variable are below; 0 is a variable of numbers, or a result.
	Limit int
	// Half is of a variable of 16-bit floats, whose value is widened: their dtype.
	Half   tensor.Dtype
	build  build
	flat   bool // has no gradient
	writes bool // its Do changes its operand
	when   int  // values with lower numbers are added first, where operands are there
}

// Needs is what graphs need besides nodes: a communicator for collectives, and a layout for
// blocks of package layers. Where they are nil, graphs have neither. Random is for dropouts.
type Needs struct {
	Comm   backend.Communicator
	Layout *layers.Layout
	Random *nn.Random
}

// construction is a graph of Gorgonia that is being built.
type construction struct {
	Needs
	graph *gorgonia.ExprGraph
	value int // that is built
	built *Built
}

// learn notes the learnables that a value's operation adds to the graph.
func (c construction) learn(of gorgonia.Nodes) { c.built.own[c.value] = of }

// build adds a value to a graph.
type build func(c construction, x ...*gorgonia.Node) (*gorgonia.Node, error)

// Built is a graph of Gorgonia.
type Built struct {
	Graph *gorgonia.ExprGraph
	Nodes gorgonia.Nodes // by values, nil for those that are not needed

	drawn *Graph
	own   map[int]gorgonia.Nodes // learnables of blocks
}

// Loss is the last value, a number.
func (b *Built) Loss() *gorgonia.Node { return b.Nodes[len(b.Nodes)-1] }

func newBuilt(g *Graph) *Built {
	return &Built{Graph: gorgonia.NewGraph(), drawn: g, own: map[int]gorgonia.Nodes{}}
}

// Build makes a graph of Gorgonia of the values that the loss depends on, or that are kept.
func (g *Graph) Build(p Needs) (*Built, error) {
	b := newBuilt(g)
	b.Nodes = make(gorgonia.Nodes, len(g.Values))
	var left []int
	for i, needed := range g.needed() {
		if needed {
			left = append(left, i)
		}
	}
	slices.SortStableFunc(left, func(i, j int) int {
		return cmp.Compare(g.Values[i].when, g.Values[j].when)
	})
	for len(left) > 0 {
		at := slices.IndexFunc(left, func(i int) bool {
			return !slices.ContainsFunc(g.Values[i].Args, func(a int) bool {
				return b.Nodes[a] == nil
			})
		})
		i := left[at]
		left = slices.Delete(left, at, at+1)
		if err := g.add(construction{p, b.Graph, i, b}, b.Nodes); err != nil {
			return nil, fmt.Errorf("graphs: value %d, %s: %w", i, g.Values[i].Op, err)
		}
	}
	return b, nil
}

// needed reports which values the loss depends on, or are kept.
func (g *Graph) needed() []bool {
	needed := make([]bool, len(g.Values))
	needed[len(g.Values)-1] = true
	for _, k := range g.Kept {
		needed[k] = true
	}
	for i := len(g.Values) - 1; i >= 0; i-- {
		if needed[i] {
			for _, a := range g.Values[i].Args {
				needed[a] = true
			}
		}
	}
	return needed
}

// add adds a value, whose operands are there.
func (g *Graph) add(c construction, nodes gorgonia.Nodes) (err error) {
	v := g.Values[c.value]
	if v.Op == "" {
		nodes[c.value] = g.variable(c.graph, c.value)
		return nil
	}
	var args gorgonia.Nodes
	for _, a := range v.Args {
		args = append(args, nodes[a])
	}
	defer func() { // Gorgonia panics where it has not thought of a shape
		if r := recover(); r != nil {
			err = fmt.Errorf("a panic: %v", r)
		}
	}()
	nodes[c.value], err = v.build(c, args...)
	return err
}

func (g *Graph) variable(to *gorgonia.ExprGraph, i int) *gorgonia.Node {
	v, dtype := g.Values[i], g.DType
	if v.Limit > 0 {
		dtype = tensor.Int
	}
	if len(v.Shape) == 0 {
		return gorgonia.NewScalar(to, dtype, gorgonia.WithName(name(i)))
	}
	shape := gorgonia.WithShape(v.Shape...)
	if v.Half.Type != nil {
		x := gorgonia.NewTensor(to, v.Half, len(v.Shape), shape, gorgonia.WithName(name(i)))
		return must(nn.Cast(dtype, x))
	}
	return gorgonia.NewTensor(to, dtype, len(v.Shape), shape, gorgonia.WithName(name(i)))
}

func name(i int) string { return fmt.Sprint("v", i) }

// Learnables returns the variables of numbers by which the loss can be differentiated, the
// blocks' own among them.
func (b *Built) Learnables() (of gorgonia.Nodes) {
	reached := make([]bool, len(b.Nodes))
	reached[len(b.Nodes)-1] = true
	for i := len(b.Nodes) - 1; i >= 0; i-- {
		switch v := b.drawn.Values[i]; {
		case !reached[i] || v.flat || v.Limit > 0 || v.Half.Type != nil:
		case v.Op == "":
			of = append(of, b.Nodes[i])
		default:
			of = append(of, b.own[i]...)
			for _, a := range v.Args {
				reached[a] = true
			}
		}
	}
	return of
}

// String returns the graph, a value a line.
func (g *Graph) String() string {
	var s strings.Builder
	needed := g.needed()
	for i, v := range g.Values {
		if !needed[i] {
			continue
		}
		fmt.Fprintf(&s, "v%d %v (added %d) ", i, v.Shape, v.when)
		switch {
		case v.Op == "" && v.Limit > 0:
			fmt.Fprintf(&s, "= integers below %d", v.Limit)
		case v.Half.Type != nil:
			fmt.Fprintf(&s, "= %v, widened", v.Half)
		case v.Op == "":
			fmt.Fprintf(&s, "= %v", g.DType)
		default:
			fmt.Fprintf(&s, "= %s", v.Op)
		}
		for _, a := range v.Args {
			fmt.Fprintf(&s, " v%d", a)
		}
		s.WriteByte('\n')
	}
	fmt.Fprintf(&s, "kept: %v\n", g.Kept)
	return s.String()
}

// Limit returns what the integers of the variable of a name are below; 0 for one of numbers.
func (g *Graph) Limit(of string) int {
	for i, v := range g.Values {
		if v.Op == "" && name(i) == of {
			return v.Limit
		}
	}
	return 0
}

// Writes reports whether the Do of an operation changes its operand: a variable, maybe.
func (g *Graph) Writes() bool {
	return slices.ContainsFunc(g.Values, func(v Value) bool { return v.writes })
}
