package main

import (
	"os"
	"strings"
	"testing"

	"github.com/euryale-ml/euryale/internal/testing/require"
)

func TestItRunsAlone(*testing.T) { main() }

func TestReadmeShowsThisProgram(t *testing.T) {
	program, err := os.ReadFile("main.go")
	require.NoError(t, err)
	readme, err := os.ReadFile("../../README.md")
	require.NoError(t, err)
	_, code, _ := strings.Cut(string(program), "package main")
	if !strings.Contains(string(readme), "package main"+code) {
		t.Error("README.md shows another program: copy examples/gradient/main.go")
	}
}
