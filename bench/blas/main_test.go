package main

import (
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/euryale-ml/euryale/internal/testing/require"
)

func TestProductsAreCompared(t *testing.T) {
	if _, err := exec.LookPath("cc"); err != nil {
		t.Skip("needs cc")
	}
	var out strings.Builder
	err := run(t.Context(), &out, []string{"-only", "^layer_f32/tn/128", "-rounds", "1", "-time",
		"1ms", "-threads", "1"})
	if err != nil && strings.Contains(err.Error(), "libopenblas-dev") {
		t.Skip("needs OpenBLAS")
	}
	if err != nil ||
		!strings.HasPrefix(out.String(),
			`{"op":"layer_f32","n":128,"threads":1,"shape":"128x128x768","form":"tn","gflops":`) {
		t.Errorf("%v, %s", err, out.String())
	}
}

func TestExpIsCompared(t *testing.T) {
	line, err := compareExp(1, time.Millisecond)
	require.Check(t, err == nil && line.Op == "exp_f32" && !(line.Gflops <= 0) &&
		!(line.PeerGflops <= 0), "%+v, %v", line, err)
}

func TestWrongThreadsAreRefused(t *testing.T) {
	for _, list := range []string{"", "0", "1,x"} {
		n, err := numbers(list)
		require.Check(t, err != nil, "%q are %v", list, n)
	}
}
