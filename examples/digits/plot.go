package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/plotutil"
	"gonum.org/v1/plot/vg"

	"github.com/euryale-ml/euryale"
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/rendezvous"
)

// moment is where a training was at the end of an epoch.
type moment struct{ bytes, loss float64 }

// note keeps how far the training is, for a picture.
func (t *trainer) note() {
	sent, dense := t.sent()
	if dense == 0 { // nothing is compressed
		sent = t.gradientBytes()
	}
	t.history = append(t.history, moment{float64(sent), t.past.Loss})
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

// checkPlot returns why there would be no picture, or not the one that was asked for: to
// find out after all the trainings is late.
func (cfg config) checkPlot() error {
	switch ext := strings.ToLower(filepath.Ext(cfg.plot)); {
	case ext != ".svg" && ext != ".png":
		return fmt.Errorf("--plot %s: the name must end in .svg or .png", cfg.plot)
	case cfg.compress != "none" || cfg.noFeedback || cfg.partial || cfg.topology != "" || cfg.checkpoint != "":
		return errors.New("--plot trains in every way to compress, on ranks of its own: leave out --compress, --no-feedback, --partial, --topology and --checkpoint")
	}
	env, err := rendezvous.ReadEnv(os.Getenv)
	if err == nil && env.Size > 1 {
		err = fmt.Errorf("--plot trains on %d ranks of its own process: start it once, and not on %d ranks", drawnRanks, env.Size)
	}
	return err
}

// writable finds out whether a file can be written, and leaves what is in it.
func writable(name string) error {
	f, err := os.OpenFile(name, os.O_WRONLY|os.O_CREATE, 0o666)
	if err != nil {
		return err
	}
	return f.Close()
}

// drawLosses trains in every way, and draws how the loss falls with the bytes that a
// rank has sent.
func drawLosses(cfg config) error {
	if err := writable(cfg.plot); err != nil {
		return fmt.Errorf("--plot: %w", err)
	}
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
		err = t.train(cfg.epochs)
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
