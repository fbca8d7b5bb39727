package lower

import (
	"fmt"
	"math/bits"
	"slices"
	"strings"
	"testing"
)

// TestAccumulationIsASum: each run adds to sums that are kept, and its own to the others in the
// tree that the documentation describes. Sums are text here.
func TestAccumulationIsASum(t *testing.T) {
	for _, inTree := range []bool{false, true} {
		for n := 1; n <= 33; n++ {
			a := Accumulation{Runs: n, Tree: inTree}
			level := make([]string, n)
			for i := range level {
				level[i] = fmt.Sprint(i)
			}
			want := level[0]
			for _, x := range level[1:] {
				want = "(" + want + "+" + x + ")"
			}
			for inTree && len(level) > 1 {
				var sums []string
				for pair := range slices.Chunk(level, 2) {
					sums = append(sums, strings.Join(pair, "+"))
					if len(pair) == 2 {
						sums[len(sums)-1] = "(" + sums[len(sums)-1] + ")"
					}
				}
				level, want = sums, sums[0]
			}
			kept := make([]string, 8)
			kinds, of := a.Sums()
			for run, kind := range of {
				if (kind == a.Kinds()-1) != (run == n-1) {
					t.Fatalf("run %d of %d has kind %d of %d", run, n, kind, a.Kinds())
				}
				x := fmt.Sprint(run)
				for _, k := range kinds[kind].Add {
					x, kept[k] = "("+kept[k]+"+"+x+")", "used"
				}
				kept[kinds[kind].To] = x
			}
			if got := kept[0]; got != want {
				t.Errorf("in a tree %v: %d runs make %s, want %s", inTree, n, got, want)
			}
		}
	}
}

// TestRunsOfARankMakeItsBranches: whichever runs of a step a rank has, it keeps the sum of each of
// its branches in the association backend.Tree, the last one from the last run.
func TestRunsOfARankMakeItsBranches(t *testing.T) {
	var tree func(first, n int) string
	tree = func(first, n int) string {
		if n == 1 {
			return fmt.Sprint(first)
		}
		left := 1 << (bits.Len(uint(n-1)) - 1)
		return "(" + tree(first, left) + "+" + tree(first+left, n-left) + ")"
	}
	for all := 1; all <= 24; all++ {
		for first := range all {
			for runs := 1; first+runs <= all; runs++ {
				a := Accumulation{Runs: runs, Tree: true, First: first, All: all}
				kept, run := make([]string, 32), 0
				sums, of := a.Sums()
				for _, kind := range of {
					x := fmt.Sprint(run)
					for _, k := range sums[kind].Add {
						x = "(" + kept[k] + "+" + x + ")"
					}
					kept[sums[kind].To], run = x, run+1
				}
				run = 0
				for branch, n := range a.branches() {
					if want := tree(run, n); kept[branch] != want {
						t.Fatalf("runs %d to %d of %d make %s in branch %d, want %s", first,
							first+runs, all, kept[branch], branch, want)
					}
					run += n
				}
				if to := sums[len(sums)-1].To; run != runs || to != len(a.branches())-1 {
					t.Fatalf("%d of %d runs have %d in branches, the last in branch %d", runs, all,
						run, to)
				}
			}
		}
	}
}
