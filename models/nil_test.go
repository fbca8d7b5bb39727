package models_test

import (
	"io/fs"
	"testing"

	"github.com/euryale-ml/euryale/internal/testing/nilargs"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/models"
)

func TestNilArgumentsAreErrors(t *testing.T) {
	m := require.Value(models.Load("testdata/gpt2"))(t)
	defer m.Close()
	none := func(string) (fs.FS, error) { return nil, fs.ErrNotExist }
	nilargs.Check(t, map[string]nilargs.Use{
		"Load": {F: models.Load, Args: []any{"testdata/gpt2", none}},
		"NewGenerator": {F: models.NewGenerator, Args: []any{m, nil,
			models.GenerateOptions{}}},
	}, map[string]string{"NewGenerator.device": "nil is the host"})
}
