package main

import (
	"os"
	"strings"
	"testing"

	"github.com/euryale-ml/euryale/internal/testing/require"
)

// A difference counts as explained only if its test and its operation have a reason.
func TestUnknownDifferencesAreReported(t *testing.T) {
	known := result{"TestMaxPool2D_asymmetricPadding", "tape", "differs",
		"MaxPool{1, 3, 32, 32}", ""}
	other := known
	other.Node = "Σ[0]"
	text, unexplained := table(
		[]result{known, {Test: "TestAdd", Machine: "tape", Outcome: "agree"}})
	if unexplained != nil || !strings.Contains(text, "2 tests") ||
		!strings.Contains(text, "in 1 of them") ||
		!strings.Contains(text, "| `TestMaxPool2D_asymmetricPadding` | `MaxPool` |") {
		t.Errorf("unexplained %q in\n%s", unexplained, text)
	}
	failed := result{Test: "TestAdd", Outcome: "vm fails"}
	for _, r := range []result{other, failed, {Test: "TestAdd", Outcome: "vm panics"}} {
		_, unexplained := table([]result{known, r})
		require.Check(t, len(unexplained) == 1 && strings.Contains(unexplained[0], r.Test),
			"%+v is not reported: %q", r, unexplained)
	}
}

// The table of docs/ops.md is one that the command can have written.
func TestPageHasTheReasons(t *testing.T) {
	text := require.Value(os.ReadFile("../optable/stocktests.md"))(t)
	for _, why := range reasons {
		require.Check(t, strings.Contains(string(text), "| `"+why.test+"` | `"+why.operation+"` | "+
			why.why+
			" |"), "%s is not in the page: run go run ./internal/tools/stocktests -w", why.test)
	}
}
