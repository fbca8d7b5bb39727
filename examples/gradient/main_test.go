package main

import (
	"os"
	"strings"
	"testing"

	"github.com/euryale-ml/euryale/internal/testing/require"
)

func TestItRunsAlone(*testing.T) { main() }

func TestThePageOfPortingShowsThisProgram(t *testing.T) {
	program, err := os.ReadFile("main.go")
	require.NoError(t, err)
	page, err := os.ReadFile("../../docs/porting.md")
	require.NoError(t, err)
	_, code, _ := strings.Cut(string(program), "package main")
	if !strings.Contains(string(page), "package main"+code) {
		t.Error("docs/porting.md shows another program: copy examples/gradient/main.go")
	}
}
