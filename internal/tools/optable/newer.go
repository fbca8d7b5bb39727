package main

import (
	"cmp"
	"math"
	"slices"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/ops/nn"
)

// calls is a row of an operation of package ops/nn with one result.
func calls(call string, in []input, build func(x gorgonia.Nodes) (*gorgonia.Node, error),
	want func(x []array) array) row {
	return row{call: call, in: in,
		build: func(x gorgonia.Nodes) gorgonia.Nodes { return gorgonia.Nodes{must(build(x))} },
		want:  func(x, _ []array) []array { return []array{want(x)} }}
}

// ints is an operand of integers.
func ints(shape []int, x ...int) input { return input{shape: shape, kind: integers, ints: x} }

// with returns an index with another place along an axis.
func with(i []int, axis, place int) []int {
	own := slices.Clone(i)
	own[axis] = place
	return own
}

// newerRows are the operations that Gorgonia has nothing for.
func newerRows() []row {
	return slices.Concat(chosenRows(), gatheredRows(), reducedRows(), ourModelRows(),
		recurrentRows(), otherConvRows())
}

func chosenRows() []row {
	conditions, three := ints([]int{2, 3}, 0, 1, 0, 2, 0, 1), []int{2, 3}
	logic := func(name string, op func(x, y *gorgonia.Node) (*gorgonia.Node, error),
		is func(x, y bool) bool) row {
		return calls("nn."+name+"(x, y) of integers", []input{conditions, ints([]int{3}, 1, 0, 0)},
			func(x gorgonia.Nodes) (*gorgonia.Node, error) { return op(x[0], x[1]) },
			func(x []array) array {
				return generate(three, func(i []int) float64 {
					return truth(is(x[0].at(i...) != 0, x[1].at(i[1]) != 0))
				})
			}).nowhere()
	}
	return []row{
		calls("nn.Where(condition, x, y), (2, 3) and (3)", []input{{shape: three},
			{shape: []int{3}}, conditions},
			func(x gorgonia.Nodes) (*gorgonia.Node, error) { return nn.Where(x[2], x[0], x[1]) },
			func(x []array) array {
				return generate(three, func(i []int) float64 {
					if x[2].at(i...) != 0 {
						return x[0].at(i...)
					}
					return x[1].at(i[1])
				})
			}),
		calls("nn.MaskedFill(x, mask, 7)", []input{{shape: three}, conditions},
			func(x gorgonia.Nodes) (*gorgonia.Node, error) { return nn.MaskedFill(x[0], x[1], 7) },
			func(x []array) array {
				return zip(x[0], x[1], func(v, mask float64) float64 {
					return v*truth(mask == 0) + 7*truth(mask != 0)
				})
			}),
		logic("And", nn.And, func(x, y bool) bool { return x && y }),
		logic("Or", nn.Or, func(x, y bool) bool { return x || y }),
		logic("Xor", nn.Xor, func(x, y bool) bool { return x != y }),
		calls("nn.Not(x) of integers", []input{conditions},
			func(x gorgonia.Nodes) (*gorgonia.Node, error) { return nn.Not(x[0]) },
			func(x []array) array {
				return x[0].apply(func(v float64) float64 { return truth(v == 0) })
			}).nowhere(),
		calls("nn.Cast(dtype, nn.Cast(Float64, x))", dims(three),
			func(x gorgonia.Nodes) (*gorgonia.Node, error) {
				return nn.Cast(x[0].Dtype(), must(nn.Cast(gorgonia.Float64, x[0])))
			}, func(x []array) array { return x[0] }),
	}
}

// sorted returns the places of the elements along an axis of length n, the largest first.
func sorted(x array, i []int, axis int) []int {
	all := make([]int, x.shape[axis])
	for k := range all {
		all[k] = k
	}
	slices.SortStableFunc(all, func(a, b int) int {
		return cmp.Compare(x.at(with(i, axis, b)...), x.at(with(i, axis, a)...))
	})
	return all
}

func gatheredRows() []row {
	three, places := []int{2, 4, 3}, ints([]int{2, 2, 3}, 3, 0, 1, 1, 2, 0, 0, 3, 3, 2, 0, 1)
	top := row{call: "nn.TopK(1, 2, x), (2, 4, 3)", in: dims(three),
		build: func(x gorgonia.Nodes) gorgonia.Nodes {
			values, _, err := nn.TopK(1, 2, x[0])
			return gorgonia.Nodes{must(values, err)}
		}, want: func(x, _ []array) []array {
			return []array{generate([]int{2, 2, 3}, func(i []int) float64 {
				return x[0].at(with(i, 1, sorted(x[0], i, 1)[i[1]])...)
			})}
		}}
	arg := func(name string, op func(int, bool, *gorgonia.Node) (*gorgonia.Node, error),
		place int) row {
		return calls("nn."+name+"(1, true, x)", dims(three),
			func(x gorgonia.Nodes) (*gorgonia.Node, error) { return op(1, true, x[0]) },
			func(x []array) array {
				return generate([]int{2, 1, 3}, func(i []int) float64 {
					return float64(sorted(x[0], i, 1)[place])
				})
			}).nowhere()
	}
	return []row{top, arg("ArgMax", nn.ArgMax, 0), arg("ArgMin", nn.ArgMin, 3),
		calls("nn.GatherElements(1, x, indices)", []input{{shape: three}, places},
			func(x gorgonia.Nodes) (*gorgonia.Node, error) {
				return nn.GatherElements(1, x[0], x[1])
			}, func(x []array) array {
				return generate(places.shape, func(i []int) float64 {
					return x[0].at(with(i, 1, int(x[1].at(i...)))...)
				})
			}),
		calls("nn.IndexCopy(1, x, indices, y)", []input{{shape: three}, {shape: []int{2, 2, 3}},
			ints([]int{2}, 3, 1)},
			func(x gorgonia.Nodes) (*gorgonia.Node, error) {
				return nn.IndexCopy(1, x[0], x[2], x[1])
			}, func(x []array) array {
				return generate(three, func(i []int) float64 {
					for k, at := range x[2].data {
						if int(at) == i[1] {
							return x[1].at(with(i, 1, k)...)
						}
					}
					return x[0].at(i...)
				})
			}),
		calls("nn.ScatterAdd(1, 5, x, indices)", []input{{shape: three}, ints([]int{4}, 4, 0, 4,
			1)},
			func(x gorgonia.Nodes) (*gorgonia.Node, error) {
				return nn.ScatterAdd(1, 5, x[0], x[1])
			}, func(x []array) array {
				return generate([]int{2, 5, 3}, func(i []int) (sum float64) {
					for k, at := range x[1].data {
						sum += truth(int(at) == i[1]) * x[0].at(with(i, 1, k)...)
					}
					return sum
				})
			}),
	}
}

func reducedRows() (rows []row) {
	for _, r := range []struct {
		name string
		op   func([]int, bool, *gorgonia.Node) (*gorgonia.Node, error)
		loop func(x array) array
	}{
		{"ReduceMax", nn.ReduceMax, func(x array) array { return x.reduce(math.Max, 0, 2) }},
		{"ReduceMin", nn.ReduceMin, func(x array) array { return x.reduce(math.Min, 0, 2) }},
		{"ReduceProd", nn.ReduceProd, func(x array) array {
			return x.reduce(func(p, v float64) float64 { return p * v }, 0, 2)
		}},
		{"LogSumExp", nn.LogSumExp, func(x array) array {
			return x.apply(math.Exp).reduce(plus, 0, 2).apply(math.Log)
		}},
	} {
		rows = append(rows, of1("nn."+r.name+"([0 2], false, x), (2, 3, 2)", []int{2, 3, 2},
			func(x *gorgonia.Node) (*gorgonia.Node, error) { return r.op([]int{0, 2}, false, x) },
			r.loop))
	}
	for _, o := range []nn.CumSumOptions{{}, {Exclusive: true}, {Reverse: true}} {
		call := "nn.CumSum(1, {}, x), (2, 5)"
		if o != (nn.CumSumOptions{}) {
			call = map[bool]string{true: "nn.CumSum(1, {Reverse}, x), (2, 5)",
				false: "nn.CumSum(1, {Exclusive}, x), (2, 5)"}[o.Reverse]
		}
		rows = append(rows, of1(call, []int{2, 5},
			func(x *gorgonia.Node) (*gorgonia.Node, error) { return nn.CumSum(1, o, x) },
			func(x array) array {
				return generate(x.shape, func(i []int) (sum float64) {
					for k := range x.shape[1] {
						before := k < i[1] || k == i[1] && !o.Exclusive
						sum += truth(before && !o.Reverse || k >= i[1] && o.Reverse) * x.at(i[0], k)
					}
					return sum
				})
			}))
	}
	return rows
}

func ourModelRows() []row {
	three := []int{2, 3, 4}
	labels := ints([]int{3}, 2, 0, nn.NoLabel)
	angles := func(place int) []float64 { return input{shape: []int{3, 2}}.values(place).data }
	return []row{
		calls("nn.RMSNorm(1e-5, x, y), (2, 3, 4)", dims(three, []int{4}),
			func(x gorgonia.Nodes) (*gorgonia.Node, error) {
				return nn.RMSNorm(epsilon, x[0], x[1])
			}, func(x []array) array {
				return generate(three, func(i []int) float64 {
					squares := 0.0
					for k := range 4 {
						squares += math.Pow(x[0].at(i[0], i[1], k), 2)
					}
					return x[0].at(i...) / math.Sqrt(squares/4+epsilon) * x[1].at(i[2])
				})
			}),
		calls("nn.SwiGLU(x, y)", dims([]int{3, 4}, []int{3, 4}),
			func(x gorgonia.Nodes) (*gorgonia.Node, error) { return nn.SwiGLU(x[0], x[1]) },
			func(x []array) array {
				return zip(x[0], x[1], func(g, v float64) float64 { return g * sigmoid(g) * v })
			}),
		calls("nn.Rotary({}, x, cos, sin), (2, 3, 4)", dims(three),
			func(x gorgonia.Nodes) (*gorgonia.Node, error) {
				like := func(place int) *gorgonia.Node {
					return numbersLike(x[0], []int{3, 2}, angles(place))
				}
				return nn.Rotary(nn.RotaryOptions{}, x[0], like(1), like(2))
			}, func(x []array) array {
				return generate(three, func(i []int) float64 {
					pair := i[1]*2 + i[2]%2
					cos, sin := angles(1)[pair], angles(2)[pair]
					a, b := x[0].at(i[0], i[1], i[2]%2), x[0].at(i[0], i[1], i[2]%2+2)
					if i[2] < 2 {
						return a*cos - b*sin
					}
					return a*sin + b*cos
				})
			}),
		calls("nn.CrossEntropyWith({Smoothing: 0.25, Reduction: SumOfRows}, x, labels)",
			[]input{{shape: []int{3, 4}}, labels},
			func(x gorgonia.Nodes) (*gorgonia.Node, error) {
				return nn.CrossEntropyWith(nn.CrossEntropyOptions{Smoothing: 0.25,
					Reduction: nn.SumOfRows}, x[0], x[1])
			}, func(x []array) array {
				logs, loss := softmax(x[0], 1).apply(math.Log), 0.0
				for i, label := range labels.ints[:2] {
					loss -= 0.75 * logs.at(i, label)
					for k := range 4 {
						loss -= 0.25 / 4 * logs.at(i, k)
					}
				}
				return array{nil, []float64{loss}}
			}),
	}
}

// recurrentRows are of two steps of a batch of 2, from 3 numbers to 2.
func recurrentRows() []row {
	in := func(gates int) []input {
		return dims([]int{2, 2, 3}, []int{1, 2, 2}, []int{1, 2, 2}, []int{2 * gates, 3},
			[]int{2 * gates, 2}, []int{2 * gates}, []int{2 * gates})
	}
	// run returns y and the states behind the last step, by the sums of the operands of each gate:
	// of x, and of h.
	run := func(x []array, next func(a, b func(gate int) float64, h, c float64) (float64,
		float64)) []array {
		y, h, c := array{[]int{2, 2, 2}, nil}, x[1].reshape(2, 2), x[2].reshape(2, 2)
		for t := range 2 {
			sums := func(of array, at []int, w, bias array) func(gate, i int) float64 {
				return func(gate, i int) float64 {
					sum := bias.at(gate*2 + i)
					for k := range w.shape[1] {
						sum += of.at(append(slices.Clone(at), k)...) * w.at(gate*2+i, k)
					}
					return sum
				}
			}
			newH, newC := make([]float64, 4), make([]float64, 4)
			for n := range 4 {
				a, b := sums(x[0], []int{t, n / 2}, x[3], x[5]), sums(h, []int{n / 2}, x[4], x[6])
				newH[n], newC[n] = next(func(gate int) float64 { return a(gate, n%2) },
					func(gate int) float64 { return b(gate, n%2) }, h.data[n], c.data[n])
			}
			h.data, c.data = newH, newC
			y.data = append(y.data, newH...)
		}
		return []array{y, h.reshape(1, 2, 2), c.reshape(1, 2, 2)}
	}
	return []row{
		{call: "nn.LSTM(x, h0, c0, weights), two steps", in: in(4),
			build: func(x gorgonia.Nodes) gorgonia.Nodes {
				y, h, c, err := nn.LSTM(nn.RecurrentOptions{}, x[0], x[1], x[2], x[3], x[4], x[5],
					x[6])
				return gorgonia.Nodes{must(y, err), h, c}
			}, want: func(x, _ []array) []array {
				return run(x, func(a, b func(int) float64, _, c float64) (float64, float64) {
					gate := func(i int) float64 { return a(i) + b(i) }
					c = sigmoid(gate(1))*c + sigmoid(gate(0))*math.Tanh(gate(2))
					return sigmoid(gate(3)) * math.Tanh(c), c
				})
			}},
		{call: "nn.GRU(x, h0, weights), two steps", in: slices.Delete(in(3), 2, 3),
			build: func(x gorgonia.Nodes) gorgonia.Nodes {
				y, h, err := nn.GRU(nn.RecurrentOptions{}, x[0], x[1], x[2], x[3], x[4], x[5])
				return gorgonia.Nodes{must(y, err), h}
			}, want: func(x, _ []array) []array {
				return run(slices.Insert(slices.Clone(x), 2, x[1]),
					func(a, b func(int) float64, h, _ float64) (float64, float64) {
						z := sigmoid(a(1) + b(1))
						n := math.Tanh(a(2) + sigmoid(a(0)+b(0))*b(2))
						return (1-z)*n + z*h, 0
					})[:2]
			}},
	}
}

// otherConvRows are convolutions of one axis and of three, and a transposed one.
func otherConvRows() []row {
	w := square(3, 0, 1, 1)
	ones := func(x array) array { return x.reshape(slices.Insert(slices.Clone(x.shape), 2, 1)...) }
	line := w
	line.kernel[0] = 1
	return []row{
		of2("nn.Conv1D(x, y), kernel 3", []int{2, 3, 6}, []int{4, 3, 3},
			func(x, y *gorgonia.Node) (*gorgonia.Node, error) {
				return nn.Conv1D(nn.ConvOptions{}, x, y, nil)
			}, func(x, y array) array { return line.convolve(ones(x), ones(y)).reshape(2, 4, 4) }),
		of2("nn.Conv3D(x, y), kernel 1 x 3 x 3", []int{2, 3, 1, 5, 6}, []int{4, 3, 1, 3, 3},
			func(x, y *gorgonia.Node) (*gorgonia.Node, error) {
				return nn.Conv3D(nn.ConvOptions{}, x, y, nil)
			}, func(x, y array) array {
				return w.convolve(x.reshape(2, 3, 5, 6), y.reshape(4, 3, 3, 3)).reshape(2, 4, 1, 3,
					4)
			}),
		of2("nn.ConvTranspose2D(x, y), kernel 3", []int{1, 2, 3, 3}, []int{2, 4, 3, 3},
			func(x, y *gorgonia.Node) (*gorgonia.Node, error) {
				return nn.ConvTranspose2D(nn.ConvOptions{}, x, y, nil)
			}, func(x, y array) array {
				return generate([]int{1, 4, 5, 5}, func(i []int) (sum float64) {
					for k := range 2 * 9 {
						h, v := i[2]-k/3%3, i[3]-k%3
						if h >= 0 && h < 3 && v >= 0 && v < 3 {
							sum += x.at(0, k/9, h, v) * y.at(k/9, i[1], k/3%3, k%3)
						}
					}
					return sum
				})
			}),
	}
}

// numbersLike is a constant of the graph and the dtype of n.
func numbersLike(n *gorgonia.Node, shape []int, x []float64) *gorgonia.Node {
	var backing any = x
	if n.Dtype() == gorgonia.Float32 {
		narrow := make([]float32, len(x))
		for i, v := range x {
			narrow[i] = float32(v)
		}
		backing = narrow
	}
	return n.Graph().Constant(tensor.New(tensor.WithShape(shape...), tensor.WithBacking(backing)))
}
