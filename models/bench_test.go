package models_test

import (
	"encoding/json"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/bench"
	"github.com/euryale-ml/euryale/internal/safetensors"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/models"
	"github.com/euryale-ml/euryale/vm"
)

// BenchmarkGenerate is for the host what bench/peers/generate_torch.py --device cpu --precision f32
// measures of transformers.
func BenchmarkGenerate(b *testing.B) { generates(b, nil, vm.F32) }

// written is a line of generate_torch.py.
type written struct {
	Model     string  `json:"model"`
	Precision string  `json:"precision"`
	Mode      string  `json:"mode"`
	Batch     int     `json:"batch"`
	Prompt    int     `json:"prompt"`
	New       int     `json:"new"`
	Speed     float64 `json:"tokens_per_s"`
	Prefill   float64 `json:"prefill_ms"`
}

// generates measures the model of the folder EURYALE_FOLDER, or a GPT-2 of 124 M random weights. It
// prints a line for each batch: the medians of all calls. With -short the model is a tiny one.
func generates(b *testing.B, d backend.Device, p vm.Precision) {
	prompt, tokens, config := 64, 256, gpt2Sizes{12, 768, 12, 50257}
	if testing.Short() {
		prompt, tokens, config = 5, 4, gpt2Sizes{2, 24, 4, 61}
	}
	name, folder := "gpt2", os.Getenv("EURYALE_FOLDER")
	if folder == "" {
		folder = config.folder(b)
	} else {
		name = filepath.Base(folder)
	}
	m := require.Value(models.Load(folder))(b)
	defer m.Close()
	for _, batch := range []int{1, 16} {
		b.Run(fmt.Sprint("batch=", batch), func(b *testing.B) {
			g := require.Value(models.NewGenerator(m, d, models.GenerateOptions{Batch: batch,
				Context: prompt + tokens, Precision: p}))(b)
			defer g.Close()
			r := rand.New(rand.NewPCG(1, 1))
			prompts := make([][]int, batch)
			for row := range prompts {
				for range prompt {
					prompts[row] = append(prompts[row], r.IntN(m.Vocabulary))
				}
			}
			generateFor(b, g, prompts, min(tokens, 8)) // which makes plans
			var prefills, speeds []float64
			for b.Loop() {
				prefill, rest := generateFor(b, g, prompts, tokens)
				prefills = append(prefills, prefill.Seconds()*1e3)
				speeds = append(speeds, float64(batch*(tokens-1))/rest.Seconds())
			}
			line := written{name, p.String(), "plan", batch, prompt, tokens,
				rounded(bench.Median(speeds)), rounded(bench.Median(prefills))}
			b.ReportMetric(line.Speed, "tokens/s")
			b.ReportMetric(line.Prefill, "prefill-ms")
			require.NoError(b, json.NewEncoder(os.Stdout).Encode(line))
		})
	}
}

func rounded(x float64) float64 { return math.Round(x*1e3) / 1e3 }

// generateFor returns the time to the first tokens, and from there to the last ones.
func generateFor(b *testing.B, g *models.Generator, prompts [][]int,
	tokens int) (prefill, rest time.Duration) {
	n, begin, first := 0, time.Now(), time.Time{}
	require.NoError(b, g.Generate(b.Context(), prompts, models.Sampling{Max: tokens},
		func(int, int) error {
			if n++; n == len(prompts) {
				first = time.Now()
			}
			return nil
		}))
	require.That(b, n == tokens*len(prompts), "%d tokens, want %d of each of %d prompts", n, tokens,
		len(prompts))
	return first.Sub(begin), time.Since(first)
}

// gpt2Sizes are the sizes of a GPT-2.
type gpt2Sizes struct{ blocks, width, heads, vocabulary int }

// folder writes a folder of random weights.
func (s gpt2Sizes) folder(b *testing.B) (dir string) {
	const positions = 1024
	r, tensors := rand.New(rand.NewPCG(1, 1)), map[string]safetensors.Tensor{}
	draw := func(mean float32, name string, shape ...int) {
		t := safetensors.New(backend.F32, shape)
		data := backend.View[float32](t.Data)
		for i := range data {
			data[i] = mean + 0.02*float32(r.NormFloat64())
		}
		tensors[name] = t
	}
	n := s.width
	layer := func(name string, in, out int) {
		draw(0, name+".weight", in, out)
		draw(0, name+".bias", out)
	}
	norm := func(name string) {
		draw(1, name+".weight", n)
		draw(0, name+".bias", n)
	}
	draw(0, "transformer.wte.weight", s.vocabulary, n)
	draw(0, "transformer.wpe.weight", positions, n)
	for i := range s.blocks {
		h := fmt.Sprintf("transformer.h.%d.", i)
		norm(h + "ln_1")
		norm(h + "ln_2")
		layer(h+"attn.c_attn", n, 3*n)
		layer(h+"attn.c_proj", n, n)
		layer(h+"mlp.c_fc", n, 4*n)
		layer(h+"mlp.c_proj", 4*n, n)
	}
	norm("transformer.ln_f")
	dir = b.TempDir()
	config, err := json.Marshal(map[string]any{"model_type": "gpt2", "vocab_size": s.vocabulary,
		"n_positions": positions, "n_embd": n, "n_layer": s.blocks, "n_head": s.heads,
		"activation_function": "gelu_new", "layer_norm_epsilon": 1e-5})
	if err == nil {
		err = os.WriteFile(filepath.Join(dir, "config.json"), config, 0o600)
	}
	require.NoError(b, err)
	f, err := os.Create(filepath.Join(dir, "model.safetensors"))
	if err == nil {
		err = safetensors.Write(f, tensors, nil)
	}
	require.NoError(b, err)
	require.NoError(b, f.Close())
	return dir
}
