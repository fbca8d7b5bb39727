package cuda

import (
	"math"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/kernels"
)

var _ kernels.Widener = Kernels{}

// Widen implements [kernels.Widener].
func (k Kernels) Widen(dst, src backend.Buffer, factor float64) error {
	if err := check.Widen(dst, src, factor); err != nil || dst.Len() == 0 {
		return err
	}
	c := Call{Entry: Entry{Verb: "widen", Op: src.DType().String(), Type: dst.DType().String()}}
	c.linear(src.NBytes())
	c.pass(word(dst), word(src), uint64(dst.Len()), math.Float64bits(factor))
	return k.launcher.Launch(c)
}
