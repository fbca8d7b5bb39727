package models_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"sync"
	"testing"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/safetensors"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/layers"
	"github.com/euryale-ml/euryale/models"
	"github.com/euryale-ml/euryale/ops"
	"github.com/euryale-ml/euryale/vm"
)

// fileCase is a case of testdata/cases.py.
type fileCase struct {
	Folder  string
	Config  map[string]json.RawMessage // the order of some objects counts
	Adapter string
	Keys    map[string]json.RawMessage
	Logits  []float64
	Greedy  []int
}

func (c fileCase) String() string {
	text, _ := json.Marshal([]any{c.Config, c.Keys})
	return fmt.Sprintf("%s %s %s", c.Folder, c.Adapter, text)
}

// readCases reads a file of testdata/cases.
func readCases(t *testing.T, name string, to any) {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("testdata", "cases", name))
	if err == nil {
		err = json.Unmarshal(text, to)
	}
	require.NoError(t, err)
}

// made returns a copy of the folder of a case, with its keys, and the folder of its adapter.
func (c fileCase) made(t *testing.T) (dir, adapter string) {
	t.Helper()
	dir = copied(t, c.Folder)
	for key, value := range c.Config {
		configured(key, value)(t, dir)
	}
	switch c.Adapter {
	case "":
	case "adapter":
		adapter = filepath.Join(dir, "adapter")
		for key, value := range c.Keys {
			changed(key, value)(t, adapter)
		}
	default:
		adapter = filepath.Join("testdata", "cases", c.Adapter)
	}
	return dir, adapter
}

// loaded is a model with an adapter, if there is one.
func loaded(dir, adapter string) (*models.Model, error) {
	m, err := models.Load(dir)
	if err == nil && adapter != "" {
		err = m.LoadAdapter(adapter)
	}
	return m, err
}

// lastLogits returns the logits of the last position of the first row of a folder's tokens.
func lastLogits(m *models.Model, l *layers.Layout, build sync.Locker, ids []int,
	options ...vm.Option) (logits []float64, err error) {
	build.Lock()
	b := layers.NewBuilder(gorgonia.NewGraph(), l, tensor.Float32, 1)
	tokens := b.Tokens("tokens", 1, 1, len(ids))
	y, err := m.Logits(b, tokens)
	if err == nil {
		y = b.To(b.To(y, layers.Tensor, layers.Replicated), layers.Sequence, layers.Replicated)
	}
	build.Unlock()
	if err = errors.Join(err, b.Err()); err != nil {
		return nil, err
	}
	machine, err := vm.New(b.Graph(), nil, append(options, vm.Keep(y.Node))...)
	if err != nil {
		return nil, err
	}
	defer machine.Close()
	if err := errors.Join(tokens.Set(ids), machine.RunAll()); err != nil {
		return nil, ops.Cause(err)
	}
	all := numbers(y.Value())
	return all[len(all)-m.Vocabulary:], nil
}

// firstRow returns the first row of tokens of a folder.
func firstRow(t *testing.T, folder string) []int {
	t.Helper()
	x := require.Value(expect(t, folder).Read("tokens"))(t)
	ids := make([]int, x.Shape[1])
	for i := range ids {
		ids[i] = int(backend.View[int64](x.Data)[i])
	}
	return ids
}

// TestKeysMeanWhatTheyMeanToTransformersAndPEFT: the values of keys of config.json and
// adapter_config.json, and missing ones, give their logits, on every layout.
func TestKeysMeanWhatTheyMeanToTransformersAndPEFT(t *testing.T) {
	var cases []fileCase
	readCases(t, "cases.json", &cases)
	for _, c := range cases {
		dir, adapter := c.made(t)
		ids := firstRow(t, c.Folder)
		for _, s := range []layers.Sizes{{DP: 1, SP: 1, TP: 1}, {DP: 1, SP: 2, TP: 2}} {
			within(t, s, func(l *layers.Layout, build sync.Locker) error {
				m, err := loaded(dir, adapter)
				if err != nil {
					return fmt.Errorf("%v: %w", c, err)
				}
				defer m.Close()
				got, err := lastLogits(m, l, build, ids, vm.Eval())
				if err == nil {
					err = closeTo("logits", got, c.Logits)
				}
				if err != nil {
					err = fmt.Errorf("%v, %v: %w", c, s, err)
				}
				return err
			})
		}
	}
}

// TestWindowsHideInGeneration: what is in the caches before a window is not attended to.
func TestWindowsHideInGeneration(t *testing.T) {
	var cases []fileCase
	readCases(t, "cases.json", &cases)
	for _, c := range cases {
		if c.Greedy == nil {
			continue
		}
		dir, _ := c.made(t)
		m := load(t, dir)
		g, err := models.NewGenerator(m, nil, models.GenerateOptions{Batch: 2, Context: 40})
		require.NoError(t, err)
		var got [2][]int
		prompt := firstRow(t, c.Folder)[:8]
		err = g.Generate(context.Background(), [][]int{{1, 2, 3}, prompt},
			models.Sampling{Max: len(c.Greedy)}, func(row, token int) error {
				got[row] = append(got[row], token)
				return nil
			})
		if err = errors.Join(err, g.Close()); err != nil || !slices.Equal(got[1], c.Greedy) {
			t.Errorf("%v: %v, want %v: %v", c, got[1], c.Greedy, err)
		}
	}
}

// TestAnglesThatGrowAreRefusedInGeneration: keys in caches would have those of a shorter text.
func TestAnglesThatGrowAreRefusedInGeneration(t *testing.T) {
	dir := copied(t, "qwen2")
	configured("rope_scaling", map[string]any{"type": "dynamic", "factor": 2})(t, dir)
	m := load(t, dir)
	for context, refused := range map[int]bool{80: false, 81: true} {
		g, err := models.NewGenerator(m, nil, models.GenerateOptions{Context: context})
		if err == nil {
			err = g.Close()
		}
		require.Check(t, (err != nil) == refused, "a context of %d: %v", context, err)
	}
}

// TestMissingKeysAreWhatTheClassesTake: type by type.
func TestMissingKeysAreWhatTheClassesTake(t *testing.T) {
	all := map[string]map[string]any{}
	readCases(t, "defaults.json", &all)
	for kind, want := range all {
		c := require.Value(models.ReadConfig(fmt.Appendf(nil, `{"model_type":%q}`, kind)))(t)
		got := map[string]any{"vocab_size": c.Vocabulary, "hidden_size": c.Width,
			"num_hidden_layers": c.Blocks, "num_attention_heads": c.Heads,
			"num_key_value_heads": c.KeyHeads, "head_dim": c.HeadWidth,
			"intermediate_size": c.Hidden, "max_position_embeddings": c.Positions,
			"rms_norm_eps": c.Epsilon, "tie_word_embeddings": c.Tied, "sliding_window": c.Window,
			"bos_token_id": c.BOS, "attention_dropout": c.Dropout.Attention,
			"attn_pdrop": c.Dropout.Attention, "embd_pdrop": c.Dropout.Embedding,
			"resid_pdrop": c.Dropout.Residual}
		if got["eos_token_id"] = nil; len(c.EOS) == 1 {
			got["eos_token_id"] = c.EOS[0]
		}
		for key, value := range want {
			if value == nil && key != "eos_token_id" && key != "bos_token_id" {
				continue // the class has no such key, or another one for it
			} else if value == nil && key == "bos_token_id" {
				value = -1
			}
			require.Check(t, fmt.Sprint(got[key]) == fmt.Sprint(value), "%s: %s is %v, want %v",
				kind, key, got[key], value)
		}
	}
}

// TestSavedAdaptersOfAllKindsAreLoaded: with what their configuration says.
func TestSavedAdaptersOfAllKindsAreLoaded(t *testing.T) {
	var cases []fileCase
	readCases(t, "cases.json", &cases)
	for _, c := range cases {
		if c.Adapter == "" {
			continue
		}
		from, adapter := c.made(t)
		m := load(t, from)
		require.NoError(t, m.LoadAdapter(adapter))
		weights, dir := learned(t, m), filepath.Join(t.TempDir(), "adapter")
		err := m.SaveAdapter(dir, maps.All(weights))
		require.That(t, err == nil, "%v: %v", c, err)
		one := layers.Sizes{DP: 1, SP: 1, TP: 1}
		within(t, one, func(l *layers.Layout, build sync.Locker) error {
			again, err := loaded(from, dir)
			if err != nil {
				return err
			}
			defer again.Close()
			got, err := lastLogits(again, l, build, firstRow(t, c.Folder), vm.Eval())
			if err == nil {
				err = closeTo(c.String(), got, c.Logits)
			}
			return err
		})
		var was, is map[string]any
		for name, to := range map[string]*map[string]any{adapter: &was, dir: &is} {
			text, err := os.ReadFile(filepath.Join(name, "adapter_config.json"))
			if err == nil {
				err = json.Unmarshal(text, to)
			}
			require.NoError(t, err)
		}
		require.Check(t, reflect.DeepEqual(was, is), "%v: the configuration is %v, was %v", c, is,
			was)
	}
}

// dropping is a folder whose configuration asks for dropout, of almost nothing or much.
func dropping(t *testing.T, folder string, p float64) string {
	dir := copied(t, folder)
	keys := []string{"attention_dropout"}
	if folder == "gpt2" {
		keys = []string{"attn_pdrop", "embd_pdrop", "resid_pdrop"}
	}
	for _, key := range keys {
		configured(key, p)(t, dir)
	}
	if folder == "mistral" {
		configured("sliding_window", 5)(t, dir)
	}
	return dir
}

// TestDropoutIsOnInTrainingAlone: as the configurations ask for it, alike on every layout; not in
// evaluation, and not without Random. With a probability of almost 0 attention is what it is
// without.
func TestDropoutIsOnInTrainingAlone(t *testing.T) {
	for _, folder := range []string{"gpt2", "llama3", "mistral", "qwen3"} {
		ids := firstRow(t, folder)
		logits := func(p float64, adapter string, s layers.Sizes, random bool,
			options ...vm.Option) (logits []float64) {
			dir := dropping(t, folder, p)
			if adapter != "" {
				adapter = filepath.Join(dir, "adapter")
				changed("lora_dropout", 0.5)(t, adapter)
			}
			within(t, s, func(l *layers.Layout, build sync.Locker) error {
				m, err := loaded(dir, adapter)
				if err != nil {
					return err
				}
				defer m.Close()
				if !random {
					m.Random = nil
				}
				y, err := lastLogits(m, l, build, ids, options...)
				if l.Comm(layers.Tensor).Rank() == 0 && l.Comm(layers.Sequence).Rank() == 0 {
					logits = y
				}
				return err
			})
			return logits
		}
		one := layers.Sizes{DP: 1, SP: 1, TP: 1}
		plain := logits(0, "", one, true)
		for what, same := range map[string][]float64{
			"evaluation": logits(0.4, "", one, true, vm.Eval()),
			"no Random":  logits(0.4, "", one, false),
			"almost 0":   logits(1e-12, "", one, true),
		} {
			err := closeTo(what, same, plain)
			require.Check(t, err == nil, "%s: %v", folder, err)
		}
		for _, adapter := range []string{"", "adapter"} {
			if adapter != "" && folder != "gpt2" && folder != "llama3" {
				continue
			}
			dropped := logits(0.4, adapter, one, true)
			require.Check(t, closeTo("dropout", dropped, logits(0.4, adapter, one, false)) != nil,
				"%s %s: nothing is dropped in training", folder, adapter)
			for _, s := range layouts[2:] {
				err := closeTo("logits", logits(0.4, adapter, s, true), dropped)
				require.Check(t, err == nil, "%s %s, %v: %v", folder, adapter, s, err)
			}
		}
	}
}

// TestDropoutAloneChangesNothingElse: with a probability of almost 0, all gradients are as without.
func TestDropoutAloneChangesNothingElse(t *testing.T) {
	for _, folder := range []string{"gpt2", "llama3"} {
		want := expect(t, folder)
		ids, rows, each := want.tokens(t, 0)
		next, _, _ := want.tokens(t, 1)
		dir := dropping(t, folder, 1e-12)
		s := layers.Sizes{DP: 1, SP: 2, TP: 1}
		within(t, s, func(l *layers.Layout, build sync.Locker) error {
			return run(dir, "", l, build, want, rows, each, ids, next)
		})
	}
}

// TestAForgottenNextIsAnError: two steps would have the same masks.
func TestAForgottenNextIsAnError(t *testing.T) {
	m := load(t, dropping(t, "gpt2", 0.5))
	within(t, layers.Sizes{DP: 1, SP: 1, TP: 1}, func(l *layers.Layout, build sync.Locker) error {
		b := layers.NewBuilder(gorgonia.NewGraph(), l, tensor.Float32, 1)
		tokens := b.Tokens("tokens", 1, 1, 4)
		y, err := m.Logits(b, tokens)
		if err != nil {
			return err
		}
		machine, err := vm.New(b.Graph(), nil, vm.Keep(y.Node))
		if err != nil {
			return err
		}
		defer machine.Close()
		if err := errors.Join(tokens.Set([]int{1, 2, 3, 4}), machine.RunAll()); err != nil {
			return err
		}
		if machine.RunAll() == nil {
			return errors.New("a second run had the masks of the first one")
		}
		m.Random.Next(0)
		return machine.RunAll()
	})
}

// TestAnotherHeadIsKept: a folder that ties the head to the embedding, and has another one, scores
// by that, and is written with it; one that has the embedding as its head alone has both.
func TestAnotherHeadIsKept(t *testing.T) {
	for what, change := range map[string]func(all map[string]safetensors.Tensor){
		"another head": func(map[string]safetensors.Tensor) {},
		"the same head": func(all map[string]safetensors.Tensor) {
			all["lm_head.weight"] = all["model.embed_tokens.weight"]
		},
		"no embedding": func(all map[string]safetensors.Tensor) {
			delete(all, "model.embed_tokens.weight")
		},
		"no prefix": func(all map[string]safetensors.Tensor) {
			for name, x := range maps.Clone(all) {
				delete(all, name)
				if name != "lm_head.weight" {
					all[name[len("model."):]] = x
				}
			}
		},
	} {
		dir := copied(t, "llama3")
		configured("tie_word_embeddings", true)(t, dir)
		rewritten(change)(t, dir)
		m := load(t, dir)
		require.Equal(t, fmt.Sprintf("%s: tied", what), m.Tied, what != "another head")
		weights, out := learned(t, m), filepath.Join(t.TempDir(), "out")
		err := m.Save(out, maps.All(weights))
		require.That(t, err == nil, "%s: %v", what, err)
		again := load(t, out)
		require.Check(t, again.Tied == m.Tied, "%s: it is tied %v when it is saved", what,
			again.Tied)
		for name, x := range learned(t, again) {
			require.Check(t, slices.Equal(x.Data().([]float32), weights[name].Data().([]float32)),
				"%s: %s has other values", what, name)
		}
	}
}
