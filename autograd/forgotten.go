package autograd

import (
	"fmt"
	"math"
	"slices"

	"gorgonia.org/gorgonia"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/residence"
)

// clear zeroes the gradients to which Gorgonia adds those of the next run. All gradients must have
// been copied, because two parameters can share a gradient. The zeros are negative: adding one
// changes no bit of a gradient, and computed can tell them from the zeros of a run, unless all
// gradients of that run are negative zeros.
func (d *DataParallel) clear() {
	for _, p := range d.params {
		p.cleared = nil
		if g, err := p.node.Grad(); err == nil && g != nil && !d.shared[g] {
			p.zero(g)
		}
		if s := p.source; s != nil && s.Op() != nil && s.Value() != nil && !d.shared[s.Value()] {
			p.zero(s.Value()) // which each run writes
		}
	}
}

// zero fills a gradient with negative zeros.
func (p *param) zero(g gorgonia.Value) {
	memory, dense, err := residence.Floats(g)
	if err != nil || !dense {
		gorgonia.ZeroValue(g)
		return
	}
	if p.cleared = g; memory.DType() == backend.F32 {
		negate(backend.View[float32](memory))
	} else {
		negate(backend.View[float64](memory))
	}
}

// computed returns an error if all gradients are as clear has left them.
func (d *DataParallel) computed() error {
	for _, p := range d.params {
		if p.hooked != nil || p.cleared == nil || p.gradient() != p.cleared {
			return nil
		}
		memory, _, err := residence.Floats(p.cleared)
		if err != nil {
			return err
		}
		left := memory.DType() == backend.F32 && negativeZeros(backend.View[float32](memory)) ||
			memory.DType() == backend.F64 && negativeZeros(backend.View[float64](memory))
		if !left {
			return nil
		}
	}
	return fmt.Errorf("%w: no run has computed gradients since the last Sync: call RunAll before "+
		"it, and Reset after it, without which the next RunAll of a Gorgonia machine does nothing",
		backend.ErrArgument)
}

// negate fills memory with negative zeros.
func negate[T float32 | float64](all []T) {
	for i := range all {
		all[i] = T(math.Copysign(0, -1))
	}
}

func negativeZeros[T float32 | float64](all []T) bool {
	return !slices.ContainsFunc(all, func(x T) bool { return x != 0 || !math.Signbit(float64(x)) })
}
