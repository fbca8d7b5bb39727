package layers_test

import (
	"errors"
	"fmt"
	"maps"
	"math"
	"math/rand/v2"
	"os"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/autograd"
	"github.com/euryale-ml/euryale/autograd/solver"
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/internal/testing/testenv"
	"github.com/euryale-ml/euryale/internal/testing/testranks"
	"github.com/euryale-ml/euryale/layers"
	"github.com/euryale-ml/euryale/ops"
	"github.com/euryale-ml/euryale/ops/nn"
	"github.com/euryale-ml/euryale/vm"
)

// full reports whether to test every combination rather than a sample.
func full() bool { return os.Getenv("EURYALE_FULL") == "1" }

// block builds what is tested from inputs, which are split along the sequence over the Sequence
// group.
type block func(b *layers.Builder, in ...layers.Node) layers.Node

// Five heads and sequences of 9 and 7 divide among no group of 2 or 4.
const (
	heads, width      = 5, 10
	positions, memory = 9, 7
)

var blocks = map[string]block{
	"attention": func(b *layers.Builder, in ...layers.Node) layers.Node {
		return b.Attention("a", in[0], layers.AttentionOptions{Heads: heads, Causal: true})
	},
	"plain attention": func(b *layers.Builder, in ...layers.Node) layers.Node {
		return b.Attention("a", in[0], layers.AttentionOptions{Heads: heads})
	},
	"cross-attention": func(b *layers.Builder, in ...layers.Node) layers.Node {
		return b.CrossAttention("a", in[0], in[1], layers.AttentionOptions{Heads: heads})
	},
	"rotary attention":                    rotaryAttention(0),
	"rotary attention of later positions": rotaryAttention(9),
	"grouped attention": func(b *layers.Builder, in ...layers.Node) layers.Node {
		// Twelve heads of keys divide among every group of up to 4, and groups of both kinds.
		x := b.To(in[0], layers.Tensor, layers.Copied)
		x = b.Rows("wide", b.Columns("own", x, 0, 5), 1, 48)
		return b.Attention("a", b.To(x, layers.Tensor, in[0].Placed(layers.Tensor)),
			hidingKeys(b, in[0]))
	},
	"mlp": func(b *layers.Builder, in ...layers.Node) layers.Node {
		return b.MLP("m", in[0], 7)
	},
	"transformer": func(b *layers.Builder, in ...layers.Node) layers.Node {
		x := b.Sinusoids(0.5, b.Positions("p", in[0]))
		x = b.Add(x, b.Attention("a", b.LayerNorm("n1", x), layers.AttentionOptions{Heads: heads,
			Causal: true}))
		return b.Add(x, b.MLP("m", b.LayerNorm("n2", x), 7))
	},
	"rms norm and swiglu": func(b *layers.Builder, in ...layers.Node) layers.Node {
		return b.Add(in[0], b.SwiGLU("m", b.RMSNorm("n", 1e-5, in[0]), 7))
	},
	"rotary positions": func(b *layers.Builder, in ...layers.Node) layers.Node {
		x := in[0]
		if b.Err() != nil {
			return x
		}
		shape, axis := x.Shape(), int(x.Placed(layers.Sequence))
		turned := layers.Place(must(gorgonia.Reshape(x.Node, tensor.Shape{shape[0], shape[1], 1,
			width})), x)
		turned = b.Rotary(turned, axis, layers.RotaryOptions{First: 3})
		turned = b.Rotary(turned, axis, layers.RotaryOptions{Base: 100,
			RotaryOptions: nn.RotaryOptions{Interleaved: true}})
		if b.Err() != nil {
			return turned
		}
		return layers.Place(must(gorgonia.Reshape(turned.Node, shape.Clone())), x)
	},
	"lstm": func(b *layers.Builder, in ...layers.Node) layers.Node {
		return recurrent(in[0], b, func(x layers.Node, o nn.RecurrentOptions) layers.Node {
			return b.LSTM("l", x, 3, o)
		})
	},
	"gru": func(b *layers.Builder, in ...layers.Node) layers.Node {
		return recurrent(in[0], b, func(x layers.Node, o nn.RecurrentOptions) layers.Node {
			o.Reverse = true
			return b.GRU("g", x, 3, o)
		})
	},
	"convolution": convolved,
	"dropout": func(b *layers.Builder, in ...layers.Node) layers.Node {
		random := nn.NewRandom(3)
		random.Next(5)
		return b.Dropout(0.25, random, b.Dropout(0.5, random, in[0]))
	},
	"positions that the tensor group shards first": func(b *layers.Builder,
		in ...layers.Node) layers.Node {
		over := in[0].Placed(layers.Sequence)
		x := b.To(b.To(in[0], layers.Tensor, layers.Replicated), layers.Sequence, layers.Replicated)
		x = b.Sinusoids(0.5, b.Positions("p", b.To(b.To(x, layers.Tensor, over), layers.Sequence,
			over)))
		return b.To(b.To(x, layers.Sequence, layers.Replicated), layers.Tensor, layers.Replicated)
	},
}

func must(n *gorgonia.Node, err error) *gorgonia.Node { return gorgonia.Must(n, err) }

// recurrent builds a recurrent layer of x, whose batch both groups divide meanwhile, where they
// have divided its positions.
func recurrent(x layers.Node, b *layers.Builder,
	layer func(x layers.Node, o nn.RecurrentOptions) layers.Node) layers.Node {
	sequence, tp := x.Placed(layers.Sequence), x.Placed(layers.Tensor)
	steps := sequence
	batch := 1 - steps
	x = b.To(x, layers.Tensor, layers.Replicated)
	alone := x.Shape()[steps] == positions // a batch of 3 divides among no 2 x 2 ranks
	x = b.To(x, layers.Sequence, batch)
	if tp == steps && alone {
		x = b.To(x, layers.Tensor, batch)
	}
	y := layer(x, nn.RecurrentOptions{BatchFirst: batch == 0})
	return b.To(b.To(y, layers.Tensor, layers.Replicated), layers.Sequence, steps)
}

func rotaryAttention(first int) block {
	return func(b *layers.Builder, in ...layers.Node) layers.Node {
		return b.Attention("a", in[0], layers.AttentionOptions{Heads: heads,
			Rotary: &layers.RotaryOptions{First: first}})
	}
}

// TestRotaryAttentionSeesDistancesAlone: results and gradients do not depend on the number of the
// first position, and are not the results without Rotary.
func TestRotaryAttentionSeesDistancesAlone(t *testing.T) {
	one := layers.Sizes{DP: 1, SP: 1, TP: 1}
	of := func(name string) []outcome {
		return outcomes(t, testenv.Hosts, one, tensor.Float64, 3, 1, false, name)
	}
	first, later := of("rotary attention")[0], of("rotary attention of later positions")
	compare(t, one, later, first, 1e-10)
	require.Check(t, !slices.Equal(first.y, of("plain attention")[0].y), "nothing is turned")
}

// hidingKeys are options of attention with all that it can have, of positions and samples like x's.
func hidingKeys(b *layers.Builder, x layers.Node) layers.AttentionOptions {
	dt, along := x.Dtype(), int(x.Placed(layers.Sequence))
	lengths := make([]int, x.Shape()[1-along])
	for i := range lengths {
		lengths[i] = positions - 4*(i%3)
	}
	mask := variable(b, "mask", dt, positions, positions)
	if data, ok := mask.Value().Data().([]float64); ok {
		data[positions] = math.Inf(-1)
	}
	return layers.AttentionOptions{Heads: 24, KeyHeads: 12, Causal: true, SoftCap: 3, Mask: mask,
		KeyLengths: gorgonia.NodeFromAny(b.Graph(), tensor.New(tensor.WithShape(len(lengths)),
			tensor.WithBacking(lengths)), gorgonia.WithName("lengths")),
		Rotary: &layers.RotaryOptions{First: 2}}
}

// outcome is what a rank has after a run.
type outcome struct {
	y         []float64
	gradients map[string][]float64 // of inputs and learnables
	shapes    map[string][]int
	divided   map[string]int // the axis of a learnable that the Tensor group shards
}

// within runs a function as all ranks of a layout, with the device of its machines, nil for the
// host.
func within(t *testing.T, k testenv.Kind, s layers.Sizes,
	f func(l *layers.Layout, device backend.Device, build sync.Locker) error) {
	t.Helper()
	var build sync.Mutex
	P := s.DP * s.SP * s.TP
	g := require.Value(testranks.Connect(P, 20*time.Second, k.Connect(t, P)))(t)
	// Closed here, not at the test's end: a device counts what the next group finds in use.
	defer func() {
		require.Report(t, g.Close())
	}()
	require.NoError(t, g.All(func(r *testenv.Rank) error {
		l, err := layers.NewLayout(r.Comm, s.DP, s.SP, s.TP)
		testranks.NoError(err)
		var device backend.Device
		if k.OnDevice() {
			device = r.Comm.Device()
		}
		err = testranks.Ended(func() error { return f(l, device, &build) })
		if err != nil {
			r.Comm.Abort(err)
		}
		return errors.Join(err, l.Close())
	}))
}

// outcomes runs a block on all ranks of a layout. Its loss is the sum of products of the result
// with fixed numbers.
func outcomes(t *testing.T, k testenv.Kind, s layers.Sizes, dt tensor.Dtype, batch, axis int,
	along bool, name string, options ...vm.Option) []outcome {
	t.Helper()
	all := make([]outcome, s.SP*s.TP)
	var mu sync.Mutex
	within(t, k, s, func(l *layers.Layout, device backend.Device, build sync.Locker) error {
		build.Lock()
		b := layers.NewBuilder(gorgonia.NewGraph(), l, dt, 1)
		var inputs gorgonia.Nodes
		var in []layers.Node
		over := layers.Replicated
		if along {
			over = layers.Split(axis)
		}
		for i, n := range []int{positions, memory} {
			x := variable(b, fmt.Sprint("x", i), dt, shape(axis, batch, n)...)
			inputs = append(inputs, x)
			placed := b.To(layers.Whole(x), layers.Sequence, layers.Split(axis))
			in = append(in, b.To(placed, layers.Tensor, over))
		}
		y := blocks[name](b, in...)
		y = b.To(b.To(y, layers.Tensor, layers.Replicated), layers.Sequence, layers.Replicated)
		if err := b.Err(); err != nil {
			build.Unlock()
			return err
		}
		scale(b.Learnables())
		loss := gorgonia.Must(gorgonia.Sum(gorgonia.Must(gorgonia.HadamardProd(y.Node, variable(b,
			"c", dt, y.Shape()...)))))
		if name != "cross-attention" {
			inputs = inputs[:1]
		}
		wrt := append(inputs, b.Learnables()...)
		_, err := gorgonia.Grad(loss, wrt...)
		build.Unlock()
		if err == nil {
			err = bias(l, b)
		}
		testranks.NoError(err)
		machine := testranks.Must(vm.New(b.Graph(), device, append(options, vm.Keep(y.Node))...))
		// in bf16; those of the states of a recurrence are not rounded
		states := name == "lstm" || name == "gru"
		if dt == tensor.Float32 && len(options) > 0 && !states &&
			moves32.MatchString(machine.Plan().String()) {
			return errors.Join(fmt.Errorf("an all-to-all moves f32: %v", machine.Plan()),
				machine.Close())
		}
		if device != nil && !strings.Contains(machine.Plan().String(), "host_ops=0") {
			return errors.Join(fmt.Errorf("something runs on the host: %v", machine.Plan()),
				machine.Close())
		}
		if err := machine.RunAll(); err != nil {
			return errors.Join(ops.Cause(err), machine.Close())
		}
		o := outcome{numbers(y.Value()), map[string][]float64{}, map[string][]int{}, b.Sharded()}
		for _, n := range wrt {
			o.gradients[n.Name()], o.shapes[n.Name()] = numbers(n.Deriv().Value()), n.Shape()
		}
		mu.Lock()
		all[l.Comm(layers.Sequence).Rank()*s.TP+l.Comm(layers.Tensor).Rank()] = o
		mu.Unlock()
		return machine.Close()
	})
	return all
}

func shape(axis, batch, n int) []int {
	if axis == 0 {
		return []int{n, batch, width}
	}
	return []int{batch, n, width}
}

// variable is an input with numbers that follow from its name.
func variable(b *layers.Builder, name string, dt tensor.Dtype, shape ...int) *gorgonia.Node {
	r := rand.New(rand.NewPCG(uint64(len(name)), uint64(name[len(name)-1])))
	values := make([]float64, tensor.Shape(shape).TotalSize())
	for i := range values {
		values[i] = r.NormFloat64() / 4
	}
	var backing any = values
	if dt == tensor.Float32 {
		backing = converted[float32](values)
	}
	return gorgonia.NewTensor(b.Graph(), dt, len(shape), gorgonia.WithName(name),
		gorgonia.WithShape(shape...),
		gorgonia.WithValue(tensor.New(tensor.WithShape(shape...), tensor.WithBacking(backing))))
}

// scale makes weights large enough that attention is not uniform.
func scale(learnables gorgonia.Nodes) {
	for _, n := range learnables {
		if !strings.HasSuffix(n.Name(), "weight") {
			continue
		}
		switch data := n.Value().Data().(type) {
		case []float64:
			for i := range data {
				data[i] *= 20
			}
		case []float32:
			for i := range data {
				data[i] *= 20
			}
		}
	}
}

// bias gives biases numbers other than zero, which follow from where they are in the whole. It is
// collective.
func bias(l *layers.Layout, b *layers.Builder) error {
	divided := b.Sharded()
	for _, n := range b.Learnables() {
		if !strings.HasSuffix(n.Name(), "bias") {
			continue
		}
		own, start, length := n.Shape(), 0, 1.0
		axis, parts := divided[n.Name()]
		if parts {
			length = float64(own[axis])
			if err := autograd.Sum(l.Comm(layers.Tensor), &length); err != nil {
				return err
			}
			for _, n := range backend.Even(int(length), l.TP)[:l.Comm(layers.Tensor).Rank()] {
				start += n
			}
		}
		set := func(i int) float64 {
			at := i
			if parts {
				behind := tensor.Shape(own[axis+1:]).TotalSize()
				row := own[axis] * behind
				at = i/row*int(length)*behind + start*behind + i%row
			}
			return math.Sin(float64(at+1)) / 4
		}
		switch data := n.Value().Data().(type) {
		case []float64:
			for i := range data {
				data[i] = set(i)
			}
		case []float32:
			for i := range data {
				data[i] = float32(set(i))
			}
		}
	}
	return nil
}

func converted[T, F float32 | float64](x []F) []T {
	y := make([]T, len(x))
	for i, v := range x {
		y[i] = T(v)
	}
	return y
}

func numbers(v gorgonia.Value) []float64 {
	switch data := v.Data().(type) {
	case []float32:
		return converted[float64](data)
	case []float64:
		return slices.Clone(data)
	}
	return nil
}

// sequenced are layouts without replicas.
func sequenced() []layers.Sizes {
	all := []layers.Sizes{{DP: 1, SP: 2, TP: 1}, {DP: 1, SP: 1, TP: 3}, {DP: 1, SP: 2, TP: 2}}
	if full() {
		all = append(all, layers.Sizes{DP: 1, SP: 3, TP: 1}, layers.Sizes{DP: 1, SP: 4, TP: 1},
			layers.Sizes{DP: 1, SP: 1, TP: 2}, layers.Sizes{DP: 1, SP: 1, TP: 4})
	}
	return all
}

// divides reports whether each rank has a part: recurrent layers divide samples where others divide
// positions.
func divides(name string, batch int, s layers.Sizes, along bool) bool {
	if name != "lstm" && name != "gru" {
		return true
	}
	return s.SP <= batch && (!along || s.TP <= batch)
}

// TestBlockEqualsOneRank: results and all gradients of each block equal one rank's, for
// samples or positions first, and with x replicated or split along the sequence over the Tensor
// group.
func TestBlockEqualsOneRank(t *testing.T) {
	batches, dtypes := []int{3}, map[tensor.Dtype]float64{tensor.Float64: 1e-10}
	if full() {
		batches, dtypes = []int{1, 3, 4}, map[tensor.Dtype]float64{tensor.Float64: 1e-10,
			tensor.Float32: 1e-6}
	}
	for name := range blocks {
		for dt, tolerance := range dtypes {
			for _, batch := range batches {
				for axis := range 2 {
					want := outcomes(t, testenv.Hosts, layers.Sizes{DP: 1, SP: 1, TP: 1}, dt, batch,
						axis, false, name)[0]
					for _, s := range sequenced() {
						for _, along := range []bool{false, true} {
							if along && s.TP == 1 || !along && axis == 0 && s.TP > 1 && !full() ||
								!divides(name, batch, s, along) {
								continue
							}
							t.Run(fmt.Sprintf("%s/%v/batch %d/axis %d/%v/along %v", name, dt, batch,
								axis, s, along), func(t *testing.T) {
								compare(t, s, outcomes(t, testenv.Hosts, s, dt, batch, axis, along,
									name), want, tolerance)
							})
						}
					}
				}
			}
		}
	}
}

// TestBlockEqualsOneRankOnDevices: so do the results of ranks on devices, where nothing goes
// through the host.
func TestBlockEqualsOneRankOnDevices(t *testing.T) {
	const batch, axis, tolerance = 3, 1, 1e-10
	testenv.Each(t, testenv.OnDevices(), func(t *testing.T, k testenv.Kind) {
		for _, name := range sampled(k, 0) {
			want := outcomes(t, testenv.Hosts, layers.Sizes{DP: 1, SP: 1, TP: 1}, tensor.Float64,
				batch, axis, false, name)[0]
			for _, s := range append(sequenced(), layers.Sizes{DP: 1, SP: 1, TP: 2}) {
				if !divides(name, batch, s, s.TP > 1) {
					continue
				}
				t.Run(fmt.Sprintf("%s/%v", name, s), func(t *testing.T) {
					compare(t, s, outcomes(t, k, s, tensor.Float64, batch, axis, s.TP > 1, name),
						want, tolerance)
				})
			}
		}
	})
}

// sampled names all blocks, or every second one from the first one on.
func sampled(k testenv.Kind, first int) (names []string) {
	for i, name := range slices.Sorted(maps.Keys(blocks)) {
		if !k.Sampled() || (i-first)%2 == 0 {
			names = append(names, name)
		}
	}
	return names
}

// moves32 is an all-to-all between heads and positions of f32.
var moves32 = regexp.MustCompile(`f32\(\d+,\d+,.*\) = AllToAll`)

// TestBlockEqualsOneRankInBF16: so do matrix multiplications and attention in bf16, and all-to-alls
// move bf16.
func TestBlockEqualsOneRankInBF16(t *testing.T) {
	const batch, axis, tolerance = 3, 1, 1e-2
	testenv.Each(t, testenv.OnDevices(), func(t *testing.T, k testenv.Kind) {
		for _, name := range sampled(k, 1) {
			want := outcomes(t, k, layers.Sizes{DP: 1, SP: 1, TP: 1}, tensor.Float32, batch, axis,
				false, name, vm.WithPrecision(vm.BF16))[0]
			for _, s := range sequenced() {
				if !divides(name, batch, s, s.TP > 1) {
					continue
				}
				t.Run(fmt.Sprintf("%s/%v", name, s), func(t *testing.T) {
					compare(t, s, outcomes(t, k, s, tensor.Float32, batch, axis, s.TP > 1, name,
						vm.WithPrecision(vm.BF16)), want, tolerance)
				})
			}
		}
	})
}

// compare compares what ranks have with what one rank has. Gradients of learnables are added up
// over the Sequence group, whose ranks have the same part.
func compare(t *testing.T, s layers.Sizes, got []outcome, want outcome, tolerance float64) {
	t.Helper()
	for r, o := range got {
		near(t, fmt.Sprintf("rank %d: result", r), o.y, want.y, tolerance)
	}
	for name, whole := range want.gradients {
		if name == "x0" || name == "x1" {
			for r, o := range got {
				near(t, fmt.Sprintf("rank %d: gradient of %s", r, name), o.gradients[name], whole,
					tolerance)
			}
			continue
		}
		start := 0
		for part := range s.TP {
			o := got[part]
			sum := make([]float64, len(o.gradients[name]))
			for r := part; r < len(got); r += s.TP {
				for i, v := range got[r].gradients[name] {
					sum[i] += v
				}
			}
			wanted := whole
			if axis, ok := o.divided[name]; ok {
				n := o.shapes[name][axis]
				wanted = piece(whole, want.shapes[name], axis, start, start+n)
				start += n
			}
			// A small element of a part is rounded as those of the whole, whose terms it has.
			near(t, fmt.Sprintf("part %d: gradient of %s", part, name), sum, wanted,
				tolerance*largest(whole)/largest(wanted))
		}
	}
}

// piece returns elements start to end of an axis, by coordinates.
func piece(x []float64, shape []int, axis, start, end int) (part []float64) {
	behind := 1
	for _, n := range shape[axis+1:] {
		behind *= n
	}
	for i, v := range x {
		if k := i / behind % shape[axis]; k >= start && k < end {
			part = append(part, v)
		}
	}
	return part
}

func near(t *testing.T, what string, got, want []float64, tolerance float64) {
	t.Helper()
	if len(got) != len(want) {
		t.Errorf("%s: %d elements, want %d", what, len(got), len(want))
		return
	}
	most := largest(want)
	for i := range got {
		if !(math.Abs(got[i]-want[i]) <= tolerance*most) {
			t.Errorf("%s: element %d is %v, want %v", what, i, got[i], want[i])
			return
		}
	}
}

// largest returns the largest magnitude, 1 at least.
func largest(x []float64) float64 {
	most := 1.0
	for _, v := range x {
		most = max(most, math.Abs(v))
	}
	return most
}

// TestDownUpEqualsOneRank: operations of package ops with the scales of the mean, Down on entry and
// Up on exit, have the gradients of one rank, if those of learnables are averaged.
func TestDownUpEqualsOneRank(t *testing.T) {
	const P, n = 3, 7
	lengths := ops.Splits(backend.Even(n, P)...)
	var build sync.Mutex
	g := testranks.New(t, P, 20*time.Second, testenv.Hosts.Connect(t, P))
	require.NoError(t, g.All(func(r *testenv.Rank) error {
		build.Lock()
		graph := gorgonia.NewGraph()
		x := gorgonia.NewMatrix(graph, tensor.Float64, gorgonia.WithShape(n, 1),
			gorgonia.WithName("x"), gorgonia.WithValue(tensor.New(tensor.WithShape(n, 1),
				tensor.WithBacking([]float64{1, 2, 3, 4, 5, 6, 7}))))
		w := gorgonia.NewMatrix(graph, tensor.Float64, gorgonia.WithShape(1, 1),
			gorgonia.WithName("w"), gorgonia.WithValue(tensor.New(tensor.WithShape(1, 1),
				tensor.WithBacking([]float64{3}))))
		part, err := ops.SplitForwardGatherBackward(r.Comm, 0, ops.Down(r.Comm), x, lengths)
		var y *gorgonia.Node
		if err == nil {
			y, err = ops.GatherForwardSplitBackward(r.Comm, 0, ops.Up(r.Comm),
				gorgonia.Must(gorgonia.Mul(part, w)), lengths)
		}
		if err == nil {
			_, err = gorgonia.Grad(gorgonia.Must(gorgonia.Sum(y)), x, w)
		}
		build.Unlock()
		testranks.NoError(err)
		machine := testranks.Must(vm.New(graph, nil))
		err = machine.RunAll()
		if err == nil {
			dw := numbers(w.Deriv().Value())[0]
			err = autograd.Mean(r.Comm, &dw)
			near(t, "gradient of w", []float64{dw}, []float64{28}, 1e-12)
			near(t, "gradient of x", numbers(x.Deriv().Value()), []float64{3, 3, 3, 3, 3, 3, 3},
				1e-12)
		}
		return errors.Join(err, machine.Close())
	}))
}

// TestTrainingEqualsOneRank: a transformer with an embedding and its classifier has the losses of
// one rank on every layout, step by step.
func TestTrainingEqualsOneRank(t *testing.T) {
	want := losses(t, testenv.Hosts, layers.Sizes{DP: 1, SP: 1, TP: 1}, false)
	require.That(t, want[len(want)-1] < want[0], "the losses of one rank are %v", want)
	for _, s := range []layers.Sizes{{DP: 2, SP: 1, TP: 1}, {DP: 1, SP: 2, TP: 1},
		{DP: 1, SP: 1, TP: 2}, {DP: 1, SP: 1, TP: 3}, {DP: 2, SP: 2, TP: 1}, {DP: 2, SP: 1, TP: 2},
		{DP: 1, SP: 2, TP: 2}} {
		for _, along := range []bool{false, true} {
			if along && s.TP == 1 {
				continue
			}
			t.Run(fmt.Sprintf("%v along %v", s, along), func(t *testing.T) {
				near(t, "losses", losses(t, testenv.Hosts, s, along), want, 1e-10)
			})
		}
	}
}

// TestTrainingEqualsOneRankOnDevices: so have those of ranks on devices, whose memory the host
// cannot touch.
func TestTrainingEqualsOneRankOnDevices(t *testing.T) {
	want := losses(t, testenv.Hosts, layers.Sizes{DP: 1, SP: 1, TP: 1}, false)
	testenv.Each(t, testenv.OnDevices(), func(t *testing.T, k testenv.Kind) {
		for _, s := range []layers.Sizes{{DP: 1, SP: 2, TP: 2}, {DP: 2, SP: 1, TP: 2}} {
			t.Run(s.String(), func(t *testing.T) {
				near(t, "losses", losses(t, k, s, s.DP == 1), want, 1e-10)
			})
		}
	})
}

// losses trains for some steps.
func losses(t *testing.T, k testenv.Kind, s layers.Sizes, along bool) []float64 {
	t.Helper()
	return lossesOf(t, k, s, along, false)
}

// filler is the target of the places of a sample that are filled up.
const filler = -7

// lossesOf is losses, with some targets filled up, more in some samples than in others.
func lossesOf(t *testing.T, k testenv.Kind, s layers.Sizes, along, padded bool) []float64 {
	t.Helper()
	const vocabulary, batch, steps = 11, 4, 4
	ids := make([]int, batch*positions)
	for i := range ids {
		ids[i] = (i*i + i/3) % vocabulary
	}
	all := make([]float64, steps)
	within(t, k, s, func(l *layers.Layout, device backend.Device, build sync.Locker) error {
		build.Lock()
		b := layers.NewBuilder(gorgonia.NewGraph(), l, tensor.Float64, 1)
		own := batch / s.DP
		tokens, targets := b.Tokens("tokens", 1, own, positions), b.Tokens("targets", 1, own,
			positions)
		if padded {
			targets.Padding(filler)
		}
		embedding := b.Learn("words", layers.Normal(0.1), 0, vocabulary, width)
		over := layers.Replicated
		if along {
			over = layers.Split(1)
		}
		x := b.To(b.Embedding(embedding, tokens), layers.Tensor, over)
		x = blocks["transformer"](b, b.LayerNorm("n0", x))
		loss := b.CrossEntropy(b.Logits(b.LayerNorm("n", x), embedding), targets)
		learnables, err := b.Grad(loss)
		build.Unlock()
		testranks.NoError(err)
		machine := testranks.Must(vm.New(b.Graph(), device, vm.Keep(loss.Node),
			vm.WithSolver(&solver.Momentum{Rate: 0.1, Momentum: 0.9}, learnables...), b.Training()))
		mine := ids[l.Replica*own*positions : (l.Replica+1)*own*positions]
		next := append(slices.Clone(mine[1:]), ids[(l.Replica+1)*own*positions%len(ids)])
		for i := range next {
			at := l.Replica*own*positions + i
			if sample := at / positions; padded && (at%positions > 2*sample || sample == 2) {
				next[i] = filler
			}
		}
		for step := range steps {
			if err := errors.Join(tokens.Set(mine), targets.Set(next)); err != nil {
				return errors.Join(err, machine.Close())
			}
			if err := machine.RunAll(); err != nil {
				return errors.Join(ops.Cause(err), machine.Close())
			}
			value := loss.Value().Data().(float64)
			if err := autograd.Sum(l.Data, &value); err != nil {
				return errors.Join(err, machine.Close())
			}
			if l.Comm(layers.Tensor).Rank() == 0 && l.Data.Rank() == 0 {
				all[step] = value
			}
		}
		return machine.Close()
	})
	return all
}
