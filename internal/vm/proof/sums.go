package proof

import (
	"errors"
	"math/bits"

	"github.com/euryale-ml/euryale/internal/vm/plan"
)

// additions are sums of runs by how they are nested: each has a number, those of single runs come
// first.
type additions map[[2]int]int

// add returns the number of x + y.
func (a additions) add(runs, x, y int) int {
	n, ok := a[[2]int{x, y}]
	if !ok {
		n = runs + len(a)
		a[[2]int{x, y}] = n
	}
	return n
}

// inOrder is the sum of n runs from first on, one after the other.
func (a additions) inOrder(runs, first, n int) int {
	sum := first
	for run := first + 1; run < first+n; run++ {
		sum = a.add(runs, sum, run)
	}
	return sum
}

// tree is the sum of n runs from first on in the association [backend.Tree].
func (a additions) tree(runs, first, n int) int {
	if n == 1 {
		return first
	}
	left := 1 << (bits.Len(uint(n-1)) - 1)
	return a.add(runs, a.tree(runs, first, left), a.tree(runs, first+left, n-left))
}

// provesSums returns an error unless the runs of a step, each of which adds up what its kind says,
// make the sums that are exchanged or applied.
func provesSums(a plan.Accumulation) error {
	runs, kinds, of := max(a.Runs, 1), a.Sums(), a.Of()
	if len(of) != runs || len(kinds) != a.Kinds() {
		return errors.New("each run of a step has one of its kinds")
	}
	made, kept := additions{}, map[int]int{}
	for run, kind := range of {
		sum := run
		for _, from := range kinds[kind].Add {
			before, ok := kept[from]
			if !ok {
				return errors.New("a run adds to a sum that no run before has kept")
			}
			sum = made.add(runs, before, sum)
		}
		kept[kinds[kind].To] = sum
	}
	first := 0
	for branch, n := range branches(a) {
		n = max(n, 1)
		want := made.inOrder(runs, first, n)
		if a.Tree {
			want = made.tree(runs, first, n)
		}
		if sum, ok := kept[branch]; !ok || sum != want {
			return errors.New("the runs of a step do not add up to its gradients")
		}
		first += n
	}
	return nil
}
