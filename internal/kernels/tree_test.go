package kernels_test

import (
	"math"
	"math/bits"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/kernels"
	"github.com/euryale-ml/euryale/internal/sumtree"
	"github.com/euryale-ml/euryale/internal/testing/reference"
	"github.com/euryale-ml/euryale/internal/testing/require"
)

// pairwise adds neighbours level by level, as the documentation of backend.Tree has it.
func pairwise[T float32 | float64](level []T) T {
	for len(level) > 1 {
		var next []T
		for i := 0; i+1 < len(level); i += 2 {
			next = append(next, level[i]+level[i+1])
		}
		if len(level)%2 == 1 {
			next = append(next, level[len(level)-1])
		}
		level = next
	}
	return level[0]
}

// operands returns n sources whose sums depend on the order, in which magnitudes alternate.
func operands[T float32 | float64](n, elements int) [][]T {
	rng := rand.New(rand.NewPCG(uint64(n), 7))
	xs := make([][]T, n)
	for s := range xs {
		for range elements {
			xs[s] = append(xs[s], T(rng.NormFloat64()*math.Exp2(float64(rng.IntN(20)))))
		}
	}
	return xs
}

func TestTreeAddsNeighboursFirst(t *testing.T) {
	const elements = 300 // more than a block
	for _, n := range []int{1, 2, 3, 4, 5, 6, 7, 8, 9, 13, 16, 31, 64, 600} {
		xs := operands[float32](n, elements)
		for _, d := range []backend.DType{backend.F16, backend.BF16, backend.F32} {
			var srcs []backend.Buffer
			want := make([]float32, elements)
			terms := make([][]float32, elements)
			for _, x := range xs {
				src := backend.Of(make([]byte, elements*d.Size())).As(d)
				wide := make([]float32, elements)
				if d == backend.F32 {
					copy(wide, x)
				} else if err := (kernels.Host{}).Cast(src, backend.Of(x)); err != nil {
					t.Fatal(err)
				} else if err := (kernels.Host{}).Cast(backend.Of(wide), src); err != nil {
					t.Fatal(err)
				}
				if d == backend.F32 {
					copy(backend.View[float32](src), x)
				}
				for i, v := range wide {
					terms[i] = append(terms[i], v)
				}
				srcs = append(srcs, src)
			}
			for i := range want {
				want[i] = pairwise(terms[i])
			}
			for _, op := range []backend.ReduceOp{backend.Sum, backend.Avg} {
				result := slices.Clone(want)
				if op == backend.Avg {
					for i := range result {
						result[i] /= float32(n)
					}
				}
				sum := backend.Of(result)
				if d != backend.F32 {
					sum = backend.Of(make([]byte, elements*d.Size())).As(d)
					require.NoError(t, (kernels.Host{}).Cast(sum, backend.Of(result)))
				}
				dst := backend.Of(make([]byte, elements*d.Size())).As(d)
				require.NoError(t, reference.ReduceIn(backend.Tree, op, dst, srcs...))
				require.Check(t, slices.Equal(dst.Bytes(), sum.Bytes()),
					"%v of %d sources of %v is not that of the tree", op, n, d)
			}
		}
	}
}

// The sum of a rank's terms in a tree, and of the ranks' sums, is the sum of all terms.
func TestTreesOfTreesAreTheTree(t *testing.T) {
	const leaves = 16
	xs := operands[float64](leaves, 100)
	add := func(srcs []backend.Buffer) backend.Buffer {
		dst := backend.Of(make([]float64, 100))
		require.NoError(t, reference.ReduceIn(backend.Tree, backend.Sum, dst, srcs...))
		return dst
	}
	var all []backend.Buffer
	for _, x := range xs {
		all = append(all, backend.Of(x))
	}
	want := add(all)
	for i, x := range backend.View[float64](want) {
		terms := make([]float64, leaves)
		for s := range terms {
			terms[s] = xs[s][i]
		}
		if x != pairwise(terms) {
			t.Fatalf("element %d is %v, want %v", i, x, pairwise(terms))
		}
	}
	for _, share := range []int{1, 2, 4, 8} {
		var sums []backend.Buffer
		for some := range slices.Chunk(all, share) {
			sums = append(sums, add(some))
		}
		if got := add(sums); !slices.Equal(got.Bytes(), want.Bytes()) {
			t.Errorf("ranks of %d terms each have another sum than one rank", share)
		}
	}
}

func TestATreeInPlace(t *testing.T) {
	xs := operands[float32](5, 1000)
	var srcs []backend.Buffer
	for _, x := range xs {
		srcs = append(srcs, backend.Of(x))
	}
	want := backend.Of(make([]float32, 1000))
	for _, dst := range []backend.Buffer{want, srcs[3]} {
		require.NoError(t, reference.ReduceIn(backend.Tree, backend.Sum, dst, srcs...))
	}
	require.Check(t, slices.Equal(srcs[3].Bytes(), want.Bytes()), "a sum over one of its sources "+
		"is another one")
	if allocs := testing.AllocsPerRun(10, func() {
		reference.ReduceIn(backend.Tree, backend.Sum, want, srcs...)
	}); allocs > 0 {
		t.Errorf("a tree allocates %v times", allocs)
	}
}

func TestOnlySumsHaveATree(t *testing.T) {
	x := backend.Of(make([]float32, 4))
	err := reference.ReduceIn(backend.Tree, backend.Max, x, x, x, x)
	require.Check(t, err != nil, "a maximum in a tree is no error")
}

// The branches of a tree that ranks with any numbers of terms add up have the sum of all terms.
func TestBranchesAddUpToTheTree(t *testing.T) {
	for n := 1; n <= 40; n++ {
		xs := operands[float32](n, 300)
		var all []backend.Buffer
		for _, x := range xs {
			all = append(all, backend.Of(x))
		}
		add := func(srcs []backend.Buffer) backend.Buffer {
			dst := backend.Of(make([]float32, 300))
			require.NoError(t, reference.ReduceIn(backend.Tree, backend.Sum, dst, srcs...))
			return dst
		}
		want := add(all)
		for ranks := 1; ranks <= min(n, 9); ranks++ {
			var srcs []backend.Buffer
			var terms []int
			first := 0
			for _, share := range backend.Even(n, ranks) {
				branches := sumtree.Branches(nil, first, share, n)
				if most := 2 * bits.Len(uint(n-1)); len(branches) > max(1, most) {
					t.Fatalf("%d terms of %d are %d branches", share, n, len(branches))
				}
				for _, size := range branches {
					srcs = append(srcs, add(all[first:first+size]))
					first += size
				}
				terms = append(terms, branches...)
			}
			for _, dst := range []backend.Buffer{backend.Of(make([]float32, 300)), srcs[0]} {
				require.NoError(t, reference.SumBranches(dst, srcs, terms))
				require.Check(t, slices.Equal(dst.Bytes(), want.Bytes()),
					"%d terms of %d ranks, in branches of %v, have another sum", n, ranks, terms)
			}
		}
	}
	x := backend.Of(make([]float32, 4))
	require.Fails(t, "two branches with the terms of one", reference.SumBranches(x,
		[]backend.Buffer{x, x}, []int{1}), backend.ErrArgument)
}
