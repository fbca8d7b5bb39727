//go:build unix

package autograd_test

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/euryale-ml/euryale/autograd"
	"github.com/euryale-ml/euryale/internal/testing/require"
)

// TestWeightsThatAreAPipeOrAllHolesAreRefused: the first would wait for ever, and the second take a
// terabyte of memory, which its header says as its length does.
func TestWeightsThatAreAPipeOrAllHolesAreRefused(t *testing.T) {
	const long = 1 << 40
	header := fmt.Sprintf(`{"w":{"dtype":"U8","shape":[%d],"data_offsets":[0,%[1]d]}}`, int64(long))
	dir := t.TempDir()
	pipe, holes := filepath.Join(dir, "pipe"), filepath.Join(dir, "holes")
	require.NoError(t, errors.Join(syscall.Mkfifo(pipe, 0o600), os.WriteFile(holes, append(
		binary.LittleEndian.AppendUint64(nil, uint64(len(header))), header...), 0o600)))
	wants := map[string]string{pipe: "it is not a regular file"}
	if os.Truncate(holes, int64(8+len(header)+long)) == nil { // else the disk takes no such file
		wants[holes] = "is not whole"
	}
	for path, want := range wants {
		_, err := autograd.ReadWeights(path)
		require.Fails(t, path, err, want)
	}
}
