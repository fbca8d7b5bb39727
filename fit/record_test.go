package fit

import (
	"encoding/hex"
	"math"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/euryale-ml/euryale/internal/testing/require"
)

// TestEventFilesAreAsTensorBoardWritesThem, byte for byte: by RecordWriter and the messages of
// tensorboard 2.21.0.
func TestEventFilesAreAsTensorBoardWritesThem(t *testing.T) {
	const want = "" +
		"1a00000000000000129bd82d09000000000000f83f10031a0d627261696e2e4576656e743a32e3c0b95c" +
		"0f000000000000006d532b0909000000000000f83f10033a020801ec8612fc36000000000000004f578c" +
		"ef09000000000000084010032a290a110a0a65706f63682f6c6f7373150000003f0a140a0d65706f6368" +
		"2f7365636f6e647315000000c0f242db223700000000000000e7e8ca5909000000000000084010ac022a" +
		"290a110a0a65706f63682f6c6f7373150000003f0a140a0d65706f63682f7365636f6e647315000000c0" +
		"0f9fd0ae"
	path := filepath.Join(t.TempDir(), "events")
	file := require.Value(os.Create(path))(t)
	f := &eventFile{to: file}
	require.NoError(t, f.begin(time.UnixMicro(1_500_000), 3))
	for _, step := range []int{3, 300} {
		require.NoError(t, f.tell(point{step, time.Unix(3, 0), "epoch",
			map[string]float64{"seconds": -2, "loss": 0.5}, nil}))
	}
	f.close("")
	require.Equal(t, "the file", hex.EncodeToString(require.Got(os.ReadFile(path))(t)), want)
}

// TestHistogramsCountFiniteElements by their places between the least and the most.
func TestHistogramsCountFiniteElements(t *testing.T) {
	h := histogramOf("x", []float64{1, 0, 1, 3, math.NaN(), math.Inf(-1)})
	want := histogram{name: "x", least: 0, most: 3, sum: 5, squares: 11}
	want.bins[0], want.bins[10], want.bins[29] = 1, 2, 1
	require.Equal(t, "0 to 3", h, want)
	want = histogram{name: "x", least: 2, most: 2, sum: 4, squares: 8}
	want.bins[0] = 2
	require.Equal(t, "one number", histogramOf("x", []float64{2, 2}), want)
}
