package host

import (
	"context"
	"fmt"
	"testing"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/rendezvous"
)

func group(t testing.TB, P int) []backend.Communicator {
	ws, err := rendezvous.Local(P)
	if err != nil {
		t.Fatal(err)
	}
	comms := make([]backend.Communicator, P)
	each(t, P, func(r int) error {
		var err error
		comms[r], err = New().Connect(context.Background(), ws[r])
		return err
	})
	t.Cleanup(func() {
		for _, c := range comms {
			c.Close()
		}
	})
	return comms
}

func each(t testing.TB, P int, f func(r int) error) {
	errs := make(chan error, P)
	for r := range P {
		go func() { errs <- f(r) }()
	}
	for range P {
		if err := <-errs; err != nil {
			t.Fatal(err)
		}
	}
}

func TestQuick(t *testing.T) {
	for _, P := range []int{1, 2, 3, 4, 5, 8} {
		comms := group(t, P)
		for _, n := range []int{0, 1, 7, 255, 4095, 65537, 1<<20 + 3} {
			for _, alloc := range []bool{false, true} {
				each(t, P, func(r int) error {
					c := comms[r]
					src, dst := make([]float32, n), make([]float32, n)
					if alloc {
						b, err := c.Alloc(8 * n)
						if err != nil {
							return err
						}
						f := backend.View[float32](b.As(backend.F32))
						src, dst = f[:n], f[n:]
					}
					for i := range src {
						src[i] = float32((i + r) % 13)
					}
					for _, a := range []backend.Algorithm{0, 1, 2} {
						if err := backend.Run(c, backend.Collective{Kind: backend.AllReduce, Algorithm: a}, backend.Of(dst), backend.Of(src)); err != nil {
							return err
						}
						for i := range dst {
							want := float32(0)
							for s := range P {
								want += float32((i + s) % 13)
							}
							if dst[i] != want {
								return fmt.Errorf("P=%d n=%d a=%v alloc=%v rank %d: [%d]=%v want %v", P, n, a, alloc, r, i, dst[i], want)
							}
						}
					}
					return nil
				})
			}
		}
	}
}

func BenchmarkAllReduce(b *testing.B) {
	for _, P := range []int{2, 4, 8} {
		comms := group(b, P)
		for _, n := range []int{256, 16384, 262144, 4 << 20} {
			b.Run(fmt.Sprintf("P%d/%d", P, n*4), func(b *testing.B) {
				b.SetBytes(int64(n * 4))
				each(b, P, func(r int) error {
					x := backend.Of(make([]float32, n))
					for range b.N {
						if err := backend.Run(comms[r], backend.Collective{Kind: backend.AllReduce}, x, x); err != nil {
							return err
						}
					}
					return nil
				})
			})
		}
	}
}
