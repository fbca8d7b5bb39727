package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"

	"github.com/euryale-ml/euryale/autograd"
)

// past is the progress of a training: what it needs to resume beside weights, solver and
// residuals.
type past struct {
	Flags  string  // that must be the same on resuming
	Epochs int     // completed
	Loss   float64 // of the last of them, the mean of all ranks
	Step   int     // completed steps of the next epoch
	Sum    float64 // of the losses of these steps that were in a checkpoint, the mean of all ranks
}

// String describes the progress.
func (p past) String() string {
	if p.Step == 0 {
		return fmt.Sprintf("epoch %d", p.Epochs)
	}
	return fmt.Sprintf("epoch %d, step %d", p.Epochs+1, p.Step)
}

// flags returns the part of the command line on which the bits of a training depend. Epochs may
// be added unless the learning rate depends on them. The checkpoint itself checks the ranks.
func (cfg config) flags() string {
	text := fmt.Sprintf("--model=%s --batch=%d --solver=%s --lr=%v --schedule=%s --seed=%d "+
		"--compress=%s --no-feedback=%v --partial=%v --topology=%s",
		cfg.model, cfg.batch, cfg.solver, cfg.lr, cfg.schedule, cfg.seed, cfg.compress,
		cfg.noFeedback, cfg.partial, cfg.topology)
	if cfg.inTree() {
		text += fmt.Sprintf(" --reduction=%s --micro-batches=%d", cfg.reduction, cfg.microBatches)
	}
	if cfg.schedule != "constant" {
		text += fmt.Sprintf(" --epochs=%d --steps=%d", cfg.epochs, cfg.steps)
	}
	return text
}

// keep saves the training after every --save-every steps, and when it was told to end, which it
// then does.
func (t *trainer) keep(ctx context.Context, due bool) error {
	if t.checkpoint == "" {
		return nil
	}
	stop, err := autograd.Stopped(ctx, t.comm)
	if err != nil {
		return err
	}
	if due || stop != nil || t.saveEvery > 0 && t.past.Step%t.saveEvery == 0 {
		err = t.save()
	}
	if err == nil && stop != nil {
		err = errors.Join(t.sayStopped(), stop)
	}
	return err
}

// save writes the checkpoint.
func (t *trainer) save() error {
	kept := t.past
	sum, err := autograd.TreeMean(t.comm, t.sums)
	if err = errors.Join(err, t.pull()); err != nil {
		return err
	}
	kept.Sum += sum
	return t.parallel.Save(t.checkpoint, t.solver, kept)
}

// sayStopped prints where a training was told to end, on this or another rank.
func (t *trainer) sayStopped() (err error) {
	if t.out != nil && t.comm.Rank() == 0 {
		_, err = fmt.Fprintf(t.out, "saved in %s after %v: start it again to go on\n",
			t.checkpoint, t.past)
	}
	return err
}

// resume restores the training from its checkpoint, if there is one.
func (t *trainer) resume(epochs int) error {
	if t.checkpoint == "" {
		return nil
	}
	var kept past
	err := t.parallel.Load(t.checkpoint, t.solver, &kept)
	switch {
	case errors.Is(err, fs.ErrNotExist): // training begins
		return nil
	case err != nil:
		return fmt.Errorf("--checkpoint: cannot go on from %s (to begin anew, name another "+
			"directory): %w",
			t.checkpoint, err)
	}
	if err := sameFlags(t.checkpoint, kept.Flags, t.past.Flags); err != nil {
		return err
	}
	if kept.Epochs > epochs || kept.Epochs == epochs && kept.Step > 0 {
		return usage("--checkpoint %s: it is after %v, and --epochs is %d: ask for as many or more",
			t.checkpoint, kept, epochs)
	}
	t.past, t.resumed = kept, kept
	return nil
}

// origin prints from where it goes on.
func (t *trainer) origin() (err error) {
	if t.out != nil && t.comm.Rank() == 0 && t.resumed != (past{}) {
		_, err = fmt.Fprintf(t.out, "going on after %v, from %s\n", t.resumed, t.checkpoint)
	}
	return err
}
