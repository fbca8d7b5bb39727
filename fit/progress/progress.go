// Package progress shows how far an epoch of a training is, as a hook of package fit, and what is
// written of a model:
//
//	fit.OnStep(progress.Bar())
//	model.Save(dir, progress.Tensors("writing "+dir, weights))
//
// It is a separate package because the bar adds about 0.5 MB to a program.
package progress

import (
	"fmt"
	"iter"
	"os"
	"time"

	"github.com/schollz/progressbar/v3"

	"github.com/euryale-ml/euryale/fit"
	"github.com/euryale-ml/euryale/rendezvous"
)

// Bar returns a hook that shows a bar on standard error, if that is a terminal or, for rank 0, if
// "euryale run" passes it on to one. Otherwise it does nothing.
func Bar() func(s fit.StepLoss) error {
	if !rendezvous.Terminal(os.Getenv) {
		return func(fit.StepLoss) error { return nil }
	}
	var b *progressbar.ProgressBar
	return func(s fit.StepLoss) error {
		if b == nil || s.InEpoch == 1 {
			b = bar(s.PerEpoch, fmt.Sprintf("epoch %d", (s.Step-1)/s.PerEpoch+1),
				progressbar.OptionSetItsString("steps"), progressbar.OptionShowIts())
		}
		_ = b.Set(s.InEpoch) // a bar that cannot be drawn ends no training
		return nil
	}
}

// Tensors returns the same tensors, and shows beside a text how many bytes were taken of them, and
// how fast, where Bar shows a bar.
func Tensors[T interface{ MemSize() uintptr }](text string, all iter.Seq2[string, T]) iter.Seq2[
	string, T] {
	if !rendezvous.Terminal(os.Getenv) {
		return all
	}
	return func(yield func(string, T) bool) {
		b := bar(-1, text, progressbar.OptionShowBytes(true))
		_ = b.RenderBlank()
		defer func() { _ = b.Finish() }()
		for name, t := range all {
			if !yield(name, t) {
				return
			}
			_ = b.Add(int(t.MemSize()))
		}
	}
}

func bar(most int, text string, more ...progressbar.Option) *progressbar.ProgressBar {
	return progressbar.NewOptions(most, append(more, progressbar.OptionSetWriter(os.Stderr),
		progressbar.OptionSetDescription(text), progressbar.OptionClearOnFinish(),
		progressbar.OptionThrottle(100*time.Millisecond))...)
}
