package tokenizer

import (
	"io/fs"
	"testing"

	"github.com/euryale-ml/euryale/internal/testing/nilargs"
)

func TestNilArgumentsAreErrors(t *testing.T) {
	none := func(string) (fs.FS, error) { return nil, fs.ErrNotExist }
	nilargs.Check(t, map[string]nilargs.Use{"Load": {F: Load, Args: []any{".", none}}},
		map[string]string{})
}
