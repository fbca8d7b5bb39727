package cuda

import (
	"fmt"
	"testing"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/kernels"
)

// someRows are tables with fewer and more rows than a block does, and indices that a block sees at
// once and in turns.
var someRows = []struct {
	kernels.Rows
	n int
}{
	{kernels.Rows{Before: 1, Count: 7, Width: 300}, 40},
	{kernels.Rows{Before: 3, Count: 5, Width: 2}, 9},
	{kernels.Rows{Before: 2, Count: 1100, Width: 1}, 3000},
	{kernels.Rows{Before: 1, Count: 3, Width: 5}, 5000},
	{kernels.Rows{Before: 1, Count: 4, Width: 8}, 0},
	{kernels.Rows{Before: 1, Count: 9000, Width: 3}, 100},
}

func testRows(t *testing.T, m machine) {
	b := newBench(t, m, 18)
	for i, d := range []backend.DType{backend.F32, backend.F64, backend.BF16, backend.F16} {
		for j, of := range []backend.DType{backend.I32, backend.I64} {
			for l, r := range someRows {
				if slow(m) && (i+j+l)%2 > 0 {
					continue // the other pairs of types are of one source with these
				}
				if d.Size() == 2 {
					r.Width += r.Width % 2
				}
				b.reset(uint64(r.n))
				table, rows, indices := b.alloc(d, r.Before*r.Count*r.Width, 1),
					b.alloc(d, r.Before*r.n*r.Width, 0), b.alloc(of, r.n, 1)
				wrong := (i+j+l)%3 == 0
				for k := range r.n {
					i := b.rnd.IntN(r.Count)
					if b.rnd.IntN(3) == 0 { // many of one
						i = []int{0, r.Count - 1}[b.rnd.IntN(2)]
					}
					if k == r.n/2 && wrong { // out of range
						i = []int{-1, r.Count}[b.rnd.IntN(2)]
					}
					if of == backend.I32 {
						backend.View[int32](indices.host)[k] = int32(i)
					} else {
						backend.View[int64](indices.host)[k] = int64(i)
					}
				}
				name := func(kernel string) string {
					return fmt.Sprintf("%s of %+v %v by %d %v", kernel, r.Rows, d, r.n, of)
				}
				b.run(name("takerows"), rows, func() error {
					return b.device.TakeRows(rows.device, table.device, indices.device, r.Rows)
				}, func() error {
					return b.host.TakeRows(rows.host, table.host, indices.host, r.Rows)
				})
				if d.Size() == 2 { // only taken
					continue
				}
				b.randomise(rows.host)
				b.randomise(table.host)
				b.run(name("putrows"), table, func() error {
					return b.device.PutRows(table.device, rows.device, indices.device, r.Rows)
				}, func() error {
					return b.host.PutRows(table.host, rows.host, indices.host, r.Rows)
				})
				b.run(name("addrows"), table, func() error {
					return b.device.AddRows(table.device, rows.device, indices.device, r.Rows)
				}, func() error {
					return b.host.AddRows(table.host, rows.host, indices.host, r.Rows)
				})
			}
		}
	}
}

// indexed makes every call on n rows.
func indexed(k Kernels, n int) error {
	var err error
	for _, d := range []backend.DType{backend.F32, backend.F64} {
		for _, of := range []backend.DType{backend.I32, backend.I64} {
			x, y, i := device(d, 1<<40, n), device(d, 1<<41, n), device(of, 1<<42, n)
			r := kernels.Rows{Before: 1, Count: n, Width: 1}
			for _, e := range []error{k.TakeRows(y, x, i, r), k.AddRows(x, y, i, r),
				k.PutRows(x, y, i, r)} {
				if e != nil {
					err = e
				}
			}
		}
	}
	return err
}
