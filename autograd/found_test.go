package autograd

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"

	"gorgonia.org/gorgonia"

	"github.com/euryale-ml/euryale/autograd/internal/checkpoint"
	"github.com/euryale-ml/euryale/autograd/solver"
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/testing/require"
)

// A checkpoint of parameters, solver and progress is for any number of ranks: they go on
// where the others have stopped.
func TestFoundCheckpointsLoadOnAnotherNumberOfRanksOnHost(t *testing.T) {
	const saved, whole = 5, 10
	for name, opts := range map[string][]Option{"plain": nil, "bf16": compressions["bf16"]} {
		dir := filepath.Join(t.TempDir(), "checkpoint")
		adam := func() gorgonia.Solver { return &solver.Adam{Rate: 0.01} }
		var at, end [][]float32 // of two ranks, which do not stop
		teach(t, 2, adam, func(l *lesson) error {
			err := errors.Join(l.steps(0, saved),
				l.d.Save(dir, l.solver, map[string]int{"step": saved}))
			if l.comm.Rank() == 0 {
				at = l.values()
			}
			if err = errors.Join(err, l.steps(saved, whole)); l.comm.Rank() == 0 {
				end = l.values()
			}
			return err
		}, opts...)
		for _, size := range []int{1, 3, 4} {
			teach(t, size, adam, func(l *lesson) error {
				var p struct{ Step int }
				if err := errors.Join(l.step(7), l.d.Load(dir, l.solver, &p)); err != nil ||
					p.Step != saved {
					return fmt.Errorf("%s: step %d: %w", name, p.Step, err)
				}
				if err := sameBits(l.values(), at); err != nil {
					return fmt.Errorf("%s: after Load %w", name, err)
				}
				if err := errors.Join(l.steps(saved, whole), l.d.Check()); err != nil {
					return err
				}
				tolerance := float32(1e-5)
				if opts != nil {
					tolerance = 0.02 // a few of the steps of a solver that looks at signs
				}
				checkClose(l.T, l.values(), end, 0, tolerance)
				return nil
			}, opts...)
		}
	}
}

func TestFoundStateOfRanksNeedsTheirNumber(t *testing.T) {
	for name, what := range map[string]string{"topk": "the residuals of sparse (topk=0.05,",
		"partial": "the parameters and the solver of WithPartial"} {
		dir := filepath.Join(t.TempDir(), "checkpoint")
		teach(t, 2, heavyBall, func(l *lesson) error {
			return errors.Join(l.steps(0, 2), l.d.Save(dir, l.solver, nil))
		}, compressions[name]...)
		teach(t, 3, heavyBall, func(l *lesson) error {
			return unchanged(l.d, l.solver, func() error {
				return refused(l.d.Load(dir, l.solver, nil), dir,
					"written by 2 ranks, this program has 3", what, "start the program with 2 "+
						"ranks (euryale run -n 2)")
			})
		}, compressions[name]...)
	}
}

// What a file has beyond its header is not read, and costs no memory.
func TestFoundFilesAreReadAsFarAsTheirHeaderSays(t *testing.T) {
	const size = 1 << 30
	dir := filepath.Join(t.TempDir(), "checkpoint")
	teach(t, 1, heavyBall, func(l *lesson) error { return l.d.Save(dir, l.solver, nil) })
	for file, want := range map[string]string{
		checkpoint.ModelName: "model.safetensors: it has 1073741824 bytes, the record says ",
		checkpoint.RecordName: "checkpoint.json: it has 1073741824 bytes, " +
			"and a record has at most 100000000",
	} {
		path := filepath.Join(newest(t, dir), file)
		good := require.Value(os.Stat(path))(t)
		if err := os.Truncate(path, size); err != nil { // of holes
			t.Fatal(err)
		}
		teach(t, 1, heavyBall, func(l *lesson) error {
			var before, after runtime.MemStats
			runtime.ReadMemStats(&before)
			err := l.d.Load(dir, l.solver, nil)
			runtime.ReadMemStats(&after)
			if err == nil || !strings.Contains(err.Error(), want) {
				return fmt.Errorf("the error is %v, want %q", err, want)
			}
			if took := after.TotalAlloc - before.TotalAlloc; took >= size/64 {
				return fmt.Errorf("%s: %d bytes of memory were taken", file, took)
			}
			return nil
		})
		require.NoError(t, os.Truncate(path, good.Size()))
	}
}

// notSaved fails unless Save fails with such an error, and leaves the checkpoint that is
// there, and nothing else.
func notSaved(l *lesson, dir string, solver gorgonia.Solver, want string) error {
	if err := l.d.Save(dir, solver, 2); err == nil || !strings.Contains(err.Error(), want) {
		return fmt.Errorf("the error is %v, want %q", err, want)
	}
	at := 0
	if err := l.d.Load(dir, l.solver, &at); err != nil || at != 1 {
		return fmt.Errorf("the last checkpoint is of step %d: %w", at, err)
	}
	if left := drafts(dir); len(left) > 0 {
		return fmt.Errorf("%v are left behind", left)
	}
	return nil
}

// unreadable has a state that cannot be read on the ranks that write it.
type unreadable struct{ solver.SGD }

func (unreadable) State() (map[string]backend.Buffer, error) { return nil, errors.New("no state") }

func TestFoundASaveThatFailsLeavesNothing(t *testing.T) {
	for name, want := range map[string]string{"refused": "*gorgonia.AdamSolver cannot be read",
		"unreadable": "no state", "no progress": "unsupported type"} {
		t.Run(name, func(t *testing.T) {
			dir := filepath.Join(t.TempDir(), "checkpoint")
			teach(t, 2, heavyBall, func(l *lesson) error {
				if err := l.d.Save(dir, l.solver, 1); err != nil {
					return err
				}
				switch name {
				case "refused":
					return notSaved(l, dir, gorgonia.NewAdamSolver(), want)
				case "unreadable":
					return notSaved(l, dir, &unreadable{}, want)
				}
				if err := l.d.Save(dir, l.solver, func() {}); l.comm.Rank() == 0 &&
					(err == nil || !strings.Contains(err.Error(), want)) {
					return fmt.Errorf("the error is %v", err)
				}
				// Rank 0 removes it, and the others do not wait for that.
				if left := drafts(dir); l.comm.Rank() == 0 && len(left) > 0 {
					return fmt.Errorf("%v are left behind", left)
				}
				return nil
			})
		})
	}
}

// full fills the disk before Save writes its files.
type full struct {
	*solver.Momentum
	dir string
}

func (s full) State() (map[string]backend.Buffer, error) {
	err := os.WriteFile(filepath.Join(s.dir, "ballast"), make([]byte, 1<<20), 0o666)
	if !errors.Is(err, syscall.ENOSPC) {
		return nil, fmt.Errorf("the disk is not full: %w", err)
	}
	return s.Momentum.State()
}

func TestFoundASaveOnAFullDiskLeavesNothing(t *testing.T) {
	dir := mounted(t, "size=64k")
	teach(t, 2, heavyBall, func(l *lesson) error {
		if err := errors.Join(l.step(0), l.d.Save(dir, l.solver, 1)); err != nil {
			return err
		}
		return notSaved(l, dir, full{l.solver.(*solver.Momentum), dir}, syscall.ENOSPC.Error())
	})
}
