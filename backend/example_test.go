package backend_test

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"

	"github.com/euryale-ml/euryale"
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/backend/host"
	"github.com/euryale-ml/euryale/rendezvous"
)

// counting is the backend of the host, whose communicators count calls.
type counting struct{ calls *atomic.Int64 }

func (counting) Name() string     { return "counting" }
func (counting) Available() error { return nil }

func (b counting) Connect(ctx context.Context, w *rendezvous.World) (backend.Communicator, error) {
	comm, err := host.Backend{}.Connect(ctx, w)
	if err != nil {
		return nil, err
	}
	return &counted{backend.Wrap(comm), b.calls}, nil
}

// counted declares what it changes. The rest is Base's.
type counted struct {
	backend.Base
	calls *atomic.Int64
}

func (c *counted) Start(q backend.Queue, what backend.Collective, dst,
	src backend.Buffer) (backend.Work, error) {
	c.calls.Add(1)
	return c.Base.Start(q, what, dst, src)
}

func (c *counted) Capabilities() backend.Capabilities {
	can := c.Base.Capabilities()
	can.Backend = "counting"
	return can
}

// A backend of one's own is passed to Run, Init or Connect.
func ExampleBase() {
	var calls atomic.Int64
	err := euryale.Run(context.Background(), 2, func(comm backend.Communicator,
		_ sync.Locker) error {
		x := backend.Of([]float32{1, 2})
		if err := backend.Run(comm, backend.Collective{Kind: backend.AllReduce, Op: backend.Sum}, x,
			x); err != nil {
			return err
		}
		if comm.Rank() == 0 {
			fmt.Println(backend.View[float32](x))
			fmt.Println(comm.Capabilities())
		}
		return nil
	}, counting{&calls})
	fmt.Println(calls.Load(), "calls,", err)
	// Output:
	// [2 4]
	// backend counting, 2 ranks, adds in a tree, compares calls
	// 2 calls, <nil>
}

// volume adds up the bytes of calls.
type volume struct{ bytes, failed atomic.Int64 }

func (v *volume) Start(c *backend.Call) (id uint64) {
	v.bytes.Add(int64(c.Bytes))
	return c.Header.Seq
}

func (v *volume) End(_ uint64, err error) {
	if err != nil {
		v.failed.Add(1)
	}
}

// Counters and metrics attach to a communicator by hooks.
func ExampleWithHooks() {
	err := euryale.Run(context.Background(), 2, func(comm backend.Communicator,
		_ sync.Locker) error {
		var v volume
		comm = backend.WithHooks(comm, &v)
		x := backend.Of(make([]float32, 1000))
		for range 3 {
			if err := backend.Run(comm, backend.Collective{Kind: backend.AllReduce,
				Op: backend.Sum}, x, x); err != nil {
				return err
			}
		}
		if comm.Rank() == 0 {
			fmt.Println(v.bytes.Load(), "bytes,", v.failed.Load(), "calls failed")
		}
		return nil
	})
	fmt.Println(err)
	// Output:
	// 12000 bytes, 0 calls failed
	// <nil>
}

// Start returns at once: the rank computes while others are waited for, and Join returns what the
// collective ended with. Here an all-reduce of each half is under way while the next is computed.
func ExampleCommunicator_start() {
	err := euryale.Run(context.Background(), 2, func(comm backend.Communicator,
		_ sync.Locker) error {
		sum := backend.Collective{Kind: backend.AllReduce, Op: backend.Sum}
		x := make([]float64, 4)
		var started []backend.Work
		for _, half := range [][]float64{x[:2], x[2:]} {
			for i := range half {
				half[i] = float64(comm.Rank() + i)
			}
			w, err := comm.Start(nil, sum, backend.Of(half), backend.Of(half)) // half is in use now
			if err != nil {
				return err
			}
			started = append(started, w)
		}
		for _, w := range started {
			if err := w.Join(context.Background()); err != nil {
				return err
			}
		}
		if comm.Rank() == 0 {
			fmt.Println(x)
		}
		return nil
	})
	fmt.Println(err)
	// Output:
	// [1 3 1 3]
	// <nil>
}
