package bench

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"slices"
	"strings"
)

// Pair is how two programs compare at one size.
type Pair struct {
	Bytes  int
	Micros [2]float64 // of a call of each, the medians over the rounds
	Ratio  float64    // of the second's time by the first's, the median over the rounds
}

// Turns runs two programs in turn, each once a round, the first one ahead in every other round. run
// returns the microseconds of a call by the bytes of its operand. Turns returns a pair for each
// size, in their order.
func Turns(rounds int, run func(program int) (map[int]float64, error)) ([]Pair, error) {
	var all [2][]map[int]float64
	for round := range rounds {
		for i := range 2 {
			program := (round + i) % 2
			times, err := run(program)
			if err != nil {
				return nil, err
			}
			all[program] = append(all[program], times)
		}
	}
	sizes := map[int]bool{}
	for _, times := range slices.Concat(all[0], all[1]) {
		for nbytes := range times {
			sizes[nbytes] = true
		}
	}
	var pairs []Pair
	for _, nbytes := range slices.Sorted(maps.Keys(sizes)) {
		var first, second, ratios []float64
		for round := range rounds {
			before, after := all[0][round][nbytes], all[1][round][nbytes]
			if before <= 0 || after <= 0 {
				return nil, fmt.Errorf("bench: %d bytes were not measured by both programs", nbytes)
			}
			first, second, ratios = append(first, before), append(second, after),
				append(ratios, after/before)
		}
		pairs = append(pairs, Pair{nbytes, [2]float64{Median(first), Median(second)},
			Median(ratios)})
	}
	return pairs, nil
}

// Median sorts x, which has positive values. Of an even number it is the geometric mean of the
// middle two, so that the median of inverse ratios is the inverse of the median.
func Median(x []float64) float64 {
	slices.Sort(x)
	n := len(x)
	return math.Sqrt(x[(n-1)/2] * x[n/2])
}

// ReadJSON reads lines that WriteJSON wrote, and none that begins with #. It fails if there are
// none, or if elements are wrong.
func ReadJSON(r io.Reader) ([]Result, error) {
	var all []Result
	lines := bufio.NewScanner(r)
	for lines.Scan() {
		if strings.HasPrefix(lines.Text(), "#") {
			continue
		}
		var result Result
		if err := json.Unmarshal(lines.Bytes(), &result); err != nil {
			return nil, fmt.Errorf("bench: %w in the line %q", err, lines.Text())
		}
		if result.Wrong > 0 {
			return nil, fmt.Errorf("bench: %s of %d bytes has %d wrong elements", result.Collective,
				result.Bytes, result.Wrong)
		}
		all = append(all, result)
	}
	if err := lines.Err(); err != nil {
		return nil, fmt.Errorf("bench: read results: %w", err)
	}
	if len(all) == 0 {
		return nil, errors.New("bench: the program wrote no results")
	}
	return all, nil
}
