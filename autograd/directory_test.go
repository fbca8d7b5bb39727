package autograd

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/euryale-ml/euryale/autograd/internal/checkpoint"
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/files"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/internal/testing/testenv"
)

// newest returns where the newest checkpoint of a directory is.
func newest(t *testing.T, dir string) string {
	t.Helper()
	all, err := checkpoint.List(files.Disk(dir))
	require.That(t, err == nil && len(all) != 0, "%s has %d checkpoints: %v", dir, len(all), err)
	return filepath.Join(dir, all[0].Dir)
}

// drafts returns what a Save is writing, or has left.
func drafts(dir string) []string {
	all, _ := filepath.Glob(filepath.Join(dir, ".euryale-saving-*"))
	return all
}

// reseal writes another record, with its checksum.
func reseal(dir string, r record) error {
	text, err := checkpoint.Seal(r)
	return errors.Join(err, os.WriteFile(filepath.Join(dir, checkpoint.RecordName), text, 0o666))
}

// rebind makes a record say what files are there now, whatever is in them. It has no checksum.
func rebind(dir string) error {
	path := filepath.Join(dir, checkpoint.RecordName)
	text, err := os.ReadFile(path)
	var r map[string]any
	if err = errors.Join(err, json.Unmarshal(text, &r)); err != nil {
		return err
	}
	delete(r, "crc32c")
	for _, f := range r["files"].([]any) {
		entry := f.(map[string]any)
		b, err := os.ReadFile(filepath.Join(dir, entry["name"].(string)))
		if err != nil {
			return err
		}
		sum := checkpoint.NewChecksum()
		sum.Write(b)
		entry["bytes"], entry["crc32c"] = len(b), checkpoint.Text(sum)
	}
	if text, err = json.Marshal(r); err != nil {
		return err
	}
	return os.WriteFile(path, text, 0o666)
}

// rewrite replaces the tensors of a file, and says so in the record.
func rewrite(path string, tensors map[string]stored) error {
	var all []checkpoint.Tensor
	for name, t := range tensors {
		all = append(all, checkpoint.Whole(name, t.Shape, t.Data, checkpoint.Own))
	}
	err := os.Remove(path)
	if err == nil {
		_, err = checkpoint.WriteTensors(files.Disk(path), ".", all, checkpoint.Remarks{})
	}
	if err == nil {
		err = rebind(filepath.Dir(path))
	}
	return err
}

// sameStored reports whether tensors are the same.
func sameStored(a, b stored) bool {
	return slices.Equal(a.Shape, b.Shape) && a.Data.DType() == b.Data.DType() &&
		bytes.Equal(a.Data.Bytes(), b.Data.Bytes())
}

// saved trains a lesson for a step and saves it, so many times.
func (l *lesson) saved(dir string, times int, opts ...SaveOption) error {
	for range times {
		at := int(l.d.saver.Steps)
		if err := errors.Join(l.step(at), l.d.Save(dir, l.solver, at+1, opts...)); err != nil {
			return err
		}
	}
	return nil
}

// loads fails unless Load finds the checkpoint of a step.
func (l *lesson) loads(dir string, step int) error {
	at := 0
	if err := l.d.Load(dir, l.solver, &at); err != nil || at != step ||
		int(l.d.saver.Steps) != step {
		return fmt.Errorf(
			"%s: loaded step %d (%d), want %d: %w",
			dir,
			at,
			l.d.saver.Steps,
			step,
			err,
		)
	}
	return nil
}

// names returns what is in a directory.
func names(t *testing.T, dir string) string {
	t.Helper()
	all, err := os.ReadDir(dir)
	require.Report(t, err)
	var list []string
	for _, n := range all {
		list = append(list, n.Name())
	}
	return strings.Join(list, " ")
}

// A directory that the user names is the user's: files in it, beside it and behind links stay.
func TestFoundSaveDeletesWhatIsNotItsOwn(t *testing.T) {
	home := t.TempDir()
	path := func(parts ...string) string {
		return filepath.Join(append([]string{home}, parts...)...)
	}
	for _, dir := range []string{"project/src", "project.old", "project.new", "elsewhere"} {
		require.NoError(t, os.MkdirAll(path(dir), 0o777))
	}
	mine := []string{
		"project/src/thesis.tex",
		"project/step-1",
		"project.old/backup",
		"project.new/c",
		"plain",
		"elsewhere/photo",
	}
	for _, file := range mine {
		require.NoError(t, os.WriteFile(path(file), []byte("mine"), 0o666))
	}
	testenv.Link(t, "elsewhere", path("link"))
	t.Chdir(path("project.new"))
	teach(t, 2, heavyBall, func(l *lesson) error {
		for _, dir := range []string{path("project"), path("link"), ".", path("new", "deep")} {
			if err := errors.Join(l.saved(dir, 3), l.loads(dir, int(l.d.saver.Steps))); err != nil {
				return err
			}
		}
		for _, dir := range []string{path("plain"), path("plain", "below"), ""} {
			if l.d.Save(dir, l.solver, nil) == nil || l.d.Load(dir, l.solver, nil) == nil {
				return fmt.Errorf("%q is a directory", dir)
			}
		}
		return nil
	})
	for _, file := range mine {
		require.Equal(t, file, string(require.Got(os.ReadFile(path(file)))(t)), "mine")
	}
	info, err := os.Lstat(path("link"))
	require.Check(t, err == nil && info.Mode()&fs.ModeSymlink != 0, "the link is %v: %v", info, err)
	require.Equal(t, "behind the link", names(t, path("elsewhere")),
		".euryale-lock photo step-00000005 step-00000006")
}

func TestFoundAMountPointCannotBeSavedTo(t *testing.T) {
	dir := mounted(t, "")
	teach(
		t,
		2,
		heavyBall,
		func(l *lesson) error { return errors.Join(l.saved(dir, 3), l.loads(dir, 3)) },
	)
	require.Equal(t, "names", names(t, dir), ".euryale-lock step-00000002 step-00000003")
}

// A file of another Save is refused, with both Saves named, and an older checkpoint is loaded.
func TestFoundFilesOfTwoSavesAreLoaded(t *testing.T) {
	for name, opts := range map[string][]Option{
		checkpoint.ModelName: nil, checkpoint.RankName(1): compressions["topk"],
	} {
		dir := t.TempDir()
		step := func(n int) string { return filepath.Join(dir, fmt.Sprintf("step-%08d", n)) }
		var said []string
		notice := WithNotice(func(text string) { said = append(said, text) })
		teach(t, 2, heavyBall, func(l *lesson) error {
			if err := l.saved(dir, 3, KeepLast(3)); err != nil {
				return err
			}
			err := l.d.saver.Agree("", nil)
			if l.comm.Rank() == 0 {
				text, unread := os.ReadFile(filepath.Join(step(1), name))
				err = errors.Join(
					err,
					unread,
					os.WriteFile(filepath.Join(step(3), name), text, 0o666),
				)
			}
			if err := l.d.saver.Agree("", err); err != nil {
				return err
			}
			err = l.d.Load(step(3), l.solver, nil)
			if err == nil || !strings.Contains(err.Error(), name+": it belongs to Save ") ||
				!strings.Contains(err.Error(), ", step 1, and the record to Save ") {
				return fmt.Errorf("the error is %v", err)
			}
			return errors.Join(l.loads(dir, 2), l.saved(dir, 1))
		}, append([]Option{notice}, opts...)...)
		require.Check(t, len(said) == 1 && strings.Contains(said[0], "step-00000002 is loaded") &&
			strings.Contains(said[0], filepath.Join("step-00000003", name)+
				": it belongs to Save "), "%s: the notices are %q", name, said)
		// It was another training from there: what is damaged stays, and so does the one before.
		const want = ".euryale-lock step-00000001 step-00000002 step-00000003 step-00000003.1"
		require.Equal(t, "names", names(t, dir), want)
	}
}

// Load takes the newest checkpoint that is whole for all ranks, whatever is wrong with newer ones.
func TestLoadTakesTheNewestThatIsWhole(t *testing.T) {
	remove := func(name string) func(string) error {
		return func(dir string) error { return os.Remove(filepath.Join(dir, name)) }
	}
	cut := func(name string, size int64) func(string) error {
		return func(dir string) error { return os.Truncate(filepath.Join(dir, name), size) }
	}
	flip := func(dir string) error {
		path := filepath.Join(dir, checkpoint.RankName(1))
		text, err := os.ReadFile(path)
		if err == nil {
			text[len(text)-1] ^= 1
			err = os.WriteFile(path, text, 0o666)
		}
		return err
	}
	for name, damage := range map[string]func(dir string) error{
		"no record": remove(checkpoint.RecordName), "no model": remove(checkpoint.ModelName),
		"a rank's is missing": remove(checkpoint.RankName(1)),
		"an empty record":     cut(checkpoint.RecordName, 0),
		"a model cut off":     cut(checkpoint.ModelName, 100),
		"a bit of rank 1":     flip,
		"nothing":             os.RemoveAll,
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			teach(
				t,
				2,
				heavyBall,
				func(l *lesson) error { return l.saved(dir, 2) },
				compressions["topk"]...)
			require.NoError(t, damage(filepath.Join(dir, "step-00000002")))
			var said []string
			notice := WithNotice(func(text string) { said = append(said, text) })
			teach(
				t,
				2,
				heavyBall,
				func(l *lesson) error { return l.loads(dir, 1) },
				append([]Option{notice}, compressions["topk"]...)...)
			require.Check(t, (len(said) == 1) == (name != "nothing") &&
				(len(said) <= 0 || strings.Contains(said[0],
					"step-00000002")), "the notices are %q", said)
			if err := os.RemoveAll(filepath.Join(dir, "step-00000001")); err != nil ||
				name == "nothing" {
				return
			}
			teach(t, 2, heavyBall, func(l *lesson) error {
				if err := l.d.Load(dir, l.solver, nil); err == nil ||
					errors.Is(err, fs.ErrNotExist) ||
					!strings.Contains(err.Error(), "step-00000002") {
					return fmt.Errorf("the error is %v", err)
				}
				return nil
			}, compressions["topk"]...)
		})
	}
}

// All ranks learn that there is no checkpoint, so that they begin.
func TestWhereThereIsNoCheckpointTrainingBegins(t *testing.T) {
	dir := t.TempDir()
	old := filepath.Join(dir, "run.old")
	require.NoError(t, os.Mkdir(old, 0o777))
	teach(t, 2, heavyBall, func(l *lesson) error {
		if err := l.saved(filepath.Join(dir, "other"), 1); err != nil {
			return err
		}
		for _, none := range []string{
			dir, filepath.Join(dir, "run"), filepath.Join(dir, "other", "step-00000009"),
		} {
			if err := l.d.Load(none, l.solver, nil); !errors.Is(err, fs.ErrNotExist) ||
				strings.Contains(err.Error(), ".old") {
				return fmt.Errorf("rank %d: the error is %v", l.comm.Rank(), err)
			}
		}
		return nil
	})
	require.NoError(t, os.WriteFile(filepath.Join(old, checkpoint.RecordName), nil, 0o666))
	teach(t, 2, heavyBall, func(l *lesson) error { // that of an older version, or of the user
		err := l.d.Load(filepath.Join(dir, "run"), l.solver, nil)
		if !errors.Is(err, fs.ErrNotExist) ||
			!strings.Contains(
				err.Error(),
				"run.old has one: if an older version was killed in Save, rename it",
			) {
			return fmt.Errorf("the error is %v", err)
		}
		return nil
	})
}

// mv and cp -r do to a checkpoint what they say.
func TestCheckpointsMoveByHand(t *testing.T) {
	home := t.TempDir()
	run, copied := filepath.Join(home, "run"), filepath.Join(home, "copy")
	best, bad := filepath.Join(run, "best"), filepath.Join(run, "bad")
	step := func(n int) string { return filepath.Join(run, fmt.Sprintf("step-%08d", n)) }
	teach(t, 2, heavyBall, func(l *lesson) error { return l.saved(run, 3, KeepLast(3)) })
	require.NoError(t, errors.Join(
		os.CopyFS(copied, os.DirFS(run)),
		os.CopyFS(best, os.DirFS(step(1))),
		os.Rename(step(3), bad),
	))
	teach(t, 2, heavyBall, func(l *lesson) error {
		err := errors.Join(l.loads(run, 2), l.loads(best, 1), l.loads(bad, 3), l.loads(copied, 3))
		if err != nil {
			return err
		}
		// The copy goes on by itself.
		if err := errors.Join(l.saved(copied, 4), l.loads(run, 2)); err != nil {
			return err
		}
		if l.comm.Rank() > 0 {
			return nil
		}
		return errors.Join(os.Rename(run, run+".old"))
	})
	require.Equal(t, "in the copy", names(t, copied), ".euryale-lock step-00000006 step-00000007")
	require.Equal(t, "in the first", names(t, run+".old"),
		".euryale-lock bad best step-00000001 step-00000002")
	teach(t, 2, heavyBall, func(l *lesson) error {
		if err := l.d.Load(run, l.solver, nil); !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("what was moved away is loaded: %v", err)
		}
		return errors.Join(l.saved(run, 1), l.loads(run, 1), l.loads(run+".old", 2))
	})
}

// A training that goes on from an older checkpoint is another one: it removes none of the first.
func TestATrainingThatGoesBackRemovesNothing(t *testing.T) {
	dir := t.TempDir()
	teach(t, 2, heavyBall, func(l *lesson) error { return l.saved(dir, 5, KeepLast(3)) })
	teach(t, 2, heavyBall, func(l *lesson) error {
		return errors.Join(
			l.loads(filepath.Join(dir, "step-00000003"), 3),
			l.saved(dir, 4, KeepLast(1)),
			l.loads(dir, 7),
		)
	})
	teach(t, 2, heavyBall, func(l *lesson) error { return l.saved(dir, 1) }) // begun anew
	const want = ".euryale-lock step-00000001 step-00000003 step-00000004 step-00000005 " +
		"step-00000007"
	require.Equal(t, "names", names(t, dir), want)
	teach(t, 2, heavyBall, func(l *lesson) error { // the last one saved is the newest
		return errors.Join(l.loads(dir, 1), l.loads(filepath.Join(dir, "step-00000007"), 7))
	})
}

// Save takes options, and refuses to keep nothing.
func TestSaveKeepsWhatItIsTold(t *testing.T) {
	dir := t.TempDir()
	teach(t, 2, heavyBall, func(l *lesson) error {
		if err := l.d.Save(dir, l.solver, nil, KeepLast(0)); !errors.Is(err, backend.ErrArgument) ||
			names(l.T, dir) != "" {
			return fmt.Errorf("the error is %v", err)
		}
		return errors.Join(l.saved(dir, 1, Pin()), l.saved(dir, 4), l.saved(dir, 2, KeepLast(1)))
	})
	require.Equal(t, "names", names(t, dir), ".euryale-lock step-00000001 step-00000007")
}

// The pinned checkpoint is found by what it is, and not by its step: names may have an end.
func TestThePinnedCheckpointIsFound(t *testing.T) {
	dir, other := t.TempDir(), t.TempDir()
	pinned := func(l *lesson, dir, want string) error {
		if want != "" {
			want = filepath.Join(dir, want)
		}
		if got, err := l.d.Pinned(dir); err != nil || got != want {
			return fmt.Errorf("rank %d: pinned in %s is %q, want %q: %w", l.comm.Rank(), dir, got,
				want, err)
		}
		return nil
	}
	teach(t, 2, heavyBall, func(l *lesson) error {
		return errors.Join(pinned(l, dir, ""), pinned(l, filepath.Join(dir, "none"), ""),
			l.saved(dir, 1, Pin()), l.saved(dir, 2), pinned(l, dir, "step-00000001"),
			l.step(3), l.d.SaveAsync(dir, l.solver, 4, Pin(), KeepLast(4)),
			pinned(l, dir, "step-00000004"))
	})
	teach(t, 2, heavyBall, func(l *lesson) error { // a branch
		return errors.Join(l.loads(filepath.Join(dir, "step-00000003"), 3),
			pinned(l, dir, "step-00000001"), l.saved(dir, 1, Pin()), l.saved(dir, 1),
			pinned(l, dir, "step-00000004.1"), pinned(l, other, ""))
	})
}

// Checkpoints of older versions are in the directory itself. They are loaded, and stay.
func TestOldCheckpointsStayWhereTheyAre(t *testing.T) {
	dir := t.TempDir()
	teach(
		t,
		2,
		heavyBall,
		func(l *lesson) error { return l.saved(dir, 2) },
		compressions["topk"]...)
	from := filepath.Join(dir, "step-00000002")
	r, err := readRecord(files.Disk(from))
	require.NoError(t, err)
	r.Stamp = checkpoint.Stamp{}
	err = reseal(from, r)
	old := filepath.Join(t.TempDir(), "run")
	require.NoError(t, errors.Join(err, os.CopyFS(old, os.DirFS(from))))
	before := os.DirFS(old)
	files, err := fs.Glob(before, "*")
	require.That(t, err == nil && len(files) == 4, "%v: %v", files, err)
	want := map[string]string{}
	for _, f := range files {
		text, err := fs.ReadFile(before, f)
		want[f] = string(text)
		require.NoError(t, err)
	}
	teach(t, 2, heavyBall, func(l *lesson) error {
		at := 0
		if err := l.d.Load(old, l.solver, &at); err != nil || at != 2 {
			return fmt.Errorf("progress %d: %w", at, err)
		}
		return errors.Join(l.saved(old, 3), l.loads(old, 3))
	}, compressions["topk"]...)
	for f, text := range want {
		require.Equal(t, fmt.Sprintf("%s has changed", f),
			string(require.Value(fs.ReadFile(before, f))(t)), text)
	}
}

// Another job that saves to the directory is told by whom it is locked, on all ranks, until that
// closes. Loading goes on.
func TestASecondWriterIsToldOfTheFirst(t *testing.T) {
	dir := t.TempDir()
	teach(t, 2, heavyBall, func(l *lesson) error {
		if err := l.saved(dir, 1); err != nil {
			return err
		}
		second, err := New(l.comm, l.m.params)
		if err != nil {
			return err
		}
		err = second.Save(dir, l.solver, nil)
		want := fmt.Sprintf(
			"job %s (%s, process %d of ",
			l.comm.Name(),
			filepath.Base(os.Args[0]),
			os.Getpid(),
		)
		if !errors.Is(err, ErrLocked) || !strings.Contains(err.Error(), want) ||
			!strings.Contains(err.Error(), "Close the machine or DataParallel of this process") {
			return fmt.Errorf("rank %d: the error is %v, want %q", l.comm.Rank(), err, want)
		}
		return errors.Join(
			second.Load(dir, l.solver, nil),
			l.d.Close(),
			second.Save(dir, l.solver, 2),
			second.Close(),
		)
	})
	require.Equal(t, "names", names(t, dir), ".euryale-lock step-00000001 step-00000001.1")
}

// Load finds a whole checkpoint at any moment of Saves that keep one.
func TestReadersNeverFailDuringASaveOnHost(t *testing.T) {
	dir := t.TempDir()
	teach(t, 1, heavyBall, func(l *lesson) error { return l.saved(dir, 1) })
	ended := make(chan struct{})
	var wait sync.WaitGroup
	defer wait.Wait()
	loads := 0
	wait.Go(func() {
		teach(t, 1, heavyBall, func(l *lesson) error {
			for last := 0; ; loads++ {
				at := 0
				if err := l.d.Load(dir, l.solver, &at); err != nil || at < last {
					return fmt.Errorf("load %d: step %d after %d: %w", loads, at, last, err)
				}
				last = at
				select {
				case <-ended:
					return nil
				default:
				}
			}
		}, WithNotice(func(text string) { t.Errorf("it says %q", text) }))
	})
	teach(t, 1, heavyBall, func(l *lesson) error {
		defer close(ended)
		return errors.Join(l.loads(dir, 1), l.saved(dir, 200, KeepLast(1)))
	})
	wait.Wait()
	t.Logf("%d loads during 200 saves", loads)
}

// TestThePageShowsWhatSaveWrites: docs/checkpoints.md has each file of a directory, and no others.
func TestThePageShowsWhatSaveWrites(t *testing.T) {
	zeros := func(name string) string {
		return regexp.MustCompile(`\d`).ReplaceAllString(name, "0")
	}
	page := string(require.Value(os.ReadFile("../docs/checkpoints.md"))(t))
	_, block, _ := strings.Cut(page, "\nrun1/ ")
	block, _, _ = strings.Cut(block, "\n```")
	shown, parent := map[string]bool{}, ""
	lines := regexp.MustCompile(`(?m)^( {2,4})(\S+)`)
	for _, line := range lines.FindAllStringSubmatch(block, -1) {
		name := zeros(line[2])
		if len(line[1]) == 2 {
			parent = name
		} else {
			name = parent + name
		}
		shown[name] = true
	}
	saving := zeros(".euryale-saving-2f61...") // which is there during a Save
	require.Check(t, shown[saving], "the page has no draft, but %v", shown)
	delete(shown, saving)

	dir := t.TempDir()
	written := map[string]bool{}
	teach(t, 2, heavyBall, func(l *lesson) error {
		if err := l.saved(dir, 2); err != nil || l.comm.Rank() > 0 {
			return err
		}
		return filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
			name, err2 := filepath.Rel(dir, path)
			if d != nil && d.IsDir() {
				name += "/"
			}
			written[zeros(filepath.ToSlash(name))] = true
			return errors.Join(err, err2)
		})
	}, WithPartial())
	delete(written, "./")
	require.Check(t, maps.Equal(written, shown), "Save writes %v, and the page shows %v", written,
		shown)
}
