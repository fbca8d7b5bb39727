//go:build gpu

package exec

import (
	"errors"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/cuda"
	gpukernels "github.com/euryale-ml/euryale/internal/kernels/cuda"
	"github.com/euryale-ml/euryale/internal/vm/ir"
)

// productsOf returns what multiplies matrices and convolves images on a queue: on a GPU, cuBLAS and
// cuDNN or kernels of Euryale.
func productsOf(q backend.Queue) (products, error) {
	gpu, ok := q.(*cuda.Queue)
	if !ok {
		return multiplies(q)
	}
	p, err := gpu.NewProducts()
	return libraries{p, gpu.NewConvolutions(), gpu}, err
}

// libraries are a GPU's cuBLAS and cuDNN.
type libraries struct {
	*cuda.Products
	*cuda.Convolutions
	queue *cuda.Queue
}

// ready implements readier.
func (l libraries) ready(op ir.Op) error {
	switch op.(type) {
	case ir.MatMul:
		return l.Products.Prepare()
	case ir.Attention, ir.AttentionGrad:
		return l.queue.PrepareAttention()
	case ir.LSTM:
		return l.queue.Device().Prepare(gpukernels.Recurrences)
	case ir.Gather, ir.GatherGrad, ir.Put:
		return l.queue.Device().Prepare(gpukernels.IndexedRows)
	case ir.Im2Col, ir.Col2Im, ir.MaxPool, ir.MaxPoolGrad:
		return l.queue.Device().Prepare(gpukernels.Images)
	}
	return nil // a convolution is made ready by ConvolutionScratch
}

// Close frees what the libraries have.
func (l libraries) Close() error { return errors.Join(l.Convolutions.Close(), l.Products.Close()) }
