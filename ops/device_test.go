package ops

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/cuda"
	"github.com/euryale-ml/euryale/internal/testing/fakedevice"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/internal/testing/testenv"
	"github.com/euryale-ml/euryale/internal/testing/testranks"
)

// attention is a graph of an AllToAll, an AllReduce, a product by element and a
// sum: loss = sum(w * AllReduce(AllToAll(x)^2)), with x [2, 3, 2*P] and w of the
// shape [2, 3*P, 2].
func attention(comm backend.Communicator, x, w *gorgonia.Node) (*gorgonia.Node, error) {
	return chain(x, newStep(comm), gorgonia.Square,
		func(y *gorgonia.Node) (*gorgonia.Node, error) { return AllReduce(comm, backend.Sum, y) },
		func(y *gorgonia.Node) (*gorgonia.Node, error) { return gorgonia.HadamardProd(y, w) },
		func(y *gorgonia.Node) (*gorgonia.Node, error) { return gorgonia.Sum(y) })
}

func newStep(comm backend.Communicator) func(*gorgonia.Node) (*gorgonia.Node, error) {
	return func(x *gorgonia.Node) (*gorgonia.Node, error) { return AllToAll(comm, 2, 1, x) }
}

// TestStagedGraphTakesNoMemory runs a graph of host tensors forward and backward, many times, where
// ranks communicate on the host or on a device: memory does not grow, and loss and gradients have
// the bits that they have on the host. Graphs on devices are package vm's.
func TestStagedGraphTakesNoMemory(t *testing.T) { testenv.Each(t, testenv.OnHosts(), checkSteady) }

func checkSteady(t *testing.T, k testenv.Kind) {
	runs := 200
	if k.OnGPU() || full() {
		runs = 1000
	}
	for _, P := range []int{1, 2, 4} {
		t.Run(fmt.Sprint(P), func(t *testing.T) {
			want := runAttention(t, P, testenv.Hosts, 1)
			if got := runAttention(t, P, k, runs); !slices.EqualFunc(got, want, arr.equal) {
				t.Errorf("%v, on the host %v", got, want)
			}
		})
	}
}

// runAttention returns loss and gradients of each rank.
func runAttention(t *testing.T, P int, k testenv.Kind, runs int) []arr {
	xs := randomArrs(rand.New(rand.NewPCG(21, 0)), P, tensor.Float32, 2, 3, 2*P)
	ws := randomArrs(rand.New(rand.NewPCG(22, 0)), P, tensor.Float32, 2, 3*P, 2)
	g := ranksOn(t, P, k)
	results := make([][]arr, P)
	err := g.run(func(comm backend.Communicator, build sync.Locker) error {
		r := comm.Rank()
		build.Lock()
		graph := gorgonia.NewGraph()
		x, w := xs[r].node(graph, "x", tensor.Float32), ws[r].node(graph, "w", tensor.Float32)
		loss, err := attention(comm, x, w)
		var grads gorgonia.Nodes
		var m gorgonia.VM
		if err == nil {
			if grads, err = gorgonia.Grad(loss, x, w); err == nil {
				m = gorgonia.NewTapeMachine(graph)
			}
		}
		build.Unlock()
		testranks.NoError(err)
		defer m.Close()
		testranks.NoError(runSteadily(m, comm.Device(), runs))
		for _, n := range append(gorgonia.Nodes{loss}, grads...) {
			results[r] = append(results[r], valueArr(n.Value()))
		}
		return nil
	})
	require.That(t, err == nil, "%s: %v", k, err)
	return slices.Concat(results...)
}

// runSteadily runs a machine many times. No run after the first may leave memory of the device
// taken, or take some from the driver.
func runSteadily(m gorgonia.VM, d backend.Device, runs int) error {
	var first, last footprint
	for i := range runs {
		if err := m.RunAll(); err != nil {
			return Cause(err)
		}
		m.Reset()
		if i == 0 {
			first = footprintOf(d)
		}
	}
	last = footprintOf(d)
	if slack := 1 << 20; last.free > first.free-slack && last.free < first.free+slack {
		last.free = first.free // other programs may use the device too
	}
	if last != first {
		return fmt.Errorf("after one run %+v, after %d runs %+v", first, runs, last)
	}
	return nil
}

// footprint is what runs must not change.
type footprint struct {
	taken int // bytes of the device's allocator
	calls int // of the driver's allocation
	free  int // bytes that the driver has left
}

func footprintOf(d backend.Device) (f footprint) {
	switch d := d.(type) {
	case *fakedevice.Device:
		_, f.taken = d.Live()
	case interface {
		MemoryStats() cuda.MemoryStats
		FreeMemory() (free, total int, err error)
	}:
		held := d.MemoryStats()
		f.taken, f.calls = held.InUse+held.Cached, held.Mallocs
		f.free, _, _ = d.FreeMemory()
	}
	return f
}

// newAllReduce returns the op of a sum over the ranks, without a graph.
func newAllReduce(comm backend.Communicator, dt tensor.Dtype, shape tensor.Shape) *collectiveOp {
	return &collectiveOp{comm: comm, dtype: dt, in: slices.Clone(shape), out: slices.Clone(shape),
		fwd: transform{kind: backend.AllReduce, scatter: none, gather: none, scale: 1}}
}

// TestHolderKeepsBits: what is kept has the bits of the gradient, and what is not
// kept is zero, also if the gradient is infinite or not a number.
func TestHolderKeepsBits(t *testing.T) {
	const P = 2
	nan, inf := math.NaN(), math.Inf(1)
	x := []arr{{[]int{6}, []float64{1, 0, 1, 0, 1, -7}}, {[]int{6}, []float64{0, 1, 0, 1, 0, -8}}}
	v := arr{[]int{6}, []float64{inf, inf, nan, nan, math.Copysign(0, -1), -3}}
	want := [][]float64{{inf, 0, nan, 0, math.Copysign(0, -1), -3}, {0, inf, 0, nan, 0, 0}}
	testenv.Each(t, testenv.OnHosts(), func(t *testing.T, k testenv.Kind) {
		g := ranksOn(t, P, k)
		for _, dt := range []tensor.Dtype{tensor.Float64, tensor.Float32} {
			_, dxs, err := g.pullback(dt, x, []arr{v, newArr(6)}, reduceTo(backend.Max, 0))
			require.NoError(t, err)
			for r := range P {
				require.Check(t, slices.EqualFunc(dxs[r].data, want[r], sameBits),
					"%v, rank %d: %v, want %v", dt, r, dxs[r].data, want[r])
			}
		}
		for _, dt := range []tensor.Dtype{tensor.Int64, tensor.Int32, tensor.Int, tensor.Uint8} {
			_, dxs, err := g.pullback(dt, []arr{{[]int{3}, []float64{1, 5, 2}},
				{[]int{3}, []float64{3, 5, 2}}}, repeat(arr{[]int{3}, []float64{10, 20, 30}}, P),
				reducing(AllReduce, backend.Max))
			require.NoError(t, err)
			require.Check(t, slices.Equal(dxs[0].data, []float64{0, 40, 60}) &&
				slices.Equal(dxs[1].data, []float64{20, 0, 0}), "%v: %v", dt, dxs)
		}
	})
}

// sameBits reports whether two numbers are bitwise identical, or are both not a number.
func sameBits(a, b float64) bool {
	return math.Float64bits(a) == math.Float64bits(b) || math.IsNaN(a) && math.IsNaN(b)
}

// TestHolderKeepsBitsOnTheDevice: in the memory of a device, too, where plans of package vm start
// it.
func TestHolderKeepsBitsOnTheDevice(t *testing.T) {
	nan, inf, zero := math.NaN(), math.Inf(1), math.Copysign(0, -1)
	floats := [][]float64{{1, 0, nan, 0, 1, -7}, {0, 1, nan, 1, 0, -8}, {1, 1, nan, 1, 1, -7},
		{inf, inf, nan, nan, zero, -3}, {inf, 0, nan, 0, zero, -3}, {0, inf, 0, nan, 0, 0}}
	integers := [][]float64{{1, 5, 2}, {3, 5, 2}, {3, 5, 2}, {10, 20, 30}, {0, 20, 30}, {10, 0, 0}}
	testenv.Each(t, testenv.OnDevices(), func(t *testing.T, k testenv.Kind) {
		g := ranksOn(t, 2, k)
		for dt, c := range map[tensor.Dtype][][]float64{
			tensor.Float64: floats, tensor.Float32: floats,
			tensor.Int64: integers, tensor.Int32: integers, tensor.Uint8: integers,
		} {
			err := g.run(func(comm backend.Communicator, _ sync.Locker) error {
				r := comm.Rank()
				got, err := holdOnDevice(comm, dt, c[r], c[2], c[3])
				if want := c[4+r]; err == nil && !slices.EqualFunc(got, want, sameBits) {
					err = fmt.Errorf("rank %d: %v, want %v", r, got, want)
				}
				return err
			})
			require.Check(t, err == nil, "%v: %v", dt, err)
		}
	})
}

// holdOnDevice returns the elements of v that a rank holds: computed from x, y and v on the device.
func holdOnDevice(comm backend.Communicator, dt tensor.Dtype, x, y, v []float64) ([]float64,
	error) {
	op := &holderOp{comm: comm, dtype: dt, shape: tensor.Shape{len(x)}}
	memory, err := comm.Device().Alloc(4*alignment + op.Scratch())
	if err != nil {
		return nil, err
	}
	q, operands := comm.Device().Default(), make([]backend.Buffer, 3)
	for i, data := range [][]float64{x, y, v} {
		values, err := memoryOf(arr{op.shape, data}.value(dt))
		if err != nil {
			return nil, err
		}
		at := i * alignment
		operands[i] = memory.Slice(at, at+values.NBytes()).As(values.DType())
		if err := q.Move(operands[i], values); err != nil {
			return nil, err
		}
	}
	kept := memory.Slice(3*alignment, 3*alignment+operands[0].NBytes()).As(operands[0].DType())
	scratch := memory.Slice(4*alignment, memory.Len())
	if _, err := op.StartOn(q, kept, scratch, operands...); err != nil {
		return nil, err
	}
	got, err := onHost{comm}.here(kept)
	if err != nil {
		return nil, err
	}
	value, result, err := fresh(dt, op.shape)
	copy(result.Bytes(), got.Bytes())
	return valueArr(value).data, errors.Join(err, comm.Device().Free(memory))
}

// TestAbortNamesRankStaged: a collective that another rank has ended is an error that says which,
// also where it is staged.
func TestAbortNamesRankStaged(t *testing.T) {
	testenv.Each(t, testenv.OnHosts(), func(t *testing.T, k testenv.Kind) {
		g := ranksOn(t, 2, k)
		g.comms[1].Abort(errors.New("the test has had enough"))
		_, err := newAllReduce(g.comms[0], tensor.Float64, tensor.Shape{2, 3}).Do(
			newArr(2, 3).value(tensor.Float64))
		text, rank := fmt.Sprint(err), "rank 0 of "+g.comms[0].Name()
		require.Check(t, errors.Is(err, backend.ErrAborted) && strings.Count(text, rank) == 1 &&
			strings.Contains(text, rank+": because of rank 1: aborted"), "%v, want %q in it, once",
			err, rank)
	})
}

// bindingComm is a communicator on a device that counts what calls prepare.
type bindingComm struct {
	backend.Communicator
	device *bindingDevice
}

type bindingDevice struct {
	backend.Device
	bound, unbound int
}

func (c bindingComm) Device() backend.Device { return c.device }

func (d *bindingDevice) Bind() (func(), error) {
	d.bound++
	return func() { d.unbound++ }, nil
}

// TestThreadIsBound: an operation prepares the thread that it runs on, and leaves
// it as it was.
func TestThreadIsBound(t *testing.T) {
	comm := ranksOn(t, 1, testenv.Staged).comms[0]
	d := &bindingDevice{Device: comm.Device()}
	op := newAllReduce(bindingComm{comm, d}, tensor.Float64, tensor.Shape{2})
	if _, err := op.Do(arr{[]int{2}, []float64{1, 2}}.value(tensor.Float64)); err != nil ||
		d.bound != 1 || d.unbound != 1 {
		t.Errorf("%v, bound %d times, unbound %d times", err, d.bound, d.unbound)
	}
}

// TestStridedOperandsOfManyAxes: more than one kernel takes.
func TestStridedOperandsOfManyAxes(t *testing.T) {
	shape := slices.Repeat([]int{2}, backend.MaxAxes+2)
	d := tensor.New(tensor.WithShape(shape...),
		tensor.WithBacking(tensor.Range(tensor.Float64, 0, product(shape))))
	axes := make([]int, len(shape))
	for i := range axes {
		axes[i] = len(axes) - 1 - i
	}
	require.NoError(t, d.T(axes...))
	testenv.Each(t, testenv.OnHosts(), func(t *testing.T, k testenv.Kind) {
		op := &collectiveOp{comm: ranksOn(t, 1, k).comms[0], fwd: transform{scatter: none,
			gather: none, scale: 1}, dtype: tensor.Float64, in: shape, out: shape}
		y := require.Value(op.Do(d))(t)
		got := valueArr(y)
		require.Check(t, got.equal(byCoordinates(t, d)), "%v", got)
	})
}
