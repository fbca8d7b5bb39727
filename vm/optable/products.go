package main

import (
	"math"
	"slices"

	"gorgonia.org/gorgonia"
)

func productRows() []row {
	dot := func(x, y array) array { return zip(x, y, func(a, b float64) float64 { return a * b }).reduce(plus) }
	outer := func(x, y array) array {
		return generate([]int{x.shape[0], y.shape[0]}, func(i []int) float64 { return x.at(i[0]) * y.at(i[1]) })
	}
	return append([]row{
		of2("Mul(x, y), (3, 4) by (4, 5)", []int{3, 4}, []int{4, 5}, gorgonia.Mul, matmul),
		of2("Mul(x, y), (1, 4) by (4, 1)", []int{1, 4}, []int{4, 1}, gorgonia.Mul, matmul),
		of2("Mul(x, y), (3, 4) by (4, 1)", []int{3, 4}, []int{4, 1}, gorgonia.Mul, matmul),
		of2("Mul(x, y), (3, 4) by (4)", []int{3, 4}, []int{4}, gorgonia.Mul, func(x, y array) array { return matmul(x, y.reshape(4, 1)).reshape(3) }),
		of2("Mul(x, y), (3) by (3, 4)", []int{3}, []int{3, 4}, gorgonia.Mul, func(x, y array) array { return matmul(x.reshape(1, 3), y).reshape(4) }),
		of2("Mul(x, y), (4) by (4)", []int{4}, []int{4}, gorgonia.Mul, dot),
		of2("Mul(Transpose(x), y)", []int{4, 3}, []int{4, 5}, func(a, b *gorgonia.Node) (*gorgonia.Node, error) {
			return gorgonia.Mul(must(gorgonia.Transpose(a)), b)
		}, func(x, y array) array { return matmul(x.transpose(1, 0), y) }),
		of2("OuterProd(x, y)", []int{3}, []int{4}, gorgonia.OuterProd, outer).instead("`nn.OuterProd`"),
	}, append(batchedRows(), tensordotRows()...)...)
}

func batchedRows() []row {
	var rows []row
	for _, r := range []struct {
		call           string
		a, b           []int
		transA, transB bool
	}{
		{"BatchedMatMul(x, y)", []int{2, 3, 4}, []int{2, 4, 5}, false, false},
		{"BatchedMatMul(x, y), 4 axes", []int{2, 2, 3, 4}, []int{2, 2, 4, 5}, false, false},
		{"BatchedMatMul(x, y, true)", []int{2, 4, 3}, []int{2, 4, 5}, true, false},
		{"BatchedMatMul(x, y, false, true)", []int{2, 3, 4}, []int{2, 5, 4}, false, true},
		{"BatchedMatMul(x, y, true, true)", []int{2, 4, 3}, []int{2, 5, 4}, true, true},
		{"BatchedMatMul(x, y), a batch of 1", []int{1, 3, 4}, []int{1, 4, 5}, false, false},
	} {
		rows = append(rows, of2(r.call, r.a, r.b, func(a, b *gorgonia.Node) (*gorgonia.Node, error) {
			return gorgonia.BatchedMatMul(a, b, r.transA, r.transB)
		}, func(x, y array) array { return matmul(x.swapped(r.transA), y.swapped(r.transB)) }))
	}
	return rows
}

// swapped exchanges the last two axes, or not.
func (a array) swapped(swap bool) array {
	if !swap {
		return a
	}
	n := len(a.shape)
	axes := make([]int, n)
	for k := range axes {
		axes[k] = k
	}
	axes[n-2], axes[n-1] = n-1, n-2
	return a.transpose(axes...)
}

func tensordotRows() []row {
	at := func(a, b []int) node2 {
		return func(x, y *gorgonia.Node) (*gorgonia.Node, error) { return gorgonia.Tensordot(a, b, x, y) }
	}
	return []row{
		of2("Tensordot([1], [0], x, y), (3, 4) and (4, 5)", []int{3, 4}, []int{4, 5}, at([]int{1}, []int{0}), matmul),
		of2("Tensordot([1], [1], x, y), (3, 4) and (5, 4)", []int{3, 4}, []int{5, 4}, at([]int{1}, []int{1}),
			func(x, y array) array { return matmul(x, y.transpose(1, 0)) }),
		of2("Tensordot([2], [0], x, y), (2, 3, 4) and (4, 5)", []int{2, 3, 4}, []int{4, 5}, at([]int{2}, []int{0}),
			func(x, y array) array { return matmul(x.reshape(6, 4), y).reshape(2, 3, 5) }),
		of2("Tensordot([1 2], [0 1], x, y), (2, 3, 4) and (3, 4, 5)", []int{2, 3, 4}, []int{3, 4, 5}, at([]int{1, 2}, []int{0, 1}),
			func(x, y array) array { return matmul(x.reshape(2, 12), y.reshape(12, 5)) }),
		of2("Tensordot([0 1], [0 1], x, y), (3, 4) and (3, 4)", []int{3, 4}, []int{3, 4}, at([]int{0, 1}, []int{0, 1}),
			func(x, y array) array { return matmul(x.reshape(1, 12), y.reshape(12, 1)).reshape() }).instead("`Sum` of `HadamardProd`"),
		of2("Tensordot([0], [0], x, y), (4) and (4)", []int{4}, []int{4}, at([]int{0}, []int{0}),
			func(x, y array) array { return matmul(x.reshape(1, 4), y.reshape(4, 1)).reshape() }).instead("`Mul`"),
	}
}

// logSumExp is log(sum(exp(x))) along an axis.
func logSumExp(x array, axis int) array { return x.apply(math.Exp).reduce(plus, axis).apply(math.Log) }

func reductionRows() []row {
	axial := func(f func(*gorgonia.Node, ...int) (*gorgonia.Node, error), axes ...int) node1 {
		return func(x *gorgonia.Node) (*gorgonia.Node, error) { return f(x, axes...) }
	}
	mean := func(x array, axes ...int) array {
		y := x.reduce(plus, axes...)
		return y.apply(func(s float64) float64 { return s * float64(len(y.data)) / float64(len(x.data)) })
	}
	var rows []row
	for _, r := range []struct {
		says  string
		shape []int
		axes  []int
	}{
		{"x)", []int{3, 4}, nil}, {"x), (4)", []int{4}, nil}, {"x, 0)", []int{3, 4}, []int{0}}, {"x, 1)", []int{3, 4}, []int{1}},
		{"x, 0), (3, 1)", []int{3, 1}, []int{0}}, {"x, 1), (3, 1)", []int{3, 1}, []int{1}}, {"x, 0), (2, 3, 4)", []int{2, 3, 4}, []int{0}},
		{"x, 1), (2, 3, 4)", []int{2, 3, 4}, []int{1}}, {"x, 2), (2, 3, 4)", []int{2, 3, 4}, []int{2}},
		{"x, 0, 2), (2, 3, 4)", []int{2, 3, 4}, []int{0, 2}}, {"x, 1, 2), (2, 3, 4)", []int{2, 3, 4}, []int{1, 2}},
	} {
		rows = append(rows,
			of1("Sum("+r.says, r.shape, axial(gorgonia.Sum, r.axes...), func(x array) array { return x.reduce(plus, r.axes...) }),
			of1("Mean("+r.says, r.shape, axial(gorgonia.Mean, r.axes...), func(x array) array { return mean(x, r.axes...) }),
			of1("Max("+r.says, r.shape, axial(gorgonia.Max, r.axes...), func(x array) array { return x.reduce(math.Max, r.axes...) }))
	}
	slices.SortStableFunc(rows, func(a, b row) int { return int(a.call[1]) - int(b.call[1]) }) // M(a)x, M(e)an, S(u)m
	return append(rows, normReductionRows()...)
}

func normReductionRows() []row {
	norm := func(p float64) func(x array) array {
		return func(x array) array {
			return x.apply(func(v float64) float64 { return math.Pow(v, p) }).reduce(plus, 1).apply(func(v float64) float64 { return math.Pow(v, 1/p) })
		}
	}
	at := func(p int) node1 {
		return func(x *gorgonia.Node) (*gorgonia.Node, error) { return gorgonia.Norm(x, 1, p) }
	}
	logsumexp := func(axis int) node1 {
		return func(x *gorgonia.Node) (*gorgonia.Node, error) { return gorgonia.LogSumExp(x, axis) }
	}
	two := func(f func(gorgonia.Nodes, ...gorgonia.NodeConsOpt) (*gorgonia.Node, error)) node2 {
		return func(a, b *gorgonia.Node) (*gorgonia.Node, error) { return f(gorgonia.Nodes{a, b}) }
	}
	return []row{
		of1("Norm(x, 1, 2)", []int{3, 4}, at(2), norm(2)).with(positive),
		of1("Norm(x, 1, 3)", []int{3, 4}, at(3), norm(3)).with(positive),
		of1("LogSumExp(x, 1)", []int{3, 4}, logsumexp(1), func(x array) array { return logSumExp(x, 1) }).instead("`Log` of `Sum` of `Exp`"),
		of1("LogSumExp(x, 0), (4)", []int{4}, logsumexp(0), func(x array) array { return logSumExp(x, 0) }).instead("`Log` of `Sum` of `Exp`"),
		of2("ReduceAdd([x y])", []int{3, 4}, []int{3, 4}, two(gorgonia.ReduceAdd), func(x, y array) array { return zip(x, y, plus) }),
		of2("ReduceMul([x y]), scalars", nil, nil, two(gorgonia.ReduceMul), func(x, y array) array {
			return zip(x, y, func(a, b float64) float64 { return a * b })
		}),
		of1("SizeOf(1, x)", []int{3, 4}, func(x *gorgonia.Node) (*gorgonia.Node, error) { return gorgonia.SizeOf(1, x) },
			func(array) array { return array{nil, []float64{4}} }).nowhere(),
	}
}
