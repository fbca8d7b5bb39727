package residence

import (
	"cmp"
	"slices"

	"github.com/euryale-ml/euryale/backend"
)

// Overlap finds two of n buffers that share memory.
func Overlap(n int, of func(i int) backend.Buffer) (first, second int, shared bool) {
	order := make([]int, 0, n)
	for i := range n {
		if of(i).Len() > 0 {
			order = append(order, i)
		}
	}
	slices.SortFunc(order, func(a, b int) int {
		return cmp.Or(cmp.Compare(of(a).Addr(), of(b).Addr()), a-b)
	})
	for k, i := range order[:max(len(order)-1, 0)] {
		if of(i).Addr()+uintptr(of(i).NBytes()) > of(order[k+1]).Addr() {
			return min(i, order[k+1]), max(i, order[k+1]), true
		}
	}
	return 0, 0, false
}
