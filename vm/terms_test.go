package vm_test

import (
	"context"
	"errors"
	"strings"
	"testing"

	"gorgonia.org/gorgonia"

	"github.com/euryale-ml/euryale/autograd/solver"
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/internal/testing/testenv"
	"github.com/euryale-ml/euryale/internal/testing/testranks"
	"github.com/euryale-ml/euryale/ops"
	"github.com/euryale-ml/euryale/rendezvous"
	"github.com/euryale-ml/euryale/vm"
)

// TestTreesRefuseCollectivesAmongTheirRanks: a graph with a collective over ranks that train
// together is no function of its micro-batch, so trees and elastic training refuse it by the name
// of its node. Accumulate runs it, and a tree runs collectives over groups of other ranks.
func TestTreesRefuseCollectivesAmongTheirRanks(t *testing.T) {
	register := rendezvous.NewMemStore()
	onRanks(t, testenv.Hosts, 4, func(r ranked) error {
		r.register = register
		data := testranks.Must(r.Comm.Split(r.Comm.Rank()%2, 0))
		// shares this rank alone with data
		other := testranks.Must(r.Comm.Split(r.Comm.Rank()/2, 0))
		tree, elastically := vm.WithTree(4), vm.WithElastic(context.Background(),
			newGeneration(r), 4)
		for _, c := range []struct {
			over    backend.Communicator
			train   []vm.Option
			refused string
		}{
			{data, []vm.Option{vm.WithDataParallel(data), vm.Accumulate(2)}, ""},
			{other, []vm.Option{vm.WithDataParallel(data), tree}, ""},
			{data, []vm.Option{vm.WithDataParallel(data), tree}, "WithTree: "},
			{r.Comm, []vm.Option{vm.WithDataParallel(data), tree}, "WithTree: "},
			{data, []vm.Option{vm.WithDataParallel(r.Comm), tree}, "WithTree: "},
			{r.Comm, []vm.Option{elastically}, "WithElastic: "},
		} {
			r.lock.Lock()
			m := &model{g: gorgonia.NewGraph()}
			w := m.variable("w", gorgonia.Float32, 2, 3)
			m.params = nodes{w}
			all := must(ops.AllReduce(c.over, backend.Sum, square(w)))
			gorgonia.WithName("among")(all)
			m.grad(t, mean(all))
			r.lock.Unlock()
			machine, err := vm.New(m.g, nil, append(c.train,
				vm.WithSolver(&solver.SGD{Rate: 1}, w))...)
			switch {
			case c.refused == "" && err == nil:
				err = machine.Close()
			case c.refused != "" && errors.Is(err, backend.ErrArgument) &&
				strings.Contains(err.Error(), c.refused) &&
				strings.Contains(err.Error(), "node among"):
				err = nil
			case err == nil:
				err = errors.New("it is not refused")
			}
			require.Check(t, err == nil, "%s over %d ranks: %v", c.refused, c.over.Size(), err)
		}
		return errors.Join(data.Close(), other.Close())
	})
}
