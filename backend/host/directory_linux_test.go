//go:build !portable

package host

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"testing"

	"github.com/euryale-ml/euryale/internal/shm"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/internal/testing/testranks"
	"github.com/euryale-ml/euryale/rendezvous"
)

func TestTooLittleSharedMemoryIsAnError(t *testing.T) {
	_, err := shm.New("/dev/shm", 1<<50)
	require.Fails(t, "shm.New", err, "EURYALE_SHM_DIR", "bytes free")
}

func TestDirectoryThatCannotHoldSharedMemoryIsAnErrorOnEveryRank(t *testing.T) {
	worlds := require.Value(rendezvous.Local(3, 0))(t)
	missing := filepath.Join(t.TempDir(), "missing")
	errs := testranks.Each(3, func(r int) error {
		dir := ""
		if r == 0 {
			dir = missing // only the rank that makes the region sees the problem itself
		}
		_, err := Backend{Dir: dir}.Connect(context.Background(), worlds[r])
		return errors.Join(err, worlds[r].Close())
	})
	for r, err := range errs {
		require.Fails(t, fmt.Sprint("rank ", r), err, missing)
	}
	require.Fails(t, "available without a directory", (Backend{Dir: missing}).Available())
}
