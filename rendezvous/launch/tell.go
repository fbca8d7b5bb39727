package launch

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/euryale-ml/euryale/rendezvous"
)

// tell lets the ranks that wait for others to join know that a rank has ended,
// until ctx is over. The first that ends is why they wait in vain.
func (w *watch) tell(ctx context.Context, e, first ending) {
	r := w.ranks[e.rank]
	cause := errors.New(r.cmd.ProcessState.String())
	if e.rank != first.rank {
		how := fmt.Errorf("its process ended with %v before all ranks had joined", w.ranks[first.rank].cmd.ProcessState)
		cause = &rendezvous.Failure{Rank: first.rank, Cause: how}
	}
	env, err := rendezvous.ReadEnv(func(name string) string {
		for _, entry := range slices.Backward(r.cmd.Env) {
			if value, ok := strings.CutPrefix(entry, name+"="); ok {
				return value
			}
		}
		return ""
	})
	if err == nil { // otherwise no rank can join
		rendezvous.Ended(ctx, env, r.number, cause) // in vain if all have joined
	}
}
