package graphs

import (
	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/layers"
	"github.com/euryale-ml/euryale/ops"
	"github.com/euryale-ml/euryale/ops/nn"
)

// operation is one that graphs may have.
type operation struct {
	name string
	axes []int // numbers of axes that its first operand may have; nil for any
	// fit draws the rest for a first operand of a shape: what it reads besides, and how it is
	// built. A nil build says that the operand does not fit.
	fit  func(d *drawing, x tensor.Shape) (needs, build)
	flat bool // has no gradient
	// rough says that results for integers are not exact. Half of the graphs have none such.
	rough  bool
	writes bool // its Do changes its operand, which nobody may see
}

type (
	node     = *gorgonia.Node
	shape    = tensor.Shape
	unary    = func(x node) (node, error)
	binary   = func(x, y node) (node, error)
	needs    = []need
	position = construction
	comm     = backend.Communicator
)

var (
	anyAxes = []int{1, 2, 3, 4}
	images  = []int{4}
	matrix  = []int{2}
	rows    = []int{2, 3}
	// which an operand may repeat along
	repeated = []int{2, 3, 4}
	vector   = []int{1}
)

// table has every operation: a line for each.
var table = []operation{
	// Element by element.
	rough(one("Tanh", gorgonia.Tanh)),
	rough(one("Sigmoid", gorgonia.Sigmoid)),
	one("Rectify", gorgonia.Rectify),
	one("Square", gorgonia.Square),
	one("Abs", gorgonia.Abs),
	one("Neg", gorgonia.Neg),
	rough(one("Sin", gorgonia.Sin)),
	rough(one("Cos", gorgonia.Cos)),
	one("Cube", gorgonia.Cube),
	rough(one("Exp of Tanh", then(gorgonia.Tanh, gorgonia.Exp))),
	rough(one("Log1p of Abs", then(gorgonia.Abs, gorgonia.Log1p))),
	rough(one("Sqrt of Exp", then(gorgonia.Tanh, gorgonia.Exp, gorgonia.Sqrt))),
	rough(one("Inverse of Exp", then(gorgonia.Tanh, gorgonia.Exp, gorgonia.Inverse))),
	rough(one("Softplus", then(gorgonia.Tanh, gorgonia.Softplus))),
	rough(one("Expm1", then(gorgonia.Tanh, gorgonia.Expm1))),
	one("LeakyRelu", func(x node) (node, error) { return gorgonia.LeakyRelu(x, 0.25) }),
	{name: "GELU", axes: anyAxes, fit: alone(nn.GELU), rough: true},
	{name: "GELUTanh", axes: anyAxes, fit: alone(nn.GELUTanh), rough: true},
	flat(one("Sign", gorgonia.Sign)),
	flat(one("Floor", gorgonia.Floor)),
	flat(one("Ceil", gorgonia.Ceil)),
	two("Add", gorgonia.Add),
	two("Sub", gorgonia.Sub),
	two("HadamardProd", gorgonia.HadamardProd),
	two("Add", gorgonia.Add),
	two("Sub", gorgonia.Sub),
	two("HadamardProd", gorgonia.HadamardProd),
	two("MaxBetween", gorgonia.MaxBetween),
	two("MinBetween", gorgonia.MinBetween),
	two("HadamardDiv by Exp", func(x, y node) (node, error) {
		return gorgonia.HadamardDiv(x, must(gorgonia.Exp(must(gorgonia.Tanh(y)))))
	}),
	flat(two("Gt", func(x, y node) (node, error) { return gorgonia.Gt(x, y, true) })),
	flat(two("Eq", func(x, y node) (node, error) { return gorgonia.Eq(x, y, true) })),
	{name: "Add a number", axes: anyAxes, fit: with(gorgonia.Add, number)},
	{name: "Sub a number", axes: anyAxes, fit: with(gorgonia.Sub, number)},
	{name: "HadamardProd by a number", axes: anyAxes, fit: with(gorgonia.HadamardProd, number)},
	{
		name: "BroadcastAdd of a row", axes: matrix,
		fit: with(broadcast(gorgonia.BroadcastAdd, 0), row),
	},
	{
		name: "BroadcastSub of a column", axes: matrix,
		fit: with(broadcast(gorgonia.BroadcastSub, 1), column),
	},
	{
		name: "BroadcastHadamardProd of a row", axes: matrix,
		fit: with(broadcast(gorgonia.BroadcastHadamardProd, 0), row),
	},
	{
		name: "BroadcastHadamardProd of a column", axes: matrix,
		fit: with(broadcast(gorgonia.BroadcastHadamardProd, 1), column),
	},
	{
		name: "BroadcastAdd of a channel", axes: images,
		fit: with(broadcast(gorgonia.BroadcastAdd, 0, 2, 3), channel),
	},

	{name: "BroadcastHadamardProd", axes: repeated, fit: repeating(gorgonia.BroadcastHadamardProd)},
	{name: "BroadcastAdd", axes: repeated, fit: repeating(gorgonia.BroadcastAdd)},
	{name: "BroadcastSub", axes: repeated, fit: repeating(gorgonia.BroadcastSub)},

	// Reductions, and what depends on them.
	{name: "Sum of all", axes: anyAxes, fit: alone(sumOf)},
	{name: "Mean of all", axes: anyAxes, fit: alone(meanOf)},
	{name: "Sum", axes: []int{2, 3, 4}, fit: along(sumAlong)},
	{name: "Mean", axes: []int{2, 3, 4}, fit: along(meanAlong)},
	{
		name: "Max", axes: matrix,
		fit: along(maxAlong),
	},
	{
		name: "less the mean", axes: anyAxes,
		fit: alone(func(x node) (node, error) { return gorgonia.Sub(x, must(gorgonia.Mean(x))) }),
	},
	{
		name: "times the sum", axes: anyAxes,
		fit: alone(func(x node) (node, error) {
			return gorgonia.HadamardProd(x, must(gorgonia.Sum(x)))
		}),
	},
	{
		name: "less the mean of rows", axes: repeated,
		fit: alone(func(x node) (node, error) {
			return perRow(gorgonia.BroadcastSub, meanAlong, x)
		}),
	},
	{
		name: "times the sum of rows", axes: repeated,
		fit: alone(func(x node) (node, error) {
			return perRow(gorgonia.BroadcastHadamardProd, sumAlong, x)
		}),
	},
	{
		name: "less the largest of rows", axes: repeated,
		fit: alone(func(x node) (node, error) {
			return perRow(gorgonia.BroadcastSub, maxAlong, x)
		}),
	},
	{name: "SoftMax", axes: []int{2, 3, 4}, fit: along(nn.SoftMax), rough: true},
	{name: "LogSoftMax", axes: []int{2, 3, 4}, fit: along(nn.LogSoftMax), rough: true},
	{name: "LayerNorm", rough: true, axes: rows, fit: func(_ *drawing, x shape) (needs, build) {
		return numbers(last(x), last(x)), func(_ position, x ...node) (node, error) {
			return nn.LayerNorm(0.5, x[0], x[1], x[2])
		}
	}},
	{name: "BatchNorm", rough: true, axes: images, fit: func(_ *drawing, x shape) (needs, build) {
		if x[0]*x[2]*x[3] == 1 { // one value per channel does not train
			return nil, nil
		}
		return numbers(channel(x), channel(x)), func(_ position, x ...node) (node, error) {
			y, _, _, _, err := gorgonia.BatchNorm(x[0], x[1], x[2], 0.1, 0.5)
			return y, err
		}
	}},
	{name: "GroupNorm", rough: true, axes: images, fit: func(_ *drawing, x shape) (needs, build) {
		return numbers(x, x), func(_ construction, y ...node) (node, error) {
			return gorgonia.GroupNorm(y[0], y[1], y[2], 1, x[1], 0.5)
		}
	}},
	{name: "CrossEntropy", rough: true, axes: rows, fit: func(_ *drawing, x shape) (needs, build) {
		return integers(x[:len(x)-1], x[len(x)-1]), func(_ position, x ...node) (node, error) {
			return nn.CrossEntropyWith(nn.CrossEntropyOptions{IgnoreFirst: true}, x[0], x[1])
		}
	}},
	{name: "RMSNorm", rough: true, axes: rows, fit: func(_ *drawing, x shape) (needs, build) {
		return numbers(last(x)), plain2(func(x, y node) (node, error) {
			return nn.RMSNorm(0.5, x, y)
		})
	}},
	rough(two("SwiGLU", func(x, y node) (node, error) {
		return nn.SwiGLU(must(gorgonia.Tanh(x)), y)
	})),
	{name: "LogSumExp", rough: true, axes: anyAxes, fit: along(reduced(nn.LogSumExp))},
	{name: "ReduceMin", rough: true, axes: anyAxes, fit: along(reduced(nn.ReduceMin))},
	{name: "CumSum", axes: anyAxes, fit: along(func(axis int, x node) (node, error) {
		return nn.CumSum(axis, nn.CumSumOptions{Reverse: axis == 0, Exclusive: axis == 1}, x)
	})},

	// Indices and choices.
	{name: "TopK", axes: anyAxes, fit: func(d *drawing, x shape) (needs, build) {
		axis := d.next(len(x))
		k := 1 + d.next(min(x[axis], 3))
		return nil, plain(func(x node) (node, error) {
			y, _, err := nn.TopK(axis, k, x)
			return y, err
		})
	}},
	{name: "routed by ArgMax", axes: matrix, fit: func(d *drawing, x shape) (needs, build) {
		return numbers(shape{x[1], d.size()}), plain2(func(x, y node) (node, error) {
			return nn.ByIndices(0, y, must(nn.ArgMax(1, false, x)))
		})
	}},
	{name: "GatherElements", axes: anyAxes, fit: func(d *drawing, x shape) (needs, build) {
		axis := d.next(len(x))
		list := x.Clone()
		list[axis] = d.size()
		return integers(list, x[axis]), plain2(func(x, y node) (node, error) {
			return nn.GatherElements(axis, x, y)
		})
	}},
	two("Where", func(x, y node) (node, error) { return nn.Where(x, x, y) }),
	{name: "Where of rows", axes: matrix, fit: with(func(x, y node) (node, error) {
		return nn.Where(must(nn.Not(y)), x, y)
	}, row)},

	// Products.
	{name: "Mul", axes: matrix, fit: func(d *drawing, x shape) (needs, build) {
		return numbers(shape{x[1], d.size()}), plain2(gorgonia.Mul)
	}},
	{name: "Mul of a transposed", axes: matrix, fit: func(d *drawing, x shape) (needs, build) {
		return numbers(shape{d.size(), x[1]}), plain2(func(x, y node) (node, error) {
			return gorgonia.Mul(x, must(gorgonia.Transpose(y, 1, 0)))
		})
	}},
	{name: "Mul by a vector", axes: matrix, fit: with(gorgonia.Mul, last)},
	{name: "OuterProd", axes: vector, fit: func(d *drawing, _ shape) (needs, build) {
		return numbers(shape{d.size()}), plain2(nn.OuterProd)
	}},
	{name: "BatchedMatMul", axes: []int{3}, fit: func(d *drawing, x shape) (needs, build) {
		return numbers(shape{x[0], d.size(), x[2]}), plain2(func(x, y node) (node, error) {
			return nn.BatchedMatMul(false, true, x, y)
		})
	}},
	{name: "Attention", rough: true, axes: images, fit: func(d *drawing, x shape) (needs, build) {
		keys := x.Clone()
		keys[2] += d.next(2)
		o := nn.AttentionOptions{Causal: d.next(2) == 0, Scale: 0.25}
		return numbers(keys, keys), func(_ position, x ...node) (node, error) {
			return nn.Attention(x[0], x[1], x[2], o)
		}
	}},
	{name: "Attention that hides keys", rough: true, axes: images, fit: func(d *drawing,
		x shape) (needs, build) {
		keys := x.Clone()
		if d.next(2) == 0 { // all heads share one
			keys[1] = 1
		}
		values := keys.Clone()
		values[3] = d.size()
		o := nn.AttentionOptions{Scale: 0.25, SoftCap: float64(d.next(2))}
		last, masked := integers(shape{x[0]}, x[2]), d.next(2) == 0
		causal, appended, window := d.next(2) == 0, d.next(2) == 0, d.next(4)
		starts := d.next(3) == 0 && !masked
		if masked {
			last = numbers(shape{x[2], x[2]})
		} else if starts {
			last = integers(shape{x[0], x[2]}, 2)
		}
		return append(numbers(keys, values), last...), func(_ position, x ...node) (node, error) {
			o := o
			if o.KeyLengths = x[3]; masked {
				o.Mask, o.KeyLengths, o.MaskGradient = x[3], nil, true
			} else {
				o.Causal, o.Appended = causal, causal && appended && !starts
			}
			if o.Causal {
				o.Window = window
			}
			if starts { // which do not descend
				o.KeyLengths = nil
				var err error
				if o.KeyStarts, err = nn.CumSum(1, nn.CumSumOptions{}, x[3]); err != nil {
					return nil, err
				}
			}
			return nn.Attention(x[0], x[1], x[2], o)
		}
	}},

	// Images.
	{name: "Conv2d", axes: images, fit: func(d *drawing, x shape) (needs, build) {
		k, pad, stride := d.window(x, 3), d.next(2), 1+d.next(2)
		filters := shape{1 + d.next(3), x[1], k[0], k[1]}
		return numbers(filters), plain2(func(x, y node) (node, error) {
			return gorgonia.Conv2d(x, y, k, []int{pad, pad}, []int{stride, stride}, []int{1, 1})
		})
	}},
	{name: "MaxPool2D", axes: images, fit: func(d *drawing, x shape) (needs, build) {
		k, stride := d.window(x, 2), 1+d.next(2)
		return nil, plain(func(x node) (node, error) {
			return gorgonia.MaxPool2D(x, k, []int{0, 0}, []int{stride, stride})
		})
	}},
	{name: "AvgPool2D", axes: images, fit: func(d *drawing, x shape) (needs, build) {
		k, stride := [2]int(d.window(x, 2)), 1+d.next(2)
		return nil, plain(func(x node) (node, error) {
			return nn.AvgPool2D(k, [2]int{}, [2]int{stride, stride}, x)
		})
	}},
	{name: "Conv2D", axes: images, fit: func(d *drawing, x shape) (needs, build) {
		k, pad, groups := d.window(x, 3), d.next(2), 1
		if d.next(2) == 0 {
			groups = x[1]
		}
		o := nn.ConvOptions{Groups: groups, Pad: []int{pad, 0, 0, pad}, Stride: []int{1, 1 + pad}}
		filters := shape{groups * (1 + d.next(2)), x[1] / groups, k[0], k[1]}
		return numbers(filters), plain2(func(x, y node) (node, error) {
			return nn.Conv2D(o, x, y, nil)
		})
	}},
	{name: "ConvTranspose2D", axes: images, fit: func(d *drawing, x shape) (needs, build) {
		o := nn.ConvOptions{Stride: []int{1 + d.next(2), 1}}
		filters := shape{x[1], 1 + d.next(2), 2, 1 + d.next(2)}
		return numbers(filters), plain2(func(x, y node) (node, error) {
			return nn.ConvTranspose2D(o, x, y, nil)
		})
	}},
	{name: "MaxPool2D of ours", axes: images, fit: func(d *drawing, x shape) (needs, build) {
		k, o := [2]int(d.window(x, 2)), nn.PoolOptions{Ceil: d.next(2) == 0}
		return nil, plain(func(x node) (node, error) {
			return nn.MaxPool2D(k, [2]int{}, [2]int{2, 2}, x, o)
		})
	}},
	{name: "GlobalAvgPool2D", axes: images, fit: alone(nn.GlobalAvgPool2D)},
	{
		name: "Upsample2D", axes: images,
		fit: alone(func(x node) (node, error) { return gorgonia.Upsample2D(x, 2) }),
	},

	// What only moves elements.
	{
		name: "Transpose", axes: matrix,
		fit: alone(func(x node) (node, error) { return gorgonia.Transpose(x, 1, 0) }),
	},
	{
		name: "Transpose of three", axes: []int{3},
		fit: alone(func(x node) (node, error) { return gorgonia.Transpose(x, 2, 0, 1) }),
	},
	{
		name: "Transpose of four", axes: images,
		fit: alone(func(x node) (node, error) { return gorgonia.Transpose(x, 0, 2, 1, 3) }),
	},
	{name: "Reshape", axes: anyAxes, fit: func(d *drawing, x shape) (needs, build) {
		to := reshaped(d, x)
		return nil, plain(func(x node) (node, error) { return gorgonia.Reshape(x, to.Clone()) })
	}},
	{name: "Slice", axes: anyAxes, fit: func(d *drawing, x shape) (needs, build) {
		axis := d.next(len(x))
		start, step := d.next(x[axis]), 1+d.next(2)
		return nil, plain(func(y node) (node, error) {
			return nn.Slice(axis, start, x[axis], step, y)
		})
	}},
	{name: "gorgonia.Slice", axes: matrix, fit: func(d *drawing, x shape) (needs, build) {
		start := d.next(x[0])
		return nil, plain(func(y node) (node, error) {
			return gorgonia.Slice(y, gorgonia.S(start, x[0]))
		})
	}},
	{name: "Concat", axes: anyAxes, fit: concat(nn.Concat)},
	{name: "Concat", axes: anyAxes, fit: concat(nn.Concat)},
	{name: "gorgonia.Concat", axes: matrix, fit: concat(gorgonia.Concat)},
	{name: "ByIndices", axes: []int{1, 2, 3}, fit: func(d *drawing, x shape) (needs, build) {
		axis := d.next(len(x))
		return integers(shape{d.size()}, x[axis]), plain2(func(x, y node) (node, error) {
			return nn.ByIndices(axis, x, y)
		})
	}},
	{name: "Embedding", axes: matrix, fit: func(d *drawing, x shape) (needs, build) {
		return integers(shape{d.size(), d.size()}, x[0]), plain2(embedding)
	}},
	{name: "Dropout", axes: anyAxes, fit: func(*drawing, shape) (needs, build) {
		return nil, func(c position, x ...node) (node, error) {
			return nn.Dropout(0.5, c.Random, x[0])
		}
	}},

	// By its Do, on the host.
	{name: "turned by its Do", axes: matrix, fit: alone(turned), flat: true, writes: true},

	// Collectives.
	collective("AllReduce", func(c comm, _ int, x node) (node, error) {
		return ops.AllReduce(c, backend.Sum, x)
	}),
	collective("AllReduce of means", func(c comm, _ int, x node) (node, error) {
		return ops.AllReduce(c, backend.Avg, x)
	}),
	collective("Broadcast", func(c comm, _ int, x node) (node, error) {
		return ops.Broadcast(c, 0, x)
	}),
	collective("Reduce", func(c comm, _ int, x node) (node, error) {
		return ops.Reduce(c, backend.Sum, 0, x)
	}),
	collective("AllGather", func(c comm, axis int, x node) (node, error) {
		return ops.AllGather(c, axis, x)
	}),
	collective("ReduceScatter", func(c comm, axis int, x node) (node, error) {
		return ops.ReduceScatter(c, backend.Sum, axis, x)
	}),
	collective("AllToAll", func(c comm, axis int, x node) (node, error) {
		return ops.AllToAll(c, axis, 0, x)
	}),
	collective("CopyToParallel", func(c comm, _ int, x node) (node, error) {
		return ops.CopyToParallel(c, x)
	}),
	collective("ReduceFromParallel", func(c comm, _ int, x node) (node, error) {
		return ops.ReduceFromParallel(c, x)
	}),
	collective("SplitForwardGatherBackward", func(c comm, axis int, x node) (node, error) {
		return ops.SplitForwardGatherBackward(c, axis, ops.Down(c), x)
	}),
	collective("GatherForwardSplitBackward", func(c comm, axis int, x node) (node, error) {
		return ops.GatherForwardSplitBackward(c, axis, ops.Up(c), x)
	}),
	collective("Parts", func(c comm, axis int, x node) (node, error) { // of the last rank alone
		lens := make([]int, c.Size())
		lens[c.Size()-1] = x.Shape()[axis]
		x = must(ops.ReduceScatter(c, backend.Sum, axis, x, ops.Splits(lens...)))
		return ops.AllGather(c, axis, x, ops.Splits(lens...))
	}),

	// Blocks of package layers.
	block("MLP", func(b *layers.Builder, name string, x layers.Node) layers.Node {
		return b.MLP(name, x, 4)
	}),
	block("LayerNorm", (*layers.Builder).LayerNorm),
	block("Positions", (*layers.Builder).Positions),
	block("Attention", func(b *layers.Builder, name string, x layers.Node) layers.Node {
		return b.Attention(name, x, layers.AttentionOptions{Heads: 2, Causal: true})
	}),
}

func must(n node, err error) node { return gorgonia.Must(n, err) }

// embedding has a padding if the number of rows is even.
func embedding(weights, indices node) (node, error) {
	if n := weights.Shape()[0]; n%2 == 0 {
		return nn.Embedding(weights, indices, n/2)
	}
	return nn.Embedding(weights, indices)
}

// plain is a build of one operand.
func plain(f unary) build {
	return func(_ position, x ...node) (node, error) { return f(x[0]) }
}

// plain2 is a build of two operands.
func plain2(f binary) build {
	return func(_ position, x ...node) (node, error) { return f(x[0], x[1]) }
}

// alone fits every operand.
func alone(f unary) func(*drawing, shape) (needs, build) {
	return func(*drawing, shape) (needs, build) { return nil, plain(f) }
}

// one is a function of each element.
func one(name string, f unary) operation { return operation{name: name, fit: alone(f)} }

// two is a function of two values of one shape.
func two(name string, f binary) operation {
	return operation{name: name, fit: with(f, func(x shape) shape { return x })}
}

func flat(o operation) operation {
	o.flat = true
	return o
}

func rough(o operation) operation {
	o.rough = true
	return o
}

// then is functions one after the other.
func then(functions ...unary) unary {
	return func(x node) (node, error) {
		for _, f := range functions {
			x = must(f(x))
		}
		return x, nil
	}
}

// with reads a second operand, whose shape follows from the first one's.
func with(f binary, second func(x shape) shape) func(*drawing, shape) (needs, build) {
	return func(_ *drawing, x shape) (needs, build) {
		return numbers(second(x)), plain2(f)
	}
}

// numbers are operands of some shapes besides the first.
func numbers(shapes ...shape) (n needs) {
	for _, s := range shapes {
		n = append(n, need{shape: s})
	}
	return n
}

// integers is an operand of integers below a limit.
func integers(s shape, limit int) needs { return needs{{s, limit}} }

func number(shape) shape   { return shape{} }
func row(x shape) shape    { return shape{1, x[1]} }
func column(x shape) shape { return shape{x[0], 1} }
func last(x shape) shape   { return shape{x[len(x)-1]} }

func channel(x shape) shape { return shape{1, x[1], 1, 1} }

// broadcast repeats the second operand along axes.
func broadcast(f func(x, y node, left, right []byte) (node, error), axes ...byte) binary {
	return func(x, y node) (node, error) { return f(x, y, nil, axes) }
}

// repeating draws the axes along which the second operand is repeated, at least one. Leading ones
// may be missing of its shape: [n], [1, n], [1, 1, n], [b, 1, 1] and so on are drawn.
func repeating(f func(x, y node, left, right []byte) (node, error)) func(*drawing, shape) (needs,
	build) {
	return func(d *drawing, x shape) (needs, build) {
		full, axes, leading := x.Clone(), []byte{}, d.next(2) == 0 // as gains are
		for first, axis := d.next(len(x)), 0; axis < len(x); axis++ {
			some := axis == first || d.next(2) == 0
			if leading && axis < len(x)-1 || !leading && some {
				full[axis], axes = 1, append(axes, byte(axis))
			}
		}
		short := full.Clone()
		for d.next(2) == 0 && len(short) > 1 && short[0] == 1 {
			short = short[1:]
		}
		return numbers(short), plain2(func(x, y node) (node, error) {
			if len(short) < len(full) {
				y = must(gorgonia.Reshape(y, full.Clone()))
			}
			return f(x, y, nil, axes)
		})
	}
}

// window draws the sizes of a kernel for images.
func (d *drawing) window(images shape, longest int) shape {
	return shape{1 + d.next(min(longest, images[2])), 1 + d.next(min(longest, images[3]))}
}

// along draws an axis.
func along(f func(axis int, x node) (node, error)) func(*drawing, shape) (needs, build) {
	return func(d *drawing, x shape) (needs, build) {
		axis := d.next(len(x))
		return nil, plain(func(x node) (node, error) { return f(axis, x) })
	}
}

// reduced is a reduction along one axis.
func reduced(f func([]int, bool, node) (node, error)) func(axis int, x node) (node, error) {
	return func(axis int, x node) (node, error) { return f([]int{axis}, true, x) }
}

func sumAlong(axis int, x node) (node, error)  { return gorgonia.Sum(x, axis) }
func meanAlong(axis int, x node) (node, error) { return gorgonia.Mean(x, axis) }

func maxAlong(axis int, x node) (node, error) { return gorgonia.Max(x, axis) }

// perRow applies f to a value and what fold gives of each of its rows, along the last axis.
func perRow(f func(x, y node, left, right []byte) (node, error),
	fold func(axis int, x node) (node, error), x node) (node, error) {
	once, axis := x.Shape().Clone(), len(x.Shape())-1
	once[axis] = 1
	return f(x, must(gorgonia.Reshape(must(fold(axis, x)), once)), nil, []byte{byte(axis)})
}

// reshaped draws a shape of as many elements.
func reshaped(d *drawing, x shape) shape {
	to, axis := x.Clone(), d.next(len(x))
	switch {
	case d.next(2) == 0 && len(x) < 4:
		to = append(to[:axis:axis], append(shape{1}, to[axis:]...)...)
	case axis+1 < len(x):
		to = append(to[:axis:axis], append(shape{x[axis] * x[axis+1]}, to[axis+2:]...)...)
	case x[axis]%2 == 0 && len(x) < 4:
		to = append(to[:axis:axis], 2, x[axis]/2)
	}
	return to
}

func concat(f func(axis int, x ...node) (node, error)) func(*drawing, shape) (needs, build) {
	return func(d *drawing, x shape) (needs, build) {
		axis, other := d.next(len(x)), x.Clone()
		if d.next(2) == 0 {
			other[axis] = d.size()
		}
		return numbers(other), plain2(func(x, y node) (node, error) {
			return f(axis, x, y)
		})
	}
}

// collective is an operation in which all ranks take part. It is not drawn where there is one.
func collective(name string, f func(c comm, axis int, x node) (node, error)) operation {
	return operation{name: name, axes: anyAxes, fit: func(d *drawing, x shape) (needs, build) {
		axis := d.next(len(x))
		if d.Comm == nil {
			return nil, nil
		}
		return nil, func(c position, x ...node) (node, error) { return f(c.Comm, axis, x[0]) }
	}}
}

type layer = func(b *layers.Builder, name string, x layers.Node) layers.Node

// block is a block of package layers, of samples, positions and features, with learnables of
// its own.
func block(kind string, f layer) operation {
	fit := func(d *drawing, x shape) (needs, build) {
		if d.Layout == nil || x[2]%2 != 0 || x[0] < 1 {
			return nil, nil
		}
		return nil, func(c position, x ...node) (node, error) {
			b := layers.NewBuilder(c.graph, c.Layout, x[0].Dtype(), 1)
			y := f(b, name(c.value), layers.Whole(x[0]))
			c.learn(b.Learnables())
			return y.Node, b.Err()
		}
	}
	return operation{name: "block " + kind, rough: true, axes: []int{3}, fit: fit}
}

// times is an element-wise operation that needs a reduction.
var times = operation{
	name: "HadamardProd by a number", axes: anyAxes, fit: with(gorgonia.HadamardProd, number),
}
