package bench_test

import (
	"math"
	"slices"
	"strings"
	"testing"

	"github.com/euryale-ml/euryale/internal/bench"
	"github.com/euryale-ml/euryale/internal/testing/require"
)

func near(a, b float64) bool { return math.Abs(a-b) < 1e-9 }

func TestMedianOfInversesIsTheInverse(t *testing.T) {
	for want, x := range map[float64][]float64{3: {3}, 2: {9, 2, 1}, 4: {100, 8, 2, 1}} {
		inverse := slices.Clone(x)
		for i := range inverse {
			inverse[i] = 1 / inverse[i]
		}
		got, other := bench.Median(x), bench.Median(inverse)
		require.Check(t, near(got, want) && near(other, 1/want),
			"the median is %v, want %v; of the inverses %v", got, want, other)
	}
}

func TestProgramsRunInTurnAndRatiosArePaired(t *testing.T) {
	var order []int
	// the second program takes, in a machine that becomes slower
	factors := []float64{1.05, 0.9, 1.06}
	pairs, err := bench.Turns(3, func(program int) (map[int]float64, error) {
		round := len(order) / 2
		order = append(order, program)
		us := float64(1 + round)
		if program == 1 {
			us *= factors[round]
		}
		return map[int]float64{4096: 20, 8: us}, nil
	})
	require.That(t, err == nil && slices.Equal(order, []int{0, 1, 1, 0, 0, 1}),
		"the order is %v, the error %v", order, err)
	require.Check(t, len(pairs) == 2 && pairs[0].Bytes == 8 && near(pairs[0].Ratio, 1.05) &&
		near(pairs[0].Micros[0], 2) && near(pairs[1].Ratio, 1), "the pairs are %v", pairs)
	if _, err := bench.Turns(1, func(program int) (map[int]float64, error) {
		return map[int]float64{8 << program: 1}, nil
	}); err == nil {
		t.Error("sizes that one of the programs lacks are no error")
	}
}

func TestLinesOfResultsAreRead(t *testing.T) {
	got, err := bench.ReadJSON(
		strings.NewReader(`{"collective":"allreduce","bytes":1024,"p50_us":2,"wrong":0}` + "\n"))
	require.Check(t, err == nil && len(got) == 1 && got[0].Bytes == 1024 && got[0].P50Micros == 2,
		"read %v, %v", got, err)
	for text, want := range map[string]string{"": "no results", "{": "in the line",
		`{"collective":"allreduce","bytes":8,"wrong":2}`: "2 wrong elements"} {
		require.Fails(t, text, require.Err(bench.ReadJSON(strings.NewReader(text))), want)
	}
}
