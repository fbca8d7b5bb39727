package nn_test

import (
	"fmt"
	"log"
	"strings"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/ops/nn"
)

// matrix is an input node.
func matrix(g *gorgonia.ExprGraph, name string, rows, columns int,
	values ...float64) *gorgonia.Node {
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

// gradient belongs to the sum of y squared.
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

// The second and the first row, and the second again: its gradient is the sum of both.
func ExampleEmbedding() {
	g := gorgonia.NewGraph()
	w := matrix(g, "w", 3, 2, 1, 2, 3, 4, 5, 6)
	tokens := gorgonia.NodeFromAny(g, tensor.New(tensor.WithShape(3),
		tensor.WithBacking([]int{1, 0, 1})), gorgonia.WithName("tokens"))
	y, err := nn.Embedding(w, tokens)
	if err != nil {
		log.Fatal(err)
	}
	show(g, y, gradient(y, w))
	// Output:
	// (3, 2) [3 4 1 2 3 4]
	// (3, 2) [2 4 12 16 0 0]
}

func ExampleByIndices() {
	g := gorgonia.NewGraph()
	x := matrix(g, "x", 2, 3, 1, 2, 3, 4, 5, 6)
	columns := gorgonia.NodeFromAny(g, tensor.New(tensor.WithShape(2),
		tensor.WithBacking([]int{2, 2})), gorgonia.WithName("columns"))
	y, err := nn.ByIndices(1, x, columns)
	if err != nil {
		log.Fatal(err)
	}
	show(g, y, gradient(y, x))
	// Output:
	// (2, 2) [3 3 6 6]
	// (2, 3) [0 0 12 0 0 24]
}

// The second row has no label.
func ExampleCrossEntropy() {
	g := gorgonia.NewGraph()
	logits := matrix(g, "logits", 2, 2, 0, 0, 3, 7)
	labels := gorgonia.NodeFromAny(g, tensor.New(tensor.WithShape(2),
		tensor.WithBacking([]int{1, nn.NoLabel})), gorgonia.WithName("labels"))
	loss, err := nn.CrossEntropy(nn.NoLabel, logits, labels)
	if err != nil {
		log.Fatal(err)
	}
	dx, err := gorgonia.Grad(loss, logits)
	if err != nil {
		log.Fatal(err)
	}
	show(g, loss, dx[0])
	// Output:
	// () 0.693
	// (2, 2) [0.5 -0.5 0 0]
}

// Two ranks that share a batch drop what one rank with the whole batch drops.
func ExampleDropout() {
	drop := func(first, rows int, values ...float64) {
		g := gorgonia.NewGraph()
		random := nn.NewRandom(3)
		random.Seek(0, first) // after each step: random.Next(first)
		y, err := nn.Dropout(0.5, random, matrix(g, "x", rows, 4, values...))
		if err != nil {
			log.Fatal(err)
		}
		show(g, y)
	}
	drop(0, 2, 1, 1, 1, 1, 1, 1, 1, 1)
	drop(0, 1, 1, 1, 1, 1)
	drop(1, 1, 1, 1, 1, 1)
	// Output:
	// (2, 4) [2 0 2 2 0 2 0 2]
	// (1, 4) [2 0 2 2]
	// (1, 4) [0 2 0 2]
}

func ExampleLayerNorm() {
	g := gorgonia.NewGraph()
	x := matrix(g, "x", 2, 2, 1, 5, 5, 1)
	gain := gorgonia.NodeFromAny(g, tensor.New(tensor.WithShape(2),
		tensor.WithBacking([]float64{1, 10})), gorgonia.WithName("gain"))
	bias := gorgonia.NodeFromAny(g, tensor.New(tensor.WithShape(2),
		tensor.WithBacking([]float64{0, 1})), gorgonia.WithName("bias"))
	y, err := nn.LayerNorm(1e-5, x, gain, bias)
	if err != nil {
		log.Fatal(err)
	}
	show(g, y)
	// Output:
	// (2, 2) [-1 11 1 -9]
}

func ExampleGELU() {
	g := gorgonia.NewGraph()
	x := matrix(g, "x", 1, 3, -1, 0, 1)
	y, err := nn.GELU(x)
	if err != nil {
		log.Fatal(err)
	}
	show(g, y)
	// Output:
	// (1, 3) [-0.159 0 0.841]
}

// Each channel has a filter of its own: the difference of two neighbours, and their sum.
func ExampleConv2D() {
	g := gorgonia.NewGraph()
	x := gorgonia.NodeFromAny(g, tensor.New(tensor.WithShape(1, 2, 1, 3),
		tensor.WithBacking([]float64{1, 2, 4, 10, 20, 40})), gorgonia.WithName("x"))
	w := gorgonia.NodeFromAny(g, tensor.New(tensor.WithShape(2, 1, 1, 2),
		tensor.WithBacking([]float64{-1, 1, 1, 1})), gorgonia.WithName("w"))
	depthwise := nn.ConvOptions{Groups: 2, Pad: []int{0, 0, 0, 1}} // a zero behind each row
	y, err := nn.Conv2D(depthwise, x, w, nil)
	if err != nil {
		log.Fatal(err)
	}
	show(g, y)
	// Output:
	// (1, 2, 1, 3) [1 2 -4 30 60 40]
}

// The last window goes beyond the image.
func ExampleMaxPool2D() {
	g := gorgonia.NewGraph()
	x := gorgonia.NodeFromAny(g, tensor.New(tensor.WithShape(1, 1, 1, 5),
		tensor.WithBacking([]float64{3, 1, 4, 1, 5})), gorgonia.WithName("x"))
	y, err := nn.MaxPool2D([2]int{1, 2}, [2]int{0, 0}, [2]int{1, 2}, x, nn.PoolOptions{Ceil: true})
	if err != nil {
		log.Fatal(err)
	}
	show(g, y)
	// Output:
	// (1, 1, 1, 3) [3 4 5]
}

// Each pixel is in one window, which has four.
func ExampleAvgPool2D() {
	g := gorgonia.NewGraph()
	x := gorgonia.NodeFromAny(g, tensor.New(tensor.WithShape(1, 1, 2, 4),
		tensor.WithBacking([]float64{1, 2, 3, 4, 5, 6, 7, 8})), gorgonia.WithName("x"))
	y, err := nn.AvgPool2D([2]int{2, 2}, [2]int{0, 0}, [2]int{2, 2}, x)
	if err != nil {
		log.Fatal(err)
	}
	show(g, y, gradient(y, x))
	// Output:
	// (1, 1, 1, 2) [3.5 5.5]
	// (1, 1, 2, 4) [1.75 1.75 2.75 2.75 1.75 1.75 2.75 2.75]
}

// Attention scores: queries times keys, transposed.
func ExampleBatchedMatMul() {
	g := gorgonia.NewGraph()
	q, k := matrix(g, "q", 2, 2, 1, 2, 3, 4), matrix(g, "k", 2, 2, 5, 6, 7, 8)
	scores, err := nn.BatchedMatMul(false, true, q, k)
	if err != nil {
		log.Fatal(err)
	}
	show(g, scores)
	// Output:
	// (2, 2) [17 23 39 53]
}

// Two heads share the keys of one, of which the second sequence has one and padding.
func ExampleAttention() {
	g := gorgonia.NewGraph()
	of := func(name string, shape []int, data ...float64) *gorgonia.Node {
		return gorgonia.NodeFromAny(g, tensor.New(tensor.WithShape(shape...),
			tensor.WithBacking(data)), gorgonia.WithName(name))
	}
	q := of("q", []int{2, 2, 1, 1}, 0, 0, 0, 0) // all keys weigh the same
	k := of("k", []int{2, 1, 2, 1}, 1, 2, 3, 4)
	v := of("v", []int{2, 1, 2, 1}, 1, 3, 5, 100)
	lengths := gorgonia.NodeFromAny(g, tensor.New(tensor.WithShape(2),
		tensor.WithBacking([]int{2, 1})), gorgonia.WithName("lengths"))
	y, err := nn.Attention(q, k, v, nn.AttentionOptions{KeyLengths: lengths})
	if err != nil {
		log.Fatal(err)
	}
	show(g, y, gradient(y, v))
	// Output:
	// (2, 2, 1, 1) [2 2 5 5]
	// (2, 1, 2, 1) [4 4 20 0]
}

func ExampleOuterProd() {
	g := gorgonia.NewGraph()
	a := gorgonia.NodeFromAny(g, tensor.New(tensor.WithShape(2),
		tensor.WithBacking([]float64{1, 2})), gorgonia.WithName("a"))
	b := gorgonia.NodeFromAny(g, tensor.New(tensor.WithShape(2),
		tensor.WithBacking([]float64{3, 4})), gorgonia.WithName("b"))
	c, err := nn.OuterProd(a, b)
	if err != nil {
		log.Fatal(err)
	}
	show(g, c, gradient(c, a))
	// Output:
	// (2, 2) [3 4 6 8]
	// (2) [50 100]
}

// A Dropout of Gorgonia, whose gradient is wrong unless p is 0.5.
func ExampleDefects() {
	g := gorgonia.NewGraph()
	x := matrix(g, "x", 1, 3, 1, 2, 3)
	gradient(gorgonia.Must(gorgonia.Dropout(x, 0.25)), x)
	for _, defect := range nn.Defects(g) {
		op, problem, _ := strings.Cut(fmt.Sprint(defect), ": ")
		fmt.Println(op)
		fmt.Println(problem)
	}
	// Output:
	// dropoutDiffOp(0.250000)
	// the gradient of a dropout with probability 0.25 is divided by it, not by 0.75: use nn.Dropout
}

// Each token goes to the expert with the best score, is weighted by the score, and comes back.
func ExampleTopK() {
	g := gorgonia.NewGraph()
	scores := matrix(g, "scores", 3, 2, 0.1, 0.9, 0.8, 0.2, 0.3, 0.7)
	values, experts, err := nn.TopK(1, 1, scores)
	if err != nil {
		log.Fatal(err)
	}
	show(g, values, gorgonia.Must(nn.Cast(tensor.Float64, experts)), gradient(values, scores))
	// Output:
	// (3, 1) [0.9 0.8 0.7]
	// (3, 1) [1 0 1]
	// (3, 2) [0 1.8 1.6 0 0 1.4]
}

// The logarithm of what is positive, and 0 elsewhere: NaN that is not chosen has no effect.
func ExampleWhere() {
	g := gorgonia.NewGraph()
	x := matrix(g, "x", 1, 3, 1, 2, -1)
	zero := gorgonia.NewConstant(0.0)
	positive, err := gorgonia.Gt(x, zero, false)
	if err != nil {
		log.Fatal(err)
	}
	y, err := nn.Where(positive, gorgonia.Must(gorgonia.Log(x)), zero)
	if err != nil {
		log.Fatal(err)
	}
	show(g, y)
	// Output:
	// (1, 3) [0 0.693 0]
}

// Label 0 weighs twice as much as label 1, and every class has a tenth of each target.
func ExampleCrossEntropyWith() {
	g := gorgonia.NewGraph()
	logits := matrix(g, "logits", 2, 2, 2, 0, 0, 2)
	labels := gorgonia.NodeFromAny(g, tensor.New(tensor.WithShape(2),
		tensor.WithBacking([]int{0, 0})), gorgonia.WithName("labels"))
	weights := gorgonia.NodeFromAny(g, tensor.New(tensor.WithShape(2),
		tensor.WithBacking([]float64{2, 1})), gorgonia.WithName("weights"))
	loss, err := nn.CrossEntropyWith(nn.CrossEntropyOptions{Smoothing: 0.2,
		Weights: weights, Reduction: nn.EachRow}, logits, labels)
	if err != nil {
		log.Fatal(err)
	}
	show(g, loss)
	// Output:
	// (2) [0.441 3.84]
}

// Queries of positions 0 and 1, turned by 0 and by one radian.
func ExampleRotary() {
	g := gorgonia.NewGraph()
	q := matrix(g, "q", 2, 2, 1, 0, 1, 0)
	cos, sin, err := nn.RotaryAngles(tensor.Float64, 10000, 0, 2, 2)
	if err != nil {
		log.Fatal(err)
	}
	y, err := nn.Rotary(nn.RotaryOptions{}, q, g.Constant(cos), g.Constant(sin))
	if err != nil {
		log.Fatal(err)
	}
	show(g, y)
	// Output:
	// (2, 2) [1 0 0.54 0.841]
}

// sequence is an input node of three axes.
func sequence(g *gorgonia.ExprGraph, name string, a, b, c int, x ...float64) *gorgonia.Node {
	value := tensor.New(tensor.WithShape(a, b, c), tensor.WithBacking(x))
	return gorgonia.NodeFromAny(g, value, gorgonia.WithName(name))
}

// One sample of three steps, and an LSTM of one unit whose gates see the input alone: large gates
// i, f and o are open, so that c adds up tanh of the input.
func ExampleLSTM() {
	g := gorgonia.NewGraph()
	x := sequence(g, "x", 3, 1, 1, 0.5, 0.5, -1)
	state := sequence(g, "state", 1, 1, 1, 0)
	weightIH, weightHH := matrix(g, "wx", 4, 1, 0, 0, 1, 0), matrix(g, "wh", 4, 1, 0, 0, 0, 0)
	vector := func(name string, x ...float64) *gorgonia.Node {
		value := tensor.New(tensor.WithShape(4), tensor.WithBacking(x))
		return gorgonia.NodeFromAny(g, value, gorgonia.WithName(name))
	}
	biasIH, biasHH := vector("bx", 30, 30, 0, 30), vector("bh", 0, 0, 0, 0)
	y, h, c, err := nn.LSTM(nn.RecurrentOptions{}, x, state, state, weightIH, weightHH, biasIH,
		biasHH)
	if err != nil {
		log.Fatal(err)
	}
	show(g, y, h, c)
	// Output:
	// (3, 1, 1) [0.432 0.728 0.161]
	// (1, 1, 1) [0.161]
	// (1, 1, 1) [0.163]
}
