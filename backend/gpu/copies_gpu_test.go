//go:build gpu

package gpu

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/backend/cuda"
)

// Calls by copy engines, in graphs and outside, follow calls by kernels that use the same staging.
func TestCopyEnginesGiveTheBitsOfKernelsOnGPU(t *testing.T) {
	g := needGPUs(t, 2)
	for _, size := range g.sizes() {
		comms := g.group(t, size, Options{Link: FullyConnected, Staging: 1 << 20}) // several rounds
		times := max(3, trials()/10)
		each(t, comms, func(c *Communicator) error { return beside(c, times) })
		for _, c := range comms { // which run two of three calls, those that are recorded
			if used, want := c.Usage(), int64(times-(times+2)/3); used.CopyEngines != want {
				t.Errorf("rank %d has %+v, want %d by copy engines", c.Rank(), used, want)
			}
		}
	}
}

// Copy engines write to one place of the window of each rank.
func TestCopiesToOtherPlacesOnRanksAreAMismatchOnGPU(t *testing.T) {
	g := needGPUs(t, 2)
	comms := g.group(t, 2, Options{Link: FullyConnected})
	each(t, comms, func(c *Communicator) error {
		q := c.Device().Default().(*cuda.Queue)
		memory, err := c.Alloc(besideBytes + 256)
		if err != nil {
			return err
		}
		x := memory.Slice(256*c.Rank(), 256*c.Rank()+besideBytes).As(backend.F32)
		graph, err := q.Capture(func() error {
			_, err := c.Start(q, backend.Collective{Kind: backend.AllReduce, Beside: true}, x, x)
			return err
		})
		if err != nil {
			return err
		}
		if err := assemble(c); err != nil {
			return err
		}
		w, err := graph.Launch(nil)
		if err == nil {
			err = w.Join(context.Background())
		}
		if mismatch := (*backend.MismatchError)(nil); !errors.As(err, &mismatch) {
			return fmt.Errorf("%v, want a MismatchError", err)
		}
		return nil
	})
}

// beside makes calls beside which a device could compute, and compares them with two-shot's.
func beside(c *Communicator, times int) error {
	const room = besideBytes + 4096
	q := c.Device().Default().(*cuda.Queue)
	memory, err := c.Alloc(3 * room)
	if err != nil {
		return err
	}
	late, err := newLate(c, q)
	if err != nil {
		return err
	}
	defer late.free()
	if err := assemble(c); err != nil {
		return err
	}
	all, own := rand.New(rand.NewPCG(1, 1)), rand.New(rand.NewPCG(2, uint64(c.Rank())))
	for trial := range times {
		d := []backend.DType{backend.F32, backend.F16, backend.BF16}[all.IntN(3)]
		what := backend.Collective{Kind: backend.AllReduce, Beside: true,
			Op: []backend.ReduceOp{backend.Sum, backend.Avg}[all.IntN(2)]}
		n := (besideBytes + all.IntN(4096)) / d.Size()
		n += all.IntN(2) * (besideBytes/d.Size() - n) // not always odd
		part := func(i int) backend.Buffer {
			return memory.Slice(i*room, (i+1)*room).As(d).Slice(0, n)
		}
		x, y, want := part(0), part(1), part(2)
		if all.IntN(2) == 0 {
			y = x
		}
		values := make([]float32, n)
		for i := range values {
			values[i] = float32((i+trial)%7*(c.Rank()+1) - 5)
		}
		load := func() error {
			f, err := c.Device().Alloc(4 * n)
			if err != nil {
				return err
			}
			return errors.Join(q.Move(f.As(backend.F32), backend.Of(values)),
				q.Cast(x, f.As(backend.F32)), drain(context.Background(), q),
				c.Device().Free(f))
		}
		call := func() error { _, err := c.Start(q, what, y, x); return err }
		if trial%3 > 0 {
			graph, err := q.Capture(call)
			if err != nil {
				return err
			}
			if err := assemble(c); err != nil { // all ranks have theirs
				return err
			}
			call = func() error {
				w, err := graph.Launch(nil)
				return errors.Join(err, w.Join(context.Background()), graph.Close())
			}
		}
		kernels := what
		kernels.Beside = false
		if err := errors.Join(load(), late.sometimes(own, 2)); err != nil {
			return err
		}
		if _, err := c.startBy(q, byTwoShot, kernels, want, x); err != nil {
			return err
		}
		if err := errors.Join(late.sometimes(own, 2), call()); err != nil {
			return err
		}
		got, expected := make([]byte, n*d.Size()), make([]byte, n*d.Size())
		if err := errors.Join(q.Move(backend.Of(got), y.As(backend.U8)),
			q.Move(backend.Of(expected), want.As(backend.U8)),
			drain(context.Background(), q)); err != nil {
			return err
		}
		if !bytes.Equal(got, expected) {
			return fmt.Errorf("trial %d: %v of %d %v has other bits than two-shot", trial, what, n,
				d)
		}
	}
	return c.Free(memory)
}
