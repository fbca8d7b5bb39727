package backend_test

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/backend/backendtest"
	"github.com/euryale-ml/euryale/internal/testing/reference"
	"github.com/euryale-ml/euryale/internal/testing/require"
)

// P is the number of ranks in most tests here.
const P = 3

// uneven returns splits for a kind among three ranks, or nil if it takes none.
func uneven(k backend.Kind) []int {
	switch k {
	case backend.AllReduce, backend.Broadcast, backend.Reduce:
		return nil
	case backend.AllToAll:
		return []int{1, 2, 0, 3, 0, 1, 0, 0, 4}
	}
	return []int{2, 0, 3}
}

// lengthRule is what a kind's ranks 0, 1, 2 pass, where 1 is the root: the lengths of sources and
// destinations with chunks or operands of 4, and with the uneven splits; -1 where a buffer is
// ignored.
type lengthRule struct {
	kind                 backend.Kind
	src, dst             [P]int
	unevenSrc, unevenDst [P]int
	unevenCount          int
}

func lengthRules() []lengthRule {
	return []lengthRule{
		{backend.AllReduce, [P]int{4, 4, 4}, [P]int{4, 4, 4}, [P]int{}, [P]int{}, 0},
		{backend.ReduceScatter, [P]int{12, 12, 12}, [P]int{4, 4, 4}, [P]int{5, 5, 5},
			[P]int{2, 0, 3}, 5},
		{backend.AllGather, [P]int{4, 4, 4}, [P]int{12, 12, 12}, [P]int{2, 0, 3},
			[P]int{5, 5, 5}, 5},
		{backend.AllToAll, [P]int{12, 12, 12}, [P]int{12, 12, 12}, [P]int{3, 4, 4},
			[P]int{4, 2, 5}, 11},
		{backend.Broadcast, [P]int{-1, 4, -1}, [P]int{4, 4, 4}, [P]int{}, [P]int{}, 0},
		{backend.Reduce, [P]int{4, 4, 4}, [P]int{-1, 4, -1}, [P]int{}, [P]int{}, 0},
		{backend.Gather, [P]int{4, 4, 4}, [P]int{-1, 12, -1}, [P]int{2, 0, 3},
			[P]int{-1, 5, -1}, 5},
		{backend.Scatter, [P]int{-1, 12, -1}, [P]int{4, 4, 4}, [P]int{-1, 5, -1},
			[P]int{2, 0, 3}, 5},
	}
}

// lengths returns what rank r passes by the lengthRules, with any root.
func lengths(c backend.Collective, r int) (src, dst int) {
	rules := lengthRules()
	k := rules[slices.IndexFunc(rules, func(k lengthRule) bool { return k.kind == c.Kind })]
	if c.Splits != nil {
		k.src, k.dst = k.unevenSrc, k.unevenDst
	}
	of := func(lengths [P]int) int {
		switch {
		case lengths[0] >= 0:
			return lengths[r]
		case r == c.Root:
			return lengths[1]
		}
		return -1
	}
	return of(k.src), of(k.dst)
}

func TestLengthRules(t *testing.T) {
	for _, k := range lengthRules() {
		c := backend.Collective{Kind: k.kind, Root: 1}
		checkLengths(t, c, 4, k.src, k.dst)
		if c.Splits = uneven(k.kind); c.Splits != nil {
			checkLengths(t, c, k.unevenCount, k.unevenSrc, k.unevenDst)
		}
	}
}

// checkLengths passes the right lengths, and then lengths that are off by one.
func checkLengths(t *testing.T, c backend.Collective, count int, src, dst [P]int) {
	t.Helper()
	check := func(r, dst, src int) (int, error) {
		return c.Check(r, P, backend.Of(make([]float32, max(dst, 0))),
			backend.Of(make([]float32, max(src, 0))))
	}
	for r := range P {
		require.Equal(t, fmt.Sprintf("%v, rank %d: count", c, r),
			require.Value(check(r, dst[r], src[r]))(t), count)
		for _, off := range []int{-1, 1} {
			if src[r]+off >= 0 && src[r] >= 0 && dst[r] >= 0 {
				require.Fails(t, fmt.Sprintf("%v, rank %d, source of %d", c, r, src[r]+off),
					require.Err(check(r, dst[r], src[r]+off)), backend.ErrArgument)
			}
			if dst[r]+off >= 0 && dst[r] >= 0 && src[r] >= 0 {
				require.Fails(t, fmt.Sprintf("%v, rank %d, destination of %d", c, r, dst[r]+off),
					require.Err(check(r, dst[r]+off, src[r])), backend.ErrArgument)
			}
		}
		// Buffers that are ignored may be anything.
		if src[r] < 0 {
			src[r] = 17
		}
		if dst[r] < 0 {
			dst[r] = 19
		}
		require.Equal(t, fmt.Sprintf("%v, rank %d, ignored buffers in use: count", c, r),
			require.Value(check(r, dst[r], src[r]))(t), count)
	}
}

func TestInPlaceIsAllowedAtOnePlace(t *testing.T) {
	mem := make([]float32, 64)
	for _, kind := range backend.Kinds() {
		for _, splits := range [][]int{nil, uneven(kind)} {
			c := backend.Collective{Kind: kind, Splits: splits}
			for r := range P {
				count := 4
				if splits != nil {
					count = total(splits)
				}
				nsrc, ndst := lengths(c, r)
				if nsrc <= 0 || ndst <= 0 {
					continue // nothing can overlap
				}
				lo, _ := c.Chunk(r, P, count)
				for at := range 40 {
					large, small := backend.Of(mem[20:20+max(nsrc, ndst)]),
						backend.Of(mem[at:at+min(nsrc, ndst)])
					dst, src := small, large
					if ndst > nsrc {
						dst, src = large, small
					}
					_, err := c.Check(r, P, dst, src)
					apart := at+small.Len() <= 20 || at >= 20+large.Len()
					inPlace := at == 20+lo && kind != backend.AllToAll
					if (err == nil) != (apart || inPlace) {
						t.Errorf("%v, rank %d: %d elements at %d, %d at 20: error %v", c, r,
							small.Len(), at, large.Len(), err)
					}
				}
			}
		}
	}
}

func total(xs []int) (n int) {
	for _, x := range xs {
		n += x
	}
	return n
}

func TestAllToAllOfOneRankMayBeInPlace(t *testing.T) {
	x := backend.Of(make([]float32, 4))
	c := backend.Collective{Kind: backend.AllToAll}
	require.Report(t, require.Err(c.Check(0, 1, x, x)))
	require.Fails(t, "shifted", require.Err(c.Check(0, 1, x.Slice(1, 3), x.Slice(0, 2))),
		backend.ErrArgument)
}

func TestSplitsThatOverflowAreRefused(t *testing.T) {
	// the sum wraps to 0
	c := backend.Collective{Kind: backend.ReduceScatter, Splits: []int{math.MaxInt, math.MaxInt, 2}}
	require.Fails(t, "Check",
		require.Err(c.Check(2, P, backend.Of(make([]byte, 2)), backend.Of([]byte{}))),
		backend.ErrArgument)
}

func TestChunksFillTheOperand(t *testing.T) {
	for _, splits := range [][]int{nil, {2, 0, 3}} {
		c, count, at := backend.Collective{Kind: backend.AllGather, Splits: splits}, 4, 0
		for r := range P {
			lo, hi := c.Chunk(r, P, count)
			require.Check(t, lo == at && hi >= lo,
				"splits %v: the chunk of rank %d is %d to %d, want it to begin at %d", splits, r,
				lo, hi, at)
			at = hi
		}
		require.Equal(t, fmt.Sprintf("splits %v: chunks end", splits), at,
			map[bool]int{true: 12, false: 5}[splits == nil])
	}
}

func TestPairsFillBothOperands(t *testing.T) {
	for _, splits := range [][]int{nil, uneven(backend.AllToAll)} {
		c := backend.Collective{Kind: backend.AllToAll, Splits: splits}
		for r := range P {
			nsrc, ndst := lengths(c, r)
			sent, received := 0, 0
			for p := range P {
				n, from, _ := c.Pair(r, p, P, 4)
				require.Equal(t, fmt.Sprintf("rank %d sends to %d from", r, p), from, sent)
				sent += n
				n, _, to := c.Pair(p, r, P, 4)
				require.Equal(t, fmt.Sprintf("rank %d receives from %d", r, p), to, received)
				received += n
			}
			require.Check(t, sent == nsrc && received == ndst,
				"rank %d sends %d of %d and receives %d of %d", r, sent, nsrc, received, ndst)
		}
	}
}

func TestOnlySumsOfFloatsTravelIn16Bits(t *testing.T) {
	x, y := backend.Of(make([]float32, 4)), backend.Of(make([]float64, 4))
	good := backend.Collective{Kind: backend.AllReduce, Op: backend.Avg, AllowHalf: backend.BF16}
	n, err := good.Check(0, 2, x, x)
	require.Check(t, err == nil && n == 4 && good.String() == "allreduce(avg, as bf16)",
		"%v of %d: %v", good, n, err)
	for name, test := range map[string]struct {
		change func(c *backend.Collective)
		x      backend.Buffer
	}{
		"max":            {func(c *backend.Collective) { c.Op = backend.Max }, x},
		"reduce-scatter": {func(c *backend.Collective) { c.Kind = backend.ReduceScatter }, x},
		"as f32":         {func(c *backend.Collective) { c.AllowHalf = backend.F32 }, x},
		"of f64":         {func(*backend.Collective) {}, y},
	} {
		c := good
		test.change(&c)
		require.Fails(t, name, require.Err(c.Check(0, 1, test.x, test.x)), backend.ErrArgument)
	}
}

func TestEvenIsEven(t *testing.T) {
	for size := 1; size < 10; size++ {
		for n := range 40 {
			splits := backend.Even(n, size)
			if len(splits) != size || total(splits) != n || splits[0]-splits[size-1] > 1 {
				t.Errorf("Even(%d, %d) = %v", n, size, splits)
			}
			for r := 1; r < size; r++ {
				if splits[r] > splits[r-1] {
					t.Errorf("Even(%d, %d) = %v: the first ranks get more", n, size, splits)
				}
			}
		}
	}
}

// TestAdjointIsTheAdjoint checks that the sum over ranks of <A x, y> equals that of
// <x, A' y>, on small integers, where it is exact.
func TestAdjointIsTheAdjoint(t *testing.T) {
	for _, kind := range backend.Kinds() {
		for _, op := range []backend.ReduceOp{backend.Sum, backend.Avg} {
			for _, splits := range [][]int{nil, uneven(kind)} {
				for root := range P {
					c := backend.Collective{Kind: kind, Op: op, Root: root, Splits: splits}
					err := identity(t, c)
					require.Check(t, err == nil, "%v: %v", c, err)
				}
			}
		}
	}
}

func identity(t *testing.T, c backend.Collective) error {
	adj, scale, err := c.Adjoint(P)
	if err != nil {
		return err
	}
	var forward, backward [P]float64
	backendtest.Each(t, group(), func(comm backend.Communicator) error {
		r := comm.Rank()
		nsrc, ndst := lengths(c, r)
		x, y := integers(nsrc, r), integers(ndst, r+P)
		ax, ay := make([]float64, max(ndst, 0)), make([]float64, max(nsrc, 0))
		if err := backend.Run(comm, c, backend.Of(ax), backend.Of(x)); err != nil {
			return fmt.Errorf("forward: %w", err)
		}
		if err := backend.Run(comm, adj, backend.Of(ay), backend.Of(y)); err != nil {
			return fmt.Errorf("backward: %w", err)
		}
		forward[r], backward[r] = dot(ax, y), scale*dot(x, ay)
		return nil
	})
	f, b := forward[0]+forward[1]+forward[2], backward[0]+backward[1]+backward[2]
	if math.Abs(f-b) > 1e-9 { // Avg divides by three
		return fmt.Errorf("<A x, y> is %v, <x, A' y> is %v", f, b)
	}
	return nil
}

func group() []backend.Communicator {
	var comms []backend.Communicator
	for _, c := range reference.New("test", P, time.Minute) {
		comms = append(comms, c)
	}
	return comms
}

// integers returns n small ones, nothing where n is negative: what is ignored
// counts as zeros.
func integers(n, seed int) []float64 {
	rng := rand.New(rand.NewPCG(uint64(seed), 0))
	x := make([]float64, max(n, 0))
	for i := range x {
		x[i] = float64(rng.IntN(19) - 9)
	}
	return x
}

func dot(x, y []float64) (sum float64) {
	for i := range x {
		sum += x[i] * y[i]
	}
	return sum
}

func TestWhatIsNotLinearHasNoAdjoint(t *testing.T) {
	for _, kind := range backend.Kinds() {
		for _, op := range []backend.ReduceOp{backend.Prod, backend.Min, backend.Max} {
			_, _, err := backend.Collective{Kind: kind, Op: op}.Adjoint(P)
			require.Check(t, errors.Is(err, backend.ErrUnsupported) == kind.Reduces(),
				"%v by %v: the error is %v", kind, op, err)
		}
	}
}

func TestNamesCanBeParsed(t *testing.T) {
	for _, k := range backend.Kinds() {
		got, err := backend.ParseKind(k.String())
		require.Check(t, got == k && err == nil, "ParseKind(%q) = %v, %v", k, got, err)
	}
	for _, o := range backend.ReduceOps() {
		got, err := backend.ParseReduceOp(o.String())
		require.Check(t, got == o && err == nil, "ParseReduceOp(%q) = %v, %v", o, got, err)
	}
	for _, d := range backend.DTypes() {
		got, err := backend.ParseDType(d.String())
		require.Check(t, got == d && err == nil, "ParseDType(%q) = %v, %v", d, got, err)
	}
	for name, want := range map[string]backend.Kind{"all-reduce": backend.AllReduce,
		"reduce_scatter": backend.ReduceScatter} { // as others spell them
		got, err := backend.ParseKind(name)
		require.Check(t, got == want && err == nil, "ParseKind(%q) = %v, %v", name, got, err)
	}
	_, kindErr := backend.ParseKind("allmost")
	_, opErr := backend.ParseReduceOp("median")
	_, dtypeErr := backend.ParseDType("f8")
	for _, err := range []error{kindErr, opErr, dtypeErr} {
		require.Fails(t, "backend.ParseDType", err, backend.ErrArgument, "use one of")
	}
}

func TestUnknownValuesPrint(t *testing.T) {
	for got, want := range map[string]string{
		backend.Kind(99).String():      "Kind(99)",
		backend.Kind(0).String():       "Kind(0)",
		backend.ReduceOp(99).String():  "ReduceOp(99)",
		backend.Algorithm(99).String(): "Algorithm(99)",
		backend.DType(99).String():     "DType(99)",
	} {
		require.Equal(t, "String", got, want)
	}
}

func TestBusFactors(t *testing.T) {
	for kind, want := range map[backend.Kind]float64{
		backend.AllReduce: 1.5, backend.ReduceScatter: 0.75, backend.AllGather: 0.75,
		backend.AllToAll:  0.75,
		backend.Broadcast: 1, backend.Reduce: 1, backend.Gather: 0.75, backend.Scatter: 0.75,
		backend.Kind(99): 0,
	} {
		require.Equal(t, kind, kind.BusFactor(4), want)
	}
}

func TestOnlySumsHaveAnAssociation(t *testing.T) {
	x := backend.Of(make([]float32, 4))
	for _, c := range []backend.Collective{
		{Kind: backend.AllReduce, Association: backend.Tree},
		{Kind: backend.Reduce, Op: backend.Avg, Association: backend.Tree},
	} {
		_, err := c.Check(0, 4, x, x)
		require.Check(t, err == nil && strings.Contains(c.String(), "tree"), "%v: %v", c, err)
	}
	for want, c := range map[string]backend.Collective{
		"only sums and averages": {Kind: backend.AllReduce, Op: backend.Max,
			Association: backend.Tree},
		"has no fixed bits": {Kind: backend.AllReduce, Association: backend.Tree,
			AllowHalf: backend.BF16},
		"unknown association Asso": {Kind: backend.AllReduce, Association: backend.Tree + 1},
		"have an association":      {Kind: backend.Broadcast, Association: backend.Tree},
	} {
		require.Fails(t, "Check", require.Err(c.Check(0, 4, x, x)), backend.ErrArgument, want)
	}
	adjoint, _, err := backend.Collective{Kind: backend.AllReduce,
		Association: backend.Tree}.Adjoint(4)
	require.Check(t, err == nil && adjoint.Association == backend.Tree,
		"the adjoint of a sum in a tree is %v (%v)", adjoint, err)
}

func TestASumInATreeTakesTheBranchesOfEachRank(t *testing.T) {
	x, y := backend.Of(make([]float32, 12)), backend.Of(make([]float32, 4))
	c := backend.Collective{Kind: backend.AllReduce, Association: backend.Tree,
		Splits: []int{3, 3, 2}}
	for r, want := range []int{2, 2, 1} { // terms 0 and 1, 2; 3, 4 and 5; 6 and 7
		if got := c.Branches(nil, r); len(got) != want {
			t.Errorf("rank %d has branches of %v terms, want %d branches", r, got, want)
		}
		for n := range 4 {
			count, err := c.Check(r, 3, y, x.Slice(0, 4*n))
			require.Check(t, (err == nil) == (n == want) && (err != nil || count == 4),
				"rank %d with %d sums: count %d, error %v", r, n, count, err)
		}
	}
	_, err := c.Check(0, 3, x.Slice(0, 4), x.Slice(0, 8))
	require.Check(t, err == nil, "into the first branch: %v", err)
	half, halves := y.As(backend.F16), x.As(backend.F16)
	for what, check := range map[string]func() (int, error){
		"into the second branch": func() (int, error) {
			return c.Check(0, 3, x.Slice(4, 8), x.Slice(0, 8))
		},
		"of 16 bits": func() (int, error) { return c.Check(0, 3, half, halves.Slice(0, 16)) },
		"of a rank without terms": func() (int, error) {
			c := c
			c.Splits = []int{3, 0, 5}
			return c.Check(0, 3, y, x.Slice(0, 8))
		},
		"in rank order": func() (int, error) {
			c := c
			c.Association = backend.InRankOrder
			return c.Check(0, 3, y, x.Slice(0, 8))
		},
	} {
		require.Fails(t, what, require.Err(check()), backend.ErrArgument)
	}
	if _, _, err := c.Adjoint(3); !errors.Is(err, backend.ErrUnsupported) {
		t.Errorf("the adjoint of a sum of branches: %v", err)
	}
}

func TestOnlyAllToAllsHaveRows(t *testing.T) {
	x, y := backend.Of(make([]float32, 12)), backend.Of(make([]float32, 12))
	c := backend.Collective{Kind: backend.AllToAll, Rows: &backend.Rows{Src: []int{2, 3},
		Dst: []int{6, 1}}}
	count, err := c.Check(0, 2, y, x)
	require.Check(t, count == 6 && err == nil && c.String() == "alltoall(in rows)",
		"%v: count %d, %v", c, count, err)
	for want, c := range map[string]backend.Collective{
		"rows are for an all-to-all": {Kind: backend.AllGather,
			Rows: c.Rows},
		"a number for each of 2 ranks": {Kind: backend.AllToAll,
			Rows: &backend.Rows{Src: []int{2}, Dst: []int{6, 1}}},
		"from rank 0 to rank 0 do not divide into 4 rows": {Kind: backend.AllToAll,
			Rows: &backend.Rows{Src: []int{4, 1}, Dst: []int{1, 1}}},
		"do not divide into 1 rows of the source and 4 of the desti": {Kind: backend.AllToAll,
			Rows: &backend.Rows{Src: []int{1, 1}, Dst: []int{1, 4}}},
		"the 5 elements from rank 0 to rank 1": {Kind: backend.AllToAll,
			Splits: []int{6, 5, 6, 6}, Rows: &backend.Rows{Src: []int{2, 2}, Dst: []int{2, 2}}},
		"0 rows of the source": {Kind: backend.AllToAll,
			Rows: &backend.Rows{Src: []int{0, 1}, Dst: []int{1, 1}}},
	} {
		src := x
		if c.Splits != nil {
			src = x.Slice(0, 11)
		}
		require.Fails(t, "Check", require.Err(c.Check(0, 2, y, src)), backend.ErrArgument, want)
	}
	adjoint, _, err := c.Adjoint(2)
	require.Check(t, err == nil && adjoint.Rows.Src[0] == 6 && adjoint.Rows.Dst[1] == 3,
		"the adjoint is %v in rows %v (%v)", adjoint, adjoint.Rows, err)
}
