package ops

import (
	"errors"
	"math"
	"strings"
	"testing"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/testing/require"
)

// TestBadInput: every mistake is an error of graph building that says what is
// wrong and what to do.
func TestBadInput(t *testing.T) {
	type node = *gorgonia.Node
	comm := stub{rank: 1, size: 4}
	g := gorgonia.NewGraph()
	x := newArr(4, 6).node(g, "x", tensor.Float64)
	scalar := newArr().node(g, "scalar", tensor.Float64)
	flags := gorgonia.NewVector(g, tensor.Bool, gorgonia.WithShape(4), gorgonia.WithName("flags"))
	shapeless := gorgonia.NewMatrix(g, tensor.Float64, gorgonia.WithName("shapeless"))
	outside := gorgonia.NewConstant(1.0)
	one := func(n node, err error) error { return err }
	cases := []struct {
		err  error
		is   error
		want string
	}{
		{one(AllReduce(nil, backend.Sum, x)), backend.ErrArgument,
			"ops: AllReduce: bad argument: comm is nil"},
		{one(AllReduce(comm, backend.Sum, nil)), backend.ErrArgument,
			"ops: AllReduce: bad argument: x is nil"},
		{one(AllReduce(comm, backend.Sum, outside)), backend.ErrArgument,
			"ops: AllReduce: bad argument: x is not part of a graph"},
		{one(AllReduce(comm, backend.Sum, flags)), ErrDType, "ops: AllReduce: bad dtype: bool: " +
			"collectives are for Float64, Float32, Int, Int64, Int32 and Byte"},
		{one(AllReduce(comm, backend.Sum, shapeless)), ErrShape, "ops: AllReduce: bad shape: x " +
			"is a Matrix float64, but its shape is (): give it one with gorgonia.WithShape"},
		{one(AllReduce(comm, 9, x)), backend.ErrArgument, "ops: AllReduce: bad argument: unknown " +
			"reduction ReduceOp(9): use one of [sum avg prod min max]"},
		{one(ReduceScatter(comm, 9, 0, x)), backend.ErrArgument, "unknown reduction"},
		{one(Reduce(comm, 9, 0, x)), backend.ErrArgument, "unknown reduction"},
		{one(Reduce(comm, backend.Sum, 4, x)), backend.ErrArgument,
			"ops: Reduce: bad argument: root 4 is out of range: there are 4 ranks, 0 to 3"},
		{one(Broadcast(comm, -1, x)), backend.ErrArgument, "ops: Broadcast: bad argument: root " +
			"-1 is out of range: there are 4 ranks, 0 to 3"},
		{one(Gather(comm, 7, 0, x)), backend.ErrArgument, "root 7 is out of range"},
		{one(Scatter(comm, 7, 0, x)), backend.ErrArgument, "root 7 is out of range"},
		{one(AllGather(comm, 0, scalar)), ErrShape, "ops: AllGather: bad shape: x is a scalar " +
			"and has no axis 0"},
		{one(AllToAll(comm, 0, 1, scalar)), ErrShape, "x is a scalar and has no axis 0"},
		{one(AllGather(comm, 2, x)), ErrShape, "ops: AllGather: bad shape: axis 2 is out of " +
			"range: x has shape (4, 6), axes -2 to 1"},
		{one(ReduceScatter(comm, backend.Sum, -3, x)), ErrShape, "axis -3 is out of range"},
		{one(AllToAll(comm, 5, 0, x)), ErrShape, "axis 5 is out of range"},
		{one(AllToAll(comm, 0, 5, x)), ErrShape, "axis 5 is out of range"},
		{one(ReduceScatter(comm, backend.Sum, 1, x)), ErrShape, "ops: ReduceScatter: bad shape: " +
			"axis 1 of shape (4, 6) has length 6, which does not divide among 4 ranks: pass " +
			"Splits with a length for each rank, such as [2 2 1 1]"},
		{one(Scatter(comm, 0, -1, x)), ErrShape, "does not divide among 4 ranks"},
		{one(SplitForwardGatherBackward(comm, 1, 1, x)), ErrShape, "does not divide among 4 ranks"},
		{one(AllToAll(comm, 1, 0, x)), ErrShape, "ops: AllToAll: bad shape: axis 1 of shape (4, " +
			"6) has length 6, which does not divide among 4 ranks: pass AllToAllSplits with a " +
			"length for each rank, such as [2 2 1 1]"},
		{one(AllToAll(comm, 1, 1, x)), ErrShape, "does not divide among 4 ranks"},
		{one(ReduceScatter(comm, backend.Sum, 1, x, Splits(1, 2, 3))), ErrShape,
			"Splits has 3 lengths for 4 ranks: pass one for each"},
		{one(ReduceScatter(comm, backend.Sum, 1, x, Splits(1, 2, 3, 1))), ErrShape,
			"Splits [1 2 3 1] add up to 7, but axis 1 of shape (4, 6) has length 6"},
		{one(ReduceScatter(comm, backend.Sum, 1, x, Splits(4, 4, -2, 0))), ErrShape,
			"Splits [4 4 -2 0]: the length for rank 2 is negative"},
		{one(AllGather(comm, 1, x, Splits(1, 2, 3, 4))), ErrShape, "Splits [1 2 3 4] say that x " +
			"of rank 1 has length 2 along axis 1, but its shape is (4, 6)"},
		{one(AllGather(comm, 1, x, Splits())), ErrShape, "Splits has 0 lengths for 4 ranks"},
		{one(AllGather(comm, 1, x, AllToAllSplits(nil, nil))), backend.ErrArgument,
			"AllToAllSplits is for AllToAll: use Splits"},
		{one(AllToAll(comm, 0, 1, x, Splits(1, 1, 1, 1))), backend.ErrArgument,
			"AllToAll has two axes: use AllToAllSplits in place of Splits"},
		{one(AllToAll(comm, 1, 0, x, AllToAllSplits([]int{3, 3}, nil))), ErrShape,
			"AllToAllSplits has 2 lengths for 4 ranks"},
		{one(AllToAll(comm, 1, 0, x, AllToAllSplits([]int{3, 1, 1, 1}, []int{4, 3, 4, 4}))),
			ErrShape, "AllToAllSplits [4 3 4 4] say that x of rank 1 has length 3 along axis 0, " +
				"but its shape is (4, 6)"},
		{one(AllToAll(comm, 1, 1, x, AllToAllSplits([]int{3, 1, 1, 1}, []int{3, 1, 1, 1}))),
			ErrShape, "axis 1 is scattered and gathered: give AllToAllSplits one list, and nil " +
				"for the other"},
		{one(AllToAll(comm, 1, 1, x, AllToAllSplits(nil, []int{3, 1, 1, 1}))), ErrShape,
			"AllToAllSplits [3 1 1 1] say that rank 1 sends 1 to each of 4 ranks along axis 1, 4 " +
				"together, but the shape of its x is (4, 6)"},
		{one(AllToAll(comm, 1, 1, x, AllToAllSplits(nil, []int{3}))), ErrShape,
			"AllToAllSplits has 1 lengths for 4 ranks"},
		{one(GatherForwardSplitBackward(comm, 0, math.NaN(), x)), backend.ErrArgument,
			"ops: GatherForwardSplitBackward: bad argument: the scale of the gradient is NaN: " +
				"use a number, Up, Down or Unscaled"},
		{one(SplitForwardGatherBackward(comm, 0, math.Inf(1), x)), backend.ErrArgument,
			"the scale of the gradient is +Inf"},
	}
	for i, c := range cases {
		require.Check(t, errors.Is(c.err, c.is) && strings.Contains(c.err.Error(), c.want),
			"case %d: %v, want %q", i, c.err, c.want)
	}
	n := len(g.AllNodes())
	require.Check(t, n == 4, "the graph has %d nodes, 4 before the mistakes", n)
}

// TestOperandsOfOtherShapesAreRefused: the op belongs to one shape.
func TestOperandsOfOtherShapesAreRefused(t *testing.T) {
	g := gorgonia.NewGraph()
	y, err := AllGather(stub{size: 2}, 0, newArr(2, 3).node(g, "x", tensor.Float64))
	require.NoError(t, err)
	_, err = gorgonia.ApplyOp(y.Op(), newArr(3, 2).node(g, "other", tensor.Float64))
	require.Fails(t, "gorgonia.ApplyOp", err, ErrShape, "operand of shape (3, 2), want (2, 3)")
}

// TestNames: what errors and drawings of graphs call the operations.
func TestNames(t *testing.T) {
	comm := stub{size: 2}
	g := gorgonia.NewGraph()
	x := newArr(4, 4, 4).node(g, "x", tensor.Float64)
	name := func(n *gorgonia.Node, err error) string {
		if err != nil {
			return err.Error()
		}
		return n.Op().String()
	}
	y := require.Value(GatherForwardSplitBackward(comm, 0, Up(comm), x))(t)
	dy := newArr(8, 4, 4).node(g, "dy", tensor.Float64)
	for got, want := range map[string]string{
		name(AllToAll(comm, 2, -2, x)): "AllToAll{2→1}@world",
		name(AllToAll(comm, 0, 1, x, AllToAllSplits([]int{1, 3},
			nil))): "AllToAll{0→1, uneven}@world",
		name(AllReduce(comm, backend.Avg, x)):                  "AllReduce{avg}@world",
		name(ReduceScatter(comm, backend.Max, -1, x)):          "ReduceScatter{max, axis 2}@world",
		name(AllGather(comm, 1, x)):                            "AllGather{axis 1}@world",
		name(Broadcast(comm, 1, x)):                            "Broadcast{root 1}@world",
		name(Reduce(comm, backend.Sum, 1, x)):                  "Reduce{sum, root 1}@world",
		name(Gather(comm, 1, 0, x)):                            "Gather{root 1, axis 0}@world",
		name(Scatter(comm, 1, 0, x)):                           "Scatter{root 1, axis 0}@world",
		name(SplitForwardGatherBackward(comm, 1, Unscaled, x)): "Split{axis 1}@world",
		name(CopyToParallel(comm, x)):                          "Identity@world",
		name(ReduceFromParallel(comm, x)):                      "AllReduce{sum}@world",
		name(gradient(x, y, dy)):                               "Split{axis 0, ×2}@world",
		name(AllReduce(comm, backend.Sum, newArr().node(g, "s",
			tensor.Float64))): "AllReduce{sum}@world",
	} {
		require.Check(t, got == want, "%s, want %s", got, want)
	}
}
