package repolint_test

import (
	"os"
	"path/filepath"
	"testing"
)

// atRoot runs the rest of a test at the root of the module, so that it names files as a reader
// does. A test does so itself, since the go command caches its outcome by the files that it reads
// from then on.
func atRoot(t *testing.T) {
	t.Helper()
	at, err := os.Getwd()
	for err == nil && at != filepath.Dir(at) {
		if _, none := os.Stat(filepath.Join(at, "go.mod")); none == nil {
			t.Chdir(at)
			return
		}
		at = filepath.Dir(at)
	}
	t.Fatal("there is no go.mod here, nor above", err)
}
