package layers

import (
	"cmp"
	"fmt"
	"slices"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/ops"
	"github.com/euryale-ml/euryale/ops/nn"
)

// Logits is a classifier that shares the weights of an embedding: scores of each token of the
// vocabulary.
//
//	in   x          [d..., n]
//	     embedding  [vocabulary, n]   a learnable, Split(0) over the Tensor group
//	out  y          [d..., vocabulary]   y = x embeddingᵀ, Split along the last axis over the
//	                                     Tensor group
//
// x enters tensor-parallel work here.
//
// Cost: 2*d*n*vocabulary/P operations, backward twice that.
// Errors: [ErrPlacement].
func (b *Builder) Logits(x, embedding Node) Node {
	return b.within("Logits", func() Node {
		x := b.beginTensorParallel(x)
		return b.apply("Logits", func() (Node, error) {
			last := x.Dims() - 1
			if err := cmp.Or(sharded("x", x), wholeAxis("x", x, last),
				require("embedding", embedding, Sequence, Copied),
				require("embedding", embedding, Tensor, Split(0))); err != nil {
				return Node{}, err
			}
			shape := x.Shape()
			n, err := reshape(x.Node, size(shape[:last]), shape[last])
			if err != nil {
				return Node{}, err
			}
			if n, err = nn.BatchedMatMul(false, true, n, embedding.Node); err != nil {
				return Node{}, err
			}
			n, err = reshape(n, append(slices.Clone(shape[:last]), embedding.Shape()[0])...)
			y := Place(n, x)
			y.place[Tensor], y.parts[Tensor] = Split(last), embedding.parts[Tensor]
			return y, err
		}, "x", x, "embedding", embedding)
	})
}

// CrossEntropy is this rank's share of the loss: minus the logarithm of the probability of each
// target, as a mean over all positions of all samples of all replicas.
//
//	in   logits   [d..., vocabulary]   Split along the last axis over the Tensor group
//	     targets  [d...]
//	out  loss     []                   Partial over the Sequence group, and over replicas;
//	                                   Replicated over the Tensor group
//
// The whole loss is the sum of the shares of the ranks of l.Data. All replicas have the same number
// of samples. [Builder.Batches] changes the number of batches in the mean.
//
// Targets that are [Tokens.Padding] do not count: the ranks of l.Data add up how many do, in an
// all-reduce of one number, and the loss is the mean over these, or 0 if there are none. If a step
// has several runs ([Builder.Batches]), only the program knows how many count in all of them, and
// says so by [Tokens.Count]. vm.New refuses padding with vm.WithTree and vm.WithElastic, where the
// micro-batches of a step would need weights of their own.
//
// In a Tensor group of several ranks, each rank computes the logarithms of the sums of its
// exponentials, and the ranks exchange these, one number for each position and rank, and the share.
//
// Cost: that of nn.CrossEntropy over the rank's logits, which backward writes once.
// Errors: [ErrPlacement]; [ops.ErrShape] if targets do not fit the logits.
func (b *Builder) CrossEntropy(logits Node, targets *Tokens) Node {
	return b.apply("CrossEntropy"+targets.of(), func() (Node, error) {
		last := logits.Dims() - 1
		if err := cmp.Or(require("logits", logits, Tensor, Split(last)),
			require("logits", logits, Sequence, Split(targets.axis))); err != nil {
			return Node{}, err
		}
		shape := logits.Shape()
		if !slices.Equal(shape[:last], targets.own()) {
			return Node{}, fmt.Errorf("%w: logits have shape %v on this rank, and targets %v",
				ops.ErrShape, shape, targets.own())
		}
		flat, err := reshape(logits.Node, size(shape[:last]), shape[last])
		if err != nil {
			return Node{}, err
		}
		n := sum(logits.parts[Tensor])
		start, end := b.layout.shareOf(Tensor, n)
		labels, err := reshape(targets.numbers(n, start, end, noLabel, targets.counts),
			size(shape[:last]))
		if err != nil {
			return Node{}, err
		}
		loss, err := nn.CrossEntropyWith(nn.CrossEntropyOptions{Reduction: nn.SumOfRows},
			flat, labels)
		if err == nil && b.layout.TP > 1 {
			loss, err = b.shared(flat, loss, targets, start, end)
		}
		if err == nil {
			loss, err = b.meanOf(loss, targets, n)
		}
		b.shares = true
		return Node{Node: loss, place: [2]Placement{Partial, Replicated}}, err
	}, "logits", logits, "targets", targets)
}

// meanOf divides the sum of the losses of this rank's targets, of a vocabulary of n, by the number
// of all that count in a step. Without padding that is known; otherwise the ranks that have a
// batch add it up, or the program says it of several batches.
func (b *Builder) meanOf(sum *gorgonia.Node, targets *Tokens, n int) (*gorgonia.Node, error) {
	switch {
	case !targets.padded:
		return b.scaled(sum, 1/float64(size(targets.shape)*b.batches))
	case b.batches > b.layout.DP:
		return gorgonia.HadamardDiv(sum, targets.told())
	}
	own := targets.own()
	count, err := gorgonia.Sum(targets.mask(targets.counts, 0, n, size(own), 1))
	if err != nil {
		return nil, err
	}
	return b.perCount(sum, count, targets)
}

// perCount divides this rank's share of a sum by a count that depends on the padding of tokens: the
// ranks of l.Data add it up.
func (b *Builder) perCount(sum, count *gorgonia.Node, t *Tokens) (_ *gorgonia.Node, err error) {
	b.counted = t.name
	if b.layout.Data.Size() > 1 {
		count, err = ops.AllReduce(b.layout.Data, backend.Sum, count)
	}
	if err != nil {
		return nil, err
	}
	one := gorgonia.NewConstant(b.number(1))
	if count, err = nn.Where(count, count, one); err != nil { // without any, the sum is 0
		return nil, err
	}
	if sum, err = gorgonia.HadamardDiv(sum, count); err != nil {
		return nil, err
	}
	return b.scaled(sum, float64(b.layout.DP)/float64(b.batches))
}

func noLabel(int) int { return nn.NoLabel }

// shared is the sum of the cross-entropies of logits whose columns the ranks of the Tensor group
// divide. own is the sum over the targets in this rank's columns, using only these columns. It
// lacks, for each of these targets, the difference between the logarithms of the sums of
// exponentials, over all columns and over this rank's.
func (b *Builder) shared(logits, own *gorgonia.Node, targets *Tokens, start,
	end int) (*gorgonia.Node, error) {
	rows, comm := logits.Shape()[0], b.layout.groups[Tensor]
	part, err := nn.LogSumExp([]int{1}, true, logits)
	if err != nil {
		return nil, err
	}
	parts, err := ops.AllGather(comm, 1, part)
	if err != nil {
		return nil, err
	}
	all, err := nn.LogSumExp([]int{1}, true, parts)
	if err != nil {
		return nil, err
	}
	lacking, err := gorgonia.Sub(all, part)
	if err != nil {
		return nil, err
	}
	mask := targets.mask(targets.counts, start, end, rows, 1)
	if lacking, err = gorgonia.HadamardProd(lacking, mask); err != nil {
		return nil, err
	}
	if lacking, err = gorgonia.Sum(lacking); err != nil {
		return nil, err
	}
	term, err := gorgonia.Add(own, lacking)
	if err != nil {
		return nil, err
	}
	return ops.ReduceFromParallel(comm, term)
}

// scaled returns x times a number.
func (b *Builder) scaled(x *gorgonia.Node, by float64) (*gorgonia.Node, error) {
	if by == 1 {
		return x, nil
	}
	return gorgonia.HadamardProd(x, gorgonia.NewConstant(b.number(by)))
}

// number returns a number of the builder's dtype.
func (b *Builder) number(x float64) any {
	if b.dtype == tensor.Float32 {
		return float32(x)
	}
	return x
}

// Grad adds the gradients of the loss with respect to all learnables and the rows that are
// looked up in tables, and returns the learnables. Train with [Builder.Training].
//
// The loss is Partial or Replicated over the Sequence group, and Replicated over the Tensor group.
// A [Builder.CrossEntropy], or what is made of one, is a share of the mean over all samples. So is
// any other loss that is Partial: what the ranks of l.Data have are terms of a sum. If no
// CrossEntropy is in the graph and the loss is Replicated ([Whole]), the gradients of replicas are
// averaged.
//
// Errors: [Builder.Err]; [ErrPlacement]; a learnable on which the loss does not depend.
func (b *Builder) Grad(loss Node) (gorgonia.Nodes, error) {
	b.apply("Grad", func() (Node, error) {
		if err := cmp.Or(require("loss", loss, Sequence, Partial, Replicated),
			require("loss", loss, Tensor, Replicated)); err != nil {
			return Node{}, err
		}
		if _, err := gorgonia.Grad(loss.Node, append(b.Learnables(), b.inputs...)...); err != nil {
			return Node{}, err
		}
		b.write(loss)
		return Node{}, nil
	}, "loss", loss)
	return b.Learnables(), b.err
}
