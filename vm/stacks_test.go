package vm_test

import (
	"fmt"
	"math/rand/v2"
	"testing"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/autograd/solver"
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/backend/host"
	"github.com/euryale-ml/euryale/internal/testing/fakedevice"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/vm"
)

// stacking draws a graph in which values are multiplied by some of the frozen matrices, transposed
// or not, with or without an adapter of learnables, which it trains.
func stacking(t *testing.T, seed uint64) (m *model, frozen, products nodes) {
	r := rand.New(rand.NewPCG(seed, 1))
	m = &model{g: gorgonia.NewGraph()}
	matrix := func(name string, rows, columns int) node {
		return gorgonia.NewMatrix(m.g, tensor.Float32, gorgonia.WithShape(rows, columns),
			gorgonia.WithName(name), gorgonia.WithValue(integers(r, rows, columns)))
	}
	rows, k := []int{1, 2, 17}[r.IntN(3)], []int{1, 3, 8}[r.IntN(3)]
	m.params = nodes{matrix("e", rows, k)}
	xs := nodes{m.params[0], matrix("x", rows, k)}
	loss := must(gorgonia.Sum(times(xs[0], xs[0])))
	for i := range 2 + r.IntN(7) {
		if len(frozen) < 4 && (i == 0 || r.IntN(2) == 0) {
			frozen = append(frozen, matrix(fmt.Sprint("w", i), k, []int{1, k, 7}[r.IntN(3)]))
		}
		x, w := xs[r.IntN(len(xs))], frozen[r.IntN(len(frozen))]
		if i == 0 {
			w = frozen[0]
		}
		if w.Shape()[1] == k && r.IntN(3) == 0 {
			w = transpose(w, 1, 0)
		}
		y := mul(x, w)
		if r.IntN(4) == 0 {
			a, b := matrix(fmt.Sprint("a", i), k, 2), matrix(fmt.Sprint("b", i), 2, w.Shape()[1])
			m.params = append(m.params, a, b)
			y = add(y, mul(mul(x, a), b))
		}
		products, loss = append(products, y), add(loss, must(gorgonia.Sum(times(y, y))))
	}
	m.grad(t, loss)
	used := frozen[:0]
	for _, w := range frozen {
		if m.g.To(w.ID()).Len() > 0 {
			used = append(used, w)
		}
	}
	return m, used, products
}

func integers(r *rand.Rand, shape ...int) *tensor.Dense {
	x := tensor.New(tensor.Of(tensor.Float32), tensor.WithShape(shape...))
	for i := range x.Len() {
		set(x, i, float64(r.IntN(5)-2))
	}
	return x
}

// TestStacksOfFrozenMatricesGiveWhatTheHostGives, which has none: in some steps, also when some of
// the matrices are given other values, and with the least memory.
func TestStacksOfFrozenMatricesGiveWhatTheHostGives(t *testing.T) {
	for seed := range uint64(60) {
		var want []float64
		for way, limits := range [][]vm.Option{nil, nil, {vm.WithLeastMemory()}} {
			var d backend.Device
			held := require.Value(fakedevice.New(host.Device{}))(t)
			if way > 0 {
				d = &fakedevice.GPU{Device: held,
					Properties: fakedevice.Properties{Capability: 90}}
			}
			m, frozen, products := stacking(t, seed)
			machine := require.Value(vm.New(m.g, d, append(limits, vm.WithPrecision(vm.BF16),
				vm.WithSolver(&solver.SGD{Rate: 1. / (1 << 14)}, m.params...),
				vm.WithFrozen(frozen...), vm.Keep(products...))...))(t)
			r, got := rand.New(rand.NewPCG(seed, 2)), []float64(nil)
			for range 3 {
				run(t, machine)
				for _, y := range products {
					got = append(got, floats(t, y.Value())...)
				}
				for _, w := range frozen {
					if r.IntN(3) == 0 {
						require.NoError(t, gorgonia.Let(w, integers(r, w.Shape()...)))
					}
				}
			}
			require.NoError(t, machine.Close())
			require.NoError(t, held.Close())
			for _, w := range m.params {
				got = append(got, floats(t, w.Value())...)
			}
			if want == nil {
				want = got
			}
			near(t, fmt.Sprintf("graph %d, way %d", seed, way), got, want, orders)
		}
	}
}
