package reference

import (
	"math"
	"slices"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/kernels"
)

// Select does what [kernels.Selection] says, as simply as it can be written.
func Select(s *kernels.Selection) error {
	if err := (kernels.Check{}).Select(s); err != nil {
		return err
	}
	head := backend.View[int64](s.Out.Head)
	head[0], head[1], head[2] = s.Fingerprint, 0, 0
	if slices.ContainsFunc(backend.View[int64](s.Notes), func(note int64) bool {
		return note != 0
	}) {
		return nil
	}
	v := backend.View[float32](s.Residual)
	if v == nil {
		v = slices.Clone(backend.View[float32](s.X))
	} else if err := (kernels.Host{}).Reduce(backend.Sum, s.Residual, s.Residual, s.X); err != nil {
		return err
	}
	above, ties := s.Above, 0
	if s.K > 0 {
		above, ties = kthMagnitude(v, s.K)
	}
	dense := backend.View[float32](s.Dense)
	clear(dense)
	for i, x := range v {
		m := magnitude(x)
		if m < above || m == above && ties == 0 {
			continue
		}
		if m == above {
			ties--
		}
		head[1]++
		at := int(head[2])
		y, sent := narrowed(x, s.Out.Values.DType(), s.Saturate)
		switch {
		case dense != nil:
			dense[i] = y
		case at < s.Out.Values.Len():
			setElement(s.Out.Values, at, sent)
			backend.View[int32](s.Out.Index)[at] = int32(i)
			head[2]++
		default:
			continue
		}
		if v[i] = x - y; y-y != 0 {
			v[i] = 0
		}
	}
	return nil
}

func magnitude(x float32) uint32 { return math.Float32bits(x) &^ (1 << 31) }

// kthMagnitude returns the k-th largest magnitude, and how many of the k are equal
// to it.
func kthMagnitude(v []float32, k int) (kth uint32, ties int) {
	all := make([]uint32, len(v))
	for i, x := range v {
		all[i] = magnitude(x)
	}
	slices.Sort(all)
	all = all[len(all)-k:]
	first, _ := slices.BinarySearch(all, all[0]+1)
	return all[0], first
}

// narrowed returns x as a type holds it, and the bits of that.
func narrowed(x float32, d backend.DType, saturate bool) (y float32, bits uint32) {
	if d == backend.F32 {
		return x, math.Float32bits(x)
	}
	infinite := backend.Float16(0x7c00)
	if d == backend.BF16 {
		infinite = 0x7f80
	}
	half, wide := make([]backend.Float16, 1), []float32{x}
	_ = kernels.Host{}.Cast(backend.Of(half).As(d), backend.Of(wide)) // they fit
	if saturate && half[0]&0x7fff == infinite && x-x == 0 {
		half[0]--
	}
	_ = kernels.Host{}.Cast(backend.Of(wide), backend.Of(half).As(d))
	return wide[0], uint32(half[0])
}

// setElement sets element i of values.
func setElement(values backend.Buffer, i int, bits uint32) {
	if values.DType() == backend.F32 {
		backend.View[float32](values)[i] = math.Float32frombits(bits)
		return
	}
	backend.View[backend.Float16](values.As(backend.F16))[i] = backend.Float16(bits)
}

// Combine adds up messages, one after the other, as [kernels.Sparse] says.
func Combine(dst backend.Buffer, m kernels.Messages, divisor int) error {
	if err := (kernels.Check{}).Combine(dst, m, divisor); err != nil {
		return err
	}
	sums := make([]float32, dst.Len())
	for r := range m.Ranks {
		message := m.All.Slice(r*m.NBytes, (r+1)*m.NBytes)
		sent := backend.View[int64](message.Slice(0, 8*kernels.HeadWords).As(backend.I64))[2]
		n := int(min(uint64(sent), uint64(m.Capacity)))
		index := backend.View[int32](message.Slice(m.Index, m.Index+4*n).As(backend.I32))
		values := make([]float32, n)
		if err := (kernels.Host{}).Cast(backend.Of(values),
			message.Slice(m.Values, m.Values+n*m.DType.Size()).As(m.DType)); err != nil {
			return err
		}
		for j, i := range index {
			if uint(i) < uint(len(sums)) {
				sums[i] += values[j]
			}
		}
	}
	if divisor != 1 {
		for i, x := range sums {
			if x != 0 {
				sums[i] = x / float32(divisor)
			}
		}
	}
	return kernels.Host{}.Cast(dst, backend.Of(sums))
}
