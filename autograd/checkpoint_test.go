package autograd

import (
	"bytes"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"gorgonia.org/gorgonia"

	"github.com/euryale-ml/euryale/autograd/internal/checkpoint"
	"github.com/euryale-ml/euryale/autograd/solver"
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/backend/compress/half"
	"github.com/euryale-ml/euryale/backend/compress/sparse"
	"github.com/euryale-ml/euryale/internal/files"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/internal/testing/testenv"
)

// lesson is a model in training on one rank.
type lesson struct {
	rank
	m      *model
	d      *DataParallel
	vm     gorgonia.VM
	solver gorgonia.Solver
	spoil  func(x []float32) // changes the data of the next steps, if it is there
}

const lessonBatch = 12 // of all ranks

// teach runs f on size ranks.
func teach(t *testing.T, size int, solver func() gorgonia.Solver, f func(l *lesson) error,
	opts ...Option) {
	t.Helper()
	teachOn(t, testenv.Hosts, size, solver, f, opts...)
}

// teachOn is teach for ranks that communicate where k says.
func teachOn(t *testing.T, k testenv.Kind, size int, solver func() gorgonia.Solver,
	f func(l *lesson) error, opts ...Option) {
	t.Helper()
	allOn(t, k, size, func(r rank) error { return r.teach(solver(), f, opts...) })
}

func (r rank) teach(solver gorgonia.Solver, f func(l *lesson) error, opts ...Option) error {
	return r.teachHooked("all", solver, f, opts...)
}

// teachHooked is teach with hooks as a setting has them.
func (r rank) teachHooked(hooks string, solver gorgonia.Solver, f func(l *lesson) error,
	opts ...Option) (err error) {
	l := &lesson{rank: r, solver: solver}
	r.build.Lock()
	l.m = newMLP(lessonBatch/r.comm.Size(), uint64(r.comm.Rank()))
	r.build.Unlock()
	if l.d, err = New(r.comm, l.m.params, append([]Option{WithBuckets(100, 300)},
		opts...)...); err != nil {
		return err
	}
	r.build.Lock()
	l.vm, err = setting{hooks: hooks}.machine(l.m, l.d)
	r.build.Unlock()
	if err != nil {
		return err
	}
	defer l.vm.Close()
	return errors.Join(f(l), l.d.Close())
}

// step is one step of training.
func (l *lesson) step(number int) error {
	if err := l.run(number); err != nil {
		return err
	}
	return l.finish()
}

// run begins a step.
func (l *lesson) run(number int) error {
	l.m.feed(number, lessonBatch, l.comm.Rank()*lessonBatch/l.comm.Size())
	if l.spoil != nil {
		l.spoil(l.m.x.Value().Data().([]float32))
	}
	if err := l.vm.RunAll(); err != nil {
		return errors.Join(err, l.d.Err())
	}
	return nil
}

// finish ends it.
func (l *lesson) finish() error {
	if err := l.sync(); err != nil {
		return err
	}
	return l.d.Average()
}

// sync is finish without an average.
func (l *lesson) sync() error {
	grads, err := l.d.Sync()
	if err != nil {
		return err
	}
	if err := l.solver.Step(grads); err != nil {
		return err
	}
	l.vm.Reset()
	return nil
}

func (l *lesson) steps(from, to int) error {
	for i := from; i < to; i++ {
		if err := l.step(i); err != nil {
			return fmt.Errorf("step %d: %w", i, err)
		}
	}
	return nil
}

// values returns a copy of the parameters.
func (l *lesson) values() (all [][]float32) {
	for _, p := range l.m.params {
		all = append(all, slices.Clone(p.Value().Data().([]float32)))
	}
	return all
}

func sameBits(a, b [][]float32) error {
	for i := range a {
		if !bytes.Equal(backend.Of(a[i]).Bytes(), backend.Of(b[i]).Bytes()) {
			return fmt.Errorf("parameter %d is %v, want %v", i, a[i], b[i])
		}
	}
	return nil
}

func heavyBall() gorgonia.Solver { return &solver.Momentum{Rate: 0.05, Momentum: 0.9} }

// compressions are what gradients may travel through.
var compressions = map[string][]Option{
	"plain": nil,
	"bf16":  {WithCompression(half.Wrap(backend.BF16))},
	"topk":  {WithCompression(sparse.Wrap(sparse.TopK(0.05)))},
	// whose messages would be more bytes
	"fallback": {WithCompression(sparse.Wrap(sparse.TopK(0.9)))},
	"threshold": {WithCompression(sparse.Wrap(sparse.Threshold(0.002),
		sparse.WithValues(backend.F16)))},
	"partial": {WithPartial()},
}

func TestCompressionActsOnTheTrainingPath(t *testing.T) {
	const steps = 10
	teach(t, 4, heavyBall, func(l *lesson) error {
		if err := errors.Join(l.steps(0, steps), l.d.Check()); err != nil {
			return err
		}
		c, ok := backend.As[*half.Communicator](l.d.Comm())
		if !ok {
			return errors.New("no half.Communicator")
		}
		if n := c.Counters(); n.Calls != int64(steps*len(l.d.buckets)) || n.Dense != 2*n.Bytes ||
			n.Bytes == 0 {
			return fmt.Errorf("the counters of half are %+v", n)
		}
		return nil
	}, compressions["bf16"]...)
	teach(t, 4, heavyBall, func(l *lesson) error {
		if err := errors.Join(l.steps(0, steps), l.d.Check()); err != nil {
			return err
		}
		c, _ := backend.As[*sparse.Communicator](l.d.Comm())
		if n := c.Counters(); n.Calls != int64(steps*len(l.d.buckets)) || n.Entries == 0 ||
			2*n.Bytes > n.DenseBytes {
			return fmt.Errorf("the counters of sparse are %+v", n)
		}
		return nil
	}, WithBuckets(1<<20, 1<<20), WithCompression(sparse.Wrap(sparse.TopK(0.02))))
}

func TestNaNIsAnErrorThatNamesParametersAndRank(t *testing.T) {
	errs := each(t, 3, func(r rank) error {
		return r.teach(heavyBall(), func(l *lesson) error {
			if err := l.step(0); err != nil {
				return err
			}
			if l.comm.Rank() == 1 {
				l.m.params[2].Value().Data().([]float32)[0] = float32(math.NaN())
			}
			return l.step(1)
		}, WithCompression(sparse.Wrap(sparse.TopK(0.05), sparse.WithStrict())))
	})
	for _, err := range errs {
		require.Check(t, errors.As(err, new(*sparse.NotFiniteError)) &&
			strings.Contains(err.Error(), "bucket 0 (b2)") && strings.Contains(err.Error(),
			"operand of rank 1 with state 1"), "the error is %v", err)
	}
}

// A step that a NaN spoils on one rank is left out on all: the error names the parameter,
// and training goes on with the bits of a run that never had this step. Only the gradient
// of w1 is spoiled: an infinite feature saturates the tanh.
func TestASpoiledStepIsLeftOut(t *testing.T) {
	const feature = 5
	testenv.Each(t, testenv.OnHosts(), func(t *testing.T, k testenv.Kind) {
		for i, how := range []sparse.Selection{sparse.TopK(0.05), sparse.TopK(1),
			sparse.Threshold(0.002)} {
			for j, buckets := range []Option{WithBuckets(1<<20, 1<<20), WithBuckets(100, 300)} {
				if k.Sampled() && (i+j)%2 > 0 {
					continue
				}
				var want [2][][]float32
				for _, spoiled := range []bool{false, true} {
					teachOn(t, k, len(want), heavyBall, func(l *lesson) error {
						if err := l.steps(0, 2); err != nil {
							return err
						}
						if spoiled {
							if err := unchanged(l.d, l.solver, func() error {
								return l.spoiledStep(feature)
							}); err != nil {
								return err
							}
						}
						if err := errors.Join(l.steps(2, 6), l.d.Check()); err != nil {
							return err
						}
						if l.d.saver.Steps != 6 {
							return fmt.Errorf("%d steps are counted", l.d.saver.Steps)
						}
						if !spoiled {
							want[l.comm.Rank()] = l.values()
							return nil
						}
						return sameBits(l.values(), want[l.comm.Rank()])
					}, buckets, WithCompression(sparse.Wrap(how, sparse.WithStrict())))
				}
			}
		}
	})
}

// spoiledStep is a step with an infinity in the data of rank 1.
func (l *lesson) spoiledStep(feature int) error {
	if l.comm.Rank() == 1 {
		l.spoil = func(x []float32) { x[feature] = float32(math.Inf(1)) }
	}
	err := l.step(50)
	l.spoil = nil
	l.vm.Reset()
	blame := fmt.Sprintf("the step is skipped on all ranks: the gradient of w1 f32(36, 16) on "+
		"rank 1, element %d: bucket", 16*feature)
	if !errors.As(err, new(*sparse.NotFiniteError)) || !strings.Contains(err.Error(), blame) {
		return fmt.Errorf("the error is %v", err)
	}
	return l.d.Err()
}

func TestEveryPartIsAveragedInTurn(t *testing.T) {
	teach(t, 4, heavyBall, func(l *lesson) error {
		parts := len(l.d.buckets)
		if parts < 3 {
			return fmt.Errorf("%d buckets are too few to see anything", parts)
		}
		averaged := map[string]int{}
		for i := range parts {
			// Whatever was averaged before: now all differ.
			for _, p := range l.m.params {
				v := p.Value().Data().([]float32)
				for j := range v {
					v[j] = float32(l.comm.Rank() + j%7)
				}
			}
			if err := l.d.Average(); err != nil {
				return err
			}
			for k, p := range l.d.params {
				v := l.m.params[k].Value().Data().([]float32)
				for j := range v {
					want := float32(l.comm.Rank() + j%7)
					if p.bucket.index == i {
						want = 1.5 + float32(j%7) // the mean of the ranks
					}
					if v[j] != want {
						return fmt.Errorf("turn %d: element %d of %v is %v, want %v", i, j, p, v[j],
							want)
					}
				}
				if p.bucket.index == i {
					averaged[p.name]++
				}
			}
		}
		for _, p := range l.d.params {
			if averaged[p.name] != 1 {
				return fmt.Errorf("%v was averaged %d times", p, averaged[p.name])
			}
		}
		return nil
	}, WithPartial())
}

func TestPartialTrainingEndsTheSameAfterAverageAll(t *testing.T) {
	teach(t, 3, heavyBall, func(l *lesson) error {
		if err := l.steps(0, 7); err != nil {
			return err
		}
		if err := l.d.Check(); !errors.Is(err, backend.ErrMismatch) {
			return fmt.Errorf("ranks do not differ: %v", err)
		}
		return errors.Join(l.d.AverageAll(), l.d.Check())
	}, WithPartial())
}

func TestOptionsThatExcludeEachOther(t *testing.T) {
	for want, opts := range map[string][]Option{
		"WithSum has no meaning":      {WithPartial(), WithSum()},
		"leave out WithCompression":   {WithPartial(), WithCompression(half.Wrap(backend.F16))},
		"half: f32: use f16":          {WithCompression(half.Wrap(backend.F32))},
		"a top-k of density 2: it mu": {WithCompression(sparse.Wrap(sparse.TopK(2)))},
	} {
		for _, err := range each(t, 2, func(r rank) error {
			return r.teach(heavyBall(), func(l *lesson) error { return nil }, opts...)
		}) {
			require.Fails(t, "autograd.New", err, want)
		}
	}
}

func TestResumeGivesTheSameTrajectory(t *testing.T) {
	const half, whole = 6, 12
	for name, opts := range compressions {
		t.Run(name, func(t *testing.T) {
			dir := filepath.Join(t.TempDir(), "checkpoint")
			want := make([][][]float32, 4)
			teach(t, 4, heavyBall, func(l *lesson) error {
				if err := l.steps(0, half); err != nil {
					return err
				}
				for range 2 { // the second takes the place of the first
					if err := l.d.Save(dir, l.solver, map[string]int{"step": half}); err != nil {
						return err
					}
				}
				if err := l.steps(half, whole); err != nil {
					return err
				}
				want[l.comm.Rank()] = l.values()
				return nil
			}, opts...)
			teach(t, 4, heavyBall, func(l *lesson) error {
				if err := l.steps(100, 103); err != nil { // it has another past
					return err
				}
				var progress struct{ Step int }
				if err := l.d.Load(dir, l.solver, &progress); err != nil {
					return err
				}
				if progress.Step != half {
					return fmt.Errorf("progress is %+v", progress)
				}
				if err := l.steps(half, whole); err != nil {
					return err
				}
				return sameBits(l.values(), want[l.comm.Rank()])
			}, opts...)
			left := drafts(dir)
			require.Check(t, len(left) == 0, "%v are left behind", left)
		})
	}
}

func TestSolversWithHiddenStateAreNotSaved(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "checkpoint")
	teach(t, 2, func() gorgonia.Solver { return gorgonia.NewAdamSolver() }, func(l *lesson) error {
		err := l.d.Save(dir, l.solver, nil)
		if !errors.Is(err, backend.ErrUnsupported) ||
			!strings.Contains(err.Error(), "*gorgonia.AdamSolver cannot be read") {
			return fmt.Errorf("the error is %v", err)
		}
		for _, by := range []gorgonia.Solver{&solver.SGD{Rate: 0.1}, &solver.SGD{},
			gorgonia.NewVanillaSolver(), heavyBall()} {
			if err := errors.Join(l.d.Save(dir, by, nil),
				l.d.Load(dir, by, nil)); err != nil {
				return err
			}
		}
		return nil
	})
}

// Checkpoints name solvers as of package autograd, where an SGD could be a value.
func TestSolversOfOlderCheckpointsFitThoseOfToday(t *testing.T) {
	sgd, adam := solver.Kind(&solver.SGD{}), solver.Kind(&solver.Adam{})
	for written, today := range map[string]string{
		"autograd.SGD":  sgd,
		"*autograd.SGD": sgd,
		inFile(adam):    adam,
		"groups: autograd.SGD of 2 parameters, *autograd.Adam of 1 parameters": "groups: " + sgd +
			" of 2 parameters, " + adam + " of 1 parameters",
	} {
		err := (record{Solver: written}).fits(record{Solver: today})
		require.Check(t, err == nil, "%s: %v", written, err)
	}
	require.Fails(t, "the state of an SGD is taken for that of an Adam",
		(record{Solver: "autograd.SGD"}).fits(record{Solver: adam}))
}

// stateIn returns a copy of all that training depends on, by names.
func stateIn(d *DataParallel, solver gorgonia.Solver) (map[string][]byte, error) {
	model, err := d.modelState(solver)
	if err != nil {
		return nil, err
	}
	if s, ok := d.compression(); ok {
		state, err := s.State()
		if err != nil {
			return nil, err
		}
		add(model, state)
	}
	all := map[string][]byte{"turn": []byte(fmt.Sprint(d.partial.turn))}
	for name, t := range model {
		all[name] = bytes.Clone(t.Data.Bytes())
	}
	return all, nil
}

// unchanged fails if f changes any of that.
func unchanged(d *DataParallel, solver gorgonia.Solver, f func() error) error {
	before, err := stateIn(d, solver)
	if err != nil {
		return err
	}
	if err := f(); err != nil {
		return err
	}
	after, err := stateIn(d, solver)
	if err != nil {
		return err
	}
	for name := range before {
		if !bytes.Equal(before[name], after[name]) {
			return fmt.Errorf("%s has changed", name)
		}
	}
	if len(before) != len(after) {
		return fmt.Errorf("there are %d parts of a state, there were %d", len(after), len(before))
	}
	return nil
}

func TestCheckpointsThatDoNotFitChangeNothing(t *testing.T) {
	type damage func(dir string) error
	edit := func(file string, change func([]byte) []byte) damage {
		return func(dir string) error {
			path := filepath.Join(dir, file)
			b, err := os.ReadFile(path)
			if err != nil {
				return err
			}
			changed := change(b)
			if bytes.Equal(changed, b) {
				return fmt.Errorf("%s was not damaged", file)
			}
			return os.WriteFile(path, changed, 0o666)
		}
	}
	replace := func(file, from, to string) damage {
		return edit(file, func(b []byte) []byte {
			return bytes.Replace(b, []byte(from), []byte(to), 1)
		})
	}
	// A name of the same length, which nobody asks for, in a file that nobody can tell is changed.
	rename := func(file, from, to string) damage {
		return func(dir string) error {
			err := replace(file, from, to)(dir)
			if file != checkpoint.RecordName {
				err = errors.Join(err, replace(file, `"crc32c"`, `"remark"`)(dir))
			}
			return errors.Join(err, rebind(dir))
		}
	}
	flip := func(file string) damage {
		return edit(file, func(b []byte) []byte { b = slices.Clone(b); b[len(b)-1] ^= 1; return b })
	}
	// Another dtype or shape of the same size.
	tensor := func(file, name string, change func(t stored) stored) damage {
		return func(dir string) error {
			path := filepath.Join(dir, file)
			all, err := checkpoint.ReadTensors(files.Disk(path), ".")
			if err != nil {
				return err
			}
			if _, ok := all[name]; !ok {
				return fmt.Errorf("%s has no %s", file, name)
			}
			all[name] = change(all[name])
			return rewrite(path, all)
		}
	}
	without := func(file string, names ...string) damage {
		return func(dir string) error {
			path := filepath.Join(dir, file)
			all, err := checkpoint.ReadTensors(files.Disk(path), ".")
			if err != nil {
				return err
			}
			for _, name := range names {
				delete(all, name)
			}
			return rewrite(path, all)
		}
	}
	asI32 := func(t stored) stored { return stored{Shape: t.Shape, Data: t.Data.As(backend.I32)} }
	vector := func(b backend.Buffer) stored { return stored{Shape: []int{b.Len()}, Data: b} }
	half := func(t stored) stored { return vector(t.Data.Slice(0, t.Data.Len()/2)) }
	longer := func(t stored) stored {
		v := slices.Clone(backend.View[int64](t.Data))
		v[0]++ // the length of the operand
		return vector(backend.Of(v))
	}
	const rank1 = "rank1.safetensors"
	const velocity = "solver.momentum.velocity/"
	nothing := func(string) error { return nil }
	same := heavyBall
	for name, tt := range map[string]struct {
		saved, loaded string // of compressions
		damage        damage
		solver        func() gorgonia.Solver
		opts          []Option
	}{
		"there is none": {"topk", "topk", os.RemoveAll, same, nil},
		"a rank is missing": {"topk", "topk",
			func(dir string) error { return os.Remove(filepath.Join(dir, rank1)) }, same, nil},
		"cut off": {"topk", "topk",
			edit(checkpoint.ModelName, func(b []byte) []byte { return b[:len(b)-4] }), same, nil},
		"a bit of the model": {"topk", "topk", flip(checkpoint.ModelName), same, nil},
		"a bit of a rank's":  {"topk", "topk", flip(rank1), same, nil},
		"a digit of the progress": {"plain", "plain",
			replace(checkpoint.RecordName, `"loss": 7`, `"loss": 8`), same, nil},
		"another shape": {"topk", "topk",
			rename(checkpoint.ModelName, "[36,16]", "[16,36]"), same, nil},
		"not JSON": {"topk", "topk",
			edit(checkpoint.RecordName, func(b []byte) []byte { return b[1:] }), same, nil},
		"other ranks": {"topk", "topk",
			rename(checkpoint.RecordName, `"ranks": 2`, `"ranks": 3`), same, nil},
		"a wild turn": {"topk", "topk",
			rename(checkpoint.RecordName, `"turn": 0`, `"turn": 99`), same, nil},
		"no compression": {"topk", "plain", nothing, same, nil},
		"other buckets":  {"topk", "topk", nothing, same, []Option{WithBuckets(5000, 5000)}},
		"another solver": {"topk", "topk", nothing,
			func() gorgonia.Solver { return &solver.SGD{Rate: 0.1} }, nil},
		"other progress": {"plain", "plain",
			rename(checkpoint.RecordName, `"loss": 7`, `"loss": {}`), same, nil},
		"rank 1 lacks a residual": {"topk", "topk",
			rename(rank1, `sparse.residual.1"`, `sparse.residual.9"`), same, nil},
		"rank 1 lacks a residual of a fallback": {"fallback", "fallback",
			rename(rank1, `sparse.residual.1"`, `sparse.another1.1"`), same, nil},
		"rank 1 lacks counts": {"threshold", "threshold",
			rename(rank1, `sparse.counts.1"`, `sparse.counts.9"`), same, nil},
		"rank 1 lacks a state": {"threshold", "threshold",
			without(rank1, "sparse.counts.1", "sparse.residual.1"), same, nil},
		"a residual is half": {"topk", "topk", tensor(rank1, "sparse.residual.2",
			half), same, nil},
		"a residual is integers": {"topk", "topk", tensor(rank1, "sparse.residual.2",
			asI32), same, nil},
		"a state of another length": {"fallback", "fallback",
			tensor(rank1, "sparse.counts.2", longer), same, nil},
		"a velocity is missing": {"plain", "plain",
			rename(checkpoint.ModelName, velocity+"b1", velocity+"b7"), same, nil},
		"the last one is missing": {"plain", "plain",
			rename(checkpoint.ModelName, velocity+"b2", "solver.momentum.another0/b2"), same, nil},
		"a velocity is half": {"plain", "plain",
			tensor(checkpoint.ModelName, velocity+"w2", half), same, nil},
		"a velocity is integers": {"plain", "plain",
			tensor(checkpoint.ModelName, velocity+"w2", asI32), same, nil},
		"rank 1 lacks a velocity": {"partial", "partial",
			rename(rank1, velocity+"b2", "solver.momentum.another0/b2"), same, nil},
		"rank 1 lacks a parameter": {"partial", "partial", rename(rank1, `"w2"`, `"w7"`),
			same, nil},
	} {
		t.Run(name, func(t *testing.T) {
			dir := filepath.Join(t.TempDir(), "checkpoint")
			type progress struct{ Loss int }
			teach(t, 2, heavyBall, func(l *lesson) error {
				return errors.Join(l.steps(0, 2),
					l.d.Save(dir, l.solver, map[string]int{"loss": 7}))
			}, compressions[tt.saved]...)
			require.NoError(t, tt.damage(newest(t, dir)))
			teach(t, 2, tt.solver, func(l *lesson) error {
				if err := l.steps(0, 3); err != nil {
					return err
				}
				p := progress{77}
				err := unchanged(l.d, l.solver, func() error {
					if err := l.d.Load(dir, l.solver, &p); err == nil {
						return errors.New("it was loaded")
					}
					return nil
				})
				if err == nil && p.Loss != 77 {
					err = fmt.Errorf("progress is %+v", p)
				}
				return errors.Join(err, l.step(3))
			}, append(slices.Clone(tt.opts), compressions[tt.loaded]...)...)
		})
	}
}

// stubborn refuses every state, and does not say so before.
type stubborn struct {
	gorgonia.Solver
	refuses bool
}

func (stubborn) State() (map[string]backend.Buffer, error) { return nil, nil }

func (s stubborn) SetState(map[string]backend.Buffer) error {
	if !s.refuses {
		return nil
	}
	return errors.New("no")
}

// What fails on one rank after others have changed ends training on all.
func TestLoadThatFailsHalfwayEndsAllRanks(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "checkpoint")
	sgd := func() gorgonia.Solver { return stubborn{&solver.SGD{}, false} }
	teach(t, 2, sgd, func(l *lesson) error {
		if err := l.d.Save(dir, l.solver, nil); err != nil {
			return err
		}
		err := l.d.Load(dir, stubborn{&solver.SGD{}, l.comm.Rank() == 1}, nil)
		if err == nil || !strings.Contains(err.Error(), "ranks may differ") ||
			!strings.Contains(err.Error(), "rank 1 cannot go on: no") {
			return fmt.Errorf("the error is %v", err)
		}
		if err := l.d.Save(dir, l.solver, nil); err == nil ||
			!strings.Contains(err.Error(), "ranks may differ") {
			return fmt.Errorf("it goes on: %v", err)
		}
		return nil
	})
}
