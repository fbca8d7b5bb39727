package vm_test

import (
	"errors"
	"fmt"
	"math"
	"os"
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
	"github.com/euryale-ml/euryale/backend/compress/half"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/internal/testing/testenv"
	"github.com/euryale-ml/euryale/internal/testing/testranks"
	"github.com/euryale-ml/euryale/ops/nn"
	"github.com/euryale-ml/euryale/vm"
)

// gpt is a GPT of GPT-2's kind.
type gpt struct {
	vocabulary, batch, context, width, heads, layers int
	dropout                                          *nn.Random // nil for none
	unset                                            bool       // variables have no values
}

// gpt2 is the smallest GPT-2, as in bench/train.
var gpt2 = gpt{vocabulary: 50304, batch: 16, context: 1024, width: 768, heads: 12, layers: 12,
	unset: true}

func (s gpt) model(t testing.TB) *model {
	m := &model{g: gorgonia.NewGraph()}
	variable := func(dt tensor.Dtype, shape ...int) node {
		n := gorgonia.NewTensor(m.g, dt, len(shape), gorgonia.WithShape(shape...),
			gorgonia.WithName(fmt.Sprint("v", len(m.g.AllNodes()))))
		if !s.unset {
			v := filled(n, func(i int) float64 {
				if dt == tensor.Int {
					return float64(i * 7 % s.vocabulary)
				}
				return math.Mod(float64(i)*0.37+0.11, 0.5) - 0.25
			})
			require.NoError(t, gorgonia.Let(n, v))
		}
		return n
	}
	learn := func(shape ...int) node {
		n := variable(tensor.Float32, shape...)
		m.params = append(m.params, n)
		return n
	}
	rows := s.batch * s.context
	linear := func(x node, in, out int) node {
		y := mul(x, learn(in, out))
		return must(gorgonia.BroadcastAdd(y, learn(1, out), nil, []byte{0}))
	}
	norm := func(x node) node {
		return must(nn.LayerNorm(1e-5, x, learn(s.width), learn(s.width)))
	}
	dropped := func(x node) node {
		if s.dropout != nil {
			x = must(nn.Dropout(0.25, s.dropout, x))
		}
		return x
	}
	tokens, positions := learn(s.vocabulary, s.width), learn(1, s.context, s.width)
	x := must(nn.Embedding(tokens, variable(tensor.Int, rows)))
	x = reshape(x, tensor.Shape{s.batch, s.context, s.width})
	x = must(gorgonia.BroadcastAdd(x, positions, nil, []byte{0}))
	x = reshape(x, tensor.Shape{rows, s.width})
	for range s.layers {
		qkv := linear(norm(x), s.width, 3*s.width)
		part := func(k int) node {
			y := must(nn.Slice(1, k*s.width, (k+1)*s.width, 1, qkv))
			y = reshape(y, tensor.Shape{s.batch, s.context, s.heads, s.width / s.heads})
			return transpose(y, 0, 2, 1, 3)
		}
		y := must(nn.Attention(part(0), part(1), part(2), nn.AttentionOptions{Causal: true}))
		y = reshape(transpose(y, 0, 2, 1, 3), tensor.Shape{rows, s.width})
		x = add(x, dropped(linear(y, s.width, s.width)))
		h := must(nn.GELUTanh(linear(norm(x), s.width, 4*s.width)))
		x = add(x, dropped(linear(h, 4*s.width, s.width)))
	}
	logits := must(nn.BatchedMatMul(false, true, norm(x), tokens))
	m.grad(t, must(nn.CrossEntropy(nn.NoLabel, logits, variable(tensor.Int, rows))))
	return m
}

// deep is so many equal layers, one behind the other.
func deep(t testing.TB, layers, batch, width int) *model {
	m := &model{g: gorgonia.NewGraph()}
	x := m.variable("x", tensor.Float32, batch, width)
	for i := range layers {
		w := m.variable(fmt.Sprint("w", i), tensor.Float32, width, width)
		m.params = append(m.params, w)
		x = tanh(mul(x, w))
	}
	m.grad(t, mean(x))
	return m
}

// bounded are models whose values take most of the memory.
var bounded = map[string]func(testing.TB, *nn.Random) *model{
	"mlp": func(t testing.TB, _ *nn.Random) *model {
		return layers(64, 64, 128, 128, 128, 10)(t, tensor.Float32)
	},
	"convnet": func(t testing.TB, _ *nn.Random) *model { return convnet(t, tensor.Float32) },
	"gpt": func(t testing.TB, random *nn.Random) *model {
		return gpt{vocabulary: 13, batch: 4, context: 24, width: 16, heads: 2, layers: 3,
			dropout: random}.model(t)
	},
}

// TestABoundOfMemoryChangesNoBit: losses and parameters after some steps are those without a bound,
// also with dropout, and in BF16.
func TestABoundOfMemoryChangesNoBit(t *testing.T) {
	for where, device := range devices {
		t.Run(where, func(t *testing.T) { boundOfMemory(t, device(t), 0, 50) })
	}
}

func boundOfMemory(t *testing.T, device backend.Device, shares ...int64) {
	for name, build := range bounded {
		for _, precision := range []vm.Precision{vm.F32, vm.BF16} {
			random := nn.NewRandom(7)
			m := build(t, random)
			first := clones(m)
			steps := func(bound ...vm.Option) (got [][]float32, memory vm.Memory) {
				for i, p := range m.params {
					copy(p.Value().Data().([]float32), first[i])
				}
				options := append(bound, vm.WithPrecision(precision),
					vm.WithSolver(&solver.Adam{Rate: 1e-2}, m.params...))
				machine := require.Value(vm.New(m.g, device, options...))(t)
				var losses []float32
				for step := range uint64(3) {
					random.Seek(step, 0)
					run(t, machine)
					losses = append(losses, m.loss.Data().(float32))
				}
				memory = machine.Summary().Memory
				require.NoError(t, machine.Close())
				return append(clones(m), losses), memory
			}
			want, free := steps()
			_, least := steps(vm.WithLeastMemory())
			require.That(t, least.Rematerialized != 0 && least.Values < free.Values,
				"%s in %v: %v is no less than %v", name, precision, least, free)
			for _, share := range shares {
				total := func(m vm.Memory) int64 { return m.Total() - m.Workspace }
				limit := total(least) + (total(free)-total(least))*share/100
				got, memory := steps(vm.WithMemory(int(limit)))
				if total(memory) > limit || memory.Rematerialized == 0 {
					t.Errorf("%s in %v: %d bytes of %d, %d steps again", name, precision,
						total(memory), limit, memory.Rematerialized)
				}
				require.Check(t, slices.EqualFunc(got, want, slices.Equal[[]float32]),
					"%s in %v: with %d bytes the bits are others", name, precision, limit)
			}
		}
	}
}

// TestABoundOfMemoryChangesNoBitOfRandomGraphs: values and learnables are those without a bound.
func TestABoundOfMemoryChangesNoBitOfRandomGraphs(t *testing.T) {
	boundOfRandomGraphs(t, map[string]backend.Device{"host": nil, "fake": fake(t)}, 25)
}

func boundOfRandomGraphs(t *testing.T, devices map[string]backend.Device, n uint64) {
	list, again := newSeeds(t, n, 20*n), 0
	for where, device := range devices {
		b := bench{layout: layout(t), devices: []backend.Device{device}, lock: &sync.Mutex{},
			figures: &figures{}}
		for seed := range list.end {
			trial := b.draw(seed)
			got, steps, err := b.bits(trial, -1)
			want, _, plain := b.bits(trial, 0)
			if errors.Is(err, errRefused) || trial.solver != "" && len(want) == 0 {
				continue
			}
			require.That(t, err == nil && plain == nil, "seed %d on %s: %v, %v", seed, where, err,
				plain)
			if again += steps; !slices.Equal(got, want) {
				t.Errorf("seed %d on %s: with as little memory as possible the bits are others",
					seed, where)
			}
		}
	}
	if t.Logf("%d steps ran again", again); again < int(list.end)/2 {
		t.Error("they are too few")
	}
}

// bits returns those of all that a trial computes with a limit of memory, and how many steps run
// again.
func (b bench) bits(t trial, memory int) (bits []uint64, again int, err error) {
	g, err := b.build(t)
	if err != nil {
		return nil, 0, err
	}
	if len(g.learnables) == 0 {
		t.solver = ""
	}
	add := func(v gorgonia.Value) {
		for _, x := range elements(v) {
			bits = append(bits, math.Float64bits(x))
		}
	}
	watched, limits := t.watched(g), t.limits[0]
	limits.Memory = memory
	if err := b.feed(t, g, 0); err != nil {
		return nil, 0, err
	}
	m, err := vm.New(g.Graph, b.devices[0],
		append(b.options(t, g, b.devices[0], limits, watched), vm.Notice(func(string) {}))...)
	if err != nil {
		return nil, 0, err
	}
	for run := range t.steps * t.micro {
		if err := errors.Join(b.feed(t, g, run), m.RunAll()); err != nil {
			return nil, 0, errors.Join(err, m.Close())
		}
		for _, n := range watched.nodes {
			add(n.Value())
		}
	}
	err = errors.Join(m.Pull(g.learnables...), m.Close())
	for _, n := range g.learnables {
		add(n.Value())
	}
	return bits, m.Summary().Memory.Rematerialized, err
}

// TestMemoryOfDeepChainsGrowsAsTheRoot: with the least memory, for at most a third more time.
func TestMemoryOfDeepChainsGrowsAsTheRoot(t *testing.T) {
	const one = 512 * 64 * 4 // the values of a layer
	for _, layers := range []int{16, 36, 64, 144} {
		m := deep(t, layers, 512, 64)
		option := vm.WithSolver(&solver.SGD{Rate: 1}, m.params...)
		free := require.Value(vm.Summarize(m.g, 1, option))(t)
		least := require.Value(vm.Summarize(m.g, 1, option, vm.WithLeastMemory()))(t)
		// gradients of all weights, and values beside those that are kept
		rest := least.Memory.Learnables + 6*one
		root := int64(2 * math.Sqrt(float64(layers)) * one)
		require.Check(t, free.Memory.Values >= int64(layers)*one && least.Memory.Values <=
			root+rest, "%d layers: %d bytes, and %d with the least memory", layers,
			free.Memory.Values, least.Memory.Values)
		f := float64(least.FLOPs) / float64(free.FLOPs)
		require.Check(t, !(f > 1.33), "%d layers: %.3f of the operations", layers, f)
	}
}

// TestABoundIsRefusedWhereItIsLessThanTheLeast: and nowhere else, whatever is found for smaller and
// larger ones.
func TestABoundIsRefusedWhereItIsLessThanTheLeast(t *testing.T) {
	for layers := range 5 {
		for i, precision := range []vm.Precision{vm.F32, vm.BF16} {
			if !full() && (layers+i)%2 > 0 {
				continue // each number of layers once
			}
			m := gpt{vocabulary: 13, batch: 3, context: 8, width: 16, heads: 2,
				layers: layers + 1, dropout: nn.NewRandom(7)}.model(t)
			total := func(bound vm.Option) (int64, error) {
				s, err := vm.Summarize(m.g, 1, bound, vm.WithPrecision(precision),
					vm.WithSolver(&solver.Adam{Rate: 1}, m.params...))
				return s.Memory.Total(), err
			}
			least := require.Value(total(vm.WithLeastMemory()))(t)
			for _, limit := range []int64{least - least/30, least - 1, least, least + 1,
				least + least/200, least + least/100, least + least/50, least + least/25} {
				switch got, err := total(vm.WithMemory(int(limit))); {
				case err == nil && (got > limit || limit < least), err != nil && limit >= least:
					t.Errorf("%d layers in %v: %d bytes of %d, at least %d: %v", layers+1,
						precision, got, limit, least, err)
				case err != nil && !strings.Contains(err.Error(),
					fmt.Sprintf("the plan takes %d with", least)):
					t.Errorf("%v, want %d", err, least)
				}
			}
		}
	}
}

// TestABoundOfMemoryIsUsed: plans of GPT-2 take at most the bound, and at least 0.97 of it.
func TestABoundOfMemoryIsUsed(t *testing.T) {
	m := gpt2.model(t)
	summary := func(bound vm.Option) vm.Memory {
		t.Helper()
		s := require.Value(vm.Summarize(m.g, 1, vm.WithPrecision(vm.BF16),
			vm.WithSolver(&solver.AdamW{Rate: 1}, m.params...), bound))(t)
		return s.Memory
	}
	free, least := summary(vm.Keep()), summary(vm.WithLeastMemory())
	bounds := int64(5)
	if os.Getenv("EURYALE_FULL") == "1" {
		bounds = 20
	}
	last := math.Inf(1)
	for i := range bounds {
		limit := least.Total() + (free.Total()-least.Total())*i/bounds
		got := summary(vm.WithMemory(int(limit)))
		if t.Log(got); got.Total() > limit || float64(got.Total()) < 0.97*float64(limit) {
			t.Errorf("%d bytes of %d", got.Total(), limit)
		}
		require.Check(t, got.Extra <= last && got.Extra <= 0.34, "%v, with less memory %.3f", got,
			last)
		last = got.Extra
	}
}

// talkative is a GPT of many words.
func talkative(t testing.TB, _ tensor.Dtype) *model {
	return gpt{vocabulary: 500, batch: 8, context: 24, width: 16, heads: 2, layers: 1}.model(t)
}

// TestTilesOfTheLoss: with logits in tiles loss and learnables have the bits of the plan without,
// but for the weights of the last product, whose gradient is added up in another order.
func TestTilesOfTheLoss(t *testing.T) {
	for where, device := range devices {
		t.Run(where, func(t *testing.T) { tilesOfTheLoss(t, device(t), 0) })
	}
}

func tilesOfTheLoss(t *testing.T, device backend.Device, tolerance float64) {
	t.Helper()
	for _, precision := range []vm.Precision{vm.F32, vm.BF16} {
		for micros := 1; micros <= 2; micros++ {
			var all [2][][]float32
			var memory [2]vm.Memory
			for i, tiles := range []int{1, 8} {
				m := talkative(t, tensor.Float32)
				options := []vm.Option{vm.WithLossTiles(tiles), vm.WithPrecision(precision),
					vm.WithSolver(&solver.SGD{Rate: 0.5}, m.params...)}
				if micros > 1 {
					options = append(options, vm.Accumulate(micros))
				}
				machine := machineOn(t, device, m.g, options...)
				memory[i] = machine.Summary().Memory
				for range micros {
					run(t, machine)
				}
				loss := m.loss.Data().(float32)
				require.NoError(t, errors.Join(machine.Pull(m.params...), machine.Close()))
				all[i] = append(clones(m), []float32{loss})
			}
			if memory[1].Values > memory[0].Values*8/10 {
				t.Errorf("%d micro-batches in %v: %v in tiles, without %v", micros, precision,
					memory[1], memory[0])
			}
			for k := range all[0] {
				most := tolerance
				if k == 0 { // the embedding is the last product's weights
					most = max(tolerance, 1e-6)
				}
				for i, w := range all[0][k] {
					if d := math.Abs(float64(w - all[1][k][i])); !(d <= most) {
						t.Fatalf("%d micro-batches in %v: variable %d differs by %g", micros,
							precision, k, d)
					}
				}
			}
		}
	}
}

// TestTilesOfGPT2: what tiles of the loss save, by planned memory.
func TestTilesOfGPT2(t *testing.T) {
	for _, batch := range []int{16, 32} {
		of := gpt2
		of.batch = batch
		m, whole := of.model(t), vm.Memory{}
		for _, tiles := range []int{1, 2, 4, 8, 16} {
			if !full() && (batch > 16 || tiles > 1 && tiles != 8) {
				continue
			}
			s := require.Value(vm.Summarize(m.g, 1, vm.WithPrecision(vm.BF16),
				vm.WithLossTiles(tiles), vm.WithSolver(&solver.AdamW{Rate: 1}, m.params...)))(t)
			if tiles == 1 {
				whole = s.Memory
			}
			saved := (whole.Total() - s.Memory.Total()) >> 20
			t.Logf("batch %d, %d tiles: %d MiB, %d less", batch, tiles, s.Memory.Total()>>20, saved)
			require.Check(t, tiles != 8 || saved >= int64(32*batch),
				"8 tiles of a batch of %d save %d MiB", batch, saved)
		}
	}
}

// TestLossesWithoutTiles: what cannot be in tiles is an error.
func TestLossesWithoutTiles(t *testing.T) {
	m := talkative(t, tensor.Float32)
	option := vm.WithSolver(&solver.SGD{Rate: 0.5}, m.params...)
	require.Fails(t, "vm.New", require.Err(vm.New(m.g, nil, option, vm.WithLossTiles(0))),
		backend.ErrArgument)
	require.Fails(t, "vm.New", require.Err(vm.New(m.g, nil, option, vm.WithLossTiles(7))),
		backend.ErrUnsupported, "has 192 rows")
}

// TestTilesOfRanks: ranks train with logits in tiles, in shards, too, and all get the same.
func TestTilesOfRanks(t *testing.T) {
	var want [][]float64
	for _, stage := range append([]vm.Shards{0}, stages...) {
		options := []vm.Option{vm.WithLossTiles(4), vm.WithLeastMemory()}
		if stage > 0 {
			options = append(options, vm.WithShards(stage))
		}
		require.Report(t, testranks.Join(together(t, testenv.Devices, 2, func(r ranked) error {
			r.lock.Lock()
			m := talkative(r.t, tensor.Float32)
			r.lock.Unlock()
			machine, err := vm.New(m.g, r.device, append(options, vm.WithDataParallel(r.Comm),
				vm.WithSolver(solvers["adam"](), m.params...))...)
			testranks.NoError(err)
			err = errors.Join(machine.RunAll(), machine.RunAll(), machine.Pull(m.params...),
				machine.DataParallel().Check(), machine.Close())
			if got := m.weights(r.t); r.Comm.Rank() == 0 && want == nil {
				want = got
			} else if r.Comm.Rank() == 0 && !slices.EqualFunc(got, want, slices.Equal) {
				t.Errorf("stage %b: other bits than of replicas", stage)
			}
			return err
		})))
	}
}

// TestTooLittleMemoryIsAnErrorThatSaysWhatTakesIt: on every way to a plan.
func TestTooLittleMemoryIsAnErrorThatSaysWhatTakesIt(t *testing.T) {
	m := mlp(t, tensor.Float32)
	for _, options := range [][]vm.Option{nil, {vm.WithSolver(&solver.Adam{Rate: 1},
		m.params...)}} {
		_, err := vm.New(m.g, nil, append(options, vm.WithMemory(1000))...)
		for _, want := range []string{"too little memory", "1000 bytes are", "too few", "w0 (",
			"smaller batches"} {
			require.Fails(t, "vm.New", err, want)
		}
		if _, err := vm.Summarize(m.g, 1, append(options, vm.WithMemory(1000))...); err == nil {
			t.Error("Summarize has no error")
		}
	}
	require.Fails(t, "no bytes", require.Err(vm.New(m.g, nil, vm.WithMemory(0))),
		backend.ErrArgument)
}

// TestSummarizeIsTheSummaryOfShards: of rank 0, where each learnable has a bucket of its own.
func TestSummarizeIsTheSummaryOfShards(t *testing.T) {
	as := training{solver: solvers["adam"], build: layers(4, 16, 16, 16, 16),
		data: func(*model) []autograd.Option {
			return []autograd.Option{autograd.WithBuckets(1, 1)}
		}}
	for _, stage := range stages {
		for _, p := range []vm.Precision{vm.F32, vm.BF16} {
			options := []vm.Option{vm.WithShards(stage), vm.WithPrecision(p)}
			require.Report(t, testranks.Join(together(t, testenv.Hosts, 2, func(r ranked) error {
				m, machine, err := r.start(as, options...)
				testranks.NoError(err)
				want := machine.Summary().Memory
				want.Workspace = 0
				got, err := vm.Summarize(m.g, 2, append(options, vm.WithSolver(as.solver(),
					m.params...))...)
				require.Check(t, got.Memory == want || r.Comm.Rank() != 0,
					"stage %b in %v: %v, of a machine %v", stage, p, got.Memory, want)
				return errors.Join(err, machine.Close())
			})))
		}
	}
	m := mlp(t, tensor.Float32)
	require.Fails(t, "vm.Summarize", require.Err(vm.Summarize(m.g, 2,
		vm.WithSolver(&solver.SGD{Rate: 1}, m.params...), vm.WithShards(vm.Parameters))),
		backend.ErrArgument)
}

func TestSummarizeRefusesNoRanks(t *testing.T) {
	m := mlp(t, tensor.Float32)
	for _, ranks := range []int{0, -1} {
		require.Fails(t, fmt.Sprintf("%d ranks", ranks), require.Err(vm.Summarize(m.g, ranks)),
			backend.ErrArgument)
	}
}

// TestSummarizeIsTheSummaryOfMachines: of one, and of one for each of two ranks. Buckets take as
// much memory with gradients in BF16.
func TestSummarizeIsTheSummaryOfMachines(t *testing.T) {
	for name, ranks := range map[string]int{"one": 1, "two": 2, "in half": 2} {
		err := testranks.Join(together(t, testenv.Hosts, ranks, func(r ranked) error {
			r.lock.Lock()
			m := bounded["gpt"](t, nil)
			options := []vm.Option{vm.WithSolver(&solver.Adam{Rate: 1}, m.params...)}
			want, err := vm.Summarize(m.g, ranks, options...)
			r.lock.Unlock()
			testranks.NoError(err)
			switch name {
			case "two":
				options = append(options, vm.WithDataParallel(r.Comm))
			case "in half":
				options = append(options, vm.WithDataParallel(r.Comm,
					autograd.WithCompression(half.Wrap(backend.BF16))))
			}
			machine := testranks.Must(vm.New(m.g, nil, options...))
			got := machine.Summary().Memory
			if got.Workspace = 0; name == "in half" {
				got.Values = want.Memory.Values // with gradients before they are rounded
			}
			learnables := want.Memory.Learnables
			exchanged := learnables * int64(ranks-1)
			require.Check(t, got == want.Memory && got.Gradients == exchanged && got.Solver ==
				2*learnables && got.Inputs != 0, "%s: %v, want %v", name, got, want)
			return machine.Close()
		}))
		require.Report(t, err)
	}
}

// BenchmarkBoundOfMemory measures steps of deep models with as little memory as possible, in turns
// with steps without a bound, and planning GPT-2 with a bound, in turns with planning without.
func BenchmarkBoundOfMemory(b *testing.B) {
	turns := func(b *testing.B, bound, free func()) {
		var ratios []float64
		for b.Loop() {
			began := time.Now()
			bound()
			middle := time.Now()
			free()
			ratios = append(ratios, float64(middle.Sub(began))/float64(time.Since(middle)))
		}
		slices.Sort(ratios)
		b.ReportMetric(ratios[len(ratios)/2], "times")
	}
	for _, layers := range []int{16, 64, 144} {
		b.Run(fmt.Sprintf("%d layers", layers), func(b *testing.B) {
			bound, free := deep(b, layers, 1024, 256), deep(b, layers, 1024, 256)
			x := solving(b, bound, nil, &solver.SGD{Rate: 1e-3}, vm.WithLeastMemory())
			y := solving(b, free, nil, &solver.SGD{Rate: 1e-3})
			turns(b, func() { run(b, x) }, func() { run(b, y) })
			s, t := x.Summary(), y.Summary()
			b.ReportMetric(float64(s.FLOPs)/float64(t.FLOPs), "FLOPs")
			b.ReportMetric(float64(s.Memory.Values)/(1<<20), "MiB")
			b.ReportMetric(float64(t.Memory.Values)/(1<<20), "MiB-without")
		})
	}
	for _, gib := range []float64{4.2, 5, 6, 7, 8, 9} {
		b.Run(fmt.Sprintf("planning gpt2 in %v GiB", gib), func(b *testing.B) {
			m := gpt2.model(b)
			plan := func(bound ...vm.Option) func() {
				return func() {
					_, err := vm.Summarize(m.g, 1, append(bound, vm.WithPrecision(vm.BF16),
						vm.WithSolver(&solver.AdamW{Rate: 1}, m.params...))...)
					require.NoError(b, err)
				}
			}
			turns(b, plan(vm.WithMemory(int(gib*(1<<30)))), plan())
		})
	}
}
