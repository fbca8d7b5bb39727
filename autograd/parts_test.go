package autograd

import (
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/autograd/internal/checkpoint"
	"github.com/euryale-ml/euryale/autograd/solver"
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/backend/compress/sparse"
	"github.com/euryale-ml/euryale/internal/files"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/internal/testing/testranks"
)

// dividedShapes are parameters of a model, and dividedAxes those of them that ranks shard.
var (
	dividedShapes = map[string][]int{"w": {5, 3}, "v": {2, 4}, "u": {3}}
	dividedAxes   = map[string]int{"w": 0, "v": 1}
)

// dividedModel is a model of which one of some ranks has its part.
type dividedModel struct {
	params gorgonia.Nodes
	grads  []gorgonia.ValueGrad
	*DataParallel
}

// newDivided makes the part of a model that a rank of comm has: elements and gradients follow from
// where they are in the whole.
func newDivided(r rank, data, comm backend.Communicator, opts ...Option) (m dividedModel,
	err error) {
	r.build.Lock()
	graph := gorgonia.NewGraph()
	for _, name := range []string{"w", "v", "u"} {
		shape := slices.Clone(dividedShapes[name])
		var start int
		if axis, ok := dividedAxes[name]; ok {
			parts := backend.Even(shape[axis], comm.Size())
			for _, n := range parts[:comm.Rank()] {
				start += n
			}
			shape[axis] = parts[comm.Rank()]
		}
		values, slopes := make([]float32, tensor.Shape(shape).TotalSize()),
			make([]float32, tensor.Shape(shape).TotalSize())
		for i := range values {
			at := slices.Clone(shape) // coordinates
			for axis, rest := len(shape)-1, i; axis >= 0; axis-- {
				at[axis], rest = rest%shape[axis], rest/shape[axis]
			}
			if axis, ok := dividedAxes[name]; ok {
				at[axis] += start
			}
			for _, x := range at {
				values[i] = 7*values[i] + float32(x) + 1
			}
			slopes[i] = 1 / values[i]
		}
		n := gorgonia.NewTensor(graph, tensor.Float32, len(shape), gorgonia.WithName(name),
			gorgonia.WithShape(shape...), gorgonia.WithValue(tensor.New(tensor.WithShape(shape...),
				tensor.WithBacking(values))))
		m.params = append(m.params, n)
		m.grads = append(m.grads,
			gradient{n, tensor.New(tensor.WithShape(shape...), tensor.WithBacking(slopes))})
	}
	r.build.Unlock()
	m.DataParallel, err = New(data, m.params,
		append(opts, WithSum(), WithParts(comm, dividedAxes))...)
	return m, err
}

// step is a step of a solver with the model's gradients, which it sets to zero.
func (m dividedModel) step(s solver.Solver) error {
	var grads []gorgonia.ValueGrad
	for _, g := range m.grads {
		view := g.(gradient).view.(*tensor.Dense).Clone().(*tensor.Dense)
		grads = append(grads, gradient{g.(gradient).node, view})
	}
	return s.Step(grads)
}

// ofParts runs a body as the ranks of data groups times ranks with parts.
func ofParts(t *testing.T, groups, parts int,
	body func(r rank, data, comm backend.Communicator) error) []error {
	t.Helper()
	return each(t, groups*parts, func(r rank) error {
		data := testranks.Must(r.comm.Split(r.comm.Rank()%parts, r.comm.Rank()))
		comm := testranks.Must(r.comm.Split(r.comm.Rank()/parts, r.comm.Rank()))
		return errors.Join(body(r, data, comm), comm.Close(), data.Close())
	})
}

// TestPartsMakeTheWhole: whatever the number of ranks among which parameters are sharded,
// checkpoints have the same bytes and models the same hash, and each goes on with the checkpoint of
// the other: with one solver and with groups.
func TestPartsMakeTheWhole(t *testing.T) {
	partsMakeTheWhole(t, func(gorgonia.Nodes) (solver.Solver, error) {
		return &solver.Adam{Rate: 0.1}, nil
	})
	partsMakeTheWhole(t, func(p gorgonia.Nodes) (solver.Solver, error) {
		return solver.NewGroups(p,
			trainedBy(&solver.RMSProp{Rate: 0.1}, gorgonia.Nodes{p[2], p[0]}),
			trainedBy(&solver.Adam{Rate: 0.1}, p[1:2]))
	})
}

func partsMakeTheWhole(t *testing.T, newSolver func(params gorgonia.Nodes) (solver.Solver, error)) {
	t.Helper()
	dir := t.TempDir()
	layouts := []struct{ groups, parts int }{{1, 1}, {2, 3}, {1, 2}}
	hashes := map[string]bool{}
	run := func(from string, groups, parts int, to string) {
		t.Helper()
		for i, err := range ofParts(t, groups, parts,
			func(r rank, data, comm backend.Communicator) error {
				m, err := newDivided(r, data, comm)
				if err != nil {
					return err
				}
				by, err := newSolver(m.params)
				if err != nil {
					return err
				}
				if from != "" {
					if err := m.Load(filepath.Join(dir, from), by, nil); err != nil {
						return err
					}
				}
				if err := errors.Join(m.step(by), m.Check()); err != nil {
					return err
				}
				if to != "" {
					return errors.Join(m.Save(filepath.Join(dir, to), by, nil), m.Close())
				}
				hash, err := m.Hash()
				if data.Rank() == 0 && comm.Rank() == 0 {
					hashes[hash] = true
				}
				return errors.Join(err, m.Close())
			}) {
			require.That(t, err == nil, "%d x %d from %q: rank %d: %v", groups, parts, from, i, err)
		}
	}
	var all []map[string]stored
	for i, l := range layouts {
		run("", l.groups, l.parts, fmt.Sprint(i))
		saved := newest(t, filepath.Join(dir, fmt.Sprint(i)))
		file := require.Value(checkpoint.ReadTensors(files.Disk(saved), checkpoint.ModelName))(t)
		all = append(all, file)
	}
	for i, l := range layouts {
		require.Check(t, maps.EqualFunc(all[i], all[0], sameStored),
			"the checkpoint of %d parts has other bytes than that of a whole model", l.parts)
		run(fmt.Sprint((i+1)%len(layouts)), l.groups, l.parts, "")
	}
	require.Check(t, len(hashes) == 1, "layouts end with %d different models", len(hashes))
}

// TestPartsRefused: what cannot be sharded is an error on all ranks.
func TestPartsRefused(t *testing.T) {
	dir := t.TempDir()
	for want, body := range map[string]func(r rank, data, comm backend.Communicator) error{
		`no parameter "x"`: func(r rank, data, comm backend.Communicator) error {
			n := newParam(gorgonia.NewGraph(), rand.New(rand.NewPCG(1, 1)), "w", 2, 2)
			_, err := New(data, gorgonia.Nodes{n}, WithParts(comm, map[string]int{"x": 0}))
			return err
		},
		"it must be one of its axes": func(r rank, data, comm backend.Communicator) error {
			n := newParam(gorgonia.NewGraph(), rand.New(rand.NewPCG(1, 1)), "w", 2, 2)
			_, err := New(data, gorgonia.Nodes{n}, WithParts(comm, map[string]int{"w": 2}))
			return err
		},
		"on rank 0, but parameter w is": func(r rank, data, comm backend.Communicator) error {
			n := newParam(gorgonia.NewGraph(), rand.New(rand.NewPCG(1, 1)), "w", 2, 2+comm.Rank())
			_, err := New(data, gorgonia.Nodes{n}, WithParts(comm, map[string]int{"w": 0}))
			return err
		},
		"WithParts has no meaning": func(r rank, data, comm backend.Communicator) error {
			n := newParam(gorgonia.NewGraph(), rand.New(rand.NewPCG(1, 1)), "w", 2, 2)
			_, err := New(data, gorgonia.Nodes{n}, WithPartial(), WithParts(comm, nil))
			return err
		},
		"has no value": func(r rank, data, comm backend.Communicator) error {
			n := newParam(gorgonia.NewGraph(), rand.New(rand.NewPCG(1, 1)), "w", 2, 2)
			if r.comm.Rank() == 3 { // of which ranks with other parts hear, too
				n = gorgonia.NewMatrix(gorgonia.NewGraph(), tensor.Float32,
					gorgonia.WithShape(2, 2))
			}
			_, err := New(data, gorgonia.Nodes{n}, WithParts(comm, nil))
			return err
		},
		"parameter u f32(3) is not the same on rank 1": func(r rank, data,
			comm backend.Communicator) error {
			m, err := newDivided(r, data, comm)
			if err != nil {
				return err
			}
			if comm.Rank() == 1 {
				m.params[2].Value().Data().([]float32)[0] = 0
			}
			return errors.Join(m.Check(), m.Close())
		},
		"residuals of a compression": func(r rank, data, comm backend.Communicator) error {
			m, err := newDivided(r, data, comm, WithCompression(sparse.Wrap(sparse.TopK(0.5))))
			if err != nil {
				return err
			}
			if err := m.CheckFinite(nil); err != nil { // which keeps nothing
				t.Errorf("residuals cannot be checked: %v", err)
			}
			err = m.Save(filepath.Join(dir, "sparse"), &solver.Adam{Rate: 1}, nil)
			return errors.Join(err, m.Close())
		},
	} {
		for i, err := range ofParts(t, 2, 2, body) {
			require.Fails(t, fmt.Sprint("rank ", i), err, want)
		}
	}
	left, err := os.ReadDir(dir)
	require.Check(t, err == nil && len(left) == 0, "Save has left %v (%v)", left, err)
}

// TestOnePartIsTheWhole: one rank that has all parts may save what a compression keeps.
func TestOnePartIsTheWhole(t *testing.T) {
	dir := t.TempDir()
	for i, err := range ofParts(t, 2, 1, func(r rank, data, comm backend.Communicator) error {
		m, err := newDivided(r, data, comm, WithCompression(sparse.Wrap(sparse.TopK(0.5))))
		if err != nil {
			return err
		}
		return errors.Join(m.Save(dir, &solver.Adam{Rate: 1}, nil), m.Close())
	}) {
		require.Check(t, err == nil, "rank %d: %v", i, err)
	}
}
