package autograd

import (
	"errors"
	"fmt"
	"math"

	"gorgonia.org/gorgonia"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/residence"
	"github.com/euryale-ml/euryale/internal/stock"
)

// ClipNorm scales gradients by one factor so that their global norm, the square root of the
// sum of the squares of all elements, is at most limit, and returns what the norm was:
//
//	grads, err := dp.Sync()
//	norm, err := autograd.ClipNorm(grads, 1)
//	err = solver.Step(grads)
//
// It is Algorithm 1 of Pascanu, Mikolov and Bengio, "On the difficulty of training recurrent
// neural networks" (arXiv:1211.5063), over all parameters at once like PyTorch's
// clip_grad_norm_, which adds 1e-6 to the norm before it divides: this function does not. The
// gradients of Sync are the same on all ranks, so the norm and the clipped gradients are, too, and
// ClipNorm communicates nothing. With [WithPartial] each rank has its own gradients and its own
// norm.
//
// Cost: one pass over the gradients, and a second one if they are clipped. On a device it
// waits for the norm and needs memory for a copy of the largest gradient.
//
// Errors: ErrArgument if limit is not positive, or if the norm is NaN or infinite. The error
// names the first such parameter, and nothing has changed.
func ClipNorm(grads []gorgonia.ValueGrad, limit float64) (norm float64, err error) {
	if !(limit > 0) {
		return 0, fmt.Errorf("autograd: clip: %w: a limit of %v: it must be positive", backend.ErrArgument, limit)
	}
	if err := backend.Given("autograd.ClipNorm", "grads", grads); err != nil {
		return 0, err
	}
	total := 0.0
	all := make([]placed, len(grads))
	for i, g := range grads {
		if all[i], err = gradientOf(g); err != nil {
			return 0, fmt.Errorf("autograd: clip: the gradient of %s %w", nameOf(g, i), err)
		}
		squares, err := all[i].squares()
		if err != nil {
			return 0, fmt.Errorf("autograd: clip: the gradient of %s: %w", nameOf(g, i), err)
		}
		if total += squares; math.IsNaN(total) || math.IsInf(total, 0) {
			return math.Sqrt(total), fmt.Errorf("autograd: clip: %w: the gradient of %s makes the norm %v: skip this step, or use a lower rate", backend.ErrArgument, nameOf(g, i), math.Sqrt(total))
		}
	}
	if norm = math.Sqrt(total); norm <= limit {
		return norm, nil
	}
	for _, g := range all {
		if err := arithmeticOf(g.engine).Scale(g.Buffer, g.Buffer, limit/norm); err != nil {
			return norm, fmt.Errorf("autograd: clip: %w", err)
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

// gradientOf returns where a gradient is.
func gradientOf(g gorgonia.ValueGrad) (p placed, err error) {
	v, err := g.Grad()
	if err != nil {
		return p, err
	}
	p.engine = residence.Engine[engine](v)
	p.Buffer, err = memoryOf(p.engine, v)
	return p, err
}

// squares returns the sum of the squares of all elements.
func (p placed) squares() (float64, error) {
	switch {
	case p.engine != nil:
		return p.squaresOnDevice()
	case p.DType() == backend.F32:
		return sumSquares(backend.View[float32](p.Buffer)), nil
	}
	return sumSquares(backend.View[float64](p.Buffer)), nil
}

func sumSquares[T float32 | float64](x []T) (sum float64) {
	for _, v := range x {
		sum += float64(float64(v) * float64(v)) // rounded before the sum, on every processor
	}
	return sum
}

// squaresOnDevice is squares in kernels. The sum is of the dtype of the gradient.
func (p placed) squaresOnDevice() (sum float64, err error) {
	k := arithmeticOf(p.engine)
	n, scratch := p.Len(), k.ReduceAxisScratch(1, p.Len(), 1)
	memory, err := p.engine.Device().Alloc((n + scratch + 1) * p.DType().Size())
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, p.engine.Device().Free(memory)) }()
	all := memory.As(p.DType())
	squares, room, folded := all.Slice(0, n), all.Slice(n, n+scratch), all.Slice(n+scratch, n+scratch+1)
	onHost := placed{Buffer: zeros(folded)}
	err = inOrder(
		func() error { return k.Unary(backend.Square, squares, p.Buffer) },
		func() error { return k.ReduceAxis(backend.Sum, folded, squares, room, 1, n, 1) },
		func() error { return k.Move(onHost.Buffer, folded) },
	)
	// The queue uses the memory until it has run the kernels, also after an error.
	if err = errors.Join(err, drain(p.engine.Queue())); err != nil {
		return 0, err
	}
	if p.DType() == backend.F32 {
		return float64(backend.View[float32](onHost.Buffer)[0]), nil
	}
	return backend.View[float64](onHost.Buffer)[0], nil
}
