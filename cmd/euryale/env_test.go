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
)

func TestEnvPreparesABuild(t *testing.T) {
	for _, tool := range []string{"cc", "ar"} {
		if _, err := exec.LookPath(tool); err != nil {
			t.Skip(err)
		}
	}
	toolkit, dir := t.TempDir(), filepath.Join(t.TempDir(), "it's here")
	const header = "#define CUDA_VERSION 12000\ntypedef int CUresult;\nCUresult cuDriverGetVersion(int *);\n"
	if err := os.MkdirAll(filepath.Join(toolkit, "include"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(toolkit, "include", "cuda.h"), []byte(header), 0o600); err != nil {
		t.Fatal(err)
	}
	t.Setenv("CUDA_HOME", toolkit)
	var out bytes.Buffer
	if err := (envCmd{Dir: dir}).Run(context.Background(), &streams{out: &out, err: io.Discard}); err != nil {
		t.Fatal(err)
	}
	flags, err := exec.Command("sh", "-c", `eval "$1"; printenv CGO_ENABLED CGO_CFLAGS CGO_LDFLAGS`, "sh", out.String()).Output()
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"1\n", `"-I` + dir + `/include" -I` + toolkit + "/include\n", `"-L` + dir + `/lib" -lcuda`} {
		if !strings.Contains(string(flags), want) {
			t.Errorf("no %q in\n%s", want, flags)
		}
	}
	if _, err := os.Stat(filepath.Join(dir, "lib", "libcuda.a")); err != nil {
		t.Error(err)
	}
}

func TestEnvSaysWhatIsMissing(t *testing.T) {
	t.Setenv("CUDA_HOME", t.TempDir())
	err := envCmd{Dir: t.TempDir()}.Run(context.Background(), nowhere())
	if err == nil || !strings.Contains(err.Error(), "CUDA_HOME") {
		t.Errorf("error is %v", err)
	}
}
