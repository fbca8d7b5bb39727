package euryale

import (
	"context"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/session"
)

// JoinElastic connects this process to an elastic job, which euryale run --elastic starts, in place
// of [Init]. The ranks of the job change: a process that dies is lost, and another one takes its
// place. Pass the result to vm.WithElastic or autograd.NewElastic, which close it.
//
// Errors: a process that no launcher of an elastic job has started; a launcher that does not
// answer.
func JoinElastic(ctx context.Context) (*session.Elastic, error) {
	if err := backend.Given("euryale.JoinElastic", "ctx", ctx); err != nil {
		return nil, err
	}
	return session.JoinElastic(ctx, Backends)
}
