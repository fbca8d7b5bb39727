package gpu

import (
	"testing"

	"github.com/euryale-ml/euryale/internal/testing/nilargs"
)

func TestNilArgumentsAreErrors(t *testing.T) {
	first := func(open func(int) (Device, error)) error {
		_, err := New(open).device(0)
		return err
	}
	nilargs.Check(t, map[string]nilargs.Use{
		"New":      {F: first, Args: []any{nil}},
		"SurveyOf": {F: SurveyOf, Args: []any{nil}},
	}, nil)
}
