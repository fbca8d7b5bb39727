package repolint_test

import (
	"bytes"
	"os"
	"os/exec"
	"path"
	"slices"
	"strings"
	"testing"

	"github.com/euryale-ml/euryale/internal/testing/require"
)

// go build leaves a program in the directory where it is called: here, or where its source is.
func TestProgramsThatGoBuildLeavesAreIgnored(t *testing.T) {
	atRoot(t)
	const programs = `{{if eq .Name "main"}}{{.ImportPath}}{{end}}`
	out := require.Value(exec.Command("go", "list", "-f", programs, "./...").Output())(t)
	text := require.Value(os.ReadFile(".gitignore"))(t)
	ignored := strings.Fields(string(text))
	for program := range strings.FieldsSeq(string(out)) {
		dir := strings.TrimPrefix(program, "github.com/euryale-ml/euryale/")
		for _, left := range []string{"/" + path.Base(dir), "/" + path.Join(dir, path.Base(dir))} {
			require.Check(t, slices.Contains(ignored, left), ".gitignore lacks %s", left)
		}
	}
}

// TestNothingThatIsBuiltIsTracked: a program is a hundred times larger than any source, and stays
// in the history of the repository. What else is not text is compressed kernels, and test data.
func TestNothingThatIsBuiltIsTracked(t *testing.T) {
	atRoot(t)
	out, err := exec.Command("git", "ls-files", "-z").Output()
	if err != nil {
		t.Skip("this is no clone: ", err)
	}
	const most = 1 << 19 // bytes
	for name := range strings.SplitSeq(strings.TrimSuffix(string(out), "\x00"), "\x00") {
		content, err := os.ReadFile(name)
		if err != nil {
			continue // a link, or deleted
		}
		binary := bytes.IndexByte(content, 0) >= 0 && !slices.Contains([]string{".bz2", ".gz",
			".safetensors"}, path.Ext(name))
		require.Check(t, len(content) <= most && !binary, "%s has %d bytes, at most %d, and is no "+
			"text: %v: is it built from something?", name, len(content), most, binary)
	}
}
