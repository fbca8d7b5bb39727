//go:build gpu

package cuda

import (
	"fmt"
	"testing"

	"gorgonia.org/cu"

	"github.com/euryale-ml/euryale/backend"
	gpukernels "github.com/euryale-ml/euryale/kernels/cuda"
)

// BenchmarkGPUBandwidth reports the bytes read and written per second, for the
// driver's own copy first.
func BenchmarkGPUBandwidth(b *testing.B) {
	d := openDevice(b, 0)
	for _, nbytes := range []int{16 << 20, 64 << 20, 256 << 20} {
		b.Run(fmt.Sprintf("%dMiB", nbytes>>20), func(b *testing.B) { bandwidths(b, d, nbytes) })
	}
}

func bandwidths(b *testing.B, d *Device, nbytes int) {
	q := newQueueOf(b, d)
	a := q.arithmetic
	x, y := allocate(b, d, nbytes), allocate(b, d, nbytes)
	xs, ys, n := x.As(backend.F32), y.As(backend.F32), nbytes/4
	measure := func(name string, moved int, f func() error) {
		b.Run(name, func(b *testing.B) {
			ok(b, f())
			ok(b, q.drain())
			b.ResetTimer()
			for i := 0; i < b.N; i++ {
				ok(b, f())
			}
			ok(b, q.drain())
			b.ReportMetric(float64(moved)*float64(b.N)/b.Elapsed().Seconds()/1e9, "GB/s")
		})
	}
	measure("driver", 2*nbytes, func() error {
		return d.on("copy", func() error {
			return cu.MemcpyDtoDAsync(cu.DevicePtr(y.Addr()), cu.DevicePtr(x.Addr()), int64(nbytes), q.stream)
		})
	})
	measure("copy", 2*nbytes, func() error { return a.Copy(y, x) })
	measure("cast", 3*nbytes/2, func() error { return a.Cast(y.As(backend.BF16).Slice(0, n), xs) })
	measure("add", 3*nbytes, func() error { return a.Binary(backend.Add, ys, ys, xs) })
	measure("transpose", 2*nbytes, func() error { return a.CopyStrided(ys, xs, []int{1024, n / 1024}, []int{1, 1024}) })
	for _, t := range []backend.DType{backend.U8, backend.BF16, backend.F64} {
		to, from, n := y.As(t), x.As(t), nbytes/t.Size()
		measure("transpose"+t.String(), 2*nbytes, func() error { return a.CopyStrided(to, from, []int{1024, n / 1024}, []int{1, 1024}) })
	}
	// Lengths that are no multiples of 16 bytes.
	rows := n/1001 - 1
	odd := rows * 1001
	measure("transposeodd", 8*odd, func() error {
		return a.CopyStrided(ys.Slice(0, odd), xs.Slice(0, odd), []int{1001, rows}, []int{1, 1001})
	})
	measure("permute021", 2*nbytes, func() error {
		return a.CopyStrided(ys, xs, []int{16, 1024, n / 16384}, []int{n / 16, 1, 1024})
	})
	measure("permute102", 2*nbytes, func() error {
		return a.CopyStrided(ys, xs, []int{n / 16384, 16, 1024}, []int{1024, n / 16, 1})
	})
	measure("permute0213", 2*nbytes, func() error { // heads of 64 elements
		return a.CopyStrided(ys, xs, []int{8, 16, n / 8192, 64}, []int{n / 8, 64, 1024, 1})
	})
	table, words := piecesOf(b, d, xs, 64, 0)
	measure("pack", 2*nbytes, func() error { return a.Pack(y, table, words) })
	measure("unpack", 2*nbytes, func() error { return a.Unpack(table, words, y) })
	// Parts that are not aligned to their places.
	table, words = piecesOf(b, d, xs, 64, 1)
	measure("packodd", 2*nbytes, func() error { return a.Pack(y, table, words) })
	measure("unpackodd", 2*nbytes, func() error { return a.Unpack(table, words, y) })
}

// piecesOf cuts a buffer into parts, in another order than in the flat buffer,
// where each is as many elements shorter.
func piecesOf(b *testing.B, d *Device, x backend.Buffer, parts, shorter int) (gpukernels.Table, backend.Buffer) {
	var buffers []backend.Buffer
	var offsets []int
	n := x.Len() / parts
	for i := range parts {
		buffers = append(buffers, x.Slice(i*n, (i+1)*n-shorter))
		offsets = append(offsets, 4*(n-shorter)*(parts-1-i))
	}
	table, err := gpukernels.NewTable(buffers, offsets)
	ok(b, err)
	host := make([]int64, len(table.Words()))
	for i, w := range table.Words() {
		host[i] = int64(w)
	}
	words := allocate(b, d, 8*len(host)).As(backend.I64)
	ok(b, d.main.arithmetic.Move(words, backend.Of(host)))
	return table, words
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
