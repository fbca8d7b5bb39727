package main

import (
	"fmt"
	"maps"
	"math"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/euryale-ml/euryale/internal/testing/require"
)

// number is a number of a result, such as 2,860 or 0.947.
var number = regexp.MustCompile(`\d[\d,]*(?:\.\d+)?`)

// training returns the rows of one device and of several.
func training(t *testing.T) (one, several []row) {
	t.Helper()
	page := require.Value(os.ReadFile(filepath.Join(root, "docs", "benchmarks.md")))(t)
	one = require.Value(rows(page, "## Training steps"))(t)
	several = require.Value(rows(page, "### On several GPUs"))(t)
	require.That(t, len(one) >= 19 && len(several) >= 16, "there are %d and %d rows", len(one),
		len(several))
	return one, several
}

// A time of a row stands in the file that the row names, and so does an efficiency. A share is the
// quotient of two times, or in the file.
func TestFiguresOfTrainingFollowFromTheirFiles(t *testing.T) {
	one, several := training(t)
	for _, r := range append(one, several...) {
		file := strings.Trim(r["rows"], "`")
		text := require.Value(os.ReadFile(filepath.Join(root, "bench", "results",
			file[:min(len(file), len("2026-11"))], file)))(t)
		var known []float64
		for _, found := range number.FindAllString(string(text), -1) {
			known = append(known, require.Value(
				strconv.ParseFloat(strings.ReplaceAll(found, ",", ""), 64))(t))
		}
		for column, cell := range r {
			if cell == "" || !strings.HasSuffix(column, ", us") && column != "efficiency" {
				continue
			}
			for end := range strings.SplitSeq(cell, "-") {
				x, _, err := span(end)
				require.That(t, err == nil, "%s: %s is no number", file, cell)
				require.Check(t, slices.Contains(known, x) || slices.Contains(known, x/1e3),
					"%s, %s: %s is not in %s", r["model"], column, end, file)
			}
		}
		for column, peers := range map[string][]string{"of eager": {"eager, us"},
			"of graph or compile": {"graph, us", "compile, us"}, "DDP by ours": {"DDP, us"}} {
			r.checkShare(t, column, peers, known)
		}
	}
}

// checkShare compares a share with the times of its row.
func (r row) checkShare(t *testing.T, column string, peers []string, known []float64) {
	t.Helper()
	fastest, slowest := math.Inf(1), math.Inf(1)
	for _, peer := range peers {
		if least, most, err := span(r[peer]); err == nil && least < fastest {
			fastest, slowest = least, most
		}
	}
	require.That(t, (r[column] == "") == math.IsInf(fastest, 1),
		"%s: %s is %q beside %g us", r["model"], column, r[column], fastest)
	if r[column] == "" {
		return
	}
	least, most, err := span(r["Euryale, us"])
	require.NoError(t, err)
	shares := []float64{least / fastest, most / fastest, least / slowest, most / slowest}
	if column == "DDP by ours" {
		shares = []float64{fastest / most, slowest / least}
	}
	for end := range strings.SplitSeq(r[column], "-") {
		share, _, err := span(end)
		require.NoError(t, err)
		rounds := func(x float64) bool { return math.Abs(x-share) < 0.0051 }
		require.Check(t, slices.ContainsFunc(shares, rounds) || slices.ContainsFunc(known, rounds),
			"%s on %s%s: %s is %s, and follows from no figure", r["model"], r["machine"], r["GPUs"],
			column, end)
	}
	if from, to, err := span(r[column]); err != nil || from < slices.Min(shares)-0.06 ||
		to > slices.Max(shares)+0.06 {
		t.Errorf("%s: %s is %s, of %v: %v", r["model"], column, r[column], shares, err)
	}
}

// over returns the least and the greatest number that rows have in a column, as README writes them.
func over(t *testing.T, all []row, column string, counts func(row) bool) (least, most string) {
	t.Helper()
	found := map[float64]string{}
	for _, r := range all {
		if r[column] == "" || !counts(r) {
			continue
		}
		for end := range strings.SplitSeq(r[column], "-") {
			found[require.Value(strconv.ParseFloat(end, 64))(t)] = end
		}
	}
	require.That(t, len(found) > 0, "no row counts for %s", column)
	order := slices.Sorted(maps.Keys(found))
	return found[order[0]], found[order[len(order)-1]]
}

// README has the ranges of the rows in docs/benchmarks.md: whoever adds a row, or changes one,
// changes the sentence.
func TestReadmesRangesAreOfTheRows(t *testing.T) {
	one, several := training(t)
	readme := strings.Join(strings.Fields(string(
		require.Value(os.ReadFile(filepath.Join(root, "README.md")))(t))), " ")
	on := func(machines ...string) func(row) bool {
		return func(r row) bool { return slices.Contains(machines, r["machine"]) }
	}
	gpt2 := func(r row) bool { return r["model"] == pictured }
	says := func(sentence string, values ...any) {
		t.Helper()
		require.Check(t, strings.Contains(readme, fmt.Sprintf(sentence, values...)),
			"README does not say: "+sentence, values...)
	}
	hostLeast, hostMost := over(t, one, "of eager", on("2 cores"))
	says("%s to %s of eager PyTorch's time on two cores", hostLeast, hostMost)
	compiledLeast, compiledMost := over(t, one, "of graph or compile", on("2 cores"))
	says("%s to %s of torch.compile's there", compiledLeast, compiledMost)
	eagerLeast, eagerMost := over(t, one, "of eager", on("H100", "H200"))
	says("on one GPU %s to %s of eager PyTorch's", eagerLeast, eagerMost)
	bestLeast, bestMost := over(t, one, "of graph or compile", on("H100", "H200"))
	says("%s to %s of the faster of CUDA graphs and torch.compile", bestLeast, bestMost)
	least, most := over(t, several, "efficiency", gpt2)
	says("efficiency of %s to %s on two or four GPUs", least, most)
	ddpLeast, ddpMost := over(t, several, "DDP by ours", gpt2)
	says("eager DDP takes %s to %s times as long for GPT-2", ddpLeast, ddpMost)
	otherLeast, otherMost := over(t, several, "efficiency", func(r row) bool { return !gpt2(r) })
	says("other models %s to %s", otherLeast, otherMost)
}
