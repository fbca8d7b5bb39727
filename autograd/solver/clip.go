package solver

import (
	"fmt"
	"math"

	"gorgonia.org/gorgonia"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/kernels"
	"github.com/euryale-ml/euryale/internal/stock"
)

// ClipNorm scales gradients by one factor so that their global norm, the square root of the
// sum of the squares of all elements, is at most limit, and returns what the norm was:
//
//	grads, err := dp.Sync()
//	norm, err := solver.ClipNorm(grads, 1)
//	err = adam.Step(grads)
//
// It is Algorithm 1 of Pascanu, Mikolov and Bengio, "On the difficulty of training recurrent neural
// networks" (arXiv:1211.5063), over all parameters at once like PyTorch's clip_grad_norm_, which
// adds 1e-6 to the norm before it divides: this function does not. The gradients of Sync are the
// same on all ranks, so the norm and the clipped gradients are, too, and ClipNorm communicates
// nothing. With autograd.WithPartial each rank has its own gradients and its own norm.
//
// Cost: one pass over the gradients, and a second one if they are clipped.
//
// Errors: ErrArgument if limit is not positive, or if the norm is NaN or infinite. The error
// names the first such parameter, and nothing has changed.
func ClipNorm(grads []gorgonia.ValueGrad, limit float64) (norm float64, err error) {
	if !(limit > 0) {
		return 0, fmt.Errorf("solver: clip: %w: a limit of %v: it must be positive",
			backend.ErrArgument, limit)
	}
	if err := backend.Given("solver.ClipNorm", "grads", grads); err != nil {
		return 0, err
	}
	total := 0.0
	all := make([]backend.Buffer, len(grads))
	for i, g := range grads {
		if all[i], err = gradientOf(g); err != nil {
			return 0, wrapped("clip: the gradient of %s %w", nameOf(g, i), err)
		}
		if total += squares(all[i]); math.IsNaN(total) || math.IsInf(total, 0) {
			return math.Sqrt(total), fmt.Errorf("solver: clip: %w: the gradient of %s makes "+
				"the norm %v: skip this step, or use a lower rate", backend.ErrArgument, nameOf(
				g, i), math.Sqrt(total))
		}
	}
	if norm = math.Sqrt(total); norm <= limit {
		return norm, nil
	}
	for _, g := range all {
		if err := (kernels.Host{}).Scale(g, g, limit/norm); err != nil {
			return norm, wrapped("clip: %w", err)
		}
	}
	return norm, nil
}

// nameOf names a parameter in an error.
func nameOf(g gorgonia.ValueGrad, i int) string {
	switch p := g.(type) {
	case *gorgonia.Node:
		return fmt.Sprintf("parameter %d, %s,", i, stock.Label(p))
	case interface{ Name() string }: // a gradient of Sync
		return fmt.Sprintf("parameter %d, %s,", i, p.Name())
	}
	return fmt.Sprintf("parameter %d", i)
}

// gradientOf returns the memory of a gradient.
func gradientOf(g gorgonia.ValueGrad) (backend.Buffer, error) {
	v, err := g.Grad()
	if err != nil {
		return backend.Buffer{}, err
	}
	return memoryOf(v)
}

// squares returns the sum of the squares of all elements.
func squares(g backend.Buffer) float64 {
	if g.DType() == backend.F32 {
		return sumSquares(backend.View[float32](g))
	}
	return sumSquares(backend.View[float64](g))
}

func sumSquares[T float32 | float64](x []T) (sum float64) {
	for _, v := range x {
		sum += float64(float64(v) * float64(v)) // rounded before the sum, on every processor
	}
	return sum
}
