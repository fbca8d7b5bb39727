package mpi

import (
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/euryale-ml/euryale/internal/testing/require"
)

func TestLibraryOfTheLauncherComesFirst(t *testing.T) {
	for _, test := range []struct {
		variable, first string
	}{
		{"", "libmpi_abi.so.1"},
		{"OMPI_COMM_WORLD_SIZE", "libmpi.so.40"},
		{"PMI_RANK", "libmpi_abi.so.1"},
	} {
		got := places(func(name string) string {
			if name == test.variable {
				return "1"
			}
			return ""
		})
		require.Check(t, got[0] == test.first && slices.Contains(got, "libmpi.so.12") &&
			slices.Contains(got, "libmpi.so.40"), "with %q: %v", test.variable, got)
	}
	dir := t.TempDir()
	for named, want := range map[string]string{dir: filepath.Join(dir, "libmpi_abi.so.1"),
		"/opt/libmpi.so": "/opt/libmpi.so"} {
		got := places(func(name string) string {
			if name == "EURYALE_MPI" {
				return named
			}
			return ""
		})
		require.Check(t, got[0] == want, "EURYALE_MPI=%s: %v", named, got)
	}
}

func TestMissingLibrarySaysWhatToDo(t *testing.T) {
	_, err := load(func(name string) string {
		if name == "EURYALE_MPI" {
			return t.TempDir()
		}
		return ""
	})
	require.Check(t, err != nil && (strings.Contains(err.Error(), "-tags mpi") ||
		strings.Contains(err.Error(), "EURYALE_MPI")), "the error is %v", err)
}
