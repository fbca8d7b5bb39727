//go:build gpu

package exec

import (
	"errors"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/backend/cuda"
)

// productsOf returns what multiplies matrices and convolves images on a queue: on a GPU, cuBLAS and
// cuDNN or kernels of Euryale.
func productsOf(q backend.Queue) (products, error) {
	gpu, ok := q.(*cuda.Queue)
	if !ok {
		return multiplies(q)
	}
	p, err := gpu.NewProducts()
	return libraries{p, gpu.NewConvolutions()}, err
}

// libraries are those of a GPU.
type libraries struct {
	*cuda.Products
	*cuda.Convolutions
}

// Close frees what the libraries have.
func (l libraries) Close() error { return errors.Join(l.Convolutions.Close(), l.Products.Close()) }
