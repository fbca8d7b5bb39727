//go:build gpu

package cuda

import (
	"fmt"
	"testing"
	"time"

	"gorgonia.org/cu"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/kernels/fuse"
)

// BenchmarkGPUBandwidth reports the bytes read and written per second, and their share
// of those of the driver's own copy, as often and in turn with it: clocks change. Calls take
// turns in operands that are larger together than the L2 cache.
func BenchmarkGPUBandwidth(b *testing.B) {
	d := openDevice(b, 0)
	memory := 256 << 20
	if testing.Short() {
		memory = 2 << 20
	}
	x, y := allocate(b, d, memory), allocate(b, d, memory)
	for _, share := range []int{16, 4, 1} {
		b.Run(fmt.Sprintf("%dMiB", memory/share>>20), func(b *testing.B) {
			bandwidths(b, d, y, x, memory/share)
		})
	}
}

func bandwidths(b *testing.B, d *Device, y, x backend.Buffer, nbytes int) {
	q := newQueueOf(b, d)
	a := q.arithmetic
	type operation func(y, x backend.Buffer) error
	calls := func(b *testing.B, from, to int, f operation) time.Duration {
		began := time.Now()
		for i := from; i < to; i++ {
			at := i * nbytes % x.NBytes()
			ok(b, f(y.Slice(at, at+nbytes), x.Slice(at, at+nbytes)))
		}
		ok(b, q.drain())
		return time.Since(began)
	}
	driver := func(y, x backend.Buffer) error {
		return d.on("copy", func() error {
			return cu.MemcpyDtoDAsync(cu.DevicePtr(y.Addr()), cu.DevicePtr(x.Addr()), int64(nbytes),
				q.stream)
		})
	}
	measure := func(name string, moved int, f operation) {
		b.Run(name, func(b *testing.B) {
			calls(b, 0, 1, f)
			const turns = 8
			var own, drivers time.Duration
			b.ResetTimer()
			for i := range turns {
				from, to := i*b.N/turns, (i+1)*b.N/turns
				b.StopTimer()
				drivers += calls(b, from, to, driver)
				b.StartTimer()
				own += calls(b, from, to, f)
			}
			rate := float64(moved) * float64(b.N) / own.Seconds() / 1e9
			b.ReportMetric(rate, "GB/s")
			b.ReportMetric(float64(moved)/float64(2*nbytes)*drivers.Seconds()/own.Seconds(),
				"of-driver")
		})
	}
	measure("driver", 2*nbytes, driver)
	measure("copy", 2*nbytes, func(y, x backend.Buffer) error { return a.Copy(y, x) })
	measure("copy/unaligned", 2*(nbytes-16), func(y, x backend.Buffer) error {
		return a.Copy(y.Slice(0, nbytes-16), x.Slice(3, nbytes-13))
	})
	n := nbytes / 4
	measure("cast/f32-bf16", 3*nbytes/2, func(y, x backend.Buffer) error {
		return a.Cast(y.As(backend.BF16).Slice(0, n), x.As(backend.F32))
	})
	measure("cast/bf16-f32", 3*nbytes/2, func(y, x backend.Buffer) error {
		return a.Cast(y.As(backend.F32), x.As(backend.BF16).Slice(0, n))
	})
	measure("cast/f32-bf16/unaligned", 3*(nbytes/2-2), func(y, x backend.Buffer) error {
		return a.Cast(y.As(backend.BF16).Slice(0, n-1), x.As(backend.F32).Slice(1, n))
	})
	measure("add", 3*nbytes, func(y, x backend.Buffer) error {
		return a.Reduce(backend.Sum, y.As(backend.F32), y.As(backend.F32), x.As(backend.F32))
	})
	for _, t := range []backend.DType{backend.U8, backend.BF16, backend.F32, backend.F64} {
		n := nbytes / t.Size()
		permute := func(name string, dims, perm []int) {
			count, strides := 1, make([]int, len(dims))
			for i := len(dims) - 1; i >= 0; i-- {
				strides[i] = count
				count *= dims[i]
			}
			var toDims, toStrides []int
			for _, axis := range perm {
				toDims, toStrides = append(toDims, dims[axis]), append(toStrides, strides[axis])
			}
			measure(fmt.Sprintf("%s/%v/gather", name, t), 2*count*t.Size(),
				func(y, x backend.Buffer) error {
					return a.CopyStrided(y.As(t).Slice(0, count), x.As(t).Slice(0, count), toDims,
						toStrides)
				})
			p, to := &fuse.Program{Shape: toDims}, make([]int, len(toDims))
			for i, n := len(toDims)-1, 1; i >= 0; i-- {
				to[i] = n
				n *= toDims[i]
			}
			p.Store(p.Load(t, toStrides...), t, to...)
			loop, err := q.Fuse(p)
			ok(b, err)
			measure(fmt.Sprintf("%s/%v/fused", name, t), 2*count*t.Size(),
				func(y, x backend.Buffer) error {
					return loop.Run([]backend.Buffer{y.As(t).Slice(0, count)},
						[]backend.Buffer{x.As(t).Slice(0, count)}, backend.Buffer{})
				})
		}
		permute("transpose", []int{n / 1024, 1024}, []int{1, 0})
		permute("permute021", []int{16, n / 16384, 1024}, []int{0, 2, 1})
		permute("permute102", []int{16, n / 16384, 1024}, []int{1, 0, 2})
		permute("heads", []int{8, n / 8192, 16, 64}, []int{0, 2, 1, 3}) // of 64 elements
		// Rows that are no multiples of 16 bytes.
		permute("transpose/odd", []int{n / 1001, 1001}, []int{1, 0})
		permute("transpose/bothodd", []int{n/1001 - 1 | 1, 1001}, []int{1, 0})
		permute("permute021/odd", []int{16, n / 16016, 1001}, []int{0, 2, 1})
		permute("permute102/odd", []int{16, n / 16016, 1001}, []int{1, 0, 2})
		permute("heads/odd", []int{8, n / 5880, 15, 49}, []int{0, 2, 1, 3})
		permute("images", []int{8, n / 24, 3}, []int{0, 2, 1}) // channels first
		permute("images/last", []int{8, 3, n / 24}, []int{0, 2, 1})
		for _, channels := range []int{4, 8} {
			permute(fmt.Sprint("channels", channels), []int{8, n / 8 / channels, channels},
				[]int{0, 2, 1})
			permute(fmt.Sprint("channels", channels, "/last"), []int{8, channels, n / 8 / channels},
				[]int{0, 2, 1})
		}
	}
}

// BenchmarkGPUHostTime reports what starting something costs the host.
func BenchmarkGPUHostTime(b *testing.B) {
	d := openDevice(b, 0)
	q := newQueueOf(b, d)
	x := allocate(b, d, 1024)
	other := newQueueOf(b, d)
	for name, f := range map[string]func() error{
		"bind":   func() error { unbind, err := d.Bind(); unbind(); return err },
		"kernel": func() error { return q.arithmetic.Zero(x) },
		"mark":   func() error { _, err := q.Mark(); return err },
		"record": func() error { _, err := q.Record(); return err },
		"order":  func() error { return other.follow(q) },
		"alloc": func() error {
			m, err := q.Alloc(1024)
			if err != nil {
				return err
			}
			return q.Free(m)
		},
	} {
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			for i := 0; b.Loop(); i++ {
				ok(b, f())
				if i%500 == 499 {
					b.StopTimer()
					ok(b, q.drain())
					b.StartTimer()
				}
			}
		})
	}
}
