//go:build gpu

package gpu

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/backend/backendtest"
	"github.com/euryale-ml/euryale/internal/testing/require"
)

func TestLibraryThatIsMissingSaysWhatToDoOffGPU(t *testing.T) {
	t.Setenv("EURYALE_NCCL", t.TempDir())
	_, err := load()
	require.Check(t, err != nil && strings.Contains(err.Error(), "EURYALE_NCCL") &&
		strings.Contains(err.Error(), "2.18"), "got %v", err)
}

func TestLibraryOfAnotherKindIsRefusedOffGPU(t *testing.T) {
	for _, path := range []string{"/lib/x86_64-linux-gnu/libm.so.6", "/lib64/libm.so.6",
		"/lib/aarch64-linux-gnu/libm.so.6"} {
		if _, err := os.Stat(path); err != nil {
			continue
		}
		t.Setenv("EURYALE_NCCL", path)
		if _, err := load(); err == nil || !strings.Contains(err.Error(), "lacks ncclGetVersion") {
			t.Errorf("got %v", err)
		}
		return
	}
	t.Skip("no library to try it with")
}

func TestLibraryTellsItsVersionOffGPU(t *testing.T) {
	lib, err := load()
	if err != nil {
		lacking(t, err.Error())
	}
	v := lib.version()
	require.Check(t, v >= oldestVersion, "version %d", v)
}

// TestLibraryThatIsOldDoesAllButSplit: run it with EURYALE_NCCL naming one before 2.18.
func TestLibraryThatIsOldDoesAllButSplit(t *testing.T) {
	lib, err := load()
	if err != nil {
		lacking(t, err.Error())
	}
	if lib.splits() == nil {
		t.Skipf("NCCL %s is none", versionText(lib.version()))
	}
	comms := connect(t, needGPUs(t, 2).Backend, 2, time.Minute)
	backendtest.Each(t, comms, checkWithoutSplit)
	comms[0].Abort(errors.New("enough"))
	backendtest.Each(t, comms, func(c backend.Communicator) error {
		if err := backend.Barrier(c); !errors.Is(err, backend.ErrAborted) {
			return fmt.Errorf("got %w", err)
		}
		return nil
	})
}

// lacking skips a test, or fails it where REQUIRE_GPU=1.
func lacking(t testing.TB, why string) {
	t.Helper()
	require.That(t, os.Getenv("REQUIRE_GPU") != "1", "REQUIRE_GPU=1, but: %s", why)
	t.Skip(why)
}
