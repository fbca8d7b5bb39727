package layers_test

import (
	"errors"
	"math"
	"slices"
	"strings"
	"testing"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/autograd"
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/layers"
	"github.com/euryale-ml/euryale/ops"
)

// TestNamesAndSeedsDetermineFirstValues: in any order, and as a Builder's; other names and seeds
// give others.
func TestNamesAndSeedsDetermineFirstValues(t *testing.T) {
	values := func(seed uint64, names ...string) map[string][]float64 {
		g := gorgonia.NewGraph()
		var all gorgonia.Nodes
		for _, name := range names {
			all = append(all, gorgonia.NewMatrix(g, tensor.Float64, gorgonia.WithShape(40, 60),
				gorgonia.WithName(name)))
		}
		require.NoError(t, layers.Initialize(seed, layers.Glorot, all...))
		found := map[string][]float64{}
		for _, n := range all {
			found[n.Name()] = n.Value().Data().([]float64)
		}
		return found
	}
	one, other := values(1, "a", "b"), values(1, "b", "c", "a")
	layout := require.Value(layers.NewLayout(autograd.Solo(), 1, 1, 1))(t)
	defer layout.Close()
	built := layers.NewBuilder(gorgonia.NewGraph(), layout, tensor.Float64, 1)
	a := built.Learn("a", layers.Glorot(40, 60), layers.Undivided, 40, 60)
	require.Check(t, slices.Equal(one["a"], other["a"]) && slices.Equal(one["b"], other["b"]) &&
		slices.Equal(one["a"], a.Value().Data().([]float64)), "the order matters, or a Builder")
	require.Check(t, !slices.Equal(one["a"], one["b"]) && !slices.Equal(one["a"], values(2,
		"a")["a"]), "the name or the seed does not matter")
	squares := 0.0
	for _, x := range one["a"] {
		squares += x * x
	}
	if deviation := math.Sqrt(squares / 2400); math.Abs(deviation-math.Sqrt(2./100)) > 0.01 {
		t.Errorf("the deviation is %v", deviation)
	}
}

// TestInitializeRefusesNodesThatItCannotTellApart.
func TestInitializeRefusesNodesThatItCannotTellApart(t *testing.T) {
	g := gorgonia.NewGraph()
	vector := func(name string, dt tensor.Dtype) *gorgonia.Node {
		return gorgonia.NewVector(g, dt, gorgonia.WithShape(2), gorgonia.WithName(name))
	}
	a, same := vector("a", tensor.Float32), vector("a", tensor.Float64)
	ints := vector("i", tensor.Int)
	for wraps, nodes := range map[error][]*gorgonia.Node{
		backend.ErrArgument: {a, same}, ops.ErrDType: {a, ints},
	} {
		require.Fails(t, nodes, layers.Initialize(1, layers.Glorot, nodes...), wraps)
	}
	sum := gorgonia.Must(gorgonia.Add(a, a))
	require.Fails(t, "a sum", layers.Initialize(1, layers.Glorot, sum), backend.ErrArgument)
}

// TestAnInitThatIsNotFiniteIsRefused: by every function that draws, and as it is stored.
func TestAnInitThatIsNotFiniteIsRefused(t *testing.T) {
	layout := require.Value(layers.NewLayout(autograd.Solo(), 1, 1, 1))(t)
	defer layout.Close()
	for name, init := range map[string]layers.Init{
		"NaN": layers.Normal(math.NaN()), "+Inf": layers.Constant(math.Inf(1)),
		"1e+300": layers.Constant(1e300),
	} {
		for _, d := range []tensor.Dtype{tensor.Float32, tensor.Float64} {
			learn := layers.NewBuilder(gorgonia.NewGraph(), layout, d, 1)
			learn.Learn("w", init, layers.Undivided, 2, 2)
			table := layers.NewBuilder(gorgonia.NewGraph(), layout, d, 1)
			table.Table("items", init, 3, 2)
			n := gorgonia.NewMatrix(gorgonia.NewGraph(), d, gorgonia.WithShape(2, 2),
				gorgonia.WithName("w"))
			for i, err := range []error{learn.Err(), table.Err(), layers.Initialize(1,
				func(...int) layers.Init { return init }, n)} {
				fits := name == "1e+300" && d == tensor.Float64
				require.Check(t, fits == (err == nil) && (fits || errors.Is(err,
					backend.ErrArgument) && strings.Contains(err.Error(), "has drawn "+name)),
					"%s, %v, function %d: the error is %v", name, d, i, err)
			}
		}
	}
}
