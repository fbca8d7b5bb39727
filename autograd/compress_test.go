package autograd

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/autograd/solver"
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/backend/compress/half"
	"github.com/euryale-ml/euryale/backend/compress/sparse"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/internal/testing/testenv"
)

// fitWithMomentum is fit with a solver that has state, and gives back its memory.
func fitWithMomentum(r rank, opts ...Option) (values [][]byte, err error) {
	momentum := &solver.Momentum{Rate: 0.1, Momentum: 0.9}
	// Buckets of one parameter are the same wherever parameters are.
	values, err = fit(r, true, momentum, append([]Option{WithBuckets(1, 1)}, opts...)...)
	return values, errors.Join(err, momentum.Close())
}

// Training whose ranks communicate on a device, with momentum and with compressed gradients, ends
// with the bits of the host. NCCL rounds averages of 16 bits in its own way.
func TestMomentumAndCompressionStaged(t *testing.T) {
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
	testenv.Each(t, testenv.OnHosts(), func(t *testing.T, k testenv.Kind) {
		for _, name := range names {
			allOn(t, k, 2, func(r rank) error {
				got, err := fitWithMomentum(r, compressions[name]...)
				if err == nil && !(k.OnGPU() && name == "bf16") &&
					!slices.EqualFunc(got, want[name], bytes.Equal) {
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

// Counters prove that gradients that are staged travel compressed.
func TestStagedGradientsTravelCompressed(t *testing.T) {
	testenv.Each(t, testenv.OnHosts(), func(t *testing.T, k testenv.Kind) {
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
				_, err = m.fit(r, d, true, &solver.SGD{Rate: 0.1})
				if err == nil {
					err = check(d.Comm())
				}
				if err != nil {
					err = fmt.Errorf("%s: %w", name, err)
				}
				return errors.Join(err, d.Close())
			})
		}
	})
}

// Ranks that compress gradients differently are told so before any of them travels.
func TestAnotherCompressionIsAnError(t *testing.T) {
	errs := each(t, 2, func(r rank) error {
		dtype := backend.F16
		if r.comm.Rank() == 1 {
			dtype = backend.BF16
		}
		r.build.Lock()
		w := random(gorgonia.NewGraph(), rand.New(rand.NewPCG(1, 1)), "w", tensor.Float32, 4)
		r.build.Unlock()
		_, err := New(r.comm, gorgonia.Nodes{w}, WithCompression(half.Wrap(dtype)))
		return err
	})
	for r, err := range errs {
		for _, part := range []string{
			"gradients are compressed by half (f16) on rank 0", "by half (bf16) on rank 1",
			fmt.Sprintf("rank %d of", r),
		} {
			require.Fails(t, fmt.Sprint("rank ", r), err, backend.ErrMismatch, part)
		}
	}
}
