package main

import (
	"context"
	"fmt"
	"sync"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/plotutil"
	"gonum.org/v1/plot/vg"

	"github.com/euryale-ml/euryale"
	"github.com/euryale-ml/euryale/backend"
)

// moment is where a training was at the end of an epoch.
type moment struct{ bytes, loss float64 }

// note keeps how far the training is, for a picture.
func (t *trainer) note(epochs int, loss float64) error {
	if !t.plots {
		return nil
	}
	mean, err := t.mean(loss)
	if err != nil {
		return err
	}
	sent, dense := t.sent()
	if dense == 0 { // nothing is compressed
		sent = t.gradientBytes() * int64(epochs*t.sampler.Steps())
	}
	t.history = append(t.history, moment{float64(sent), mean})
	return nil
}

// gradientBytes returns what the gradients of a step take on a rank's link.
func (t *trainer) gradientBytes() int64 {
	n := 0
	for _, p := range t.net.params {
		n += p.Shape().TotalSize()
	}
	const size = 4 // of a float32
	return int64(backend.AllReduce.BusFactor(t.comm.Size()) * float64(size*n))
}

// ways are what the picture compares.
var ways = []struct {
	compress   string
	noFeedback bool
}{
	{"none", false}, {"f16", false}, {"bf16", false},
	{"topk=0.05", false}, {"topk=0.05", true}, {"topk=0.01", false}, {"threshold=0.02", false},
}

// drawnRanks is how many ranks the trainings of the picture have.
const drawnRanks = 4

// drawLosses trains in every way, and draws how the loss falls with the bytes that a
// rank has sent.
func drawLosses(cfg config) error {
	p := plot.New()
	p.Title.Text = fmt.Sprintf("digits, %s, %d ranks, %d epochs", cfg.model, drawnRanks, cfg.epochs)
	p.X.Label.Text, p.Y.Label.Text = "bytes sent by a rank", "training loss"
	p.X.Scale, p.Y.Scale = plot.LogScale{}, plot.LogScale{}
	p.X.Tick.Marker, p.Y.Tick.Marker = plot.LogTicks{Prec: -1}, plot.LogTicks{Prec: -1}
	p.Legend.Top = true
	p.Add(plotter.NewGrid())
	for i, way := range ways {
		cfg.compress, cfg.noFeedback = way.compress, way.noFeedback
		history, err := historyOf(cfg)
		if err != nil {
			return fmt.Errorf("--compress %s: %w", way.compress, err)
		}
		line, err := plotter.NewLine(pointsOf(history))
		if err != nil {
			return fmt.Errorf("--compress %s: %w", way.compress, err)
		}
		line.Color, line.Width = plotutil.Color(i), vg.Points(1.5)
		label := way.compress
		if way.noFeedback {
			label += " --no-feedback"
			line.Dashes = plotutil.Dashes(1)
		}
		p.Add(line)
		p.Legend.Add(label, line)
	}
	return p.Save(20*vg.Centimeter, 14*vg.Centimeter, cfg.plot)
}

func pointsOf(history []moment) (points plotter.XYs) {
	for _, m := range history {
		points = append(points, plotter.XY{X: m.bytes, Y: m.loss})
	}
	return points
}

// historyOf trains on ranks of this process.
func historyOf(cfg config) (history []moment, err error) {
	err = euryale.Run(context.Background(), drawnRanks, func(comm backend.Communicator, build sync.Locker) error {
		t, err := newTrainer(comm, build, cfg)
		if err != nil {
			return err
		}
		_, err = t.train(cfg.epochs)
		if comm.Rank() == 0 {
			history = t.history
		}
		if closeErr := t.close(); err == nil {
			err = closeErr
		}
		return err
	})
	return history, err
}
