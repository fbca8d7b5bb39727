package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"

	"github.com/euryale-ml/euryale/autograd"
	"github.com/euryale-ml/euryale/examples/cli"
)

// past is the progress of a training: what it needs to resume beside weights and solver.
type past struct {
	Flags  string    // that must be the same on resuming
	Losses []float64 // of each step
	Evals  []eval
}

// eval is the loss of held-out text after some steps.
type eval struct {
	Step int
	Loss float64
}

// flags returns what the bits of a training depend on. The layout is not among it: another one goes on
// with the same numbers, except for rounding.
func (t *trainer) flags() string {
	text := fmt.Sprintf("text=%s --layers=%d --width=%d --heads=%d --context=%d --batch=%d --steps=%d --lr=%v --warmup=%d --seed=%d --precision=%v --compress=%s --reduction=%s --dropout=%v",
		t.corpus.hash(), t.layers, t.width, t.heads, t.context, t.batch, t.steps, t.lr, t.warmUp, t.seed, t.precision, t.compress, t.reduction, t.dropout)
	if t.positions != learned {
		text += " --positions=" + t.positions
	}
	if t.reduction == tree {
		text += fmt.Sprintf(" --micro-batches=%d", t.microBatches)
	}
	return text
}

// keep saves the training after every --save-every steps, after the last one, and when it was told to
// end, which it then does.
func (t *trainer) keep(ctx context.Context, done int) error {
	if t.checkpoint == "" {
		return nil
	}
	stop, err := autograd.Any(t.comm, ctx.Err() != nil)
	if err != nil {
		return err
	}
	if stop || done%t.saveEvery == 0 || done == t.steps {
		err = t.save()
	}
	if err == nil && stop {
		err = errors.Join(t.print("saved in %s after step %d: start it again to go on", t.checkpoint, done), cli.Stopped(ctx))
	}
	return err
}

// save writes the checkpoint.
func (t *trainer) save() error {
	return t.machine.DataParallel().Save(t.checkpoint, t.solver, t.past)
}

// resume restores the training from its checkpoint, if there is one.
func (t *trainer) resume() error {
	if t.checkpoint == "" {
		return nil
	}
	var kept past
	err := t.machine.DataParallel().Load(t.checkpoint, t.solver, &kept)
	switch {
	case errors.Is(err, fs.ErrNotExist): // training begins
		return nil
	case err != nil:
		return fmt.Errorf("--checkpoint: cannot go on from %s (to begin anew, name another directory): %w",
			t.checkpoint, err)
	}
	if err := cli.SameFlags(t.checkpoint, kept.Flags, t.past.Flags); err != nil {
		return err
	}
	t.past = kept
	return t.print("going on after step %d, from %s", len(kept.Losses), t.checkpoint)
}
