package main

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
)

// past is how far a training is: what it needs to go on beside weights, solver and
// residuals.
type past struct {
	Flags  string // that it must go on with
	Epochs int
	Loss   float64 // of the last one, the mean of all ranks
}

// flags returns the part of the command line that gives a training its bits. Epochs may be
// added, and ranks are looked after by the checkpoint.
func (cfg config) flags() string {
	return fmt.Sprintf("--model=%s --batch=%d --solver=%s --lr=%v --seed=%d --compress=%s --no-feedback=%v --partial=%v --topology=%s",
		cfg.model, cfg.batch, cfg.solver, cfg.lr, cfg.seed, cfg.compress, cfg.noFeedback, cfg.partial, cfg.topology)
}

// save keeps the training, if that was asked for.
func (t *trainer) save() error {
	if t.checkpoint == "" {
		return nil
	}
	return t.parallel.Save(t.checkpoint, t.solver, t.past)
}

// resume makes the training what it was when it was kept, if it was.
func (t *trainer) resume(epochs int) error {
	if t.checkpoint == "" || !occupied(t.checkpoint) {
		return nil
	}
	var kept past
	if err := t.parallel.Load(t.checkpoint, t.solver, &kept); err != nil {
		return fmt.Errorf("--checkpoint %s: cannot go on with what is there; name another directory to begin anew: %w", t.checkpoint, err)
	}
	switch {
	case kept.Flags != t.past.Flags:
		return fmt.Errorf("--checkpoint %s: it is of a training with %s, and this one is with %s: start it as that was, or name another directory", t.checkpoint, kept.Flags, t.past.Flags)
	case kept.Epochs > epochs:
		return fmt.Errorf("--checkpoint %s: it is after %d epochs, and --epochs is %d: ask for as many or more", t.checkpoint, kept.Epochs, epochs)
	}
	t.past, t.resumed = kept, kept.Epochs
	return nil
}

// occupied reports whether there is something in a directory, or in the one beside it where
// Save leaves the last checkpoint if it is stopped. Whatever it is, Load must accept it:
// Save replaces the directory.
func occupied(dir string) bool {
	for _, d := range []string{dir, filepath.Clean(dir) + ".old"} {
		entries, err := os.ReadDir(d)
		if len(entries) > 0 || err != nil && !errors.Is(err, fs.ErrNotExist) {
			return true
		}
	}
	return false
}

// origin prints what was not trained now.
func (t *trainer) origin(out io.Writer) (err error) {
	if t.resumed > 0 {
		_, err = fmt.Fprintf(out, "went on after epoch %d, from %s\n", t.resumed, t.checkpoint)
	}
	return err
}
