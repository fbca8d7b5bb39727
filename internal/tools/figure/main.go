// Command figure draws the pictures of docs. In the directory of the module:
//
//	go run ./internal/tools/figure [-o docs]
//
// allreduce.svg has the time of an all-reduce against its size, from the JSON lines in
// bench/results: in the upper panel ranks are processes on a host, in the lower one they have a GPU
// each. training.svg has how fast GPUs train, from the rows of docs/benchmarks.md. packages.md has
// the packages of the module and what they import, from the sources.
package main

import (
	"bufio"
	"cmp"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"

	"gonum.org/v1/plot/plotter"

	"github.com/euryale-ml/euryale/internal/bench"
	"github.com/euryale-ml/euryale/internal/bench/chart"
)

// panel is one half of the figure.
type panel struct {
	title  string
	ranks  int
	series []series
}

// series is one line of a panel.
type series struct {
	label, file string
}

var panels = []panel{
	{"4 processes, 16-core Xeon", 4, []series{
		{"Gloo (PyTorch 2.11)", "2026-11-21-xeon16-allreduce-gloo.jsonl"},
		{"Open MPI 4.1.6", "2026-11-21-xeon16-allreduce-openmpi.jsonl"},
		{"Euryale", "2026-11-21-xeon16-allreduce-host.jsonl"},
		{"Euryale, Alloc", "2026-11-21-xeon16-allreduce-host-alloc.jsonl"},
	}},
	{"2 NVIDIA H200, NVLink", 2, []series{
		{"NCCL 2.28.3", "2026-11-21-h200x2-allreduce-nccl.jsonl"},
		{"PyTorch symmetric memory", "2026-11-21-h200x2-allreduce-symmetric.jsonl"},
		{"Euryale", "2026-11-21-h200x2-allreduce-lowlatency.jsonl"},
	}},
}

func main() {
	output := flag.String("o", "docs", "the directory of the pictures")
	flag.Parse()
	if err := run(*output, "."); err != nil {
		fmt.Fprintln(os.Stderr, "figure:", err)
		os.Exit(1)
	}
}

// run writes the pictures of the module at root into a directory.
func run(output, root string) error {
	return errors.Join(
		drawTimes(filepath.Join(output, "allreduce.svg"), filepath.Join(root, "bench", "results")),
		drawTraining(filepath.Join(output, "training.svg"), root),
		drawPackages(filepath.Join(output, "packages.md"), root),
	)
}

func drawTimes(output, results string) error {
	var charts []chart.Chart
	for _, p := range panels {
		c := chart.Chart{Title: "All-reduce of f32, " + p.title, X: "bytes", Y: "time of a call",
			XText: chart.Bytes, YText: chart.Micros}
		for _, s := range p.series {
			points, err := read(filepath.Join(results, s.file[:len("2026-11")], s.file), p.ranks)
			if err != nil {
				return err
			}
			c.Curves = append(c.Curves, chart.Curve{Name: s.label, Points: points})
		}
		charts = append(charts, c)
	}
	return chart.Save(output, charts...)
}

// read returns bytes and microseconds of a file's lines, by size. Of several lines of one size,
// such as one for each algorithm, the fastest counts.
func read(name string, ranks int) (plotter.XYs, error) {
	file, err := os.Open(name)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	fastest := map[int]float64{}
	lines := bufio.NewScanner(file)
	for number := 1; lines.Scan(); number++ {
		text := lines.Bytes()
		if len(text) == 0 || text[0] == '#' {
			continue
		}
		var r bench.Result
		if err := json.Unmarshal(text, &r); err != nil {
			return nil, fmt.Errorf("%s:%d: %w", name, number, err)
		}
		micros := r.StreamMicros
		if micros == 0 {
			micros = r.P50Micros
		}
		if r.Wrong != 0 || micros <= 0 {
			return nil, fmt.Errorf("%s:%d: %d wrong elements, %v us: not a measurement", name,
				number, r.Wrong, micros)
		}
		if before, ok := fastest[r.Bytes]; r.Ranks == ranks && (!ok || micros < before) {
			fastest[r.Bytes] = micros
		}
	}
	var points plotter.XYs
	for bytes, micros := range fastest {
		points = append(points, plotter.XY{X: float64(bytes), Y: micros})
	}
	if len(points) == 0 {
		return nil, fmt.Errorf("%s has no lines of %d ranks", name, ranks)
	}
	slices.SortFunc(points, func(a, b plotter.XY) int { return cmp.Compare(a.X, b.X) })
	return points, lines.Err()
}
