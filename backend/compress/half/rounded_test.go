package half

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/backend/backendtest"
	"github.com/euryale-ml/euryale/backend/host"
	"github.com/euryale-ml/euryale/internal/testenv"
)

// Operands that the caller has rounded give the bits of those that half rounds, and
// count as much; half of the ranks may call one and half the other.
func TestRoundedOperandsGiveTheSameBits(t *testing.T) {
	for _, k := range []testenv.Kind{testenv.Hosts, testenv.Devices} {
		t.Run(string(k), func(t *testing.T) { sameBits(t, k, 3) })
	}
	list := slices.DeleteFunc(testenv.OnDevices(), func(k testenv.Kind) bool { return !k.OnGPU() })
	testenv.Each(t, list, func(t *testing.T, k testenv.Kind) { sameBits(t, k, 2) })
}

func sameBits(t *testing.T, k testenv.Kind, P int) {
	for _, half := range halves {
		at(t, k, P, half, func(c *Communicator) error {
			for _, kind := range []backend.Kind{backend.AllReduce, backend.ReduceScatter} {
				for _, op := range []backend.ReduceOp{backend.Sum, backend.Avg} {
					for _, d := range []backend.DType{backend.F32, backend.F64} {
						for _, n := range []int{0, 1, 7, 100, 5003} {
							what := reduction(kind, op)
							what.State = n
							if err := compareRounded(c, what, d, n); err != nil {
								return fmt.Errorf("%v of %d %v: %w", what, n, d, err)
							}
						}
					}
				}
			}
			return nil
		})
	}
}

// compareRounded reduces n elements for each rank as they are, all of them rounded before,
// and rounded before on every other rank.
func compareRounded(c *Communicator, what backend.Collective, d backend.DType, n int) error {
	count := n
	if what.Kind == backend.ReduceScatter {
		count *= c.Size()
	}
	if got := c.Rounded(what, d, n); got != c.half {
		return fmt.Errorf("rounded to %v", got)
	}
	size := d.Size() * (n + count + 2)
	memory, err := c.Device().Alloc(size + 2*count)
	if err != nil {
		return err
	}
	wide := memory.Slice(0, size).As(d)
	y, x := wide.Slice(1, 1+n), wide.Slice(2+n, 2+n+count)
	half := memory.Slice(size, size+2*count).As(c.half)
	q := c.Device().Default()
	k := q
	number := backend.Of(operand(count, c.Rank()))
	onDevice, err := c.Device().Alloc(4 * count)
	if err != nil {
		return err
	}
	if err := errors.Join(k.Move(onDevice.As(backend.F32), number), k.Cast(x, onDevice.As(backend.F32)), k.Fill(wide.Slice(0, 1), 5)); err != nil {
		return err
	}
	var want []byte
	for i, rounded := range []bool{false, true, c.Rank()%2 == 1} {
		before := c.Counters()
		if err := errors.Join(k.Zero(y), k.MultiTensorCopy([]backend.Buffer{half}, []backend.Buffer{x})); err != nil {
			return err
		}
		start, src := c.Start, x
		if rounded {
			start, src = c.StartRounded, half
		}
		w, err := start(nil, what, y, src)
		if err != nil {
			return err
		}
		got := make([]byte, y.NBytes())
		if err := errors.Join(w.Join(context.Background()), k.Move(backend.Of(got), y.As(backend.U8)), drained(q)); err != nil {
			return err
		}
		switch {
		case i == 0:
			want = got
		case !slices.Equal(got, want):
			return fmt.Errorf("rounded %v: %v, want %v", rounded, got, want)
		}
		after, share := c.Counters(), what.Kind.BusFactor(c.Size())*float64(count)
		if grown := (Counters{after.Calls - before.Calls, after.Bytes - before.Bytes, after.Dense - before.Dense}); grown != (Counters{1, int64(share * 2), int64(share * float64(d.Size()))}) {
			return fmt.Errorf("rounded %v: counted as %+v", rounded, grown)
		}
	}
	return errors.Join(c.Device().Free(memory), c.Device().Free(onDevice))
}

func drained(q backend.Queue) error {
	e, err := q.Record()
	if err != nil {
		return err
	}
	return e.Join(context.Background())
}

// A call is ordered with those around it, across queues, when its operand is rounded
// before it.
func TestRoundedCallsKeepTheirPlace(t *testing.T) {
	const n = 1 << 16
	ranks(t, 2, backend.BF16, func(c *Communicator) error {
		var qs [2]backend.Queue
		for i := range qs {
			var err error
			if qs[i], err = c.Device().NewQueue(); err != nil {
				return err
			}
			defer qs[i].Close()
		}
		half, y, z := make([]backend.BFloat16, n), make([]float32, n), make([]float32, 2*n)
		for round := range 20 {
			for i := range half {
				half[i] = 0x3f80 // 1
			}
			clear(y)
			if err := qs[0].Wait(waiting(2 * time.Millisecond)); err != nil {
				return err
			}
			if _, err := c.StartRounded(qs[0], reduction(backend.AllReduce, backend.Sum), backend.Of(y), backend.Of(half)); err != nil {
				return err
			}
			last, err := c.Start(qs[1], backend.Collective{Kind: backend.AllGather}, backend.Of(z), backend.Of(y))
			if err != nil {
				return err
			}
			if err := last.Join(context.Background()); err != nil {
				return err
			}
			for i, got := range z {
				if got != 2 {
					return fmt.Errorf("round %d: element %d is %v, want 2", round, i, got)
				}
			}
		}
		return nil
	})
}

func TestWhatIsNotRoundedBefore(t *testing.T) {
	ranks(t, 2, backend.BF16, func(c *Communicator) error {
		for _, test := range []struct {
			what backend.Collective
			d    backend.DType
			want backend.DType
		}{
			{reduction(backend.AllReduce, backend.Sum), backend.F32, backend.BF16},
			{reduction(backend.ReduceScatter, backend.Avg), backend.F64, backend.BF16},
			{reduction(backend.AllReduce, backend.Max), backend.F32, 0},
			{reduction(backend.Reduce, backend.Sum), backend.F32, 0},
			{reduction(backend.AllReduce, backend.Sum), backend.I32, 0},
			{reduction(backend.AllReduce, backend.Sum), backend.BF16, 0},
			{backend.Collective{Kind: backend.AllReduce, Exact: true}, backend.F32, 0},
		} {
			if got := c.Rounded(test.what, test.d, 10); got != test.want {
				return fmt.Errorf("%v of %v is rounded to %v, want %v", test.what, test.d, got, test.want)
			}
		}
		memory := backend.Of(make([]float32, 16))
		y, half := memory.Slice(0, 8), backend.Of(make([]backend.BFloat16, 8))
		for name, call := range map[string]struct {
			what     backend.Collective
			dst, src backend.Buffer
		}{
			"as it is":       {reduction(backend.AllReduce, backend.Sum), y, memory.Slice(8, 16)},
			"of f16":         {reduction(backend.AllReduce, backend.Sum), y, half.As(backend.F16)},
			"into integers":  {reduction(backend.AllReduce, backend.Sum), y.As(backend.I32), half},
			"another length": {reduction(backend.AllReduce, backend.Sum), y, half.Slice(0, 7)},
			"no sum":         {reduction(backend.AllReduce, backend.Max), y, half},
			"in place":       {reduction(backend.AllReduce, backend.Sum), y, y.As(backend.BF16).Slice(0, 8)},
			"behind":         {reduction(backend.AllReduce, backend.Sum), y, memory.As(backend.BF16).Slice(15, 23)},
		} {
			if _, err := c.StartRounded(nil, call.what, call.dst, call.src); !errors.Is(err, backend.ErrArgument) || !strings.Contains(err.Error(), fmt.Sprintf("rank %d", c.Rank())) {
				return fmt.Errorf("%s: %v", name, err)
			}
		}
		_, err := c.StartRounded(nil, reduction(backend.AllReduce, backend.Sum), memory.Slice(8, 16), half) // it can still be used
		return err
	})
	ranks(t, 1, backend.BF16, func(c *Communicator) error {
		if got := c.Rounded(reduction(backend.AllReduce, backend.Sum), backend.F32, 10); got != 0 {
			return fmt.Errorf("one rank rounds to %v", got)
		}
		_, err := c.StartRounded(nil, reduction(backend.AllReduce, backend.Sum), backend.Of(make([]float32, 2)), backend.Of(make([]backend.BFloat16, 2)))
		if !errors.Is(err, backend.ErrArgument) {
			return fmt.Errorf("one rank: %v", err)
		}
		return nil
	})
}

// What inner rounds on the way is left to it, and nothing else.
func TestWhatInnerRoundsIsGivenAsItIs(t *testing.T) {
	on := func(c backend.Communicator) backend.Communicator {
		return &rounding{Communicator: over(c, backend.F16)}
	}
	g, err := backendtest.Over(host.New(), on, wrap(backend.F16))(2, time.Minute)
	if err != nil {
		t.Fatal(err)
	}
	backendtest.Each(t, g.Comms, func(comm backend.Communicator) error {
		c, sum := comm.(*Communicator), reduction(backend.AllReduce, backend.Sum)
		long, short, doubles := c.Rounded(sum, backend.F32, 100), c.Rounded(sum, backend.F32, 99), c.Rounded(sum, backend.F64, 100)
		if long != 0 || short != backend.F16 || doubles != backend.F16 {
			return fmt.Errorf("rounded to %v, %v, %v", long, short, doubles)
		}
		return nil
	})
	if err := g.Close(); err != nil {
		t.Error(err)
	}
}

// Errors are about what was called, and name who called it.
func TestErrorsOfRoundedCalls(t *testing.T) {
	start := func(c *Communicator, op backend.ReduceOp) error {
		w, err := c.StartRounded(nil, reduction(backend.AllReduce, op), backend.Of(make([]float64, 3)), backend.Of(make([]backend.BFloat16, 3)))
		if err == nil {
			err = w.Join(context.Background())
		}
		return err
	}
	ranks(t, 3, backend.BF16, func(c *Communicator) error {
		op := backend.Sum
		if c.Rank() == 2 {
			op = backend.Avg
		}
		err := start(c, op)
		if text := fmt.Sprint(err); !errors.Is(err, backend.ErrMismatch) || !strings.Contains(text, "allreduce(avg) of 3 f64") || !strings.Contains(text, "allreduce(sum) of 3 f64") || strings.Contains(text, "slot -") {
			return fmt.Errorf("the error is %w", err)
		}
		return nil
	})
	ranks(t, 2, backend.BF16, func(c *Communicator) error {
		cause := errors.New("enough")
		c.Abort(cause)
		err := start(c, backend.Sum)
		if text := fmt.Sprint(err); !errors.Is(err, cause) && !errors.Is(err, backend.ErrAborted) || !strings.Contains(text, fmt.Sprintf("rank %d", c.Rank())) || !strings.Contains(text, "allreduce(sum) of 3 f64, as bf16") {
			return fmt.Errorf("the error is %w", err)
		}
		return nil
	})
}
