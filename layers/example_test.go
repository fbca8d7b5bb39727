package layers_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"sync"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale"
	"github.com/euryale-ml/euryale/autograd/solver"
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/layers"
	"github.com/euryale-ml/euryale/vm"
)

// model is a transformer with one block, which predicts the next of 5 tokens.
func model(l *layers.Layout) (b *layers.Builder, in, out *layers.Tokens, loss layers.Node) {
	const batch, positions, vocabulary, width, seed = 1, 4, 5, 8, 1
	b = layers.NewBuilder(gorgonia.NewGraph(), l, tensor.Float64, seed)
	in, out = b.Tokens("in", 1, batch, positions), b.Tokens("out", 1, batch, positions)
	embedding := b.Learn("words", layers.Normal(0.1), 0, vocabulary, width) // sharded along axis 0
	x := b.To(b.Embedding(embedding, in), layers.Tensor, layers.Replicated)
	x = b.Positions("positions", x)
	o := layers.AttentionOptions{Heads: 2, Causal: true}
	x = b.Add(x, b.Attention("attention", b.LayerNorm("norm1", x), o))
	x = b.Add(x, b.MLP("mlp", b.LayerNorm("norm2", x), 2*width))
	return b, in, out, b.CrossEntropy(b.Logits(b.LayerNorm("norm", x), embedding), out)
}

// trained runs five steps as one rank of a layout, and returns the loss of the last.
func trained(l *layers.Layout, build sync.Locker) (float64, error) {
	build.Lock() // Gorgonia builds one graph at a time
	b, in, out, loss := model(l)
	learnables, err := b.Grad(loss)
	build.Unlock()
	if err != nil {
		return 0, err
	}
	m, err := vm.New(b.Graph(), nil, vm.WithSolver(&solver.SGD{Rate: 0.5}, learnables...),
		b.Training())
	if err != nil {
		return 0, err
	}
	for range 5 {
		err := errors.Join(in.Set([]int{0, 1, 2, 3}), out.Set([]int{1, 2, 3, 4}), m.RunAll())
		if err != nil {
			return 0, errors.Join(err, m.Close())
		}
	}
	return loss.Value().Data().(float64), m.Close()
}

// One program trains a transformer on any layout of the ranks, and gets the same model: here on one
// rank, and on two that shard the heads, the MLP and the vocabulary.
func ExampleBuilder() {
	for _, ranks := range []int{1, 2} {
		rank := func(comm backend.Communicator, build sync.Locker) error {
			l, err := layers.NewLayout(comm, 1, 1, ranks) // data x sequence x tensor
			if err != nil {
				return err
			}
			loss, err := trained(l, build)
			if err == nil && comm.Rank() == 0 {
				fmt.Printf("%v: loss %.6f\n", l, loss)
			}
			return errors.Join(err, l.Close())
		}
		if err := euryale.Run(context.Background(), ranks, rank); err != nil {
			log.Fatal(err)
		}
	}
	// Output:
	// dp1xsp1xtp1: loss 0.740613
	// dp1xsp1xtp2: loss 0.740613
}

// A mixture of experts on one rank, and on two that have two experts each. The tokens of the first
// sample all want one expert, which has capacity for half of them.
func ExampleBuilder_MoE() {
	for _, ranks := range []int{1, 2} {
		rank := func(comm backend.Communicator, build sync.Locker) error {
			l, err := layers.NewLayout(comm, 1, 1, ranks)
			if err != nil {
				return err
			}
			build.Lock()
			b := layers.NewBuilder(gorgonia.NewGraph(), l, tensor.Float64, 1)
			tokens := b.Tokens("tokens", 1, 2, 4) // of two samples
			x := b.Embedding(b.Learn("words", layers.Normal(1), layers.Undivided, 9, 8), tokens)
			x = b.To(x, layers.Sequence, layers.Split(0)) // whole samples
			e := b.MoE("experts", x, layers.MoEOptions{Experts: 4, Hidden: 16, Capacity: 2})
			build.Unlock()
			if b.Err() != nil {
				return b.Err()
			}
			m, err := vm.New(b.Graph(), nil, vm.Keep(e.Y.Node, e.Dropped.Node))
			if err != nil {
				return err
			}
			err = errors.Join(tokens.Set([]int{7, 7, 7, 7, 0, 1, 2, 3}), m.RunAll())
			if err == nil && comm.Rank() == 0 {
				fmt.Println(l, e.Y.Shape(), "dropped", e.Dropped.Value())
			}
			return errors.Join(err, m.Close(), l.Close())
		}
		if err := euryale.Run(context.Background(), ranks, rank); err != nil {
			log.Fatal(err)
		}
	}
	// Output:
	// dp1xsp1xtp1 (2, 4, 8) dropped 2
	// dp1xsp1xtp2 (2, 4, 8) dropped 2
}

// A table of a million rows that two ranks divide. A step changes the rows that it looks up.
func ExampleTable() {
	rank := func(comm backend.Communicator, build sync.Locker) error {
		l, err := layers.NewLayout(comm, 0, 1, 1)
		if err != nil {
			return err
		}
		build.Lock()
		b := layers.NewBuilder(gorgonia.NewGraph(), l, tensor.Float64, 1)
		items := b.Table("items", layers.Constant(1), 1<<20, 2)
		tokens := b.Tokens("tokens", 0, 1) // one for each rank
		y := items.Lookup(tokens)
		loss := layers.Place(gorgonia.Must(gorgonia.Sum(y.Node)), b.To(y, layers.Sequence,
			layers.Replicated))
		_, err = b.Grad(loss)
		build.Unlock()
		if err != nil {
			return err
		}
		m, err := vm.New(b.Graph(), nil, vm.Keep(items.Gradients()...))
		if err != nil {
			return err
		}
		const id = 1_000_000 // of both ranks; rank 0 has the row
		err = errors.Join(tokens.Set([]int{id}), m.RunAll(), items.Step(&solver.SGD{Rate: 0.25}))
		if err == nil && comm.Rank() == 0 {
			fmt.Println(items.Rows().Shape(), items.Rows().Data().([]float64)[id-2:id+2])
		}
		return errors.Join(err, m.Close(), l.Close())
	}
	if err := euryale.Run(context.Background(), 2, rank); err != nil {
		log.Fatal(err)
	}
	// Output:
	// (524288, 2) [1 1 0.5 0.5]
}
