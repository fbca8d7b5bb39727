package repolint_test

import (
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/euryale-ml/euryale/internal/testing/require"
)

// layer is a line of the list of files in a doc.go.
var layer = regexp.MustCompile(`(?m)^//\t([a-z]+(?:, [a-z]+)*)(?:  .*)?$`)

// TestFilesOfAutogradUseOnlyThoseBelow: a file takes no type, function, variable or constant of a
// file in a line above its own in doc.go. Methods are not looked at.
func TestFilesOfAutogradUseOnlyThoseBelow(t *testing.T) {
	atRoot(t)
	text := require.Value(os.ReadFile("autograd/doc.go"))(t)
	_, list, _ := strings.Cut(string(text), "\npackage autograd\n")
	at := map[string]int{} // of a file, 1 for the line at the top
	for i, line := range layer.FindAllStringSubmatch(list, -1) {
		for _, file := range strings.Split(line[1], ", ") {
			at[file] = 1 + i
		}
	}
	files, declares := map[string]*ast.File{}, map[string]string{}
	names := require.Value(filepath.Glob("autograd/*.go"))(t)
	for _, name := range names {
		file := strings.TrimSuffix(filepath.Base(name), ".go")
		if strings.HasSuffix(file, "_test") || file == "doc" {
			continue
		}
		require.Check(t, at[file] != 0, "autograd/doc.go does not list %s", file)
		files[file] = require.Value(parser.ParseFile(token.NewFileSet(), name, nil, 0))(t)
		for declared := range files[file].Scope.Objects {
			declares[declared] = file
		}
	}
	used := 0
	for file, f := range files {
		for _, id := range f.Unresolved {
			by, ours := declares[id.Name]
			if used++; ours && at[by] < at[file] {
				t.Errorf("autograd/%s.go uses %s of %s.go, which doc.go lists above it", file,
					id.Name, by)
			}
		}
	}
	require.That(t, len(files) == len(at) && used > 1000, "%d of %d files use %d names",
		len(files), len(at), used)
}
