package euryale_test

import (
	"context"
	"errors"
	"sync"
	"testing"

	"github.com/euryale-ml/euryale"
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/backend/host"
	"github.com/euryale-ml/euryale/internal/testing/nilargs"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/rendezvous"
)

func TestNilArgumentsAreErrors(t *testing.T) {
	none := func(backend.Communicator, sync.Locker) error { return nil }
	ctx := t.Context()
	nilargs.Check(t, map[string]nilargs.Use{
		"Connect":     {F: euryale.Connect, Args: []any{ctx, &rendezvous.World{}, host.Backend{}}},
		"Init":        {F: euryale.Init, Args: []any{ctx, host.Backend{}}},
		"JoinElastic": {F: euryale.JoinElastic, Args: []any{ctx}},
		"Run":         {F: euryale.Run, Args: []any{ctx, 1, none, host.Backend{}}},
	}, map[string]string{"ExitStatus": "nil is the error of a program that has finished"})
	err := euryale.Run(context.Background(), 1, nil)
	require.Check(t, errors.Is(err, backend.ErrArgument), "Run of nil: %v", err)
}
