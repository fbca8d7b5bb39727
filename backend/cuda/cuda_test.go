package cuda

import (
	"testing"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/cuda"
	"github.com/euryale-ml/euryale/internal/testing/require"
)

// TestADeviceOrWhatIsMissing: a program without GPUs is told so, another one has a device.
func TestADeviceOrWhatIsMissing(t *testing.T) {
	d, err := Open(0)
	if missing := cuda.Available(); (missing == nil) != (err == nil) {
		t.Fatalf("Open returns %v, and %v is missing", err, missing)
	}
	if err != nil {
		return
	}
	var _ backend.Device = d
	require.Report(t, d.Close())
}
