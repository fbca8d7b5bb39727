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

// allToAll is the definition: cut and lens are the lengths of the pieces that
// each rank sends along s.
func allToAll(xs []arr, s, g int, lens func(from int) []int) []arr {
	P := len(xs)
	pieces := make([][]arr, P)
	for r, x := range xs {
		pieces[r] = x.cut(s, lens(r))
	}
	ys := make([]arr, P)
	for r := range ys {
		var mine []arr
		for from := range P {
			mine = append(mine, pieces[from][r])
		}
		ys[r] = concat(g, mine)
	}
	return ys
}

func newAllToAll(s, g int, opts ...Option) constructor {
	return of2(AllToAll, s, g, opts...)
}

// thereAndBack is an AllToAll and its inverse.
func thereAndBack(s, g int, there, back []Option) constructor {
	return func(comm backend.Communicator, x *gorgonia.Node) (*gorgonia.Node, error) {
		y, err := AllToAll(comm, s, g, x, there...)
		if err != nil {
			return nil, err
		}
		return AllToAll(comm, g, s, y, back...)
	}
}

func TestAllToAllEqualsDefinition(t *testing.T) {
	for _, k := range testenv.OnHosts() {
		for _, P := range []int{1, 2, 4} {
			t.Run(fmt.Sprint(k, P), func(t *testing.T) {
				g := ranksOn(t, P, k)
				rng := rand.New(rand.NewPCG(2, uint64(P)))
				for dims := 1; dims <= 5; dims++ {
					for a := -dims; a < dims; a++ {
						for b := -dims; b < dims; b++ {
							for d, dt := range []tensor.Dtype{tensor.Float64, tensor.Float32,
								tensor.Int64, tensor.Int32, tensor.Uint8} {
								if !full() && (a+2*b+3*d+dims)%5 != 0 {
									continue
								}
								checkAllToAll(t, g, rng, dt, dims, a, b)
							}
						}
					}
				}
			})
		}
	}
}

// checkAllToAll checks an AllToAll and that it is undone by the one with the
// axes exchanged.
func checkAllToAll(t *testing.T, g *team, rng *rand.Rand, dt tensor.Dtype, dims, s, to int) {
	t.Helper()
	P := len(g.comms)
	at := (s + dims) % dims
	shape := []int{2, 3, 1, 2, 2}[:dims:dims]
	shape = slices.Clone(shape)
	shape[at] *= P
	xs := randomArrs(rng, P, dt, shape...)
	name := fmt.Sprintf("%v %v, %d to %d, %d ranks", dt, shape, s, to, P)
	ys := allToAll(xs, at, (to+dims)%dims, func(int) []int { return backend.Even(shape[at], P) })
	sample{name, newAllToAll(s, to), xs, ys}.check(t, g, dt)
	sample{name + " and back", thereAndBack(s, to, nil, nil), xs, xs}.check(t, g, dt)
}

// TestAllToAllDividesUnevenly has the cases that even divisions get wrong: 7
// heads, and 2, on 4 ranks, and a sequence of 9 on 2 ranks.
func TestAllToAllDividesUnevenly(t *testing.T) {
	cases := []struct {
		name string
		// [batch, sequence, heads, width] of rank 0, where gather counts
		shape                   []int
		s, g                    int
		scatter, gather         []int
		backScatter, backGather []int
	}{
		{"7 heads on 4 ranks", []int{2, 3, 7, 2}, 2, 1, []int{2, 2, 2, 1}, nil, nil,
			[]int{2, 2, 2, 1}},
		{"2 heads on 4 ranks", []int{2, 3, 2, 2}, 2, 1, []int{1, 1, 0, 0}, nil, nil,
			[]int{1, 1, 0, 0}},
		{"sequence 9 on 2 ranks", []int{2, 5, 4, 2}, 2, 1, nil, []int{5, 4}, []int{5, 4}, nil},
		{"sequence 9 and 3 heads on 2 ranks", []int{2, 5, 3, 2}, -2, 1, []int{1, 2}, []int{5, 4},
			[]int{5, 4}, []int{1, 2}},
		{"one rank has no sequence", []int{1, 0, 4}, 2, 1, nil, []int{0, 3, 1, 2},
			[]int{0, 3, 1, 2}, nil},
		{"within an axis, scattered", []int{2, 6}, 1, 1, []int{3, 1, 2}, nil, nil, []int{3, 1, 2}},
		{"within an axis, gathered", []int{2, 9}, 1, 1, nil, []int{3, 1, 2}, []int{3, 1, 2}, nil},
	}
	for _, c := range cases {
		for _, k := range testenv.OnHosts() {
			t.Run(fmt.Sprint(c.name, " ", k), func(t *testing.T) {
				P := max(len(c.scatter), len(c.gather))
				g := ranksOn(t, P, k)
				for _, dt := range []tensor.Dtype{tensor.Float64, tensor.Float32, tensor.Int32,
					tensor.Uint8} {
					rng := rand.New(rand.NewPCG(3, 0))
					s, to := (c.s+len(c.shape))%len(c.shape), c.g
					var xs []arr
					for r := range P {
						shape := slices.Clone(c.shape)
						switch {
						case c.gather != nil && s == to:
							shape[to] = P * c.gather[r]
						case c.gather != nil:
							shape[to] = c.gather[r]
						}
						xs = append(xs, randomArr(rng, dt, shape...))
					}
					ys := allToAll(xs, s, to, func(from int) []int {
						switch {
						case c.scatter != nil:
							return c.scatter
						case s == to:
							return slices.Repeat([]int{c.gather[from]}, P)
						}
						return backend.Even(c.shape[s], P)
					})
					there := []Option{AllToAllSplits(c.scatter, c.gather)}
					back := []Option{AllToAllSplits(c.backScatter, c.backGather)}
					sample{"there", newAllToAll(c.s, c.g, there...), xs, ys}.check(t, g, dt)
					sample{"and back", thereAndBack(c.s, c.g, there, back), xs, xs}.check(t, g, dt)
					gs, dxs, err := g.pullback(dt, xs, ys, newAllToAll(c.s, c.g, there...))
					require.NoError(t, err)
					for r := range P { // a permutation: the gradient is the inverse
						require.That(t, gs[r].equal(ys[r]) && dxs[r].equal(xs[r]),
							"rank %d: gradient %v, want %v", r, dxs[r], xs[r])
					}
				}
			})
		}
	}
}

// TestUnevenNeedsSplits: what does not divide is an error of graph building on
// every rank.
func TestUnevenNeedsSplits(t *testing.T) {
	for _, c := range []struct{ P, n int }{{4, 7}, {4, 2}, {2, 9}} {
		for r := range c.P {
			x := newArr(2, 3, c.n, 2).node(gorgonia.NewGraph(), "x", tensor.Float64)
			_, err := AllToAll(stub{rank: r, size: c.P}, 2, 1, x)
			want := fmt.Sprintf("axis 2 of shape (2, 3, %d, 2) has length %d, which does not "+
				"divide among %d ranks: pass AllToAllSplits", c.n, c.n, c.P)
			require.Fails(t, fmt.Sprintf("rank %d", r), err, ErrShape, want)
		}
	}
}

// TestPiecesArePermutedByTheCommunicator: one that takes rows gets x and y as they lie, also
// backward, and a plan gives no memory for copies of them.
func TestPiecesArePermutedByTheCommunicator(t *testing.T) {
	for kind, want := range map[testenv.Kind]bool{testenv.Devices: true, testenv.Hosts: false} {
		for _, comm := range ranksOn(t, 2, kind).comms {
			for _, c := range []struct {
				dt      tensor.Dtype
				s, g    int
				options Option
				rows    bool // of the operands
			}{
				{tensor.Float32, 2, 1, AllToAllSplits(nil, nil), true},
				{tensor.Float32, 2, 1, AllToAllSplits([]int{1, 5}, nil), true},
				{tensor.Float64, 1, 1, AllToAllSplits(nil, nil), true},
				{tensor.Uint8, 2, 1, AllToAllSplits(nil, nil), false},
			} {
				y := require.Value(AllToAll(comm, c.s, c.g,
					newArr(3, 4, 6).node(gorgonia.NewGraph(), "x", c.dt), c.options))(t)
				op := y.Op().(*collectiveOp)
				for _, op := range []*collectiveOp{op, op.inverse()} {
					if got := op.fwd.rows != nil; got != (want && c.rows) ||
						(op.Scratch() == 0) != got {
						t.Errorf("%v of %v on %s: rows %v, %d bytes of scratch", op, c.dt, kind,
							op.fwd.rows, op.Scratch())
					}
				}
			}
		}
	}
	// What lies together needs no rows.
	y, err := AllToAll(ranksOn(t, 2, testenv.Devices).comms[0], 0, 0,
		newArr(4, 6).node(gorgonia.NewGraph(), "x", tensor.Float32))
	require.Check(t, err == nil && y.Op().(*collectiveOp).fwd.rows == nil, "%v, %v", y, err)
}
