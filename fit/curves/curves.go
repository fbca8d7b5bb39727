// Package curves draws the losses and metrics of a training, for [fit.Log]:
//
//	fit.Log("run1.svg", curves.SVG)
//
// It is a separate package because drawing adds about 7 MB to a program.
package curves

import (
	"io"
	"maps"
	"slices"

	"gonum.org/v1/plot/plotter"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/fit"
	"github.com/euryale-ml/euryale/internal/bench/chart"
)

// SVG draws a chart of the losses, and one of each other metric, over the epochs.
//
// Errors: those of w.
func SVG(w io.Writer, epochs []fit.Epoch) error {
	if err := backend.Given("curves.SVG", "w", w); err != nil {
		return err
	}
	points := map[string]plotter.XYs{}
	for _, e := range epochs {
		for name, y := range e.Metrics {
			points[name] = append(points[name], plotter.XY{X: float64(e.Epoch), Y: y})
		}
		points[""] = append(points[""], plotter.XY{X: float64(e.Epoch), Y: e.Loss})
	}
	losses := []chart.Curve{{Name: "training", Points: points[""]}}
	if of, ok := points["loss"]; ok {
		losses = append(losses, chart.Curve{Name: "validation", Points: of})
	}
	charts := []chart.Chart{{Title: "loss", X: "epoch", Y: "loss", Curves: losses, Linear: true}}
	for _, name := range slices.Sorted(maps.Keys(points)) {
		if name != "" && name != "loss" {
			charts = append(charts, chart.Chart{Title: name, X: "epoch", Y: name, Linear: true,
				Curves: []chart.Curve{{Name: "validation", Points: points[name]}}})
		}
	}
	return chart.Write(w, "svg", charts...)
}
