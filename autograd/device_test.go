package autograd

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/backend/cuda"
	deviceguard "github.com/euryale-ml/euryale/backend/guard"
	"github.com/euryale-ml/euryale/backend/host"
)

// kind is where a model is and where its ranks communicate.
type kind string

const (
	onHosts   kind = "host"   // all on the host
	onDevices kind = "device" // all on guarded memory, on a queue of its own
	stagings  kind = "staged" // the model on the host, communication on guarded memory
)

// at runs body with the communicator, and for a model on a device the engine, of
// the kind.
func (k kind) at(r rank, body func(comm backend.Communicator, e *cuda.Engine) error) error {
	if k == onHosts {
		return body(r.comm, nil)
	}
	d, err := deviceguard.New(host.Device{})
	if err != nil {
		return err
	}
	q, err := d.NewQueue()
	if err != nil {
		return err
	}
	e, err := cuda.NewEngine(d, q)
	if err != nil {
		return err
	}
	comm := deviceguard.Over(r.comm, d)
	if k == stagings {
		err = body(comm, nil)
	} else {
		err = body(comm, e)
	}
	return errors.Join(err, e.Close(), q.Close(), d.Close())
}

// quadratic is a model of products and squares, so that its gradients have the
// same bits wherever they are computed:
//
//	loss = mean((w1*x)^2 * w2 + b - y)^2 + s^2
type quadratic struct {
	g      *gorgonia.ExprGraph
	data   gorgonia.Nodes
	params gorgonia.Nodes // w1, w2, b and the scalar s
}

func newQuadratic(r rank, e *cuda.Engine) (*quadratic, error) {
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
func (m *quadratic) machine(r rank, e *cuda.Engine, use func(*gorgonia.Node) *gorgonia.Node) (vm gorgonia.VM, err error) {
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
	if e != nil {
		return e.NewMachine(m.g)
	}
	return gorgonia.NewTapeMachine(m.g), nil
}

// fit trains a quadratic and returns the bytes of its parameters.
func fit(r rank, k kind, hooks bool, solver gorgonia.Solver, opts ...Option) (values [][]byte, err error) {
	err = k.at(r, func(comm backend.Communicator, e *cuda.Engine) error {
		m, err := newQuadratic(r, e)
		if err != nil {
			return err
		}
		d, err := New(comm, m.params, opts...)
		if err != nil {
			return err
		}
		values, err = m.fit(r, d, e, hooks, solver)
		return errors.Join(err, d.Close())
	})
	return values, err
}

func (m *quadratic) fit(r rank, d *DataParallel, e *cuda.Engine, hooks bool, solver gorgonia.Solver) (values [][]byte, err error) {
	var failed error
	vm, err := m.machine(r, e, func(w *gorgonia.Node) *gorgonia.Node {
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
	var stats [2]cuda.Stats
	for step := range 20 {
		if err := vm.RunAll(); err != nil {
			return nil, errors.Join(err, d.Err())
		}
		grads, err := d.Sync()
		if err != nil {
			return nil, err
		}
		if err := solver.Step(grads); err != nil {
			return nil, err
		}
		vm.Reset()
		if e != nil {
			stats[min(step, 1)] = e.Stats()
		}
	}
	if a, b := stats[0], stats[1]; a.Uploads+a.Downloads != b.Uploads+b.Downloads || a.ArenaBytes != b.ArenaBytes {
		return nil, fmt.Errorf("after one step %+v, at the end %+v", a, b)
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

// TestTrainingOnDevice: models on a device, and models on the host whose ranks
// communicate on a device, end with the bits of a model on the host, and no
// tensor is copied between host and device.
func TestTrainingOnDevice(t *testing.T) {
	for _, size := range []int{1, 2, 3} {
		for _, hooks := range []bool{false, true} {
			for name, opts := range map[string][]Option{"one bucket": nil, "many": {WithBuckets(1, 60)}, "sum": {WithSum(), WithBuckets(200, 200)}} {
				ends := make([][][]byte, size)
				all(t, size, func(r rank) error {
					var err error
					ends[r.comm.Rank()], err = fit(r, onHosts, hooks, gorgonia.NewVanillaSolver(gorgonia.WithLearnRate(0.1)), opts...)
					return err
				})
				for _, k := range []kind{onHosts, onDevices, stagings} {
					all(t, size, func(r rank) error {
						got, err := fit(r, k, hooks, SGD{0.1}, opts...)
						if err == nil && !slices.EqualFunc(got, ends[0], bytes.Equal) {
							err = fmt.Errorf("%s, hooks %v, %s: other bits than on the host", k, hooks, name)
						}
						return err
					})
				}
			}
		}
	}
}

// TestSolversOfTheHostWorkStaged: where only the communication is on a device,
// gradients are the host's, and any solver takes them.
func TestSolversOfTheHostWorkStaged(t *testing.T) {
	var want [][]byte
	for _, k := range []kind{onHosts, stagings} {
		all(t, 2, func(r rank) error {
			got, err := fit(r, k, true, gorgonia.NewAdamSolver())
			if r.comm.Rank() == 0 && want == nil {
				want = got
			} else if r.comm.Rank() == 0 && !slices.EqualFunc(got, want, bytes.Equal) {
				err = errors.Join(err, fmt.Errorf("%s: other bits", k))
			}
			return err
		})
	}
}

// TestGradientsInAnyOrderOnDevice: gradients can be views of device tensors, and
// tensors on the host.
func TestGradientsInAnyOrderOnDevice(t *testing.T) {
	all(t, 1, func(r rank) error {
		return onDevices.at(r, func(comm backend.Communicator, e *cuda.Engine) error {
			g := gorgonia.NewGraph()
			w, err := e.ToDevice(uniform(rand.New(rand.NewPCG(1, 1)), 3, 2))
			if err != nil {
				return err
			}
			d, err := New(comm, gorgonia.Nodes{gorgonia.NewMatrix(g, tensor.Float32, gorgonia.WithName("w"), gorgonia.WithShape(3, 2), gorgonia.WithValue(w))})
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
				dw := gorgonia.NewMatrix(g, tensor.Float32, gorgonia.WithName(name), gorgonia.WithShape(3, 2), gorgonia.WithValue(v))
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
	all(t, 2, func(r rank) error {
		return onDevices.at(r, func(comm backend.Communicator, e *cuda.Engine) error {
			m, err := newQuadratic(r, e)
			if err != nil {
				return err
			}
			other, err := cuda.NewEngine(e.Device(), nil)
			if err != nil {
				return err
			}
			mixed, err := newQuadratic(r, other)
			if err != nil {
				return err
			}
			onHost, err := newQuadratic(r, nil)
			if err != nil {
				return err
			}
			tensor.WithEngine(e)(onHost.params[0].Value().(*tensor.Dense)) // as a machine does
			return errors.Join(
				refused(r.comm, m.params, "w1, is on the device guard, and the communicator is on host"),
				refused(comm, gorgonia.Nodes{m.params[0], mixed.params[1]}, "use one engine for a model"),
				refused(comm, onHost.params, "move it there with the engine's ToDevice first"),
				other.Close())
		})
	})
	errs := each(t, 2, func(r rank) error {
		k := onDevices
		if r.comm.Rank() == 1 {
			k = stagings
		}
		_, err := fit(r, k, false, SGD{0.1})
		return err
	})
	for _, err := range errs {
		if err == nil || !strings.Contains(err.Error(), "parameter 0 is w1 f32(5, 3) on guard on rank 0, but parameter 0 is w1 f32(5, 3) on rank 1") {
			t.Errorf("one rank on a device: %v", err)
		}
	}
}

// TestErrorOfPeerEndsTheStepOnDevice: it names the rank and the bucket.
func TestErrorOfPeerEndsTheStepOnDevice(t *testing.T) {
	cause := errors.New("no more coffee")
	for _, k := range []kind{onDevices, stagings} {
		errs := each(t, 2, func(r rank) error {
			_, err := fit(r, k, true, &stopping{comm: r.comm, cause: cause})
			return err
		})
		for i, err := range errs {
			if !errors.Is(err, backend.ErrAborted) || !strings.Contains(err.Error(), fmt.Sprintf("rank %d", i)) || !strings.Contains(err.Error(), "bucket 0") {
				t.Errorf("%s, rank %d: %v", k, i, err)
			}
		}
	}
}
