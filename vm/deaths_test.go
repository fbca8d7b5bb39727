package vm_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/euryale-ml/euryale"
	"github.com/euryale-ml/euryale/autograd"
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/elastic"
	"github.com/euryale-ml/euryale/internal/session"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/internal/testing/testenv"
	"github.com/euryale-ml/euryale/rendezvous"
)

// death is which rank of an elastic training on hosts dies, in which of its calls.
type death struct {
	rank, call int
	died       *atomic.Int32
}

// mortal is an elastic job of which a rank may die.
type mortal struct {
	*session.Elastic
	of    *death // nil for none
	calls int
	t     testing.TB
}

// keptLog is a register that ranks do not close.
type keptLog struct{ rendezvous.Log }

func (keptLog) Close() error { return nil }

func (d *death) join(r ranked, name string) *mortal {
	ids := make([]elastic.ID, r.Comm.Size())
	for i := range ids {
		ids[i] = elastic.ID(i + 1)
	}
	m := &mortal{t: r.t, Elastic: session.NewElastic(session.ElasticConfig{ID: ids[r.Comm.Rank()],
		Limits: elastic.Limits{Least: 1, Most: len(ids)}, First: elastic.First(ids...),
		Register: keptLog{r.register}, Backends: euryale.Backends,
		Env: rendezvous.Env{Job: name, Size: 1, LocalSize: 1, Timeout: 30 * time.Second}})}
	if d.rank == r.Comm.Rank() {
		m.of = d
	}
	return m
}

func (m *mortal) Next(ctx context.Context, leave func(elastic.View) error) (backend.Communicator,
	elastic.View, error) {
	comm, view, err := m.Elastic.Next(ctx, leave)
	if err == nil && m.of != nil { // the process lives on, with the shared memory of whom dies
		m.t.Cleanup(func() { _ = comm.Close() })
	}
	return &mortalComm{comm, m}, view, err
}

type mortalComm struct {
	backend.Communicator
	job *mortal
}

var errDies = errors.New("the rank dies")

func (m *mortalComm) Start(q backend.Queue, c backend.Collective, dst,
	src backend.Buffer) (backend.Work, error) {
	j := m.job
	if j.calls++; j.of != nil && j.calls == j.of.call {
		j.of.died.Add(1)
		panic(errDies)
	}
	return m.Communicator.Start(q, c, dst, src)
}

func (m *mortalComm) Split(color, key int) (backend.Communicator, error) {
	comm, err := m.Communicator.Split(color, key)
	return &mortalComm{comm, m.job}, err
}

// bury takes what a rank has panicked with, and its error, and tells the others of the end of one
// that has died, or that is in no replica any more.
func (r ranked) bury(panicked any, err error) error {
	var stopped *elastic.StoppedError
	switch {
	case panicked != nil && panicked != errDies:
		panic(panicked)
	case panicked == nil && !(errors.As(err, &stopped) && stopped.Why == elastic.Surplus):
		return err
	}
	return elastic.Bury(r.t.Context(), r.register, 0, elastic.ID(r.Comm.Rank()+1),
		func(int, elastic.Event) {})
}

// turn makes collective calls, which ranks that lose one repeat.
func (s *setting) turn(m *paired, calls func() error) error {
	if s.death == nil {
		return calls()
	}
	return m.machine.Elastic().Do(autograd.Turn{Exchange: calls})
}

// TestElasticRanksDieInTrainingsWithManyFeatures: whatever else there is, and whatever they do. The
// others have the bits of a plain training, and so has one that goes on from their checkpoint, in
// which a rank dies, too.
func TestElasticRanksDieInTrainingsWithManyFeatures(t *testing.T) {
	seeds, died := 40, &atomic.Int32{}
	if full() {
		seeds = 1000
	}
	for seed := range seeds {
		r := rand.New(rand.NewPCG(uint64(seed), 7))
		named := func(name string) int {
			return slices.IndexFunc(features, func(f feature) bool { return f.name == name })
		}
		of := drawMany(r, features[named("WithElastic")])
		if f := features[named([]string{"ZeRO 3", "ZeRO 1", "tensor ranks"}[r.IntN(3)])]; fits(
			append(slices.Clone(of), f)...) {
			of = append(of, f)
		}
		s := newSetting(r, []testenv.Kind{testenv.Hosts}, of...)
		s.vary(r)
		if delete(s.has, "evaluation"); s.refused() != nil {
			continue
		}
		s.dp = 2 + r.IntN(2)
		if s.tp == 1 && r.IntN(2) == 0 { // whose shards are no copies of the whole
			s.dp = 4 + r.IntN(5)
		}
		s.runs = max(s.runs, s.dp+r.IntN(4))
		dir := t.TempDir()
		part := leg{n: pairSteps, save: dir + "/save", plain: dir + "/plain"}
		// the rank that writes would lock the directory beyond its death, since its process lives
		s.death = &death{s.tp + r.IntN(s.ranks()-s.tp), 1 + r.IntN(70), died}
		if r.IntN(2) == 0 {
			part = leg{n: pairSteps}
			s.death.rank = r.IntN(s.ranks())
		}
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			got := s.check(t, part)
			if got == nil || part.save == "" {
				return
			}
			s.death = &death{r.IntN(s.ranks()), 1 + r.IntN(50), died}
			last := leg{from: part.save, first: pairSteps - 1, n: 1}
			d := differ(s.must(t, last), got, 0, nil)
			require.Check(t, d == "", "%v, from its checkpoint: %s", s, d)
		})
	}
	require.Check(t, int(died.Load()) > seeds/3, "only %d ranks have died", died.Load())
}
