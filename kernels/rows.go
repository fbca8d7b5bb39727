package kernels

import (
	"fmt"
	"math"

	"github.com/euryale-ml/euryale/backend"
)

// Rows are tables [Before, Count, Width], of each of which the rows that a list of n indices names are
// taken: they are [Before, n, Width]. Indices are I32 or I64, and the same for all tables.
type Rows struct {
	Before, Count, Width int
}

// table returns the number of elements of the tables, taken that of the rows for n indices.
func (r *Rows) table() int      { return r.Before * r.Count * r.Width }
func (r *Rows) taken(n int) int { return r.Before * n * r.Width }

// rows checks sizes, lengths and dtypes.
func (c Check) rows(kernel string, r Rows, table, taken, indices backend.Buffer) error {
	if min(r.Before, r.Count, r.Width) < 0 {
		return fmt.Errorf("%w: %s of %+v: sizes are at least 0", backend.ErrArgument, kernel, r)
	}
	if d := table.DType(); d != backend.F32 && d != backend.F64 {
		return fmt.Errorf("%w: %s of %v: of f32 and f64 only", backend.ErrUnsupported, kernel, d)
	}
	if d := indices.DType(); d != backend.I32 && d != backend.I64 {
		return fmt.Errorf("%w: %s by indices of %v: want i32 or i64", backend.ErrUnsupported, kernel, d)
	}
	if n := indices.Len(); taken.DType() != table.DType() || table.Len() != r.table() || taken.Len() != r.taken(n) {
		return fmt.Errorf("%w: %s of %+v by %d indices: the table has %d %v, want %d; the rows have %d %v, want %d", backend.ErrArgument,
			kernel, r, n, table.Len(), table.DType(), r.table(), taken.Len(), taken.DType(), r.taken(n))
	}
	return c.place(kernel, table, taken, indices)
}

// TakeRows checks its arguments.
func (c Check) TakeRows(dst, src, indices backend.Buffer, r Rows) error {
	return c.rows("takerows", r, src, dst, indices)
}

// AddRows checks its arguments.
func (c Check) AddRows(dst, src, indices backend.Buffer, r Rows) error {
	return c.rows("addrows", r, dst, src, indices)
}

// TakeRows copies rows of a table:
//
//	for b, k { dst[b,k,:] = src[b,indices[k],:] }
//
// A row whose index is out of range is NaN.
func (Host) TakeRows(dst, src, indices backend.Buffer, r Rows) error {
	if err := (Check{}).TakeRows(dst, src, indices, r); err != nil {
		return err
	}
	if dst.DType() == backend.F32 {
		takeRows[float32](dst, src, r.numbers(indices), &r)
	} else {
		takeRows[float64](dst, src, r.numbers(indices), &r)
	}
	return nil
}

// AddRows adds rows up to a table, in the order of the indices: it is the gradient of TakeRows.
//
//	dst = 0; for b, k { dst[b,indices[k],:] += src[b,k,:] }
//
// A row whose index is out of range is left out.
func (Host) AddRows(dst, src, indices backend.Buffer, r Rows) error {
	if err := (Check{}).AddRows(dst, src, indices, r); err != nil {
		return err
	}
	if dst.DType() == backend.F32 {
		addRows[float32](dst, src, r.numbers(indices), &r)
	} else {
		addRows[float64](dst, src, r.numbers(indices), &r)
	}
	return nil
}

// list is indices: how many, and at(k), -1 where index k is out of range.
type list struct {
	n  int
	at func(k int) int
}

func (r *Rows) numbers(indices backend.Buffer) list {
	if indices.DType() == backend.I32 {
		return listOf(backend.View[int32](indices), r.Count)
	}
	return listOf(backend.View[int64](indices), r.Count)
}

func listOf[I int32 | int64](indices []I, count int) list {
	return list{len(indices), func(k int) int {
		if i := int64(indices[k]); i >= 0 && i < int64(count) {
			return int(i)
		}
		return -1
	}}
}

func takeRows[T float](dst, src backend.Buffer, indices list, r *Rows) {
	to, from := backend.View[T](dst), backend.View[T](src)
	for b := range r.Before {
		for k := range indices.n {
			row := to[(b*indices.n+k)*r.Width:][:r.Width]
			if at := indices.at(k); at >= 0 {
				copy(row, from[(b*r.Count+at)*r.Width:])
				continue
			}
			for i := range row {
				row[i] = T(math.NaN())
			}
		}
	}
}

func addRows[T float](dst, src backend.Buffer, indices list, r *Rows) {
	to, from := backend.View[T](dst), backend.View[T](src)
	clear(to)
	for b := range r.Before {
		for k := range indices.n {
			at := indices.at(k)
			if at < 0 {
				continue
			}
			sum, row := to[(b*r.Count+at)*r.Width:][:r.Width], from[(b*indices.n+k)*r.Width:]
			for i := range sum {
				sum[i] += row[i]
			}
		}
	}
}
