package vm_test

import (
	"fmt"
	"math"
	"strings"
	"testing"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/ops/nn"
	"github.com/euryale-ml/euryale/vm"
)

// ours are graphs for operations of package nn, all of which are typed except those of host.
var ours = []operation{
	{name: "slice", shapes: [][]int{{3, 7}}, build: func(x ...node) (node, error) {
		return nn.Slice(1, 1, 6, 2, x[0])
	}},
	{name: "split", shapes: [][]int{{3, 6}}, build: func(x ...node) (node, error) {
		parts, err := nn.Split(1, []int{3, 3}, x[0])
		if err != nil {
			return nil, err
		}
		return gorgonia.HadamardProd(parts[0], parts[1])
	}},
	{name: "concat", shapes: [][]int{{2, 1, 3}, {2, 4, 3}}, build: func(x ...node) (node, error) {
		return nn.Concat(1, x...)
	}},
	{name: "concat of one", shapes: [][]int{{2, 3}}, build: func(x ...node) (node, error) {
		return nn.Concat(1, x...)
	}},
	{name: "softmax", shapes: [][]int{{2, 3, 4}}, build: func(x ...node) (node, error) {
		return nn.SoftMax(1, x[0])
	}},
	{name: "softmax of a column", shapes: [][]int{{4, 1}}, build: func(x ...node) (node, error) {
		return nn.SoftMax(0, x[0])
	}},
	{name: "log softmax", shapes: [][]int{{3, 4}}, build: func(x ...node) (node, error) {
		return nn.LogSoftMax(1, x[0])
	}},
	{name: "gelu", shapes: [][]int{{3, 4}}, build: chain(nn.GELU)},
	{name: "gelu tanh", shapes: [][]int{{3, 4}}, build: chain(nn.GELUTanh)},
	{name: "layer norm", shapes: [][]int{{2, 3, 5}, {5}, {5}}, build: func(x ...node) (
		node, error) {
		return nn.LayerNorm(1e-2, x[0], x[1], x[2])
	}},
	{name: "layer norm of a vector", shapes: [][]int{{5}, {5}, {5}},
		build: func(x ...node) (node, error) {
			return nn.LayerNorm(1e-2, x[0], x[1], x[2])
		}},
	{name: "norm", shapes: [][]int{{2, 3, 4}}, build: func(x ...node) (node, error) {
		return nn.Norm(3, 1, x[0])
	}},
	{name: "products", shapes: [][]int{{2, 3, 4}, {2, 5, 4}}, build: func(x ...node) (node, error) {
		return nn.BatchedMatMul(false, true, x[0], x[1])
	}},
	{name: "products, transposed", shapes: [][]int{{2, 2, 4, 3}, {2, 2, 5, 4}},
		build: func(x ...node) (node, error) {
			return nn.BatchedMatMul(true, true, x[0], x[1])
		}},
	{name: "attention", shapes: [][]int{{2, 3, 5, 4}, {2, 3, 7, 4}, {2, 3, 7, 4}},
		build: func(x ...node) (node, error) {
			return nn.Attention(x[0], x[1], x[2], nn.AttentionOptions{})
		}},
	{name: "causal attention", shapes: [][]int{{1, 2, 6, 5}, {1, 2, 4, 5}, {1, 2, 4, 5}},
		build: func(x ...node) (node, error) {
			return nn.Attention(x[0], x[1], x[2], nn.AttentionOptions{Causal: true, Scale: 0.3})
		}},
	{name: "attention of transposed heads", shapes: [][]int{{2, 70, 3, 8}},
		build: func(x ...node) (node, error) {
			heads := transpose(x[0], 0, 2, 1, 3)
			y, err := nn.Attention(heads, heads, heads, nn.AttentionOptions{Causal: true})
			if err != nil {
				return nil, err
			}
			return gorgonia.Transpose(y, 0, 2, 1, 3)
		}},
	{name: "attention of shared heads with wide values and a cap", shapes: [][]int{{2, 4, 5, 4}, {2,
		2, 7, 4}, {2, 2, 7, 6}}, build: func(x ...node) (node, error) {
		return nn.Attention(x[0], x[1], x[2], nn.AttentionOptions{Causal: true, SoftCap: 0.9})
	}},
	{name: "attention with a learned mask", shapes: [][]int{{2, 4, 3, 4}, {2, 2, 5, 4},
		{2, 2, 5, 4}, {4, 1, 5}}, build: func(x ...node) (node, error) {
		return nn.Attention(x[0], x[1], x[2], nn.AttentionOptions{Mask: x[3], MaskGradient: true,
			SoftCap: 2})
	}},
	{name: "padded attention with a mask", shapes: [][]int{{3, 2, 66, 4}, {3, 1, 66, 4},
		{3, 1, 66, 3}}, build: func(x ...node) (node, error) {
		return nn.Attention(x[0], x[1], x[2], nn.AttentionOptions{Causal: true,
			Mask: someHidden(x[0], 66, 66), KeyLengths: labels(x[0], 66, 0, 65)})
	}},
	{name: "padded attention of heads that are transposed", shapes: [][]int{{2, 5, 4, 4},
		{2, 5, 2, 4}}, build: func(x ...node) (node, error) {
		q, k := transpose(x[0], 0, 2, 1, 3),
			transpose(x[1], 0, 2, 1, 3)
		y, err := nn.Attention(q, k, k, nn.AttentionOptions{KeyLengths: labels(x[0], 3, 5)})
		if err != nil {
			return nil, err
		}
		return gorgonia.Transpose(y, 0, 2, 1, 3)
	}},
	{name: "outer product", shapes: [][]int{{3}, {4}}, build: pair(nn.OuterProd, nil)},
	{name: "average pool", shapes: [][]int{{2, 3, 5, 6}}, build: func(x ...node) (node, error) {
		return nn.AvgPool2D([2]int{3, 2}, [2]int{1, 0}, [2]int{2, 1}, x[0])
	}},
	{name: "global average pool", shapes: [][]int{{2, 3, 4, 4}}, build: chain(nn.GlobalAvgPool2D)},
	{name: "convolution in groups", shapes: [][]int{{2, 4, 5, 6}, {6, 2, 3, 2}, {6}},
		build: convolved(nn.Conv2D, nn.ConvOptions{Groups: 2, Stride: []int{2, 1},
			Pad: []int{0, 1, 2, 0}, Dilation: []int{1, 2}})},
	{name: "depthwise convolution", shapes: [][]int{{2, 3, 6, 5}, {6, 1, 3, 3}, {6}},
		build: convolved(nn.Conv2D, nn.ConvOptions{Groups: 3, Pad: []int{1, 1},
			Stride: []int{2, 1}})},
	{name: "convolution of sequences", shapes: [][]int{{2, 3, 7}, {4, 3, 3}, {4}},
		build: convolved(nn.Conv1D, nn.ConvOptions{Pad: []int{2, 0}})},
	{name: "convolution of volumes", shapes: [][]int{{1, 2, 4, 5, 3}, {4, 1, 2, 3, 2}, {4}},
		build: convolved(nn.Conv3D, nn.ConvOptions{Groups: 2, Pad: []int{1, 0, 1},
			Stride: []int{2, 1, 1}})},
	{name: "transposed convolution", shapes: [][]int{{2, 4, 3, 4}, {4, 3, 3, 2}, {6}},
		build: convolved(nn.ConvTranspose2D, nn.ConvOptions{Groups: 2, Stride: []int{2, 3},
			Pad: []int{1, 0}, OutputPad: []int{1, 2}})},
	{name: "max pool", shapes: [][]int{{2, 3, 5, 6}}, build: func(x ...node) (node, error) {
		return nn.MaxPool2D([2]int{3, 2}, [2]int{1, 0}, [2]int{2, 2}, x[0],
			nn.PoolOptions{Ceil: true, Dilation: [2]int{1, 2}})
	}},
	{name: "average pool of pixels inside", shapes: [][]int{{2, 3, 5, 6}},
		build: func(x ...node) (node, error) {
			return nn.AvgPool2D([2]int{3, 2}, [2]int{1, 0}, [2]int{2, 1}, x[0],
				nn.PoolOptions{ExcludePad: true, After: &[2]int{2, 1}})
		}},
	{name: "lstm", shapes: [][]int{{3, 2, 4}, {1, 2, 3}, {1, 2, 3}, {12, 4}, {12, 3}, {12}, {12}},
		build: func(x ...node) (node, error) {
			y, h, c, err := nn.LSTM(nn.RecurrentOptions{}, x[0], x[1], x[2], x[3], x[4], x[5], x[6])
			if err != nil {
				return nil, err
			}
			return nn.Concat(0, y, h, c)
		}},
	{name: "gru", shapes: [][]int{{2, 3, 4}, {1, 2, 3}, {9, 4}, {9, 3}, {9}, {9}},
		build: func(x ...node) (node, error) {
			o := nn.RecurrentOptions{BatchFirst: true, Reverse: true}
			y, _, err := nn.GRU(o, x[0], x[1], x[2], x[3], x[4], x[5])
			return y, err
		}},
	{name: "embedding", shapes: [][]int{{5, 3}}, build: func(x ...node) (node, error) {
		return nn.Embedding(x[0], labels(x[0], 4, 0, 4))
	}},
	{name: "embedding with padding", shapes: [][]int{{5, 3}}, build: func(x ...node) (node, error) {
		return nn.Embedding(x[0], labels(x[0], 4, 0, 2, 4), -1)
	}},
	{name: "largest elements", shapes: [][]int{{3, 7}}, build: func(x ...node) (node, error) {
		values, _, err := nn.TopK(1, 3, x[0])
		return values, err
	}},
	{name: "largest elements of long rows", shapes: [][]int{{2, 9000}}, build: func(
		x ...node) (node, error) {
		values, _, err := nn.TopK(1, 3, x[0])
		return values, err
	}},
	{name: "padding mask", shapes: [][]int{{3, 4}, {3, 1}}, build: func(x ...node) (node, error) {
		zero := constant(x[0].Dtype(), 0)
		mask := must(nn.Or(must(gorgonia.Lt(x[0], zero, false)), must(nn.Cast(tensor.Bool, x[1]))))
		filled := must(nn.MaskedFill(x[0], must(nn.Not(mask)), 3))
		return nn.Where(must(nn.Xor(mask, must(nn.And(mask, mask)))), x[1], filled)
	}},
	{name: "largest elements across rows", shapes: [][]int{{7, 2, 3}}, build: func(
		x ...node) (node, error) {
		values, _, err := nn.TopK(0, 2, x[0])
		return values, err
	}},
	{name: "routed rows", shapes: [][]int{{4, 3}, {5, 4}}, build: func(x ...node) (node, error) {
		weights, to, err := nn.TopK(1, 2, x[1])
		if err != nil {
			return nil, err
		}
		rows, err := nn.ByIndices(0, x[0], reshape(to, tensor.Shape{10}))
		if err != nil {
			return nil, err
		}
		weights = reshape(weights, tensor.Shape{10, 1})
		rows = must(gorgonia.BroadcastHadamardProd(rows, weights, nil, []byte{1}))
		return nn.ScatterAdd(0, 4, rows, reshape(to, tensor.Shape{10}))
	}},
	{name: "cross-entropy", shapes: [][]int{{3, 4}}, build: func(x ...node) (node, error) {
		return nn.CrossEntropy(nn.NoLabel, x[0], labels(x[0], 3, nn.NoLabel, 1))
	}},
	{name: "cross-entropy, ignoring a class", shapes: [][]int{{5, 3}},
		build: func(x ...node) (node, error) {
			return nn.CrossEntropy(2, x[0], labels(x[0], 2, 1, 0, 2, 1))
		}},
	{name: "cross-entropy without labels", shapes: [][]int{{2, 3}},
		build: func(x ...node) (node, error) {
			return nn.CrossEntropy(nn.NoLabel, x[0], labels(x[0], nn.NoLabel, nn.NoLabel))
		}},
}

// convolved builds a convolution of images, filters and bias.
func convolved(f func(nn.ConvOptions, node, node, node) (
	node, error), o nn.ConvOptions) func(x ...node) (node, error) {
	return func(x ...node) (node, error) { return f(o, x[0], x[1], x[2]) }
}

// someHidden is a mask of x's dtype that hides every third key, and all keys of the second query.
func someHidden(x node, queries, keys int) node {
	mask := tensor.New(tensor.Of(x.Dtype()), tensor.WithShape(queries, keys))
	for i := range queries * keys {
		if set(mask, i, float64(i%5)); i%3 == 2 || i/keys == 1 {
			set(mask, i, math.Inf(-1))
		}
	}
	return gorgonia.NodeFromAny(x.Graph(), mask, gorgonia.WithName("mask"))
}

// labels is an input of integers in the graph of x.
func labels(x node, values ...int) node {
	return gorgonia.NodeFromAny(x.Graph(), tensor.New(tensor.WithShape(len(values)),
		tensor.WithBacking(values)), gorgonia.WithName("labels"))
}

// TestOperationsOfPackageNN compares values and gradients of every operation with its Do.
func TestOperationsOfPackageNN(t *testing.T) { operationsOfPackageNN(t, devices) }

func operationsOfPackageNN(t *testing.T, devices map[string]func(testing.TB) backend.Device) {
	eachOperation(t, ours, func(t *testing.T, o operation, m *model, tolerance float64) {
		agree(t, m.g, tolerance*10, o.host, devices)
	})
}

// TestLabelsOfTimeStepsAreSlices: labels [time, batch] are cut into those of each step, and joined
// in another order, on the device.
func TestLabelsOfTimeStepsAreSlices(t *testing.T) { labelsOfTimeStepsAreSlices(t, devices) }

func labelsOfTimeStepsAreSlices(t *testing.T, devices map[string]func(testing.TB) backend.Device) {
	g := gorgonia.NewGraph()
	of := func(name string, shape []int, backing any) node {
		v := tensor.New(tensor.WithShape(shape...), tensor.WithBacking(backing))
		return gorgonia.NodeFromAny(g, v, gorgonia.WithName(name))
	}
	all := of("labels", []int{3, 2}, []int{0, 2, nn.NoLabel, 1, 2, 0})
	w := of("w", []int{2, 3}, []float64{3, 1, 2, 5, 4, 6})
	steps := require.Value(nn.Split(0, []int{1, 1, 1}, all))(t)
	joined := must(nn.Concat(1, steps[2], steps[0]))
	var loss node
	for _, step := range steps {
		row := reshape(step, tensor.Shape{2})
		cost := must(nn.CrossEntropy(nn.NoLabel, w, row))
		if loss != nil {
			cost = add(loss, cost)
		}
		loss = cost
	}
	grads := require.Value(gorgonia.Grad(loss, w))(t)
	dw := grads[0]
	want := valuesByDo(t, g)
	for where, device := range devices {
		m := machineOn(t, device(t), g, vm.Keep(joined, loss, dw))
		if text := m.Plan().String(); !strings.Contains(text, "host_ops=0") {
			t.Errorf("%s: operations run by Do in\n%s", where, text)
		}
		for range 3 {
			run(t, m)
			got := fmt.Sprint(joined.Value().Data())
			require.Check(t, got == "[2 0 0 2]", "%s: labels 2 and 0 are %s", where, got)
			compare(t, where+": loss", loss.Value(), want[loss], 1e-12)
			compare(t, where+": gradient", dw.Value(), want[dw], 1e-12)
		}
		_ = m.Close()
	}
}

// TestDropoutIsThatOfItsDo: masks of a plan have the bits of those by Do, at every step and first
// sample.
func TestDropoutIsThatOfItsDo(t *testing.T) { dropoutIsThatOfItsDo(t, devices) }

func dropoutIsThatOfItsDo(t *testing.T, devices map[string]func(testing.TB) backend.Device) {
	for where, device := range devices {
		for dt := range tolerances {
			t.Run(fmt.Sprint(where, " ", dt), func(t *testing.T) {
				const seed = 1 << 31 // as a key, more than a float64 can hold
				var models [2]*model
				var randoms [2]*nn.Random
				var kept [2]nodes
				for i := range models {
					m := &model{g: gorgonia.NewGraph()}
					x := m.variable("x", dt, 3, 5, 7)
					m.params, randoms[i] = nodes{x}, nn.NewRandom(seed+1)
					first := must(nn.Dropout(0.3, randoms[i], x))
					second := must(nn.Dropout(0.6, randoms[i], tanh(first)))
					m.grad(t, sum(square(second)))
					models[i], kept[i] = m, nodes{first, second, x.Deriv()}
				}
				m := machineOn(t, device(t), models[1].g, vm.Keep(kept[1]...))
				if text := m.Plan().String(); !strings.Contains(text, "host_ops=0") {
					t.Errorf("operations run by Do in\n%s", text)
				}
				for _, at := range [][2]int{{0, 0}, {1, 0}, {7, 1000}} {
					for _, r := range randoms {
						r.Seek(uint64(at[0]), at[1])
					}
					want := valuesByDo(t, models[0].g)
					run(t, m)
					for i, n := range kept[1] {
						compare(t, fmt.Sprint("value ", i, " at ", at), n.Value(), want[kept[0][i]],
							1e-5)
					}
				}
			})
		}
	}
}

// A dropout has the mask of its gradient, runs once at each step, and is off in evaluation.
func TestDropout(t *testing.T) {
	m := &model{g: gorgonia.NewGraph()}
	x := m.variable("x", tensor.Float64, 4, 50)
	m.params = nodes{x}
	random := nn.NewRandom(1)
	y := must(nn.Dropout(0.5, random, x))
	m.grad(t, sum(y))
	train := machine(t, m.g, vm.Keep(y))
	require.NoError(t, train.RunAll())
	dx := require.Value(x.Grad())(t)
	kept := 0
	for i, v := range floats(t, y.Value()) {
		factor := floats(t, dx)[i]
		if factor != 0 && factor != 2 || v != factor*floats(t, x.Value())[i] {
			t.Fatalf("element %d is %v, its gradient %v", i, v, factor)
		}
		kept += int(factor / 2)
	}
	require.Check(t, kept >= 60 && kept <= 140, "%d of 200 elements were kept", kept)
	err := train.RunAll()
	require.Check(t, err != nil, "a second run at one step was allowed")
	evaluate := machine(t, m.g, vm.Eval(), vm.Keep(y))
	require.NoError(t, evaluate.RunAll())
	compare(t, "in evaluation", y.Value(), x.Value(), 0)
}

// An index that the host knows to be out of range is an error, on every device; nothing has run
// then.
func TestIndexOutOfRange(t *testing.T) {
	for where, device := range devices {
		m := &model{g: gorgonia.NewGraph()}
		x := m.variable("x", tensor.Float32, 4, 2)
		indices := labels(x, 3, 0)
		y := must(nn.Embedding(x, indices))
		planned := machineOn(t, device(t), m.g, vm.Keep(y))
		run(t, planned)
		for _, wrong := range []int{-1, 4} {
			indices.Value().Data().([]int)[1] = wrong
			require.Fails(t, fmt.Sprintf("%s: index %d", where, wrong), planned.RunAll(),
				backend.ErrArgument, fmt.Sprintf("index 1 is %d", wrong))
		}
	}
}
