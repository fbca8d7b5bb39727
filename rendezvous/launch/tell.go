package launch

import (
	"context"
	"errors"
	"slices"
	"strings"

	"github.com/euryale-ml/euryale/rendezvous"
)

// tell lets the ranks that wait for others to join know that this one has ended,
// until ctx is over.
func (r *rank) tell(ctx context.Context) {
	env, err := rendezvous.ReadEnv(func(name string) string {
		for _, entry := range slices.Backward(r.cmd.Env) {
			if value, ok := strings.CutPrefix(entry, name+"="); ok {
				return value
			}
		}
		return ""
	})
	if err == nil { // otherwise no rank can join
		rendezvous.Ended(ctx, env, r.number, errors.New(r.cmd.ProcessState.String())) // in vain if all have joined
	}
}
