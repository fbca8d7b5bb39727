package bucket_test

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"net/http"
	"os"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/autograd"
	"github.com/euryale-ml/euryale/autograd/solver"
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/bucket"
	"github.com/euryale-ml/euryale/internal/env"
	"github.com/euryale-ml/euryale/internal/testing/objectstore"
	"github.com/euryale-ml/euryale/internal/testing/proctest"
	"github.com/euryale-ml/euryale/internal/testing/reference"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/internal/testing/testenv"
	"github.com/euryale-ml/euryale/internal/testing/testranks"
	"github.com/euryale-ml/euryale/rendezvous"
	"github.com/euryale-ml/euryale/vm"
)

const run = objectstore.URL + "/run"

// training has n parameters, which a step makes 1 smaller, and 1/2 more than in the step before.
type training struct {
	*vm.Machine
	w *tensor.Dense
}

// train begins a training of which each rank saves its shards.
func train(comm backend.Communicator, build sync.Locker, n int) (training, error) {
	build.Lock() // Gorgonia builds one graph at a time
	g := gorgonia.NewGraph()
	all := tensor.New(tensor.WithBacking(make([]float32, n)))
	w := gorgonia.NewVector(g, tensor.Float32, gorgonia.WithShape(n), gorgonia.WithName("w"),
		gorgonia.WithValue(all))
	_, err := gorgonia.Grad(gorgonia.Must(gorgonia.Sum(w)), w)
	if build.Unlock(); err != nil {
		return training{}, err
	}
	quiet := autograd.WithNotice(func(string) {})
	m, err := vm.New(g, nil, vm.WithSolver(&solver.Momentum{Rate: 1, Momentum: 0.5}, w),
		vm.WithDataParallel(comm, autograd.WithStore(bucket.Open), quiet),
		vm.WithShards(vm.SolverState))
	return training{m, all}, err
}

// after is what a parameter is after some steps.
func after(steps int) (w float32) {
	for v := float32(0); steps > 0; steps-- {
		v = v/2 - 1
		w += v
	}
	return w
}

// load loads, and returns after how many steps the training goes on.
func (t training) load() (at int, err error) {
	err = t.DataParallel().Load(run, t.Solver(), &at)
	if errors.Is(err, fs.ErrNotExist) {
		return 0, nil
	}
	if err == nil {
		err = is(t.w, at)
	}
	return at, err
}

// is returns an error unless all parameters are what they are after some steps.
func is(w *tensor.Dense, steps int) error {
	for i, x := range w.Data().([]float32) {
		if x != after(steps) {
			return fmt.Errorf("parameter %d is %v after %d steps, want %v", i, x, steps,
				after(steps))
		}
	}
	return nil
}

// step trains a step and saves.
func (t training) step(at int) error {
	if err := t.RunAll(); err != nil {
		return err
	}
	return t.DataParallel().Save(run, t.Solver(), at+1)
}

// together runs a training as two ranks, whose machines are closed in the end.
func together(f func(t training) error) error {
	comms, build := reference.New("bucket", 2, time.Minute), new(sync.Mutex)
	return testranks.All(2, func(rank int) error {
		t, err := train(comms[rank], build, 1000)
		if err != nil {
			return err
		}
		return errors.Join(f(t), t.Close())
	})
}

// committed returns the names of the checkpoints in the bucket, and the other files.
func committed(t *testing.T) (steps, others []string) {
	t.Helper()
	in := open(t, run)
	all, err := in.ReadDir(".")
	require.That(t, err == nil || errors.Is(err, fs.ErrNotExist), "%v", err)
	for _, e := range all {
		var names []string
		for _, f := range require.Value(in.ReadDir(e.Name()))(t) {
			names = append(names, f.Name())
		}
		if slices.Contains(names, "checkpoint.json") { // a job may stop between the two
			names = slices.DeleteFunc(names, func(n string) bool { return n == "made-by-save" })
		}
		if slices.Equal(names, []string{"checkpoint.json", "model.safetensors",
			"rank0.safetensors", "rank1.safetensors"}) {
			steps = append(steps, e.Name())
		} else {
			others = append(others, fmt.Sprint(e.Name(), names))
		}
	}
	return steps, others
}

// Whenever a job stops, before or after the store has done what it was asked for, the next job goes
// on from the last checkpoint that has a record, and its Save leaves nothing of the others.
func TestASaveMayStopAtAnyRequest(t *testing.T) {
	for name, served := range map[string]bool{"before": false, "after": true} {
		t.Run(name, func(t *testing.T) {
			s := objectstore.Start(t)
			require.NoError(t, together(func(tr training) error {
				return errors.Join(tr.step(0), tr.step(1))
			}))
			stopped, every := 0, int64(3) // requests, a sample of them or all
			if env.Full.Set(os.Getenv) {
				every = 1
			}
			for at, over := int64(1), false; !over; at += every {
				require.NoError(t, together(func(tr training) error {
					steps, err := tr.load()
					if err == nil {
						err = tr.RunAll()
					}
					if err != nil {
						return err
					}
					if tr.DataParallel().Comm().Rank() == 0 {
						s.Instead(stopsAt(at, served))
					}
					if backend.Barrier(tr.DataParallel().Comm()) != nil {
						return errors.New("no barrier")
					}
					err = tr.DataParallel().Save(run, tr.Solver(), steps+1)
					if err != nil && !strings.Contains(err.Error(), "s3://bucket/run") {
						return fmt.Errorf("at request %d: %w, which names no object", at, err)
					}
					return nil
				}))
				over = s.Requests.Load() < at
				s.Instead(nil)
				stopped += int(every)
				steps, _ := committed(t)
				require.That(t, len(steps) > 0, "at request %d nothing is left", at)
				var last int
				fmt.Sscanf(slices.Max(steps), "step-%d", &last)
				weights := require.Value(autograd.ReadWeights(run, bucket.Open))(t)
				require.NoError(t, is(weights["w"], last))
				require.NoError(t, together(func(tr training) error {
					steps, err := tr.load()
					if err == nil && steps != last {
						err = fmt.Errorf("at request %d: step %d is loaded, of %d", at, steps, last)
					}
					if err == nil {
						err = tr.step(steps)
					}
					return err
				}))
				steps, others := committed(t)
				require.That(t, len(steps) == 2 && others == nil, "at request %d: %v and %v", at,
					steps, others)
				weights = require.Value(autograd.ReadWeights(run, bucket.Open))(t)
				require.NoError(t, is(weights["w"], last+1))
			}
			require.Check(t, stopped > 25, "a Save has %d requests", stopped)
			t.Logf("a Save of %d requests was stopped at every %d", stopped, every)
		})
	}
}

// stopsAt lets nobody do anything from a request on, which may have been served.
func stopsAt(at int64, served bool) objectstore.Answer {
	return func(n int64, w http.ResponseWriter, r *http.Request, serve http.HandlerFunc) {
		if n < at {
			serve(w, r)
			return
		}
		if n == at && served {
			serve(objectstore.Nobody(), r)
		}
		w.WriteHeader(http.StatusForbidden) // which nobody tries again
	}
}

// rank is a process of a job that saves until it is killed. Its lines say from where it goes on,
// and what it has saved.
func rank(string) error {
	e, err := rendezvous.ReadEnv(os.Getenv)
	if err != nil {
		return err
	}
	w, err := rendezvous.Join(context.Background(), e)
	if err != nil {
		return err
	}
	own, err := testenv.Host(w)
	if err != nil {
		return err
	}
	t, err := train(own.Comm, new(sync.Mutex), 1000)
	if err != nil {
		return err
	}
	at, err := t.load()
	fmt.Println("from", at)
	for ; err == nil; at++ {
		if err = t.step(at); err == nil {
			fmt.Println("saved", at+1)
		}
	}
	return err
}

func TestMain(m *testing.M) { proctest.Main(m, rank) }

// A process that is killed at any moment leaves a checkpoint that has all that it said was saved,
// and loads.
func TestAJobMayBeKilledAtAnyMoment(t *testing.T) {
	objectstore.Start(t)
	kills := 10
	if env.Full.Set(os.Getenv) {
		kills = 300
	}
	last, farthest := 0, 0
	for kill := range kills {
		job := proctest.Start(t, "saves", 2)
		var from int
		fmt.Sscanf(job[0].Next(), "from %d", &from)
		require.That(t, from == last || from == last+1, "kill %d: it goes on from step %d, and %d "+
			"were saved", kill, from, last)
		last = from
		victim := job[rand.IntN(2)]
		time.AfterFunc(time.Duration(rand.IntN(300))*time.Millisecond, func() {
			victim.Process.Signal(syscall.SIGKILL)
		})
		for line := job[0].Next(); line != ""; line = job[0].Next() {
			fmt.Sscanf(line, "saved %d", &last)
		}
		job[1].End()
		farthest = max(farthest, last)
	}
	require.Check(t, farthest >= kills/4, "after %d kills only %d steps are saved", kills, farthest)
	t.Logf("%d kills, %d steps", kills, farthest)
}

// A rank of four that loads its shards reads a quarter of what all have written, and the beginnings
// of the other files.
func TestARankReadsTheShardsThatItNeeds(t *testing.T) {
	s := objectstore.Start(t)
	const P, n = 4, 4 << 20
	each := func(f func(tr training) error) error {
		comms, build := reference.New("bucket", P, time.Minute), new(sync.Mutex)
		return testranks.All(P, func(rank int) error {
			tr, err := train(comms[rank], build, n)
			if err != nil {
				return err
			}
			return errors.Join(f(tr), tr.Close())
		})
	}
	require.NoError(t, each(func(tr training) error { return tr.step(0) }))
	s.Sent.Store(0)
	require.NoError(t, each(func(tr training) error { return require.Err(tr.load()) }))
	state := int64(2 * 4 * n) // parameters and momentum, in float32
	share := float64(s.Sent.Load()) / P / float64(state)
	require.Check(t, share > 0.25 && share < 0.31, "a rank reads %.3f of the state", share)
	t.Logf("a rank reads %.3f of %d bytes", share, state)
}
