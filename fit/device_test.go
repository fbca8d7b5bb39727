package fit_test

import (
	"context"
	"errors"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/euryale-ml/euryale/autograd/solver"
	"github.com/euryale-ml/euryale/fit"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/internal/testing/testenv"
	"github.com/euryale-ml/euryale/internal/testing/testranks"
	"github.com/euryale-ml/euryale/rendezvous"
	"github.com/euryale-ml/euryale/vm"
)

// TestTrainsOnDevices: ranks whose machines compute on devices train, validate with averages, stop
// and go on as those of the host do.
func TestTrainsOnDevices(t *testing.T) {
	trained(t, []testenv.Kind{testenv.Hosts, testenv.Devices})
}

func TestTrainsOnGPU(t *testing.T) {
	kinds := slices.DeleteFunc(testenv.OnDevices(), func(k testenv.Kind) bool { return !k.OnGPU() })
	trained(t, append([]testenv.Kind{testenv.Hosts}, kinds...))
}

func trained(t *testing.T, kinds []testenv.Kind) {
	var want []*fit.Result
	testenv.Each(t, kinds, func(t *testing.T, k testenv.Kind) {
		const P = 2
		var build sync.Mutex
		dir, results := "", make([]*fit.Result, P)
		for _, stop := range []int{0, 3, 5, 0} { // the first one never stops
			connect := k.Connect(t, P)
			errs := testranks.Run(P, func(w *rendezvous.World) (*testenv.Rank, error) {
				return connect(w)
			}, func(r *testenv.Rank) error {
				build.Lock()
				m := newLinear(12/P, true, 1)
				build.Unlock()
				ema := &solver.EMA{Solver: &solver.Adam{Rate: 0.125}, Decay: 0.75}
				training := testranks.Must(vm.New(m.x.Graph(), r.Comm.Device(),
					vm.WithSolver(ema, m.w), vm.WithDataParallel(r.Comm)))
				eval, err := vm.New(m.x.Graph(), r.Comm.Device(), vm.Eval())
				if err != nil {
					return errors.Join(err, training.Close())
				}
				ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
				defer cancel()
				results[r.Comm.Rank()], err = fit.Run(ctx, training, m.data(points(31)),
					fit.Epochs(3), fit.Validate(eval, m.data(points(7))), fit.Checkpoint(dir, 2),
					fit.OnStep(func(s fit.StepLoss) error {
						if s.Step == stop && r.Comm.Rank() == 1 {
							cancel()
						}
						return nil
					}))
				if stop > 0 && errors.Is(err, fit.ErrStopped) {
					err = nil
				}
				return errors.Join(err, eval.Close(), training.Close())
			})
			require.NoError(t, testranks.Join(errs))
			if want == nil {
				want = slices.Clone(results)
			}
			if dir == "" {
				dir = t.TempDir()
			}
		}
		for r, got := range results {
			if got.Params != results[0].Params || len(got.Epochs) != 3 ||
				!near(losses(got), losses(want[r])) {
				t.Errorf("rank %d: %+v, want %+v", r, got, want[r])
			}
			for i, e := range got.Epochs {
				if !near([]float64{e.Metrics["loss"]},
					[]float64{want[r].Epochs[i].Metrics["loss"]}) {
					t.Errorf("rank %d, epoch %d: %v, want %v", r, i, e, want[r].Epochs[i])
				}
			}
		}
	})
}
