package cuda

import (
	"errors"
	"fmt"
	"hash"
	"hash/fnv"
	"slices"
	"sync"
	"testing"

	"github.com/chewxy/hm"
	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/backend/fakedevice"
	"github.com/euryale-ml/euryale/backend/host"
	"github.com/euryale-ml/euryale/internal/testranks"
	"github.com/euryale-ml/euryale/rendezvous"
)

// allReduce is the least that an operation from outside needs of an engine:
// Buffer for its operand, Workspace and Tensor for its result, and the queue.
type allReduce struct {
	e    *Engine
	comm backend.Communicator
}

func (o allReduce) Arity() int { return 1 }
func (o allReduce) Type() hm.Type {
	return hm.NewFnType(hm.TypeVariable('a'), hm.TypeVariable('a'))
}
func (o allReduce) InferShape(in ...gorgonia.DimSizer) (tensor.Shape, error) {
	return in[0].(tensor.Shape).Clone(), nil
}
func (o allReduce) Do(in ...gorgonia.Value) (gorgonia.Value, error) {
	x := in[0].(tensor.Tensor)
	src, err := o.e.Buffer(x)
	if err != nil {
		return nil, err
	}
	dst, err := o.e.Workspace(src.DType(), src.Len())
	if err != nil {
		return nil, err
	}
	w, err := o.comm.Start(o.e.Queue(), backend.Collective{Kind: backend.AllReduce}, dst, src)
	if err != nil {
		return nil, err
	}
	if err := w.Wait(o.e.Queue()); err != nil {
		return nil, err
	}
	return o.e.Tensor(dst, x.Dtype(), x.Shape()...)
}
func (o allReduce) ReturnsPtr() bool      { return true }
func (o allReduce) CallsExtern() bool     { return false }
func (o allReduce) OverwritesInput() int  { return -1 }
func (o allReduce) WriteHash(h hash.Hash) { fmt.Fprint(h, "allreduce", o.comm.Name()) }
func (o allReduce) Hashcode() uint32 {
	h := fnv.New32a()
	o.WriteHash(h)
	return h.Sum32()
}
func (o allReduce) String() string       { return "AllReduce" }
func (o allReduce) DiffWRT(n int) []bool { return []bool{true} }
func (o allReduce) SymDiff(_ gorgonia.Nodes, _, grad *gorgonia.Node) (gorgonia.Nodes, error) {
	n, err := gorgonia.ApplyOp(o, grad)
	return gorgonia.Nodes{n}, err
}

func TestCollectivesRunOnDeviceTensors(t *testing.T) {
	guarded(t, newEngine(t)) // the communicator is one of the host
	const P = 2
	worlds := must[[]*rendezvous.World](t)(rendezvous.Local(P, 0))
	var building sync.Mutex // Gorgonia builds one graph at a time
	rank := func(r int) error {
		defer worlds[r].Close()
		inner, err := host.New().Connect(t.Context(), worlds[r])
		if err != nil {
			return err
		}
		e := newEngine(t)
		comm := fakedevice.Over(inner, guarded(t, e))
		defer comm.Close()
		building.Lock()
		x := onDevice(t, e, counting(tensor.Float32, 3, 4))
		w := onDevice(t, e, counting(tensor.Float32, 4, 3))
		g := gorgonia.NewGraph()
		xn := gorgonia.NewMatrix(g, tensor.Float32, gorgonia.WithShape(3, 4), gorgonia.WithName("x"), gorgonia.WithValue(x))
		wn := gorgonia.NewMatrix(g, tensor.Float32, gorgonia.WithShape(4, 3), gorgonia.WithName("w"), gorgonia.WithValue(w))
		scaled := node(gorgonia.Mul(xn, gorgonia.NewConstant(float32(r+1))))
		y := node(gorgonia.ApplyOp(allReduce{e, comm}, scaled))
		loss := sum(node(gorgonia.HadamardProd(node(gorgonia.Square(y)), node(gorgonia.Transpose(wn, 1, 0)))))
		grads, gradErr := gorgonia.Grad(loss, xn)
		m, err := e.NewMachine(g)
		building.Unlock()
		if err := errors.Join(gradErr, err); err != nil {
			return err
		}
		defer m.Close()
		before := e.Stats()
		for range 20 {
			if err := m.RunAll(); err != nil {
				return err
			}
			m.Reset()
		}
		after := e.Stats()
		if after.Uploads != before.Uploads || after.Downloads != before.Downloads {
			return fmt.Errorf("tensors were copied between host and device: %+v", after)
		}
		// loss = sum of ranks of sum((3x)^2 w'), so dx of rank r is
		// (r+1) * P * 2 * 3x * w'.
		dx := floats(t, e, grads[0].Value())
		xs, ws := floats(t, e, x), floats(t, e, w)
		want := make([]float64, len(dx))
		for i := range want {
			want[i] = float64(r+1) * P * 2 * 3 * xs[i] * ws[i%4*3+i/4]
		}
		if !slices.Equal(dx, want) {
			return fmt.Errorf("the gradient is %v, want %v", dx, want)
		}
		return nil
	}
	ok(t, testranks.All(P, rank))
}

func TestTheRestOfTheOperations(t *testing.T) {
	e := newEngine(t)
	a := tensor.New(tensor.WithBacking([]float64{1, 2, 4, 8}), tensor.WithShape(2, 2))
	d := onDevice(t, e, a)
	same(t, e, "pow", must[tensor.Tensor](t)(tensor.Pow(d, float64(2))), must[tensor.Tensor](t)(tensor.Square(a)))
	same(t, e, "pow of tensors", must[tensor.Tensor](t)(tensor.Pow(d, d)), must[tensor.Tensor](t)(tensor.Pow(a, a)))
	same(t, e, "div", must[tensor.Tensor](t)(tensor.Div(d, float64(2))), must[tensor.Tensor](t)(tensor.Div(a, float64(2))))
	same(t, e, "div of a scalar", must[tensor.Tensor](t)(tensor.Div(float64(8), d)), must[tensor.Tensor](t)(tensor.Div(float64(8), a)))
	same(t, e, "clamp", must[tensor.Tensor](t)(tensor.Clamp(d, float64(2), float64(4))), must[tensor.Tensor](t)(tensor.Clamp(a, float64(2), float64(4))))
	scalar := tensor.New(tensor.FromScalar(float64(3)))
	want := must[tensor.Tensor](t)(tensor.Mul(a, scalar))
	tensor.WithEngine(e)(scalar) // as a machine does
	same(t, e, "scalar tensor", must[tensor.Tensor](t)(tensor.Mul(d, scalar)), want)
	for _, dt := range dtypes {
		x := counting(dt, 3)
		one := must[tensor.Tensor](t)(e.Max(onDevice(t, e, x)))
		same(t, e, "scalar result as operand", must[tensor.Tensor](t)(e.AddScalar(onDevice(t, e, x), one, true)),
			must[tensor.Tensor](t)(tensor.Add(x, must[*tensor.Dense](t)(x.Max()))))
	}
}
