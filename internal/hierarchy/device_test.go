package hierarchy

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"testing"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/testing/testranks"
)

// onDevices are the options that calls in memory of a device are tried with.
func onDevices() map[string]Options {
	half := always()
	half.Exchange = backend.BF16
	return map[string]Options{"plain": always(), "exchange": half}
}

func TestDeviceMemoryIsNeverTouchedByTheHostUnraced(t *testing.T) {
	most := times(longest, 10_007)
	shapes := layouts(2, 2)
	shapes["one device each"] = Grid(4, 1)
	for name, l := range shapes {
		for options, o := range onDevices() {
			t.Run(name+", "+options, func(t *testing.T) {
				onGuard(t, l, o, func(c *Communicator) error {
					memory := testranks.Must(c.Device().Alloc(8 * c.Size() * most))
					return errors.Join(everyCallEqualsFlat(c, memory, most),
						c.Device().Free(memory))
				})
			})
		}
	}
}

// longest is the most elements of a chunk: many slices, and no multiple of anything.
const longest = 50_021

// everyCallEqualsFlat makes calls of every kind with up to most elements of each rank, in
// memory for two operands of so many from every rank, 4 bytes each.
func everyCallEqualsFlat(c *Communicator, memory backend.Buffer, most int) error {
	calls := []backend.Collective{allGather}
	for _, op := range []backend.ReduceOp{backend.Sum, backend.Avg, backend.Max} {
		calls = append(calls, backend.Collective{Kind: backend.AllReduce, Op: op},
			backend.Collective{Kind: backend.ReduceScatter, Op: op})
	}
	for _, what := range calls {
		for _, d := range []backend.DType{backend.F32, backend.BF16, backend.I32} {
			for _, count := range []int{1, 7, 1003, most} {
				if err := equalsFlatOnDevice(c, memory, what, d, count); err != nil {
					return fmt.Errorf("%v of %d %v: %w", what, count, d, err)
				}
			}
		}
	}
	return nil
}

// equalsFlatOnDevice is equalsFlat in memory of the device, whose halves are the
// operands. It counts bytes, too.
func equalsFlatOnDevice(c *Communicator, memory backend.Buffer, what backend.Collective,
	d backend.DType, count int) error {
	nsrc, ndst := lengths(what, c.Size(), count)
	src := equalPart(memory, 0, 2).As(d).Slice(0, nsrc)
	dst := equalPart(memory, 1, 2).As(d).Slice(0, ndst)
	in, kept := integers(d, nsrc, uint64(count), uint64(c.Rank())), make([]byte, src.NBytes())
	got, want := make([]byte, dst.NBytes()), make([]byte, dst.NBytes())
	q, k, before := c.Device().Default(), c.Device().Default(), c.Stats()
	err := errors.Join(
		k.Move(src, bufferOf(d, in)), k.Zero(dst),
		backend.Run(c, what, dst, src), k.Move(bufferOf(d, got), dst), k.Move(bufferOf(d, kept),
			src),
		k.Zero(dst),
		backend.Run(c.Communicator, what, dst, src), k.Move(bufferOf(d, want), dst), drained(q),
	)
	switch {
	case err != nil:
		return err
	case !bytes.Equal(in, kept):
		return errors.New("the source has changed")
	case !bytes.Equal(got, want):
		return errors.New("not the result of the flat call")
	}
	return bytesAreTheFormula(c, before, what, d, max(nsrc, ndst))
}

// bytesAreTheFormula compares what one call on n elements has sent with the doc.
func bytesAreTheFormula(c *Communicator, before Stats, what backend.Collective, d backend.DType,
	n int) error {
	after, M, D := c.Stats(), c.plan.Layout.Machines(), c.plan.Layout.Devices()
	S, ways, calls, thinner := (n-n%c.Size())*d.Size(), 1, 1, 1
	if what.Kind == backend.AllReduce {
		ways = 2
	}
	if M == 1 || S == 0 {
		S, calls = 0, 0 // flat, which is not counted
	}
	if c.plan.Options.Exchange != 0 && d == backend.F32 && what.Kind.Reduces() &&
		what.Op != backend.Max {
		thinner = 2
	}
	between, inside := after.Between()-before.Between(), after.Inside()-before.Inside()
	if want := int64(ways * (M - 1) * S / (M * D) / thinner); between != want {
		return fmt.Errorf("%d bytes between machines, want %d", between, want)
	}
	if want := int64(ways * (D - 1) * S / D); inside != want {
		return fmt.Errorf("%d bytes inside the machine, want %d", inside, want)
	}
	if got := after.Calls - before.Calls; got != calls {
		return fmt.Errorf("%d hierarchical calls, want %d", got, calls)
	}
	return nil
}

func drained(q backend.Queue) error {
	done, err := q.Record()
	if err != nil {
		return err
	}
	return done.Join(context.Background())
}
