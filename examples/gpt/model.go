package main

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"strings"
	"sync"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/layers"
	"github.com/euryale-ml/euryale/ops/nn"
	"github.com/euryale-ml/euryale/vm"
)

// deviation is GPT-2's, of embeddings.
const deviation = 0.02

// logits builds the model: the scores of the character behind each position, split over the Sequence
// and the Tensor group. Dropouts are where GPT-2 has them, except inside attention.
func (cfg config) logits(b *layers.Builder, tokens *layers.Tokens, vocabulary int, random *nn.Random) layers.Node {
	drop := func(x layers.Node) layers.Node {
		if cfg.dropout == 0 {
			return x
		}
		return b.Dropout(cfg.dropout, random, x)
	}
	words := b.Learn("words", layers.Normal(deviation), 0, vocabulary, cfg.width)
	x := b.To(b.Embedding(words, tokens), layers.Tensor, layers.Replicated)
	if cfg.positions == learned {
		x = drop(b.Positions("positions", x))
	} else {
		x = drop(b.Sinusoids(deviation, x))
	}
	for i := range cfg.layers {
		name := fmt.Sprint("block", i)
		h := b.LayerNorm(name+".norm1", x)
		x = b.Add(x, drop(b.Attention(name+".attention", h, layers.AttentionOptions{Heads: cfg.heads, Causal: true})))
		h = b.LayerNorm(name+".norm2", x)
		x = b.Add(x, drop(b.MLP(name+".mlp", h, 4*cfg.width)))
	}
	return b.Logits(b.LayerNorm("norm", x), words)
}

// operations returns the floating-point operations of a training step for each token, of a model of so
// many parameters: see the package comment.
func (cfg config) operations(parameters int) float64 {
	if cfg.positions == learned {
		parameters -= cfg.context * cfg.width // they are looked up
	}
	return float64(6*parameters + 12*cfg.layers*cfg.width*cfg.context)
}

// peaks are the floating-point operations in a second that products have at most, by the device's model
// and the precision, without sparsity: the vendor's numbers.
var peaks = map[string]map[vm.Precision]float64{
	"NVIDIA H200":           {vm.F32: 67e12, vm.TF32: 495e12, vm.BF16: 989e12},
	"NVIDIA H100 80GB HBM3": {vm.F32: 67e12, vm.TF32: 495e12, vm.BF16: 989e12},
	"NVIDIA A100":           {vm.F32: 19.5e12, vm.TF32: 156e12, vm.BF16: 312e12},
}

// peakOf returns the peak of a device, 0 if it is not known.
func peakOf(d backend.Device, p vm.Precision) float64 {
	named, ok := d.(interface{ Model() string })
	if !ok {
		return 0
	}
	for model, peak := range peaks {
		if strings.HasPrefix(named.Model(), model) {
			return peak[p]
		}
	}
	return 0
}

// temperature is less than 1, so that likely characters become more likely.
const temperature = 0.8

// write returns n characters that a trained model writes: all ranks draw the same. It is collective.
func (cfg config) write(l *layers.Layout, build sync.Locker, on backend.Device, c corpus, trained gorgonia.Nodes, n int) (string, error) {
	build.Lock()
	b := layers.NewBuilder(gorgonia.NewGraph(), l, tensor.Float32, cfg.seed)
	tokens := b.Tokens("tokens", 1, 1, cfg.context)
	logits := cfg.logits(b, tokens, len(c.characters), nn.NewRandom(0))
	logits = b.To(b.To(logits, layers.Tensor, layers.Replicated), layers.Sequence, layers.Replicated)
	err := b.Err()
	for i, w := range b.Learnables() {
		err = errors.Join(err, gorgonia.Let(w, trained[i].Value()))
	}
	build.Unlock()
	if err != nil {
		return "", err
	}
	m, err := vm.New(b.Graph(), on, vm.Eval(), vm.Keep(logits.Node), vm.WithPrecision(cfg.precision))
	if err != nil {
		return "", err
	}
	text := []int{c.first()}
	r := rand.New(rand.NewPCG(cfg.seed, uint64(n)))
	for range n {
		seen := text[max(0, len(text)-cfg.context):]
		window := make([]int, cfg.context) // what is behind the text changes nothing
		copy(window, seen)
		if err = tokens.Set(window); err == nil {
			err = m.RunAll()
		}
		if err != nil {
			break
		}
		scores := logits.Value().Data().([]float32)
		text = append(text, draw(r, scores[(len(seen)-1)*len(c.characters):][:len(c.characters)]))
	}
	return c.text(text[1:]), errors.Join(err, m.Close())
}

// draw returns a token by the scores of all.
func draw(r *rand.Rand, scores []float32) int {
	highest := float64(scores[0])
	for _, s := range scores {
		highest = max(highest, float64(s))
	}
	weights, sum := make([]float64, len(scores)), 0.0
	for i, s := range scores {
		weights[i] = math.Exp((float64(s) - highest) / temperature)
		sum += weights[i]
	}
	at := r.Float64() * sum
	for i, w := range weights {
		if at -= w; at < 0 {
			return i
		}
	}
	return len(scores) - 1
}
