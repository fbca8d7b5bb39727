package vm_test

import (
	"context"
	"errors"
	"fmt"
	"math"
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
	"github.com/euryale-ml/euryale/backend/compress/half"
	"github.com/euryale-ml/euryale/backend/compress/sparse"
	"github.com/euryale-ml/euryale/backend/tcp"
	"github.com/euryale-ml/euryale/internal/group"
	"github.com/euryale-ml/euryale/internal/hierarchy"
	"github.com/euryale-ml/euryale/internal/testing/proctest"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/internal/testing/testenv"
	"github.com/euryale-ml/euryale/internal/testing/testranks"
	"github.com/euryale-ml/euryale/rendezvous"
	"github.com/euryale-ml/euryale/vm"
)

// ranked is one rank of a test of machines that train together.
type ranked struct {
	*testenv.Rank
	t      *testing.T
	device backend.Device // of its machines, nil for the host
	lock   *sync.Mutex    // to build graphs

	register rendezvous.Log // of an elastic job, nil for none
	job      autograd.Job   // which this rank is of, nil for none
}

// build makes a model. Each rank has its own values of all variables.
func (r ranked) build(make func(testing.TB, tensor.Dtype) *model) *model {
	r.lock.Lock()
	defer r.lock.Unlock()
	m := make(r.t, tensor.Float32)
	for _, n := range m.g.Inputs() {
		v, ok := n.Value().(*tensor.Dense)
		if !ok {
			continue
		}
		data, _ := v.Data().([]float32)
		for i := range data {
			data[i] += 0.25 * float32((i+r.Comm.Rank())%3)
		}
	}
	return m
}

// together runs a test as every rank of P. Machines run where ranks communicate, or on the host.
func together(t *testing.T, k testenv.Kind, P int, body func(r ranked) error) []error {
	t.Helper()
	return connected(t, k, P, k.Connect(t, P), body)
}

// onRanks is together of a test that ends with the errors of its ranks.
func onRanks(t *testing.T, k testenv.Kind, P int, body func(r ranked) error) {
	t.Helper()
	require.NoError(t, testranks.Join(together(t, k, P, body)))
}

// connected is together of ranks that connect in a way.
func connected(t *testing.T, k testenv.Kind, P int, connect testenv.Connect,
	body func(r ranked) error) []error {
	t.Helper()
	var lock sync.Mutex
	return testranks.Run(P, connect, func(r *testenv.Rank) error {
		of := ranked{Rank: r, t: t, lock: &lock}
		if k.OnDevice() {
			of.device = r.Comm.Device()
		}
		return body(of)
	})
}

// parallelModels are those whose gradients lie differently: computed in the buckets, views, shared
// between learnables, and read by other operations.
var parallelModels = map[string]func(testing.TB, tensor.Dtype) *model{
	"mlp": mlp, "convnet": convnet, "logistic": logistic,
	"product": func(t testing.TB, _ tensor.Dtype) *model {
		return product(t, vector(1, 2), vector(3, 4))
	},
	"shared": func(t testing.TB, dt tensor.Dtype) *model { // both have the same gradient
		m := &model{g: gorgonia.NewGraph()}
		v, w, x := m.variable("v", dt, 3, 2), m.variable("w", dt, 3, 2), m.variable("x", dt, 3, 2)
		m.params = nodes{v, w}
		m.grad(t, mean(square(sub(add(v, w), x))))
		return m
	},
}

// TestDataParallelRaced: ranks whose machines exchange gradients and apply them end with the bits
// of ranks that call Sync and the solver's Step.
func TestDataParallelRaced(t *testing.T) {
	testenv.Each(t, []testenv.Kind{testenv.Hosts, testenv.Devices, testenv.Staged},
		func(t *testing.T, k testenv.Kind) {
			for P := 1; P <= 4; P++ {
				if (P%2 > 0) != (k == testenv.Hosts) && !full() {
					continue // hosts take odd numbers of ranks, devices even ones
				}
				for solver, make := range solvers {
					for name, build := range parallelModels {
						if solver != "adam" && name != "mlp" {
							continue
						}
						t.Run(fmt.Sprint(P, " ", solver, " ", name), func(t *testing.T) {
							trainsTogether(t, k, P, make, build)
						})
					}
				}
			}
		})
}

func trainsTogether(t *testing.T, k testenv.Kind, P int, solver func() solver.Solver,
	build func(testing.TB, tensor.Dtype) *model, options ...autograd.Option) {
	t.Helper()
	weights := make([][][]float64, P)
	onRanks(t, k, P, func(r ranked) (err error) {
		weights[r.Comm.Rank()], err = r.trainBothWays(solver, build, options)
		return err
	})
	same(t, weights)
}

// same checks that all ranks have the same weights.
func same(t *testing.T, weights [][][]float64) {
	t.Helper()
	for r := range weights {
		if !slices.EqualFunc(weights[r], weights[0], slices.Equal) {
			t.Errorf("rank %d has the weights %v, rank 0 %v", r, weights[r], weights[0])
		}
	}
}

// apart returns by how much two trainings differ.
func apart(a, b [][]float64) (most float64) {
	for i := range a {
		for k, x := range a[i] {
			if d := math.Abs(x - b[i][k]); !(d <= most) {
				most = d
			}
		}
	}
	return most
}

// machineRank is one of four ranks on two machines, as far as they can tell: shared memory inside,
// sockets between, and every all-reduce machine by machine.
type machineRank struct{ *testenv.Rank }

func (r machineRank) Close() error { return r.Comm.Close() }

func connectMachines(w *rendezvous.World) (machineRank, error) {
	w.Node, w.LocalSize = w.Rank/2, 2
	ctx := context.Background()
	flat, err := tcp.Backend{}.Connect(ctx, w)
	if err != nil {
		return machineRank{}, err
	}
	layout := hierarchy.Grid(2, 2)
	comm, err := hierarchy.New(ctx, w, group.Compared(flat), layout,
		hierarchy.Options{Mode: hierarchy.Always})
	if err != nil {
		return machineRank{}, errors.Join(err, flat.Close())
	}
	return machineRank{&testenv.Rank{World: w, Comm: comm}}, nil
}

// TestDataParallelOfMachinesRaced is TestDataParallelRaced where all-reduces have phases inside and
// between machines.
func TestDataParallelOfMachinesRaced(t *testing.T) {
	for _, name := range []string{"mlp", "convnet", "shared"} {
		t.Run(name, func(t *testing.T) {
			var lock sync.Mutex
			weights := make([][][]float64, 4)
			require.NoError(t, testranks.Join(testranks.Run(4, connectMachines,
				func(r machineRank) (err error) {
					of := ranked{Rank: r.Rank, t: t, lock: &lock}
					weights[r.Comm.Rank()], err = of.trainBothWays(solvers["adam"],
						parallelModels[name], nil)
					if n := r.Comm.(*hierarchy.Communicator).Stats().Calls; n == 0 && err == nil {
						err = errors.New("nothing went machine by machine")
					}
					return err
				})))
			same(t, weights)
		})
	}
}

// trainBothWays trains for some steps by Sync, and in the plan, and returns the weights.
func (r ranked) trainBothWays(solver func() solver.Solver,
	build func(testing.TB, tensor.Dtype) *model, options []autograd.Option) ([][]float64, error) {
	const steps = 5
	options = append(slices.Clone(options), autograd.WithBuckets(1, 60))
	apart, within := r.build(build), r.build(build)
	after, inside := solver(), solver()
	want := testranks.Must(r.trainApart(apart, after, steps, options))
	m, err := vm.New(within.g, r.device, vm.WithSolver(inside, within.params...),
		vm.WithDataParallel(r.Comm, options...))
	testranks.NoError(err)
	for range steps {
		if err := m.RunAll(); err != nil {
			return nil, errors.Join(err, m.Close())
		}
	}
	testranks.NoError(errors.Join(m.Pull(within.params...), m.DataParallel().Check(), m.Close()))
	got := within.weights(r.t)
	if !slices.EqualFunc(got, want, slices.Equal) {
		err = fmt.Errorf("%v, by Sync %v", got, want)
	}
	sameState(r.t, inside, after)
	return got, err
}

// trainApart trains by Sync, with the graph on the same device.
func (r ranked) trainApart(m *model, solver solver.Solver, steps int,
	options []autograd.Option) ([][]float64, error) {
	dp := testranks.Must(autograd.New(r.Comm, m.params, options...))
	machine, err := vm.New(m.g, r.device)
	if err != nil {
		return nil, errors.Join(err, dp.Close())
	}
	for range steps {
		if err = machine.RunAll(); err == nil {
			err = dp.Step(solver)
		}
		if err != nil {
			break
		}
	}
	return m.weights(r.t), errors.Join(err, machine.Close(), dp.Close())
}

// TestDataParallelRefusedRaced: what the ranks cannot train together is an error of New on all of
// them.
func TestDataParallelRefusedRaced(t *testing.T) {
	tests := []struct {
		name    string
		want    error
		text    string
		options func(r ranked, m *model) []vm.Option
	}{
		{"no solver", backend.ErrArgument, "use WithSolver, too",
			func(r ranked, _ *model) []vm.Option {
				return []vm.Option{vm.WithDataParallel(r.Comm)}
			}},
		{"no learnables on a rank", nil, "rank 1 cannot go on: vm: WithSolver",
			func(r ranked, m *model) []vm.Option {
				if r.Comm.Rank() == 1 {
					m.params = nil
				}
				return []vm.Option{vm.WithSolver(&solver.SGD{Rate: 1}, m.params...),
					vm.WithDataParallel(r.Comm)}
			}},
		{"other learnables", backend.ErrMismatch, "parameter 0 is w0 f32(12, 7) on rank 0, but " +
			"parameter 0 is w1 f32(7, 5) on rank 2", func(r ranked, m *model) []vm.Option {
			if r.Comm.Rank() == 2 {
				slices.Reverse(m.params)
			}
			return []vm.Option{vm.WithSolver(&solver.SGD{Rate: 1}, m.params...),
				vm.WithDataParallel(r.Comm)}
		}},
		{"other rates", backend.ErrMismatch, `the solver's settings are {"Rate":1,`,
			func(r ranked, m *model) []vm.Option {
				return []vm.Option{vm.WithSolver(&solver.Momentum{Rate: float64(1 + r.Comm.Rank())},
					m.params...), vm.WithDataParallel(r.Comm)}
			}},
		{"other solvers", backend.ErrMismatch, "the solver is a *solver.SGD on rank 0, but the " +
			"solver is a *solver.Adam on rank 1", func(r ranked, m *model) []vm.Option {
			by := solvers["sgd"]()
			if r.Comm.Rank() == 1 {
				by = solvers["adam"]()
			}
			return []vm.Option{vm.WithSolver(by, m.params...), vm.WithDataParallel(r.Comm)}
		}},
		{"another node on a rank", nil, "is not a node of the machine's graph",
			func(r ranked, m *model) []vm.Option {
				options := []vm.Option{vm.WithSolver(&solver.SGD{Rate: 1}, m.params...),
					vm.WithDataParallel(r.Comm)}
				if r.Comm.Rank() == 1 {
					options = append(options, vm.Keep(r.build(mlp).params[0]))
				}
				return options
			}},
		{"learnables that may be unused", backend.ErrUnsupported, "WithUnused",
			func(r ranked, m *model) []vm.Option {
				return []vm.Option{vm.WithSolver(&solver.SGD{Rate: 1}, m.params...),
					vm.WithDataParallel(r.Comm, autograd.WithUnused())}
			}},
		{"averages of weights", backend.ErrUnsupported, "WithPartial",
			func(r ranked, m *model) []vm.Option {
				return []vm.Option{vm.WithSolver(&solver.SGD{Rate: 1}, m.params...),
					vm.WithDataParallel(r.Comm, autograd.WithPartial())}
			}},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			onRanks(t, testenv.Hosts, 3, func(r ranked) error {
				m := r.build(mlp)
				machine, err := vm.New(m.g, r.device, test.options(r, m)...)
				switch {
				case err == nil:
					return errors.Join(errors.New("no error"), machine.Close())
				case test.want != nil && !errors.Is(err, test.want) ||
					!strings.Contains(err.Error(), test.text):
					return fmt.Errorf("%w, want %v with %q", err, test.want, test.text)
				}
				return nil
			})
		})
	}
}

// TestDataParallelEndsRaced: when a rank is lost in the middle of training, the others' machines
// end with an error that blames it, at once, and leave the weights on the host of a device as they
// were pulled last.
func TestDataParallelEndsRaced(t *testing.T) {
	testenv.Each(t, []testenv.Kind{testenv.Hosts, testenv.Devices, testenv.Staged},
		dataParallelEnds)
}

func dataParallelEnds(t *testing.T, k testenv.Kind) {
	P := 3
	if k.OnGPU() {
		P = 2
	}
	lost := errors.New("out of petrol")
	var trained sync.WaitGroup // the loss of a rank would end the others' steps before
	trained.Add(P)
	errs := together(t, k, P, func(r ranked) error {
		done := sync.OnceFunc(trained.Done)
		defer done()
		m := r.build(mlp)
		machine, err := vm.New(m.g, r.device, vm.WithSolver(&solver.Adam{Rate: 0.1}, m.params...),
			vm.WithDataParallel(r.Comm, autograd.WithBuckets(1, 1)))
		testranks.NoError(err)
		for range 5 {
			if err := machine.RunAll(); err != nil {
				return errors.Join(err, machine.Close())
			}
		}
		testranks.NoError(machine.Pull(m.params...))
		if done(); r.Comm.Rank() == 1 {
			trained.Wait()
			r.World.Fail(lost)
			return errors.Join(lost, machine.Close())
		}
		pulled := m.weights(t)
		began := time.Now()
		for err == nil {
			err = machine.RunAll()
		}
		var named *backend.Error
		switch {
		case !errors.As(err, &named) || !strings.Contains(err.Error(), "out of petrol"):
			err = fmt.Errorf("the error is %w", err)
		case time.Since(began) > proctest.Within(2*time.Second):
			err = fmt.Errorf("after %v: %w", time.Since(began), err)
		case machine.RunAll() == nil, machine.Pull(m.params...) == nil:
			err = errors.New("the machine goes on")
		default:
			err = nil
		}
		err = errors.Join(err, machine.Close())
		if got := m.weights(t); k.OnDevice() && !slices.EqualFunc(got, pulled, slices.Equal) {
			err = errors.Join(err, fmt.Errorf("the weights are %v, pulled were %v", got, pulled))
		}
		return err
	})
	for r, err := range errs {
		if r == 1 {
			err = nil // lost
		}
		require.Check(t, err == nil, "rank %d: %v", r, err)
	}
}

// TestDataParallelCompressedRaced: gradients travel through compressions, also through those that a
// device cannot record, with the bits of Sync. Buckets are under way while what runs beside them is
// recorded.
func TestDataParallelCompressedRaced(t *testing.T) {
	for name, compress := range map[string]func(backend.Communicator) (backend.Communicator, error){
		"bf16": half.Wrap(backend.BF16), "top-k": sparse.Wrap(sparse.TopK(0.3)),
	} {
		testenv.Each(t, []testenv.Kind{testenv.Hosts, testenv.Devices, testenv.Staged},
			func(t *testing.T, k testenv.Kind) {
				t.Run(name, func(t *testing.T) {
					options := []autograd.Option{autograd.WithCompression(compress)}
					model := layers(4, 5, 6, 7, 8)
					trainsTogether(t, k, 2, solvers["momentum"], model, options...)
					if k == testenv.Hosts { // the sum is three times a mean that is rounded
						trainsTogether(t, k, 3, solvers["adam"], model,
							append(options, autograd.WithSum())...)
					}
				})
			})
	}
}

// TestSumsOfGradientsInHalf: a run of a rank counts once in a sum that travels as a mean, and the
// sum is that also of a bucket that stays F32, as those of tables do.
func TestSumsOfGradientsInHalf(t *testing.T) {
	trainsAlike(t, testenv.Hosts, func(way int) training {
		return training{solver: solvers["momentum"], build: layers(4, 5, 6, 7, 8),
			data: func(m *model) []autograd.Option {
				wide := m.params[1 : 1+way]
				return []autograd.Option{autograd.WithSum(), autograd.WithEarly(wide...),
					autograd.WithApart(wide...), autograd.WithCompression(half.Wrap(backend.BF16))}
			}}
	}, func(machine *vm.Machine) error {
		if _, weight := machine.Runs(); weight != 1 {
			return fmt.Errorf("a run counts %v times", weight)
		}
		return nil
	})
}

// trainsAlike trains in two ways on two ranks, checks the machine of each, and compares the bits of
// the parameters.
func trainsAlike(t *testing.T, k testenv.Kind, as func(way int) training,
	check func(*vm.Machine) error) {
	t.Helper()
	require.Report(t, testranks.Join(together(t, k, 2, func(r ranked) error {
		var weights [2][][]float64
		for way := range weights {
			training := as(way)
			m, machine, err := r.start(training)
			testranks.NoError(err)
			testranks.NoError(errors.Join(check(machine), training.steps(m, machine, 0, 3),
				machine.Close()))
			weights[way] = m.weights(r.t)
		}
		if d := apart(weights[0], weights[1]); d != 0 {
			return fmt.Errorf("parameters differ by %g", d)
		}
		return nil
	})))
}

// TestProductsRoundGradientsLikeCasts: a gradient that is wanted, too, is computed in F32 and cast.
// Parameters are bitwise identical to those where the product itself rounds it.
func TestProductsRoundGradientsLikeCasts(t *testing.T) {
	testenv.Each(t, []testenv.Kind{testenv.Hosts, testenv.Devices},
		func(t *testing.T, k testenv.Kind) {
			trainsAlike(t, k, func(way int) training {
				return training{solver: solvers["adam"], data: func(*model) []autograd.Option {
					return []autograd.Option{autograd.WithCompression(half.Wrap(backend.BF16))}
				}, build: func(t testing.TB, _ tensor.Dtype) *model {
					return gpt{vocabulary: 64, batch: 2, context: 10, width: 32, heads: 2,
						layers: 1}.model(t)
				}, options: func(m *model) []vm.Option {
					options := []vm.Option{vm.WithPrecision(vm.BF16)}
					for _, p := range m.params[:way*len(m.params)] {
						options = append(options, vm.Keep(p.Deriv()))
					}
					return options
				}}
			}, func(machine *vm.Machine) error {
				if !strings.Contains(machine.Plan().String(), "all-reduce bucket 0 in bf16") {
					return errors.New("nothing is sent in bf16")
				}
				return nil
			})
		})
}

// TestDataParallelAroundTheHostRaced: an operation that runs by its Do during an exchange keeps
// exchanges out of graphs, and changes no bits.
func TestDataParallelAroundTheHostRaced(t *testing.T) {
	build := func(t testing.TB, dt tensor.Dtype) *model {
		m := mlp(t, dt)
		must(gorgonia.ApplyOp(&counter{}, m.params[2].Deriv()))
		return m
	}
	trainsTogether(t, testenv.Devices, 2, solvers["adam"], build)
	onRanks(t, testenv.Devices, 2, func(r ranked) error {
		m := r.build(build)
		machine := testranks.Must(vm.New(m.g, r.device, vm.WithSolver(&solver.SGD{Rate: 1},
			m.params...), vm.WithDataParallel(r.Comm)))
		text := machine.Plan().String()
		send, _, _ := strings.Cut(text, "host counter")
		if _, during, _ := strings.Cut(text, "host counter"); !strings.Contains(
			send, "all-reduce bucket 0") || !strings.Contains(during, "receive bucket 0") {
			t.Errorf("no exchange is under way while the host runs an operation:\n%v", text)
		}
		return machine.Close()
	})
}

// eager counts the collectives that a communicator runs at once, and those that are recorded.
type eager struct {
	backend.Base
	started, recorded int
}

var _ backend.Wrapper = (*eager)(nil)

// Start implements [backend.Communicator].
func (c *eager) Start(q backend.Queue, what backend.Collective, dst,
	src backend.Buffer) (backend.Work, error) {
	if backend.Recorded(q) {
		c.recorded++
	} else {
		c.started++
	}
	return c.Communicator.Start(q, what, dst, src)
}

// TestDataParallelIsRecordedRaced: on a device with graphs, all exchanges are in graphs from the
// third run on.
func TestDataParallelIsRecordedRaced(t *testing.T) { dataParallelIsRecorded(t, testenv.Devices) }

func dataParallelIsRecorded(t *testing.T, k testenv.Kind) {
	isRecorded(t, k, 3)
	for _, stage := range stages { // scatters and gathers
		isRecorded(t, k, 6, vm.WithShards(stage))
	}
}

// isRecorded checks that the second run records so many exchanges.
func isRecorded(t *testing.T, k testenv.Kind, exchanges int, options ...vm.Option) {
	t.Helper()
	onRanks(t, k, 2, func(r ranked) error {
		m := r.build(mlp)
		comm := &eager{Base: backend.Wrap(r.Comm)}
		machine := testranks.Must(vm.New(m.g, r.device, append(options,
			vm.WithSolver(&solver.SGD{Rate: 0.1}, m.params...),
			vm.WithDataParallel(comm, autograd.WithBuckets(1, 1)))...))
		for step := range 5 {
			comm.started, comm.recorded = 0, 0
			testranks.NoError(machine.RunAll())
			// The second run records the exchanges of each learnable. The ranks agree on it, and
			// on whether each exchange is beside products.
			if want := [][2]int{{exchanges, 0}, {exchanges + 1, exchanges}, {0, 0}, {0, 0},
				{0, 0}}[step]; comm.started != want[0] || comm.recorded != want[1] {
				t.Errorf("run %d starts %d collectives and records %d, want %v", 1+step,
					comm.started, comm.recorded, want)
			}
		}
		return machine.Close()
	})
}

// TestValuesLieWhereGradientsWillBe: values that are read for the last time before a gradient is
// computed lie in its bucket, wherever in that it begins, and ranks end with the bits of Sync.
func TestValuesLieWhereGradientsWillBe(t *testing.T) {
	valuesWhereGradientsWillBe(t, testenv.Hosts, testenv.Devices)
}

func valuesWhereGradientsWillBe(t *testing.T, kinds ...testenv.Kind) {
	t.Helper()
	build := func(t testing.TB, _ tensor.Dtype) *model { return deep(t, 5, 8, 33) }
	there := regexp.MustCompile(`gradient\d f32\(8,33\) = `)
	testenv.Each(t, kinds, func(t *testing.T, k testenv.Kind) {
		trainsTogether(t, k, 2, solvers["adam"], build)
		onRanks(t, k, 2, func(r ranked) error {
			model := r.build(build)
			m, err := vm.New(model.g, r.device, vm.WithSolver(solvers["adam"](),
				model.params...), vm.WithDataParallel(r.Comm))
			testranks.NoError(err)
			if !there.MatchString(m.Plan().String()) {
				err = fmt.Errorf("all values lie in the arena:\n%v", m.Plan())
			}
			return errors.Join(err, m.Close())
		})
	})
}
