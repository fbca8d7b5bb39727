package tuning

import (
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/euryale-ml/euryale/internal/env"
	"github.com/euryale-ml/euryale/internal/testing/require"
)

// at makes a file the user's, with this text unless it is "".
func at(t *testing.T, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "of", "mine.json")
	t.Setenv(string(env.Tuning), path)
	if text == "" {
		return path
	}
	require.NoError(t, os.Mkdir(filepath.Dir(path), 0o755))
	require.NoError(t, os.WriteFile(path, []byte(text), 0o644))
	return path
}

func add(more ...int) func([]int) []int {
	return func(rows []int) []int { return append(rows, more...) }
}

func TestRowsAreKeptBySection(t *testing.T) {
	path := at(t, "")
	if rows, err := Read[int]("a"); err != nil || rows != nil {
		t.Fatalf("without a file: %v, %v", rows, err)
	}
	for _, u := range []struct {
		section string
		row     int
	}{{"a", 1}, {"b", 7}, {"a", 2}} {
		if got, err := Update(u.section, add(u.row)); err != nil || got != path {
			t.Fatalf("%q, %v", got, err)
		}
	}
	for section, want := range map[string][]int{"a": {1, 2}, "b": {7}, "c": nil} {
		if rows, err := Read[int](section); err != nil || !slices.Equal(rows, want) {
			t.Errorf("%s: %v, %v, want %v", section, rows, err, want)
		}
	}
	if files, err := os.ReadDir(filepath.Dir(path)); err != nil || len(files) != 1 {
		t.Errorf("%v is left, %v", files, err)
	}
}

func TestFileIsInTheCacheDirectory(t *testing.T) {
	t.Setenv(string(env.Tuning), "")
	t.Setenv("XDG_CACHE_HOME", "/somewhere")
	if path, err := Path(); err != nil || path != "/somewhere/euryale/tuning.json" {
		t.Errorf("%q, %v", path, err)
	}
	t.Setenv("XDG_CACHE_HOME", "")
	t.Setenv("HOME", "")
	require.Fails(t, "Path", require.Err(Path()), string(env.Tuning))
	if rows, err := Read[int]("a"); err != nil || rows != nil {
		t.Errorf("%v, %v", rows, err)
	}
}

func TestBrokenFileIsNamed(t *testing.T) {
	for _, text := range []string{"{", "[]", "null", `{"a": 1}`, `{"a": ["x"]}`} {
		path := at(t, text)
		_, read := Read[int]("a")
		_, update := Update("a", add(1))
		for _, err := range []error{read, update} {
			require.Fails(t, text, err, path, "delete it")
		}
		if now, err := os.ReadFile(path); err != nil || string(now) != text {
			t.Errorf("%q has become %q, %v", text, now, err)
		}
	}
}

func TestFileThatCannotBeWrittenIsNamed(t *testing.T) {
	path := at(t, "{}") + "/below"
	t.Setenv(string(env.Tuning), path)
	require.Fails(t, "Update", require.Err(Update("a", add(1))), path)
}

func TestFileIsSwitchedOff(t *testing.T) {
	t.Setenv("HOME", t.TempDir())
	t.Setenv(string(env.Tuning), "off")
	rows, err := Read[int]("a")
	require.Check(t, Off() && rows == nil && err == nil, "%v, %v", rows, err)
	require.Fails(t, "Update", require.Err(Update("a", add(1))), "off")
	require.Fails(t, "a file off was written", require.Err(os.Stat("off")))
}
