package repolint_test

import (
	"go/ast"
	"path"
	"testing"

	"github.com/euryale-ml/euryale/internal/testing/require"
)

// readers are the packages that read what others may have written.
var readers = []string{"autograd/...", "fit/...", "internal/safetensors", "internal/tuning",
	"models/...", "observe/report", "vm/..."}

// TestFilesOfOthersAreOpenedByPackageFiles: what only package os opens waits for ever if it is a
// pipe, and may claim any length.
func TestFilesOfOthersAreOpenedByPackageFiles(t *testing.T) {
	atRoot(t)
	read := 0
	for _, f := range sources(t) {
		if f.test() || !withinAny(path.Dir(f.name), readers) {
			continue
		}
		read++
		ast.Inspect(f.File, func(n ast.Node) bool {
			if x, ok := n.(*ast.SelectorExpr); ok {
				of, _ := x.X.(*ast.Ident)
				if of != nil && (of.Name == "os" || of.Name == "fs") &&
					(x.Sel.Name == "Open" || x.Sel.Name == "ReadFile") {
					t.Errorf("%s calls %s.%s: use internal/files", f.name, of.Name, x.Sel.Name)
				}
			}
			return true
		})
	}
	require.Check(t, read >= 100, "only %d files were looked at", read)
}
