package vm_test

import (
	"fmt"
	"maps"
	"slices"
	"sync"
	"testing"
	"time"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/autograd/solver"
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/internal/testing/testenv"
	"github.com/euryale-ml/euryale/internal/testing/testranks"
	"github.com/euryale-ml/euryale/vm"
)

// layers is a multi-layer perceptron with a softmax and the cross-entropy.
func layers(batch int, sizes ...int) func(testing.TB, tensor.Dtype) *model {
	return func(t testing.TB, dt tensor.Dtype) *model {
		m := &model{g: gorgonia.NewGraph()}
		last := sizes[len(sizes)-1]
		h, y := m.variable("x", dt, batch, sizes[0]), m.variable("y", dt, batch, last)
		for i, size := range sizes[1:] {
			w, b := m.variable(fmt.Sprint("w", i), dt, sizes[i], size),
				m.variable(fmt.Sprint("b", i), dt, 1, size)
			m.params = append(m.params, w, b)
			h = must(gorgonia.BroadcastAdd(mul(h, w), b, nil, []byte{0}))
			if i+2 < len(sizes) {
				h = relu(h)
			}
		}
		hit := times(must(gorgonia.LogSoftMax(h, 1)), y)
		m.grad(t, neg(mean(sum(hit, 1))))
		return m
	}
}

// stockConvnet is Gorgonia's example of that name as it is, three convolutions of 28x28 images,
// with the sum of log-probabilities as loss and without dropout.
func stockConvnet(batch int) func(testing.TB, tensor.Dtype) *model {
	return func(t testing.TB, dt tensor.Dtype) *model {
		m := &model{g: gorgonia.NewGraph()}
		h, y := m.variable("x", dt, batch, 1, 28, 28), m.variable("y", dt, batch, 10)
		for _, shape := range [][]int{{32, 1, 3, 3}, {64, 32, 3, 3}, {128, 64, 3, 3}} {
			h = must(gorgonia.Conv2d(h, m.learnable(dt, shape...), tensor.Shape{3, 3}, []int{1, 1},
				[]int{1, 1}, []int{1, 1}))
			h = must(gorgonia.MaxPool2D(relu(h), tensor.Shape{2, 2}, []int{0, 0}, []int{2, 2}))
		}
		h = reshape(h, tensor.Shape{batch, 128 * 3 * 3})
		h = relu(mul(h, m.learnable(dt, 128*3*3, 625)))
		logits := mul(h, m.learnable(dt, 625, 10))
		hit := times(must(gorgonia.LogSoftMax(logits, 1)), y)
		m.grad(t, neg(mean(sum(hit, 1))))
		return m
	}
}

// learnable adds a learnable with random numbers, small enough that no activation overflows.
func (m *model) learnable(dt tensor.Dtype, shape ...int) node {
	w := gorgonia.NewTensor(m.g, dt, len(shape), gorgonia.WithShape(shape...),
		gorgonia.WithName(fmt.Sprint("w", len(m.params))), gorgonia.WithInit(gorgonia.GlorotN(1)))
	m.params = append(m.params, w)
	return w
}

// stepModels are what the time of a step is measured with.
var stepModels = map[string]func(testing.TB, tensor.Dtype) *model{
	"64-128-10/64":       layers(64, 64, 128, 10),
	"784-512-512-10/256": layers(256, 784, 512, 512, 10),
}

// BenchmarkStep measures a run of a training graph on the host, without the solver: that of the
// plan, and that of the tape machine.
func BenchmarkStep(b *testing.B) {
	for name, build := range stepModels {
		b.Run(name+"/plan", func(b *testing.B) { benchmarkStep(b, build(b, tensor.Float32), nil) })
		b.Run(name+"/tape", func(b *testing.B) {
			m := build(b, tensor.Float32)
			tape := gorgonia.NewTapeMachine(m.g, gorgonia.BindDualValues(m.params...))
			defer tape.Close()
			for b.Loop() {
				run(b, tape)
				tape.Reset()
			}
		})
	}
}

// BenchmarkPlan measures planning with AdamW, and how much of its time the proof takes: at most a
// tenth.
func BenchmarkPlan(b *testing.B) {
	for _, name := range slices.Sorted(maps.Keys(steadyModels)) {
		b.Run(name, func(b *testing.B) {
			m := steadyModels[name](b, tensor.Float32)
			ours := solving(b, m, nil, &solver.AdamW{Rate: 1e-4, WeightDecay: 0.01})
			defer ours.Close()
			var shares []float64
			for b.Loop() {
				whole, proof, err := ours.Planning()
				require.NoError(b, err)
				shares = append(shares, 100*float64(proof)/float64(whole))
			}
			slices.Sort(shares)
			b.ReportMetric(shares[len(shares)/2], "%proof")
		})
	}
}

// BenchmarkTrain measures whole steps of training on the host with Adam: the solver in the plan,
// and after it.
func BenchmarkTrain(b *testing.B) {
	for name, build := range stepModels {
		b.Run(name, func(b *testing.B) { benchmarkTrain(b, build, nil) })
	}
}

func benchmarkTrain(b *testing.B, build func(testing.TB, tensor.Dtype) *model,
	device backend.Device) {
	b.Run("within", func(b *testing.B) {
		m := build(b, tensor.Float32)
		benchmarkStep(b, m, device, vm.WithSolver(&solver.Adam{Rate: 1e-4}, m.params...))
	})
	b.Run("after", func(b *testing.B) {
		m, adam := build(b, tensor.Float32), &solver.Adam{Rate: 1e-4}
		ours := machineOn(b, device, m.g)
		for b.Loop() {
			run(b, ours)
			require.NoError(b, adam.Step(gorgonia.NodesToValueGrads(m.params)))
		}
	})
}

func benchmarkStep(b *testing.B, m *model, device backend.Device, options ...vm.Option) {
	ours := machineOn(b, device, m.g, options...)
	run(b, ours)
	b.ReportAllocs()
	for b.Loop() {
		run(b, ours)
	}
}

// BenchmarkTree measures steps of some micro-batches of eight samples on the host, with gradients
// added in a tree and in order, in turns: the medians, and that of the ratios of neighbours. Three
// on each rank are two branches of the tree.
func BenchmarkTree(b *testing.B) {
	const samples, steps = 8, 10
	for name, sizes := range map[string][]int{"64-128-10": {64, 128, 10},
		"784-512-256-10": {784, 512, 256, 10}} {
		for _, on := range [][2]int{{1, 8}, {2, 8}, {4, 8}, {8, 8}, {2, 6}, {3, 9}} {
			P, micro := on[0], on[1]
			b.Run(fmt.Sprint(name, "/", P, "/", micro), func(b *testing.B) {
				times := make([][2]float64, b.N) // of a step
				var lock sync.Mutex
				require.NoError(b, testranks.Join(testranks.Run(P, testenv.Hosts.Connect(b, P),
					func(r *testenv.Rank) error {
						var machines [2]*vm.Machine
						for i, how := range [2]vm.Option{vm.Accumulate(micro / P),
							vm.WithTree(micro)} {
							lock.Lock()
							m := layers(samples, sizes...)(b, tensor.Float32)
							lock.Unlock()
							var err error
							machines[i], err = vm.New(m.g, nil,
								vm.WithSolver(&solver.Adam{Rate: 1e-4}, m.params...),
								vm.WithDataParallel(r.Comm), how)
							testranks.NoError(err)
							defer machines[i].Close()
						}
						for round := range 1 + b.N { // one to warm up
							for turn := range machines {
								i := (turn + round) % len(machines)
								began := time.Now()
								for range steps * micro / P {
									testranks.NoError(machines[i].RunAll())
								}
								if r.Comm.Rank() == 0 && round > 0 {
									times[round-1][i] = float64(time.Since(began).Nanoseconds()) /
										steps
								}
							}
						}
						return nil
					})))
				median := func(of func(t [2]float64) float64) float64 {
					var all []float64
					for _, t := range times {
						all = append(all, of(t))
					}
					slices.Sort(all)
					return all[len(all)/2]
				}
				b.ReportMetric(0, "ns/op") // of both together
				b.ReportMetric(median(func(t [2]float64) float64 { return t[0] })/1e3,
					"us/step-in-order")
				b.ReportMetric(median(func(t [2]float64) float64 { return t[1] })/1e3,
					"us/step-in-tree")
				b.ReportMetric(median(func(t [2]float64) float64 { return t[1] / t[0] }), "ratio")
			})
		}
	}
}
