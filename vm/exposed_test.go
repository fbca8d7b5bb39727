package vm_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/autograd"
	"github.com/euryale-ml/euryale/autograd/solver"
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/internal/testing/testenv"
	"github.com/euryale-ml/euryale/internal/testing/testranks"
	"github.com/euryale-ml/euryale/vm"
)

// slow has the exchange of one bucket end late, for the queue or the host that waits for it.
type slow struct {
	backend.Base
	bucket int // from 0
	hold   func(q backend.Queue) error
}

// Start implements [backend.Communicator].
func (c *slow) Start(q backend.Queue, what backend.Collective, dst,
	src backend.Buffer) (backend.Work, error) {
	w, err := c.Communicator.Start(q, what, dst, src)
	if err == nil && what.State == c.bucket+1 && !backend.Recorded(q) {
		w = lateWork{w, c.hold}
	}
	return w, err
}

// lateWork holds those who wait for it.
type lateWork struct {
	backend.Work
	hold func(q backend.Queue) error
}

func (w lateWork) Wait(q backend.Queue) error { return errors.Join(w.Work.Wait(q), w.hold(q)) }

func (w lateWork) Join(ctx context.Context) error {
	return errors.Join(w.hold(nil), w.Work.Join(ctx))
}

// asleep is an event that happens a time after somebody begins to wait for it.
type asleep time.Duration

func (asleep) Done() bool { return false }

func (d asleep) Join(context.Context) error {
	time.Sleep(time.Duration(d))
	return nil
}

// hold holds a queue, of the host if it is nil.
func (d asleep) hold(q backend.Queue) error {
	if q == nil {
		return d.Join(context.Background())
	}
	return q.Wait(d)
}

// TestExposed: a run step by step says how long it waits for the exchange of each bucket, and a
// late one is exposed by its delay.
func TestExposed(t *testing.T) {
	const delay = 30 * time.Millisecond
	testenv.Each(t, []testenv.Kind{testenv.Hosts, testenv.Devices},
		func(t *testing.T, k testenv.Kind) {
			onRanks(t, k, 2, func(r ranked) error {
				return r.exposes(delay, asleep(delay).hold)
			})
		})
}

// exposes checks that the bucket which hold makes late by a delay, or more, is exposed most.
func (r ranked) exposes(delay time.Duration, hold func(q backend.Queue) error) (err error) {
	const late = 1
	m := r.build(mlp)
	machine := testranks.Must(vm.New(m.g, r.device, vm.WithSolver(&solver.SGD{Rate: 0.1},
		m.params...), vm.WithDataParallel(&slow{backend.Wrap(r.Comm), late, hold},
		autograd.WithBuckets(1, 1))))
	defer func() { err = errors.Join(err, machine.Close()) }()
	var least []time.Duration // of each bucket: that of a run which the machine's load leaves alone
	for range 4 {
		testranks.NoError(machine.RunAll())
		buckets := testranks.Must(machine.Exposed())
		bytes := 0
		for i, b := range buckets {
			if len(least) <= i {
				least = append(least, b.Exposed)
			}
			least[i] = min(least[i], b.Exposed)
			if bytes += b.Bytes; b.Bucket != i || b.Products < 0 {
				return fmt.Errorf("exchange %d is %+v", i, b)
			}
		}
		if want := 4 * (12*7 + 7 + 7*5); len(buckets) != 3 || bytes != want {
			return fmt.Errorf("%d buckets of %d bytes, want 3 of %d", len(buckets), bytes, want)
		}
	}
	for i, d := range least {
		if d < 0 || least[late] < delay || i != late && d >= least[late] {
			return fmt.Errorf("the buckets are exposed by %v: number %d is late by %v", least, late,
				delay)
		}
	}
	return nil
}

// hinted notes which buckets are exchanged beside products in what is recorded.
type hinted struct {
	backend.Base
	beside []bool
}

// Start implements [backend.Communicator].
func (c *hinted) Start(q backend.Queue, what backend.Collective, dst,
	src backend.Buffer) (backend.Work, error) {
	if what.State > 0 && backend.Recorded(q) {
		c.beside = append(c.beside, what.Beside)
	}
	return c.Communicator.Start(q, what, dst, src)
}

// TestRanksExchangeInOneWay: also where one of them has a product more beside an exchange.
func TestRanksExchangeInOneWay(t *testing.T) {
	var products, beside [2][]bool
	onRanks(t, testenv.Devices, 2, func(r ranked) (err error) {
		me := r.Comm.Rank()
		m := r.build(func(t testing.TB, dt tensor.Dtype) *model {
			m := mlp(t, dt)
			if me == 0 {
				var seen gorgonia.Value
				gorgonia.Read(mul(m.variable("a", dt, 3, 4), m.variable("b", dt, 4, 2)), &seen)
			}
			return m
		})
		comm := &hinted{Base: backend.Wrap(r.Comm)}
		machine := testranks.Must(vm.New(m.g, r.device, vm.WithSolver(&solver.SGD{Rate: 0.1},
			m.params...), vm.WithDataParallel(comm, autograd.WithBuckets(1, 1))))
		defer func() { err = errors.Join(err, machine.Close()) }()
		for range 3 {
			testranks.NoError(machine.RunAll())
		}
		buckets, err := machine.Exposed()
		for _, b := range buckets {
			products[me] = append(products[me], b.Products > 0)
		}
		beside[me] = comm.beside
		return err
	})
	require.Check(t, !slices.Equal(products[0], products[1]) && slices.Contains(beside[0], true) &&
		slices.Equal(beside[0], beside[1]),
		"products are beside the exchanges %v, which are told %v", products, beside)
}

// TestExposedGathers: where ranks shard the learnables, the buckets that are gathered before the
// forward and the backward pass read them are exchanges, too, of as many bytes as their gradients.
func TestExposedGathers(t *testing.T) {
	as := training{solver: solvers["adam"], build: layers(2, 30, 30, 30, 30, 30)}
	as.data = func(*model) []autograd.Option {
		return []autograd.Option{autograd.WithBuckets(1, 4000)} // a layer has 3720 bytes
	}
	onRanks(t, testenv.Devices, 2, func(r ranked) error {
		_, half, err := r.start(as, vm.WithShards(stages[2]), vm.WithPrecision(vm.BF16))
		testranks.NoError(err)
		inHalf, err := half.Exposed()
		at := slices.IndexFunc(inHalf, func(b vm.BucketTime) bool { return b.Bytes == 1800 })
		require.Check(t, at >= 0 && inHalf[at].Gather,
			"no weights of 3600 bytes are gathered in BF16: %v", inHalf)
		_, machine, err2 := r.start(as, vm.WithShards(stages[2]))
		testranks.NoError(errors.Join(err, half.Close(), err2))
		buckets, err := machine.Exposed()
		forward, gathers, all, scattered := 0, 0, 0, map[int]int{}
		for _, b := range buckets {
			switch {
			case !b.Gather:
				scattered[b.Bucket] = b.Bytes
				all += b.Bytes
			case len(scattered) == 0:
				forward++
				fallthrough
			default:
				gathers++
			}
		}
		for _, b := range buckets {
			if b.Bytes != scattered[b.Bucket] || b.Bytes == 0 {
				t.Errorf("an exchange has %d bytes, and the gradients of bucket %d have %d",
					b.Bytes, b.Bucket, scattered[b.Bucket])
			}
		}
		require.Check(t, forward >= len(scattered) && gathers > forward && len(scattered) >= 3 &&
			all == 4*machine.Summary().Parameters,
			"%d buckets, gathered %d times, %d before the first gradients: %v", len(scattered),
			gathers, forward, buckets)
		return errors.Join(err, machine.Close())
	})
}

// TestExposedAlone: without other ranks nothing is exchanged.
func TestExposedAlone(t *testing.T) {
	m := mlp(t, tensor.Float32)
	machine := machine(t, m.g, vm.WithSolver(&solver.SGD{Rate: 0.1}, m.params...))
	for range 3 {
		buckets, err := machine.Exposed()
		require.Check(t, err == nil && len(buckets) == 0, "the exchanges are %v, %v", buckets, err)
	}
}
