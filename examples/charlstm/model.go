package main

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/fit"
	"github.com/euryale-ml/euryale/layers"
	"github.com/euryale-ml/euryale/ops/nn"
	"github.com/euryale-ml/euryale/vm"
)

const (
	written     = 300 // characters
	temperature = 0.8 // less than 1, so that likely characters become more likely
)

// model is a graph for some pieces of text.
type model struct {
	b            *layers.Builder
	x, y         *G.Node // characters [pieces, steps], and what follows each of them
	weight       *G.Node // of the loss: see fit.Data
	scores, loss *G.Node // scores of all characters, [pieces, steps, characters]
}

func (cfg config) build(layout *layers.Layout, pieces, characters int) model {
	b := layers.NewBuilder(G.NewGraph(), layout, tensor.Float32, seed)
	m := model{b: b}
	m.x = G.NewMatrix(b.Graph(), tensor.Int, G.WithShape(pieces, cfg.steps), G.WithName("x"),
		G.WithInit(G.Zeroes()))
	m.y = G.NewMatrix(b.Graph(), tensor.Int, G.WithShape(pieces, cfg.steps), G.WithName("y"),
		G.WithInit(G.Zeroes()))
	m.weight = G.NewScalar(b.Graph(), tensor.Float32, G.WithName("weight"),
		G.WithValue(float32(0)))
	words := b.Learn("characters", layers.Normal(1), layers.Undivided, characters, cfg.hidden)
	h := b.Apply("embedding", func() (layers.Node, error) {
		n, err := nn.Embedding(words.Node, m.x)
		return layers.Place(n, words), err
	})
	for i := range 2 {
		name, o := fmt.Sprint("layer", i+1), nn.RecurrentOptions{BatchFirst: true}
		if cfg.cell == "gru" {
			h = b.GRU(name, h, cfg.hidden, o)
		} else {
			h = b.LSTM(name, h, cfg.hidden, o)
		}
	}
	scores := b.Bias("scores", b.Dense("scores", h, characters))
	check(b.Err())
	m.scores = scores.Node
	m.loss = must(G.Mul(m.weight, must(nn.CrossEntropy(nn.NoLabel, m.scores, m.y))))
	return m
}

// data says where pieces of text go in the graph. The last batch of an epoch may have fewer.
func (m model) data(pieces fit.Set) fit.Data {
	return fit.Data{
		Set: pieces, Inputs: G.Nodes{m.x, m.y}, Loss: m.loss, Weights: m.weight,
		Pad: func(row []any) {
			for i := range row[1].([]int) {
				row[1].([]int)[i] = nn.NoLabel
			}
		},
	}
}

// write returns a text by a model with these learnables.
func (cfg config) write(layout *layers.Layout, device backend.Device, learnables G.Nodes,
	characters []rune) string {
	m := cfg.build(layout, 1, len(characters))
	for i, w := range m.b.Learnables() {
		check(G.Let(w, learnables[i].Value()))
	}
	machine := must(vm.New(m.b.Graph(), device, vm.Eval(), vm.Keep(m.scores)))
	defer machine.Close()
	r := rand.New(rand.NewPCG(seed, written))
	text := []int{max(0, slices.Index(characters, '\n'))}
	var line []rune
	for range written {
		seen := text[max(0, len(text)-cfg.steps):]
		window := m.x.Value().Data().([]int) // what is behind the text changes nothing
		copy(window, seen)
		check(machine.RunAll())
		scores := m.scores.Value().Data().([]float32)[(len(seen)-1)*len(characters):]
		next := choose(r, scores[:len(characters)])
		text, line = append(text, next), append(line, characters[next])
	}
	return string(line)
}

// choose returns a character by the scores of all, by Gumbel's trick.
func choose(r *rand.Rand, scores []float32) (character int) {
	best := math.Inf(-1)
	for i, s := range scores {
		if x := float64(s)/temperature - math.Log(r.ExpFloat64()); x > best {
			character, best = i, x
		}
	}
	return character
}
