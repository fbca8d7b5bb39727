package layers

import (
	"fmt"
	"runtime"
	"runtime/debug"
	"slices"

	"golang.org/x/sync/errgroup"
	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/kernels"
	"github.com/euryale-ml/euryale/internal/residence"
	"github.com/euryale-ml/euryale/ops"
	"github.com/euryale-ml/euryale/ops/nn"
)

// begun is the elements with which a learnable begins, and where this rank's part of them is.
type begun struct {
	x      backend.Buffer
	behind int   // axes of the learnable that come behind the others in x
	shape  []int // of the part
	apart  []int // how far apart in x the elements of an axis are
	first  int   // element of the part
	half   bool  // it is a variable of 16-bit floats, with the axes of x
}

// first returns this rank's part of a learnable with its first value: what [Builder.Begin] has for
// it, or what is drawn.
func (b *Builder) first(name string, init Init, axis int, shape []int) (value *tensor.Dense,
	g begun, err error) {
	if b.values != nil {
		g.x, g.behind, err = b.values(name, shape)
	}
	if err == nil && g.x.Len() == 0 {
		g.behind = 0
		g.x, err = b.drawn(name, init, size(shape))
	}
	switch {
	case err != nil:
		return nil, g, err
	case g.x.Len() != size(shape):
		return nil, g, fmt.Errorf("%w: it begins with %d values, and has shape %v", ops.ErrShape,
			g.x.Len(), shape)
	case !g.x.DType().Float():
		return nil, g, fmt.Errorf("%w: it begins with values of %v: use floats",
			backend.ErrUnsupported, g.x.DType())
	}
	g.shape, g.apart = slices.Clone(shape), make([]int, len(shape))
	n := 1
	for i := range shape { // from the last axis of x on
		i = (g.behind + 2*len(shape) - 1 - i) % len(shape)
		g.apart[i] = n
		n *= shape[i]
	}
	if axis != Undivided {
		start, end := b.layout.shareOf(Tensor, shape[axis])
		g.shape[axis], g.first = end-start, start*g.apart[axis]
	}
	// The few bytes of a vector are not worth a pass in each run.
	g.half = b.dtype == tensor.Float32 && g.x.DType().Size() == 2 && len(shape) > 1 &&
		b.frozes(name)
	value, err = g.value(b.dtype)
	return value, g, err
}

// drawn returns values that the builder's seed and a name determine.
func (b *Builder) drawn(name string, init Init, n int) (x backend.Buffer, err error) {
	if b.dtype == tensor.Float32 {
		values, err := drawn[float32](b.seed, name, init, n)
		return backend.Of(values), err
	}
	values, err := drawn[float64](b.seed, name, init, n)
	return backend.Of(values), err
}

// frozes reports whether a learnable is not learnt.
func (b *Builder) frozes(name string) bool { return b.freeze != nil && b.freeze(name) }

// value returns the part as a tensor: in the memory of x if that has it as it is to be.
func (g begun) value(dt tensor.Dtype) (*tensor.Dense, error) {
	d, _ := residence.DType(dt)
	shape, apart := g.shape, g.apart
	if g.half {
		d = g.x.DType()
		shape, apart = turned(shape, g.behind), turned(apart, g.behind)
	}
	part, n := g.x, size(shape)
	together := contiguous(shape, apart)
	if together {
		part, shape, apart = g.x.Slice(g.first, g.first+n), []int{n}, []int{1}
		g.x, g.first = part, 0
	}
	if !together || part.DType() != d {
		part = residence.Zeros(d, n)
		if err := g.copyTo(part, shape, apart); err != nil {
			return nil, err
		}
	}
	if shape = g.shape; g.half {
		shape = turned(shape, g.behind)
	}
	if g.half && g.behind > 0 {
		at := len(shape) - g.behind
		shape = []int{size(shape[:at]), size(shape[at:])}
	}
	return dense(part, shape), nil
}

// turned returns a list whose first elements are behind the others.
func turned(list []int, behind int) []int { return slices.Concat(list[behind:], list[:behind]) }

// contiguous reports whether elements follow each other in row-major order.
func contiguous(shape, apart []int) bool {
	n := 1
	for i, d := range slices.Backward(shape) {
		if d != 1 && apart[i] != n {
			return false
		}
		n *= d
	}
	return true
}

func dense(x backend.Buffer, shape []int) *tensor.Dense {
	var data any
	switch x.DType() {
	case backend.F32:
		data = backend.View[float32](x)
	case backend.F64:
		data = backend.View[float64](x)
	case backend.F16:
		data = backend.View[backend.Float16](x)
	default:
		data = backend.View[backend.BFloat16](x)
	}
	return tensor.New(tensor.WithShape(shape...), tensor.WithBacking(data))
}

// copyLength is how many elements a core copies at a time, so that its cache holds them.
const copyLength = 1 << 18

// copyTo copies elements of x to row-major order, and to the dtype of dst, on all cores.
func (g begun) copyTo(dst backend.Buffer, shape, apart []int) error {
	var parts errgroup.Group
	parts.SetLimit(runtime.GOMAXPROCS(0))
	row := dst.Len() / max(1, shape[0])
	step := max(1, copyLength/max(1, row))
	for from := 0; from < shape[0]; from += step {
		to := min(from+step, shape[0])
		parts.Go(func() (err error) {
			defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
			defer func() { err = faulted(recover(), err) }()
			src := g.x.Slice(g.first+from*apart[0], g.x.Len())
			out := dst.Slice(from*row, to*row)
			if len(shape) == 1 && apart[0] == 1 {
				return kernels.Host{}.Cast(out, src.Slice(0, out.Len()))
			}
			lying := out
			if src.DType() != out.DType() {
				lying = residence.Zeros(src.DType(), out.Len())
			}
			err = residence.CopyStrided(kernels.Host{}, lying, src,
				append([]int{to - from}, shape[1:]...), apart)
			if err == nil && lying != out {
				err = kernels.Host{}.Cast(out, lying)
			}
			return err
		})
	}
	return parts.Wait()
}

// faulted returns the error of a panic by memory that is not there, as that of a file that somebody
// has cut off since it was mapped.
func faulted(panicked any, err error) error {
	if panicked == nil {
		return err
	}
	if fault, ok := panicked.(interface{ Addr() uintptr }); ok {
		return fmt.Errorf("%w: no memory at %#x: its file has become shorter since it was opened",
			backend.ErrArgument, fault.Addr())
	}
	panic(panicked)
}

// widened returns a variable as the learnable that operations read.
func (b *Builder) widened(variable *gorgonia.Node, g begun) (*gorgonia.Node, error) {
	if !g.half {
		return variable, nil
	}
	w, err := nn.Cast(b.dtype, variable)
	if err == nil && g.behind > 0 {
		if w, err = gorgonia.Transpose(w); err == nil && len(g.shape) > 2 {
			w, err = reshape(w, g.shape...)
		}
	}
	return w, err
}
