package autograd

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/autograd/internal/checkpoint"
	"github.com/euryale-ml/euryale/autograd/solver"
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/stock"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/internal/testing/testranks"
)

// shaped is a variable whose elements count up from a number.
type shaped struct {
	name  string
	first float64
	shape []int
}

// in adds the variable to a graph.
func (s shaped) in(g *gorgonia.ExprGraph) *gorgonia.Node {
	x := make([]float64, checkpoint.Elements(s.shape))
	for i := range x {
		x[i] = s.first + float64(i)
	}
	return gorgonia.NewTensor(g, tensor.Float64, len(s.shape), gorgonia.WithName(s.name),
		gorgonia.WithShape(s.shape...),
		gorgonia.WithValue(tensor.New(tensor.WithShape(s.shape...), tensor.WithBacking(x))))
}

// nodes adds variables to a graph of their own.
func nodes(all ...shaped) (nodes gorgonia.Nodes) {
	g := gorgonia.NewGraph()
	for _, s := range all {
		nodes = append(nodes, s.in(g))
	}
	return nodes
}

// vectors returns n parameters of a graph, of different lengths.
func vectors(n int) gorgonia.Nodes {
	var all []shaped
	for i := range n {
		all = append(all, shaped{fmt.Sprint("w", i), 1, []int{i + 1}})
	}
	return nodes(all...)
}

// operand is a parameter with a gradient.
type operand struct{ w, dw *tensor.Dense }

func (o operand) Value() gorgonia.Value         { return o.w }
func (o operand) Grad() (gorgonia.Value, error) { return o.dw, nil }

// trainedBy returns parameters and their solver.
func trainedBy(s solver.Solver, params gorgonia.Nodes) solver.Group {
	return solver.Group{Solver: s, Params: params}
}

// stepped steps a solver with gradients that depend on a parameter's name and the step alone.
func stepped(s solver.Solver, params gorgonia.Nodes, steps ...int) error {
	for _, step := range steps {
		var all []gorgonia.ValueGrad
		for _, n := range params {
			dw := tensor.New(tensor.WithShape(n.Shape()...), tensor.Of(tensor.Float64))
			for i := range dw.Float64s() {
				dw.Float64s()[i] = float64((step+i+len(n.Name()))%5 - 2)
			}
			all = append(all, operand{n.Value().(*tensor.Dense), dw})
		}
		if err := s.Step(all); err != nil {
			return err
		}
	}
	return nil
}

// headerOf reads the names and shapes in a safetensors file as its specification says, without
// the code that wrote it.
func headerOf(t *testing.T, path string) map[string]string {
	t.Helper()
	b := require.Value(os.ReadFile(path))(t)
	var header map[string]struct {
		DType string
		Shape []int
	}
	require.NoError(t, json.Unmarshal(b[8:8+binary.LittleEndian.Uint64(b)], &header))
	delete(header, "__metadata__")
	all := map[string]string{}
	for name, e := range header {
		all[name] = fmt.Sprint(e.DType, e.Shape)
	}
	return all
}

// TestTensorsOfACheckpointHaveTheNamesOfNodes: with the solver's under a prefix.
func TestTensorsOfACheckpointHaveTheNamesOfNodes(t *testing.T) {
	weight, bias := shaped{"block0.weight", 1, []int{2, 3}}, shaped{`b/"ias"-ä`, 7, []int{3}}
	dir := filepath.Join(t.TempDir(), "checkpoint")
	all(t, 1, func(r rank) error {
		p := nodes(weight, bias)
		adam := &solver.Adam{Rate: 1}
		groups := testranks.Must(solver.NewGroups(p, trainedBy(&solver.Adam{Rate: 1}, p[1:]),
			trainedBy(heavyBall().(solver.Solver),
				p[:1])))
		d := testranks.Must(New(r.comm, p))
		return errors.Join(stepped(adam, p, 1), d.Save(dir, adam, nil), stepped(groups, p, 1),
			d.Save(dir+"-groups", groups, nil), d.Save(dir+"-some", adam, nil), d.Close())
	})
	want := map[string]string{"block0.weight": "F64[2 3]", `b/"ias"-ä`: "F64[3]",
		"solver.adam.m/block0.weight": "F64[6]", "solver.adam.v/block0.weight": "F64[6]",
		`solver.adam.m/b/"ias"-ä`: "F64[3]", `solver.adam.v/b/"ias"-ä`: "F64[3]",
		"solver.adam.steps": "I64[1]"}
	got := headerOf(t, filepath.Join(newest(t, dir), checkpoint.ModelName))
	require.Check(t, maps.Equal(got, want), "the file has %v, want %v", got, want)
	want = map[string]string{"block0.weight": "F64[2 3]", `b/"ias"-ä`: "F64[3]",
		"solver.group.1.momentum.velocity/block0.weight": "F64[6]",
		`solver.group.0.adam.m/b/"ias"-ä`:                "F64[3]",
		`solver.group.0.adam.v/b/"ias"-ä`:                "F64[3]",
		"solver.group.0.adam.steps":                      "I64[1]"}
	got = headerOf(t, filepath.Join(newest(t, dir+"-groups"), checkpoint.ModelName))
	require.Check(t, maps.Equal(got, want), "the file of groups has %v, want %v", got, want)
}

// TestCheckpointsLoadByNameInAnyOrder: parameters of one shape in another order resume
// bitwise identically, with what the solver keeps for them.
func TestCheckpointsLoadByNameInAnyOrder(t *testing.T) {
	model := []shaped{{"a", 1, []int{2}}, {"bb", 10, []int{2}}, {"ccc", 20, []int{2}}}
	adam := func(gorgonia.Nodes) (solver.Solver, error) { return &solver.Adam{Rate: 0.5}, nil }
	groups := func(p gorgonia.Nodes) (solver.Solver, error) {
		in := func(names ...string) (own gorgonia.Nodes) {
			for _, n := range p {
				if slices.Contains(names, n.Name()) {
					own = append(own, n)
				}
			}
			return own
		}
		return solver.NewGroups(p, trainedBy(&solver.AdamW{Rate: 0.5}, in("a", "ccc")),
			trainedBy(&solver.AdamW{Rate: 0.25}, in("bb")))
	}
	for name, newSolver := range map[string]func(gorgonia.Nodes) (solver.Solver, error){
		"adam": adam, "groups": groups,
	} {
		t.Run(name, func(t *testing.T) {
			dir := filepath.Join(t.TempDir(), "checkpoint")
			all(t, 1, func(r rank) error {
				want := nodes(model...)
				err := saveAndGoOn(r, want, newSolver, dir)
				got := nodes(shaped{"ccc", 0, []int{2}}, shaped{"a", 0, []int{2}},
					shaped{"bb", 0, []int{2}})
				s, err2 := newSolver(got)
				if err = errors.Join(err, err2); err != nil {
					return err
				}
				d := testranks.Must(New(r.comm, got))
				err = errors.Join(d.Load(dir, s, nil), stepped(s, got, 3, 4))
				for i, n := range []*gorgonia.Node{got[1], got[2], got[0]} {
					if g, w := numbers(n.Value()), numbers(want[i].Value()); !slices.Equal(g, w) {
						err = errors.Join(err, fmt.Errorf("%s is %v, want %v", n.Name(), g, w))
					}
				}
				return errors.Join(err, d.Close())
			})
		})
	}
}

// saveAndGoOn saves after two steps, and makes two more.
func saveAndGoOn(r rank, p gorgonia.Nodes, solver func(gorgonia.Nodes) (solver.Solver, error),
	dir string) error {
	s, err := solver(p)
	if err != nil {
		return err
	}
	d, err := New(r.comm, p)
	if err != nil {
		return err
	}
	return errors.Join(stepped(s, p, 1, 2), d.Save(dir, s, nil), stepped(s, p, 3, 4), d.Close())
}

// TestNamesThatAFileCannotHaveAreRefusedBySave: training needs no names, Save does, and its error
// names the variable.
func TestNamesThatAFileCannotHaveAreRefusedBySave(t *testing.T) {
	twice := []shaped{{"w", 1, []int{2}}, {"w", 1, []int{3}}}
	for name, tt := range map[string]struct {
		model []shaped
		want  string
	}{
		"empty": {[]shaped{{"", 1, []int{2}}}, "parameter 0: bad argument: it has no name"},
		"bytes": {[]shaped{{"bad\xff", 1, []int{2}}},
			`parameter 0, "bad\xff": bad argument: its name is not UTF-8`},
		"metadata": {[]shaped{{"__metadata__", 1, []int{2}}},
			"the file's metadata has this name"},
		"solver": {[]shaped{{"solver.x", 1, []int{2}}}, `begins with "solver."`},
		"duplicates": {twice,
			`parameter 1, "w": bad argument: its name is also the name of parameter 0`},
	} {
		t.Run(name, func(t *testing.T) {
			dir := filepath.Join(t.TempDir(), "checkpoint")
			all(t, 2, func(r rank) error {
				r.build.Lock()
				p := nodes(tt.model...)
				r.build.Unlock()
				d, err := New(r.comm, p)
				if err != nil {
					return err
				}
				err = d.Save(dir, &solver.SGD{Rate: 1}, nil)
				if !errors.Is(err, backend.ErrArgument) ||
					!strings.Contains(err.Error(), tt.want) ||
					!strings.Contains(err.Error(), "gorgonia.WithName") {
					return fmt.Errorf("the error is %w, want %q", err, tt.want)
				}
				if left, _ := filepath.Glob(filepath.Dir(dir) + "/*/*"); len(left) > 0 {
					return fmt.Errorf("Save has left %v", left)
				}
				return d.Close()
			})
		})
	}
}

// Errors about a variable without a name say that it has none, and its shape.
func TestErrorsSayThatAVariableHasNoName(t *testing.T) {
	p := nodes(shaped{"", 1, []int{2}}, shaped{"", 3, []int{3}})
	empty := gorgonia.NewVector(p[0].Graph(), tensor.Float64, gorgonia.WithShape(4))
	d := require.Value(New(Solo(), p[:1]))(t)
	_, hooked := d.Hook(p[1])
	_, missing := New(Solo(), gorgonia.Nodes{empty})
	_, twice := solver.NewGroups(p[:1],
		trainedBy(&solver.SGD{Rate: 1}, gorgonia.Nodes{p[0], p[0]}))
	_, frozen := New(Solo(), p[:1], WithFrozen(p[0]))
	errs := []error{
		hooked, missing, twice, frozen, SaveWeights(filepath.Join(t.TempDir(), "w"), p[:1]),
		(&solver.SGD{Rate: 1}).Step([]gorgonia.ValueGrad{p[1]}),
	}
	for i, err := range append(errs, d.Close())[:len(errs)] {
		require.Check(t, err != nil && !strings.Contains(err.Error(), "%!") &&
			strings.Contains(err.Error(), "unnamed("), "error %d is %v", i, err)
	}
}

// TestCheckpointsOfFormat1Load: those of versions that numbered tensors in place of naming them, of
// a model with frozen variables, running statistics and groups.
func TestCheckpointsOfFormat1Load(t *testing.T) {
	all(t, 1, func(r rank) error {
		m := testranks.Must(newFormat1())
		d := testranks.Must(New(r.comm, m.params, WithFrozen(m.frozen)))
		defer d.Close()
		groups := testranks.Must(solver.NewGroups(m.params,
			trainedBy(&solver.AdamW{Rate: 0.5}, m.params[1:]),
			trainedBy(&solver.Momentum{Rate: 0.5, Momentum: 0.5}, m.params[:1])))
		var progress struct{ Step int }
		adam := &solver.Adam{Rate: 0.5}
		testranks.NoError(d.Load("testdata/format1/adam", adam, &progress))
		if steps := stepsOf(adam); steps != 1 || progress.Step != 7 {
			return fmt.Errorf("after %d steps of Adam and %d of progress", steps, progress.Step)
		}
		testranks.NoError(errors.Join(m.check(), d.Load("testdata/format1/groups", groups, nil)))
		alone := testranks.Must(newFormat1())
		weights := testranks.Must(New(r.comm, alone.params, WithFrozen(alone.frozen)))
		return errors.Join(
			weights.Load("testdata/format1/adam", &solver.SGD{Rate: 1}, nil, WeightsOnly()),
			alone.check(), weights.Close())
	})
}

// stepsOf returns how many steps an Adam has counted.
func stepsOf(adam *solver.Adam) int64 {
	state, err := adam.State()
	if n, ok := state["adam.steps"]; ok && err == nil {
		return backend.View[int64](n)[0]
	}
	return 0
}

// format1 is the model of testdata/format1.
type format1 struct {
	params gorgonia.Nodes
	frozen *gorgonia.Node
	norm   stock.Averaging
}

func newFormat1() (m format1, err error) {
	m.params = nodes(shaped{"a.weight", 0, []int{2, 3}}, shaped{"a.bias", 0, []int{3}})
	g := m.params[0].Graph()
	m.frozen = shaped{"frozen", 0, []int{2}}.in(g)
	x := shaped{"x", 1, []int{4, 3, 1, 1}}.in(g)
	_, _, _, m.norm, err = gorgonia.BatchNorm(x, nil, nil, 0.5, 1e-5)
	return m, err
}

// check compares the model with what was saved.
func (m format1) check() error {
	mean, variance := m.norm.Stats()
	for _, tt := range []struct {
		got  gorgonia.Value
		want []float64
	}{
		{m.params[0].Value(), []float64{1, 2, 3, 4, 5, 6}}, {m.params[1].Value(),
			[]float64{10, 11, 12}},
		{m.frozen.Value(), []float64{100, 101}}, {mean, []float64{1, 2, 3}},
		{variance, []float64{4, 5, 6}},
	} {
		if got := numbers(tt.got); !slices.Equal(got, tt.want) {
			return fmt.Errorf("it has %v, want %v", got, tt.want)
		}
	}
	return nil
}
