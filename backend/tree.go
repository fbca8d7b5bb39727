package backend

import "github.com/euryale-ml/euryale/internal/sumtree"

// Branches appends the number of terms in each operand that rank r passes to an AllReduce in a
// [Tree] with Splits: see [sumtree.Branches].
func (c Collective) Branches(to []int, r int) []int {
	return sumtree.Branches(to, sum(c.Splits[:r]), c.Splits[r], sum(c.Splits))
}
