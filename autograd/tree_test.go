package autograd

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/backend"
)

func TestTreeShare(t *testing.T) {
	for _, c := range []struct{ n, rank, ranks, first, share int }{{8, 0, 1, 0, 8}, {8, 1, 2, 4, 4},
		{8, 7, 8, 7, 1}, {8, 0, 3, 0, 3}, {8, 1, 3, 3, 3}, {8, 2, 3, 6, 2}, {5, 2, 3, 4, 1}} {
		first, share, err := TreeShare(c.n, c.rank, c.ranks)
		if first != c.first || share != c.share || err != nil {
			t.Errorf("%d micro-batches on rank %d of %d: %d from %d on (%v), want %d from %d on",
				c.n, c.rank, c.ranks, share, first, err, c.share, c.first)
		}
	}
	for _, c := range []struct{ n, rank, ranks int }{{0, 0, 1}, {2, 0, 3}, {8, 3, 3}, {8, -1, 3}} {
		if _, _, err := TreeShare(c.n, c.rank, c.ranks); !errors.Is(err, backend.ErrArgument) {
			t.Errorf("%d micro-batches on rank %d of %d: %v", c.n, c.rank, c.ranks, err)
		}
	}
}

// inTree adds numbers level by level.
func inTree[T float32 | float64](xs []T) T {
	for len(xs) > 1 {
		var sums []T
		for pair := range slices.Chunk(xs, 2) {
			sum := pair[0]
			for _, x := range pair[1:] {
				sum += x
			}
			sums = append(sums, sum)
		}
		xs = sums
	}
	return xs[0]
}

func TestTreeMeanDependsOnNoRanks(t *testing.T) {
	const n = 12
	numbers := make([]float64, n)
	for i := range numbers {
		numbers[i] = math.Sin(float64(i)) * math.Exp2(float64(i%5*12))
	}
	want := inTree(numbers) / n
	if inOrder := func() (sum float64) {
		for _, x := range numbers {
			sum += x
		}
		return sum / n
	}(); inOrder == want {
		t.Error("the order does not matter: this test shows nothing")
	}
	for _, P := range []int{1, 2, 3, 5} {
		all(t, P, func(r rank) error {
			first, share, _ := TreeShare(n, r.comm.Rank(), P)
			got, err := TreeMean(r.comm, numbers[first:first+share])
			if got != want {
				err = errors.Join(err, fmt.Errorf("%d ranks have a mean of %v, want %v", P, got,
					want))
			}
			return err
		})
	}
	all(t, 1, func(r rank) error {
		if _, err := TreeMean(r.comm, nil); !errors.Is(err, backend.ErrArgument) {
			return fmt.Errorf("the mean of nothing: %v", err)
		}
		return nil
	})
}

// Gradients are the mean in the tree of micro-batches on any number of ranks: with hooks, without,
// and where the first micro-batch has none, which counts as zeros.
func TestTreeOfGradients(t *testing.T) {
	for _, n := range []int{8, 11} {
		treeOfGradients(t, n)
	}
}

func treeOfGradients(t *testing.T, n int) {
	const size = 3
	x := func(i, k int) float32 {
		return float32(math.Sin(float64(1+i*size+k)) * math.Exp2(float64(i%4*6)))
	}
	mean := func(from int) []float32 {
		all := make([]float32, size)
		for k := range all {
			terms := make([]float32, n)
			for i := from; i < n; i++ {
				terms[i] = x(i, k)
			}
			all[k] = inTree(terms) * float32(1/float64(n))
		}
		return all
	}
	for P := 1; P <= n; P++ {
		for _, way := range []string{"plain", "hooked", "first has none"} {
			from := 0
			if way == "first has none" {
				from = 1
			}
			if from == 1 && P == n { // rank 0 would have no gradient at all
				continue
			}
			all(t, P, func(r rank) error {
				// The loss is the sum of w times a constant, which is its gradient.
				g := gorgonia.NewGraph()
				w := gorgonia.NewVector(g, tensor.Float32, gorgonia.WithShape(size),
					gorgonia.WithName("w"), gorgonia.WithInit(gorgonia.Zeroes()))
				c := gorgonia.NewVector(g, tensor.Float32, gorgonia.WithShape(size),
					gorgonia.WithName("c"), gorgonia.WithInit(gorgonia.Zeroes()))
				d, err := New(r.comm, gorgonia.Nodes{w}, WithTree(n))
				if err != nil {
					return err
				}
				defer d.Close()
				used := w
				if way == "hooked" {
					if used, err = d.Hook(w); err != nil {
						return err
					}
				}
				loss := gorgonia.Must(gorgonia.Sum(gorgonia.Must(gorgonia.HadamardProd(used, c))))
				if _, err := gorgonia.Grad(loss, w); err != nil {
					return err
				}
				vm := gorgonia.NewTapeMachine(g)
				defer vm.Close()
				first, share, _ := TreeShare(n, r.comm.Rank(), P)
				for step := range 2 - from {
					err = d.Accumulate(share, func(i int) error {
						if first+i < from {
							return nil
						}
						for k := range size {
							c.Value().(*tensor.Dense).Float32s()[k] = x(first+i, k)
						}
						defer vm.Reset()
						return vm.RunAll()
					})
					if err != nil {
						return err
					}
					grads, err := d.Sync()
					if err != nil {
						return err
					}
					v, _ := grads[0].Grad()
					if got := v.Data().([]float32); !slices.Equal(got, mean(from)) {
						return fmt.Errorf("%s, step %d: %d ranks have the gradient %v, want %v",
							way, step, P, got, mean(from))
					}
				}
				return nil
			})
		}
	}
}

func TestAStepInATreeIsAllItsMicroBatches(t *testing.T) {
	all(t, 2, func(r rank) error {
		m, err := newLinear(r)
		if err != nil {
			return err
		}
		d, err := New(r.comm, m.params, WithTree(4))
		if err != nil {
			return err
		}
		defer d.Close()
		vm, err := m.build(d, false)
		if err != nil {
			return err
		}
		defer vm.Close()
		run := func(int) error {
			defer vm.Reset()
			return m.run(vm, 0)
		}
		if err := d.Accumulate(4, run); !errors.Is(err, backend.ErrArgument) ||
			!strings.Contains(err.Error(), "rank runs 2") {
			return fmt.Errorf("twice as many micro-batches: %v", err)
		}
		if err := run(0); err != nil {
			return err
		}
		if _, err := d.Sync(); !errors.Is(err, backend.ErrArgument) ||
			!strings.Contains(err.Error(), "0 of the 2 micro-batches") {
			return fmt.Errorf("none of them: %v", err)
		}
		return nil
	})
}
