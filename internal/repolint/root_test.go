package repolint_test

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"
)

// TestMain runs the tests at the root of the module, so that they name files as a reader does.
func TestMain(m *testing.M) {
	if err := toRoot(); err != nil {
		fmt.Fprintln(os.Stderr, "repolint:", err)
		os.Exit(1)
	}
	os.Exit(m.Run())
}

// toRoot changes to the nearest directory above this one that has a go.mod.
func toRoot() error {
	dir, err := os.Getwd()
	if err != nil {
		return err
	}
	for at := dir; ; at = filepath.Dir(at) {
		if _, err := os.Stat(filepath.Join(at, "go.mod")); err == nil {
			return os.Chdir(at)
		}
		if at == filepath.Dir(at) {
			return fmt.Errorf("no go.mod in %s, nor above it", dir)
		}
	}
}
