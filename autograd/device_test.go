package autograd

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/autograd/solver"
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/internal/testing/testenv"
	"github.com/euryale-ml/euryale/internal/testing/testranks"
)

// quadratic is a model of products and squares, so that its gradients are
// bitwise identical wherever they are computed:
//
//	loss = mean((w1*x)^2 * w2 + b - y)^2 + s^2
type quadratic struct {
	g      *gorgonia.ExprGraph
	data   gorgonia.Nodes
	params gorgonia.Nodes // w1, w2, b and the scalar s
}

func newQuadratic(r rank) (*quadratic, error) {
	r.build.Lock()
	defer r.build.Unlock()
	m := &quadratic{g: gorgonia.NewGraph()}
	rng := rand.New(rand.NewPCG(uint64(r.comm.Rank()), 31)) // every rank begins with other values
	for _, name := range []string{"x", "y", "w1", "w2", "b"} {
		v := uniform(rng, 5, 3)
		n := gorgonia.NewMatrix(m.g, tensor.Float32, gorgonia.WithName(name),
			gorgonia.WithShape(5, 3), gorgonia.WithValue(v))
		if len(m.data) < 2 {
			m.data = append(m.data, n)
		} else {
			m.params = append(m.params, n)
		}
	}
	m.params = append(m.params, gorgonia.NewScalar(m.g, tensor.Float32, gorgonia.WithName("s"),
		gorgonia.WithValue(rng.Float32())))
	return m, nil
}

// machine adds the loss, with use(w) where w is used.
func (m *quadratic) machine(r rank, use func(*gorgonia.Node) *gorgonia.Node) (vm gorgonia.VM,
	err error) {
	r.build.Lock()
	defer r.build.Unlock()
	err = must(func() {
		h := gorgonia.Must(
			gorgonia.Square(gorgonia.Must(gorgonia.HadamardProd(use(m.params[0]), m.data[0]))))
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
	return gorgonia.NewTapeMachine(m.g), nil
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
	return values, errors.Join(err, d.Close())
}

func (m *quadratic) fit(r rank, d *DataParallel, hooks bool,
	solver gorgonia.Solver) (values [][]byte, err error) {
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
	for range 20 {
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

// TestTrainingStaged: models whose ranks communicate on a device end with the bits of those whose
// ranks communicate on the host. NCCL adds more than two numbers in an order of its own: there
// the end is the same except for rounding.
func TestTrainingStaged(t *testing.T) {
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
				got := testranks.Must(fit(r, s.hooks,
					gorgonia.NewVanillaSolver(gorgonia.WithLearnRate(0.1)), s.opts...))
				if r.comm.Rank() == 0 {
					want[i] = got
				}
			}
			return nil
		})
		testenv.Each(t, testenv.OnHosts(), func(t *testing.T, k testenv.Kind) {
			allOn(t, k, size, func(r rank) error {
				for i, s := range settings {
					got, err := fit(r, s.hooks, &solver.SGD{Rate: 0.1}, s.opts...)
					if err != nil {
						return err
					}
					if k.OnGPU() && size > 2 {
						err = near(got, want[i])
					} else if !slices.EqualFunc(got, want[i], bytes.Equal) {
						err = errors.New("other bits than on the host")
					}
					if err != nil {
						return fmt.Errorf("%d ranks, hooks %v, setting %d: %w", size, s.hooks,
							i, err)
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

// TestErrorOfPeerEndsAStagedStep: it names the rank and the bucket that was
// leaving when the news came.
func TestErrorOfPeerEndsAStagedStep(t *testing.T) {
	cause := errors.New("no more coffee")
	testenv.Each(t, testenv.OnHosts(), func(t *testing.T, k testenv.Kind) {
		if k == testenv.Hosts {
			return // another test has it
		}
		errs := eachOn(t, k, 2, func(r rank) error {
			_, err := fit(r, true, &stopping{comm: r.comm, cause: cause})
			return err
		})
		for i, err := range errs {
			require.Fails(t, fmt.Sprint("rank ", i), err, backend.ErrAborted,
				fmt.Sprintf("rank %d", i), "bucket ")
		}
	})
}
