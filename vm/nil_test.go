package vm_test

import (
	"context"
	"testing"
	"time"

	"github.com/euryale-ml/euryale/autograd"
	"github.com/euryale-ml/euryale/autograd/solver"
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/testing/nilargs"
	"github.com/euryale-ml/euryale/internal/testing/reference"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/vm"
)

// noJob is a Job of which nobody becomes a member.
type noJob struct{ generations }

type generations = autograd.Job

func (noJob) Close(bool) error { return nil }

func (noJob) Release(backend.Communicator) error { return nil }

func TestNilArgumentsAreErrors(t *testing.T) {
	g, w, _ := layer(t, costs["sum"])
	sgd := &solver.SGD{Rate: 0.5}
	with := func(options ...vm.Option) error {
		m, err := vm.New(g, nil, options...)
		if err == nil {
			err = m.Close()
		}
		return err
	}
	m := machine(t, g)
	err := m.Pull(w, nil)
	require.Check(t, err != nil, "Pull of nil is no error")
	nilargs.Check(t, map[string]nilargs.Use{
		"New":       {F: vm.New, Args: []any{g, nil, vm.Eval()}},
		"Summarize": {F: vm.Summarize, Args: []any{g, 1, vm.Eval()}},
		"Keep": {F: func(nodes ...node) error { return with(vm.Keep(nodes...)) },
			Args: []any{w}},
		"Notice": {F: func(say func(string)) error { return with(vm.Notice(say)) },
			Args: []any{func(string) {}}},
		"WithSolver": {F: func(s solver.Solver, learnables ...node) error {
			return with(vm.WithSolver(s, learnables...))
		}, Args: []any{sgd, w}},
		"WithFrozen": {F: func(variables ...node) error {
			return with(vm.WithFrozen(variables...))
		}, Args: []any{w}},
		"WithState": {F: func(variable, next node) error {
			return with(vm.WithState(variable, next))
		}, Args: []any{w, w}},
		"WithDataParallel": {F: func(comm backend.Communicator, options ...autograd.Option) error {
			return with(vm.WithSolver(sgd, w), vm.WithDataParallel(comm, options...))
		}, Args: []any{reference.New("test", 1, time.Minute)[0], autograd.WithSum()}},
		"WithElastic": {F: func(ctx context.Context, job autograd.Job, n int,
			options ...autograd.Option) error {
			return with(vm.WithSolver(sgd, w), vm.WithElastic(ctx, job, n, options...))
		}, Args: []any{t.Context(), noJob{}, 0, autograd.WithSum()}},
	}, map[string]string{
		"New.device":    "nil is the host",
		"WithPrecision": "a number",
		"WithShards":    "a number",
	})
}
