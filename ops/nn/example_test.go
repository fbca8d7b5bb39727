package nn_test

import (
	"fmt"
	"log"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/ops/nn"
)

// matrix is an input node.
func matrix(g *gorgonia.ExprGraph, name string, rows, columns int, values ...float64) *gorgonia.Node {
	x := tensor.New(tensor.WithShape(rows, columns), tensor.WithBacking(values))
	return gorgonia.NodeFromAny(g, x, gorgonia.WithName(name))
}

// show runs the graph and prints the nodes.
func show(g *gorgonia.ExprGraph, nodes ...*gorgonia.Node) {
	values := make([]gorgonia.Value, len(nodes))
	for i, n := range nodes {
		gorgonia.Read(n, &values[i]) // a machine reuses the memory of nodes that nobody reads
	}
	m := gorgonia.NewTapeMachine(g)
	defer m.Close()
	if err := m.RunAll(); err != nil {
		log.Fatal(err)
	}
	for _, v := range values {
		fmt.Printf("%v %.3v\n", v.Shape(), v.Data())
	}
}

// gradient is that of the sum of y squared.
func gradient(y, x *gorgonia.Node) *gorgonia.Node {
	dx, err := gorgonia.Grad(gorgonia.Must(gorgonia.Sum(gorgonia.Must(gorgonia.Square(y)))), x)
	if err != nil {
		log.Fatal(err)
	}
	return dx[0]
}

// Queries, keys and values of one packed product.
func ExampleSplit() {
	g := gorgonia.NewGraph()
	qkv := matrix(g, "qkv", 2, 6, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12)
	parts, err := nn.Split(1, []int{2, 2, 2}, qkv)
	if err != nil {
		log.Fatal(err)
	}
	show(g, parts[0], parts[1], parts[2], gradient(parts[1], qkv))
	// Output:
	// (2, 2) [1 2 7 8]
	// (2, 2) [3 4 9 10]
	// (2, 2) [5 6 11 12]
	// (2, 6) [0 0 6 8 0 0 0 0 18 20 0 0]
}

// Every second column.
func ExampleSlice() {
	g := gorgonia.NewGraph()
	x := matrix(g, "x", 2, 3, 1, 2, 3, 4, 5, 6)
	y, err := nn.Slice(1, 0, 3, 2, x)
	if err != nil {
		log.Fatal(err)
	}
	show(g, y, gradient(y, x))
	// Output:
	// (2, 2) [1 3 4 6]
	// (2, 3) [2 0 6 8 0 12]
}

func ExampleConcat() {
	g := gorgonia.NewGraph()
	x, y := matrix(g, "x", 2, 1, 1, 2), matrix(g, "y", 2, 2, 3, 4, 5, 6)
	z, err := nn.Concat(1, x, y)
	if err != nil {
		log.Fatal(err)
	}
	show(g, z, gradient(z, x))
	// Output:
	// (2, 3) [1 3 4 2 5 6]
	// (2, 1) [2 4]
}

// SoftMax and LogSoftMax of one x are two nodes.
func ExampleSoftMax() {
	g := gorgonia.NewGraph()
	x := matrix(g, "x", 1, 2, 0, 1)
	y, err := nn.SoftMax(1, x)
	if err != nil {
		log.Fatal(err)
	}
	logs, err := nn.LogSoftMax(1, x)
	if err != nil {
		log.Fatal(err)
	}
	show(g, y, logs)
	// Output:
	// (1, 2) [0.269 0.731]
	// (1, 2) [-1.31 -0.313]
}
