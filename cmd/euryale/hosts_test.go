//go:build unix

package main

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/euryale-ml/euryale/internal/testing/require"
)

// TestRunOnHosts: this program is copied to them, so it can be the job's program, too.
func TestRunOnHosts(t *testing.T) {
	dir := t.TempDir()
	ssh := fmt.Sprintf("#!/bin/sh\nwhile [ \"$1\" != -- ]; do shift; done\nHOME=%s/$2\n"+
		"SSH_CONNECTION='127.0.0.1 1 127.0.0.1 22'\nexport HOME SSH_CONNECTION %s=1\n"+
		"unset XDG_CACHE_HOME\nshift 2\nexec sh -c \"$*\"\n", dir, actAsEuryale)
	err := os.WriteFile(filepath.Join(dir, "ssh"), []byte(ssh), 0o700)
	if err == nil {
		err = os.WriteFile(filepath.Join(dir, "hosts"), []byte("a slots=2\nb\n"), 0o600)
	}
	require.NoError(t, err)
	cmd := command(t, append([]string{"run", "--hostfile", filepath.Join(dir, "hosts"), "euryale"},
		small()...)...)
	cmd.Env = append(cmd.Env, "PATH="+dir+":"+os.Getenv("PATH"))
	out, err := cmd.CombinedOutput()
	require.Check(t, err == nil && strings.Contains(string(out), "[0] # ranks: 3 processes"),
		"%v\n%s", err, out)
}

func TestHostsSayWhatGPUsLack(t *testing.T) {
	g, err := openGPUs()
	if err == nil {
		g.close() // only the report matters
		t.Skip("this machine has GPUs")
	}
	t.Setenv("EURYALE_CUBLAS", filepath.Join(t.TempDir(), "libcublas.so"))
	advice := gpuAdvice()
	require.Check(t, slices.Contains(advice, "gpu: "+err.Error()) &&
		strings.Contains(strings.Join(advice, "\n"), "cuBLAS: not found: without it"), "%q, want "+
		"%v, and cuBLAS", advice, err)
	const lack = "products: kernels of Euryale: cuBLAS was not found: install it"
	got := missing("A GPU\n" + lack + "\nlibcublas.so.13: no such file\nconvolutions: cuDNN 9")
	require.Slices(t, "of facts", got, []string{lack})
}
