package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"

	"gonum.org/v1/plot/plotter"

	"github.com/euryale-ml/euryale"
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/bench/chart"
	"github.com/euryale-ml/euryale/rendezvous"
)

// moment is the state of a training at the end of an epoch.
type moment struct{ bytes, loss float64 }

// note records the progress of the training, for a picture.
func (t *trainer) note() {
	sent, dense := t.sent()
	if dense == 0 { // nothing is compressed
		sent = t.gradientBytes()
	}
	t.history = append(t.history, moment{float64(sent), t.past.Loss})
}

// way is one way to send gradients.
type way struct {
	compress   string
	noFeedback bool
}

// String returns its name in the legend.
func (w way) String() string {
	switch {
	case w.noFeedback:
		return w.compress + " --no-feedback"
	case w.compress == "none":
		return "not compressed"
	}
	return w.compress
}

// ways are compared in the picture.
var ways = []way{
	{"none", false}, {"f16", false}, {"bf16", false},
	{"topk=0.05", false}, {"topk=0.05", true}, {"topk=0.01", false}, {"threshold=0.02", false},
}

// drawnRanks is how many ranks the trainings of the picture have.
const drawnRanks = 4

// checkPlot returns an error if the picture cannot be drawn, before all the trainings run.
func (cfg config) checkPlot() error {
	switch ext := strings.ToLower(filepath.Ext(cfg.plot)); {
	case ext != ".svg" && ext != ".png":
		return fmt.Errorf("--plot %s: the name must end in .svg or .png", cfg.plot)
	case cfg.compress != "none" || cfg.noFeedback || cfg.partial || cfg.topology != "" ||
		cfg.checkpoint != "":
		return errors.New("--plot trains in every way to compress, on ranks of its own: leave " +
			"out --compress, --no-feedback, --partial, --topology and --checkpoint")
	}
	env, err := rendezvous.ReadEnv(os.Getenv)
	if err == nil && env.Size > 1 {
		err = fmt.Errorf("--plot trains on %d ranks of its own process: start it once, and not "+
			"on %d ranks", drawnRanks, env.Size)
	}
	return err
}

// writable returns an error if a file cannot be written. It does not change the file.
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
	c := chart.Chart{
		Title: fmt.Sprintf("demo: %s, %d ranks, %s", cfg.model, drawnRanks,
			count(cfg.epochs, "epoch")),
		X: "bytes sent by a rank", Y: "training loss", XText: chart.Bytes,
	}
	for i, way := range ways {
		cfg.compress, cfg.noFeedback = way.compress, way.noFeedback
		history, err := historyOf(cfg)
		if err != nil {
			return fmt.Errorf("--compress %s: %w", way.compress, err)
		}
		c.Curves = append(c.Curves, chart.Curve{Name: way.String(), Points: pointsOf(history)})
		last := history[len(history)-1]
		fmt.Printf("%d/%d: %v: loss=%.4f after %s\n", i+1, len(ways), way, last.loss,
			chart.Bytes(last.bytes))
	}
	return chart.Save(cfg.plot, c)
}

// count says how many there are.
func count(n int, what string) string {
	if n == 1 {
		return "1 " + what
	}
	return fmt.Sprintf("%d %ss", n, what)
}

func pointsOf(history []moment) (points plotter.XYs) {
	for _, m := range history {
		points = append(points, plotter.XY{X: m.bytes, Y: m.loss})
	}
	return points
}

// historyOf trains on ranks of this process.
func historyOf(cfg config) (history []moment, err error) {
	ctx := context.Background()
	err = euryale.Run(ctx, drawnRanks, func(comm backend.Communicator, build sync.Locker) error {
		t, err := newTrainer(comm, build, cfg)
		if err != nil {
			return err
		}
		err = t.train(ctx, cfg.epochs)
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
