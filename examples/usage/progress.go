package usage

import (
	"iter"
	"os"
	"time"

	"github.com/schollz/progressbar/v3"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/rendezvous"
)

// Bytes returns the same tensors, and shows on a terminal how many bytes were taken, and how fast.
func Bytes(text string, all iter.Seq2[string, *tensor.Dense]) iter.Seq2[string, *tensor.Dense] {
	if !rendezvous.Terminal(os.Getenv) {
		return all
	}
	return func(yield func(string, *tensor.Dense) bool) {
		bar := progressbar.NewOptions(-1, progressbar.OptionSetWriter(os.Stderr),
			progressbar.OptionSetDescription(text), progressbar.OptionShowBytes(true),
			progressbar.OptionClearOnFinish(), progressbar.OptionThrottle(100*time.Millisecond))
		_ = bar.RenderBlank() // a bar that cannot be drawn ends no training
		defer func() { _ = bar.Finish() }()
		for name, t := range all {
			if !yield(name, t) {
				return
			}
			_ = bar.Add(int(t.MemSize()))
		}
	}
}
