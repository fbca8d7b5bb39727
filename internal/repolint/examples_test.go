package repolint_test

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/euryale-ml/euryale/internal/testing/require"
)

// saveNothing are the examples without a checkpoint: a signal ends them.
var saveNothing = []string{"allreduce", "convnet", "elastic", "generate", "gradient", "recommender"}

// TestEveryExampleThatSavesIsToldToEnd: it has a test of exampletest.ToldToEnd.
func TestEveryExampleThatSavesIsToldToEnd(t *testing.T) {
	atRoot(t)
	programs := require.Value(filepath.Glob("examples/*/main.go"))(t)
	require.Check(t, len(programs) > len(saveNothing), "only %q are found", programs)
	for _, file := range programs {
		dir := filepath.Dir(file)
		text := require.Value(os.ReadFile(file))(t)
		tests, _ := os.ReadFile(filepath.Join(dir, "main_test.go"))
		saves := strings.Contains(string(text), `"checkpoint", ""`)
		told := strings.Contains(string(tests), "exampletest.ToldToEnd(t, ")
		require.Check(t, saves == told && saves != slices.Contains(saveNothing, filepath.Base(dir)),
			"%s saves: %v, and a test tells it to end: %v", dir, saves, told)
	}
}
