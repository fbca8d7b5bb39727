package ops

import (
	"slices"
	"testing"

	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/internal/testing/testenv"
)

// counted is a worker whose kernels are counted.
type counted struct {
	worker
	calls *countedKernels
}

func (p counted) kernels() backend.Arithmetic { return p.calls }

type countedKernels struct {
	backend.Arithmetic
	n int
}

func (k *countedKernels) Copy2D(dst backend.Buffer, dstPitch int, src backend.Buffer, srcPitch,
	width, rows int) error {
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
			comm := ranksOn(t, 1, k).comms[0]
			q := comm.Device().Default()
			memory := require.Value(comm.Device().Alloc(4 * 512))(t)
			x, back := memory.As(backend.F32).Slice(0, 120), memory.As(backend.F32).Slice(128, 248)
			numbers := tensor.Range(tensor.Float32, 0, 120).([]float32)
			require.NoError(t, q.Move(x, backend.Of(numbers)))
			here := &planned{comm: comm, queue: q, rest: memory.Slice(4*256, 4*512)}
			p := counted{here, &countedKernels{Arithmetic: here.kernels()}}
			shape := tensor.Shape{2, 12, 5}
			packed, err := transform{scatter: 1, gather: none, cut: c.cut}.pack(
				p, operand{x, shape}, 0, P)
			require.Check(t, err == nil && p.calls.n == c.calls,
				"%s: cut by %d kernels, want %d (%v)", name, p.calls.n, c.calls, err)
			err = join(p, operand{back, shape}, packed, 1, c.cut)
			require.Check(t, err == nil && p.calls.n == 2*c.calls,
				"%s: joined by %d kernels, want %d (%v)", name, p.calls.n-c.calls, c.calls, err)
			got, err := onHost{comm}.here(back)
			if err != nil || !slices.Equal(backend.View[float32](got), numbers) {
				t.Errorf("%s: there and back: %v (%v)", name, backend.View[float32](got), err)
			}
			require.NoError(t, comm.Device().Free(memory))
		})
	}
}

// TestScalesAreThoseOfTheType: 1/n divides, other scales multiply, integers are truncated, and
// nothing may be scaled.
func TestScalesAreThoseOfTheType(t *testing.T) {
	for _, c := range []struct {
		x, want backend.Buffer
		scale   float64
	}{
		{backend.Of([]float32{1, 2, 7}), backend.Of([]float32{1. / 3, 2. / 3, 7. / 3}), 1. / 3},
		{backend.Of([]float64{1, -3}), backend.Of([]float64{-2.5, 7.5}), -2.5},
		{backend.Of([]int64{7, -7, 6}), backend.Of([]int64{3, -3, 3}), 0.5},
		{backend.Of([]int32{7, -7, 6}), backend.Of([]int32{10, -10, 9}), 1.5},
		{backend.Of([]byte{7, 6}), backend.Of([]byte{2, 2}), 1. / 3},
		{backend.Of([]float32{}), backend.Of([]float32{}), 0.5},
	} {
		if err := rescale(onHost{}, c.x, c.scale); err != nil ||
			!slices.Equal(c.x.Bytes(), c.want.Bytes()) {
			t.Errorf("%v times %v has bytes %v, want %v (%v)", c.x.DType(), c.scale, c.x.Bytes(),
				c.want.Bytes(), err)
		}
	}
}
