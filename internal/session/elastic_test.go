package session_test

import (
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/euryale-ml/euryale"
	"github.com/euryale-ml/euryale/internal/elastic"
	"github.com/euryale-ml/euryale/internal/session"
	"github.com/euryale-ml/euryale/rendezvous"
)

// TestGenerationsOnMachinesMeetWhereRank0Says: the register has the address. It has TLS where the
// ranks have it.
func TestGenerationsOnMachinesMeetWhereRank0Says(t *testing.T) {
	job := rendezvous.Env{Job: "meets", Size: 1, LocalSize: 1, TLS: true,
		Token: strings.Repeat("secret", 5), Timeout: time.Minute}
	register, err := rendezvous.ServeRegister(job, true, func(int) {})
	if err != nil {
		t.Fatal(err)
	}
	defer register.Close()
	first := elastic.First(1, 2)
	take := func(rank int) error {
		id := elastic.ID(rank + 1)
		store, err := rendezvous.OpenRegister(t.Context(), register.Addr(), job, int(id))
		if err != nil {
			return err
		}
		e, err := session.NewElastic(t.Context(), session.ElasticConfig{ID: id, First: first,
			Limits: elastic.Limits{Least: 2, Most: 2}, Register: store, Env: job,
			Host: "127.0.0.1", Backends: euryale.Backends})
		if err != nil {
			return err
		}
		comm, _, err := e.Next(t.Context(), func(elastic.View) error { return nil })
		if err != nil {
			return err
		}
		defer e.Release(comm)
		if comm.Rank() != rank || comm.Size() != 2 {
			t.Errorf("rank %d is %d of %d", rank, comm.Rank(), comm.Size())
		}
		return e.Close(true)
	}
	var running sync.WaitGroup
	for rank := range 2 {
		running.Go(func() {
			if err := take(rank); err != nil {
				t.Errorf("rank %d: %v", rank, err)
			}
		})
	}
	running.Wait()
	at, err := register.Store().Get(t.Context(), "elastic/meeting/0")
	if err != nil || !strings.HasPrefix(string(at), "127.0.0.1:") {
		t.Errorf("they meet at %q, %v", at, err)
	}
}
