package vm_test

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/autograd/solver"
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/internal/testing/testenv"
	"github.com/euryale-ml/euryale/internal/testing/testranks"
	"github.com/euryale-ml/euryale/vm"
)

// moody is the identity, whose Do panics when it is told to. It is no part of the gradient.
type moody struct {
	counter
	panics bool
}

func (m *moody) Do(x ...gorgonia.Value) (gorgonia.Value, error) {
	if m.panics {
		panic("not today")
	}
	return m.counter.Do(x...)
}

func TestAPanicOfAnOperationEndsEveryRankOfARun(t *testing.T) {
	errs := together(t, testenv.Hosts, 2, func(r ranked) (err error) {
		op := &moody{}
		r.lock.Lock()
		g := gorgonia.NewGraph()
		w := gorgonia.NewVector(g, tensor.Float32, gorgonia.WithShape(3), gorgonia.WithName("w"),
			gorgonia.WithInit(gorgonia.Ones()))
		gorgonia.Grad(sum(square(w)), w)
		must(gorgonia.ApplyOp(op, w))
		r.lock.Unlock()
		m := testranks.Must(vm.New(g, nil, vm.WithSolver(&solver.SGD{Rate: 0.5}, w),
			vm.WithDataParallel(r.Comm)))
		defer m.Close()
		for range 3 {
			testranks.NoError(m.RunAll())
		}
		if op.panics = r.Comm.Rank() == 1; op.panics {
			defer func() {
				if v := recover(); v != "not today" {
					err = fmt.Errorf("it panics with %v", v)
				}
			}()
		}
		began := time.Now()
		if err = m.RunAll(); err == nil { // it had all that it needed of the other rank by then
			err = m.RunAll()
		}
		if !errors.Is(err, backend.ErrAborted) || !strings.Contains(err.Error(), "rank 1") ||
			!strings.Contains(err.Error(), "panicked in RunAll: not today") {
			return fmt.Errorf("the other rank's error is %v", err)
		}
		if took := time.Since(began); took > 10*time.Second {
			return fmt.Errorf("it took %v", took)
		}
		return nil
	})
	require.NoError(t, errors.Join(errs...))
}
