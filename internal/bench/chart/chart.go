// Package chart draws curves over logarithmic or linear axes, as SVG or PNG:
//
//	c := chart.Chart{Title: "all-reduce", X: "bytes", Y: "time"}
//	c.XText, c.YText = chart.Bytes, chart.Micros
//	c.Curves = append(c.Curves, chart.Curve{Name: "2 ranks", Points: points})
//	err := chart.Save("allreduce.svg", c)
//
// A picture looks the same on every machine: text is drawn as the outlines of its letters,
// and the legend stands beside the curves.
package chart

import (
	"bytes"
	"fmt"
	"image/color"
	"io"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/image/font/sfnt"
	"golang.org/x/image/math/fixed"
	"gonum.org/v1/plot"
	"gonum.org/v1/plot/font"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/plotutil"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"
)

// Curve is one line of a chart. Some of its points are marked, the last one always.
type Curve struct {
	Name   string
	Points plotter.XYs // above 0, unless the axes are linear
}

// Chart is curves over logarithmic axes, or Linear ones. The legend is beside them.
type Chart struct {
	Title, X, Y  string
	XText, YText func(float64) string // write the labels of an axis; nil writes plain numbers
	Curves       []Curve
	Linear       bool // axes are linear, with plain numbers
}

// The size of a chart, and the part of its width that the legend takes.
const (
	width       = 23 * vg.Centimeter
	height      = 13 * vg.Centimeter
	legendWidth = 7 * vg.Centimeter
)

// Save writes charts, one below the other, to a file whose name ends in .svg or .png.
//
// Errors: another ending; a curve without points, or with one that is not above 0; those
// of writing the file.
func Save(file string, charts ...Chart) (err error) {
	var picture bytes.Buffer
	format := strings.TrimPrefix(strings.ToLower(filepath.Ext(file)), ".")
	if err := Write(&picture, format, charts...); err != nil {
		return fmt.Errorf("chart %s: %w", file, err)
	}
	return os.WriteFile(file, picture.Bytes(), 0o666)
}

// Write is [Save] to a writer, in a format: svg or png.
func Write(w io.Writer, format string, charts ...Chart) error {
	canvas, err := draw.NewFormattedCanvas(width, height*vg.Length(len(charts)), format)
	if err != nil {
		return err
	}
	whole := draw.New(outlined{canvas})
	for i, c := range charts {
		top := whole.Max.Y - height*vg.Length(i)
		if err := c.draw(draw.Canvas{Canvas: whole.Canvas,
			Rectangle: vg.Rectangle{Min: vg.Point{Y: top - height},
				Max: vg.Point{X: width, Y: top}}}); err != nil {
			return err
		}
	}
	_, err = canvas.WriteTo(w)
	return err
}

// draw draws the axes, the curves and the legend.
func (p Chart) draw(c draw.Canvas) error {
	chart, legend := plot.New(), plot.NewLegend()
	chart.Title.Text, chart.X.Label.Text, chart.Y.Label.Text = p.Title, p.X, p.Y
	chart.Title.Padding = vg.Points(8)
	chart.X.Padding, chart.Y.Padding = vg.Points(4), vg.Points(4)
	chart.X.Label.Padding, chart.Y.Label.Padding = vg.Points(6), vg.Points(6)
	legend.Top, legend.Left, legend.Padding, legend.ThumbnailWidth = true, true, vg.Points(4),
		vg.Points(36)
	for _, style := range []*font.Font{
		&chart.Title.TextStyle.Font, &chart.X.Label.TextStyle.Font, &chart.Y.Label.TextStyle.Font,
		&chart.X.Tick.Label.Font, &chart.Y.Tick.Label.Font, &legend.TextStyle.Font,
	} {
		style.Variant = "Sans"
	}
	grid := plotter.NewGrid()
	grid.Horizontal.Color, grid.Vertical.Color = color.Gray{0xdd}, color.Gray{0xdd}
	chart.Add(grid)
	for i, series := range p.Curves {
		line, marks, err := series.plotters(i)
		if err != nil {
			return fmt.Errorf("%s: %w", series.Name, err)
		}
		chart.Add(line, marks)
		legend.Add(series.Name, line, marks)
	}
	if !p.Linear {
		chart.X.Scale, chart.Y.Scale = plot.LogScale{}, plot.LogScale{}
		chart.X.Tick.Marker, chart.Y.Tick.Marker = ticksOf(p.XText), ticksOf(p.YText)
		chart.X.Min, chart.X.Max = widened(chart.X.Min, chart.X.Max)
		chart.Y.Min, chart.Y.Max = widened(chart.Y.Min, chart.Y.Max)
	}
	c.SetColor(color.White)
	c.Fill(c.Rectangle.Path())
	margin := vg.Points(10)
	chart.Draw(draw.Crop(c, margin, -legendWidth-margin, margin, -margin))
	legend.Draw(draw.Crop(c, c.Max.X-legendWidth, -margin, margin, -4*margin))
	return nil
}

// marks is about how many points of a long curve are marked.
const marks = 8

// plotters returns the line of the i-th curve, and its marks: where curves are upon each
// other, dashes and shapes tell them apart.
func (s Curve) plotters(i int) (*plotter.Line, *plotter.Scatter, error) {
	line, err := plotter.NewLine(s.Points)
	if err != nil {
		return nil, nil, err
	}
	line.Color = plotutil.Color(i)
	if i > 0 && i%2 == 0 {
		line.Dashes = plotutil.Dashes(1)
	}
	// Earlier curves are wider, to be seen under later ones.
	line.Width = vg.Points(3 - 0.3*float64(min(i, 5)))
	var marked plotter.XYs
	every := max(1, len(s.Points)/marks)
	for j, point := range s.Points {
		if (len(s.Points)-1-j)%every == 0 { // the last one always
			marked = append(marked, point)
		}
	}
	points, err := plotter.NewScatter(marked)
	if err != nil {
		return nil, nil, err
	}
	points.Color, points.Shape = plotutil.Color(i), plotutil.Shape(i)
	points.Radius = vg.Points(5 - 0.4*float64(min(i, 5)))
	return line, points, nil
}

// ticksOf returns the ticks of an axis with the labels that text writes.
func ticksOf(text func(float64) string) logTicks {
	if text == nil {
		return plain
	}
	return text
}

// logTicks marks 1 to 9 in each decade of an axis, and writes labels where there is room.
type logTicks func(float64) string

// maxLabels is how many there is room for.
const maxLabels = 9

// Ticks implements [plot.Ticker].
func (text logTicks) Ticks(low, high float64) (ticks []plot.Tick) {
	for _, labeled := range []string{"123456789", "125", "1"} {
		ticks = ticks[:0]
		labels := 0
		eachDigit(low, high, func(at float64, digit int) {
			tick := plot.Tick{Value: at}
			if at >= low && at <= high && strings.Contains(labeled, strconv.Itoa(digit)) {
				tick.Label = text(at)
				labels++
			}
			ticks = append(ticks, tick)
		})
		if labels <= maxLabels {
			break
		}
	}
	return slices.DeleteFunc(ticks, func(t plot.Tick) bool {
		return t.Value < low || t.Value > high
	})
}

// eachDigit calls f for 1 to 9 times each power of ten around a range.
func eachDigit(low, high float64, f func(at float64, digit int)) {
	for exponent := math.Floor(math.Log10(low)) - 1; exponent <= math.Ceil(
		math.Log10(high)); exponent++ {
		for digit := 1; digit <= 9; digit++ {
			f(float64(digit)*math.Pow(10, exponent), digit)
		}
	}
}

// widened returns the ends of an axis, which are ticks a little outside, also if there is
// one value.
func widened(low, high float64) (from, to float64) {
	const inside = 1.05 // a curve does not end on the frame
	from, to = math.Inf(-1), math.Inf(1)
	eachDigit(low, high*10, func(at float64, _ int) {
		if at*inside <= low {
			from = max(from, at)
		}
		if at >= high*inside {
			to = min(to, at)
		}
	})
	return from, to
}

// Bytes writes a number of bytes with a unit: "200 kB".
func Bytes(n float64) string {
	for _, unit := range []struct {
		bytes float64
		name  string
	}{{1e9, "GB"}, {1e6, "MB"}, {1e3, "kB"}} {
		if n >= unit.bytes*(1-1e-9) {
			return plain(n/unit.bytes) + " " + unit.name
		}
	}
	return plain(n) + " B"
}

// Micros writes a number of microseconds with a unit: "20 ms".
func Micros(t float64) string {
	switch {
	case t >= 1e6*(1-1e-9):
		return plain(t/1e6) + " s"
	case t >= 1e3*(1-1e-9):
		return plain(t/1e3) + " ms"
	}
	return plain(t) + " us"
}

func plain(x float64) string { return fmt.Sprintf("%.4g", x) }

// outlined draws text as the outlines of its letters, so that a picture looks the same
// where its font is not installed.
type outlined struct{ vg.CanvasWriterTo }

// FillString implements [vg.Canvas].
func (o outlined) FillString(face font.Face, at vg.Point, text string) {
	var buffer sfnt.Buffer
	unit := face.Font.Size / vg.Length(face.Face.UnitsPerEm())
	em := fixed.Int26_6(face.Face.UnitsPerEm()) // coordinates are in units of the font
	var path vg.Path
	for i, letter := range text {
		index, err := face.Face.GlyphIndex(&buffer, letter)
		if err != nil {
			continue // Width, which the layout has asked before, panics
		}
		outline, err := face.Face.LoadGlyph(&buffer, index, em, nil)
		if err != nil {
			continue
		}
		start := vg.Point{X: at.X + face.Width(text[:i]), Y: at.Y}
		addGlyph(&path, outline, start, unit)
	}
	o.Fill(path)
}

// addGlyph adds the outline of a letter.
func addGlyph(path *vg.Path, outline sfnt.Segments, start vg.Point, unit vg.Length) {
	place := func(p fixed.Point26_6) vg.Point {
		return vg.Point{X: start.X + vg.Length(p.X)*unit, Y: start.Y - vg.Length(p.Y)*unit}
	}
	for _, s := range outline {
		switch s.Op {
		case sfnt.SegmentOpMoveTo:
			path.Move(place(s.Args[0]))
		case sfnt.SegmentOpLineTo:
			path.Line(place(s.Args[0]))
		case sfnt.SegmentOpQuadTo:
			path.QuadTo(place(s.Args[0]), place(s.Args[1]))
		case sfnt.SegmentOpCubeTo:
			path.CubeTo(place(s.Args[0]), place(s.Args[1]), place(s.Args[2]))
		}
	}
	path.Close()
}
