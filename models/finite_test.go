package models_test

import (
	"maps"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/files"
	"github.com/euryale-ml/euryale/internal/kernels"
	"github.com/euryale-ml/euryale/internal/safetensors"
	"github.com/euryale-ml/euryale/internal/testing/require"
)

// stored returns a folder like one of testdata whose tensors are of a dtype.
func stored(t *testing.T, folder string, d backend.DType) (dir string) {
	t.Helper()
	dir = copied(t, folder)
	path := filepath.Join(dir, "model.safetensors")
	from := require.Value(safetensors.Open(files.Disk(path), "."))(t)
	all := map[string]safetensors.Tensor{}
	for _, name := range from.Names() {
		x, err := from.Read(name)
		to := safetensors.New(d, x.Shape)
		if err == nil {
			err = kernels.Host{}.Cast(to.Data, x.Data)
		}
		if all[name] = to; err != nil {
			t.Fatal(err)
		}
	}
	require.NoError(t, from.Close())
	f, err := os.Create(path)
	if err == nil {
		err = safetensors.Write(f, all, nil)
	}
	require.That(t, err == nil && f.Close() == nil, "%v", err)
	return dir
}

// TestAFolderIsSavedWithFiniteNumbersOnly: what the dtype of the folder cannot hold is refused as
// what is NaN already, by tensor and element, and nothing is written; what it can hold is saved.
func TestAFolderIsSavedWithFiniteNumbersOnly(t *testing.T) {
	const gain = "model.norm.gain"
	for _, c := range []struct {
		d    backend.DType
		x    float32
		want string
	}{
		{backend.F16, 65504, ""},
		{backend.F16, 1e6, "element [0] is 1e+06, more than f16 can hold"},
		{backend.BF16, 1e6, ""}, {backend.BF16, math.MaxFloat32, "more than bf16 can hold"},
		{backend.F32, math.MaxFloat32, ""}, {backend.F32, float32(math.NaN()), "is NaN"},
		{backend.F16, float32(math.Inf(-1)), "is -Inf: the model has diverged"},
		// residence.OnDevice
		{backend.F32, math.Float32frombits(0x7fc0_e57b), "call Pull or Close"},
	} {
		m := load(t, stored(t, "llama3", c.d))
		weights := learned(t, m)
		weights[gain].Data().([]float32)[0] = c.x
		dir := filepath.Join(t.TempDir(), "saved")
		err := m.Save(dir, maps.All(weights))
		_, none := os.Stat(dir)
		if (err == nil) != (c.want == "") || (none == nil) != (c.want == "") || err != nil &&
			!(strings.Contains(err.Error(), c.want) && strings.Contains(err.Error(), gain)) {
			t.Errorf("%v in %v: want %q, got %v", c.x, c.d, c.want, err)
		}
	}
}
