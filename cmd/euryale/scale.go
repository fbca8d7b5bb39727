package main

import (
	"fmt"
	"strings"
	"time"

	"gonum.org/v1/plot/plotter"

	"github.com/euryale-ml/euryale/internal/bench/chart"
	"github.com/euryale-ml/euryale/internal/hierarchy"
	"github.com/euryale-ml/euryale/internal/scale"
)

// The jobs of --scale.
const (
	fewestScaled = 8
	mostScaled   = 4096
)

// scale predicts the times of calls in jobs of 8 to 4,096 ranks by a plan's links, on machines with
// as many devices as its own, and draws them if a plot is asked for; and starts and recoveries.
func (e *explainCmd) scale(plan hierarchy.Plan, q question) (string, error) {
	D := plan.Layout.Devices()
	if D == 0 {
		return "",
			usageError{fmt.Errorf("--scale takes machines with the same number of devices, not %v",
				plan.Layout)}
	}
	var b strings.Builder
	fmt.Fprintf(&b, "  predicted for machines of %d, by these links and without the time of "+
		"arithmetic:\n", D)
	fmt.Fprintf(&b, "  %6s  %8s  %12s  %12s  %6s  runs\n", "ranks", "machines", "flat",
		"hierarchical", "slices")
	flat, layered := chart.Curve{Name: "flat"}, chart.Curve{Name: "hierarchical"}
	for W := fewestScaled; W <= mostScaled; W *= 2 {
		if W%D != 0 {
			continue
		}
		job := plan
		job.Layout = hierarchy.Grid(W/D, D)
		c := job.Choose(q.what, q.dtype, q.nbytes/q.dtype.Size())
		flat.Points = append(flat.Points, plotter.XY{X: float64(W), Y: micros(c.Flat)})
		took, runs := "-", "flat"
		if c.Slices > 0 {
			took = fmt.Sprintf("%.1f us", micros(c.Layered))
			layered.Points = append(layered.Points, plotter.XY{X: float64(W), Y: micros(c.Layered)})
		}
		if c.Hierarchical {
			runs = "hierarchical"
		}
		fmt.Fprintf(&b, "  %6d  %8d  %12s  %12s  %6d  %s\n", W, W/D,
			fmt.Sprintf("%.1f us", micros(c.Flat)), took, c.Slices, runs)
	}
	b.WriteString(starts(D, plan.Options.Links.Between))
	if len(layered.Points) == 0 {
		return "",
			usageError{fmt.Errorf("--scale: nothing is hierarchical on machines of %d devices "+
				"from %d to %d ranks: %s",
				D, fewestScaled, mostScaled, plan.Choose(q.what, q.dtype, q.nbytes/q.dtype.Size()).
					Reason)}
	}
	if e.Plot == "" {
		return b.String(), nil
	}
	err := chart.Save(e.Plot, chart.Chart{
		Title: fmt.Sprintf("%v of %v of %v, machines of %d (predicted)", q.what, e.Size,
			q.dtype, D),
		X: "ranks", Y: "time of a call", YText: chart.Micros, Curves: []chart.Curve{flat,
			layered},
	})
	return b.String(), err
}

// starts predicts the starts and recoveries of jobs of 8 to 4,096 ranks without GPUs, on machines
// of D ranks with this link between them.
func starts(D int, between hierarchy.Link) string {
	var b strings.Builder
	b.WriteString("  starts of these, once programs are loaded, and recoveries of elastic jobs " +
		"from the death of a rank, on\n  hosts with a core for each rank: messages of rank 0, or " +
		"of the launcher, and seconds until all train:\n")
	fmt.Fprintf(&b, "  %6s  %8s  %15s  %8s  %7s  %18s  %8s  %7s\n", "ranks", "machines",
		"start: messages", "MB", "seconds", "recovery: messages", "MB", "seconds")
	net := scale.Network{Latency: between.Latency, Bandwidth: between.Bandwidth * float64(D)}
	for W := fewestScaled; W <= mostScaled; W *= 2 {
		if W%D != 0 {
			continue
		}
		start, recovery := scale.Start(W/D, D, net), scale.Recovery(W/D, D, net)
		fmt.Fprintf(&b, "  %6d  %8d  %15d  %8.1f  %7.2f  %18d  %8.1f  %7.2f\n", W, W/D,
			start.Messages, float64(start.Bytes)/1e6, start.Time.Seconds(), recovery.Messages,
			float64(recovery.Bytes)/1e6, recovery.Time.Seconds())
	}
	return b.String()
}

func micros(t time.Duration) float64 { return float64(t.Nanoseconds()) / 1e3 }
