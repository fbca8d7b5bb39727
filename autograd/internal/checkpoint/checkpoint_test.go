package checkpoint

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/euryale-ml/euryale/internal/filelock"
	"github.com/euryale-ml/euryale/internal/files"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/internal/testing/testenv"
)

// saves is a training that saves to a directory.
type saves struct {
	*testing.T
	dir, training string
	keep          int
}

// save is a Save of a file with some text.
func (s saves) save(step uint64, text string, pinned bool) Stamp {
	s.Helper()
	in, stamp := files.Disk(s.dir), Stamp{ID: NewID(), Training: s.training, Step: step,
		Pinned: pinned}
	must(s.T, Clean(in))
	draft := require.Value(Begin(in, stamp))(s.T)
	f, err := WriteFile(in.Sub(draft), ModelName, files.Text([]byte(text)))
	if err != nil {
		s.Fatal(err)
	}
	all, err := List(in)
	if err != nil {
		s.Fatal(err)
	}
	stamp.Files = []File{f}
	stamp, err = Commit(in, draft, all, stamp, func(s Stamp) ([]byte, error) { return Seal(s) })
	if err == nil {
		err = Prune(in, require.Value(List(in))(s.T), s.training, s.keep)
	}
	if err != nil {
		s.Fatal(err)
	}
	return stamp
}

// tree returns what is below a directory, with the text of files and the targets of links.
func tree(t *testing.T, dir string) map[string]string {
	t.Helper()
	all := map[string]string{}
	require.NoError(t, filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || path == dir {
			return err
		}
		name, err := filepath.Rel(dir, path)
		switch {
		case err != nil:
		case d.IsDir():
			all[name] = "a directory"
		case d.Type()&fs.ModeSymlink != 0:
			all[name], err = os.Readlink(path)
		default:
			var text []byte
			text, err = os.ReadFile(path)
			all[name] = string(text)
		}
		return err
	}))
	return all
}

// steps returns the names of the checkpoints in a directory, the newest first.
func steps(t *testing.T, dir string) (names []string) {
	t.Helper()
	for _, e := range require.Value(List(files.Disk(dir)))(t) {
		names = append(names, e.Dir)
	}
	return names
}

// must ends a test that cannot be prepared.
func must(t *testing.T, errs ...error) {
	t.Helper()
	require.NoError(t, errors.Join(errs...))
}

func write(path, text string) error { return os.WriteFile(path, []byte(text), 0o666) }

func TestTheLastOnesAndThePinnedOneStay(t *testing.T) {
	s := saves{t, t.TempDir(), NewID(), 2}
	for step, want := range [][]string{
		{"step-00000000"},
		{"step-00000001", "step-00000000"},
		{"step-00000002", "step-00000001"}, // pinned
		{"step-00000003", "step-00000002"},
		{"step-00000004", "step-00000003", "step-00000002"},
		{"step-00000005", "step-00000004"}, // pinned, in the place of the other
		{"step-00000006", "step-00000005"},
		{"step-00000007", "step-00000006", "step-00000005"},
	} {
		s.save(uint64(step), "x", step == 2 || step == 5)
		require.Slices(t, fmt.Sprint("after step ", step), steps(t, s.dir), want)
	}
}

// A Save at the step of another one, or of a directory of the user's, leaves that alone, and the
// one that was saved last is the newest.
func TestANameThatIsTakenGetsASuffix(t *testing.T) {
	s := saves{t, t.TempDir(), NewID(), 3}
	must(t, os.Mkdir(filepath.Join(s.dir, "step-00000007"), 0o777)) // the user's
	testenv.Link(t, "nowhere", filepath.Join(s.dir, "step-00000007.1"))
	first, second := s.save(7, "first", false), s.save(7, "second", false)
	s.save(3, "third", false) // a training that goes on from an older one
	require.Check(t, first.Name == "step-00000007.2" && second.Name == "step-00000007.3",
		"the names are %s and %s", first.Name, second.Name)
	want := []string{
		"step-00000007",
		"step-00000003",
		"step-00000007.3",
		"step-00000007.2",
	} // the first is none
	require.Slices(t, "the order", steps(t, s.dir), want)
}

// Whatever the user has put into the directory or made of a checkpoint is there after any number of
// Saves.
func TestOnlyWhatSaveHasMadeIsRemoved(t *testing.T) {
	out := t.TempDir() // what links lead to
	s := saves{t, t.TempDir(), NewID(), 1}
	path := func(parts ...string) string {
		return filepath.Join(append([]string{s.dir}, parts...)...)
	}
	for name, change := range map[string]func(checkpoint string) error{
		"a file was added": func(c string) error {
			return write(filepath.Join(c, "notes"), "mine")
		},
		"a file was replaced": func(c string) error {
			return write(filepath.Join(c, ModelName), "mine, and longer")
		},
		"a directory was added": func(c string) error {
			return os.Mkdir(filepath.Join(c, "empty"), 0o777)
		},
		"a file has another name": func(c string) error {
			return os.Rename(filepath.Join(c, ModelName), filepath.Join(c, "m"))
		},
		"the record has a record of it": func(c string) error {
			return write(filepath.Join(c, RecordName+".bak"), "mine")
		},
		"it has another name": func(c string) error { return os.Rename(c, path("best")) },
		"it has the name of another": func(c string) error {
			return os.Rename(c, path("step-00009999"))
		},
		"the record is damaged": func(c string) error {
			return write(filepath.Join(c, RecordName), "{}")
		},
		"the record leads elsewhere": func(c string) error {
			text, err := Seal(Stamp{ID: "../" + filepath.Base(out), Training: s.training,
				Name: filepath.Base(c), Files: []File{{Name: ModelName, Bytes: 1}}})
			return errors.Join(err, write(filepath.Join(c, RecordName), string(text)))
		},
		"it is elsewhere": func(c string) error {
			there := filepath.Join(out, "moved")
			return errors.Join(os.Rename(c, there), os.Symlink(there, c))
		},
		"a file is elsewhere": func(c string) error {
			there := filepath.Join(out, "model")
			return errors.Join(os.Rename(filepath.Join(c, ModelName), there),
				os.Symlink(there, filepath.Join(c, ModelName)))
		},
		"it is another training's": func(string) error { return nil },
	} {
		t.Run(name, func(t *testing.T) {
			s.T = t
			other := s
			if strings.Contains(name, "training") {
				other.training = NewID()
			}
			must(t, change(path(other.save(uint64(len(name)), "x", false).Name)))
			before, outside := tree(t, s.dir), tree(t, out)
			for step := range uint64(3) {
				s.save(1000+step, "x", false)
			}
			after := tree(t, s.dir)
			for file, text := range before {
				require.Check(t, after[file] == text, "%s is %q, was %q", file, after[file], text)
			}
			now := tree(t, out)
			require.Check(t, mapsEqual(now, outside), "outside there is %v, was %v", now, outside)
			must(t, os.RemoveAll(s.dir), os.Mkdir(s.dir, 0o777))
		})
	}
}

func mapsEqual(a, b map[string]string) bool { return fmt.Sprint(a) == fmt.Sprint(b) }

// What an interrupted Save leaves is removed, at any point where it stopped, and nothing else that
// has such a name.
func TestDraftsAreRemovedIfSaveHasMadeThem(t *testing.T) {
	dir, out := t.TempDir(), t.TempDir()
	must(t, write(filepath.Join(out, ModelName), "mine"), write(filepath.Join(out, marker), ""))
	named := func(id string) string { return filepath.Join(dir, draftPrefix+id) }
	draft := func(names ...string) string {
		path := named(NewID())
		must(t, os.Mkdir(path, 0o777))
		for _, f := range names {
			must(t, write(filepath.Join(path, f), "x"))
		}
		return path
	}
	id := NewID()
	must(t, os.Mkdir(named(id), 0o777))
	text, err := Seal(Stamp{ID: id})
	must(
		t,
		err,
		write(filepath.Join(named(id), RecordName), string(text)),
		write(filepath.Join(named(id), ModelName), "x"),
	)
	gone := []string{
		draft(), draft(marker), draft(marker, ModelName, "rank12.safetensors"),
		draft(marker, RecordName, ModelName), named(id),
	}
	link := named(NewID())
	testenv.Link(t, out, link)
	stay := []string{
		draft("mine"),
		draft(ModelName),
		draft(RecordName, ModelName),
		draft(marker, "mine"),
		link,
	}
	if err := Clean(files.Disk(dir)); !errors.Is(err, os.ErrExist) || // it is not empty
		!strings.Contains(err.Error(), filepath.Base(stay[3])+": ") {
		t.Errorf("of the draft with a file of the user's it says %v", err)
	}
	for _, path := range gone {
		if _, err := os.Lstat(path); err == nil {
			t.Errorf("%s is still there: %v", path, tree(t, path))
		}
	}
	for _, path := range stay {
		require.Report(t, require.Err(os.Lstat(path)))
	}
	if got := tree(t, stay[3]); got["mine"] != "x" || len(got) != 2 {
		t.Errorf("of a draft with a file of the user's %v is left", got)
	}
	must(
		t,
		os.Remove(filepath.Join(stay[3], "mine")),
		Clean(files.Disk(dir)),
	) // such as a file of a rank that was late
	require.Fails(t, "the draft is there without the user's file", require.Err(os.Lstat(stay[3])))
	if len(tree(t, out)) != 2 {
		t.Errorf("a link was followed: %v", tree(t, out))
	}
}

// Another holder gets an error that names the first, until that releases the lock, wherever it has
// removed it.
func TestOneHolderAtATime(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "a", "b")
	first, err := Acquire(files.Disk(dir), "the first")
	require.That(t, err == nil && first.Of(files.Disk(dir)) && first.Supported, "%v %v", first, err)
	require.Fails(t, "Acquire", require.Err(Acquire(files.Disk(dir), "the second")), ErrLocked,
		"the first saves there")
	must(t, first.Release())
	second := require.Value(Acquire(files.Disk(dir), "the second"))(t)
	must(t, second.Undo()) // has made nothing
	require.Equal(t, "the lock",
		string(require.Value(os.ReadFile(filepath.Join(dir, lockName)))(t)), "the second\n")
}

func TestALockThatIsUndoneLeavesNothing(t *testing.T) {
	above := t.TempDir()
	dir := filepath.Join(above, "a", "b")
	l, err := Acquire(files.Disk(dir), "holder")
	must(t, err, l.Undo())
	got := tree(t, above)
	require.Check(t, len(got) == 0, "there is %v", got)
	l, err = Acquire(files.Disk(dir), "holder")
	must(t, err, write(filepath.Join(dir, "mine"), ""), l.Undo())
	if got := tree(t, above); len(got) != 3 {
		t.Errorf("there is %v, want the user's file", got)
	}
}

// A link in the place of the lock leads nowhere.
func TestALockFollowsNoLink(t *testing.T) {
	dir := t.TempDir()
	victim := filepath.Join(t.TempDir(), "victim")
	must(t, write(victim, "mine"))
	testenv.Link(t, victim, filepath.Join(dir, lockName))
	if filelock.NoFollow == 0 {
		t.Skip("this system opens what a link leads to")
	}
	require.Fails(t, "it was locked", require.Err(Acquire(files.Disk(dir), "holder")))
	text, _ := os.ReadFile(victim)
	require.Check(t, string(text) == "mine", "the file says %q", text)
}

// A bit of a record that is another one is an error, unless the record has no checksum then.
func TestEveryDamagedBitOfARecordIsNoticed(t *testing.T) {
	s := saves{t, t.TempDir(), NewID(), 1}
	path := filepath.Join(s.dir, s.save(1, "x", true).Name)
	text, want, err := ReadRecord(files.Disk(path))
	must(t, err)
	for i := range 8 * len(text) {
		damaged := bytes.Clone(text)
		damaged[i/8] ^= 1 << (i % 8)
		must(t, os.WriteFile(filepath.Join(path, RecordName), damaged, 0o666))
		_, got, err := ReadRecord(files.Disk(path))
		require.That(t, err != nil || fmt.Sprint(got) == fmt.Sprint(want), "bit %d: %+v, want %+v",
			i, got, want)
		require.That(t, err == nil || errors.As(err, new(*Damaged)), "bit %d: %v", i, err)
	}
}

// A file that is missing, cut off or another one is found, and is not "no checkpoint".
func TestFilesAreThoseOfTheRecord(t *testing.T) {
	for name, tt := range map[string]struct {
		change func(path string) error
		listed bool // by List, which reads no content
	}{
		"missing":   {os.Remove, true},
		"cut off":   {func(path string) error { return os.Truncate(path, 3) }, true},
		"longer":    {func(path string) error { return write(path, "contentx") }, true},
		"another":   {func(path string) error { return write(path, "c0ntent") }, false},
		"as it was": {func(path string) error { return nil }, false},
	} {
		t.Run(name, func(t *testing.T) {
			s := saves{t, t.TempDir(), NewID(), 1}
			path := filepath.Join(s.dir, s.save(1, "content", false).Name)
			must(t, tt.change(filepath.Join(path, ModelName)))
			all, err := List(files.Disk(s.dir))
			require.That(t, err == nil && len(all) == 1 && (all[0].Wrong != nil) == tt.listed,
				"%+v: %v", all, err)
			r, err := Open(files.Disk(path), all[0].Stamp, ModelName)
			if err == nil {
				_, err = io.ReadAll(r)
				err = errors.Join(err, r.Check(), r.Close())
			}
			require.Check(t, (err == nil) == (name == "as it was") &&
				(err == nil || errors.As(err, new(*Damaged)) &&
					!errors.Is(err, fs.ErrNotExist)), "the error is %v", err)
		})
	}
}

// A training that has gone back behind the newest of its own checkpoints is another one.
func TestFollows(t *testing.T) {
	s := saves{t, t.TempDir(), NewID(), 9}
	follows := func(step uint64, known ...string) bool {
		all, err := List(files.Disk(s.dir))
		must(t, err)
		ids := map[string]bool{}
		for _, id := range known {
			ids[id] = true
		}
		return Follows(all, s.training, step, ids)
	}
	require.Check(t, follows(0), "there is nothing to follow")
	first, second := s.save(1, "x", false).ID, s.save(2, "x", false).ID
	other := s
	other.training = NewID()
	other.save(3, "x", false)
	for step, want := range map[uint64]bool{1: false, 2: false, 3: true} { // 2 is the newest
		require.Check(t, follows(step) == want && follows(step, first) == want &&
			follows(step, second) && follows(step, first, second), "at step %d it follows the "+
			"first of two, or not the second", step)
	}
}
