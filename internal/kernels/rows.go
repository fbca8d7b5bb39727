package kernels

import (
	"fmt"
	"math"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/workers"
)

// Rows are tables [Before, Count, Width]. A list of n indices names rows of each table: the taken
// rows are [Before, n, Width]. Indices are I32 or I64, and the same for all tables.
type Rows struct {
	Before, Count, Width int
}

// table returns the number of elements of the tables, taken the number of elements of the rows for
// n indices.
func (r *Rows) table() int      { return r.Before * r.Count * r.Width }
func (r *Rows) taken(n int) int { return r.Before * n * r.Width }

// rows checks sizes, lengths and dtypes.
func (c Check) rows(kernel string, r Rows, table, taken, indices backend.Buffer) error {
	if min(r.Before, r.Count, r.Width) < 0 {
		return fmt.Errorf("%w: %s of %+v: sizes are at least 0", backend.ErrArgument, kernel, r)
	}
	if d := table.DType(); d != backend.F32 && d != backend.F64 && (d.Size() != 2 ||
		kernel == "addrows" || r.Width%2 != 0) {
		return fmt.Errorf("%w: %s of %v: want f32 or f64, or, where nothing is added, 16 bits in "+
			"rows of an even width", backend.ErrUnsupported, kernel, d)
	}
	if d := indices.DType(); d != backend.I32 && d != backend.I64 {
		return fmt.Errorf("%w: %s by indices of %v: want i32 or i64", backend.ErrUnsupported,
			kernel, d)
	}
	if n := indices.Len(); taken.DType() != table.DType() || table.Len() != r.table() ||
		taken.Len() != r.taken(n) {
		return fmt.Errorf("%w: %s of %+v by %d indices: the table has %d %v, want %d; the rows "+
			"have %d %v, want %d", backend.ErrArgument,
			kernel, r, n, table.Len(), table.DType(), r.table(), taken.Len(), taken.DType(),
			r.taken(n))
	}
	return c.checkDevice(kernel, table, taken, indices)
}

// TakeRows checks its arguments.
func (c Check) TakeRows(dst, src, indices backend.Buffer, r Rows) error {
	return c.rows("takerows", r, src, dst, indices)
}

// AddRows checks its arguments.
func (c Check) AddRows(dst, src, indices backend.Buffer, r Rows) error {
	return c.rows("addrows", r, dst, src, indices)
}

// PutRows checks its arguments.
func (c Check) PutRows(dst, src, indices backend.Buffer, r Rows) error {
	return c.rows("putrows", r, dst, src, indices)
}

// TakeRows copies rows of a table:
//
//	for b, k { dst[b,k,:] = src[b,indices[k],:] }
//
// A row whose index is out of range is NaN. Elements of 16 bits must be pairs in rows, of PutRows,
// too.
func (h Host) TakeRows(dst, src, indices backend.Buffer, r Rows) error {
	return h.index((Check{}).TakeRows(dst, src, indices, r), takes, src, dst, indices, r)
}

// AddRows adds up rows in a table, in the order of the indices: it is the gradient of TakeRows.
//
//	dst = 0; for b, k { dst[b,indices[k],:] += src[b,k,:] }
//
// If an index is out of range, which could have meant any row, all of dst is NaN.
func (h Host) AddRows(dst, src, indices backend.Buffer, r Rows) error {
	return h.index((Check{}).AddRows(dst, src, indices, r), adds, dst, src, indices, r)
}

// PutRows writes rows into a table, in the order of the indices. Other rows stay.
//
//	for b, k { dst[b,indices[k],:] = src[b,k,:] }
//
// If an index is out of range, which could have meant any row, all of dst is NaN.
func (h Host) PutRows(dst, src, indices backend.Buffer, r Rows) error {
	return h.index((Check{}).PutRows(dst, src, indices, r), puts, dst, src, indices, r)
}

// index runs one of the three, unless wrong says that its arguments are.
func (h Host) index(wrong error, way indexWay, table, rows, indices backend.Buffer, r Rows) error {
	switch {
	case wrong != nil:
		return wrong
	case table.DType() == backend.F32:
		runRows(h.pool(), way, float32(math.NaN()), table, rows, indices, r)
	case table.DType() == backend.F64:
		runRows(h.pool(), way, math.NaN(), table, rows, indices, r)
	case table.DType() == backend.BF16:
		runRows[backend.BFloat16](h.pool(), way, 0x7fc0, table, rows, indices, r)
	default:
		runRows[backend.Float16](h.pool(), way, 0x7e00, table, rows, indices, r)
	}
	return nil
}

type indexWay uint8

const (
	takes indexWay = iota
	adds
	puts
)

// indexing is the task of TakeRows, AddRows and PutRows. A part of AddRows is some columns of a
// table, so that each element is added up by one worker, in order: all columns, if there is one
// worker. A part of PutRows is a table, and a part of TakeRows some rows.
type indexing[T float | half] struct {
	Rows
	way         indexWay
	nan         T
	rows, table []T
	i32         []int32 // the indices, as one or the other
	i64         []int64
	columns     int // of a part
	perTable    int // parts
}

const (
	columnsOfPart = 64      // four cache lines of f32
	takenOfPart   = 1 << 15 // elements: about 10 us
)

func runRows[T float | half](pool *workers.Pool, way indexWay, nan T, table, rows,
	indices backend.Buffer, r Rows) {
	t := indexing[T]{Rows: r, way: way, nan: nan, table: backend.View[T](table),
		rows: backend.View[T](rows)}
	if indices.DType() == backend.I32 {
		t.i32 = backend.View[int32](indices)
	} else {
		t.i64 = backend.View[int64](indices)
	}
	if t.columns = columnsOfPart; pool.Size() == 1 {
		t.columns = max(r.Width, 1)
	}
	t.perTable = (r.Width + t.columns - 1) / t.columns
	switch way {
	case puts:
		t.perTable = 1
	case takes:
		t.perTable = (indices.Len() + t.perPart() - 1) / t.perPart()
	}
	workers.Run(pool, r.Before*t.perTable, t)
}

// perPart returns how many rows a part takes.
func (t *indexing[T]) perPart() int { return max(takenOfPart/max(t.Width, 1), 1) }

// at returns index k, -1 if it is out of range.
func (t *indexing[T]) at(k int) int {
	var i int64
	if t.i32 != nil {
		i = int64(t.i32[k])
	} else {
		i = t.i64[k]
	}
	if i < 0 || i >= int64(t.Count) {
		return -1
	}
	return int(i)
}

// Run implements [workers.Task].
func (t *indexing[T]) Run(part, _ int) {
	n, b := len(t.i32)+len(t.i64), part/t.perTable
	table, rows := t.table[b*t.Count*t.Width:][:t.Count*t.Width], t.rows[b*n*t.Width:][:n*t.Width]
	if part %= t.perTable; t.way == adds {
		t.addColumns(table, rows, part*t.columns, min((part+1)*t.columns, t.Width))
		return
	}
	if t.way == puts {
		t.putRows(table, rows)
		return
	}
	for k := part * t.perPart(); k < min((part+1)*t.perPart(), n); k++ {
		row := rows[k*t.Width:][:t.Width]
		if at := t.at(k); at >= 0 {
			copy(row, table[at*t.Width:])
		} else {
			t.poison(row)
		}
	}
}

// poison makes numbers NaN, since a wrong index may have meant each of them.
func (t *indexing[T]) poison(numbers []T) {
	for i := range numbers {
		numbers[i] = t.nan
	}
}

// putRows writes rows into a table.
func (t *indexing[T]) putRows(table, rows []T) {
	for k := range len(t.i32) + len(t.i64) {
		at := t.at(k)
		if at < 0 {
			t.poison(table)
			return
		}
		copy(table[at*t.Width:], rows[k*t.Width:][:t.Width])
	}
}

// addColumns adds columns first to end of rows to those of a table.
func (t *indexing[T]) addColumns(table, rows []T, first, end int) {
	for i := range t.Count {
		clear(table[i*t.Width+first : i*t.Width+end])
	}
	for k := range len(t.i32) + len(t.i64) {
		at := t.at(k)
		if at < 0 {
			for i := range t.Count {
				t.poison(table[i*t.Width+first : i*t.Width+end])
			}
			return
		}
		sum, row := table[at*t.Width+first:at*t.Width+end], rows[k*t.Width+first:k*t.Width+end]
		for i, x := range row {
			sum[i] += x
		}
	}
}
