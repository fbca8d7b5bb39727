// Command figure draws the time of an all-reduce against its size, as docs/allreduce.png
// shows it, from the JSON lines in bench/results:
//
//	go run ./bench/figure [-o docs/allreduce.png]
//
// The left panel has ranks as processes on a host, the right panel ranks with a GPU each.
package main

import (
	"bufio"
	"cmp"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strconv"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/font"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/plotutil"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"
	"gonum.org/v1/plot/vg/vgimg"

	"github.com/euryale-ml/euryale/bench"
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
		{"PyTorch symmetric memory, in graphs", "2026-11-21-h200x2-allreduce-symmetric.jsonl"},
		{"Euryale", "2026-11-21-h200x2-allreduce-lowlatency.jsonl"},
	}},
}

// The size of a panel and of its legend, and the resolution of the picture.
const (
	panelWidth   = 12 * vg.Centimeter
	panelHeight  = 10 * vg.Centimeter // with its legend
	legendHeight = 1.8 * vg.Centimeter
	dotsPerInch  = 144
)

func main() {
	output := flag.String("o", filepath.Join("docs", "allreduce.png"), "the picture to write")
	results := flag.String("results", filepath.Join("bench", "results"), "the directory of the JSON lines")
	flag.Parse()
	if err := run(*output, *results); err != nil {
		fmt.Fprintln(os.Stderr, "figure:", err)
		os.Exit(1)
	}
}

func run(output, results string) error {
	canvas := vgimg.PngCanvas{Canvas: vgimg.NewWith(
		vgimg.UseWH(font.Length(len(panels))*panelWidth, panelHeight), vgimg.UseDPI(dotsPerInch))}
	tiles := draw.Tiles{Rows: 1, Cols: len(panels), PadX: 9 * vg.Millimeter, PadTop: 2 * vg.Millimeter, PadBottom: vg.Millimeter,
		PadLeft: vg.Millimeter, PadRight: 8 * vg.Millimeter}
	whole := draw.New(canvas)
	for i, p := range panels {
		drawn, legend, err := p.plot(results)
		if err != nil {
			return fmt.Errorf("%s: %w", p.title, err)
		}
		tile := tiles.At(whole, i, 0)
		drawn.Draw(draw.Crop(tile, 0, 0, legendHeight, 0))
		legend.Draw(draw.Crop(tile, 3*vg.Centimeter, 0, 0, legendHeight-tile.Size().Y))
	}
	file, err := os.Create(output)
	if err != nil {
		return err
	}
	_, err = canvas.WriteTo(file)
	return errors.Join(err, file.Close())
}

// plot returns the panel without its legend, which belongs below it: no line is hidden then.
func (p panel) plot(results string) (*plot.Plot, plot.Legend, error) {
	drawn, legend := plot.New(), plot.NewLegend()
	legend.Top, legend.Left = true, true
	legend.TextStyle.Font.Size = vg.Points(10)
	drawn.Title.Text = "All-reduce of f32, " + p.title
	drawn.X.Label.Text, drawn.Y.Label.Text = "bytes", "time of a call"
	drawn.X.Scale, drawn.Y.Scale = plot.LogScale{}, plot.LogScale{}
	drawn.X.Tick.Marker, drawn.Y.Tick.Marker = plot.TickerFunc(byteTicks), plot.TickerFunc(timeTicks)
	for _, f := range []*font.Font{&drawn.Title.TextStyle.Font, &legend.TextStyle.Font,
		&drawn.X.Label.TextStyle.Font, &drawn.Y.Label.TextStyle.Font, &drawn.X.Tick.Label.Font, &drawn.Y.Tick.Label.Font} {
		f.Variant = "Sans"
	}
	drawn.Add(plotter.NewGrid())
	for i, s := range p.series {
		points, err := read(filepath.Join(results, s.file), p.ranks)
		if err != nil {
			return nil, legend, err
		}
		line, dots, err := plotter.NewLinePoints(points)
		if err != nil {
			return nil, legend, fmt.Errorf("%s: %w", s.file, err)
		}
		line.Color, line.Width = plotutil.Color(i), vg.Points(1.5)
		dots.Color, dots.Shape, dots.Radius = plotutil.Color(i), plotutil.Shape(i), vg.Points(2.5)
		drawn.Add(line, dots)
		legend.Add(s.label, line, dots)
	}
	return drawn, legend, nil
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
			return nil, fmt.Errorf("%s:%d: %d wrong elements, %v us: not a measurement", name, number, r.Wrong, micros)
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

// byteTicks marks every fourth power of two.
func byteTicks(lo, hi float64) (ticks []plot.Tick) {
	units := []string{"", " KiB", " MiB", " GiB"}
	for e := int(math.Ceil(math.Log2(lo))); e <= int(math.Log2(hi)); e++ {
		tick := plot.Tick{Value: math.Exp2(float64(e))}
		if e%4 == 2 && e/10 < len(units) {
			tick.Label = strconv.Itoa(1<<(e%10)) + units[e/10]
		}
		if e%2 == 0 {
			ticks = append(ticks, tick)
		}
	}
	return ticks
}

// timeTicks marks every decade of microseconds.
func timeTicks(lo, hi float64) (ticks []plot.Tick) {
	units := []string{" us", " ms", " s"}
	for e := int(math.Floor(math.Log10(lo))); e <= int(math.Ceil(math.Log10(hi))); e++ {
		label := ""
		if e >= 0 && e/3 < len(units) {
			label = strconv.Itoa(int(math.Pow10(e%3))) + units[e/3]
		}
		for m := 1; m < 10; m++ {
			if v := float64(m) * math.Pow10(e); v >= lo && v <= hi {
				ticks = append(ticks, plot.Tick{Value: v, Label: label})
			}
			label = ""
		}
	}
	return ticks
}
