package ops

import (
	"testing"
	"time"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/testing/nilargs"
	"github.com/euryale-ml/euryale/internal/testing/reference"
)

func TestNilArgumentsAreErrors(t *testing.T) {
	comm := reference.New("test", 1, time.Minute)[0]
	x := gorgonia.NewVector(gorgonia.NewGraph(), tensor.Float32, gorgonia.WithShape(2),
		gorgonia.WithName("x"))
	some := Splits(2)
	nilargs.Check(t, map[string]nilargs.Use{
		"AllGather":      {F: AllGather, Args: []any{comm, 0, x, some}},
		"AllReduce":      {F: AllReduce, Args: []any{comm, backend.Sum, x}},
		"AllToAll":       {F: AllToAll, Args: []any{comm, 0, 0, x, AllToAllSplits(nil, nil)}},
		"Broadcast":      {F: Broadcast, Args: []any{comm, 0, x}},
		"CopyToParallel": {F: CopyToParallel, Args: []any{comm, x}},
		"Gather":         {F: Gather, Args: []any{comm, 0, 0, x, some}},
		"GatherForwardSplitBackward": {F: GatherForwardSplitBackward, Args: []any{comm, 0, 1.0, x,
			some}},
		"Planned": {F: plannedOrNot, Args: []any{comm, backend.Collective{Kind: backend.AllReduce},
			"sum", 1, tensor.New(tensor.WithBacking([]float32{1}))}},
		"Reduce":             {F: Reduce, Args: []any{comm, backend.Sum, 0, x}},
		"ReduceFromParallel": {F: ReduceFromParallel, Args: []any{comm, x}},
		"ReduceScatter":      {F: ReduceScatter, Args: []any{comm, backend.Sum, 0, x, some}},
		"Scatter":            {F: Scatter, Args: []any{comm, 0, 0, x, some}},
		"SparseAllReduce":    {F: SparseAllReduce, Args: []any{comm, backend.Sum, x}},
		"SplitForwardGatherBackward": {F: SplitForwardGatherBackward, Args: []any{comm, 0, 1.0, x,
			some}},
	}, map[string]string{
		"Cause": "it returns what it is given",
		"Up":    "it returns a number and no error",
		"Down":  "it returns a number and no error",
	})
}

// plannedOrNot is Planned with its error last.
func plannedOrNot(comm backend.Communicator, c backend.Collective, name string, number int,
	x *tensor.Dense) error {
	_, _, err := Planned(comm, c, name, number, x)
	return err
}
