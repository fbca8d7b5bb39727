package models_test

import (
	"errors"
	"fmt"
	"sync"
	"testing"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/files"
	"github.com/euryale-ml/euryale/internal/safetensors"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/layers"
	"github.com/euryale-ml/euryale/models"
	"github.com/euryale-ml/euryale/vm"
)

const (
	embedding = "model.embed_tokens.weight"
	head      = "lm_head.weight"
)

// TestLookupsDoNotLearnThePaddingOfTheLlamaFamily: with pad_token_id, whose token is among those of
// the text, transformers' gradients without it are ours, except the row of the embedding. A model
// that has another head does not learn it at all, one that is tied as much as that head would with
// the same weights, and GPT-2 as before.
func TestLookupsDoNotLearnThePaddingOfTheLlamaFamily(t *testing.T) {
	for _, folder := range folders {
		want := expect(t, folder)
		ids, rows, each := want.tokens(t, 0)
		next, _, _ := want.tokens(t, 1)
		id := ids[3]
		dir := copied(t, folder)
		var row []float32 // of the gradient
		switch configured("pad_token_id", id-61)(t, dir); folder {
		case "gpt2":
		case "qwen2", "llama3-tied":
			row = headGradient(t, folder, ids, next, rows)[id*32:][:32]
		default:
			row = make([]float32, 32)
		}
		rewrittenIn("expected.safetensors", func(all map[string]safetensors.Tensor) {
			copy(backend.View[float32](all["grad."+embedding].Data)[id*len(row):], row)
		})(t, dir)
		f := require.Value(safetensors.Open(files.Disk(dir), "expected.safetensors"))(t)
		t.Cleanup(func() { f.Close() })
		for _, s := range layouts {
			t.Run(fmt.Sprint(folder, "/", s), func(t *testing.T) {
				within(t, s, func(l *layers.Layout, build sync.Locker) error {
					mine := rows / s.DP * each
					return run(dir, "", l, build, expected{f}, rows/s.DP, each,
						ids[l.Replica*mine:][:mine], next[l.Replica*mine:][:mine])
				})
			})
		}
	}
}

// headGradient returns the gradient of the head of a tied folder whose head has weights of its own,
// which are the embedding's.
func headGradient(t *testing.T, folder string, ids, next []int, rows int) (gradient []float32) {
	t.Helper()
	dir := copied(t, folder)
	configured("tie_word_embeddings", false)(t, dir)
	rewritten(func(all map[string]safetensors.Tensor) { all[head] = all[embedding] })(t, dir)
	within(t, layers.Sizes{DP: 1, SP: 1, TP: 1}, func(l *layers.Layout, _ sync.Locker) error {
		m, err := models.Load(dir)
		if err != nil {
			return err
		}
		defer m.Close()
		b := layers.NewBuilder(gorgonia.NewGraph(), l, tensor.Float32, 1)
		tokens := b.Tokens("tokens", 1, rows, len(ids)/rows)
		targets := b.Tokens("targets", 1, rows, len(ids)/rows)
		logits, err := m.Logits(b, tokens)
		if err != nil {
			return err
		}
		learnables, err := b.Grad(b.CrossEntropy(logits, targets))
		if err != nil {
			return err
		}
		machine, err := vm.New(b.Graph(), nil)
		if err != nil {
			return err
		}
		defer machine.Close()
		err = errors.Join(tokens.Set(ids), targets.Set(next), machine.RunAll())
		for _, n := range learnables {
			if n.Name() == head && err == nil {
				gradient = n.Deriv().Value().Data().([]float32)
			}
		}
		return err
	})
	return gradient
}
