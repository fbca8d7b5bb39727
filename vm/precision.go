package vm

import (
	"fmt"
	"slices"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/vm/ir"
	"github.com/euryale-ml/euryale/internal/vm/read"
)

// Precision says how a machine multiplies matrices of Float32, including those of attention, and
// convolves. Everything else is computed in Float32: sums within products, softmax, norms, losses,
// reductions, gradients of learnables, learnables and solvers. There is no float16: its gradients
// underflow unless the loss is scaled, which BF16 does not need.
type Precision uint8

// The precisions.
const (
	// F32 multiplies float32.
	F32 Precision = iota
	// TF32 lets a GPU round operands to 10 bits of mantissa, for its tensor cores. Nothing else
	// changes, and nothing at all on the host.
	TF32
	// BF16 rounds operands to bfloat16, 8 bits of mantissa, and also results that only loops and
	// other products read: these are bfloat16 in memory and between devices. Weights are rounded
	// once in each run, or once if they are frozen. Convolutions round all results, as cuDNN does,
	// including gradients of filters. The meaning is the same on every device.
	BF16
)

// String returns "f32", "tf32" or "bf16".
func (p Precision) String() string {
	switch p {
	case F32:
		return "f32"
	case TF32:
		return "tf32"
	case BF16:
		return "bf16"
	}
	return fmt.Sprintf("Precision(%d)", uint8(p))
}

// WithPrecision makes the machine multiply in a precision other than [F32]. GPUs below compute
// capability 8.0 have nothing faster than F32: the machine says so ([Notice]), and uses F32.
//
// New returns ErrArgument for a precision that does not exist.
func WithPrecision(p Precision) Option {
	return func(m *Machine) {
		m.once("WithPrecision")
		if m.asked = p; p > BF16 {
			m.refuse("WithPrecision", "%v", p)
		}
	}
}

// tensorCores is the lowest compute capability of GPUs with products of TF32 and BF16.
const tensorCores = 80

// on returns the precision that a device has, F32 if it has nothing else, and then says so.
func (p Precision) on(d backend.Device, say func(string)) Precision {
	gpu, ok := d.(interface{ ComputeCapability() int })
	if !ok || p == F32 || gpu.ComputeCapability() >= tensorCores {
		return p
	}
	say(fmt.Sprintf("%s has compute capability %.1f and multiplies in f32: %v needs 8.0", d.Name(),
		float64(gpu.ComputeCapability())/10, p))
	return F32
}

// ofProgram is the precision in the language of programs.
func (p Precision) ofProgram() ir.Precision {
	return [...]ir.Precision{F32: ir.F32, TF32: ir.TF32, BF16: ir.BF16}[p]
}

// channelsLast reports whether convolutions get tensors with their channels last: tensor cores read
// this order, and libraries would transpose any other for each convolution. The device opens a
// library to answer, so it is asked only if there is a convolution.
func channelsLast(d backend.Device, precision Precision, p *ir.Program) bool {
	device, ok := d.(interface{ ChannelsLast() bool })
	return ok && precision != F32 && slices.ContainsFunc(p.Values, func(v ir.Value) bool {
		switch v.Op.(type) {
		case ir.Convolution, ir.Im2Col:
			return true
		}
		return false
	}) && device.ChannelsLast()
}

// stacks reports whether products by matrices that no run changes are made one. A GPU reads one
// large matrix faster than several (bench/results/2026-11/2026-11-30-decode.md). On the host it
// would copy matrices that are mapped from files.
func stacks(d backend.Device) bool {
	_, gpu := d.(interface{ ComputeCapability() int })
	return gpu
}

// recurs returns which recurrent layers a device has kernels for.
func recurs(d backend.Device) read.Recurs {
	if device, ok := d.(interface{ Recurs(batch, size int) bool }); ok {
		return device.Recurs
	}
	return nil
}
