package fit_test

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/autograd"
	"github.com/euryale-ml/euryale/autograd/solver"
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/fit"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/ops/nn"
	"github.com/euryale-ml/euryale/vm"
)

// normed is a graph of batches of x [b, 2] with a batch norm, and its weighted loss.
func normed(b int) (d fit.Data, learnables G.Nodes, op *G.BatchNormOp, guess *G.Node) {
	g := G.NewGraph()
	variable := func(name string, x float64, shape ...int) *G.Node {
		all := slices.Repeat([]float64{x}, tensor.Shape(shape).TotalSize())
		return G.NewTensor(g, G.Float64, len(shape), G.WithShape(shape...), G.WithName(name),
			G.WithValue(tensor.New(tensor.WithShape(shape...), tensor.WithBacking(all))))
	}
	x, y, weights := variable("x", 0, b, 2), variable("y", 0, b), variable("weights", 0, b)
	w := variable("w", 1, 2)
	learnables = G.Nodes{variable("gain", 1, 1, 2), variable("bias", 0, 1, 2), w}
	h, _, _, op, err := G.BatchNorm(x, learnables[0], learnables[1], 0.5, 1e-5)
	guess = G.Must(G.Mul(G.Must(h, err), w))
	squares := G.Must(G.Square(G.Must(G.Sub(guess, y))))
	d = fit.Data{Inputs: G.Nodes{x, y}, Weights: weights,
		Loss: G.Must(G.Sum(G.Must(G.HadamardProd(squares, weights))))}
	if _, err := G.Grad(d.Loss, learnables...); err != nil {
		panic(err)
	}
	return d, learnables, op, guess
}

// TestMissingSamplesReachNoBatchNorm: a training whose last batch is incomplete is refused, by the
// name of the batch norm, unless it drops that batch; an evaluation, which uses running statistics,
// is not.
func TestMissingSamplesReachNoBatchNorm(t *testing.T) {
	for P := 1; P <= 3; P++ {
		for _, c := range []struct {
			n          int
			drop, sync bool
			refused    bool
		}{{n: 24}, {n: 17, refused: true}, {n: 13, refused: true}, {n: 13, sync: true,
			refused: true}, {n: 17, drop: true}, {n: 24, drop: true}} {
			results := make([]*fit.Result, P)
			ranks(t, P, func(comm backend.Communicator, build sync.Locker) (*fit.Result, error) {
				build.Lock()
				d, w, op, guess := normed(12 / P)
				build.Unlock()
				d.Set, d.DropLast = points(c.n), c.drop
				o := []vm.Option{vm.WithSolver(&solver.SGD{Rate: 1. / 64}, w...),
					vm.WithDataParallel(comm)}
				if c.sync && P > 1 {
					o = append(o, vm.SyncBatchNorm())
				}
				m, err := vm.New(d.Loss.Graph(), nil, o...)
				if err != nil {
					return nil, err
				}
				eval, err := vm.New(d.Loss.Graph(), nil, vm.Eval(), vm.Keep(guess))
				if err != nil {
					return nil, errors.Join(err, m.Close())
				}
				held := d
				held.Set, held.DropLast = points(17), false
				results[comm.Rank()], err = fit.Run(t.Context(), m, d, fit.Epochs(2),
					fit.Validate(eval, held))
				err = errors.Join(err, eval.Close(), m.Close())
				if c.refused && errors.Is(err, backend.ErrArgument) &&
					strings.Contains(err.Error(), "batchnorm") &&
					strings.Contains(err.Error(), "do not fill batches of 12") {
					return nil, nil
				}
				if mean, _ := op.Stats(); err == nil && mean.Data().([]float64)[0] == 0 {
					err = fmt.Errorf("no averages")
				}
				if c.refused {
					err = errors.Join(err, errors.New("not refused"))
				}
				return nil, err
			})
			for _, r := range results {
				if !c.refused && (r == nil || len(r.Epochs) != 2 || r.Epochs[1].Steps != c.n/12*2) {
					t.Errorf("%d ranks, %+v: %+v", P, c, r)
				}
			}
		}
	}
}

// TestMetricsOfRowsThatDependOnOthersAreRefused where missing samples would be among them.
func TestMetricsOfRowsThatDependOnOthersAreRefused(t *testing.T) {
	m := newLinear(4, false, 1)
	scores := G.Must(nn.BatchedMatMul(false, true, m.x, m.x))
	eval := require.Value(vm.New(m.x.Graph(), nil, vm.Eval(), vm.Keep(scores)))(t)
	defer eval.Close()
	for n, ok := range map[int]bool{8: true, 9: false} {
		_, err := fit.Evaluate(autograd.Solo(), eval,
			fit.Data{Set: points(n), Inputs: G.Nodes{m.x, m.y}})
		require.Check(t, (err == nil) == ok, "%d samples: %v", n, err)
	}
}
