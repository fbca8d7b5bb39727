package main

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"

	"github.com/euryale-ml/euryale/internal/testing/require"
)

func TestTheListsAreThoseOfTheTable(t *testing.T) {
	all := require.Value(files())(t)
	for path, source := range all {
		is, err := os.ReadFile(filepath.Join("..", filepath.FromSlash(path)))
		require.Check(t, err == nil && bytes.Equal(is, source), "%s differs from the table: go "+
			"generate ./kernels/fuse (%v)", path, err)
	}
}
