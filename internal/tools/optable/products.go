package main

import (
	"fmt"
	"math"
	"slices"

	G "gorgonia.org/gorgonia"
)

func productRows() []row {
	dot := func(x, y array) array {
		return zip(x, y, func(a, b float64) float64 { return a * b }).reduce(plus)
	}
	outer := func(x, y array) array {
		return generate([]int{x.shape[0], y.shape[0]}, func(i []int) float64 {
			return x.at(i[0]) * y.at(i[1])
		})
	}
	var outers []row
	for _, r := range [][2]int{{3, 4}, {1, 4}, {3, 1}, {1, 1}, {5, 5}} {
		call := fmt.Sprintf("OuterProd(x, y), (%d) and (%d)", r[0], r[1])
		outers = append(outers, of2(call, []int{r[0]}, []int{r[1]}, G.OuterProd, outer).
			instead("`nn.OuterProd`"))
	}
	return slices.Concat([]row{
		of2("Mul(x, y), (3, 4) by (4, 5)", []int{3, 4}, []int{4, 5}, G.Mul, matmul),
		of2("Mul(x, y), (1, 4) by (4, 1)", []int{1, 4}, []int{4, 1}, G.Mul, matmul),
		of2("Mul(x, y), (3, 4) by (4, 1)", []int{3, 4}, []int{4, 1}, G.Mul, matmul),
		of2("Mul(x, y), (3, 4) by (4)", []int{3, 4}, []int{4}, G.Mul,
			func(x, y array) array { return matmul(x, y.reshape(4, 1)).reshape(3) }),
		of2("Mul(x, y), (3) by (3, 4)", []int{3}, []int{3, 4}, G.Mul,
			func(x, y array) array { return matmul(x.reshape(1, 3), y).reshape(4) }),
		of2("Mul(x, y), (4) by (4)", []int{4}, []int{4}, G.Mul, dot),
		of2("Mul(Transpose(x), y)", []int{4, 3}, []int{4, 5}, func(a, b N) (N, error) {
			return G.Mul(must(G.Transpose(a)), b)
		}, func(x, y array) array { return matmul(x.transpose(1, 0), y) }),
	}, outers, batchedRows(), tensordotRows())
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
		rows = append(rows, of2(r.call, r.a, r.b, func(a, b N) (N, error) {
			return G.BatchedMatMul(a, b, r.transA, r.transB)
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
		return func(x, y N) (N, error) { return G.Tensordot(a, b, x, y) }
	}
	return []row{
		of2("Tensordot([1], [0], x, y), (3, 4) and (4, 5)", []int{3, 4}, []int{4, 5},
			at([]int{1}, []int{0}), matmul),
		of2("Tensordot([1], [1], x, y), (3, 4) and (5, 4)", []int{3, 4}, []int{5, 4},
			at([]int{1}, []int{1}),
			func(x, y array) array { return matmul(x, y.transpose(1, 0)) }),
		of2("Tensordot([2], [0], x, y), (2, 3, 4) and (4, 5)", []int{2, 3, 4}, []int{4, 5},
			at([]int{2}, []int{0}),
			func(x, y array) array { return matmul(x.reshape(6, 4), y).reshape(2, 3, 5) }),
		of2("Tensordot([1 2], [0 1], x, y), (2, 3, 4) and (3, 4, 5)", []int{2, 3, 4},
			[]int{3, 4, 5}, at([]int{1, 2}, []int{0, 1}),
			func(x, y array) array { return matmul(x.reshape(2, 12), y.reshape(12, 5)) }),
		of2("Tensordot([0 1], [0 1], x, y), (3, 4) and (3, 4)", []int{3, 4}, []int{3, 4},
			at([]int{0, 1}, []int{0, 1}),
			func(x, y array) array { return matmul(x.reshape(1, 12), y.reshape(12, 1)).reshape() }).
			instead("`Sum` of `HadamardProd`"),
		of2("Tensordot([0], [0], x, y), (4) and (4)", []int{4}, []int{4}, at([]int{0}, []int{0}),
			func(x, y array) array { return matmul(x.reshape(1, 4), y.reshape(4, 1)).reshape() }).
			instead("`Mul`"),
	}
}

// logSumExp is log(sum(exp(x))) along an axis.
func logSumExp(x array, axis int) array {
	return x.apply(math.Exp).reduce(plus, axis).apply(math.Log)
}

func reductionRows() []row {
	axial := func(f func(N, ...int) (N, error), axes ...int) node1 {
		return func(x N) (N, error) { return f(x, axes...) }
	}
	mean := func(x array, axes ...int) array {
		y := x.reduce(plus, axes...)
		return y.apply(func(s float64) float64 {
			return s * float64(len(y.data)) / float64(len(x.data))
		})
	}
	var rows []row
	for _, r := range []struct {
		shape []int
		axes  []int
	}{
		{[]int{3, 4}, nil}, {[]int{4}, nil}, {[]int{3, 4}, []int{0}}, {[]int{3, 4}, []int{1}},
		{[]int{4}, []int{0}}, {[]int{1}, []int{0}},
		{[]int{3, 1}, []int{0}}, {[]int{3, 1}, []int{1}}, {[]int{1, 4}, []int{0}}, {[]int{1, 4},
			[]int{1}}, {[]int{1, 1}, []int{0}},
		{[]int{2, 3, 4}, nil}, {[]int{2, 3, 4}, []int{0}}, {[]int{2, 3, 4}, []int{1}},
		{[]int{2, 3, 4}, []int{2}},
		{[]int{2, 3, 4}, []int{0, 1}}, {[]int{2, 3, 4}, []int{0, 2}}, {[]int{2, 3, 4}, []int{1, 2}},
		{[]int{2, 3, 1}, []int{1}},
		{[]int{2, 3, 4, 5}, nil}, {[]int{2, 3, 4, 5}, []int{0}}, {[]int{2, 3, 4, 5}, []int{1}},
		{[]int{2, 3, 4, 5}, []int{2}},
		{[]int{2, 3, 4, 5}, []int{3}}, {[]int{2, 3, 4, 5}, []int{0, 1}}, {[]int{2, 3, 4, 5},
			[]int{0, 2}}, {[]int{2, 3, 4, 5}, []int{0, 3}},
		{[]int{2, 3, 4, 5}, []int{1, 2}}, {[]int{2, 3, 4, 5}, []int{1, 3}}, {[]int{2, 3, 4, 5},
			[]int{2, 3}}, {[]int{2, 3, 4, 5}, []int{1, 2, 3}},
		{[]int{2, 3, 4, 5}, []int{0, 2, 3}}, {[]int{2, 3, 1, 5}, []int{2}}, {[]int{2, 1, 4, 1},
			[]int{2}}, {[]int{1, 1, 4, 5}, []int{2}},
		{[]int{2, 2, 3, 2, 2}, []int{2}}, {[]int{2, 2, 3, 2, 2}, []int{3}}, {[]int{2, 2, 3, 2, 2},
			[]int{0, 3}},
	} {
		along := "x"
		for _, axis := range r.axes {
			along += fmt.Sprintf(", %d", axis)
		}
		says := "(" + along + "), " + shown(r.shape)
		rows = append(rows,
			of1("Sum"+says, r.shape, axial(G.Sum, r.axes...), func(x array) array {
				return x.reduce(plus, r.axes...)
			}),
			of1("Mean"+says, r.shape, axial(G.Mean, r.axes...), func(x array) array {
				return mean(x, r.axes...)
			}),
			of1("Max"+says, r.shape, axial(G.Max, r.axes...), func(x array) array {
				return x.reduce(math.Max, r.axes...)
			}))
	}
	// M(a)x, M(e)an, S(u)m
	slices.SortStableFunc(rows, func(a, b row) int { return int(a.call[1]) - int(b.call[1]) })
	return append(rows, normReductionRows()...)
}

func normReductionRows() (rows []row) {
	for _, r := range []struct {
		shape   []int
		axis, p int
	}{
		{[]int{3, 4}, 1, 2}, {[]int{3, 4}, 1, 3}, {[]int{3, 4}, 0, 2}, {[]int{4}, 0, 2},
		{[]int{1, 4}, 0, 2}, {[]int{2, 3, 4}, 2, 2},
		{[]int{2, 3, 4, 5}, 2, 2}, {[]int{2, 3, 4, 5}, 3, 3},
	} {
		p := float64(r.p)
		rows = append(rows, of1(fmt.Sprintf("Norm(x, %d, %d), %s", r.axis, r.p, shown(r.shape)),
			r.shape,
			func(x N) (N, error) { return G.Norm(x, r.axis, r.p) },
			func(x array) array {
				powers := x.apply(func(v float64) float64 { return math.Pow(v, p) })
				return powers.reduce(plus, r.axis).apply(func(v float64) float64 {
					return math.Pow(v, 1/p)
				})
			}).with(positive))
	}
	for _, r := range []struct {
		shape []int
		axis  int
	}{{[]int{3, 4}, 1}, {[]int{3, 4}, 0}, {[]int{4}, 0}, {[]int{4, 1}, 1}, {[]int{2, 3, 4, 5}, 2}} {
		rows = append(rows, of1(fmt.Sprintf("LogSumExp(x, %d), %s", r.axis, shown(r.shape)),
			r.shape,
			func(x N) (N, error) { return G.LogSumExp(x, r.axis) },
			func(x array) array { return logSumExp(x, r.axis) }).instead("`Log` of `Sum` of `Exp`"))
	}
	return append(rows, foldRows()...)
}

// foldRows combine a list of nodes, or ask for a size.
func foldRows() (rows []row) {
	two := func(f func(G.Nodes, ...G.NodeConsOpt) (N, error)) node2 {
		return func(a, b N) (N, error) { return f(G.Nodes{a, b}) }
	}
	for _, shape := range [][]int{{3, 4}, {5}, {1, 4}, {2, 3, 4, 2}, nil} {
		rows = append(rows, of2("ReduceAdd([x y]), "+shown(shape), shape, shape,
			two(G.ReduceAdd),
			func(x, y array) array { return zip(x, y, plus) }))
	}
	for _, shapes := range [][2][]int{{nil, nil}, {{2, 3}, {3, 4}}, {{1, 3}, {3, 1}},
		{{2, 2}, {2, 2}}, {{3, 1}, {1, 2}}} {
		loop := matmul
		if shapes[0] == nil {
			loop = func(x, y array) array {
				return zip(x, y, func(a, b float64) float64 { return a * b })
			}
		}
		rows = append(rows, of2("ReduceMul([x y]), "+shown(shapes[0])+" and "+shown(shapes[1]),
			shapes[0], shapes[1], two(G.ReduceMul), loop))
	}
	for _, r := range []struct {
		shape []int
		axis  int
	}{{[]int{3, 4}, 1}, {[]int{3, 4}, 0}, {[]int{5}, 0}, {[]int{1, 4}, 0}, {[]int{2, 3, 4, 5}, 2}} {
		rows = append(rows, of1(fmt.Sprintf("SizeOf(%d, x), %s", r.axis, shown(r.shape)), r.shape,
			func(x N) (N, error) { return G.SizeOf(r.axis, x) },
			func(array) array { return array{nil, []float64{float64(r.shape[r.axis])}} }).nowhere())
	}
	return rows
}
