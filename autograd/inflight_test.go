package autograd

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"gorgonia.org/gorgonia"

	"github.com/euryale-ml/euryale/autograd/solver"
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/backend/compress/half"
	"github.com/euryale-ml/euryale/backend/compress/sparse"
	"github.com/euryale-ml/euryale/internal/hierarchy"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/internal/testing/testenv"
	"github.com/euryale-ml/euryale/internal/testing/testranks"
)

// overlapping is a communicator that says how many calls it works on at once, and
// writes down on which queues they are. If it has meet, bucket 0 ends only when bucket 1
// has begun.
type overlapping struct {
	backend.Communicator
	inFlight int
	meet     chan struct{}
	alone    atomic.Bool // bucket 1 has not begun while bucket 0 was under way

	slots  []int // of the all-reduces of buckets, in the order of their starts
	queues []backend.Queue
}

func (c *overlapping) Capabilities() backend.Capabilities {
	caps := c.Communicator.Capabilities()
	caps.InFlight = c.inFlight
	return caps
}

func (c *overlapping) Start(q backend.Queue, what backend.Collective, dst,
	src backend.Buffer) (backend.Work, error) {
	if what.Kind == backend.AllReduce && what.State > 0 {
		c.slots, c.queues = append(c.slots, what.State), append(c.queues, q)
	}
	var met error
	switch {
	case c.meet == nil:
	case what.State == 1:
		met = q.Wait(happening(func() {
			select {
			case <-c.meet:
			case <-time.After(10 * time.Second):
				c.alone.Store(true)
			}
		}))
	case what.State == 2:
		met = q.Wait(happening(func() { close(c.meet) }))
	}
	w, err := c.Communicator.Start(q, what, dst, src)
	return w, errors.Join(err, met)
}

// happening is an event that happens by being waited for, as queues of the host do it.
type happening func()

func (happening) Done() bool { return false }

func (f happening) Join(context.Context) error {
	f()
	return nil
}

// As many queues as the communicator gains by, in turns, and the same order of starts;
// one queue for a compression, whose scratch memory one call uses after the other.
func TestBucketsAreSpreadOverQueuesRaced(t *testing.T) {
	for name, tt := range map[string]struct {
		inFlight, want int // queues, of four buckets
		opts           []Option
	}{
		"does not overlap": {1, 1, nil},
		"two":              {2, 2, nil},
		"more than enough": {8, 4, nil},
		"half":             {4, 1, []Option{WithCompression(half.Wrap(backend.BF16))}},
		"sparse":           {4, 1, []Option{WithCompression(sparse.Wrap(sparse.TopK(0.5)))}},
	} {
		t.Run(name, func(t *testing.T) {
			all(t, 2, func(r rank) error {
				c := &overlapping{Communicator: r.comm, inFlight: tt.inFlight}
				r.comm = c
				return r.teach(heavyBall(), func(l *lesson) error {
					if err := l.step(0); err != nil {
						return err
					}
					queues := len(l.d.queues)
					if n := len(l.d.buckets); queues != tt.want || n != 4 {
						return fmt.Errorf("%d queues for %d buckets, want %d for 4", queues, n,
							tt.want)
					}
					if tt.opts != nil { // a compression starts further calls
						return nil
					}
					if !slices.Equal(c.slots, []int{1, 2, 3, 4}) {
						return fmt.Errorf("buckets have left in the order %v", c.slots)
					}
					for i, q := range c.queues {
						if q != l.d.queues[i%queues] {
							return fmt.Errorf("bucket %d is on another queue than number %d", i,
								i%queues)
						}
					}
					return nil
				}, append(tt.opts, WithBuckets(1, 1))...)
			})
		})
	}
}

// Two buckets are under way at once, and give the bits of one after the other.
func TestBucketsAreInFlightTogetherRaced(t *testing.T) {
	want := make([][][]float32, 2)
	for _, inFlight := range []int{1, 2} {
		all(t, 2, func(r rank) error {
			c := &overlapping{Communicator: r.comm, inFlight: inFlight}
			r.comm = c
			return r.teach(gorgonia.NewVanillaSolver(), func(l *lesson) error {
				for i := range 3 {
					if inFlight > 1 {
						c.meet = make(chan struct{})
					}
					if err := l.step(i); err != nil {
						return err
					}
				}
				if inFlight == 1 {
					want[r.comm.Rank()] = l.values()
					return nil
				}
				if c.alone.Load() {
					return errors.New("bucket 1 began after bucket 0")
				}
				return errors.Join(sameBits(l.values(), want[r.comm.Rank()]), l.d.Check())
			}, WithBuckets(1, 1))
		})
	}
}

// plain hides that a communicator overlaps calls.
type plain struct{ backend.Communicator }

func (plain) Capabilities() backend.Capabilities { return backend.Capabilities{} }

// Over two machines buckets are on several queues, wherever parameters are, and training
// gives the bits that it gives with one.
func TestBucketsInFlightBetweenMachinesRaced(t *testing.T) {
	testenv.Each(t, testenv.OnHosts(), func(t *testing.T, k testenv.Kind) {
		var one, several [4][][]byte
		trainBetweenMachines(t, k, one[:], func(c backend.Communicator) backend.Communicator {
			return plain{c}
		})
		trainBetweenMachines(t, k, several[:], func(c backend.Communicator) backend.Communicator {
			return c
		})
		for r := range one {
			require.Check(t, len(one[r]) != 0 && slices.EqualFunc(one[r], several[r], bytes.Equal),
				"rank %d: other bits with several buckets in flight", r)
		}
	})
}

// trainBetweenMachines trains a quadratic on two machines of two.
func trainBetweenMachines(t *testing.T, k testenv.Kind, values [][][]byte,
	wrap func(backend.Communicator) backend.Communicator) {
	t.Helper()
	var build sync.Mutex
	errs := testranks.Run(len(values), k.Connect(t, len(values)), func(r *testenv.Rank) error {
		h, err := hierarchy.New(t.Context(), r.World, r.Comm,
			hierarchy.Grid(2, 2), hierarchy.Options{Mode: hierarchy.Always})
		if err != nil {
			return err
		}
		r.Comm = h
		values[h.Rank()], err = fit(rank{t, wrap(h), &build}, true, &solver.SGD{Rate: 0.1},
			WithBuckets(1, 1))
		if err == nil && h.Stats().Calls < 20*3 { // steps and buckets; one element is not worth it
			err = fmt.Errorf("%d hierarchical calls", h.Stats().Calls)
		}
		return err
	})
	require.Report(t, testranks.Join(errs))
}
