package autograd

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"
	"testing"

	"gorgonia.org/gorgonia"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/internal/testing/testranks"
)

// square builds the loss of one large parameter, whose gradient takes a while to copy.
func square(r rank) (gorgonia.VM, gorgonia.Nodes, error) {
	r.build.Lock()
	defer r.build.Unlock()
	g := gorgonia.NewGraph()
	w := gorgonia.NewMatrix(g, gorgonia.Float32, gorgonia.WithShape(128, 512),
		gorgonia.WithName("w"), gorgonia.WithInit(gorgonia.Ones()))
	loss, err := gorgonia.Sum(gorgonia.Must(gorgonia.Square(w)))
	if err != nil {
		return nil, nil, err
	}
	if _, err := gorgonia.Grad(loss, w); err != nil {
		return nil, nil, err
	}
	return gorgonia.NewTapeMachine(g, gorgonia.BindDualValues(w)), gorgonia.Nodes{w}, nil
}

// train trains until there is an error. After so many steps it calls reached.
func train(r rank, steps int, reached func()) error {
	vm, params, err := square(r)
	if err != nil {
		return err
	}
	defer vm.Close()
	dp := testranks.Must(New(r.comm, params))
	defer dp.Close()
	solver := gorgonia.NewVanillaSolver(gorgonia.WithLearnRate(1e-6))
	for i := 0; ; i++ {
		if i == steps {
			reached()
		}
		if err := vm.RunAll(); err != nil {
			return fmt.Errorf("RunAll: %w", err)
		}
		grads := testranks.Must(dp.Sync())
		if err := solver.Step(grads); err != nil {
			return fmt.Errorf("Step: %w", err)
		}
		vm.Reset()
	}
}

// A rank closes or aborts from another goroutine, as the handler of a signal does,
// while another one computes, copies gradients and waits for the other ranks.
func TestFoundCloseWhileTrainingIsAnErrorRaced(t *testing.T) {
	for round := range 6 {
		end, want := backend.Communicator.Close, backend.ErrClosed
		if round%3 == 2 {
			end = func(c backend.Communicator) error {
				c.Abort(errors.New("interrupted"))
				return nil
			}
			want = backend.ErrAborted
		}
		for i, err := range each(t, 2, func(r rank) error {
			var handler sync.WaitGroup
			defer handler.Wait()
			return train(r, 1+round/2, func() {
				if r.comm.Rank() == round%2 {
					handler.Go(func() { end(r.comm) })
				}
			})
		}) {
			// The other rank may also hear that this one has failed.
			require.Check(t, errors.Is(err, want) || i != round%2 &&
				errors.Is(err, backend.ErrAborted), "round %d, rank %d: the error is %v, want "+
				"one that wraps %q", round, i, err, want)
		}
	}
}

func TestFoundCloseGivesTheBucketsBackRaced(t *testing.T) {
	all(t, 2, func(r rank) error {
		vm, params, err := square(r)
		if err != nil {
			return err
		}
		defer vm.Close()
		const times = 50
		before := sharedMappings()
		for range times {
			dp := testranks.Must(New(r.comm, params))
			testranks.NoError(dp.Close())
		}
		if after := sharedMappings(); after >= before+times {
			return fmt.Errorf("%d pieces of shared memory before %d times New and Close, %d after",
				before, times, after)
		}
		return nil
	})
}

// sharedMappings counts the mappings of files without a name.
func sharedMappings() int {
	maps, err := os.ReadFile("/proc/self/maps")
	if err != nil {
		return 0 // not on Linux
	}
	return strings.Count(string(maps), "(deleted)")
}
