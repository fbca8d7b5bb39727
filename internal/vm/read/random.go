package read

import (
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/vm/ir"
	"github.com/euryale-ml/euryale/ops/nn"
)

// Random is where dropouts of the graph draw from. Before each run, State gets its step and its
// first sample.
type Random struct {
	*nn.Random
	State []int64 // of a constant
	value ir.ID
}

// random returns the place of the constant of r.
func (b *builder) random(r *nn.Random) ir.ID {
	for _, known := range b.Randoms {
		if known.Random == r {
			return known.value
		}
	}
	state := tensor.New(tensor.Of(tensor.Int64), tensor.WithShape(2))
	value := b.changing(state, backend.I64)
	b.Randoms = append(b.Randoms, Random{r, state.Data().([]int64), value})
	return value
}

// changing adds a constant whose tensor, a vector, may change between runs.
func (b *builder) changing(vector *tensor.Dense, dtype backend.DType) ir.ID {
	index := len(b.Constants)
	b.Constants, b.Changing = append(b.Constants, vector), append(b.Changing, index)
	return b.Add(ir.Constant{Index: index}, ir.Of(vector.Shape()[0]), dtype)
}
