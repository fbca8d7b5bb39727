package backendtest

import (
	"encoding/binary"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/testing/require"
)

// The table of what every kind means, by hand, for three ranks and chunks of
// one byte or splits 2, 0, 1.
func TestOracleKnowsTheKinds(t *testing.T) {
	splits := []int{2, 0, 1}
	cases := []struct {
		what  backend.Collective
		count int
		srcs  []string
		wants []string
	}{
		{backend.Collective{Kind: backend.AllReduce}, 2, []string{"\x01\x02", "\x03\x04",
			"\xff\x05"}, []string{"\x03\x0b", "\x03\x0b", "\x03\x0b"}},
		{backend.Collective{Kind: backend.ReduceScatter, Op: backend.Max}, 1,
			[]string{"adg", "bcz", "abc"}, []string{"b", "d", "z"}},
		{backend.Collective{Kind: backend.ReduceScatter, Op: backend.Max, Splits: splits}, 3,
			[]string{"adg", "bcz", "abc"}, []string{"bd", "", "z"}},
		{backend.Collective{Kind: backend.AllGather}, 1, []string{"a", "b", "c"},
			[]string{"abc", "abc", "abc"}},
		{backend.Collective{Kind: backend.AllGather, Splits: splits}, 3, []string{"ab", "", "c"},
			[]string{"abc", "abc", "abc"}},
		{backend.Collective{Kind: backend.AllToAll}, 1, []string{"abc", "def", "ghi"},
			[]string{"adg", "beh", "cfi"}},
		{backend.Collective{Kind: backend.AllToAll, Splits: []int{0, 1, 2, 1, 0, 0, 0, 0, 1}}, 5,
			[]string{"abc", "d", "e"}, []string{"d", "a", "bce"}},
		{backend.Collective{Kind: backend.Broadcast, Root: 1}, 2, []string{"-", "ab", "-"},
			[]string{"ab", "ab", "ab"}},
		{backend.Collective{Kind: backend.Reduce, Root: 2, Op: backend.Min}, 2,
			[]string{"az", "by", "cx"}, []string{"-", "-", "ax"}},
		{backend.Collective{Kind: backend.Gather, Root: 1}, 1, []string{"a", "b", "c"},
			[]string{"-", "abc", "-"}},
		{backend.Collective{Kind: backend.Scatter, Root: 2}, 1, []string{"-", "-", "abc"},
			[]string{"a", "b", "c"}},
		{backend.Collective{Kind: backend.Scatter, Root: 2, Splits: splits}, 3,
			[]string{"-", "-", "abc"}, []string{"ab", "", "c"}},
	}
	for _, c := range cases {
		srcs := make([][]byte, 3)
		for r, s := range c.srcs {
			if s != "-" {
				srcs[r] = []byte(s)
			}
			if n, _ := lengths(c.what, r, 3, c.count); n != len(srcs[r]) && !(n < 0 && s == "-") {
				t.Errorf("%v: the source of rank %d has length %d, want %d", c.what, r, n, len(s))
			}
		}
		for r, got := range expected(c.what, 3, c.count, backend.U8, srcs) {
			want := c.wants[r]
			if want == "-" {
				want = ""
			}
			require.Equal(t, fmt.Sprintf("%v: rank %d gets", c.what, r), string(got), want)
			if _, n := lengths(c.what, r, 3, c.count); n != len(want) &&
				!(n < 0 && c.wants[r] == "-") {
				t.Errorf("%v: the destination of rank %d has length %d, want %d", c.what, r, n,
					len(want))
			}
		}
	}
}

func TestOracleKnowsTheReductions(t *testing.T) {
	nan, inf, zero := math.NaN(), math.Inf(1), math.Copysign(0, -1)
	cases := []struct {
		op    backend.ReduceOp
		d     backend.DType
		xs    []float64
		want  float64
		about string
	}{
		{backend.Sum, backend.F32, []float64{0x1p24, 1, 1}, 0x1p24, "in rank order"},
		{backend.Sum, backend.F32, []float64{1, 1, 0x1p24}, 0x1p24 + 2, "in rank order"},
		{backend.Sum, backend.F16, []float64{2048, 1, 1}, 2050, "in 32 bits"},
		{backend.Sum, backend.BF16, []float64{256, 1, 0}, 256, "half to even, down"},
		{backend.Sum, backend.BF16, []float64{258, 1, 0}, 260, "half to even, up"},
		{backend.Avg, backend.F16, []float64{40000, 40000, 40000}, 40000, "without overflow"},
		{backend.Sum, backend.F16, []float64{40000, 40000, 0}, inf, "overflows"},
		{backend.Avg, backend.F64, []float64{1, 2, 4}, 7.0 / 3, "divided once"},
		{backend.Prod, backend.F64, []float64{-2, 3, 0.5}, -3, ""},
		{backend.Min, backend.F32, []float64{1, nan, -1}, nan, "NaN wins"},
		{backend.Max, backend.F32, []float64{1, -1, nan}, nan, "NaN wins"},
		{backend.Min, backend.F64, []float64{0, zero, 0}, zero, "-0 before +0"},
		{backend.Max, backend.F64, []float64{zero, 0, zero}, 0, "-0 before +0"},
		{backend.Max, backend.BF16, []float64{zero, zero, zero}, zero, "-0 stays"},
	}
	for _, c := range cases {
		var xs [][]byte
		for _, x := range c.xs {
			xs = append(xs, appendFloat(nil, c.d, x))
		}
		err := differ(c.d, fold(backend.Collective{Op: c.op}, c.d, xs),
			appendFloat(nil, c.d, c.want))
		require.Check(t, err == nil, "%v of %v %v, %s: %v", c.op, c.xs, c.d, c.about, err)
	}
}

func TestOracleAddsNeighboursInATree(t *testing.T) {
	const half = 0x1p-24 // of a unit in the last place of 1
	for _, c := range []struct {
		xs              []float64
		inOrder, inTree float64
	}{
		{[]float64{1, half, half, half}, 1, 1 + 2*half},
		{[]float64{1, half, half}, 1, 1},
		{[]float64{1, half, half, half, half, -1}, 0, 3 * half},
	} {
		var xs [][]byte
		for _, x := range c.xs {
			xs = append(xs, appendFloat(nil, backend.F32, x))
		}
		for a, want := range map[backend.Association]float64{backend.InRankOrder: c.inOrder,
			backend.Tree: c.inTree} {
			err := differ(backend.F32, fold(backend.Collective{Association: a}, backend.F32, xs),
				appendFloat(nil, backend.F32, want))
			require.Check(t, err == nil, "%v of %v: %v", a, c.xs, err)
		}
	}
}

func TestOracleWrapsIntegers(t *testing.T) {
	le := binary.LittleEndian
	cases := []struct {
		op   backend.ReduceOp
		xs   []int64
		d    backend.DType
		want int64
	}{
		{backend.Sum, []int64{math.MaxInt32, 1}, backend.I32, math.MinInt32},
		{backend.Sum, []int64{math.MaxInt64, 1}, backend.I64, math.MinInt64},
		{backend.Prod, []int64{16, 17}, backend.U8, 16},
		{backend.Avg, []int64{-3, 0}, backend.I32, -1},
		{backend.Avg, []int64{200, 100}, backend.U8, 22},
		{backend.Max, []int64{-1, 1}, backend.I64, 1},
		{backend.Max, []int64{-1, 1}, backend.U8, 255},
	}
	for _, c := range cases {
		var xs [][]byte
		for _, x := range c.xs {
			xs = append(xs, le.AppendUint64(nil, uint64(x))[:c.d.Size()])
		}
		want := le.AppendUint64(nil, uint64(c.want))[:c.d.Size()]
		err := differ(c.d, fold(backend.Collective{Op: c.op}, c.d, xs), want)
		require.Check(t, err == nil, "%v of %v %v: %v", c.op, c.xs, c.d, err)
	}
}

func TestPairwiseCoversEveryPair(t *testing.T) {
	dims := []int{3, 1, 4, 2, 5}
	rows := pairwise(dims)
	for a := range dims {
		for b := a + 1; b < len(dims); b++ {
			for x := range dims[a] {
				for y := range dims[b] {
					if !slices.ContainsFunc(rows, func(r []int) bool {
						return r[a] == x && r[b] == y
					}) {
						t.Errorf("no row with %d in column %d and %d in column %d", x, a, y, b)
					}
				}
			}
		}
	}
	require.Check(t, len(rows) <= 40, "%d rows, want far fewer than the 120 of the product",
		len(rows))
}

func TestProductHasEveryRowOnce(t *testing.T) {
	// AllReduce: dtypes x sizes x in place x ops x algorithms.
	d := dims(4)
	want := d[colDType] * d[colSize] * d[colInPlace] * d[colOp] * d[colAlgorithm]
	seen := map[[5]int]bool{}
	for _, row := range product(4) {
		if row[colKind] == 0 {
			seen[[5]int{row[colDType], row[colSize], row[colInPlace], row[colOp],
				row[colAlgorithm]}] = true
		}
		for col, v := range row {
			if v < 0 || v >= d[col] {
				t.Fatalf("column %d is %d, want less than %d", col, v, d[col])
			}
		}
	}
	require.Check(t, len(seen) == want, "%d rows of all-reduce, want %d", len(seen), want)
}

func TestDivideGivesValidCalls(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	for _, kind := range backend.Kinds() {
		for mode := range splitModes {
			for _, P := range []int{1, 2, 3, 8} {
				for _, n := range sizes(P) {
					c := backend.Collective{Kind: kind}
					var count int
					c.Splits, count = divide(kind, mode, n, P, rng)
					for r := range P {
						src, dst := lengths(c, r, P, count)
						got, err := c.Check(r, P, backend.Of(make([]byte, max(dst, 0))),
							backend.Of(make([]byte, max(src, 0))))
						require.That(t, err == nil && got == count,
							"%v, mode %d, %d elements, rank %d of %d: count %d, want %d, error %v",
							c, mode, n, r, P, got, count, err)
					}
				}
			}
		}
	}
}
