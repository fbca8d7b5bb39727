package vm_test

import (
	"errors"
	"fmt"
	"hash"
	"hash/fnv"
	"slices"
	"strings"
	"testing"

	"github.com/chewxy/hm"
	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/autograd/solver"
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/backend/compress/sparse"
	"github.com/euryale-ml/euryale/internal/cuda"
	"github.com/euryale-ml/euryale/internal/testing/fakedevice"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/internal/testing/testenv"
	"github.com/euryale-ml/euryale/internal/testing/testranks"
	"github.com/euryale-ml/euryale/ops"
	"github.com/euryale-ml/euryale/vm"
)

// collectives are graphs with every kind of collective and their gradients: of pieces that lie
// apart or one after the other, of even and uneven lengths, of transposed operands, and of extrema.
var collectives = map[string]func(comm backend.Communicator, x node) (node, error){
	"AllToAll": func(comm backend.Communicator, x node) (node, error) {
		return ops.AllToAll(comm, 1, 0, x)
	},
	"AllToAllUneven": func(comm backend.Communicator, x node) (node, error) {
		P := comm.Size()
		return ops.AllToAll(comm, 0, 1, x, ops.AllToAllSplits(backend.Even(x.Shape()[0], P),
			slices.Repeat([]int{x.Shape()[1]}, P)))
	},
	"AllReduceOfTransposed": func(comm backend.Communicator, x node) (node, error) {
		return ops.AllReduce(comm, backend.Sum, transpose(x, 1, 0))
	},
	"AllReduceMax": func(comm backend.Communicator, x node) (node, error) {
		return ops.AllReduce(comm, backend.Max, x)
	},
	"AllGather": func(comm backend.Communicator, x node) (node, error) {
		return ops.AllGather(comm, 1, x)
	},
	"ReduceScatter": func(comm backend.Communicator, x node) (node, error) {
		return ops.ReduceScatter(comm, backend.Sum, 1, x)
	},
	"Reduce": func(comm backend.Communicator, x node) (node, error) {
		return ops.Reduce(comm, backend.Sum, comm.Size()-1, x)
	},
	"Broadcast": func(comm backend.Communicator, x node) (node, error) {
		return ops.Broadcast(comm, comm.Size()-1, x)
	},
	"SplitAndGather": func(comm backend.Communicator, x node) (node, error) {
		lengths := ops.Splits(backend.Even(x.Shape()[0], comm.Size())...)
		part, err := ops.SplitForwardGatherBackward(comm, 0, ops.Down(comm), x, lengths)
		if err != nil {
			return nil, err
		}
		return ops.GatherForwardSplitBackward(comm, 0, ops.Up(comm), square(part), lengths)
	},
	"BesideAProduct": func(comm backend.Communicator, x node) (node, error) {
		y, err := ops.CopyToParallel(comm, x)
		if err != nil {
			return nil, err
		}
		return gorgonia.Mul(y, transpose(x, 1, 0))
	},
	"OfScalars": func(comm backend.Communicator, x node) (node, error) {
		return ops.AllReduce(comm, backend.Avg, sum(x))
	},
}

// collectiveModel has a loss that depends on y and so on the other ranks' variables, which are
// small integers.
func (r ranked) collectiveModel(collective func(backend.Communicator,
	node) (node, error)) (*model, node) {
	var x node
	m := r.build(func(t testing.TB, dt tensor.Dtype) *model {
		m := &model{g: gorgonia.NewGraph()}
		x = m.variable("x", dt, 5, 6*r.Comm.Size())
		m.params = nodes{x}
		y := must(collective(r.Comm, times(x, x)))
		m.grad(t, sum(square(y)))
		return m
	})
	r.feedIntegers(x, 0)
	return m, x
}

// feedIntegers gives x the integers of a run.
func (r ranked) feedIntegers(x node, run int) {
	data := x.Value().Data().([]float32)
	for i := range data {
		data[i] = float32((i*7+3*r.Comm.Rank()+run)%5 - 2)
	}
}

// TestCollectivesRunOnTheDevice: no operand goes through the host, in the first run, which is step
// by step, and in those after it, which are CUDA graphs where there are any, and no run takes
// memory. Losses and gradients equal those of a machine on the host.
func TestCollectivesRunOnTheDevice(t *testing.T) {
	testenv.Each(t, testenv.OnDevices(), func(t *testing.T, k testenv.Kind) {
		for name, collective := range collectives {
			for P := 2; P <= 3; P++ {
				t.Run(fmt.Sprint(name, " ", P), func(t *testing.T) {
					onRanks(t, k, P, func(r ranked) error {
						return r.runsOnDevice(collective, 0)
					})
				})
			}
		}
	})
}

// TestSparseAllReduceRunsOnTheDevice: as other collectives, but the first run takes memory, for the
// residual.
func TestSparseAllReduceRunsOnTheDevice(t *testing.T) {
	testenv.Each(t, testenv.OnDevices(), func(t *testing.T, k testenv.Kind) {
		for _, how := range []sparse.Selection{sparse.TopK(0.3), sparse.Threshold(2)} {
			err := testranks.Join(together(t, k, 2, func(r ranked) (err error) {
				if r.Comm, err = sparse.New(r.Comm, how); err != nil {
					return err
				}
				return errors.Join(r.runsOnDevice(func(comm backend.Communicator, x node) (node,
					error) {
					return ops.SparseAllReduce(comm, backend.Sum, x)
				}, 1), r.Comm.Close())
			}))
			require.Check(t, err == nil, "%v: %v", how, err)
		}
	})
}

// runsOnDevice compares runs on the device with those of a machine on the host. From one run on
// they take no memory.
func (r ranked) runsOnDevice(collective func(backend.Communicator, node) (node,
	error), settled int) error {
	const runs = 4
	var results [2][][]float64
	for i, device := range []backend.Device{nil, r.device} {
		model, x := r.collectiveModel(collective)
		m := testranks.Must(vm.New(model.g, device))
		if text := m.Plan().String(); strings.Contains(text, "host_ops=0") != (device != nil) {
			return errors.Join(fmt.Errorf("on %v: %s", device, text), m.Close())
		}
		before := 0
		for run := range runs {
			if run == settled {
				before = held(device)
			}
			r.feedIntegers(x, run)
			if err := m.RunAll(); err != nil {
				return errors.Join(err, m.Close())
			}
			if now := held(device); run >= settled && now != before {
				return errors.Join(
					fmt.Errorf("run %d: the device has given out %d bytes, %d before", run, now,
						before), m.Close())
			}
			dx, err := x.Grad()
			if err != nil {
				return errors.Join(err, m.Close())
			}
			results[i] = append(results[i], slices.Clone(floats(r.t, dx)),
				slices.Clone(floats(r.t, model.loss)))
		}
		testranks.NoError(m.Close())
	}
	if !slices.EqualFunc(results[0], results[1], slices.Equal) {
		return fmt.Errorf("on the device %v, on the host %v", results[1], results[0])
	}
	return nil
}

// TestLocalPartsAreViews: where an operation of ops only passes its operand on, or this rank's part
// of it, forward or backward, a plan has no step for it. All ranks have the same x; the loss is the
// sum of y*y.
func TestLocalPartsAreViews(t *testing.T) {
	for name, c := range map[string]struct {
		apply    func(comm backend.Communicator, x node) (node, error)
		gradient float32 // by x
		hostOps  int
	}{
		"copy":   {ops.CopyToParallel, 4, 1},
		"reduce": {ops.ReduceFromParallel, 4, 1},
		"split": {func(comm backend.Communicator, x node) (node, error) {
			return ops.SplitForwardGatherBackward(comm, 0, ops.Unscaled, x, ops.Splits(2, 4))
		}, 2, 1},
		"gather": {func(comm backend.Communicator, x node) (node, error) {
			return ops.GatherForwardSplitBackward(comm, 0, ops.Unscaled, x)
		}, 2, 1},
		"scaled": {func(comm backend.Communicator, x node) (node, error) {
			return ops.GatherForwardSplitBackward(comm, 0, ops.Up(comm), x)
		}, 4, 2},
	} {
		err := testranks.Join(together(t, testenv.Hosts, 2, func(r ranked) error {
			var x node
			m := r.build(func(t testing.TB, dt tensor.Dtype) *model {
				m := &model{g: gorgonia.NewGraph()}
				x = m.variable("x", dt, 6)
				m.params = nodes{x}
				m.grad(t, sum(square(must(c.apply(r.Comm, x)))))
				return m
			})
			data := x.Value().Data().([]float32)
			for i := range data {
				data[i] = float32(i - 2)
			}
			machine, err := vm.New(m.g, nil)
			testranks.NoError(err)
			err = machine.RunAll()
			if want, text := fmt.Sprintf("host_ops=%d", c.hostOps),
				machine.Plan().String(); !strings.Contains(text, want) {
				err = errors.Join(err, fmt.Errorf("no %s in %s", want, text))
			}
			dx, failed := x.Grad()
			testranks.NoError(errors.Join(err, failed, machine.Close()))
			for i, v := range data {
				if got := dx.Data().([]float32)[i]; got != c.gradient*v {
					err = errors.Join(err, fmt.Errorf("gradient %d is %v, want %v", i, got,
						c.gradient*v))
				}
			}
			return err
		}))
		require.Check(t, err == nil, "%s: %v", name, err)
	}
}

// held returns the bytes that a device has given out.
func held(d backend.Device) (n int) {
	switch d := d.(type) {
	case *fakedevice.Device:
		_, n = d.Live()
	case interface{ MemoryStats() cuda.MemoryStats }:
		n = d.MemoryStats().InUse
	}
	return n
}

// TestDeviceOpsBesideExchanges: a graph whose ranks exchange activations in its middle and
// gradients at its end trains bitwise identically on device and host.
func TestDeviceOpsBesideExchanges(t *testing.T) {
	testenv.Each(t, testenv.OnDevices(), func(t *testing.T, k testenv.Kind) {
		onRanks(t, k, 2, func(r ranked) error {
			var weights [2][][]float64
			for i, device := range []backend.Device{nil, r.device} {
				model, x := r.collectiveModel(collectives["AllToAll"])
				m := testranks.Must(vm.New(model.g, device, vm.WithSolver(&solver.SGD{Rate: 1. /
					1024}, x), vm.WithDataParallel(r.Comm)))
				for range 4 {
					if err := m.RunAll(); err != nil {
						return errors.Join(err, m.Close())
					}
				}
				testranks.NoError(m.Close())
				weights[i] = model.weights(r.t)
			}
			if !slices.EqualFunc(weights[0], weights[1], slices.Equal) {
				return fmt.Errorf("on the device %v, on the host %v", weights[1], weights[0])
			}
			return nil
		})
	})
}

// TestCollectivesBesideProducts: what adds up the gradient of an operand is under way beside the
// product that is the other one's gradient. TestCollectivesRunOnTheDevice compares its results.
func TestCollectivesBesideProducts(t *testing.T) {
	testenv.Each(t, testenv.OnDevices(), func(t *testing.T, k testenv.Kind) {
		require.NoError(t, testranks.Join(together(t, k, 2, func(r ranked) error {
			model, _ := r.collectiveModel(collectives["BesideAProduct"])
			m, err := vm.New(model.g, r.device)
			testranks.NoError(err)
			if text := m.Plan().String(); !strings.Contains(text, "until step") {
				err = fmt.Errorf("no collective runs beside others in\n%s", text)
			}
			return errors.Join(err, m.Close())
		})))
	})
}

// TestLostRankEndsDeviceOp: a rank that is gone is an error of the others' RunAll that names it.
func TestLostRankEndsDeviceOp(t *testing.T) {
	testenv.Each(t, testenv.OnDevices(), func(t *testing.T, k testenv.Kind) {
		lostRankEndsDeviceOp(t, k, "AllReduceOfTransposed")
		lostRankEndsDeviceOp(t, k, "BesideAProduct")
	})
}

func lostRankEndsDeviceOp(t *testing.T, k testenv.Kind, name string) {
	t.Helper()
	const runs = 3 // step by step, recorded, and launched
	errs := together(t, k, 2, func(r ranked) error {
		model, _ := r.collectiveModel(collectives[name])
		m := testranks.Must(vm.New(model.g, r.device))
		for range runs {
			if err := m.RunAll(); err != nil {
				return errors.Join(err, m.Close())
			}
		}
		if r.Comm.Rank() == 1 {
			r.Comm.Abort(errors.New("rank 1 has had enough"))
			return m.Close()
		}
		return errors.Join(m.RunAll(), m.Close())
	})
	require.Fails(t, fmt.Sprintf("%s: rank 0", name), errs[0], "rank 1 has had enough")
	if errs[1] != nil {
		t.Errorf("%s: rank 1: %v", name, errs[1])
	}
}

// halved is a program's own operation: x/2, on host tensors and on devices.
type halved struct{}

var _ vm.DeviceOp = halved{}

func (halved) Arity() int { return 1 }
func (halved) Type() hm.Type {
	return hm.NewFnType(hm.TypeVariable('a'), hm.TypeVariable('a'))
}
func (halved) InferShape(in ...gorgonia.DimSizer) (tensor.Shape, error) {
	return in[0].(tensor.Shape).Clone(), nil
}
func (halved) Do(in ...gorgonia.Value) (gorgonia.Value, error) {
	return tensor.Mul(in[0].(*tensor.Dense), float32(0.5))
}
func (halved) ReturnsPtr() bool      { return true }
func (halved) CallsExtern() bool     { return false }
func (halved) OverwritesInput() int  { return -1 }
func (halved) WriteHash(h hash.Hash) { fmt.Fprint(h, "halved") }
func (halved) Hashcode() uint32 {
	h := fnv.New32a()
	h.Write([]byte("halved"))
	return h.Sum32()
}
func (halved) String() string { return "halved" }

func (halved) RunsOn(backend.Device) bool { return true }
func (halved) Scratch() int               { return 0 }
func (halved) StartOn(q backend.Queue, y, _ backend.Buffer, x ...backend.Buffer) (backend.Work,
	error) {
	return nil, q.Divide(y, x[0], 2)
}

// TestDeviceOp: an operation of somebody else runs on the device, and by its Do on the host.
func TestDeviceOp(t *testing.T) {
	testenv.Each(t, testenv.OnDevices(), func(t *testing.T, k testenv.Kind) {
		require.NoError(t, testranks.Join(together(t, k, 1, func(r ranked) error {
			for _, device := range []backend.Device{nil, r.device} {
				m := &model{g: gorgonia.NewGraph()}
				x := m.variable("x", tensor.Float32, 3, 4)
				y := must(gorgonia.ApplyOp(halved{}, transpose(x, 1, 0)))
				machine, err := vm.New(m.g, device)
				testranks.NoError(err)
				for range 3 {
					if err := machine.RunAll(); err != nil {
						return errors.Join(err, machine.Close())
					}
				}
				if want := fmt.Sprintf("host_ops=%d", map[bool]int{true: 1}[device ==
					nil]); !strings.Contains(machine.Plan().String(), want) {
					err = fmt.Errorf("no %s in %v", want, machine.Plan())
				}
				in, out := floats(r.t, x.Value()), floats(r.t, y.Value())
				for i := range out {
					if want := in[i%3*4+i/3] / 2; out[i] != want {
						err = fmt.Errorf("element %d is %v, want %v", i, out[i], want)
					}
				}
				testranks.NoError(errors.Join(err, machine.Close()))
			}
			return nil
		})))
	})
}
