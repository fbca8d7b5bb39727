package cuda

import (
	"errors"
	"fmt"
	"testing"

	"github.com/euryale-ml/euryale/backend"
)

// spare is the memory after what a bench compares.
type spare struct {
	b    *bench
	used int
}

func (s *spare) Take(d backend.DType, n int) (backend.Buffer, error) {
	addr, nbytes := s.b.m.Arena()
	at := (max(s.used, s.b.used) + 255) / 256 * 256
	s.used = at + n*d.Size()
	if s.used > nbytes {
		return backend.Buffer{}, errors.New("the arena is too small")
	}
	return backend.OnDevice(d, addr+uintptr(at), n), nil
}

// Give expects what was taken last.
func (s *spare) Give(b backend.Buffer) error {
	addr, _ := s.b.m.Arena()
	s.used = int(b.Addr() - addr)
	return nil
}

// adapted returns a bench and the arithmetic of its machine.
func adapted(t *testing.T, m machine, seed uint64) (*bench, Arithmetic) {
	b := newBench(t, m, seed)
	return b, NewArithmetic(m, &spare{b: b})
}

// testArithmetic compares every function that is not rounded with the host's.
func testArithmetic(t *testing.T, m machine) {
	t.Run("binary", func(t *testing.T) { adaptBinary(t, m) })
	t.Run("strided", func(t *testing.T) { adaptStrided(t, m) })
}

func adaptBinary(t *testing.T, m machine) {
	b, a := adapted(t, m, 22)
	for _, op := range backend.BinaryOps() {
		for _, d := range backend.DTypes() {
			for _, n := range []int{0, 1, 33, 1025} {
				if !op.Takes(d) || op.Rounded() {
					continue
				}
				b.reset(uint64(n))
				dst, x, y := b.alloc(d, n, 0), b.alloc(d, n, 1), b.alloc(d, n, 0)
				copy(y.host.Slice(0, n/3).Bytes(), x.host.Bytes()) // equal elements
				name := fmt.Sprintf("%v of %d %v", op, n, d)
				b.run(name, dst, func() error {
					return a.Binary(op, dst.device, x.device, y.device)
				}, func() error { return b.host.Binary(op, dst.host, x.host, y.host) })
				b.run(name+" in place", y, func() error {
					return a.Binary(op, y.device, x.device, y.device)
				}, func() error { return b.host.Binary(op, y.host, x.host, y.host) })
				for _, reverse := range []bool{false, true} {
					b.run(fmt.Sprint(name, " with a scalar, reverse ", reverse), x, func() error {
						return a.BinaryScalar(op, x.device, x.device, 3, reverse)
					},
						func() error { return b.host.BinaryScalar(op, x.host, x.host, 3, reverse) })
				}
			}
		}
	}
	b.reset(1)
	x := b.alloc(backend.BF16, 100, 0)
	b.run("fill", x, func() error { return a.Fill(x.device, 1.0/3) }, func() error {
		return b.host.Fill(x.host, 1.0/3)
	})
	if err := a.Fill(backend.OnDevice(backend.U8, x.device.Addr(), 1), 256); !errors.Is(
		err, backend.ErrArgument) {
		t.Error(err)
	}
}

func adaptStrided(t *testing.T, m machine) {
	b, a := adapted(t, m, 24)
	dst, src := b.alloc(backend.F32, 24, 0), b.alloc(backend.F32, 24, 1)
	b.run("strided", dst, func() error {
		return a.CopyStrided(dst.device, src.device, []int{4, 2, 3}, []int{1, 12, 4})
	},
		func() error {
			return b.host.CopyStrided(dst.host, src.host, []int{4, 2, 3},
				[]int{1, 12, 4})
		})
	many := b.alloc(backend.F32, 1<<8, 0)
	shape, strides := []int{2, 2, 2, 2, 2, 2, 2, 2}, []int{1, 2, 4, 8, 16, 32, 64, 128}
	if err := a.CopyStrided(backend.OnDevice(backend.F32, many.device.Addr(), 256),
		backend.OnDevice(backend.F32, many.device.Addr()+4096, 256), shape, strides); !errors.Is(
		err, backend.ErrUnsupported) {
		t.Errorf("8 axes: %v", err)
	}
}
