package main

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"

	"github.com/euryale-ml/euryale/internal/testing/require"
)

func TestTheListsAreThoseOfTheTable(t *testing.T) {
	all, err := files()
	require.NoError(t, err)
	for path, source := range all {
		is, err := os.ReadFile(filepath.Join("..", filepath.FromSlash(path)))
		if err != nil || !bytes.Equal(is, source) {
			t.Errorf("%s differs from the table: go generate ./kernels/fuse (%v)", path, err)
		}
	}
}
