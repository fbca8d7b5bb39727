package ops

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/internal/testing/testenv"
)

// sample is an operation with operands and the result that it must give.
type sample struct {
	name string
	op   constructor
	xs   []arr // of each rank
	ys   []arr
}

// reductions returns every reduction, except that without floats Avg is exact
// only by its definition.
func reductions() []backend.ReduceOp { return backend.ReduceOps() }

// samples returns every operation for P ranks of one dtype.
func samples(rng *rand.Rand, P int, dt tensor.Dtype) []sample {
	return slices.Concat(wholeSamples(rng, P, dt), axisSamples(rng, P, dt), uneven(rng, P, dt))
}

// wholeSamples are the operations without an axis.
func wholeSamples(rng *rand.Rand, P int, dt tensor.Dtype) []sample {
	var all []sample
	for _, shape := range [][]int{{}, {1}, {5}, {2, 3}, {2, 1, 3}} {
		xs := randomArrs(rng, P, dt, shape...)
		for _, op := range reductions() {
			sum := combine(op, dt, xs)
			all = append(all, sample{fmt.Sprintf("AllReduce %v %v", op, shape),
				reducing(AllReduce, op), xs, repeat(sum, P)})
			for _, root := range roots(P) {
				all = append(all, sample{fmt.Sprintf("Reduce %v to %d %v", op, root, shape),
					reduceTo(op, root), xs, only(root, P, sum)})
			}
		}
		for _, root := range roots(P) {
			all = append(all, sample{fmt.Sprintf("Broadcast from %d %v", root, shape),
				broadcast(root), xs, repeat(xs[root], P)})
		}
		all = append(all, sample{fmt.Sprintf("CopyToParallel %v", shape), CopyToParallel, xs, xs},
			sample{fmt.Sprintf("ReduceFromParallel %v", shape), ReduceFromParallel, xs,
				repeat(combine(backend.Sum, dt, xs), P)})
	}
	return all
}

// axisSamples are the operations with an axis, evenly divided.
func axisSamples(rng *rand.Rand, P int, dt tensor.Dtype) []sample {
	var all []sample
	for _, shape := range [][]int{{2}, {1, 3}, {2, 3}, {3, 2, 2}} {
		for axis := -len(shape); axis < len(shape); axis++ {
			all = append(all, axisSample(rng, P, dt, shape, axis)...)
		}
	}
	return all
}

func axisSample(rng *rand.Rand, P int, dt tensor.Dtype, shape []int, axis int) []sample {
	at := (axis + len(shape)) % len(shape)
	long := slices.Clone(shape)
	long[at] *= P
	even := slices.Repeat([]int{shape[at]}, P)
	return along(rng, P, dt, axis, long, even, fmt.Sprintf("axis %d of %v", axis, long))
}

// uneven are the operations with an axis and lengths that differ, some 0.
func uneven(rng *rand.Rand, P int, dt tensor.Dtype) []sample {
	var all []sample
	for axis := range 3 {
		lens := make([]int, P)
		for r := range lens {
			lens[r] = rng.IntN(4)
		}
		lens[rng.IntN(P)] = 2
		shape := []int{2, 3, 2}
		shape[axis] = sum(lens)
		all = append(all, along(rng, P, dt, axis, shape, lens, fmt.Sprintf("%v along axis %d of %v",
			lens, axis, shape), Splits(lens...))...)
	}
	return all
}

// along returns every operation with one axis, which has the given lengths.
// shape is the shape of the whole.
func along(rng *rand.Rand, P int, dt tensor.Dtype, axis int, shape, lens []int, name string,
	opts ...Option) []sample {
	at := (axis + len(shape)) % len(shape)
	wholes := randomArrs(rng, P, dt, shape...)
	parts := wholes[0].cut(at, lens)
	var all []sample
	add := func(op string, c constructor, xs, ys []arr) {
		all = append(all, sample{op + " " + name, c, xs, ys})
	}
	for _, op := range reductions() {
		add("ReduceScatter "+op.String(), of2(ReduceScatter, op, axis, opts...), wholes, combine(op,
			dt, wholes).cut(at, lens))
	}
	add("AllGather", of(AllGather, axis, opts...), parts, repeat(wholes[0], P))
	add("GatherForwardSplitBackward", func(comm backend.Communicator, x *gorgonia.Node) (
		*gorgonia.Node, error) {
		return GatherForwardSplitBackward(comm, axis, Up(comm), x, opts...)
	}, parts, repeat(wholes[0], P))
	add("SplitForwardGatherBackward", func(comm backend.Communicator, x *gorgonia.Node) (
		*gorgonia.Node, error) {
		return SplitForwardGatherBackward(comm, axis, Down(comm), x, opts...)
	}, repeat(wholes[0], P), parts)
	for _, root := range roots(P) {
		add(fmt.Sprint("Gather to ", root), of2(Gather, root, axis, opts...), parts, only(root, P,
			wholes[0]))
		add(fmt.Sprint("Scatter from ", root), of2(Scatter, root, axis, opts...), wholes,
			wholes[root].cut(at, lens))
	}
	return all
}

func randomArrs(rng *rand.Rand, P int, dt tensor.Dtype, shape ...int) []arr {
	xs := make([]arr, P)
	for r := range xs {
		xs[r] = randomArr(rng, dt, shape...)
	}
	return xs
}

// roots returns the first and the last rank.
func roots(P int) []int { return slices.Compact([]int{0, P - 1}) }

func repeat(a arr, P int) []arr { return slices.Repeat([]arr{a}, P) }

// only returns a on the root, zeros of its shape elsewhere.
func only(root, P int, a arr) []arr {
	all := repeat(newArr(a.shape...), P)
	all[root] = a
	return all
}

// check runs the sample and compares.
func (s sample) check(t *testing.T, g *team, dt tensor.Dtype) {
	t.Helper()
	ys, err := g.forward(dt, s.xs, s.op)
	require.That(t, err == nil, "%s: %v", s.name, err)
	for r, y := range ys {
		require.That(t, y.equal(s.ys[r]), "%s: rank %d has %v, want %v", s.name, r, y, s.ys[r])
	}
}

func TestForwardEqualsReference(t *testing.T) {
	for _, k := range testenv.OnHosts() {
		for _, P := range []int{1, 2, 3, 4, 5, 8} {
			if k != testenv.Hosts && P > 4 && !full() {
				continue
			}
			t.Run(fmt.Sprint(k, P), func(t *testing.T) {
				g := ranksOn(t, P, k)
				rng := rand.New(rand.NewPCG(1, uint64(P)))
				for d, dt := range dtypes() {
					for i, s := range samples(rng, P, dt) {
						if full() || dt == tensor.Float64 && P <= 3 || (i+d+P)%11 == 0 {
							s.check(t, g, dt)
						}
					}
				}
			})
		}
	}
}
