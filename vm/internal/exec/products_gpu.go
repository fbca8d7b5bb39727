//go:build gpu

package exec

import (
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/backend/cuda"
)

// productsOf returns what multiplies matrices on a queue: on a GPU, cuBLAS or kernels of
// Euryale.
func productsOf(q backend.Queue) (products, error) {
	if gpu, ok := q.(*cuda.Queue); ok {
		return gpu.NewProducts()
	}
	return multiplies(q)
}
