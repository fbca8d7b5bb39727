package vm_test

import (
	"fmt"
	"hash"
	"hash/fnv"
	"reflect"
	"testing"

	"github.com/chewxy/hm"
	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/vm"
)

// turning is an operation whose Do leaves the headers of its operands changed: it transposes the
// first one and reshapes the second one, as YOLOv3 does. Its value is the transpose of the first.
type turning struct{}

func (turning) Arity() int { return 2 }

func (turning) Type() hm.Type {
	m := gorgonia.TensorType{Dims: 2, Of: hm.TypeVariable('a')}
	return hm.NewFnType(m, m, m)
}

func (turning) InferShape(x ...gorgonia.DimSizer) (tensor.Shape, error) {
	return tensor.Shape{x[0].(tensor.Shape)[1], x[0].(tensor.Shape)[0]}, nil
}

func (turning) Do(x ...gorgonia.Value) (gorgonia.Value, error) {
	first, second := x[0].(*tensor.Dense), x[1].(*tensor.Dense)
	if got := second.Dims(); got != 2 {
		return nil, fmt.Errorf("the second operand has %d axes", got)
	}
	if err := second.Reshape(second.Size()); err != nil {
		return nil, err
	}
	if err := first.T(); err != nil {
		return nil, err
	}
	return first.Materialize().(*tensor.Dense).Clone().(*tensor.Dense), nil
}

func (turning) ReturnsPtr() bool      { return false }
func (turning) CallsExtern() bool     { return false }
func (turning) OverwritesInput() int  { return -1 }
func (turning) WriteHash(h hash.Hash) { fmt.Fprint(h, "turning") }
func (turning) String() string        { return "turning" }
func (turning) DiffWRT(int) []bool    { return []bool{true, false} }

func (t turning) Hashcode() uint32 {
	h := fnv.New32a()
	t.WriteHash(h)
	return h.Sum32()
}

func (t turning) SymDiff(x nodes, _, dy node) (nodes, error) {
	dx, err := gorgonia.ApplyOp(t, dy, x[1])
	return nodes{dx, nil}, err
}

// What a Do does to the headers of its operands ends with the run: each run gives the same values
// and gradients.
func TestHeadersThatADoChangesEndWithTheRun(t *testing.T) {
	m := &model{g: gorgonia.NewGraph()}
	x := gorgonia.NewMatrix(m.g, tensor.Float64, gorgonia.WithShape(2, 3), gorgonia.WithName("x"),
		gorgonia.WithInit(gorgonia.RangedFrom(1)))
	z := gorgonia.NewMatrix(m.g, tensor.Float64, gorgonia.WithShape(3, 2), gorgonia.WithName("z"),
		gorgonia.WithInit(gorgonia.RangedFrom(1)))
	square := must(gorgonia.Square(x))
	turned := must(gorgonia.ApplyOp(turning{}, square, square))
	m.params = nodes{x}
	m.grad(t, sum(times(turned, z)))
	machine := machine(t, m.g, vm.Keep(turned))
	for i := range 4 {
		run(t, machine)
		value, gradient := turned.Value().Data(), x.Deriv().Value().Data()
		if want := []float64{1, 16, 4, 25, 9, 36}; !reflect.DeepEqual(value, want) {
			t.Errorf("run %d: the value is %v, want %v", i, value, want)
		}
		if want := []float64{2, 12, 30, 16, 40, 72}; !reflect.DeepEqual(gradient, want) {
			t.Errorf("run %d: the gradient is %v, want %v", i, gradient, want)
		}
	}
}

// Gorgonia's YOLOv3 runs as often as one likes, with one result.
func TestYOLORunsAgain(t *testing.T) {
	const size, classes = 2, 1
	g := gorgonia.NewGraph()
	x := gorgonia.NewTensor(g, tensor.Float32, 4, gorgonia.WithShape(1, 2*(5+classes), size, size),
		gorgonia.WithName("x"), gorgonia.WithInit(gorgonia.RangedFrom(-20)))
	shifted := times(x, gorgonia.NewConstant(float32(0.125)))
	y := must(gorgonia.YOLOv3(shifted, []float32{10, 14, 23, 27}, []int{0, 1}, 64, classes, 0.5))
	tape := gorgonia.NewTapeMachine(g)
	run(t, tape)
	want := y.Value().(*tensor.Dense).Clone().(*tensor.Dense)
	tape.Close()
	machine := machine(t, g)
	for i := range 3 {
		run(t, machine)
		compare(t, fmt.Sprint("run ", i), y.Value(), want, 1e-4)
	}
}
