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
		s, err := rendezvous.OpenRegister(t.Context(), r.Addr(), job, process)
		require.NoError(t, err)
		return s
	}
	first, second := open(1), open(70)
	require.NoError(t, first.Set(t.Context(), "key", []byte("value")))
	require.NoError(t, first.Close())
	if process := <-lost; process != 1 {
		t.Errorf("process %d is lost, want 1", process)
	}
	if value, err := second.Get(t.Context(), "key"); err != nil || string(value) != "value" {
		t.Errorf("the register has %q, %v", value, err)
	}
	require.NoError(t, second.Close())
	if process := <-lost; process != 70 {
		t.Errorf("process %d is lost, want 70", process)
	}
	job.Token = "wrong"
	require.Fails(t, "a process without the token has come in",
		require.Err(rendezvous.OpenRegister(t.Context(), r.Addr(), job, 3)))
}
