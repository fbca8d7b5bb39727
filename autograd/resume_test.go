package autograd

import (
	"bytes"
	"errors"
	"fmt"
	"maps"
	"math"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/autograd/solver"
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/backend/compress/sparse"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/internal/testing/testenv"
	"github.com/euryale-ml/euryale/ops/nn"
)

// training is a quadratic in training, wherever it is.
type training struct {
	rank
	m      *quadratic
	d      *DataParallel
	vm     gorgonia.VM
	solver solver.Solver
}

// trainQuadratic runs f, and gives everything back.
func (r rank) trainQuadratic(f func(t *training) error, opts ...Option) error {
	m, err := newQuadratic(r)
	if err != nil {
		return err
	}
	t := &training{rank: r, m: m, solver: &solver.Momentum{Rate: 0.1, Momentum: 0.9}}
	if t.d, err = New(r.comm, m.params, opts...); err != nil {
		return err
	}
	var failed error
	t.vm, err = m.machine(r, func(w *gorgonia.Node) *gorgonia.Node {
		y, err := t.d.Hook(w)
		failed = errors.Join(failed, err)
		return y
	})
	if err = errors.Join(err, failed); err != nil {
		return err
	}
	err = f(t)
	return errors.Join(err, t.vm.Close(), t.solver.Close(), t.d.Close())
}

func (t *training) steps(n int) error {
	for range n {
		if err := t.run(); err != nil {
			return err
		}
		if err := t.finish(); err != nil {
			return err
		}
	}
	return nil
}

// run begins a step.
func (t *training) run() error {
	if err := t.vm.RunAll(); err != nil {
		return errors.Join(err, t.d.Err())
	}
	return nil
}

// finish ends it.
func (t *training) finish() error {
	grads, err := t.d.Sync()
	if err == nil {
		err = t.solver.Step(grads)
	}
	t.vm.Reset()
	return errors.Join(err, t.d.Average())
}

// values returns a copy of the parameters.
func (t *training) values() (all [][]byte, err error) {
	for _, p := range t.d.params {
		b, err := p.bytes()
		if err != nil {
			return nil, err
		}
		all = append(all, bytes.Clone(b))
	}
	return all, nil
}

func (t *training) save(dir string) error { return t.d.Save(dir, t.solver, nil) }

// Training resumes bitwise identically wherever parameters are and ranks communicate, and
// with what gradients travel through.
func TestResumeEverywhere(t *testing.T) {
	testenv.Each(t, testenv.OnHosts(), func(t *testing.T, k testenv.Kind) {
		for _, name := range slices.Sorted(maps.Keys(compressions)) {
			// A bucket for each parameter, so that partial averaging has turns.
			opts := append([]Option{WithBuckets(1, 1)}, compressions[name]...)
			dir := filepath.Join(t.TempDir(), "checkpoint")
			want := make([][][]byte, 2)
			allOn(t, k, len(want), func(r rank) error {
				return r.trainQuadratic(func(t *training) (err error) {
					if err := errors.Join(t.steps(5), t.save(dir), t.steps(5)); err != nil {
						return fmt.Errorf("%s: %w", name, err)
					}
					want[r.comm.Rank()], err = t.values()
					return err
				}, opts...)
			})
			allOn(t, k, len(want), func(r rank) error {
				return r.trainQuadratic(func(t *training) error {
					if err := errors.Join(t.steps(2), t.d.Load(dir, t.solver, nil),
						t.steps(5)); err != nil {
						return fmt.Errorf("%s: %w", name, err)
					}
					got, err := t.values()
					if err == nil && !slices.EqualFunc(got, want[r.comm.Rank()], bytes.Equal) {
						err = fmt.Errorf("%s: other bits than without a stop", name)
					}
					return err
				}, opts...)
			})
		}
	})
}

// A checkpoint of one place is loaded in another one, with the bits of the first: it does
// not say where parameters were.
func TestACheckpointMovesOnHost(t *testing.T) {
	for _, from := range testenv.OnHosts() {
		dir := filepath.Join(t.TempDir(), "checkpoint")
		want := make([][][]byte, 2)
		allOn(t, from, len(want), func(r rank) error {
			return r.trainQuadratic(func(t *training) (err error) {
				if err := errors.Join(t.steps(3), t.save(dir), t.steps(3)); err != nil {
					return err
				}
				want[r.comm.Rank()], err = t.values()
				return err
			}, WithBuckets(1, 1))
		})
		for _, to := range testenv.OnHosts() {
			allOn(t, to, len(want), func(r rank) error {
				return r.trainQuadratic(func(t *training) error {
					// Data differ between ranks, not between places.
					if err := errors.Join(t.d.Load(dir, t.solver, nil), t.steps(3)); err != nil {
						return err
					}
					got, err := t.values()
					if err == nil && !slices.EqualFunc(got, want[r.comm.Rank()], bytes.Equal) {
						err = fmt.Errorf("from %s to %s: other bits", from, to)
					}
					return err
				}, WithBuckets(1, 1))
			})
		}
	}
}

// A step whose gradients are spoiled on one rank is left out, wherever parameters are: all
// of w1, w2 and b are, and s is not.
func TestASpoiledStepIsLeftOutEverywhere(t *testing.T) {
	testenv.Each(t, testenv.OnHosts(), func(t *testing.T, k testenv.Kind) {
		for _, buckets := range []Option{WithBuckets(1<<20, 1<<20), WithBuckets(1, 1)} {
			allOn(t, k, 2, func(r rank) error {
				return r.trainQuadratic(func(t *training) error {
					if err := t.steps(2); err != nil {
						return err
					}
					err := unchanged(t.d, t.solver, func() error {
						err := t.spoiledStep(7)
						blame := "the gradient of b f32(5, 3)"
						if !errors.As(err, new(*sparse.NotFiniteError)) ||
							!strings.Contains(err.Error(), blame) ||
							!strings.Contains(err.Error(), "on rank 1, element 7: ") {
							return fmt.Errorf("the error is %v", err)
						}
						return nil
					})
					return errors.Join(err, t.d.Err(), t.steps(2), t.d.Check())
				}, buckets, WithCompression(sparse.Wrap(sparse.TopK(0.3), sparse.WithStrict())))
			})
		}
	})
}

// spoiledStep is a step with an infinity in the data of rank 1.
func (t *training) spoiledStep(at int) error {
	if t.comm.Rank() != 1 {
		return t.steps(1)
	}
	y := t.m.data[1]
	good := y.Value()
	x := make([]float32, 15)
	x[at] = float32(math.Inf(1))
	bad := tensor.New(tensor.WithShape(5, 3), tensor.WithBacking(x))
	if err := gorgonia.UnsafeLet(y, bad); err != nil {
		return err
	}
	err := t.steps(1)
	return errors.Join(err, gorgonia.UnsafeLet(y, good))
}

// dropping trains a layer with dropout, and returns its parameter: six steps, with a checkpoint in
// the middle, or the last three from that checkpoint, after loaded.
func dropping(r rank, dir string, loaded func(*nn.Random), random *nn.Random,
	opts ...Option) ([]byte, error) {
	const batch, features = 4, 6
	r.build.Lock()
	g := gorgonia.NewGraph()
	x := gorgonia.NewMatrix(g, gorgonia.Float32, gorgonia.WithShape(batch, features),
		gorgonia.WithName("x"), gorgonia.WithInit(gorgonia.Ones()))
	w := gorgonia.NewMatrix(g, gorgonia.Float32, gorgonia.WithShape(features, 1),
		gorgonia.WithName("w"), gorgonia.WithInit(gorgonia.Ones()))
	dropped, err := nn.Dropout(0.5, random, x)
	r.build.Unlock()
	if err != nil {
		return nil, err
	}
	y := gorgonia.Must(gorgonia.Mul(dropped, w))
	if _, err := gorgonia.Grad(gorgonia.Must(gorgonia.Mean(gorgonia.Must(gorgonia.Square(y)))),
		w); err != nil {
		return nil, err
	}
	momentum := &solver.Momentum{Rate: 0.01, Momentum: 0.9}
	random.Seek(0, r.comm.Rank()*batch)
	d, err := New(r.comm, gorgonia.Nodes{w}, opts...)
	if err != nil {
		return nil, err
	}
	machine := gorgonia.NewTapeMachine(g, gorgonia.BindDualValues(w))
	steps := func(n int) (err error) {
		for range n {
			err = errors.Join(err, machine.RunAll(), d.Step(momentum))
			machine.Reset()
			random.Next(random.First())
		}
		return err
	}
	if loaded != nil {
		err = d.Load(dir, momentum, nil)
		loaded(random)
	} else {
		err = errors.Join(steps(3), d.Save(dir, momentum, nil))
	}
	err = errors.Join(err, steps(3))
	memory, unread := d.params[0].bytes()
	trained := bytes.Clone(memory)
	return trained, errors.Join(err, unread, machine.Close(), momentum.Close(), d.Close())
}

// TestDropoutResumes: masks after a checkpoint equal those of a training that did not stop, on each
// rank, and a checkpoint of other random numbers is refused.
func TestDropoutResumes(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "checkpoint")
	run := func(load func(*nn.Random), random func() *nn.Random,
		opts func(*nn.Random) []Option) [2][]byte {
		var got [2][]byte
		all(t, len(got), func(r rank) (err error) {
			own := random()
			got[r.comm.Rank()], err = dropping(r, dir, load, own, opts(own)...)
			return err
		})
		return got
	}
	seeded := func() *nn.Random { return nn.NewRandom(7) }
	kept := func(r *nn.Random) []Option { return []Option{WithRandom(r)} }
	found := func(*nn.Random) []Option { return nil } // in the graph
	load := func(*nn.Random) {}
	want := run(nil, seeded, kept)
	if got := run(load, seeded, kept); !bytes.Equal(got[0], want[0]) ||
		!bytes.Equal(got[1], want[1]) || !bytes.Equal(got[0], got[1]) {
		t.Errorf("parameters are %x after a checkpoint, %x without", got, want)
	}
	for _, opts := range []func(*nn.Random) []Option{kept, found} {
		for _, err := range each(t, 2, func(r rank) error {
			random := nn.NewRandom(8)
			_, err := dropping(r, dir, load, random, opts(random)...)
			return err
		}) {
			text := "seed of random numbers is 7, in this program the seed of random numbers is 8"
			require.Fails(t, "another seed", err, backend.ErrArgument, text)
		}
	}
	require.Slices(t, "WithRandom changes a training", run(nil, seeded, found)[0], want[0])
	if got := run(load, seeded, found); !slices.EqualFunc(got[:], want[:], bytes.Equal) {
		t.Error("without WithRandom a training goes on from a checkpoint with other masks")
	}
	again := func(r *nn.Random) { r.Seek(0, r.First()) }
	if got := run(again, seeded, found); bytes.Equal(got[0], want[0]) {
		t.Error("a training that begins with the masks of step 0 again has the same parameters: " +
			"the test shows nothing")
	}
}
