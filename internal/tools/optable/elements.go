package main

import (
	"fmt"
	"math"
	"slices"
	"strings"

	G "gorgonia.org/gorgonia"
)

// section is a part of the table.
type section struct {
	title string
	rows  []row
}

// sections are all rows, in the order of the page.
func sections() []section {
	return []section{
		{"Functions of one element", append(twiceRead(elementwise(unaryRows())), edgeRows()...)},
		{"Functions of two elements", twiceRead(elementwise(binaryRows()))},
		{"Comparisons", twiceRead(elementwise(comparisonRows()))},
		{"Products", twiceRead(productRows())},
		{"Reductions", twiceRead(reductionRows())},
		{"Shapes and parts", twiceRead(shapeRows())},
		{"Softmax and losses", twiceRead(lossRows())},
		{"Convolution and pooling", twiceRead(imageRows())},
		{"Normalisation and random numbers", twiceRead(normRows())},
		{"Different operations on the same operands", alone(pairRows())},
		{"Whole graphs", alone(graphRows())},
	}
}

// elementwise adds rows with other shapes for those whose operands are all of shape (3, 4).
func elementwise(rows []row) []row {
	for _, r := range slices.Clone(rows) {
		if slices.ContainsFunc(r.in, func(in input) bool {
			return !slices.Equal(in.shape, []int{3, 4})
		}) {
			continue
		}
		for _, shape := range [][]int{{5}, {1, 4}, {4, 1}, {2, 3, 4}, {2, 3, 4, 2}} {
			rows = append(rows, r.shaped(shape))
		}
	}
	return rows
}

// shaped returns a row whose operands have another shape.
func (r row) shaped(shape []int) row {
	r.in, r.call = slices.Clone(r.in), r.call+", "+shown(shape)
	for i := range r.in {
		r.in[i].shape = shape
	}
	return r
}

// shown is a shape as the page has it: (2, 3, 4).
func shown(shape []int) string {
	return "(" + strings.Join(strings.Fields(strings.Trim(fmt.Sprint(shape), "[]")), ", ") + ")"
}

// N is a node of a graph.
type N = *G.Node

type (
	node1 = func(N) (N, error)
	node2 = func(a, b N) (N, error)
)

// dims makes operands with values of both signs.
func dims(shapes ...[]int) (in []input) {
	for _, s := range shapes {
		in = append(in, input{shape: s})
	}
	return in
}

// of1 is a row with one operand and one result.
func of1(call string, shape []int, f node1, loop func(x array) array) row {
	return row{call: call, in: dims(shape),
		build: func(x G.Nodes) G.Nodes { return G.Nodes{must(f(x[0]))} },
		want:  func(x, _ []array) []array { return []array{loop(x[0])} }}
}

// of2 is a row with two operands and one result.
func of2(call string, a, b []int, f node2, loop func(x, y array) array) row {
	return row{call: call, in: dims(a, b),
		build: func(x G.Nodes) G.Nodes { return G.Nodes{must(f(x[0], x[1]))} },
		want:  func(x, _ []array) []array { return []array{loop(x[0], x[1])} }}
}

// with gives all operands of a row another kind of values.
func (r row) with(k kind) row {
	for i := range r.in {
		r.in[i].kind = k
	}
	return r
}

// nowhere says that the row's derivative is zero or undefined everywhere.
func (r row) nowhere() row {
	r.flat = true
	return r
}

// instead names the replacement.
func (r row) instead(use string) row {
	r.use = use
	return r
}

func sign(x float64) float64    { return math.Copysign(truth(x != 0), x) }
func sigmoid(x float64) float64 { return 1 / (1 + math.Exp(-x)) }
func softplus(x float64) float64 {
	return math.Log1p(math.Exp(-math.Abs(x))) + max(x, 0)
}

func unaryRows() []row {
	unary := func(call string, f node1, loop func(float64) float64) row {
		return of1(call, []int{3, 4}, f, func(x array) array { return x.apply(loop) })
	}
	rows := []row{
		unary("Abs(x)", G.Abs, math.Abs),
		unary("Sign(x)", G.Sign, sign).nowhere(),
		unary("Ceil(x)", G.Ceil, math.Ceil).nowhere(),
		unary("Floor(x)", G.Floor, math.Floor).nowhere(),
		unary("Sin(x)", G.Sin, math.Sin),
		unary("Cos(x)", G.Cos, math.Cos),
		unary("Exp(x)", G.Exp, math.Exp),
		unary("Expm1(x)", G.Expm1, math.Expm1),
		unary("Log(x)", G.Log, math.Log).with(positive),
		unary("Log1p(x)", G.Log1p, math.Log1p).with(positive),
		unary("Log2(x)", G.Log2, math.Log2).with(positive).instead(
			"`Log`, divided by `math.Ln2`"),
		unary("Neg(x)", G.Neg, func(x float64) float64 { return -x }),
		unary("Square(x)", G.Square, func(x float64) float64 { return x * x }),
		unary("Cube(x)", G.Cube, func(x float64) float64 { return x * x * x }),
		unary("Sqrt(x)", G.Sqrt, math.Sqrt).with(positive),
		unary("Inverse(x)", G.Inverse, func(x float64) float64 { return 1 / x }).with(positive),
		unary("InverseSqrt(x)", G.InverseSqrt, func(x float64) float64 {
			return 1 / math.Sqrt(x)
		}).with(positive).
			instead("`Inverse` of `Sqrt`"),
		unary("Tanh(x)", G.Tanh, math.Tanh),
		unary("Sigmoid(x)", G.Sigmoid, sigmoid),
		unary("Softplus(x)", G.Softplus, softplus),
		unary("Rectify(x)", G.Rectify, func(x float64) float64 { return max(x, 0) }),
		unary("LeakyRelu(x, 0.1)", func(x N) (N, error) {
			return G.LeakyRelu(x, 0.1)
		},
			func(x float64) float64 { return max(x, 0) + 0.1*min(x, 0) }),
		unary("Mish(x)", G.Mish, func(x float64) float64 { return x * math.Tanh(softplus(x)) }),
	}
	return append(rows, scalarRows()...)
}

// scalarRows are functions of a scalar, which Gorgonia implements apart from those of tensors.
func scalarRows() []row {
	scalar := func(call string, f node1, loop func(float64) float64) row {
		return of1(call+", x a scalar", nil, f, func(x array) array { return x.apply(loop) }).with(
			positive)
	}
	return []row{
		scalar("Exp(x)", G.Exp, math.Exp),
		scalar("Log(x)", G.Log, math.Log),
		scalar("Sqrt(x)", G.Sqrt, math.Sqrt),
		scalar("Square(x)", G.Square, func(x float64) float64 { return x * x }),
		scalar("Inverse(x)", G.Inverse, func(x float64) float64 { return 1 / x }),
		scalar("Tanh(x)", G.Tanh, math.Tanh),
		scalar("Sigmoid(x)", G.Sigmoid, sigmoid),
		scalar("Neg(x)", G.Neg, func(x float64) float64 { return -x }),
	}
}

// arithmetic are the functions of two elements.
func arithmetic() []struct {
	name string
	f    node2
	loop func(x, y float64) float64
} {
	return []struct {
		name string
		f    node2
		loop func(x, y float64) float64
	}{
		{"Add", G.Add, plus},
		{"Sub", G.Sub, func(x, y float64) float64 { return x - y }},
		{"HadamardProd", G.HadamardProd, func(x, y float64) float64 { return x * y }},
		{"HadamardDiv", G.HadamardDiv, func(x, y float64) float64 { return x / y }},
		{"Pow", G.Pow, math.Pow},
	}
}

func binaryRows() []row {
	var rows []row
	for _, op := range arithmetic() {
		loop := func(x, y array) array { return zip(x, y, op.loop) }
		for _, shapes := range []struct {
			says string
			a, b []int
		}{{"", []int{3, 4}, []int{3, 4}}, {", x a scalar", nil, []int{3, 4}}, {", y a scalar",
			[]int{3, 4}, nil}, {", scalars", nil, nil}} {
			rows = append(rows, of2(op.name+"(x, y)"+shapes.says, shapes.a, shapes.b, op.f,
				loop).with(positive))
		}
	}
	square := func(x N) (N, error) { return G.HadamardProd(x, x) }
	return append(slices.Concat(rows, broadcastRows(), autoRows(), scaledRows()),
		of1("HadamardProd(x, x)", []int{3, 4}, square, func(x array) array {
			return zip(x, x, func(a, b float64) float64 { return a * b })
		}),
		of2("Div(x, y)", []int{3, 4}, []int{3, 4}, G.Div, func(x, y array) array {
			return zip(x, y, func(a, b float64) float64 { return a / b })
		}).with(positive),
		of2("MaxBetween(x, y)", []int{3, 4}, []int{3, 4}, G.MaxBetween,
			func(x, y array) array { return zip(x, y, math.Max) }),
		of2("MinBetween(x, y)", []int{3, 4}, []int{3, 4}, G.MinBetween,
			func(x, y array) array { return zip(x, y, math.Min) }),
	)
}

// broadcastRows repeat an axis of one operand, the first or the last, of two or three.
func broadcastRows() []row {
	type broadcast = func(a, b N, left, right []byte) (N, error)
	fs := []broadcast{G.BroadcastAdd, G.BroadcastSub, G.BroadcastHadamardProd,
		G.BroadcastHadamardDiv, G.BroadcastPow}
	var rows []row
	for i, op := range arithmetic() {
		loop := func(x, y array) array { return zip(x, y, op.loop) }
		at := func(left, right []byte) node2 {
			return func(a, b N) (N, error) { return fs[i](a, b, left, right) }
		}
		call := "Broadcast" + op.name + "(x, y, "
		for _, r := range repeated4() {
			rows = append(rows, of2(call+r.call(), r.a, r.b, at(r.left, r.right), loop).with(
				positive))
		}
		rows = append(rows,
			of2(call+"nil, [0]), y (1, 4)", []int{3, 4}, []int{1, 4}, at(nil, []byte{0}),
				loop).with(positive),
			of2(call+"[1], nil), x (3, 1)", []int{3, 1}, []int{3, 4}, at([]byte{1}, nil),
				loop).with(positive),
			of2(call+"nil, [0 2]), y (1, 3, 1)", []int{2, 3, 4}, []int{1, 3, 1},
				at(nil, []byte{0, 2}), loop).with(positive))
	}
	slices.SortStableFunc(rows, func(a, b row) int {
		return len(a.in[0].shape) - len(b.in[0].shape)
	})
	add := arithmetic()[0].loop
	return append(rows,
		of2("BroadcastAdd(x, y, nil, [0]), y (4)", []int{3, 4}, []int{4},
			func(a, b N) (N, error) {
				return G.BroadcastAdd(a, b, nil, []byte{0})
			}, func(x, y array) array { return zip(x, y.reshape(1, 4), add) }),
		of2("BroadcastAdd(x, y, [0], [1]), x (1, 4), y (3, 1)", []int{1, 4}, []int{3, 1},
			func(a, b N) (N, error) {
				return G.BroadcastAdd(a, b, []byte{0}, []byte{1})
			}, func(x, y array) array { return zip(x, y, add) }),
	)
}

// autoRows let Gorgonia find the axes.
func autoRows() (rows []row) {
	for _, r := range [][2][]int{{{3, 4}, {1, 4}}, {{3, 4}, {3, 1}}, {{2, 3, 4}, {1, 3, 1}},
		{{1, 4}, {3, 4}}, {{2, 3, 4, 2}, {1, 3, 1, 1}}} {
		rows = append(rows, of2(fmt.Sprintf("Auto(BroadcastAdd, x, y), %s and %s", shown(r[0]),
			shown(r[1])), r[0], r[1],
			func(a, b N) (N, error) { return G.Auto(G.BroadcastAdd, a, b) },
			func(x, y array) array { return zip(x, y, plus) }))
	}
	return rows
}

// scaledRows are products of a tensor and a number.
func scaledRows() (rows []row) {
	for _, shape := range [][]int{{3, 4}, {5}, {1, 4}, {4, 1}, {2, 3, 4, 2}} {
		rows = append(rows, of2("Mul(x, y), "+shown(shape)+", y a scalar", shape, nil, G.Mul,
			func(x, y array) array {
				return zip(x, y, func(a, b float64) float64 { return a * b })
			}))
	}
	return rows
}

// broadcasting are shapes with the axes of length 1 that are repeated.
type broadcasting struct {
	a, b        []int
	left, right []byte
}

func (b broadcasting) call() string {
	axes := func(list []byte) string {
		if list == nil {
			return "nil"
		}
		return fmt.Sprint(list)
	}
	return fmt.Sprintf("%s, %s), %s and %s", axes(b.left), axes(b.right), shown(b.a), shown(b.b))
}

// repeated4 are broadcasts along several of four axes.
func repeated4() []broadcasting {
	x := []int{2, 3, 4, 2}
	return []broadcasting{
		{x, []int{1, 3, 1, 1}, nil, []byte{0, 2, 3}},
		{x, []int{2, 3, 1, 1}, nil, []byte{2, 3}},
		{x, []int{2, 3, 1, 2}, nil, []byte{2}},
		{x, []int{2, 1, 4, 1}, nil, []byte{1, 3}},
		{[]int{1, 3, 1, 2}, x, []byte{0, 2}, nil},
	}
}

func comparisonRows() []row {
	var rows []row
	for _, op := range []struct {
		name  string
		f     func(a, b N, same bool) (N, error)
		loop  func(x, y float64) bool
		wide  func(a, b N, same bool, left, right []byte) (N, error)
		broad string
	}{
		{"Lt", G.Lt, func(x, y float64) bool { return x < y }, G.BroadcastLt, "BroadcastLt"},
		{"Lte", G.Lte, func(x, y float64) bool { return x <= y }, G.BroadcastLte, "BroadcastLte"},
		{"Gt", G.Gt, func(x, y float64) bool { return x > y }, G.BroadcastGt, "BroadcastGt"},
		{"Gte", G.Gte, func(x, y float64) bool { return x >= y }, G.BroadcastGte, "BroadcastGte"},
		{"Eq", G.Eq, func(x, y float64) bool { return x == y }, G.BroadcastEq, "BroadcastEq"},
		{"Ne", G.Ne, func(x, y float64) bool { return x != y }, G.BroadcastNe, "BroadcastNe"}} {
		loop := func(x, y array) array {
			return zip(x, y, func(a, b float64) float64 { return truth(op.loop(a, b)) })
		}
		bools := func(a, b N) (N, error) { return op.f(a, b, false) }
		same := func(a, b N) (N, error) { return op.f(a, b, true) }
		wide := func(a, b N) (N, error) { return op.wide(a, b, true, nil, []byte{0}) }
		for _, r := range repeated4() {
			rows = append(rows, of2(op.broad+"(x, y, true, "+r.call(), r.a, r.b,
				func(a, b N) (N, error) {
					return op.wide(a, b, true, r.left, r.right)
				}, loop).nowhere())
		}
		rows = append(rows,
			of2(op.name+"(x, y, false)", []int{3, 4}, []int{3, 4}, bools, loop).nowhere(),
			of2(op.name+"(x, y, true)", []int{3, 4}, []int{3, 4}, same, loop).nowhere(),
			of2(op.name+"(x, y, true), y a scalar", []int{3, 4}, nil, same, loop).nowhere(),
			of2(op.name+"(x, y, false), scalars", nil, nil, bools, loop).nowhere(),
			of2(op.broad+"(x, y, true, nil, [0]), y (1, 4)", []int{3, 4}, []int{1, 4}, wide,
				loop).nowhere())
	}
	return rows
}
