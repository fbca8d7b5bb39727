package autograd

import (
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/testing/require"
)

// batchNorms is a model of batch norms, by the names of their scales. A scale of "" is none.
type batchNorms struct {
	g     *gorgonia.ExprGraph
	nodes gorgonia.Nodes
	norms map[string]*gorgonia.BatchNormOp
}

// norm adds a batch norm of so many channels, whose averages begin with a number. It computes x
// otherwise where it has no scale.
func (m *batchNorms) norm(t testing.TB, name, scale string, channels int, start float64) {
	t.Helper()
	shape := tensor.Shape{1, channels}
	variable := func(name string, shape tensor.Shape) *gorgonia.Node {
		for _, n := range m.nodes {
			if n.Name() == name {
				return n
			}
		}
		n := gorgonia.NewMatrix(m.g, gorgonia.Float64, gorgonia.WithShape(shape...),
			gorgonia.WithName(name), gorgonia.WithInit(gorgonia.Ones()))
		m.nodes = append(m.nodes, n)
		return n
	}
	x := variable("x."+name, tensor.Shape{4, channels})
	if scale == "" {
		x = gorgonia.Must(gorgonia.Tanh(x))
	}
	var s, b *gorgonia.Node
	if scale != "" {
		s, b = variable(scale, shape), variable(scale+".bias", shape)
	}
	_, _, _, op, err := gorgonia.BatchNorm(x, s, b, 0.9, 1e-5)
	require.NoError(t, err)
	mean, variance := tensor.New(tensor.WithShape(channels), tensor.Of(tensor.Float64)),
		tensor.New(tensor.WithShape(channels), tensor.Of(tensor.Float64))
	for i := range channels {
		mean.Set(i, start+float64(i))
		variance.Set(i, start+10+float64(i))
	}
	require.NoError(t, op.SetStats(mean, variance))
	m.norms[name] = op
}

func newBatchNorms() *batchNorms {
	return &batchNorms{g: gorgonia.NewGraph(), norms: map[string]*gorgonia.BatchNormOp{}}
}

// begins returns what the averages of a batch norm begin with.
func (m *batchNorms) begins(name string) (mean, variance float64) {
	a, b := m.norms[name].Stats()
	return a.Data().([]float64)[0], b.Data().([]float64)[0]
}

// TestAveragesAreKnownByNames: by files and checkpoints of a model, wherever its batch norms are.
func TestAveragesAreKnownByNames(t *testing.T) {
	type norm struct {
		name, scale string
		channels    int
	}
	a, b := norm{"a", "bn.a", 2}, norm{"b", "bn.b", 2}
	c, d := norm{"c", "shared", 2}, norm{"d", "shared", 2}
	e, f := norm{"e", "", 2}, norm{"f", "", 2}
	stem := norm{"stem", "bn.stem", 2}
	for what, test := range map[string]struct{ saved, loaded []norm }{
		"another order":         {[]norm{a, b}, []norm{b, a}},
		"a new one before":      {[]norm{a, b}, []norm{stem, a, b}},
		"one less":              {[]norm{stem, a, b}, []norm{a, b}},
		"a scale of two":        {[]norm{c, d, a}, []norm{a, d, c}},
		"scales of Gorgonia":    {[]norm{e, f}, []norm{f, e}},
		"with and without them": {[]norm{e, a, f, b}, []norm{b, f, a, e}},
	} {
		build := func(of []norm, start float64) *batchNorms {
			m := newBatchNorms()
			for _, n := range of {
				m.norm(t, n.name, n.scale, n.channels, start*float64(1+slices.Index(test.saved, n)))
			}
			return m
		}
		m := build(test.saved, 100)
		file := filepath.Join(t.TempDir(), "w")
		if err := SaveWeights(file, m.nodes); err != nil {
			t.Errorf("%s: %v", what, err)
			continue
		}
		again := build(test.loaded, 0)
		err := LoadWeights(file, again.nodes, NonStrict(nil))
		require.Check(t, err == nil, "%s: %v", what, err)
		for i, n := range test.saved {
			if again.norms[n.name] == nil {
				continue
			}
			mean, variance := again.begins(n.name)
			if want := 100 * float64(1+i); mean != want || variance != want+10 {
				t.Errorf("%s: averages of %s are %v and %v, want %v and %v", what, n.name, mean,
					variance, want, want+10)
			}
		}
	}
}

// TestAveragesOfGraphsAreKnownByNames: whichever graph comes first.
func TestAveragesOfGraphsAreKnownByNames(t *testing.T) {
	build := func(start float64) (all []*batchNorms) {
		for i, name := range []string{"generator", "discriminator"} {
			m := newBatchNorms()
			m.norm(t, name, name+".bn", 2, start*float64(i+1))
			all = append(all, m)
		}
		return all
	}
	m, file := build(100), filepath.Join(t.TempDir(), "w")
	require.NoError(t, SaveWeights(file, slices.Concat(m[0].nodes, m[1].nodes)))
	again := build(0)
	require.NoError(t, LoadWeights(file, slices.Concat(again[1].nodes, again[0].nodes)))
	x, _ := again[1].begins("discriminator")
	require.Check(t, x == 200, "the discriminator's averages begin with %v, want 200", x)
}

// TestRanksCompareTheNamesOfAverages: ranks that have built their batch norms in another order
// would share those of one as those of another.
func TestRanksCompareTheNamesOfAverages(t *testing.T) {
	for _, err := range each(t, 2, func(r rank) error {
		m := newBatchNorms()
		for i := range 2 {
			name := string(rune('a' + (i+r.comm.Rank())%2))
			m.norm(t, name, "bn."+name, 2, 1)
		}
		slices.SortFunc(m.nodes, func(a, b *gorgonia.Node) int {
			return strings.Compare(a.Name(), b.Name())
		})
		d, err := New(r.comm, slices.DeleteFunc(m.nodes, func(n *gorgonia.Node) bool {
			return strings.HasPrefix(n.Name(), "x.")
		}))
		if err == nil {
			err = errors.Join(errors.New("New has no error"), d.Close())
		}
		return err
	}) {
		require.Fails(t, "autograd.New", err, backend.ErrMismatch, "bn.a")
	}
}

// TestNumberedAveragesAreLoadedWhereNoneIsMeantByTwo: files of older versions have the numbers of
// batch norms.
func TestNumberedAveragesAreLoadedWhereNoneIsMeantByTwo(t *testing.T) {
	for what, test := range map[string]struct {
		channels []int
		refused  bool
	}{"one": {[]int{2}, false}, "other shapes": {[]int{2, 3}, false}, "one shape": {[]int{2, 2},
		true}} {
		m := newBatchNorms()
		old := map[string]stored{}
		for i, n := range test.channels {
			name := string(rune('a' + i))
			m.norm(t, name, "bn."+name, n, 0)
			for _, of := range []string{"mean", "var"} {
				data := make([]float64, n)
				data[0] = float64(100 * (i + 1))
				old[fmt.Sprintf("batchnorm.%d.running_%s", i, of)] = stored{Shape: []int{n},
					Data: backend.Of(data)}
			}
		}
		v, err := weights(m.nodes)
		require.NoError(t, err)
		err = v.rename(old, func(p piece) string { return p.file })
		require.Check(t, test.refused == errors.Is(err, backend.ErrArgument), "%s: %v", what, err)
		for i := range test.channels {
			name := fmt.Sprintf("bn.%c.running_mean", 'a'+i)
			if t2, ok := old[name]; ok == test.refused ||
				ok && backend.View[float64](t2.Data)[0] != float64(100*(i+1)) {
				t.Errorf("%s: there is %s: %v", what, name, ok)
			}
		}
	}
}
