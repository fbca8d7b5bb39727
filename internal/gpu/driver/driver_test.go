package driver

import (
	"os"
	"strings"
	"testing"

	"github.com/euryale-ml/euryale/internal/testing/require"
)

// Whatever is missing is named: the build tag, or the driver's library.
func TestAvailableSaysWhatIsMissing(t *testing.T) {
	err := Available()
	if err == nil {
		return
	}
	require.That(t, os.Getenv("REQUIRE_GPU") != "1", "no GPU, and REQUIRE_GPU=1: %v", err)
	if text := err.Error(); !strings.Contains(text, "-tags gpu") &&
		!strings.Contains(text, "CUDA driver") {
		t.Errorf("error is %q: it should name the tag or the driver", text)
	}
}
