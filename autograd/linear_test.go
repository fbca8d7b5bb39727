package autograd

import (
	"errors"
	"fmt"
	"slices"
	"testing"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/autograd/solver"
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/testing/testenv"
)

// linear is a model whose gradients are its data, so that training it is exact
// and its end can be told:
//
//	loss = sum(w' * x) + sum(repeat(b) * x) + sum over i of sum(v[i] * c[i])
//
// with w [4, 6], b [1, 4], x [6, 4] and vectors of many lengths.
type linear struct {
	rank
	g            *gorgonia.ExprGraph
	data, params gorgonia.Nodes // x and c; w, b and v
}

var linearLengths = []int{2, 3, 127, 1000}

// at is element i of data, in a step of a rank.
func at(data, i, step, rank int) float64 { return float64((7*i+3*step+5*rank+data)%9 - 4) }

func newLinear(r rank) (*linear, error) {
	r.build.Lock()
	defer r.build.Unlock()
	m := &linear{rank: r, g: gorgonia.NewGraph()}
	shapes := [][]int{{6, 4}}
	params := [][]int{{4, 6}, {1, 4}}
	for _, n := range linearLengths {
		shapes, params = append(shapes, []int{n}), append(params, []int{n})
	}
	for i, shape := range shapes {
		m.data = append(m.data, m.node(fmt.Sprint("data", i), shape))
	}
	for i, shape := range params {
		m.params = append(m.params, m.node(fmt.Sprint("param", i), shape))
	}
	return m, nil
}

func (m *linear) node(name string, shape []int) *gorgonia.Node {
	v := tensor.New(tensor.WithShape(shape...), tensor.Of(tensor.Float32))
	return gorgonia.NewTensor(m.g, tensor.Float32, len(shape), gorgonia.WithName(name),
		gorgonia.WithShape(shape...), gorgonia.WithValue(v))
}

// feed gives the data of a step to the graph.
func (m *linear) feed(step int) {
	for k, n := range m.data {
		values := make([]float32, n.Shape().TotalSize())
		for i := range values {
			values[i] = float32(at(k, i, step, m.comm.Rank()))
		}
		copy(n.Value().(*tensor.Dense).Float32s(), values)
	}
}

// run runs the graph with the data of a step.
func (m *linear) run(vm gorgonia.VM, step int) error {
	m.feed(step)
	return vm.RunAll()
}

// build adds the loss, with hooks if d catches gradients.
func (m *linear) build(d *DataParallel, hooks bool) (gorgonia.VM, error) {
	m.rank.build.Lock()
	defer m.rank.build.Unlock()
	use := func(w *gorgonia.Node) *gorgonia.Node {
		if !hooks {
			return w
		}
		return gorgonia.Must(d.Hook(w))
	}
	sum := func(x *gorgonia.Node) *gorgonia.Node { return gorgonia.Must(gorgonia.Sum(x)) }
	err := must(func() {
		x := m.data[0]
		loss := sum(
			gorgonia.Must(
				gorgonia.HadamardProd(gorgonia.Must(gorgonia.Transpose(use(m.params[0]), 1, 0)),
					x)))
		loss = gorgonia.Must(
			gorgonia.Add(
				loss, sum(gorgonia.Must(gorgonia.BroadcastHadamardProd(use(m.params[1]), x,
					[]byte{0}, nil)))))
		for i := range linearLengths {
			loss = gorgonia.Must(
				gorgonia.Add(
					loss,
					sum(gorgonia.Must(gorgonia.HadamardProd(use(m.params[2+i]), m.data[1+i])))))
		}
		if _, err := gorgonia.Grad(loss, m.params...); err != nil {
			panic(err)
		}
	})
	if err != nil {
		return nil, err
	}
	return gorgonia.NewTapeMachine(m.g), nil
}

// gradient returns element i of the gradient of parameter p.
func (m *linear) gradient(p, i, step, rank int) float64 {
	switch p {
	case 0:
		return at(0, i%6*4+i/6, step, rank)
	case 1:
		sum := 0.0
		for row := range 6 {
			sum += at(0, row*4+i, step, rank)
		}
		return sum
	}
	return at(p-1, i, step, rank)
}

// linearSteps and linearRate are few and a power of two: all is exact.
const (
	linearSteps = 10
	linearRate  = 1. / 8
)

// train trains, and checks the parameters' ends.
func (m *linear) train(hooks bool, opts ...Option) error {
	d, err := New(m.comm, m.params, opts...)
	if err != nil {
		return err
	}
	err = m.steps(d, hooks)
	return errors.Join(err, d.Close())
}

func (m *linear) steps(d *DataParallel, hooks bool) error {
	vm, err := m.build(d, hooks)
	if err != nil {
		return err
	}
	defer vm.Close()
	for step := range linearSteps {
		if err := m.step(d, vm, step); err != nil {
			return err
		}
	}
	for p, n := range m.params {
		got, err := copied(n.Value())
		if err != nil {
			return err
		}
		if want := m.end(p, n.Shape().TotalSize(), d.op); !slices.Equal(backend.View[float32](got),
			want) {
			return fmt.Errorf("hooks %v, parameter %d ends at %v, want %v", hooks, p,
				backend.View[float32](got), want)
		}
	}
	return d.Check()
}

// step is one step of training.
func (m *linear) step(d *DataParallel, vm gorgonia.VM, step int) error {
	if err := m.run(vm, step); err != nil {
		return errors.Join(err, d.Err())
	}
	grads, err := d.Sync()
	if err != nil {
		return err
	}
	vm.Reset()
	return (&solver.SGD{Rate: linearRate}).Step(grads)
}

// end returns what training must lead to.
func (m *linear) end(p, n int, op backend.ReduceOp) []float32 {
	P := m.comm.Size()
	w := make([]float32, n)
	for i := range w {
		total := 0.0
		for step := range linearSteps {
			for r := range P {
				total += m.gradient(p, i, step, r)
			}
		}
		if op == backend.Avg {
			total /= float64(P)
		}
		w[i] = float32(-linearRate * total)
	}
	return w
}

// TestTrainingIsExact trains on integers, on any number of ranks and anywhere.
func TestTrainingIsExact(t *testing.T) {
	testenv.Each(t, testenv.OnHosts(), func(t *testing.T, k testenv.Kind) {
		for _, size := range []int{1, 2, 3, 4} {
			t.Run(fmt.Sprint(size), func(t *testing.T) {
				allOn(t, k, size, func(r rank) error { return trainLinear(r) })
			})
		}
	})
}

// trainLinear trains with and without hooks, with buckets of several sizes.
func trainLinear(r rank) error {
	settings := [][]Option{{WithSum()}, {WithSum(), WithBuckets(1, 600)}}
	if r.comm.Size() != 3 { // a third is not exact
		settings = append(settings, nil)
	}
	for i, opts := range settings {
		for _, hooks := range []bool{false, true} {
			m, err := newLinear(r)
			if err == nil {
				err = m.train(hooks, opts...)
			}
			if err != nil {
				return fmt.Errorf("setting %d: %w", i, err)
			}
		}
	}
	return nil
}
