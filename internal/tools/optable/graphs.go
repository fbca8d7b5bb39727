package main

import (
	"fmt"
	"math"
	"slices"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/ops/nn"
)

// graphRows are graphs of several operations: what goes wrong between operations that are right.
func graphRows() []row {
	return slices.Concat(gradRows(), modelRows(), sharingRows())
}

// grad is gorgonia.Grad by one node.
func grad(loss, by N) N {
	found, err := G.Grad(loss, by)
	if err != nil {
		panic(refusal{err})
	}
	return found[0]
}

func sum(x N) N { return must(G.Sum(x)) }

// derivative is a row whose result is a gradient that its build asks for.
func derivative(call string, build func(x N) N,
	loop func(x float64) float64) row {
	return of1(call, []int{4}, func(x N) (N, error) {
		return build(x), nil
	},
		func(x array) array { return x.apply(loop) }).nowhere()
}

func expOf(x N) N    { return must(G.Exp(x)) }
func squareOf(x N) N { return must(G.Square(x)) }
func cubeOf(x N) N   { return must(G.Cube(x)) }

// ourGrad is nn.Grad by one node.
func ourGrad(loss, by N) N {
	found, err := nn.Grad(loss, by)
	if err != nil {
		panic(refusal{err})
	}
	return found[0]
}

// gradRows ask for several gradients in one graph.
func gradRows() []row {
	stock := severalRows("Grad", grad)
	for i := range stock {
		stock[i].use = "one `Grad` of the sum of the losses, or `nn.Grad`"
	}
	return slices.Concat(stock, severalRows("nn.Grad", ourGrad), []row{
		derivative("Grad of the sum of two losses", func(x N) N {
			h := expOf(x)
			return grad(must(G.Add(sum(h), sum(squareOf(h)))), x)
		}, func(x float64) float64 { return math.Exp(x) + 2*math.Exp(2*x) }),
	})
}

// severalRows call a function that differentiates more than once.
func severalRows(name string, grad func(loss, by N) N) []row {
	return []row{
		derivative(name+" of one loss twice", func(x N) N {
			loss := sum(cubeOf(x))
			grad(loss, x)
			return grad(loss, x)
		}, func(x float64) float64 { return 3 * x * x }),
		derivative(name+" of two losses, one path to x each",
			func(x N) N {
				grad(sum(squareOf(x)), x)
				return grad(sum(cubeOf(x)), x)
			}, func(x float64) float64 { return 3 * x * x }),
		derivative(name+" of two losses, two paths to x in the second",
			func(x N) N {
				grad(sum(squareOf(x)), x)
				return grad(must(G.Add(sum(cubeOf(x)), sum(expOf(x)))), x)
			}, func(x float64) float64 { return 3*x*x + math.Exp(x) }),
		derivative(name+" of two losses that share a hidden layer",
			func(x N) N {
				h := expOf(x)
				grad(sum(h), x)
				return grad(sum(squareOf(h)), x)
			}, func(x float64) float64 { return 2 * math.Exp(2*x) }),
		derivative(name+" of a gradient's square (a gradient penalty)",
			func(x N) N {
				return grad(sum(squareOf(grad(sum(expOf(x)), x))), x)
			}, func(x float64) float64 { return 2 * math.Exp(2*x) }),
		derivative(name+" of the losses of a GAN, generator after discriminator",
			func(x N) N {
				w := node(x.Graph(), generate([]int{4}, func([]int) float64 { return 1 }),
					x.Dtype(), "w")
				judged := must(G.HadamardProd(expOf(x), w))
				grad(sum(squareOf(judged)), w)
				return grad(sum(judged), x)
			}, math.Exp),
	}
}

// modelRows are small models, with the gradient by all operands.
func modelRows() []row {
	return []row{
		{call: "convolution, rectifier, pool, product, softmax", in: dims([]int{2, 1, 4, 4},
			[]int{2, 1, 3, 3}, []int{8, 3}),
			build: func(x G.Nodes) G.Nodes {
				c := must(G.Conv2d(x[0], x[1], tensor.Shape{3, 3}, []int{1, 1}, []int{1, 1},
					[]int{1, 1}))
				p := must(G.MaxPool2D(must(G.Rectify(c)), tensor.Shape{2, 2},
					[]int{0, 0}, []int{2, 2}))
				return G.Nodes{must(
					G.SoftMax(
						must(G.Mul(must(G.Reshape(p, tensor.Shape{2, 8})), x[2]))))}
			},
			want: func(x, _ []array) []array {
				c := square(3, 1, 1, 1).convolve(x[0], x[1]).apply(func(v float64) float64 {
					return max(v, 0)
				})
				return []array{softmax(matmul(square(2, 0, 2, 1).max(c).reshape(2, 8), x[2]), 1)}
			}},
		{call: "recurrence, three steps of one cell", in: dims([]int{1, 3}, []int{3, 3}),
			build: func(x G.Nodes) G.Nodes {
				h := x[0]
				for range 3 {
					h = must(G.Tanh(must(G.Mul(h, x[1]))))
				}
				return G.Nodes{h}
			},
			want: func(x, _ []array) []array {
				h := x[0]
				for range 3 {
					h = matmul(h, x[1]).apply(math.Tanh)
				}
				return []array{h}
			}},
		{call: "residual block, its input read twice", in: dims([]int{3, 4}, []int{4, 4}),
			build: func(x G.Nodes) G.Nodes {
				h := must(G.Tanh(x[0]))
				return G.Nodes{must(G.Add(h, must(G.Rectify(must(G.Mul(h, x[1]))))))}
			},
			want: func(x, _ []array) []array {
				h := x[0].apply(math.Tanh)
				return []array{zip(h, matmul(h, x[1]).apply(func(v float64) float64 {
					return max(v, 0)
				}), plus)}
			}},
	}
}

// sharingRows read an operand in two ways.
func sharingRows() []row {
	return []row{
		{call: "autoencoder with tied weights", in: dims([]int{3, 4}, []int{4, 2}),
			build: func(x G.Nodes) G.Nodes {
				h := must(G.Sigmoid(must(G.Mul(x[0], x[1]))))
				return G.Nodes{must(G.Mul(h, must(G.Transpose(x[1]))))}
			},
			want: func(x, _ []array) []array {
				return []array{matmul(matmul(x[0], x[1]).apply(sigmoid), x[1].transpose(1, 0))}
			}},
		{call: "attention of stock operations", in: dims([]int{2, 3, 4}, []int{2, 5, 4},
			[]int{2, 5, 4}),
			build: func(x G.Nodes) G.Nodes {
				weights := must(G.SoftMax(must(G.BatchedMatMul(x[0], x[1], false, true))))
				return G.Nodes{must(G.BatchedMatMul(weights, x[2]))}
			},
			want: func(x, _ []array) []array {
				return []array{matmul(softmax(matmul(x[0], x[1].swapped(true)), 2), x[2])}
			}},
		{call: "mean of images by channel, taken away", in: dims([]int{2, 3, 4, 5}),
			build: func(x G.Nodes) G.Nodes {
				m := must(G.Reshape(must(G.Mean(x[0], 2, 3)), tensor.Shape{2, 3, 1, 1}))
				return G.Nodes{must(G.BroadcastSub(x[0], m, nil, []byte{2, 3}))}
			},
			want: func(x, _ []array) []array {
				m := x[0].reduce(plus, 2, 3).apply(func(s float64) float64 {
					return s / 20
				}).reshape(2, 3, 1, 1)
				return []array{zip(x[0], m, func(a, b float64) float64 { return a - b })}
			}},
	}
}

// edgeRows are exponentials of numbers beyond those of the other rows. The table of conventions has
// more of such numbers.
func edgeRows() (rows []row) {
	for _, large := range []float64{3e38, -3e38} {
		r := of1(fmt.Sprintf("Exp(x), x = %.0g", large), []int{6}, G.Exp,
			func(x array) array { return x.apply(math.Exp) }).nowhere()
		r.in[0].floats = []float64{float64(float32(large)), -2, 3, 4, 5, -6}
		rows = append(rows, r)
	}
	return rows
}
