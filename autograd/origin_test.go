package autograd

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"gorgonia.org/gorgonia"

	"github.com/euryale-ml/euryale/autograd/internal/checkpoint"
	"github.com/euryale-ml/euryale/autograd/solver"
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/backend/compress/half"
	"github.com/euryale-ml/euryale/backend/compress/sparse"
	"github.com/euryale-ml/euryale/internal/files"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/internal/testing/testranks"
)

// another is a compression that does not describe itself.
type another struct{ backend.Communicator }

func compressedByAnother(c backend.Communicator) (backend.Communicator, error) {
	return another{c}, nil
}

// A checkpoint of another program is refused, with what both are, and changes nothing.
func TestCheckpointsOfAnotherProgram(t *testing.T) {
	through := func(s sparse.Selection, opts ...sparse.Option) []Option {
		return []Option{WithCompression(sparse.Wrap(s, opts...))}
	}
	sum := []Option{WithSum()}
	bf16, f16 := compressions["bf16"], []Option{WithCompression(half.Wrap(backend.F16))}
	for name, tt := range map[string]struct {
		saved, loaded []Option
		want          []string // what the error says; none if it is loaded
	}{
		"mean, sum": {nil, sum, []string{"in the checkpoint the reduction is avg",
			"in this program the reduction is sum"}},
		"sum, mean": {sum, nil, []string{"in the checkpoint the reduction is sum",
			"in this program the reduction is avg"}},
		"bf16, f16": {bf16, f16, []string{"compressed by half (bf16)",
			"compressed by half (f16)"}},
		"bf16, none": {bf16, nil, []string{"compressed by half (bf16)",
			"compressed by nothing"}},
		"density": {through(sparse.TopK(0.05)), through(sparse.TopK(0.5)),
			[]string{"sparse (topk=0.05,", "sparse (topk=0.5,"}},
		"threshold": {through(sparse.Threshold(0.1)), through(sparse.Threshold(0.2)),
			[]string{"threshold=0.1,", "threshold=0.2,"}},
		"values": {through(sparse.TopK(0.5), sparse.WithValues(backend.F16)),
			through(sparse.TopK(0.5)), []string{"values f16", "values f32"}},
		"feedback": {through(sparse.TopK(0.5)),
			through(sparse.TopK(0.5), sparse.WithoutFeedback()), []string{"feedback true",
				"feedback false"}},
		"another": {bf16, []Option{WithCompression(compressedByAnother)},
			[]string{"half (bf16)", "compressed by autograd.another"}},
		"the same": {bf16, bf16, nil},
		// bitwise identical
		"strict besides": {through(sparse.TopK(0.5)),
			through(sparse.TopK(0.5), sparse.WithStrict()), nil},
	} {
		t.Run(name, func(t *testing.T) {
			dir := filepath.Join(t.TempDir(), "checkpoint")
			teach(t, 2, heavyBall, func(l *lesson) error {
				return errors.Join(l.steps(0, 2), l.d.Save(dir, l.solver, nil))
			}, tt.saved...)
			teach(t, 2, heavyBall, func(l *lesson) error {
				if err := l.step(5); err != nil {
					return err
				}
				if tt.want == nil {
					return l.d.Load(dir, l.solver, nil)
				}
				return unchanged(l.d, l.solver, func() error {
					return refused(l.d.Load(dir, l.solver, nil), tt.want...)
				})
			}, tt.loaded...)
		})
	}
}

// refused returns an error unless err is an ErrArgument that says all of that.
func refused(err error, want ...string) error {
	for _, text := range want {
		if !errors.Is(err, backend.ErrArgument) || !strings.Contains(err.Error(), text) {
			return fmt.Errorf("the error is %v, want %q", err, text)
		}
	}
	return nil
}

// A program that trains a part of the parameters only is another one.
func TestCheckpointsWithMoreOrFewerParameters(t *testing.T) {
	dir := t.TempDir()
	all(t, 2, func(r rank) error {
		r.build.Lock()
		m := newMLP(1, 0)
		r.build.Unlock()
		for _, n := range []int{4, 2} {
			d, err := New(r.comm, m.params[:n])
			if err != nil {
				return err
			}
			err = d.Save(filepath.Join(dir, fmt.Sprint(n)), &solver.SGD{}, nil)
			if n == 2 {
				err = errors.Join(err,
					refused(d.Load(filepath.Join(dir, "4"), &solver.SGD{}, nil),
						"in the checkpoint the number of parameters is 4",
						"in this program the number of parameters is 2"))
			}
			if err = errors.Join(err, d.Close()); err != nil {
				return err
			}
		}
		return nil
	})
}

// A checkpoint from before the origin was written down is loaded, whatever its origin is.
func TestCheckpointsWithoutAnOriginAreLoaded(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "checkpoint")
	teach(t, 2, heavyBall, func(l *lesson) error {
		return errors.Join(l.steps(0, 2), l.d.Save(dir, l.solver, map[string]int{"step": 2}))
	})
	// As it was written then.
	old :=
		`{"format":1,"ranks":2,"solver":"*autograd.Momentum","partial":false,` +
			`"turn":0,"compression":true,"buckets":[68,528],"progress":{"step":2},` +
			`"crc32c":"2d87ea63"}`
	before := t.TempDir()
	record := filepath.Join(before, checkpoint.RecordName)
	require.NoError(t, os.WriteFile(record, []byte(old), 0o666))
	r, err := readRecord(files.Disk(before))
	if err != nil || !r.Compression || r.origin != (origin{}) {
		t.Errorf("an old record is %+v: %v", r, err)
	}
	require.NoError(t, withoutOrigin(newest(t, dir)))
	teach(t, 2, heavyBall, func(l *lesson) error {
		var p struct{ Step int }
		if err := l.d.Load(dir, l.solver, &p); err != nil || p.Step != 2 {
			return fmt.Errorf("step %d: %w", p.Step, err)
		}
		return l.step(2)
	}, WithSum())
}

// withoutOrigin writes a record as it was before.
func withoutOrigin(dir string) error {
	r, err := readRecord(files.Disk(dir))
	if err != nil {
		return err
	}
	if r.origin == (origin{}) {
		return errors.New("it has no origin")
	}
	r.origin = origin{}
	return reseal(dir, r)
}

// Who wants another compression loads with the old one, and goes on with another New.
func TestAnotherCompressionAfterLoad(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "checkpoint")
	var want [2][][]float32
	teach(t, len(want), heavyBall, func(l *lesson) error {
		want[l.comm.Rank()] = nil
		err := errors.Join(l.steps(0, 2), l.d.Save(dir, l.solver, nil))
		want[l.comm.Rank()] = l.values()
		return err
	}, compressions["topk"]...)
	all(t, len(want), func(r rank) error {
		l := &lesson{rank: r, solver: heavyBall()}
		r.build.Lock()
		l.m = newMLP(lessonBatch/r.comm.Size(), uint64(r.comm.Rank()))
		r.build.Unlock()
		for _, name := range []string{"topk", "bf16"} {
			var err error
			if l.d, err = New(r.comm, l.m.params, append([]Option{WithBuckets(100, 300)},
				compressions[name]...)...); err != nil {
				return err
			}
			if name == "bf16" {
				break
			}
			testranks.NoError(errors.Join(l.d.Load(dir, l.solver, nil), l.d.Close()))
		}
		testranks.NoError(sameBits(l.values(), want[r.comm.Rank()]))
		r.build.Lock()
		vm, err := setting{hooks: "all"}.machine(l.m, l.d)
		r.build.Unlock()
		if err != nil {
			return err
		}
		l.vm = vm
		defer vm.Close()
		return errors.Join(l.steps(2, 5), l.d.Check(), l.d.Close())
	})
}

// own unmarshals itself, so that Load does not try it beforehand.
type own struct{ text string }

func (o *own) UnmarshalJSON(b []byte) error { o.text = string(b); return nil }

// A checkpoint without progress says so to who wants one, and d goes on.
func TestProgressThatIsNotThere(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "checkpoint")
	teach(t, 2, heavyBall, func(l *lesson) error {
		if err := errors.Join(l.step(0), l.d.Save(dir, l.solver, nil), l.step(1)); err != nil {
			return err
		}
		for _, progress := range []any{new(int), new(own), 7} {
			err := unchanged(l.d, l.solver, func() error {
				return refused(l.d.Load(dir, l.solver, progress),
					"the checkpoint has no progress: pass nil")
			})
			if err = errors.Join(err, l.d.Err()); err != nil {
				return fmt.Errorf("a %T: %w", progress, err)
			}
		}
		return errors.Join(l.d.Load(dir, l.solver, nil), l.step(1))
	})
}

// TestProgressThatJSONWouldLeaveOutIsRefused: its fields would be zero after Load.
func TestProgressThatJSONWouldLeaveOutIsRefused(t *testing.T) {
	type hidden struct{ epoch int }
	type kept struct {
		Hidden hidden `json:"-"`
		Epoch  int
		When   time.Time
		mu     sync.Mutex
		log    *os.File `json:"-"`
		next   func()
		Best   *kept
	}
	teach(t, 1, heavyBall, func(l *lesson) error {
		dir := filepath.Join(t.TempDir(), "checkpoint")
		for _, progress := range []any{hidden{1}, &hidden{1}, map[string][]hidden{"a": {{1}}},
			struct{ P *hidden }{}, struct{ N atomic.Int64 }{}, struct{ hidden }{}} {
			err := refused(l.d.Save(dir, l.solver, progress), "begins with a small letter")
			if err != nil {
				return fmt.Errorf("%T: %w", progress, err)
			}
		}
		all := &kept{log: os.Stderr, next: func() {}, Best: &kept{}}
		all.mu.Lock()
		return l.d.Save(dir, l.solver, all)
	})
}

// What fails on one rank is said once, there and on others.
func TestAnErrorOfOneRankIsSaidOnce(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	require.NoError(t, os.WriteFile(file, nil, 0o666))
	errs := make([]string, 2)
	teach(t, len(errs), func() gorgonia.Solver { return &solver.SGD{} }, func(l *lesson) error {
		err := l.d.Save(filepath.Join(file, "checkpoint"), l.solver, nil)
		if err == nil {
			return errors.New("it was saved in a file")
		}
		errs[l.comm.Rank()] = err.Error()
		return nil
	})
	for r, text := range errs {
		require.Check(t, strings.Count(text, "not a directory") == 1 &&
			strings.Count(text, "rank 0 cannot go on: ") == 1 && !strings.Contains(text,
			"\n"), "on rank %d the error is %q", r, text)
	}
}
