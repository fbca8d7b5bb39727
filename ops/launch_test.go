package ops

import (
	"slices"
	"testing"

	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/testenv"
)

// counted is a place whose kernels are counted.
type counted struct {
	place
	calls *countedKernels
}

func (p counted) kernels() backend.Arithmetic { return p.calls }

type countedKernels struct {
	backend.Arithmetic
	n int
}

func (k *countedKernels) Copy2D(dst backend.Buffer, dstPitch int, src backend.Buffer, srcPitch, width, rows int) error {
	k.n++
	return k.Arithmetic.Copy2D(dst, dstPitch, src, srcPitch, width, rows)
}

func (k *countedKernels) CopyStrided(dst, src backend.Buffer, shape, strides []int) error {
	k.n++
	return k.Arithmetic.CopyStrided(dst, src, shape, strides)
}

// TestAxesAreExchangedByOneKernel: pieces of one length are cut, and joined, by
// one kernel; others by one for each rank.
func TestAxesAreExchangedByOneKernel(t *testing.T) {
	const P = 4
	for name, c := range map[string]struct {
		cut   []int
		calls int
	}{"even": {[]int{3, 3, 3, 3}, 1}, "uneven": {[]int{3, 2, 4, 3}, P}} {
		testenv.Each(t, testenv.OnDevices(), func(t *testing.T, k testenv.Kind) {
			g := ranksOn(t, 1, k)
			e := g.engines[0]
			x, err := g.toDevice(0, tensor.New(tensor.WithShape(2, 12, 5), tensor.WithBacking(tensor.Range(tensor.Float32, 0, 120))))
			if err != nil {
				t.Fatal(err)
			}
			here := &onDevice{comm: g.comms[0], engine: e}
			p := counted{here, &countedKernels{Arithmetic: here.kernels()}}
			in, err := read(p, x)
			if err != nil {
				t.Fatal(err)
			}
			packed, err := transform{scatter: 1, gather: none, cut: c.cut}.pack(p, in, 0, P)
			if err != nil || p.calls.n != c.calls {
				t.Errorf("%s: cut by %d kernels, want %d (%v)", name, p.calls.n, c.calls, err)
			}
			back, value, err := p.fresh(tensor.Float32, x.Shape())
			if err == nil {
				err = join(p, operand{back, x.Shape()}, packed, 1, c.cut)
			}
			if err != nil || p.calls.n != 2*c.calls {
				t.Errorf("%s: joined by %d kernels, want %d (%v)", name, p.calls.n-c.calls, c.calls, err)
			}
			y, err := value()
			if err != nil {
				t.Fatal(err)
			}
			if got, err := g.arr(0, y); err != nil || !slices.Equal(got.data, widened(tensor.Range(tensor.Float32, 0, 120).([]float32))) {
				t.Errorf("%s: there and back: %v (%v)", name, got, err)
			}
			if err := g.free(0); err != nil {
				t.Error(err)
			}
		})
	}
}
