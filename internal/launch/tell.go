package launch

import (
	"context"
	"errors"
	"fmt"
	"time"

	variables "github.com/euryale-ml/euryale/internal/env"
	"github.com/euryale-ml/euryale/rendezvous"
)

// tell tells the ranks that are still joining, until ctx ends, that a rank has ended. Ranks that
// start to join after rank 0 has ended cannot learn it otherwise, so they are told which rank
// failed first.
func (w *watch) tell(ctx context.Context, e ending, env []string) {
	cause := errors.New(e.how())
	if e.rank == 0 {
		select {
		case <-ctx.Done():
			return
		case <-time.After(sameTime): // that rank's end may be noticed after this one's
		}
		if first := w.soFar(); first != nil && first.Rank != 0 {
			how := fmt.Errorf("its process ended with %s before all ranks had joined",
				ending{Status: first.Status}.how())
			cause = &rendezvous.Failure{Rank: first.Rank, Cause: how}
		}
	}
	job, err := rendezvous.ReadEnv(variables.Lookup(env))
	if err == nil { // otherwise no rank can join
		rendezvous.Ended(ctx, job, e.rank, cause) // no effect if all have joined
	}
}

// soFar is the verdict on the ranks that have ended.
func (w *watch) soFar() *Failed {
	w.mu.Lock()
	defer w.mu.Unlock()
	return verdict(w.supervisor.ends)
}
