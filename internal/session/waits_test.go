package session

import (
	"strings"
	"testing"
	"time"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/backend/host"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/observe"
	"github.com/euryale-ml/euryale/rendezvous"
)

func TestLongWaitIsSaidOnceWithItsCallAndItsEnd(t *testing.T) {
	var out strings.Builder
	worlds := require.Value(rendezvous.Local(1, time.Minute))(t)
	comm, err := Connect(t.Context(), worlds[0], []backend.Backend{host.Backend{}}, nil, -1)
	require.NoError(t, err)
	defer comm.Close()
	say := sayLongWait(&out, &rendezvous.World{Rank: 3, Timeout: time.Minute}, comm.Recorder())
	x := backend.Of([]float32{1, 2, 3})
	require.NoError(t, backend.Run(comm, backend.Collective{Kind: backend.AllReduce}, x, x))
	say("ranks 0, 2", 20003*time.Millisecond)
	say("rank 0", 20*time.Second)
	got := out.String()
	for _, want := range []string{
		"euryale: rank 3 has waited 20s in allreduce(sum) of 3 f32 (call ", " on local-",
		" for ranks 0, 2 to start it; EURYALE_TIMEOUT=60s ends the wait\n",
	} {
		require.Check(t, strings.Contains(got, want), "no %q in %q", want, got)
	}
	require.Check(t, strings.Count(got, "\n") == 1, "%q", got)
}

func TestWaitForAGroupWithoutCallsIsSaid(t *testing.T) {
	var out strings.Builder
	sayLongWait(&out, &rendezvous.World{Rank: 1, Timeout: 90 * time.Second}, observe.New(1, 1))(
		"rank 0", 30*time.Second)
	if want := "euryale: rank 1 has waited 30s in a collective for rank 0 to start it; " +
		"EURYALE_TIMEOUT=90s ends the wait\n"; out.String() != want {
		t.Errorf("%q, want %q", out.String(), want)
	}
}
