package main

import (
	"os"
	"regexp"
	"strings"
	"testing"

	"golang.org/x/sys/cpu"

	"github.com/euryale-ml/euryale/internal/testing/exampletest"
	"github.com/euryale-ml/euryale/internal/testing/require"
)

// TestReadmeShowsWhatTheDemoPrints: its lines are of a run, with the numbers that any processor has
// with AVX-512; others may add up products in another order.
func TestReadmeShowsWhatTheDemoPrints(t *testing.T) {
	readme := string(require.Value(os.ReadFile("../../README.md"))(t))
	_, shown, found := strings.Cut(readme, "```\n[0] epoch 20/20")
	shown, _, _ = strings.Cut("[0] epoch 20/20"+shown, "\n```")
	require.That(t, found, "README.md shows no output of make demo")
	said := exampletest.Train(t, 2, "")
	comparable := func(text string) string {
		text = regexp.MustCompile(`(params=\w{12})\S*`).ReplaceAllString(text, "$1")
		text = regexp.MustCompile(`(?m)^(\[0\] )|[ …]+$`).ReplaceAllString(text, "")
		if !cpu.X86.HasAVX512F {
			text = regexp.MustCompile(`params=\w+|\d`).ReplaceAllString(text, "0")
		}
		return text
	}
	if !strings.HasSuffix(strings.TrimSpace(comparable(said)), comparable(shown)) {
		t.Errorf("README.md shows\n%s\nand it prints\n%s", comparable(shown), comparable(said))
	}
}
