package exec

import (
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/kernels"
)

// ConvolutionScratch implements [Device]: the workers have memory of their own.
func (Host) ConvolutionScratch(kernels.Convolution) (int, error) { return 0, nil }

// Convolve implements [Device].
func (h Host) Convolve(c kernels.Convolution, dst, a, b, _ backend.Buffer) error {
	return h.arithmetic.Convolve(c, dst, a, b)
}
