package tuning

import (
	"os"
	"path/filepath"
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
	rows, err := Read[int]("a")
	require.That(t, err == nil && rows == nil, "without a file: %v, %v", rows, err)
	for _, u := range []struct {
		section string
		row     int
	}{{"a", 1}, {"b", 7}, {"a", 2}} {
		require.Equal(t, "Update", require.Got(Update(u.section, add(u.row)))(t), path)
	}
	for section, want := range map[string][]int{"a": {1, 2}, "b": {7}, "c": nil} {
		require.Slices(t, section, require.Got(Read[int](section))(t), want)
	}
	require.Equal(t, "ReadDir", len(require.Got(os.ReadDir(filepath.Dir(path)))(t)), 1)
}

func TestFileIsInTheCacheDirectory(t *testing.T) {
	t.Setenv(string(env.Tuning), "")
	t.Setenv("XDG_CACHE_HOME", "/somewhere")
	require.Equal(t, "Path", require.Got(Path())(t), "/somewhere/euryale/tuning.json")
	t.Setenv("XDG_CACHE_HOME", "")
	t.Setenv("HOME", "")
	require.Fails(t, "Path", require.Err(Path()), string(env.Tuning))
	rows, err := Read[int]("a")
	require.Check(t, err == nil && rows == nil, "%v, %v", rows, err)
}

func TestBrokenFileIsNamed(t *testing.T) {
	for _, text := range []string{"{", "[]", "null", `{"a": 1}`, `{"a": ["x"]}`} {
		path := at(t, text)
		_, read := Read[int]("a")
		_, update := Update("a", add(1))
		for _, err := range []error{read, update} {
			require.Fails(t, text, err, path, "delete it")
		}
		require.Equal(t, "ReadFile", string(require.Got(os.ReadFile(path))(t)), text)
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
