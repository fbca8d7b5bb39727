package read

import (
	"fmt"

	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/program"
	"github.com/euryale-ml/euryale/internal/stock"
	"github.com/euryale-ml/euryale/internal/vm/ir"
	"github.com/euryale-ml/euryale/kernels/fuse"
	"github.com/euryale-ml/euryale/ops"
)

// moments are the mean and the variance of a batch, for each channel: [1, C, 1...] of x [N, C,
// ...].
type moments struct {
	mean, variance ir.ID // the variance is divided by samples
	samples        int   // of each channel, of all ranks whose batches are one
}

// several reports whether ranks train together, and synced whether their batches are one, too.
func (n Norms) several() bool { return n.Comm != nil && n.Comm.Size() > 1 }
func (g *Graph) synced() bool { return g.norms.several() && g.norms.Sync }

// batchMoments adds the moments of the batch of a batch norm's operand. Those of several ranks are
// found once for forward and backward pass: the mean and the variance of each rank go to all, in
// one all-gather, and are combined as Chan, Golub and LeVeque do (Updating Formulae and a Pairwise
// Algorithm for Computing Sample Variances, 1979). No difference of large sums is taken, and all
// ranks compute bitwise identical results. Ranks have equally many samples.
func (b *builder) batchMoments(x ir.ID) moments {
	if known, ok := b.whole[x]; ok {
		return known
	}
	shape := b.of(x).Shape
	m := moments{samples: shape.Size() / shape.At(1)}
	m.mean, m.variance = program.Moments(&b.Builder, x, b.channelAxes(x)...)
	if !b.synced() {
		return m
	}
	one := b.of(m.mean).Shape
	gather := backend.Collective{Kind: backend.AllGather}
	all := b.collective(gather, "batch norm", b.pair(m.mean, m.variance))
	ranks, channels := b.norms.Comm.Size(), shape.At(1)
	means, variances := b.row(all, 0, ir.Of(ranks, channels)), b.row(all, 1, ir.Of(ranks, channels))
	whole := b.mean(means, 0)
	between := b.Do(fuse.Square, b.Do(fuse.Sub, means, whole))
	m.mean = b.reshape(whole, one)
	m.variance = b.reshape(b.mean(b.Do(fuse.Add, variances, between), 0), one)
	m.samples *= b.norms.Comm.Size()
	b.whole[x] = m
	return m
}

// mean adds the mean along axes, which stay with length 1.
func (b *builder) mean(x ir.ID, axes ...int) ir.ID {
	return program.Mean(&b.Builder, x, axes...)
}

// pair adds [1, 2, C] of two values of C elements.
func (b *builder) pair(x, y ir.ID) ir.ID {
	n := b.of(x).Shape.Size()
	row := ir.Of(1, 1, n)
	return b.Add(ir.Concat{Axis: 1}, ir.Of(1, 2, n), b.dtype, b.reshape(x, row), b.reshape(y, row))
}

// row adds x[:, i, :] in another shape.
func (b *builder) row(x ir.ID, i int, shape ir.Dims) ir.ID {
	part := b.of(x).Shape.With(1, 1)
	return b.reshape(b.Add(ir.Slice{Axis: 1, Start: i, Step: 1}, part, b.dtype, x), shape)
}

// standardized adds z = (x - mean) * scale, and scale, 1 / sqrt(variance + epsilon).
func (b *builder) standardized(x ir.ID, m moments) (z, scale ir.ID) {
	return program.Standardized(&b.Builder, x, m.mean, m.variance, b.number("epsilon"))
}

// standardizedGrad adds dx of standardized from dz. The means over the batches of several ranks
// are one all-reduce.
func (b *builder) standardizedGrad(z, scale, dz ir.ID) ir.ID {
	axes := b.channelAxes(z)
	mean, along := b.mean(dz, axes...), b.mean(b.Do(fuse.Mul, dz, z), axes...)
	if b.synced() {
		one := b.of(mean).Shape
		average := backend.Collective{Kind: backend.AllReduce, Op: backend.Avg}
		means := b.collective(average, "batch norm's gradient", b.pair(mean, along))
		mean, along = b.row(means, 0, one), b.row(means, 1, one)
	}
	return program.StandardizedGrad(&b.Builder, z, scale, dz, mean, along)
}

// collective adds what a collective of the ranks of batch norms makes of x.
func (b *builder) collective(c backend.Collective, name string, x ir.ID) ir.ID {
	shape := tensor.WithShape(b.of(x).Shape.Slice()...)
	room := tensor.New(tensor.Of(b.node.Dtype()), shape)
	b.moves++
	op, out, err := ops.Planned(b.norms.Comm, c, name, b.moves, room)
	if err != nil {
		b.problem = fmt.Errorf("%s over all ranks: %w", name, err)
		return x
	}
	id := b.Add(ir.Opaque{Index: len(b.Opaques), Name: op.String()}, ir.Of(out...), b.dtype, x)
	b.Opaques = append(b.Opaques, Opaque{Op: op, Node: b.node, Room: []*tensor.Dense{room}})
	return id
}

// averageStatistics makes the statistics of batch norms the mean over all ranks, by one all-reduce
// for those of a dtype. A running statistic is linear in what it averages: it becomes the mean of
// the ranks' running statistics.
func (g *Graph) averageStatistics() error {
	if !g.norms.several() || g.norms.Sync {
		return nil
	}
	for _, dtype := range []backend.DType{backend.F32, backend.F64} {
		var vectors []*ir.ID
		b := builder{Graph: g, Builder: program.Builder{To: &g.Program}, dtype: dtype}
		for i := range g.Statistics {
			if s := &g.Statistics[i]; g.Program.Values[s.Mean].DType == dtype {
				b.node, b.Name = s.Node, stock.Label(s.Node)
				vectors = append(vectors, &s.Mean, &s.Variance)
			}
		}
		if vectors != nil {
			b.averageOverRanks(vectors)
		}
	}
	if g.problem != nil {
		return fmt.Errorf("vm: %w", g.problem)
	}
	return nil
}

// averageOverRanks replaces vectors by their means over all ranks.
func (b *builder) averageOverRanks(vectors []*ir.ID) {
	var parts []ir.ID
	n := 0
	for _, v := range vectors {
		parts, n = append(parts, *v), n+b.of(*v).Shape.Size()
	}
	all := b.Add(ir.Concat{Axis: 0}, ir.Of(n), b.dtype, parts...)
	average := backend.Collective{Kind: backend.AllReduce, Op: backend.Avg}
	all = b.collective(average, "running statistics", all)
	at := 0
	for _, v := range vectors {
		shape := b.of(*v).Shape
		*v = b.Add(ir.Slice{Axis: 0, Start: at, Step: 1}, shape, b.dtype, all)
		at += shape.Size()
	}
}
