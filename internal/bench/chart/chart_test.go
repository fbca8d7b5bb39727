package chart

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"gonum.org/v1/plot/font"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/vg/draw"
	"gonum.org/v1/plot/vg/recorder"

	"github.com/euryale-ml/euryale/internal/testing/require"
)

// drawn returns what a picture writes, and how many marks it has.
func drawn(t *testing.T, p Chart) (written []*recorder.FillString, marks int) {
	t.Helper()
	var canvas recorder.Canvas
	require.NoError(t, p.draw(draw.NewCanvas(&canvas, width, height)))
	for _, action := range canvas.Actions {
		switch a := action.(type) {
		case *recorder.FillString:
			written = append(written, a)
		case *recorder.Fill, *recorder.Stroke:
			marks++
		}
	}
	return written, marks
}

// A legend that is cut, axes without labels and a curve of one point that is not there are
// what the first pictures had.
func TestFoundPicturesAreCutOrEmpty(t *testing.T) {
	const curves = 7
	for name, points := range map[string]plotter.XYs{
		"one point":     {{X: 3.1e5, Y: 1.6}},
		"a narrow one":  {{X: 3.1e5, Y: 1.6}, {X: 3.2e5, Y: 1.5}},
		"three decades": {{X: 3.1e5, Y: 1.6}, {X: 3e6, Y: 0.3}, {X: 1.1e8, Y: 0.002}},
		"many decades":  {{X: 1, Y: 1e-9}, {X: 1e12, Y: 10}},
	} {
		p := Chart{Title: "a title", X: "bytes", Y: "loss", XText: Bytes}
		_, before := drawn(t, Chart{XText: Bytes, Curves: []Curve{{"", points}}})
		for i := range curves {
			p.Curves = append(p.Curves, Curve{fmt.Sprint("a name of some length ", i), points})
		}
		written, after := drawn(t, p)
		least := curves * len(points)
		require.Check(t, after-before >= least, "%s: %d curves add %d marks, want %d or more", name,
			curves, after-before, least)
		var bytes, losses int
		for _, w := range written {
			face := font.DefaultCache.Lookup(w.Font, w.Font.Size)
			switch end := w.Point.X + face.Width(w.String); {
			case end > width || w.Point.X < 0 && w.String != p.Y:
				t.Errorf("%s: %q is from %v to %v in a picture of %v", name, w.String, w.Point.X,
					end, width)
			case strings.HasSuffix(w.String, "B"):
				bytes++
			case strings.Trim(w.String, "0123456789.e-") == "":
				losses++
			}
		}
		require.Check(t, bytes >= 2 && losses >= 2,
			"%s: %d and %d labels on the axes, want two or more on each", name, bytes, losses)
	}
}

func TestAxesHaveLabelsThatReadWell(t *testing.T) {
	for _, c := range []struct {
		low, high float64
		want      string
	}{
		{1e5, 2e6, "100 kB 200 kB 500 kB 1 MB 2 MB"},
		{3e5, 4e5, "300 kB 400 kB"},
		{1, 1e9, "1 B 10 B 100 B 1 kB 10 kB 100 kB 1 MB 10 MB 100 MB 1 GB"},
	} {
		var labels []string
		for _, tick := range logTicks(Bytes).Ticks(c.low, c.high) {
			if tick.Label != "" {
				labels = append(labels, tick.Label)
			}
		}
		require.Equal(t, fmt.Sprintf("%v to %v", c.low, c.high), strings.Join(labels, " "), c.want)
	}
}

func TestChartsStandBelowEachOther(t *testing.T) {
	c := Chart{Title: "one", X: "bytes", Y: "time", XText: Bytes, YText: Micros,
		Curves: []Curve{{"a", plotter.XYs{{X: 1, Y: 1}, {X: 1e6, Y: 2e6}}}}}
	for _, name := range []string{"charts.svg", "charts.png"} {
		file := filepath.Join(t.TempDir(), name)
		require.NoError(t, Save(file, c, c))
		info, err := os.Stat(file)
		require.Check(t, err == nil && info.Size() != 0, "%s: %v", name, err)
	}
	require.Fails(t, "a name that says no format was taken",
		Save(filepath.Join(t.TempDir(), "charts.gif"), c))
}

func TestTimesHaveUnits(t *testing.T) {
	for micros, want := range map[float64]string{0.5: "0.5 us", 20: "20 us", 1e3: "1 ms",
		2e6: "2 s"} {
		require.Equal(t, fmt.Sprintf("%v us", micros), Micros(micros), want)
	}
}
