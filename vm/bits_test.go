package vm_test

import (
	"fmt"
	"math"
	"slices"
	"testing"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	read "github.com/euryale-ml/euryale/internal/stock"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/ops/nn"
	"github.com/euryale-ml/euryale/vm"
)

// TestDoHasTheBitsOfAPlan: each operation of package nn gives the bits of a plan on the host by its
// Do, gradients included, on small operands and on rows and columns of many elements. Only sums of
// float64 across rows may differ, by their order, which depends on what else a loop computes.
func TestDoHasTheBitsOfAPlan(t *testing.T) {
	all := slices.Clone(ours)
	for _, shape := range [][]int{{67, 768}, {65, 9000}, {3, 40, 1500}} {
		n := shape[len(shape)-1]
		type builds = func(x ...node) (node, error)
		add := func(name string, build builds, shapes ...[]int) {
			all = append(all, operation{name: fmt.Sprint(name, " ", shape), build: build,
				shapes: append([][]int{shape}, shapes...)})
		}
		add("softmax", func(x ...node) (node, error) {
			return nn.SoftMax(-1, x[0])
		})
		add("softmax of columns", func(x ...node) (node, error) {
			return nn.LogSoftMax(0, x[0])
		})
		add("gelu", chain(nn.GELU))
		add("layer norm", func(x ...node) (node, error) {
			return nn.LayerNorm(1e-5, x[0], x[1], x[2])
		}, []int{n}, []int{n})
		add("cross-entropy", func(x ...node) (node, error) {
			rows := reshape(x[0], tensor.Shape{x[0].Shape().TotalSize() / n, n})
			list := make([]int, rows.Shape()[0])
			for i := range list {
				list[i] = i * 7919 % n
			}
			return nn.CrossEntropy(5, rows, labels(rows, list...))
		})
	}
	eachOperation(t, all, func(t *testing.T, _ operation, m *model, _ float64) {
		doHasTheBits(t, m.g)
	})
}

// doHasTheBits runs a plan, and each operation of package nn by its Do on the plan's operands.
func doHasTheBits(t *testing.T, g *gorgonia.ExprGraph) {
	t.Helper()
	var nodes gorgonia.Nodes
	for _, n := range g.AllNodes() {
		if n.Op() != nil && n.Value() == nil && read.Name(n.Op()) != "readOp" {
			nodes = append(nodes, n)
		}
	}
	m := machine(t, g, vm.Keep(nodes...))
	for range 2 {
		run(t, m)
		for _, n := range nodes {
			op, ok := n.Op().(*nn.Op)
			if !ok {
				continue
			}
			var x []gorgonia.Value
			for _, a := range read.Operands(n) {
				x = append(x, rowMajor(a.Value()))
			}
			want := require.Value(op.Do(x...))(t)
			a, b := floats(t, n.Value()), floats(t, want)
			for i := range a {
				rounding := 0.0
				if n.Dtype() == tensor.Float64 {
					rounding = 1e-13 * max(1, math.Abs(b[i]))
				}
				if !(math.Abs(a[i]-b[i]) <= rounding) && !(a[i] != a[i] && b[i] != b[i]) {
					t.Fatalf("%v: element %d of %d is %v in a plan, %v by Do", n, i, len(a), a[i],
						b[i])
				}
			}
		}
	}
}
