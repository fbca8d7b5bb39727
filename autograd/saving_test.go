package autograd

import (
	"bytes"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/euryale-ml/euryale/autograd/internal/checkpoint"
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/files"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/internal/testing/testenv"
)

// tensorsOf returns the tensors of all files of the newest checkpoint in a directory.
func tensorsOf(t *testing.T, dir string) map[string]stored {
	t.Helper()
	paths, err := filepath.Glob(filepath.Join(newest(t, dir), "*.safetensors"))
	all := map[string]stored{}
	for _, file := range paths {
		tensors, err2 := checkpoint.ReadTensors(files.Disk(file), ".")
		err = errors.Join(err, err2)
		for name, tensor := range tensors {
			all[filepath.Base(file)+" "+name] = tensor
		}
	}
	require.That(t, err == nil && len(all) != 0, "%d tensors in %s: %v", len(all), dir, err)
	return all
}

// sameTensors returns an error unless two checkpoints have the same tensors.
func sameTensors(t *testing.T, dir, other string) error {
	t.Helper()
	same := func(a, b stored) bool {
		return slices.Equal(a.Shape, b.Shape) && a.Data.DType() == b.Data.DType() &&
			bytes.Equal(a.Data.Bytes(), b.Data.Bytes())
	}
	if a, b := tensorsOf(t, dir), tensorsOf(t, other); !maps.EqualFunc(a, b, same) {
		return fmt.Errorf("%s has %v, %s has %v", dir, a, other, b)
	}
	return nil
}

// TestSaveAsyncHasTheBitsOfSave: although the training goes on while files are written, wherever
// parameters are, and whatever ranks have of their own. Another SaveAsync waits for the first.
func TestSaveAsyncHasTheBitsOfSave(t *testing.T) {
	testenv.Each(t, testenv.OnHosts(), func(t *testing.T, k testenv.Kind) {
		for _, name := range slices.Sorted(maps.Keys(compressions)) {
			dir := t.TempDir()
			opts := append([]Option{WithBuckets(1, 1)}, compressions[name]...)
			train := func(save func(step *training, dir string) error, where string) {
				allOn(t, k, 2, func(r rank) error {
					return r.trainQuadratic(func(tr *training) error {
						return errors.Join(tr.steps(2), save(tr, filepath.Join(dir, where+"2")),
							tr.steps(1), save(tr, filepath.Join(dir, where+"3")), tr.steps(2))
					}, opts...)
				})
			}
			train(func(tr *training, dir string) error { return tr.d.Save(dir, tr.solver, nil) },
				"save")
			train(func(tr *training, dir string) error {
				return tr.d.SaveAsync(dir, tr.solver, nil)
			},
				"async")
			for _, step := range []string{"2", "3"} {
				err := sameTensors(t, filepath.Join(dir, "async"+step),
					filepath.Join(dir, "save"+step))
				require.Check(t, err == nil, "%s, step %s: %v", name, step, err)
			}
		}
	})
}

// TestSaveAsyncNeedsNoOtherCall: the checkpoint has its name once its files are written, and Load
// takes it.
func TestSaveAsyncNeedsNoOtherCall(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "checkpoint")
	teach(t, 2, heavyBall, func(l *lesson) error {
		err := errors.Join(l.steps(0, 2), l.d.SaveAsync(dir, l.solver, map[string]int{"Step": 2}))
		want := l.values()
		if err != nil {
			return err
		}
		if l.comm.Rank() == 0 {
			const saved = ".euryale-lock step-00000002"
			for end := time.Now().Add(time.Minute); names(t, dir) != saved &&
				time.Now().Before(end); {
				time.Sleep(time.Millisecond)
			}
			if got := names(t, dir); got != saved {
				err = fmt.Errorf("the directory has %s", got)
			}
		}
		var at struct{ Step int }
		err = errors.Join(err, l.steps(2, 4), l.d.Load(dir, l.solver, &at),
			sameBits(l.values(), want))
		for step := range 3 { // the last two stay
			err = errors.Join(err, l.steps(2+step, 3+step), l.d.SaveAsync(dir, l.solver, nil))
		}
		if err == nil && at.Step != 2 {
			err = fmt.Errorf("progress is %+v", at)
		}
		return err
	})
	require.Equal(t, "the directory", names(t, dir), ".euryale-lock step-00000004 step-00000005")
}

// TestAnErrorBehindTheTrainingComesLater: with the next Save, on all ranks, which makes its own
// checkpoint nevertheless; or with Close. Nothing is left of the other.
func TestAnErrorBehindTheTrainingComesLater(t *testing.T) {
	for name, opts := range map[string][]Option{"plain": nil, "topk": compressions["topk"]} {
		t.Run(name, func(t *testing.T) { errorBehind(t, opts) })
	}
}

func errorBehind(t *testing.T, opts []Option) {
	dir := filepath.Join(t.TempDir(), "checkpoint")
	all(t, 2, func(r rank) error {
		return r.trainQuadratic(func(tr *training) error {
			lost := func() error { // a SaveAsync whose draft is taken away before it writes
				return tr.d.collectively(backend.ForSave, "save", func() error {
					r, problem := tr.d.request(dir, tr.solver, nil, true)
					return tr.d.saver.Save(r, errors.Join(problem, tr.d.saver.Finish()),
						func(of checkpoint.Stamp) (checkpoint.Content, error) {
							c, err := tr.d.content(tr.solver, nil, true, false)
							for _, draft := range drafts(dir) { // none if the other rank was first
								err = errors.Join(err, os.RemoveAll(draft))
							}
							return c, err
						})
				})
			}
			err := errors.Join(tr.steps(1), lost(), tr.steps(1))
			failed := tr.d.Save(dir, tr.solver, nil)
			if failed == nil ||
				!strings.Contains(failed.Error(), "SaveAsync to "+dir+", of step 1") {
				err = errors.Join(err, fmt.Errorf("the next Save returns %w", failed))
			}
			err = errors.Join(err, lost())
			writes := tr.comm.Rank() == 0 || len(opts) > 0
			closed := tr.d.Close()
			if (closed != nil) != writes {
				err = errors.Join(err, fmt.Errorf("Close returns %w", closed))
			}
			return err
		}, opts...)
	})
	require.Equal(t, "the directory", names(t, dir), ".euryale-lock step-00000002")
}
