package rendezvous_test

import (
	"testing"
	"time"

	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/rendezvous"
)

func TestARegisterOutlivesItsProcessesAndNamesTheLost(t *testing.T) {
	lost := make(chan int, 2)
	job := rendezvous.Env{Job: "job", Token: "token", Timeout: time.Minute}
	r, err := rendezvous.ServeRegister(job, false, func(process int) { lost <- process })
	require.NoError(t, err)
	defer r.Close()
	open := func(process int) rendezvous.Store {
		return require.Value(rendezvous.OpenRegister(t.Context(), r.Addr(), job, process))(t)
	}
	first, second := open(1), open(70)
	require.NoError(t, first.Set(t.Context(), "key", []byte("value")))
	require.NoError(t, first.Close())
	process := <-lost
	require.Check(t, process == 1, "process %d is lost, want 1", process)
	value, err := second.Get(t.Context(), "key")
	require.Check(t, err == nil && string(value) == "value", "the register has %q, %v", value, err)
	require.NoError(t, second.Close())
	if process := <-lost; process != 70 {
		t.Errorf("process %d is lost, want 70", process)
	}
	job.Token = "wrong"
	require.Fails(t, "a process without the token has come in",
		require.Err(rendezvous.OpenRegister(t.Context(), r.Addr(), job, 3)))
}
