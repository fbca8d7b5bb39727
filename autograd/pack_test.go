package autograd

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync/atomic"
	"testing"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/backend/compress/half"
	"github.com/euryale-ml/euryale/backend/cuda"
	"github.com/euryale-ml/euryale/internal/testenv"
	"github.com/euryale-ml/euryale/kernels"
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

// TestCaughtGradientsAreSaved: a gradient that was caught before its bucket is
// full is what it was, whatever becomes of its memory.
func TestCaughtGradientsAreSaved(t *testing.T) {
	changes := map[string]func(e *cuda.Engine, g *tensor.Dense) error{
		"nothing": func(*cuda.Engine, *tensor.Dense) error { return nil },
		"overwritten": func(_ *cuda.Engine, g *tensor.Dense) error {
			_, err := tensor.Neg(g, tensor.UseUnsafe())
			return err
		},
		"filled": func(e *cuda.Engine, g *tensor.Dense) error { return e.Memset(g, float32(7)) },
		"copied into": func(e *cuda.Engine, g *tensor.Dense) error {
			return e.Copy(g, tensor.New(tensor.WithShape(2, 2), tensor.Of(tensor.Float32)))
		},
		"transposed": func(_ *cuda.Engine, g *tensor.Dense) error { return errors.Join(g.T(), g.Transpose()) },
		"recycled": func(e *cuda.Engine, g *tensor.Dense) error {
			other, err := e.ToDevice(tensor.New(tensor.WithShape(2, 2), tensor.Of(tensor.Float32)))
			if err != nil {
				return err
			}
			e.Reset()
			for range 3 {
				if _, err := tensor.Sub(other, float32(1)); err != nil {
					return err
				}
			}
			return e.Free(other, int64(other.MemSize()))
		},
	}
	testenv.Each(t, testenv.OnDevices(), func(t *testing.T, k testenv.Kind) {
		for name, change := range changes {
			for _, bucket := range []int{1, 1000} {
				for size, rounded := range map[int]backend.DType{1: backend.F32, 2: backend.BF16} {
					allOn(t, k, size, func(r rank) error {
						if err := checkSaved(r, bucket, rounded, change); err != nil {
							return fmt.Errorf("%s, buckets of %d bytes, as %v: %w", name, bucket, rounded, err)
						}
						return nil
					})
				}
			}
		}
	})
}

// checkSaved catches gradients that are the same on all ranks.
func checkSaved(r rank, bucket int, rounded backend.DType, change func(*cuda.Engine, *tensor.Dense) error) error {
	rng := rand.New(rand.NewPCG(1, 1))
	r.build.Lock()
	g := gorgonia.NewGraph()
	var params gorgonia.Nodes
	for _, name := range []string{"a", "b"} {
		params = append(params, newParam(g, rng, name, 2, 2))
	}
	r.build.Unlock()
	if err := r.move(params); err != nil {
		return err
	}
	defer r.free(params)
	opts := []Option{WithBuckets(bucket, bucket)}
	if rounded != backend.F32 {
		opts = append(opts, WithCompression(half.Wrap(rounded)))
	}
	d, err := New(r.comm, params, opts...)
	if err != nil {
		return err
	}
	defer d.Close()
	for range 3 {
		var want [2][]float32
		for i, p := range slices.Backward(d.params) {
			v, err := tensor.Add(p.node.Value(), float32(i))
			if err != nil {
				return err
			}
			before, err := r.engine.ToHost(v.(*tensor.Dense))
			if err != nil {
				return err
			}
			want[i] = before.Float32s()
			if err := round(want[i], rounded); err != nil {
				return err
			}
			if err := d.catch(p, v); err != nil {
				return err
			}
			if err := change(r.engine, v.(*tensor.Dense)); err != nil {
				return err
			}
		}
		grads, err := d.Sync()
		if err != nil {
			return err
		}
		for i, g := range grads {
			v, _ := g.Grad()
			got, err := r.copied(v)
			if err != nil {
				return err
			}
			if !slices.Equal(backend.View[float32](got), want[i]) {
				return fmt.Errorf("gradient %d is %v, want %v", i, backend.View[float32](got), want[i])
			}
		}
	}
	return nil
}

// round rounds numbers to another type and back.
func round(x []float32, d backend.DType) error {
	narrow := backend.Of(make([]float32, len(x))).As(d).Slice(0, len(x))
	return errors.Join(kernels.Host{}.Cast(narrow, backend.Of(x)), kernels.Host{}.Cast(backend.Of(x), narrow))
}

// TestSharedGradientsOnDevice: where two parameters share a gradient, and with it
// the backward pass that Gorgonia computes in place, hooks change no bit.
func TestSharedGradientsOnDevice(t *testing.T) {
	testenv.Each(t, testenv.OnDevices(), func(t *testing.T, k testenv.Kind) {
		var want [][]float32
		for _, opts := range [][]Option{nil, {WithBuckets(1, 1)}} {
			for _, hooks := range []bool{false, true} {
				allOn(t, k, 1, func(r rank) error {
					got, err := sharedGradients(r, hooks, opts)
					if want == nil {
						want = got
					}
					if err == nil && !slices.EqualFunc(got, want, slices.Equal[[]float32]) {
						err = fmt.Errorf("hooks %v: %v, want %v", hooks, got, want)
					}
					return err
				})
			}
		}
	})
}

// sharedGradients are those of loss = mean((tanh(a+b)^3 * w * c)^2), in which the
// gradients of a and b are one value.
func sharedGradients(r rank, hooks bool, opts []Option) (all [][]float32, err error) {
	rng := rand.New(rand.NewPCG(2, 2))
	g := gorgonia.NewGraph()
	var params gorgonia.Nodes
	for _, name := range []string{"a", "b", "w", "c"} {
		params = append(params, newParam(g, rng, name, 5, 3))
	}
	if err := r.move(params); err != nil {
		return nil, err
	}
	defer r.free(params)
	d, err := New(r.comm, params, opts...)
	if err != nil {
		return nil, err
	}
	defer d.Close()
	use := func(w *gorgonia.Node) *gorgonia.Node {
		if !hooks {
			return w
		}
		return gorgonia.Must(d.Hook(w))
	}
	err = must(func() {
		h := gorgonia.Must(gorgonia.Tanh(gorgonia.Must(gorgonia.Add(use(params[0]), use(params[1])))))
		h = gorgonia.Must(gorgonia.HadamardProd(gorgonia.Must(gorgonia.Cube(h)), use(params[2])))
		h = gorgonia.Must(gorgonia.HadamardProd(h, use(params[3])))
		loss := gorgonia.Must(gorgonia.Mean(gorgonia.Must(gorgonia.Square(h))))
		if _, err := gorgonia.Grad(loss, params...); err != nil {
			panic(err)
		}
	})
	if err != nil {
		return nil, err
	}
	vm, err := r.machine(g)
	if err != nil {
		return nil, err
	}
	defer vm.Close()
	for range 3 {
		if err := vm.RunAll(); err != nil {
			return nil, err
		}
		grads, err := d.Sync()
		if err != nil {
			return nil, err
		}
		vm.Reset()
		all = all[:0]
		for _, g := range grads {
			v, _ := g.Grad()
			got, err := r.copied(v)
			if err != nil {
				return nil, err
			}
			all = append(all, slices.Clone(backend.View[float32](got)))
		}
	}
	return all, nil
}
