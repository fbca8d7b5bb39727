package fit

import (
	"encoding/hex"
	"math"
	"os"
	"path/filepath"
	"slices"
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

// TestHistogramsCountFiniteElements by their places between the least and the most, whatever these
// are.
func TestHistogramsCountFiniteElements(t *testing.T) {
	const large, small = math.MaxFloat64, math.SmallestNonzeroFloat64
	for _, test := range []struct {
		elements []float64
		counts   map[int]float64
	}{
		{[]float64{1, 0, 1, 3, math.NaN(), math.Inf(-1)}, map[int]float64{0: 1, 10: 2, 29: 1}},
		{[]float64{2, 2}, map[int]float64{29: 2}},
		{[]float64{0.1}, map[int]float64{29: 1}},
		{[]float64{-large, large, 0, large}, map[int]float64{0: 1, 15: 1, 29: 2}},
		{[]float64{0, small}, map[int]float64{29: 2}},
		{[]float64{math.NaN()}, nil},
		{nil, nil},
	} {
		h := histogramOf("x", test.elements)
		for i, n := range h.counts {
			require.Check(t, n == test.counts[i], "%v: %v elements in %d", test.elements, n, i)
		}
		require.Check(t, test.counts == nil || slices.IsSorted(h.limits[:]) &&
			h.limits[29] == h.most, "%v: limits %v", test.elements, h.limits)
	}
}
