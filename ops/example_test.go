package ops_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"sync"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale"
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/ops"
)

// onRanks runs the same program on n ranks, which are goroutines of this process. Each builds its
// graph and runs it. The values of the nodes that build returns are printed in rank order.
func onRanks(n int, build func(comm backend.Communicator, g *gorgonia.ExprGraph) (gorgonia.Nodes,
	error)) {
	lines := make([]string, n)
	err := euryale.Run(context.Background(), n, func(comm backend.Communicator,
		lock sync.Locker) error {
		lock.Lock() // Gorgonia builds one graph at a time
		g := gorgonia.NewGraph()
		nodes, err := build(comm, g)
		values := make([]gorgonia.Value, len(nodes))
		for i, node := range nodes {
			// a machine reuses the memory of nodes that nobody reads
			gorgonia.Read(node, &values[i])
		}
		lock.Unlock()
		if err != nil {
			return err
		}
		machine := gorgonia.NewTapeMachine(g)
		defer machine.Close()
		if err := machine.RunAll(); err != nil {
			return ops.Cause(err)
		}
		lines[comm.Rank()] = fmt.Sprint("rank ", comm.Rank(), ":")
		for _, v := range values {
			lines[comm.Rank()] += fmt.Sprint(" ", v.Data())
		}
		return nil
	})
	if err != nil {
		log.Fatal(err)
	}
	for _, line := range lines {
		fmt.Println(line)
	}
}

// vector is an input node that holds the values.
func vector(g *gorgonia.ExprGraph, values ...float64) *gorgonia.Node {
	return matrix(g, []int{len(values)}, values...)
}

// matrix is an input node of a shape.
func matrix(g *gorgonia.ExprGraph, shape []int, values ...float64) *gorgonia.Node {
	x := tensor.New(tensor.WithShape(shape...), tensor.WithBacking(values))
	return gorgonia.NodeFromAny(g, x, gorgonia.WithName("x"))
}

// gradient returns the gradient of the sum of all ranks' losses, where a rank's loss is the sum of
// y squared.
func gradient(y, x *gorgonia.Node) (*gorgonia.Node, error) {
	loss, err := gorgonia.Square(y)
	if err == nil && !loss.IsScalar() {
		loss, err = gorgonia.Sum(loss)
	}
	if err != nil {
		return nil, err
	}
	dx, err := gorgonia.Grad(loss, x)
	if err != nil {
		return nil, err
	}
	return dx[0], nil
}

// The sum of all ranks' x, on every rank. An x moves the losses of both ranks, y*y each, so its
// gradient is 2*y twice.
func ExampleAllReduce() {
	onRanks(2, func(comm backend.Communicator, g *gorgonia.ExprGraph) (gorgonia.Nodes, error) {
		r := float64(comm.Rank())
		x := vector(g, 1+r, 2+r, 3+r)
		y, err := ops.AllReduce(comm, backend.Sum, x)
		if err != nil {
			return nil, err
		}
		dx, err := gradient(y, x)
		return gorgonia.Nodes{y, dx}, err
	})
	// Output:
	// rank 0: [3 5 7] [12 20 28]
	// rank 1: [3 5 7] [12 20 28]
}

// The gradient of a maximum goes to the lowest rank that holds it.
func ExampleAllReduce_max() {
	onRanks(2, func(comm backend.Communicator, g *gorgonia.ExprGraph) (gorgonia.Nodes, error) {
		x := vector(g, 5, 1+3*float64(comm.Rank()))
		y, err := ops.AllReduce(comm, backend.Max, x)
		if err != nil {
			return nil, err
		}
		dx, err := gradient(y, x)
		return gorgonia.Nodes{y, dx}, err
	})
	// Output:
	// rank 0: [5 4] [20 0]
	// rank 1: [5 4] [0 16]
}

// Each rank keeps one chunk of the sum.
func ExampleReduceScatter() {
	onRanks(2, func(comm backend.Communicator, g *gorgonia.ExprGraph) (gorgonia.Nodes, error) {
		r := float64(comm.Rank())
		y, err := ops.ReduceScatter(comm, backend.Sum, 0, vector(g, r, 10+r, 20+r, 30+r))
		return gorgonia.Nodes{y}, err
	})
	// Output:
	// rank 0: [1 21]
	// rank 1: [41 61]
}

func ExampleAllGather() {
	onRanks(3, func(comm backend.Communicator, g *gorgonia.ExprGraph) (gorgonia.Nodes, error) {
		r := float64(comm.Rank())
		y, err := ops.AllGather(comm, 0, vector(g, r, r/2))
		return gorgonia.Nodes{y}, err
	})
	// Output:
	// rank 0: [0 0 1 0.5 2 1]
	// rank 1: [0 0 1 0.5 2 1]
	// rank 2: [0 0 1 0.5 2 1]
}

// Seven rows do not divide among two ranks, so their lengths are given.
func ExampleSplits() {
	rows := ops.Splits(4, 3)
	onRanks(2, func(comm backend.Communicator, g *gorgonia.ExprGraph) (gorgonia.Nodes, error) {
		x := vector(g, 1, 2, 3, 4, 5, 6, 7)
		part, err := ops.ReduceScatter(comm, backend.Avg, 0, x, rows)
		if err != nil {
			return nil, err
		}
		all, err := ops.AllGather(comm, 0, part, rows)
		return gorgonia.Nodes{part, all}, err
	})
	// Output:
	// rank 0: [1 2 3 4] [1 2 3 4 5 6 7]
	// rank 1: [5 6 7] [1 2 3 4 5 6 7]
}

// Sequence parallelism: rank r has two positions of all four heads before, and all four positions
// of two heads after. x[position, head] is 10*position + head.
func ExampleAllToAll() {
	onRanks(2, func(comm backend.Communicator, g *gorgonia.ExprGraph) (gorgonia.Nodes, error) {
		p := 20 * float64(comm.Rank())
		x := matrix(g, []int{2, 4}, p, p+1, p+2, p+3, p+10, p+11, p+12, p+13)
		y, err := ops.AllToAll(comm, 1, 0, x) // [2, 4] becomes [4, 2]
		return gorgonia.Nodes{y}, err
	})
	// Output:
	// rank 0: [0 1 10 11 20 21 30 31]
	// rank 1: [2 3 12 13 22 23 32 33]
}

// Three heads and three positions on two ranks.
func ExampleAllToAllSplits() {
	heads, positions := []int{2, 1}, []int{1, 2}
	onRanks(2, func(comm backend.Communicator, g *gorgonia.ExprGraph) (gorgonia.Nodes, error) {
		values := [][]float64{{0, 1, 2}, {10, 11, 12, 20, 21, 22}}[comm.Rank()]
		x := matrix(g, []int{positions[comm.Rank()], 3}, values...)
		y, err := ops.AllToAll(comm, 1, 0, x, ops.AllToAllSplits(heads, positions))
		return gorgonia.Nodes{y}, err
	})
	// Output:
	// rank 0: [0 1 10 11 20 21]
	// rank 1: [2 12 22]
}

func ExampleBroadcast() {
	onRanks(2, func(comm backend.Communicator, g *gorgonia.ExprGraph) (gorgonia.Nodes, error) {
		x := vector(g, float64(comm.Rank()), 7)
		y, err := ops.Broadcast(comm, 1, x)
		if err != nil {
			return nil, err
		}
		dx, err := gradient(y, x) // both ranks' gradients, on the root
		return gorgonia.Nodes{y, dx}, err
	})
	// Output:
	// rank 0: [1 7] [0 0]
	// rank 1: [1 7] [4 28]
}

func ExampleReduce() {
	onRanks(2, func(comm backend.Communicator, g *gorgonia.ExprGraph) (gorgonia.Nodes, error) {
		y, err := ops.Reduce(comm, backend.Sum, 0, vector(g, 1, float64(comm.Rank())))
		return gorgonia.Nodes{y}, err
	})
	// Output:
	// rank 0: [2 1]
	// rank 1: [0 0]
}

// Scatter hands out the chunks of rank 0's x, and Gather collects what the ranks made of them.
func ExampleScatter() {
	onRanks(2, func(comm backend.Communicator, g *gorgonia.ExprGraph) (gorgonia.Nodes, error) {
		part, err := ops.Scatter(comm, 0, 0, vector(g, 1, 2, 3, 4)) // only rank 0's values matter
		if err != nil {
			return nil, err
		}
		squares, err := gorgonia.Square(part)
		if err != nil {
			return nil, err
		}
		all, err := ops.Gather(comm, 0, 0, squares)
		return gorgonia.Nodes{part, all}, err
	})
	// Output:
	// rank 0: [1 2] [1 4 9 16]
	// rank 1: [3 4] [0 0 0 0]
}

// Both ranks have x, each works on its chunk, and both get the whole result. As both compute the
// same loss, the gather scales gradients Up and the split scales them Down: dx is 2*x, as on one
// rank.
func ExampleGatherForwardSplitBackward() {
	onRanks(2, func(comm backend.Communicator, g *gorgonia.ExprGraph) (gorgonia.Nodes, error) {
		x := vector(g, 1, 2, 3, 4)
		part, err := ops.SplitForwardGatherBackward(comm, 0, ops.Down(comm), x)
		if err != nil {
			return nil, err
		}
		all, err := ops.GatherForwardSplitBackward(comm, 0, ops.Up(comm), part)
		if err != nil {
			return nil, err
		}
		dx, err := gradient(all, x)
		return gorgonia.Nodes{part, all, dx}, err
	})
	// Output:
	// rank 0: [1 2] [1 2 3 4] [2 4 6 8]
	// rank 1: [3 4] [1 2 3 4] [2 4 6 8]
}

// Tensor parallelism: y = sum(x * w), where each rank has half of the weights. x is the same on
// both ranks, and so is its gradient.
func ExampleCopyToParallel() {
	onRanks(2, func(comm backend.Communicator, g *gorgonia.ExprGraph) (gorgonia.Nodes, error) {
		x := gorgonia.NewScalar(g, gorgonia.Float64, gorgonia.WithName("x"),
			gorgonia.WithValue(2.0))
		w := gorgonia.NewConstant(float64(3 + 2*comm.Rank())) // 3 and 5
		enter, err := ops.CopyToParallel(comm, x)
		if err != nil {
			return nil, err
		}
		product, err := gorgonia.Mul(enter, w)
		if err != nil {
			return nil, err
		}
		y, err := ops.ReduceFromParallel(comm, product)
		if err != nil {
			return nil, err
		}
		dx, err := gradient(y, x) // of (8x)^2: 128x
		return gorgonia.Nodes{y, dx}, err
	})
	// Output:
	// rank 0: 16 256
	// rank 1: 16 256
}

// A Gorgonia machine hides the error that made it fail. Cause finds it.
func ExampleCause() {
	err := euryale.Run(context.Background(), 2, func(comm backend.Communicator,
		lock sync.Locker) error {
		lock.Lock()
		g := gorgonia.NewGraph()
		_, err := ops.AllReduce(comm, backend.Sum, vector(g, 1, 2))
		lock.Unlock()
		if err != nil {
			return err
		}
		if err := backend.Barrier(comm); err != nil {
			return err
		}
		comm.Close() // too early
		machine := gorgonia.NewTapeMachine(g)
		defer machine.Close()
		err = machine.RunAll()
		if comm.Rank() == 0 {
			fmt.Println(errors.Is(err, backend.ErrClosed),
				errors.Is(ops.Cause(err), backend.ErrClosed))
		}
		return nil
	})
	if err != nil {
		log.Fatal(err)
	}
	// Output: false true
}
