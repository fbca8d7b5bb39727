package half

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/internal/testing/testenv"
	"github.com/euryale-ml/euryale/internal/testing/testranks"
)

// at runs f on P ranks over 16 bits, in a place.
func at(t testing.TB, k testenv.Kind, P int, half backend.DType, f func(c *Communicator) error) {
	t.Helper()
	errs := testranks.Run(P, k.Connect(t, P), func(r *testenv.Rank) error {
		c := wrap(half)(r.Comm).(*Communicator)
		r.Comm = c
		return f(c)
	})
	require.Report(t, testranks.Join(errs))
}

// Sums of small integers are exact among two ranks.
func TestIntegersAreExactOnDevices(t *testing.T) {
	testenv.Each(t, testenv.OnDevices(), func(t *testing.T, k testenv.Kind) {
		for _, half := range halves {
			at(t, k, 2, half, func(c *Communicator) error {
				for _, kind := range []backend.Kind{backend.AllReduce, backend.ReduceScatter} {
					for _, op := range []backend.ReduceOp{backend.Sum, backend.Avg} {
						for _, n := range []int{1, 99, 100, 5003} {
							if err := integers(c, kind, op, n); err != nil {
								return fmt.Errorf("%v of %d: %w", reduction(kind, op), n, err)
							}
						}
					}
				}
				return nil
			})
		}
	})
}

// integers reduces n integers of each rank, out of place, on the device.
func integers(c *Communicator, kind backend.Kind, op backend.ReduceOp, n int) error {
	count, P := n, c.Size()
	if kind == backend.ReduceScatter {
		count = n * P
	}
	memory, err := c.Device().Alloc(4 * (n + count))
	if err != nil {
		return err
	}
	y, x := memory.As(backend.F32).Slice(0, n), memory.As(backend.F32).Slice(n, n+count)
	in, out := make([]float32, count), make([]float32, n)
	for i := range in {
		in[i] = float32(i%50 + 10*c.Rank())
	}
	q := c.Device().Default()
	k := q
	if err := k.Move(x, backend.Of(in)); err != nil {
		return err
	}
	if err := errors.Join(backend.Run(c, reduction(kind, op), y, x),
		k.Move(backend.Of(out), y)); err != nil {
		return err
	}
	done, err := q.Record()
	if err := errors.Join(err, done.Join(context.Background()),
		c.Device().Free(memory)); err != nil {
		return err
	}
	for i, got := range out {
		at := i
		if kind == backend.ReduceScatter {
			at += c.Rank() * n
		}
		want := float32(2*(at%50) + 10)
		if op == backend.Avg {
			want /= 2
		}
		if got != want {
			return fmt.Errorf("element %d is %v, want %v", i, got, want)
		}
	}
	return nil
}

// A call in a graph travels as 16 bits in each replay, also between eager calls.
func TestGraphsTravelAsHalf(t *testing.T) {
	testenv.Each(t, testenv.OnDevices(), func(t *testing.T, k testenv.Kind) {
		at(t, k, 2, backend.BF16, func(c *Communicator) error {
			q, ok := c.Device().Default().(backend.GraphQueue)
			if !ok {
				return fmt.Errorf("the queue is a %T", c.Device().Default())
			}
			const n = 100
			memory, err := c.Device().Alloc(8 * n)
			if err != nil {
				return err
			}
			all := memory.As(backend.F32)
			x, y := all.Slice(0, n), all.Slice(n, 2*n)
			what := reduction(backend.AllReduce, backend.Sum)
			testranks.NoError(errors.Join(q.Move(x, backend.Of(slices.Repeat(
				[]float32{float32(1 + c.Rank())}, n))),
				backend.Run(c, what, y, x)))
			graph, err := q.Capture(func() error {
				w, err := c.Start(q, what, y, x)
				return errors.Join(err, w.Wait(q), q.Reduce(backend.Sum, x, y, x))
			})
			if err != nil {
				return err
			}
			for range 2 {
				if _, err := graph.Launch(nil); err != nil {
					return err
				}
			}
			got := make([]float32, n) // 1, 2: 3; 4, 5: 9; 13, 14: 27
			err = errors.Join(backend.Run(c, what, y, x), q.Move(backend.Of(got), y), graph.Close(),
				backend.Barrier(c), c.Device().Free(memory))
			if err == nil && (got[0] != 27 || got[n-1] != 27) {
				err = fmt.Errorf("the sums are %v and %v, want 27", got[0], got[n-1])
			}
			return err
		})
	})
}
