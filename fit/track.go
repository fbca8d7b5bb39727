package fit

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/euryale-ml/euryale/autograd"
)

// tracker shows a training to people while it runs. Rank 0 alone has one that is open: after the
// loss of rank 0 the next one opens its own.
type tracker interface {
	// open begins with a step, or goes on there: what an earlier try has told of it and of later
	// steps counts no more.
	open(t *trainer, step int) error
	tell(p point) error
	// close ends it, with a status in MLflow's words, or "" if other ranks may go on.
	close(status string)
}

// point is what a training knows after a step.
type point struct {
	step    int
	at      time.Time
	of      string // step or epoch
	numbers map[string]float64

	histograms []histogram // on rank 0, as it is then
}

// all yields the finite numbers of a point, named step/loss or epoch/loss, in their order.
func (p point) all(yield func(name string, x float64) bool) {
	for _, name := range slices.Sorted(maps.Keys(p.numbers)) {
		if x := p.numbers[name]; finite(x) && !yield(p.of+"/"+name, x) {
			return
		}
	}
}

// openTrackers makes trackers expect a step, on rank 0.
func (t *trainer) openTrackers(step int) (err error) {
	if t.opened || t.comm.Rank() > 0 {
		return nil
	}
	t.opened = true
	for _, to := range t.trackers {
		err = errors.Join(err, to.open(t, step))
	}
	return err
}

// remembered is how many points the other ranks keep, some 0.5 MB: MLflow gets the steps of a
// second together.
const remembered = 1 << 12

// track tells trackers of a point, on rank 0. The others keep the last ones: who takes the place of
// rank 0 does not know of which this one has told.
func (t *trainer) track(p point) error {
	if len(t.trackers) == 0 {
		return nil
	}
	t.untold = append(t.untold, p)
	if t.comm.Rank() > 0 {
		first := max(0, len(t.untold)-remembered)
		for first < len(t.untold) && t.untold[first].of == "epoch" { // whose step is not there
			first++
		}
		t.untold = t.untold[first:]
	}
	return t.trackUntold()
}

// trackUntold tells trackers of what was kept, on rank 0.
func (t *trainer) trackUntold() (err error) {
	if t.comm.Rank() > 0 || len(t.untold) == 0 {
		return nil
	}
	err = t.openTrackers(t.untold[0].step)
	for _, p := range t.untold {
		for i := 0; i < len(t.trackers) && err == nil; i++ {
			err = t.trackers[i].tell(p)
		}
	}
	t.untold = nil
	return err
}

// trackStep tells of a step that had a loss.
func (t *trainer) trackStep(loss float64) error {
	if len(t.trackers) == 0 {
		return nil
	}
	numbers := map[string]float64{"loss": loss,
		"samples_per_second": float64(t.samples(t.past.Step-1)) / time.Since(t.stepped).Seconds()}
	if t.rate != nil {
		numbers["rate"] = t.rateOf(t.past.Steps - 1)
	}
	if norm := t.machine.Norm(); norm > 0 {
		numbers["gradient_norm"] = norm
	}
	return t.track(point{t.past.Steps, time.Now(), "step", numbers, nil})
}

// point is what the training knows after an epoch.
func (e Epoch) point() point {
	numbers := map[string]float64{"loss": e.Loss, "seconds": e.Seconds}
	for name, x := range e.Metrics {
		numbers[column(name)] = x
	}
	return point{e.Steps, time.Now(), "epoch", numbers, nil}
}

// closeTrackers ends what trackers show, with the error of the training.
func (t *trainer) closeTrackers(why error) {
	status := "FINISHED"
	switch {
	case why != nil && t.alone(why):
		status = ""
	case errors.Is(why, ErrStopped):
		status = "KILLED"
	case why != nil:
		status = "FAILED"
		if t.elastic != nil && t.past.Name != "" { // the one that had them open may be lost
			_ = t.openTrackers(t.past.Steps + 1) // the training has failed already
		}
	}
	for i := 0; i < len(t.trackers) && t.opened; i++ {
		t.trackers[i].close(status)
	}
}

// name gives the training a name, which its checkpoints keep and ranks agree on, so that a server
// knows it again.
func (t *trainer) name() error {
	if t.past.Name != "" || t.shown == 0 {
		return nil
	}
	all, err := autograd.Gather(t.comm, t.number)
	if err == nil {
		t.past.Name = fmt.Sprintf("%014x", uint64(all[0][0]))
	}
	return err
}
