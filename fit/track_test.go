package fit_test

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale"
	"github.com/euryale-ml/euryale/autograd/solver"
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/fit"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/internal/testing/tensorboard"
	"github.com/euryale-ml/euryale/vm"
)

// TestWhatTensorBoardShows: each step and epoch once, from any number of ranks, while the training
// runs, and after an end between two checkpoints from which other ranks go on.
func TestWhatTensorBoardShows(t *testing.T) {
	const steps, perEpoch = 9, 3
	train := func(P int, dir, kept string, until int, onStep func(s fit.StepLoss)) {
		over := errors.New("over")
		err := euryale.Run(t.Context(), P, func(comm backend.Communicator,
			build sync.Locker) error {
			build.Lock()
			m := newLinear(12/P, true, 1)
			build.Unlock()
			training, err := vm.New(m.x.Graph(), nil, vm.WithDataParallel(comm), vm.ClipNorm(1e9),
				vm.WithSolver(&solver.SGD{Rate: 1}, m.w))
			if err != nil {
				return err
			}
			eval, err := vm.New(m.x.Graph(), nil, vm.Eval(), vm.Keep(m.loss))
			if err != nil {
				return err
			}
			_, err = fit.Run(t.Context(), training, m.data(points(36)), fit.Epochs(3),
				fit.Checkpoint(kept, 2), fit.TensorBoard(dir), fit.Schedule(solver.StepDecay(
					1./64, 0.5, 4)), fit.Validate(eval, m.data(points(7))),
				fit.OnStep(func(s fit.StepLoss) error {
					if comm.Rank() == 0 {
						onStep(s)
					}
					return map[bool]error{true: over}[s.Step == until]
				}))
			return errors.Join(err, training.Close(), eval.Close())
		})
		require.Check(t, (err == nil) == (until == 0) && (err == nil || errors.Is(err, over) ||
			strings.Contains(err.Error(), "over")), "%d ranks, %d steps: %v", P, until, err)
	}
	for P := 1; P <= 4; P++ {
		dir, kept := filepath.Join(t.TempDir(), "a", "b"), t.TempDir()
		losses := map[int]float32{}
		note := func(s fit.StepLoss) {
			if s.Step > 1 {
				so := tensorboard.Shown(t, dir)["step/loss"]
				require.Equal(t, "steps so far", len(so), s.Step-1)
			}
			losses[s.Step] = float32(s.Loss)
		}
		train(P, dir, kept, 6, note)   // the checkpoint is of step 4
		train(5-P, dir, kept, 9, note) // behind the checkpoint of step 8
		train(P, dir, kept, 0, note)
		got := tensorboard.Shown(t, dir)
		require.Slices(t, "curves", slices.Sorted(maps.Keys(got)), []string{"epoch/loss",
			"epoch/seconds", "epoch/val_loss", "step/gradient_norm", "step/loss", "step/rate",
			"step/samples_per_second"})
		for name, of := range got {
			n, every := steps, 1
			if strings.HasPrefix(name, "epoch") {
				n, every = steps/perEpoch, perEpoch
			}
			for i := range n {
				x, ok := of[(i+1)*every]
				require.Check(t, ok && x > 0 && len(of) == n, "%d ranks: %s is %v", P, name, of)
			}
		}
		require.Check(t, maps.Equal(got["step/loss"], losses), "%d ranks: losses are %v, want %v",
			P, got["step/loss"], losses)
		require.Check(t, got["step/rate"][4] == 1./64 && got["step/rate"][5] == 1./128,
			"%d ranks: the rates are %v", P, got["step/rate"])
		compareWithTensorBoard(t, dir, got)
	}
}

// TestTensorBoardHasHistogramsOfWeightsAndGradients after each epoch, of the values of then.
func TestTensorBoardHasHistogramsOfWeightsAndGradients(t *testing.T) {
	for P := 1; P <= 2; P++ {
		dir, want := t.TempDir(), map[string][][]float64{}
		run := func(comm backend.Communicator, build sync.Locker,
			more func(m *linear) G.Nodes) error {
			build.Lock()
			m := newLinear(4/P, true, 1)
			build.Unlock()
			gradient := m.w.Deriv()
			training, err := vm.New(m.x.Graph(), nil, vm.WithDataParallel(comm),
				vm.WithSolver(&solver.SGD{Rate: 1. / 64}, m.w), vm.Keep(gradient))
			if err != nil {
				return err
			}
			_, err = fit.Run(t.Context(), training, m.data(points(8)), fit.Epochs(3),
				fit.TensorBoard(dir, more(m)...), fit.OnEpoch(func(fit.Epoch) error {
					if comm.Rank() > 0 {
						return nil
					}
					for name, n := range map[string]*G.Node{"weights/w": m.w,
						"gradients/w": gradient} {
						x := n.Value().Data().([]float64)
						want[name] = append(want[name], []float64{min(x[0], x[1]), max(x[0], x[1]),
							2, x[0] + x[1], x[0]*x[0] + x[1]*x[1]})
					}
					return nil
				}))
			return errors.Join(err, training.Close())
		}
		require.NoError(t, euryale.Run(t.Context(), P, func(comm backend.Communicator,
			build sync.Locker) error {
			return run(comm, build, func(m *linear) G.Nodes { return G.Nodes{m.w, m.w.Deriv()} })
		}))
		got := tensorboard.Histograms(t, dir)
		require.Equal(t, "histograms", len(got), len(want))
		for name, all := range want {
			require.Equal(t, name+": epochs", len(got[name]), len(all))
			for i, of := range all {
				h := got[name][i]
				require.Slices(t, name, h[:5], of)
				counts := make([]float64, 30) // the one number is the least, the other the most
				counts[0]++
				counts[29]++
				if of[0] == of[1] {
					counts[0], counts[29] = 0, 2
				}
				require.Check(t, len(h) == 65 && slices.IsSorted(h[5:35]) && h[34] == of[1],
					"%s: limits %v", name, h[5:])
				require.Slices(t, name+": counts", h[35:], counts)
			}
		}
		err := euryale.Run(t.Context(), P, func(comm backend.Communicator,
			build sync.Locker) error {
			return run(comm, build, func(m *linear) G.Nodes { return G.Nodes{m.guess} })
		})
		require.Fails(t, "a node that the machine does not keep", err,
			"the machine does not keep "+newLinear(4/P, true, 1).guess.Name())
	}
	m, other := newLinear(4, true, 1), newLinear(4, true, 1)
	training := machine(t, m.x.Graph(), sgd(m.w))
	for says, n := range map[string]*G.Node{"w is of another graph": other.w,
		"b is bool": G.NewVector(m.x.Graph(), tensor.Bool, G.WithShape(2), G.WithName("b"))} {
		_, err := fit.Run(t.Context(), training, m.data(points(8)), fit.TensorBoard(t.TempDir(), n))
		require.Fails(t, "a node", err, backend.ErrArgument, says)
	}
}

// compareWithTensorBoard compares with what TensorBoard itself reads, if it is there.
func compareWithTensorBoard(t *testing.T, dir string, want tensorboard.Curves) {
	t.Helper()
	if os.Getenv("EURYALE_FULL") != "1" ||
		exec.Command("python3", "-c", "import tensorboard").Run() != nil {
		return
	}
	text := require.Value(exec.Command("python3", "testdata/scalars.py", dir).Output())(t)
	got := tensorboard.Curves{}
	for line := range strings.Lines(string(text)) {
		var name string
		var step int
		var x float32
		require.NoError(t, require.Err(fmt.Sscan(line, &name, &step, &x)))
		require.NoError(t, got.Add(name, step, x))
	}
	require.Check(t, maps.EqualFunc(got, want, maps.Equal), "TensorBoard reads %v, want %v", got,
		want)
}
