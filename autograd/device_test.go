package autograd

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/backend/host"
	"github.com/euryale-ml/euryale/internal/residence"
	"github.com/euryale-ml/euryale/internal/testenv"
)

// quadratic is a model of products and squares, so that its gradients have the
// same bits wherever they are computed:
//
//	loss = mean((w1*x)^2 * w2 + b - y)^2 + s^2
type quadratic struct {
	g      *gorgonia.ExprGraph
	data   gorgonia.Nodes
	params gorgonia.Nodes // w1, w2, b and the scalar s
}

func newQuadratic(r rank) (*quadratic, error) {
	e := r.engine
	r.build.Lock()
	defer r.build.Unlock()
	m := &quadratic{g: gorgonia.NewGraph()}
	rng := rand.New(rand.NewPCG(uint64(r.comm.Rank()), 31)) // every rank begins with other values
	for _, name := range []string{"x", "y", "w1", "w2", "b"} {
		v := uniform(rng, 5, 3)
		if e != nil {
			var err error
			if v, err = e.ToDevice(v); err != nil {
				return nil, err
			}
		}
		n := gorgonia.NewMatrix(m.g, tensor.Float32, gorgonia.WithName(name), gorgonia.WithShape(5, 3), gorgonia.WithValue(v))
		if len(m.data) < 2 {
			m.data = append(m.data, n)
		} else {
			m.params = append(m.params, n)
		}
	}
	m.params = append(m.params, gorgonia.NewScalar(m.g, tensor.Float32, gorgonia.WithName("s"), gorgonia.WithValue(rng.Float32())))
	return m, nil
}

// machine adds the loss, with use(w) where w is used.
func (m *quadratic) machine(r rank, use func(*gorgonia.Node) *gorgonia.Node) (vm gorgonia.VM, err error) {
	r.build.Lock()
	defer r.build.Unlock()
	err = must(func() {
		h := gorgonia.Must(gorgonia.Square(gorgonia.Must(gorgonia.HadamardProd(use(m.params[0]), m.data[0]))))
		h = gorgonia.Must(gorgonia.HadamardProd(h, use(m.params[1])))
		h = gorgonia.Must(gorgonia.Sub(gorgonia.Must(gorgonia.Add(h, use(m.params[2]))), m.data[1]))
		loss := gorgonia.Must(gorgonia.Mean(gorgonia.Must(gorgonia.Square(h))))
		loss = gorgonia.Must(gorgonia.Add(loss, gorgonia.Must(gorgonia.Square(use(m.params[3])))))
		if _, err := gorgonia.Grad(loss, m.params...); err != nil {
			panic(err)
		}
	})
	if err != nil {
		return nil, err
	}
	return r.machine(m.g)
}

// machine returns a machine for a graph, whose inputs and gradients are on the rank's device if it has one.
func (r rank) machine(g *gorgonia.ExprGraph) (vm gorgonia.VM, err error) {
	if r.engine == nil {
		return gorgonia.NewTapeMachine(g), nil
	}
	m := &besideDevice{r: r, inputs: g.Inputs()}
	err = m.onHost(func() error {
		m.VM = gorgonia.NewTapeMachine(g)
		return nil
	})
	return m, err
}

// besideDevice computes on the host with inputs that are on a device, and puts the gradients there.
type besideDevice struct {
	gorgonia.VM
	r      rank
	inputs gorgonia.Nodes
}

func (m *besideDevice) RunAll() error {
	m.r.engine.Reset()
	if err := m.onHost(m.VM.RunAll); err != nil {
		return err
	}
	for _, n := range m.inputs {
		if n.Deriv() == nil {
			continue
		}
		g, ok := n.Deriv().Value().(*tensor.Dense)
		if !ok || residence.OnHost(g.Shape().TotalSize()) {
			continue
		}
		memory, err := m.r.engine.Buffer(g)
		if err != nil {
			return err
		}
		onDevice, err := m.r.engine.Tensor(memory, g.Dtype(), g.Shape()...)
		if err == nil {
			err = gorgonia.UnsafeLet(n.Deriv(), onDevice)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// onHost runs f while the inputs are on the host.
func (m *besideDevice) onHost(f func() error) (err error) {
	for _, n := range m.inputs {
		t, ok := n.Value().(*tensor.Dense)
		if !ok || residence.Engine[engine](t) == nil {
			continue
		}
		copied, err := m.r.engine.ToHost(t)
		if err == nil {
			err = gorgonia.UnsafeLet(n, copied)
		}
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, gorgonia.UnsafeLet(n, t)) }()
	}
	return f()
}

// fit trains a quadratic and returns the bytes of its parameters.
func fit(r rank, hooks bool, solver gorgonia.Solver, opts ...Option) ([][]byte, error) {
	m, err := newQuadratic(r)
	if err != nil {
		return nil, err
	}
	d, err := New(r.comm, m.params, opts...)
	if err != nil {
		return nil, err
	}
	values, err := m.fit(r, d, hooks, solver)
	return values, errors.Join(err, d.Close(), r.free(append(m.data, m.params...)))
}

// free gives back the tensors of nodes.
func (r rank) free(nodes gorgonia.Nodes) error {
	var all error
	for _, n := range nodes {
		if t, ok := n.Value().(*tensor.Dense); ok && r.engine != nil {
			all = errors.Join(all, r.engine.Free(t, int64(t.MemSize())))
		}
	}
	return all
}

func (m *quadratic) fit(r rank, d *DataParallel, hooks bool, solver gorgonia.Solver) (values [][]byte, err error) {
	var failed error
	vm, err := m.machine(r, func(w *gorgonia.Node) *gorgonia.Node {
		if !hooks {
			return w
		}
		y, err := d.Hook(w)
		failed = errors.Join(failed, err)
		return y
	})
	if err = errors.Join(err, failed); err != nil {
		return nil, err
	}
	defer vm.Close()
	copies := func() int64 {
		if r.engine == nil {
			return 0
		}
		s := r.engine.Stats()
		return s.Uploads + s.Downloads
	}
	for range 20 {
		if err := vm.RunAll(); err != nil {
			return nil, errors.Join(err, d.Err())
		}
		before := copies()
		grads, err := d.Sync()
		if err != nil {
			return nil, err
		}
		if err := solver.Step(grads); err != nil {
			return nil, err
		}
		vm.Reset()
		if n := copies() - before; n != 0 {
			return nil, fmt.Errorf("%d tensors were copied between host and device", n)
		}
	}
	for _, p := range d.params {
		b, err := p.bytes()
		if err != nil {
			return nil, err
		}
		values = append(values, slices.Clone(b))
	}
	return values, d.Check()
}

// TestTrainingOnDevice: models whose parameters and gradients are on a device, and models on the host
// whose ranks communicate on a device, end with the bits of a model on the host, and Sync and the solver
// copy no tensor between host and device. NCCL adds more than two numbers in an
// order of its own: there the end is the same but for rounding.
func TestTrainingOnDevice(t *testing.T) {
	type setting struct {
		hooks bool
		opts  []Option
	}
	var settings []setting
	for _, opts := range [][]Option{nil, {WithBuckets(1, 60)}, {WithSum(), WithBuckets(200, 200)}} {
		settings = append(settings, setting{false, opts}, setting{true, opts})
	}
	for _, size := range []int{1, 2, 3, 4} {
		want := make([][][]byte, len(settings))
		all(t, size, func(r rank) error {
			for i, s := range settings {
				got, err := fit(r, s.hooks, gorgonia.NewVanillaSolver(gorgonia.WithLearnRate(0.1)), s.opts...)
				if err != nil {
					return err
				}
				if r.comm.Rank() == 0 {
					want[i] = got
				}
			}
			return nil
		})
		testenv.Each(t, testenv.Kinds(), func(t *testing.T, k testenv.Kind) {
			allOn(t, k, size, func(r rank) error {
				for i, s := range settings {
					got, err := fit(r, s.hooks, SGD{Rate: 0.1}, s.opts...)
					if err != nil {
						return err
					}
					if k.OnGPU() && size > 2 {
						err = near(got, want[i])
					} else if !slices.EqualFunc(got, want[i], bytes.Equal) {
						err = errors.New("other bits than on the host")
					}
					if err != nil {
						return fmt.Errorf("%d ranks, hooks %v, setting %d: %w", size, s.hooks, i, err)
					}
				}
				return nil
			})
		})
	}
}

// near compares float32 numbers.
func near(got, want [][]byte) error {
	for p := range want {
		for i := 0; i < len(want[p]); i += 4 {
			a := math.Float32frombits(binary.NativeEndian.Uint32(got[p][i:]))
			b := math.Float32frombits(binary.NativeEndian.Uint32(want[p][i:]))
			if math.Abs(float64(a-b)) > 1e-6+1e-5*math.Abs(float64(b)) {
				return fmt.Errorf("parameter %d [%d] = %v, want %v", p, i/4, a, b)
			}
		}
	}
	return nil
}

// TestSolversOfTheHostWorkStaged: where only the communication is on a device,
// gradients are the host's, and any solver takes them.
func TestSolversOfTheHostWorkStaged(t *testing.T) {
	var want [][]byte
	all(t, 2, func(r rank) error {
		got, err := fit(r, true, gorgonia.NewAdamSolver())
		if r.comm.Rank() == 0 {
			want = got
		}
		return err
	})
	testenv.Each(t, testenv.OnHosts(), func(t *testing.T, k testenv.Kind) {
		allOn(t, k, 2, func(r rank) error {
			got, err := fit(r, true, gorgonia.NewAdamSolver())
			if err == nil && !slices.EqualFunc(got, want, bytes.Equal) {
				err = errors.New("other bits")
			}
			return err
		})
	})
}

// TestGradientsInAnyOrderOnDevice: gradients can be views of device tensors, and
// tensors on the host.
func TestGradientsInAnyOrderOnDevice(t *testing.T) {
	testenv.Each(t, testenv.OnDevices(), func(t *testing.T, k testenv.Kind) {
		inAnyOrder(t, k, func(r rank, opts []Option) error {
			e := r.engine
			value, err := e.ToDevice(uniform(rand.New(rand.NewPCG(1, 1)), 3, 2))
			if err != nil {
				return err
			}
			r.build.Lock()
			g := gorgonia.NewGraph()
			w := gorgonia.NewMatrix(g, tensor.Float32, gorgonia.WithName("w"), gorgonia.WithShape(3, 2), gorgonia.WithValue(value))
			r.build.Unlock()
			d, err := New(r.comm, gorgonia.Nodes{w}, opts...)
			if err != nil {
				return err
			}
			defer d.Close()
			transposed, err := e.ToDevice(tensor.New(tensor.WithShape(2, 3), tensor.WithBacking([]float32{1, 3, 5, 2, 4, 6})))
			if err == nil {
				err = transposed.T()
			}
			if err != nil {
				return err
			}
			onHost := tensor.New(tensor.WithShape(3, 2), tensor.WithBacking([]float32{1, 2, 3, 4, 5, 6}))
			for name, v := range map[string]gorgonia.Value{"transposed": transposed, "host": onHost} {
				r.build.Lock()
				dw := gorgonia.NewMatrix(g, tensor.Float32, gorgonia.WithName(name), gorgonia.WithShape(3, 2), gorgonia.WithValue(v))
				r.build.Unlock()
				if err := d.UseGradients(gorgonia.Nodes{dw}); err != nil {
					return err
				}
				grads, err := d.Sync()
				if err != nil {
					return err
				}
				view, _ := grads[0].Grad()
				got, err := e.ToHost(view.(tensor.Tensor))
				if err != nil {
					return err
				}
				if !slices.Equal(got.Data().([]float32), []float32{1, 2, 3, 4, 5, 6}) {
					r.Errorf("%s: %v", name, got.Data())
				}
			}
			return nil
		})
	})
}

// TestMisplacedParametersAreErrors: with what to do.
func TestMisplacedParametersAreErrors(t *testing.T) {
	testenv.Each(t, testenv.OnDevices(), checkMisplaced)
}

func checkMisplaced(t *testing.T, k testenv.Kind) {
	refused := func(comm backend.Communicator, params gorgonia.Nodes, want string) error {
		d, err := New(comm, params)
		if err == nil {
			return errors.Join(errors.New("no error"), d.Close())
		}
		if !strings.Contains(err.Error(), want) {
			return fmt.Errorf("%w, want %q", err, want)
		}
		return nil
	}
	allOn(t, k, 2, func(r rank) error {
		m, err := newQuadratic(r)
		if err != nil {
			return err
		}
		other := r
		var closeOther func() error
		if other.engine, closeOther, err = testenv.NewEngine(r.comm.Device()); err != nil {
			return err
		}
		mixed, err := newQuadratic(other)
		if err != nil {
			return err
		}
		hostRank := r
		hostRank.engine = nil
		onHost, err := newQuadratic(hostRank)
		if err != nil {
			return err
		}
		tensor.WithEngine(r.engine)(onHost.params[0].Value().(*tensor.Dense)) // as a machine does
		return errors.Join(
			refused(elsewhere{r.comm}, m.params, "w1, is on the device "+r.comm.Device().Name()+", and the communicator is on host"),
			refused(r.comm, gorgonia.Nodes{m.params[0], mixed.params[1]}, "use one engine for a model"),
			refused(r.comm, onHost.params, "move it to "+r.comm.Device().Name()+" with the engine's ToDevice first"),
			closeOther())
	})
	errs := eachOn(t, k, 2, func(r rank) error {
		if r.comm.Rank() == 1 {
			r.engine = nil
		}
		_, err := fit(r, false, SGD{Rate: 0.1})
		return err
	})
	for _, err := range errs {
		if err == nil || !strings.Contains(err.Error(), "parameter 0 is w1 f32(5, 3) on a device on rank 0, but parameter 0 is w1 f32(5, 3) on rank 1") {
			t.Errorf("one rank on a device: %v", err)
		}
	}
}

// elsewhere is a communicator of one rank on the host.
type elsewhere struct{ backend.Communicator }

func (elsewhere) Device() backend.Device { return host.Device{} }
func (elsewhere) Size() int              { return 1 }

// TestErrorOfPeerEndsTheStepOnDevice: it names the rank and the bucket that was
// leaving when the news came.
func TestErrorOfPeerEndsTheStepOnDevice(t *testing.T) {
	cause := errors.New("no more coffee")
	testenv.Each(t, testenv.Kinds(), func(t *testing.T, k testenv.Kind) {
		if k == testenv.Hosts {
			return // another test has it
		}
		errs := eachOn(t, k, 2, func(r rank) error {
			_, err := fit(r, true, &stopping{comm: r.comm, cause: cause})
			return err
		})
		for i, err := range errs {
			if !errors.Is(err, backend.ErrAborted) || !strings.Contains(err.Error(), fmt.Sprintf("rank %d", i)) || !strings.Contains(err.Error(), "bucket ") {
				t.Errorf("rank %d: %v", i, err)
			}
		}
	})
}
