package autograd

import (
	"errors"
	"fmt"
	"sync/atomic"
	"testing"

	"gorgonia.org/gorgonia"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/backend/cuda"
	"github.com/euryale-ml/euryale/internal/testenv"
)

// counting is a queue that counts how often memory is moved, and the bytes of
// gradients that are.
type counting struct {
	backend.Queue
	packs, others atomic.Int64
	casts, widens atomic.Int64
	nbytes        atomic.Int64 // that packs, casts and widens read and write
}

func (k *counting) MultiTensorCopy(dsts, srcs []backend.Buffer) error {
	k.packs.Add(1)
	for i, dst := range dsts {
		k.nbytes.Add(int64(dst.NBytes() + srcs[i].NBytes()))
	}
	return k.Queue.MultiTensorCopy(dsts, srcs)
}

func (k *counting) Cast(dst, src backend.Buffer) error {
	k.casts.Add(1)
	k.nbytes.Add(int64(dst.NBytes() + src.NBytes()))
	return k.Queue.Cast(dst, src)
}

func (k *counting) CastScale(dst, src backend.Buffer, factor float64) error {
	k.widens.Add(1)
	k.nbytes.Add(int64(dst.NBytes() + src.NBytes()))
	return k.Queue.CastScale(dst, src, factor)
}

func (k *counting) Copy(dst, src backend.Buffer) error {
	k.others.Add(1)
	return k.Queue.Copy(dst, src)
}

func (k *counting) Zero(dst backend.Buffer) error {
	k.others.Add(1)
	return k.Queue.Zero(dst)
}

func (k *counting) Move(dst, src backend.Buffer) error {
	k.others.Add(1)
	return k.Queue.Move(dst, src)
}

func (k *counting) CopyStrided(dst, src backend.Buffer, shape, strides []int) error {
	k.others.Add(1)
	return k.Queue.CopyStrided(dst, src, shape, strides)
}

// TestOnePackAndOneAllReduceForEachBucket counts what a step starts on a device.
func TestOnePackAndOneAllReduceForEachBucket(t *testing.T) {
	testenv.Each(t, testenv.OnDevices(), func(t *testing.T, k testenv.Kind) {
		for buckets, opts := range map[int64][]Option{1: nil, 2: {WithBuckets(60, 120)}, 3: {WithBuckets(1, 1)}} {
			for _, hooks := range []bool{false, true} {
				allOn(t, k, 2, func(r rank) error { return countLaunches(r, buckets, hooks, opts) })
			}
		}
	})
}

// countLaunches trains a quadratic, whose parameters on the device are in the
// given number of buckets. Its scalar is in one on the host.
func countLaunches(r rank, buckets int64, hooks bool, opts []Option) error {
	c := &recorder{Communicator: r.comm}
	return trainCounted(r, c, hooks, opts, func(counted *counting, d *DataParallel, vm gorgonia.VM) error {
		for step := range 5 {
			c.events = nil
			packs := counted.packs.Load()
			if err := vm.RunAll(); err != nil {
				return err
			}
			others := counted.others.Load()
			grads, err := d.Sync()
			if err != nil {
				return err
			}
			packs, others = counted.packs.Load()-packs, counted.others.Load()-others
			if packs != buckets || others != 0 || int64(len(c.reductions())) != buckets+1 {
				return fmt.Errorf("step %d, hooks %v, %d buckets on the device and 1 on the host: %d packs, %d other copies and fills, started %v",
					step, hooks, buckets, packs, others, c.reductions())
			}
			vm.Reset()
			if err := (SGD{Rate: 0.1}).Step(grads); err != nil {
				return err
			}
		}
		return nil
	})
}

// trainCounted has steps train a quadratic over comm, on an engine whose queue counts.
func trainCounted(r rank, comm backend.Communicator, hooks bool, opts []Option, steps func(*counting, *DataParallel, gorgonia.VM) error) (err error) {
	q, err := r.comm.Device().NewQueue()
	if err != nil {
		return err
	}
	counted := &counting{Queue: q}
	e, err := cuda.NewEngine(r.comm.Device(), counted)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, e.Close(), q.Close()) }()
	r.engine, r.comm = e, comm
	m, err := newQuadratic(r)
	if err != nil {
		return err
	}
	d, err := New(comm, m.params, opts...)
	if err != nil {
		return err
	}
	defer d.Close()
	vm, err := m.machine(r, func(w *gorgonia.Node) *gorgonia.Node {
		if !hooks {
			return w
		}
		return gorgonia.Must(d.Hook(w))
	})
	if err != nil {
		return err
	}
	defer vm.Close()
	return steps(counted, d, vm)
}
