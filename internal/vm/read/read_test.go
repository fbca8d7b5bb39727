package read

import (
	"maps"
	"strings"
	"testing"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/internal/stock"
	"github.com/euryale-ml/euryale/internal/testing/require"
)

func must(n *gorgonia.Node, err error) *gorgonia.Node {
	if err != nil {
		panic(err)
	}
	return n
}

// everything returns a graph with every operation that has an entry in Types.
func everything() *gorgonia.ExprGraph {
	g := gorgonia.NewGraph()
	leaf := func(shape ...int) *gorgonia.Node {
		return gorgonia.NewTensor(g, tensor.Float64, len(shape), gorgonia.WithShape(shape...),
			gorgonia.WithInit(gorgonia.Ones()))
	}
	x, image := leaf(3, 4), leaf(1, 2, 4, 4)
	sums := []*gorgonia.Node{
		must(gorgonia.Sum(must(gorgonia.SoftMax(must(gorgonia.Tanh(x)))))),
		must(gorgonia.Max(x, 0, 1)),
		must(gorgonia.Sum(must(gorgonia.Mul(x, must(gorgonia.Transpose(x, 1, 0)))))),
		must(gorgonia.Sum(must(gorgonia.Tensordot([]int{0}, []int{0}, x, leaf(3, 5))))),
		must(gorgonia.Mean(must(gorgonia.BroadcastAdd(x, leaf(1, 4), nil, []byte{0})))),
		must(gorgonia.Sum(must(gorgonia.Concat(0, x, must(gorgonia.Slice(x, gorgonia.S(0, 2))))))),
		must(gorgonia.Sum(must(gorgonia.MaxPool2D(must(gorgonia.Conv2d(image, leaf(2, 2, 3, 3),
			tensor.Shape{3, 3}, []int{1, 1}, []int{1, 1}, []int{1, 1})), tensor.Shape{2, 2},
			[]int{0, 0}, []int{2, 2})))),
		must(gorgonia.Sum(must(gorgonia.Upsample2D(image, 2)))),
		must(gorgonia.Sum(must(gorgonia.AveragePool2D(image, tensor.Shape{2, 2}, []int{0, 0},
			[]int{2, 2})))),
		must(gorgonia.Sum(must(gorgonia.MinBetween(x, must(gorgonia.MaxBetween(x, x)))))),
	}
	batch, _, _, _, err := gorgonia.BatchNorm(image, leaf(1, 2, 4, 4), leaf(1, 2, 4, 4), 0.1, 1e-5)
	group := must(gorgonia.GroupNorm(image, leaf(1, 2, 4, 4), leaf(1, 2, 4, 4), 2, 2, 1e-5))
	sums = append(sums, must(gorgonia.Sum(must(batch, err))), must(gorgonia.Sum(group)))
	must(gorgonia.GlobalAveragePool2D(image))
	must(gorgonia.At(x, 1, 2))
	must(gorgonia.DiagFlat(x))
	must(gorgonia.ConvType(x, tensor.Float64, tensor.Int))
	indices := gorgonia.NewVector(g, tensor.Int, gorgonia.WithShape(2),
		gorgonia.WithName("indices"))
	sums = append(sums, must(gorgonia.Sum(must(gorgonia.ByIndices(x, indices, 0)))))
	loss := sums[0]
	for _, s := range sums[1:] {
		loss = must(gorgonia.Add(loss, s))
	}
	var value gorgonia.Value
	gorgonia.Read(loss, &value)
	if _, err := gorgonia.Grad(loss, x, image); err != nil {
		panic(err)
	}
	return g
}

// TestTypesAreThoseOfGorgonia: the fields of Types exist in the version in go.mod, and
// every entry is used.
func TestTypesAreThoseOfGorgonia(t *testing.T) {
	g := everything()
	missing := maps.Clone(Types)
	for _, n := range g.AllNodes() {
		if n.Op() == nil {
			continue
		}
		name := stock.Name(n.Op())
		if _, ok := Types[name]; !ok {
			continue
		}
		require.Report(t, (fields{}).check(n.Op()))
		delete(missing, name)
	}
	for name := range missing {
		t.Errorf("no operation of type %s was checked", name)
	}
	r := require.Value(New(g, true, Norms{}, nil))(t)
	for _, o := range r.Opaques {
		t.Errorf("%v is run by its Do", o.Node)
	}
}

// sumOp is a type of Gorgonia as it might become.
type sumOp struct {
	gorgonia.Op
	along []int
	mean  bool
}

var _ = sumOp{along: nil, mean: false} // read by reflection only

// TestUnknownFieldIsAnError: a type with other fields is named, with both lists.
func TestUnknownFieldIsAnError(t *testing.T) {
	err := (fields{}).check(sumOp{})
	for _, want := range []string{"sumOp", "mean bool", "inputShape tensor.Shape", stockVersion} {
		require.Fails(t, "fields.check", err, want)
	}
}

func TestOtherVersionIsAnError(t *testing.T) {
	for version, wrong := range map[string]bool{stockVersion: false, "v0.10.0": true, "": false} {
		err := checkModule(stock.Path, version)
		if got := err != nil; got != wrong || wrong && !strings.Contains(err.Error(), version) {
			t.Errorf("version %q: %v", version, err)
		}
	}
	require.NoError(t, checkModule("gorgonia.org/tensor", "v0.1.0"))
}

// TestUnsupported: what cannot be planned is an error that says what it is.
func TestUnsupported(t *testing.T) {
	for want, build := range map[string]func(g *gorgonia.ExprGraph){
		"gorgonia.Set": func(g *gorgonia.ExprGraph) {
			a := gorgonia.NewScalar(g, tensor.Float64, gorgonia.WithName("a"))
			gorgonia.Set(a, gorgonia.NewScalar(g, tensor.Float64, gorgonia.WithName("b")))
		},
		"at most 8": func(g *gorgonia.ExprGraph) {
			gorgonia.NewTensor(g, tensor.Float64, 9, gorgonia.WithShape(1, 1, 1, 1, 1, 1, 1, 1, 2),
				gorgonia.WithName("x"))
		},
		"dtype": func(g *gorgonia.ExprGraph) {
			gorgonia.NewVector(g, tensor.Complex64, gorgonia.WithShape(2), gorgonia.WithName("x"))
		},
	} {
		g := gorgonia.NewGraph()
		build(g)
		_, err := New(g, true, Norms{}, nil)
		require.Fails(t, "New", err, want)
	}
}
