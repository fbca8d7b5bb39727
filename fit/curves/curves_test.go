package curves_test

import (
	"strings"
	"testing"

	"github.com/euryale-ml/euryale/fit"
	"github.com/euryale-ml/euryale/fit/curves"
	"github.com/euryale-ml/euryale/internal/testing/require"
)

func TestCurvesHaveAChartForEachMetric(t *testing.T) {
	var out strings.Builder
	err := curves.SVG(&out, []fit.Epoch{
		{Epoch: 1, Loss: 2, Metrics: map[string]float64{"loss": 3, "accuracy": 0.25}},
		{Epoch: 2, Loss: 1, Metrics: map[string]float64{"accuracy": 0.5}},
	})
	require.Check(t, err == nil && strings.Contains(out.String(), "<svg"), "%v in\n%.200s", err,
		out.String())
}
