package autograd

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/backend/compress/half"
	"github.com/euryale-ml/euryale/internal/residence"
	"github.com/euryale-ml/euryale/internal/testenv"
)

// unrounded is a compression that takes no rounded operands, so that gradients are packed
// as they are.
type unrounded struct{ backend.Base }

// hidden is half.Wrap without what it says of rounded operands.
func hidden(dtype backend.DType) func(backend.Communicator) (backend.Communicator, error) {
	return func(comm backend.Communicator) (backend.Communicator, error) {
		c, err := half.New(comm, dtype)
		return unrounded{backend.Wrap(c)}, err
	}
}

// Gradients that are rounded where they are packed come out with the bits of those that
// are packed and then rounded: of both types, of any length, given back, on views, and
// missing.
func TestRoundedGradientsHaveTheSameBits(t *testing.T) {
	testenv.Each(t, testenv.Kinds(), func(t *testing.T, k testenv.Kind) {
		for _, size := range []int{1, 2, 3} {
			t.Run(fmt.Sprint(size), func(t *testing.T) {
				for _, dtype := range []backend.DType{backend.F16, backend.BF16} {
					for _, opts := range [][]Option{nil, {WithBuckets(1, 1)}, {WithBuckets(1000, 3000), WithSum()}} {
						allOn(t, k, size, func(r rank) error {
							want, err := roundFifty(r, false, append(opts, WithCompression(hidden(dtype))))
							if err != nil {
								return err
							}
							rounded := size > 1 && k != testenv.Staged && k != testenv.GPUsStaged
							got, err := roundFifty(r, rounded, append(opts, WithCompression(half.Wrap(dtype))))
							if err != nil {
								return err
							}
							for i := range want {
								if !bytes.Equal(got[i].Bytes(), want[i].Bytes()) {
									return fmt.Errorf("%v: gradient %d of %d elements has other bits", dtype, i%50, want[i].Len())
								}
							}
							return nil
						})
					}
				}
			})
		}
	})
}

// roundFifty returns the gradients of two steps, in the second of which most of those of
// the first are given back. Buckets are rounded where parameters are not apart from the
// communicator.
func roundFifty(r rank, rounded bool, opts []Option) (all []backend.Buffer, err error) {
	c := &guarded{Communicator: r.comm}
	g := gorgonia.NewGraph()
	rng := rand.New(rand.NewPCG(uint64(r.comm.Rank()), 3))
	var params, grads gorgonia.Nodes
	r.build.Lock()
	for i, n := range sizes() {
		dt := tensor.Float32
		if i%3 == 0 {
			dt = tensor.Float64
		}
		params = append(params, random(g, rng, fmt.Sprintf("p%d", i), dt, n))
		grads = append(grads, random(g, rng, fmt.Sprintf("g%d", i), dt, n))
	}
	missing := len(grads) - 3
	grads[missing] = gorgonia.NewVector(g, params[missing].Dtype(), gorgonia.WithName("missing"), gorgonia.WithShape(params[missing].Shape()...))
	r.build.Unlock()
	bound := slices.Concat(params, slices.Delete(slices.Clone(grads), missing, missing+1))
	if err := r.move(bound); err != nil {
		return nil, err
	}
	defer r.free(bound)
	d, err := New(c, params, append(slices.Clone(opts), WithUnused())...)
	if err != nil {
		return nil, err
	}
	defer d.Close()
	for _, b := range d.buckets {
		// Scalars of a model on a device are on the host.
		if want := rounded && (r.engine == nil || b.params[0].engine != nil); want != (b.half != 0) || want != (b.grads.DType() != b.data.DType()) {
			return nil, fmt.Errorf("%v is packed as %v", b, b.grads.DType())
		}
	}
	for range 2 {
		if err := d.UseGradients(grads); err != nil {
			return nil, err
		}
		got, err := d.Sync()
		if err != nil {
			return nil, err
		}
		r.build.Lock()
		for i := range got {
			v, _ := got[i].Grad()
			one, err := r.copied(v)
			if err != nil {
				return nil, err
			}
			all = append(all, one)
			if t, ok := v.(*tensor.Dense); ok {
				grads[i] = gorgonia.NewVector(g, t.Dtype(), gorgonia.WithName(fmt.Sprint("again", i)), gorgonia.WithShape(t.Shape()...), gorgonia.WithValue(t))
			}
		}
		r.build.Unlock()
	}
	if c.memory.Len() == 0 {
		return all, nil // a single rank
	}
	return all, c.check(d)
}

// countingDevice is a device whose queues, but for the default one, count.
type countingDevice struct {
	backend.Device
	queues *[]*counting
}

func (d countingDevice) NewQueue() (backend.Queue, error) {
	q, err := d.Device.NewQueue()
	if err != nil {
		return nil, err
	}
	counted := &counting{Queue: q}
	*d.queues = append(*d.queues, counted)
	return counted, nil
}

// Bind implements what devices may need.
func (d countingDevice) Bind() (func(), error) {
	if b, ok := d.Device.(residence.Binder); ok {
		return b.Bind()
	}
	return func() {}, nil
}

// countingComm is a recorder on queues that count.
type countingComm struct {
	recorder
	queues []*counting
}

func (c *countingComm) Device() backend.Device {
	return countingDevice{c.recorder.Device(), &c.queues}
}

func uncounted(q backend.Queue) backend.Queue {
	if counted, ok := q.(*counting); ok {
		return counted.Queue
	}
	return q
}

func (c *countingComm) Start(q backend.Queue, what backend.Collective, dst, src backend.Buffer) (backend.Work, error) {
	w, err := c.recorder.Start(uncounted(q), what, dst, src)
	if err != nil {
		return nil, err
	}
	return uncountedWork{w}, nil
}

type uncountedWork struct{ backend.Work }

func (w uncountedWork) Wait(q backend.Queue) error { return w.Work.Wait(uncounted(q)) }

// A step of a bucket on a device is one launch that rounds, one collective of 16 bits and
// one launch that widens: 12 bytes of memory for each element, beside the collective,
// where it takes 20 to pack them first.
func TestGradientsAreRoundedInThePassThatPacks(t *testing.T) {
	testenv.Each(t, testenv.OnDevices(), func(t *testing.T, k testenv.Kind) {
		for buckets, opts := range map[int64][]Option{1: nil, 2: {WithBuckets(60, 120)}, 3: {WithBuckets(1, 1)}} {
			for _, hooks := range []bool{false, true} {
				allOn(t, k, 2, func(r rank) error {
					// One more bucket, of the scalar, is on the host, and is rounded on the device.
					fused := counts{packs: buckets, casts: 1, widens: buckets + 1, nbytes: 12*45 + 12, reductions: buckets + 1}
					apart := counts{packs: buckets, casts: buckets + 1, widens: buckets + 1, nbytes: 20*45 + 12, reductions: buckets + 1}
					return errors.Join(
						countRounding(r, fused, hooks, append(opts, WithCompression(half.Wrap(backend.BF16)))),
						countRounding(r, apart, hooks, append(opts, WithCompression(hidden(backend.BF16)))))
				})
			}
		}
	})
}

// counts are those of a step.
type counts struct{ packs, casts, widens, nbytes, reductions int64 }

func (c *counts) add(k *counting) {
	c.packs += k.packs.Swap(0)
	c.casts += k.casts.Swap(0)
	c.widens += k.widens.Swap(0)
	c.nbytes += k.nbytes.Swap(0)
}

func countRounding(r rank, want counts, hooks bool, opts []Option) error {
	c := &countingComm{recorder: recorder{Communicator: r.comm}}
	return trainCounted(r, c, hooks, opts, func(counted *counting, d *DataParallel, vm gorgonia.VM) error {
		for step := range 3 {
			c.events = nil
			for _, q := range c.queues {
				new(counts).add(q)
			}
			new(counts).add(counted)
			if err := vm.RunAll(); err != nil {
				return err
			}
			grads, err := d.Sync()
			if err != nil {
				return err
			}
			got := counts{reductions: int64(len(c.reductions()))}
			for _, q := range append(c.queues, counted) {
				got.add(q)
			}
			if got != want {
				return fmt.Errorf("step %d, hooks %v: %+v, want %+v", step, hooks, got, want)
			}
			vm.Reset()
			if err := (SGD{Rate: 0.1}).Step(grads); err != nil {
				return err
			}
		}
		return nil
	})
}

// Ranks that round gradients to other types are told so before any of them travels.
func TestRoundingToOtherTypesIsAnError(t *testing.T) {
	errs := each(t, 2, func(r rank) error {
		dtype := backend.F16
		if r.comm.Rank() == 1 {
			dtype = backend.BF16
		}
		r.build.Lock()
		w := random(gorgonia.NewGraph(), rand.New(rand.NewPCG(1, 1)), "w", tensor.Float32, 4)
		r.build.Unlock()
		_, err := New(r.comm, gorgonia.Nodes{w}, WithCompression(half.Wrap(dtype)))
		return err
	})
	for r, err := range errs {
		for _, part := range []string{"gradients of bucket 0 (w) are packed as f16 on rank 0", "as bf16 on rank 1", fmt.Sprintf("rank %d of", r)} {
			if !errors.Is(err, backend.ErrMismatch) || !strings.Contains(err.Error(), part) {
				t.Errorf("rank %d: the error %v does not contain %q", r, err, part)
			}
		}
	}
}
