package main

import (
	"bytes"
	"context"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/euryale-ml/euryale/internal/cuda"
	"github.com/euryale-ml/euryale/internal/testing/require"
)

func TestEnvPreparesABuild(t *testing.T) {
	for _, tool := range []string{"cc", "ar"} {
		if _, err := exec.LookPath(tool); err != nil {
			t.Skip(err)
		}
	}
	toolkit, dir := t.TempDir(), filepath.Join(t.TempDir(), "it's here")
	const header = "#define CUDA_VERSION 12000\ntypedef int CUresult;\nCUresult " +
		"cuDriverGetVersion(int *);\n"
	require.NoError(t, os.MkdirAll(filepath.Join(toolkit, "include"), 0o755))
	require.NoError(t, os.WriteFile(filepath.Join(toolkit, "include", "cuda.h"), []byte(header),
		0o600))
	t.Setenv("CUDA_HOME", toolkit)
	var out bytes.Buffer
	require.NoError(t, (envCmd{Dir: dir}).Run(context.Background(),
		&streams{out: &out, err: io.Discard}))
	flags := require.Value(exec.Command("sh", "-c",
		`eval "$1"; printenv CGO_ENABLED CGO_CFLAGS CGO_LDFLAGS`, "sh", out.String()).Output())(t)
	require.Check(t, strings.Contains(out.String(), "\n# cuDNN: "), "no word on cuDNN in\n%s",
		out.String())
	for _, want := range []string{"1\n", `"-I` + dir + `/include" -I` + toolkit + "/include\n",
		`"-L` + dir + `/lib" -lcuda`} {
		require.Check(t, strings.Contains(string(flags), want), "no %q in\n%s", want, flags)
	}
	require.Report(t, require.Err(os.Stat(filepath.Join(dir, "lib", "libcuda.a"))))
}

// TestEnvSaysWhereLibrariesAre: a library is found by its variable and on the library path; without
// one the script says what to install.
func TestEnvSaysWhereLibrariesAre(t *testing.T) {
	dir := t.TempDir()
	// The newest one is looked for first, also where the system has it.
	file := filepath.Join(dir, "libcublas.so.13")
	require.NoError(t, os.WriteFile(file, nil, 0o600))
	lacking := filepath.Join(dir, "nothing")
	for _, test := range []struct{ path, variable, want string }{
		{dir, "", "# cuBLAS: " + file + "\n"},
		{"", file, "# cuBLAS: " + file + "\n"},
		{dir, lacking, "pip install nvidia-cublas"},
		{dir, "off", "EURYALE_CUBLAS=off: without it, matrix multiplications run on " +
			"Euryale's slower kernels"},
	} {
		t.Setenv("LD_LIBRARY_PATH", test.path)
		t.Setenv("EURYALE_CUBLAS", test.variable)
		if got := found(cuda.Libraries()[0]); !strings.HasPrefix(got, "# cuBLAS: ") ||
			!strings.Contains(got, test.want) || strings.Count(got, "\n") != 1 {
			t.Errorf("LD_LIBRARY_PATH=%s EURYALE_CUBLAS=%s: %q, want %q", test.path, test.variable,
				got, test.want)
		}
	}
}

func TestEnvSaysWhatIsMissing(t *testing.T) {
	t.Setenv("CUDA_HOME", t.TempDir())
	err := envCmd{Dir: t.TempDir()}.Run(context.Background(), nowhere())
	require.Fails(t, "euryale env", err, "CUDA_HOME")
}
