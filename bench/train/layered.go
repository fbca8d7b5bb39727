package main

import (
	"fmt"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/autograd"
	"github.com/euryale-ml/euryale/layers"
	"github.com/euryale-ml/euryale/ops/nn"
)

// layered adds a model of package layers, whose ranks divide nothing.
func (b *builder) layered(model func(l *layers.Builder) layers.Node) *gorgonia.Node {
	return b.apply(func() (*gorgonia.Node, error) {
		layout, err := layers.NewLayout(autograd.Solo(), 1, 1, 1)
		if err != nil {
			return nil, err
		}
		l := layers.NewBuilder(b.graph, layout, tensor.Float32, 1)
		out := model(l)
		b.learnables = append(b.learnables, l.Learnables()...)
		if err := l.Err(); err != nil {
			return nil, err
		}
		return out.Node, layout.Close()
	})
}

// resnet is a residual network of examples/resnet, for pictures of 32x32.
type resnet struct {
	batch, filters int
	stages         []int // blocks of each
}

// loss classifies random pictures.
func (r resnet) loss(b *builder) *gorgonia.Node {
	const side, classes = 32, 10
	x := b.normal(1, r.batch, 3, side, side)
	return b.loss(b.layered(func(l *layers.Builder) layers.Node {
		h := l.To(layers.Whole(x), layers.Sequence, layers.Split(0))
		h = l.ConvBlock("stem", h, r.filters, [2]int{3, 3}, nn.ConvOptions{Pad: []int{1, 1}})
		for stage, blocks := range r.stages {
			for i := range blocks {
				stride := 1
				if stage > 0 && i == 0 {
					stride = 2
				}
				h = l.Residual(fmt.Sprintf("stage%d.block%d", stage, i), h, r.filters<<stage,
					stride)
			}
		}
		h = l.Apply("pool", func() (layers.Node, error) {
			n, err := nn.GlobalAvgPool2D(h.Node)
			if err != nil {
				return h, err
			}
			n, err = gorgonia.Reshape(n, tensor.Shape{r.batch, n.Shape()[1]})
			return layers.Place(n, h), err
		})
		return l.Bias("classes", l.Dense("classes", h, classes))
	}), r.batch, classes)
}

// recurrent is a language model of LSTM layers, as examples/charlstm has it.
type recurrent struct{ vocabulary, batch, steps, hidden, layers int }

// loss predicts random tokens, [steps, batch].
func (r recurrent) loss(b *builder) *gorgonia.Node {
	rows := r.steps * r.batch
	tokens := b.below(r.vocabulary, r.steps, r.batch)
	scores := b.layered(func(l *layers.Builder) layers.Node {
		embedding := l.Learn("words", layers.Normal(1), layers.Undivided, r.vocabulary, r.hidden)
		h := l.Apply("embedding", func() (layers.Node, error) {
			n, err := nn.Embedding(embedding.Node, tokens)
			return layers.Place(n, embedding), err
		})
		for i := range r.layers {
			h = l.LSTM(fmt.Sprint("layer", i), h, r.hidden, nn.RecurrentOptions{})
		}
		return l.Bias("scores", l.Dense("scores", h, r.vocabulary))
	})
	return b.loss(b.reshape(scores, rows, r.vocabulary), rows, r.vocabulary)
}
