// Package progress shows how far an epoch of a training is, as a hook of package fit:
//
//	fit.OnStep(progress.Bar())
//
// It is a separate package because the bar adds about 0.5 MB to a program.
package progress

import (
	"fmt"
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
	var bar *progressbar.ProgressBar
	return func(s fit.StepLoss) error {
		if bar == nil || s.InEpoch == 1 {
			bar = progressbar.NewOptions(s.PerEpoch, progressbar.OptionSetWriter(os.Stderr),
				progressbar.OptionSetDescription(fmt.Sprintf("epoch %d", (s.Step-1)/s.PerEpoch+1)),
				progressbar.OptionSetItsString("steps"), progressbar.OptionShowIts(),
				progressbar.OptionClearOnFinish(), progressbar.OptionThrottle(100*time.Millisecond))
		}
		_ = bar.Set(s.InEpoch) // a bar that cannot be drawn ends no training
		return nil
	}
}
