package vm_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/autograd"
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/testing/testenv"
	"github.com/euryale-ml/euryale/internal/testing/testranks"
	"github.com/euryale-ml/euryale/vm"
)

// slow has the exchange of one bucket end late, for those that wait for it.
type slow struct {
	backend.Base
	bucket int // from 0
	late   time.Duration
}

// Start implements [backend.Communicator].
func (c *slow) Start(q backend.Queue, what backend.Collective, dst,
	src backend.Buffer) (backend.Work, error) {
	w, err := c.Communicator.Start(q, what, dst, src)
	if err == nil && what.State == c.bucket+1 && !backend.Recorded(q) {
		w = lateWork{w, c.late}
	}
	return w, err
}

// lateWork ends a time after somebody begins to wait for it.
type lateWork struct {
	backend.Work
	late time.Duration
}

func (w lateWork) Wait(q backend.Queue) error {
	if err := w.Work.Wait(q); err != nil {
		return err
	}
	return q.Wait(w)
}

func (w lateWork) Join(ctx context.Context) error {
	time.Sleep(w.late)
	return w.Work.Join(ctx)
}

// TestExposed: a run step by step says how long it waits for the exchange of each bucket, and a
// late one is exposed by its delay.
func TestExposed(t *testing.T) {
	testenv.Each(t, []testenv.Kind{testenv.Hosts, testenv.Devices},
		func(t *testing.T, k testenv.Kind) {
			if err := testranks.Join(together(t, k, 2, exposes)); err != nil {
				t.Fatal(err)
			}
		})
}

func exposes(r ranked) (err error) {
	const late, delay = 1, 30 * time.Millisecond
	m := r.build(mlp)
	machine, err := vm.New(m.g, r.device, vm.WithSolver(&autograd.SGD{Rate: 0.1}, m.params...),
		vm.WithDataParallel(&slow{backend.Wrap(r.Comm), late, delay}, autograd.WithBuckets(1, 1)))
	if err != nil {
		return err
	}
	var least []time.Duration // of each bucket: that of a run which the machine's load spares
	for range 4 {
		if err := machine.RunAll(); err != nil {
			return err
		}
		buckets, err := machine.Exposed()
		if err != nil {
			return err
		}
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
		if d < 0 || (i == late) != (d >= delay) {
			return fmt.Errorf("bucket %d is exposed by %v: bucket %d is late by %v", i, d, late,
				delay)
		}
	}
	return machine.Close()
}

// TestExposedAlone: without other ranks nothing is exchanged.
func TestExposedAlone(t *testing.T) {
	m := mlp(t, tensor.Float32)
	machine := machine(t, m.g, vm.WithSolver(&autograd.SGD{Rate: 0.1}, m.params...))
	for range 3 {
		if buckets, err := machine.Exposed(); err != nil || len(buckets) != 0 {
			t.Errorf("the exchanges are %v, %v", buckets, err)
		}
	}
}
