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
	for _, c := range []struct{ n, ranks, want int }{{8, 1, 8}, {8, 2, 4}, {8, 8, 1}, {6, 1, 6},
		{6, 3, 2}, {5, 5, 1}, {12, 3, 4}} {
		if got, err := TreeShare(c.n, c.ranks); got != c.want || err != nil {
			t.Errorf("%d micro-batches on %d ranks: %d (%v), want %d", c.n, c.ranks, got, err,
				c.want)
		}
	}
	for _, c := range []struct {
		n, ranks int
		want     string
	}{
		{8, 3, "8 micro-batches do not divide among 3 ranks: use 1, 2, 4 or 8 ranks, or 3, 6 or " +
			"12 micro-batches"},
		{12, 2, "12 micro-batches are 6 for each of 2 ranks, which is no power of two: use 1, 3, " +
			"6 or 12 ranks"},
		{0, 1, "0 micro-batches on 1 ranks"},
	} {
		if _, err := TreeShare(c.n, c.ranks); !errors.Is(err, backend.ErrArgument) ||
			!strings.Contains(err.Error(), c.want) {
			t.Errorf("the error is %v, want %q", err, c.want)
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
	for _, P := range []int{1, 2, 3, 4} {
		all(t, P, func(r rank) error {
			share := n / P
			got, err := TreeMean(r.comm, numbers[r.comm.Rank()*share:(r.comm.Rank()+1)*share])
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
	const n, size = 8, 3
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
			all[k] = inTree(terms) / n
		}
		return all
	}
	for _, P := range []int{1, 2, 4, 8} {
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
				for step := range 2 - from {
					err = d.Accumulate(n/P, func(i int) error {
						if r.comm.Rank()*n/P+i < from {
							return nil
						}
						for k := range size {
							c.Value().(*tensor.Dense).Float32s()[k] = x(r.comm.Rank()*n/P+i, k)
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
			!strings.Contains(err.Error(), "each of 2 ranks runs 2") {
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
