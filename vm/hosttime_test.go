package vm_test

import (
	"testing"
	"time"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/vm"
)

const pause = 5 * time.Millisecond

// pausing is turning that takes some time.
type pausing struct{ turning }

func (p pausing) Do(x ...gorgonia.Value) (gorgonia.Value, error) {
	time.Sleep(pause)
	return p.turning.Do(x...)
}

func TestHostTimeIsOfOperationsThatRunByTheirDo(t *testing.T) {
	g := gorgonia.NewGraph()
	x := gorgonia.NewMatrix(g, tensor.Float64, gorgonia.WithShape(2, 3), gorgonia.WithName("x"),
		gorgonia.WithInit(gorgonia.RangedFrom(1)))
	square := must(gorgonia.Square(x))
	slow := must(gorgonia.ApplyOp(pausing{}, square, square))
	with, without := machine(t, g, vm.Keep(slow)), machine(t, square.Graph().SubgraphRoots(square))
	for range 3 {
		run(t, with)
		run(t, without)
	}
	got := with.HostTime()
	require.Check(t, got >= 3*pause, "it is %v, with 3 pauses of %v", got, pause)
	if got := without.HostTime(); got != 0 {
		t.Errorf("without such operations it is %v", got)
	}
}
