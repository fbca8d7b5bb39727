package program

import (
	"github.com/euryale-ml/euryale/kernels/fuse"
)

// With is a function of x and a number.
func With(b Builder, f fuse.Op, x Value, number float64) Value {
	return b.Do(f, x, b.Number(number, x))
}
