package cuda

import (
	"math"

	"github.com/euryale-ml/euryale/backend"
)

// CastScale implements [backend.Arithmetic].
func (k Kernels) CastScale(dst, src backend.Buffer, factor float64) error {
	if err := check.CastScale(dst, src, factor); err != nil || dst.Len() == 0 {
		return err
	}
	c := Launch{Entry: Entry{Verb: "widen", Op: src.DType().String(), Type: dst.DType().String()}}
	c.linear(src.NBytes())
	c.pass(word(dst), word(src), uint64(dst.Len()), math.Float64bits(factor))
	return k.launcher.Launch(c)
}
