package vm_test

import (
	"testing"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/ops/nn"
	"github.com/euryale-ml/euryale/vm"
)

// stockPool is a pool of Gorgonia, of a batch of 2 with 2 channels.
type stockPool struct {
	name           string
	mean           bool // in place of the largest
	h, w           int
	kernel, stride [2]int
	pad            [4]int // north, south, west, east: means have as much on both sides
}

var stockPools = []stockPool{
	{"SAME of an even size", false, 4, 6, [2]int{3, 3}, [2]int{2, 2}, [4]int{0, 1, 0, 1}},
	{"SAME of an even kernel", false, 3, 4, [2]int{2, 2}, [2]int{1, 1}, [4]int{0, 1, 0, 1}},
	{"ceil mode", false, 5, 5, [2]int{2, 2}, [2]int{2, 2}, [4]int{0, 1, 0, 1}},
	{"north and east", false, 4, 5, [2]int{3, 2}, [2]int{1, 3}, [4]int{2, 0, 0, 1}},
	{"south and west", false, 5, 4, [2]int{2, 3}, [2]int{3, 1}, [4]int{0, 1, 2, 0}},
	{"three against one", false, 6, 6, [2]int{4, 4}, [2]int{2, 3}, [4]int{3, 1, 1, 3}},
	{"overlapping", false, 5, 6, [2]int{3, 2}, [2]int{2, 1}, [4]int{0, 2, 1, 0}},
	{"means side by side", true, 4, 6, [2]int{2, 2}, [2]int{2, 2}, [4]int{}},
	{"means that overlap", true, 4, 4, [2]int{2, 2}, [2]int{1, 1}, [4]int{}},
	{"padded means", true, 4, 5, [2]int{4, 2}, [2]int{2, 2}, [4]int{1, 1, 1, 1}},
	{"means of uneven padding", true, 5, 6, [2]int{3, 2}, [2]int{2, 1}, [4]int{0, 2, 1, 0}},
	{"the mean of the image", true, 4, 2, [2]int{4, 2}, [2]int{1, 1}, [4]int{}},
}

// TestStockPoolsAreThoseOfPackageNN: a pool of Gorgonia begins at the padding north and west, as
// the caller wrote, and a mean covers its window, with zeros for padding, forward and backward.
// Gorgonia's machines begin at the padding of the other side, and divide by the width of the image.
// Those of package nn are ONNX's.
func TestStockPoolsAreThoseOfPackageNN(t *testing.T) {
	for _, p := range stockPools {
		for where, device := range devices {
			t.Run(p.name+" "+where, func(t *testing.T) { p.check(t, device(t)) })
		}
	}
}

// check compares three runs on a device with pools of package nn on the host.
func (p stockPool) check(t *testing.T, device backend.Device) {
	x, y, machine := p.machine(t, device, true)
	wantX, wantY, host := p.machine(t, nil, false)
	run(t, host)
	for range 3 {
		run(t, machine)
		compare(t, "value", y.Value(), wantY.Value(), 0)
		compare(t, "gradient", gradient(t, x), gradient(t, wantX), 0)
	}
}

// machine returns a machine for the sum of a pool's products with integers.
func (p stockPool) machine(t *testing.T, d backend.Device, stock bool) (x, y node, _ *vm.Machine) {
	m := &model{g: gorgonia.NewGraph()}
	x = m.variable("x", tensor.Float64, 2, 2, p.h, p.w)
	y = p.pool(x, stock)
	share := m.variable("share", tensor.Float64, y.Shape()...)
	for i, data := range [][]float64{floats(t, x.Value()), floats(t, share.Value())} {
		for k := range data {
			data[k] = float64(k*[]int{37, 1}[i]%[]int{101, 7}[i] - []int{50, -1}[i])
		}
	}
	m.params = nodes{x}
	m.grad(t, sum(times(y, share)))
	return x, y, machineOn(t, d, m.g, vm.Keep(y), vm.Notice(func(string) {}))
}

func (p stockPool) pool(x node, stock bool) node {
	pad := p.pad[:]
	switch {
	case stock && p.mean && p.pad[0] == p.pad[1]:
		return must(gorgonia.AveragePool2D(x, p.kernel[:], []int{pad[0], pad[2]}, p.stride[:]))
	case stock && p.mean:
		return must(gorgonia.AveragePool2D(x, p.kernel[:], pad, p.stride[:]))
	case stock:
		return must(gorgonia.MaxPool2D(x, p.kernel[:], pad, p.stride[:]))
	}
	of, before := nn.MaxPool2D, [2]int{pad[0], pad[2]}
	if p.mean {
		of = nn.AvgPool2D
	}
	return must(of(p.kernel, before, p.stride, x, nn.PoolOptions{After: &[2]int{pad[1], pad[3]}}))
}
