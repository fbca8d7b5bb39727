package kernels

import (
	"math"
	"slices"
	"testing"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/testing/require"
)

func TestRowsAreTakenAndAdded(t *testing.T) {
	r := Rows{Before: 2, Count: 3, Width: 2}
	table := []float64{1, 2, 3, 4, 5, 6, -1, -2, -3, -4, -5, -6}
	for name, indices := range map[string]backend.Buffer{"i64": backend.Of([]int64{2, 0, 2, 3}),
		"i32": backend.Of([]int32{2, 0, 2, -1})} {
		rows := make([]float64, 16)
		require.NoError(t, (Host{}).TakeRows(backend.Of(rows), backend.Of(table), indices, r))
		nan := math.NaN()
		want := []float64{5, 6, 1, 2, 5, 6, nan, nan, -5, -6, -1, -2, -5, -6, nan, nan}
		require.Check(t, slices.EqualFunc(rows, want, func(a, b float64) bool {
			return a == b || a != a && b != b
		}), "%s: the rows are %v, want %v", name, rows, want)
		back := []float64{9, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9}
		three := slices.Concat(rows[:6], rows[8:14])
		require.NoError(t, (Host{}).AddRows(backend.Of(back), backend.Of(three), indices.Slice(0,
			3), r))
		if want := []float64{1, 2, 0, 0, 10, 12, -1, -2, 0, 0, -10, -12}; !slices.Equal(
			back, want) {
			t.Errorf("%s: the sums are %v, want %v", name, back, want)
		}
	}
}

// TestAWrongIndexMakesTheTableNaN: it could have named any row, which none may hide.
func TestAWrongIndexMakesTheTableNaN(t *testing.T) {
	r := Rows{Before: 2, Count: 3, Width: 70}
	for _, wrong := range []int64{-1, 3, math.MaxInt64, math.MinInt64} {
		for at := range 3 {
			list := []int64{0, 1, 2}
			list[at] = wrong
			for kernel, run := range map[string]func(dst, src, i backend.Buffer, r Rows) error{
				"add": Host{}.AddRows, "put": Host{}.PutRows} {
				table, rows := make([]float32, 2*3*70), make([]float32, 2*3*70)
				require.NoError(t, run(backend.Of(table), backend.Of(rows), backend.Of(list), r))
				if i := slices.IndexFunc(table, func(x float32) bool { return x == x }); i >= 0 {
					t.Errorf("%s by %v: element %d is %v", kernel, list, i, table[i])
				}
			}
		}
	}
}

func TestRowsArePutInOrderAndOthersStay(t *testing.T) {
	r := Rows{Before: 2, Count: 3, Width: 2}
	for name, indices := range map[string]backend.Buffer{"i64": backend.Of([]int64{2, 0, 2, 2}),
		"i32": backend.Of([]int32{2, 0, 2, 2})} {
		table, rows := []float32{9, 9, 9, 9, 9, 9, 8, 8, 8, 8, 8, 8}, make([]float32, 16)
		for i := range rows {
			rows[i] = float32(i)
		}
		require.NoError(t, (Host{}).PutRows(backend.Of(table), backend.Of(rows), indices, r))
		want := []float32{2, 3, 9, 9, 6, 7, 10, 11, 8, 8, 14, 15}
		require.Check(t, slices.Equal(table, want), "%s: the table is %v, want %v", name, table,
			want)
	}
}

// Sums are in the order of the indices, in the type of the elements.
func TestRowsAreAddedInOrder(t *testing.T) {
	sum := make([]float32, 1)
	err := Host{}.AddRows(backend.Of(sum), backend.Of([]float32{1, 1 << 24, 1}),
		backend.Of([]int64{0, 0, 0}), Rows{1, 1, 1})
	require.Check(t, err == nil && sum[0] == 1<<24, "%v, %v", sum, err)
}

func TestRowsThatDoNotFitAreRefused(t *testing.T) {
	x, i := backend.Of(make([]float32, 6)), backend.Of(make([]int64, 2))
	r := Rows{Before: 1, Count: 3, Width: 2}
	require.Fails(t, "too many rows", (Host{}).TakeRows(x, x, i, r), backend.ErrArgument)
	require.Fails(t, "indices of f32", (Host{}).AddRows(x, x.Slice(0, 4), x.Slice(0, 2), r),
		backend.ErrUnsupported)
	halves := backend.Of(make([]backend.BFloat16, 6))
	require.Fails(t, "sums of 16 bits", (Host{}).AddRows(halves, halves.Slice(0, 4), i, r),
		backend.ErrUnsupported)
	require.Fails(t, "rows of one of 16 bits", (Host{}).TakeRows(halves.Slice(0, 2), halves, i,
		Rows{1, 6, 1}), backend.ErrUnsupported)
	require.Fails(t, "rows of i64", (Host{}).AddRows(i, i, i, Rows{1, 2, 1}),
		backend.ErrUnsupported)
	r.Width = -2
	require.Fails(t, "a negative width", (Host{}).TakeRows(x.Slice(0, 4), x, i, r),
		backend.ErrArgument)
}
