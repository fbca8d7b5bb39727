package residence

import (
	"cmp"
	"slices"

	"github.com/euryale-ml/euryale/backend"
)

// Overlap finds two buffers that share memory.
func Overlap(all []backend.Buffer) (first, second int, shared bool) {
	order := make([]int, 0, len(all))
	for i, b := range all {
		if b.Len() > 0 {
			order = append(order, i)
		}
	}
	slices.SortFunc(order, func(a, b int) int {
		return cmp.Or(cmp.Compare(all[a].Addr(), all[b].Addr()), a-b)
	})
	for k, i := range order[:max(len(order)-1, 0)] {
		if all[i].Addr()+uintptr(all[i].NBytes()) > all[order[k+1]].Addr() {
			return min(i, order[k+1]), max(i, order[k+1]), true
		}
	}
	return 0, 0, false
}
