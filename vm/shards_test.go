package vm_test

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"testing"

	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/autograd"
	"github.com/euryale-ml/euryale/internal/testing/testenv"
	"github.com/euryale-ml/euryale/internal/testing/testranks"
	"github.com/euryale-ml/euryale/vm"
)

// levels are what ranks can divide.
var levels = []vm.Shards{vm.SolverState}

// training is a way to train a model, on several ranks.
type training struct {
	solver  func() autograd.Solver
	build   func(testing.TB, tensor.Dtype) *model
	data    []autograd.Option
	options func(m *model) []vm.Option // instead of the solver, nil for it
	micros  int                        // runs of a step, 0 for 1
}

// start makes a machine.
func (r ranked) start(as training, more ...vm.Option) (*model, *vm.Machine, error) {
	m := r.build(as.build)
	data := append([]autograd.Option{autograd.WithBuckets(1, 400)}, as.data...)
	options := append(more, vm.WithDataParallel(r.Comm, data...))
	if as.options != nil {
		options = append(options, as.options(m)...)
	}
	if as.solver != nil {
		options = append(options, vm.WithSolver(as.solver(), m.params...))
	}
	if as.micros > 0 {
		options = append(options, vm.Accumulate(as.micros))
	}
	machine, err := vm.New(m.g, r.device, options...)
	return m, machine, err
}

// steps trains for some steps, from number first on.
func (as training) steps(m *model, machine *vm.Machine, first, n int) error {
	for step := range n {
		for micro := range max(1, as.micros) {
			m.shift(first + step + micro)
			if err := machine.RunAll(); err != nil {
				return err
			}
		}
	}
	return machine.Pull(m.params...)
}

// shardsLikeReplicas trains on replicas and on shards, and compares all bits of the learnables.
func (r ranked) shardsLikeReplicas(level vm.Shards, as training) error {
	const steps = 20
	want, replica, err := r.start(as)
	if err != nil {
		return err
	}
	if err := as.steps(want, replica, 0, steps); err != nil {
		return err
	}
	got, machine, err := r.start(as, vm.WithShards(level))
	if err != nil {
		return err
	}
	if err := as.steps(got, machine, 0, steps); err != nil {
		return err
	}
	err = errors.Join(machine.DataParallel().Check(), replica.Close(), machine.Close())
	if got, want := got.weights(r.t), want.weights(r.t); !slices.EqualFunc(got, want,
		slices.Equal) {
		err = errors.Join(err, fmt.Errorf("%v, by replicas %v", got, want))
	}
	return err
}

// trainsInShards is shardsLikeReplicas on all of P ranks.
func trainsInShards(t *testing.T, k testenv.Kind, P int, as training) {
	t.Helper()
	for _, level := range levels {
		if err := testranks.Join(together(t, k, P, func(r ranked) error {
			return r.shardsLikeReplicas(level, as)
		})); err != nil {
			t.Errorf("level %b: %v", level, err)
		}
	}
}

// TestShards: after 20 steps learnables that ranks update in shards have the bits of those that all
// ranks update, for any number of ranks and any solver, on any memory.
func TestShards(t *testing.T) {
	most := 4
	if os.Getenv("EURYALE_FULL") == "1" {
		most = 8
	}
	testenv.Each(t, []testenv.Kind{testenv.Hosts, testenv.Devices, testenv.Staged},
		func(t *testing.T, k testenv.Kind) {
			for P := 1; P <= most; P++ {
				for solver, make := range solvers {
					for name, build := range parallelModels {
						if solver != "adam" && name != "mlp" {
							continue
						}
						t.Run(fmt.Sprint(P, " ", solver, " ", name), func(t *testing.T) {
							trainsInShards(t, k, P, training{solver: make, build: build})
						})
					}
				}
			}
		})
}
