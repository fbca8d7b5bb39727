package session_test

import (
	"errors"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/euryale-ml/euryale"
	"github.com/euryale-ml/euryale/autograd"
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/backend/host"
	"github.com/euryale-ml/euryale/internal/elastic"
	"github.com/euryale-ml/euryale/internal/session"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/internal/testing/testranks"
	"github.com/euryale-ml/euryale/observe"
	"github.com/euryale-ml/euryale/rendezvous"
)

// TestGenerationsOnMachinesMeetWhereRank0Says: the register has the address. It has TLS where the
// ranks have it.
func TestGenerationsOnMachinesMeetWhereRank0Says(t *testing.T) {
	job := rendezvous.Env{Job: "meets", Size: 1, LocalSize: 1, TLS: true,
		Token: strings.Repeat("secret", 5), Timeout: time.Minute}
	register := require.Value(rendezvous.ServeRegister(job, true, func(int) {}))(t)
	defer register.Close()
	first := elastic.First(1, 2)
	take := func(rank int) error {
		e, err := join(t, register.Addr(), session.ElasticConfig{ID: elastic.ID(rank + 1),
			First: first, Limits: elastic.Limits{Least: 2, Most: 2}, Env: job, Host: "127.0.0.1"})
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
			err := take(rank)
			require.Check(t, err == nil, "rank %d: %v", rank, err)
		})
	}
	running.Wait()
	at, err := register.Store().Get(t.Context(), "elastic/meeting/0")
	require.Check(t, err == nil && strings.HasPrefix(string(at), "127.0.0.1:"),
		"they meet at %q, %v", at, err)
}

// join makes a process take part in a job, whose register is at an address.
func join(t *testing.T, register string, c session.ElasticConfig) (*session.Elastic, error) {
	store, err := rendezvous.OpenRegister(t.Context(), register, c.Env, int(c.ID))
	if err != nil {
		return nil, err
	}
	c.Register = store
	if c.Backends == nil {
		c.Backends = euryale.Backends
	}
	return session.NewElastic(c), nil
}

// TestAGenerationIsWatchedOnAllRanksIfTheOneBeforeWas: the third process is new in the second
// generation. A loop gathers the samples of all ranks, so a watch on some of them ends the job.
func TestAGenerationIsWatchedOnAllRanksIfTheOneBeforeWas(t *testing.T) {
	job := rendezvous.Env{Job: "watched", Size: 1, LocalSize: 1, Timeout: time.Minute}
	register := require.Value(rendezvous.ServeRegister(job, false, func(int) {}))(t)
	defer register.Close()
	take := func(rank int) error {
		e := testranks.Must(join(t, register.Addr(), session.ElasticConfig{ID: elastic.ID(rank + 1),
			First: elastic.First(1, 2), Limits: elastic.Limits{Least: 2, Most: 3}, Env: job}))
		var comm backend.Communicator
		leave := func(elastic.View) error { return e.Release(comm) }
		comm, view, err := e.Next(t.Context(), leave)
		if err == nil && view.Generation == 0 {
			w, wrong := observe.Start(comm)
			if w.Serve(); wrong != nil {
				return wrong
			}
			e.Job().CaughtUp(0)
			for until := time.Now().Add(job.Timeout); !e.Job().Waits(); {
				if time.Sleep(time.Millisecond); time.Now().After(until) {
					return errors.New("the third process does not wait for the others")
				}
			}
			if err = backend.Barrier(comm); err != nil { // until both have seen the third
				return err
			}
			e.Job().Admits(0)
			comm, view, err = e.Next(t.Context(), leave)
		}
		if err != nil {
			return err
		}
		w := observe.WatchOf(comm)
		told, err := autograd.Gather(comm, w.Sample()...)
		require.Check(t, err == nil && len(told) == 3 && view.Generation == 1 && len(told[0]) != 0,
			"generation %d of %d ranks: watch %v, %v", view.Generation, len(told), w, err)
		if w.Served() != (rank < 2) {
			t.Errorf("rank %d: served %v in the second generation", rank, w.Served())
		}
		return errors.Join(e.Close(true), e.Release(comm))
	}
	require.NoError(t, testranks.All(3, take))
}

// TestNobodyConnectsBeforeAllHaveLeft: kernels of a generation would wait for a rank whose driver
// waits for them, to give back memory of the generation before.
func TestNobodyConnectsBeforeAllHaveLeft(t *testing.T) {
	job := rendezvous.Env{Job: "left", Size: 1, LocalSize: 1, Timeout: time.Minute}
	register := require.Value(rendezvous.ServeRegister(job, false, func(int) {}))(t)
	defer register.Close()
	var connected atomic.Bool
	if err := testranks.All(2, func(rank int) error {
		e := testranks.Must(join(t, register.Addr(), session.ElasticConfig{ID: elastic.ID(rank + 1),
			First: elastic.First(1, 2), Limits: elastic.Limits{Least: 2, Most: 2}, Env: job}))
		comm, _, err := e.Next(t.Context(), func(elastic.View) error {
			if rank == 0 {
				time.Sleep(100 * time.Millisecond) // in which the other one would connect
			}
			require.Check(t, !connected.Load(), "rank %d leaves when the other one has connected",
				rank)
			return nil
		})
		connected.Store(true)
		if err != nil {
			return err
		}
		return errors.Join(e.Close(true), e.Release(comm))
	}); err != nil {
		t.Error(err)
	}
}

// opening is a backend that has devices to open.
type opening struct {
	host.Backend
	opened chan int
}

func (o opening) OpenDevice(local int) error {
	o.opened <- local
	return nil
}

// TestAProcessOpensTheDeviceOfItsSeatBeforeTheOthersCome: which do not wait for it then.
func TestAProcessOpensTheDeviceOfItsSeatBeforeTheOthersCome(t *testing.T) {
	job := rendezvous.Env{Job: "seat", Size: 1, LocalSize: 1, Timeout: time.Minute}
	register := require.Value(rendezvous.ServeRegister(job, false, func(int) {}))(t)
	defer register.Close()
	opened, first := make(chan int, 2), make(chan struct{})
	if err := testranks.All(2, func(rank int) error {
		if rank == 1 {
			<-first
		}
		e := testranks.Must(join(t, register.Addr(), session.ElasticConfig{ID: elastic.ID(rank + 1),
			First: elastic.First(1, 2), Limits: elastic.Limits{Least: 2, Most: 2}, Env: job,
			Seat: 3 * (1 - rank), Backends: func() []backend.Backend {
				return []backend.Backend{opening{opened: opened}}
			}}))
		if rank == 0 {
			go func() {
				require.Equal(t, "the process with seat 3 opens device", <-opened, 2)
				close(first)
			}()
		}
		comm, _, err := e.Next(t.Context(), func(elastic.View) error { return nil })
		if err != nil {
			return err
		}
		return errors.Join(e.Close(true), e.Release(comm))
	}); err != nil || len(opened) > 0 {
		t.Errorf("%v, and one without a seat has opened %d devices", err, len(opened))
	}
}
