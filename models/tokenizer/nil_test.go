package tokenizer

import (
	"testing"

	"github.com/euryale-ml/euryale/internal/testing/nilargs"
)

func TestNilArgumentsAreErrors(t *testing.T) {
	nilargs.Check(t, map[string]nilargs.Use{}, map[string]string{})
}
