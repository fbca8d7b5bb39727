package autograd

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"gorgonia.org/gorgonia"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/backend/compress/half"
	"github.com/euryale-ml/euryale/backend/compress/sparse"
	"github.com/euryale-ml/euryale/internal/testenv"
)

// fitWithMomentum is fit with a solver that has state, and gives back its memory.
func fitWithMomentum(r rank, opts ...Option) (values [][]byte, err error) {
	solver := &Momentum{Rate: 0.1, Momentum: 0.9}
	// Buckets of one parameter are the same wherever parameters are.
	values, err = fit(r, true, solver, append([]Option{WithBuckets(1, 1)}, opts...)...)
	return values, errors.Join(err, solver.Close())
}

// Training on a device, with momentum and with compressed gradients, ends with the
// bits of the host. NCCL rounds averages of 16 bits in its own way.
func TestMomentumAndCompressionOnDevice(t *testing.T) {
	var names []string
	for name := range compressions {
		if name != "partial" { // ranks end differently
			names = append(names, name)
		}
	}
	slices.Sort(names)
	want := map[string][][]byte{}
	for _, name := range names {
		all(t, 2, func(r rank) error {
			got, err := fitWithMomentum(r, compressions[name]...)
			if r.comm.Rank() == 0 {
				want[name] = got
			}
			return err
		})
	}
	testenv.Each(t, testenv.Kinds(), func(t *testing.T, k testenv.Kind) {
		for _, name := range names {
			allOn(t, k, 2, func(r rank) error {
				got, err := fitWithMomentum(r, compressions[name]...)
				if err == nil && !(k.OnGPU() && name == "bf16") && !slices.EqualFunc(got, want[name], bytes.Equal) {
					err = errors.New("other bits than on the host")
				}
				if err != nil {
					return fmt.Errorf("%s: %w", name, err)
				}
				return nil
			})
		}
	})
}

// Counters prove that gradients on a device travel compressed.
func TestGradientsOnDeviceTravelCompressed(t *testing.T) {
	testenv.Each(t, testenv.OnDevices(), func(t *testing.T, k testenv.Kind) {
		for name, check := range map[string]func(comm backend.Communicator) error{
			"bf16": func(comm backend.Communicator) error {
				c, _ := backend.As[*half.Communicator](comm)
				if n := c.Counters(); n.Calls == 0 || n.Bytes != n.Dense/2 {
					return fmt.Errorf("%+v", n)
				}
				return nil
			},
			"topk": func(comm backend.Communicator) error {
				c, _ := backend.As[*sparse.Communicator](comm)
				if n := c.Counters(); n.Calls == 0 || n.Entries == 0 {
					return fmt.Errorf("%+v", n)
				}
				return nil
			},
		} {
			allOn(t, k, 2, func(r rank) error {
				m, err := newQuadratic(r)
				if err != nil {
					return err
				}
				d, err := New(r.comm, m.params, compressions[name]...)
				if err != nil {
					return err
				}
				_, err = m.fit(r, d, true, SGD{Rate: 0.1})
				if err == nil {
					err = check(d.Comm())
				}
				if err != nil {
					err = fmt.Errorf("%s: %w", name, err)
				}
				return errors.Join(err, d.Close(), r.free(append(m.data, m.params...)))
			})
		}
	})
}

// A state that was read on a device is the one that a resumed solver goes on from.
func TestMomentumResumesOnDevice(t *testing.T) {
	testenv.Each(t, testenv.OnDevices(), func(t *testing.T, k testenv.Kind) {
		allOn(t, k, 1, func(r rank) error {
			m, err := newQuadratic(r)
			if err != nil {
				return err
			}
			a, b := &Momentum{Rate: 0.1, Momentum: 0.5}, &Momentum{Rate: 0.1, Momentum: 0.5}
			step := func(s *Momentum) error {
				dw, err := r.engine.ToDevice(uniform(rand.New(rand.NewPCG(1, 2)), 5, 3))
				if err != nil {
					return err
				}
				err = s.Step([]gorgonia.ValueGrad{gradient{m.params[0], dw}})
				return errors.Join(err, r.engine.Free(dw, int64(dw.MemSize())))
			}
			if err := errors.Join(step(a), step(a)); err != nil {
				return err
			}
			state, err := a.State()
			if err != nil {
				return err
			}
			if err := errors.Join(b.SetState(state), step(a), step(b)); err != nil {
				return err
			}
			x, errX := a.State()
			y, errY := b.State()
			err = errors.Join(errX, errY, a.Close(), b.Close(), r.free(append(m.data, m.params...)))
			if key := velocityOf + "0"; err == nil && !bytes.Equal(x[key].Bytes(), y[key].Bytes()) {
				err = errors.New("the velocities differ")
			}
			return err
		})
	})
}
