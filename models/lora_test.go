package models_test

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"math"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/layers"
	"github.com/euryale-ml/euryale/models"
)

func TestSavedAdaptersAreLoaded(t *testing.T) {
	for _, folder := range []string{"gpt2", "llama3"} {
		m := load(t, filepath.Join("testdata", folder))
		require.NoError(t, m.LoadAdapter(filepath.Join("testdata", folder, "adapter")))
		weights := learned(t, m)
		dir := filepath.Join(t.TempDir(), "adapter")
		require.NoError(t, m.SaveAdapter(dir, maps.All(weights)))
		again := load(t, filepath.Join("testdata", folder))
		require.NoError(t, again.LoadAdapter(dir))
		for name, x := range learned(t, again) {
			require.Check(t, slices.Equal(x.Data().([]float32), weights[name].Data().([]float32)),
				"%s: %s has other values", folder, name)
		}
	}
}

// TestAnAdapterMayTakeItsOwnPlace: an adapter is in memory, so its file may be replaced, on
// Windows, too, and by SaveAdapter.
func TestAnAdapterMayTakeItsOwnPlace(t *testing.T) {
	dir, m := copied(t, filepath.Join("llama3", "adapter")), load(t, "testdata/llama3")
	require.NoError(t, m.LoadAdapter(dir))
	file("adapter_model.safetensors", nil)(t, dir)
	weights := learned(t, m)
	require.NoError(t, m.SaveAdapter(dir, maps.All(weights)))
	again := load(t, "testdata/llama3")
	require.NoError(t, errors.Join(again.LoadAdapter(dir), builds(t, again)))
}

// TestNewAdaptersBeginAsNothing: a new adapter changes nothing yet, and its matrices are all that
// is learnt, also of models with biases.
func TestNewAdaptersBeginAsNothing(t *testing.T) {
	for _, folder := range folders {
		family, all := 2, 7 // layers of a block that are adapted by default, and all
		if folder == "gpt2" {
			family, all = 1, 4
		}
		for layers, targets := range map[int][]string{family: nil, all: {"all-linear"}} {
			m := load(t, filepath.Join("testdata", folder))
			require.NoError(t, m.Adapt(models.LoRA{Rank: 2, Targets: targets}))
			weights := learned(t, m)
			require.Equal(t, fmt.Sprintf("%s, targets %v: the learnables", folder, targets),
				len(weights), 2*2*layers) // A and B in two blocks
			for name, x := range weights {
				zero := !slices.ContainsFunc(x.Data().([]float32), func(v float32) bool {
					return v != 0
				})
				require.Equal(t, fmt.Sprintf("%s: zeros", name), zero,
					strings.HasSuffix(name, ".lora_B.weight"))
			}
		}
	}
}

func TestWrongAdaptersAreRefused(t *testing.T) {
	for want, l := range map[string]models.LoRA{
		"rank 0":                {},
		`no layers "c_attn"`:    {Rank: 2, Targets: []string{"c_attn"}},
		"0 layers":              {Rank: 2, Targets: []string{}},
		`no layers "mlp.q_proj`: {Rank: 2, Targets: []string{"mlp.q_proj"}},
		"dropout 1":             {Rank: 2, Dropout: 1},
	} {
		m := load(t, "testdata/llama3")
		require.Fails(t, "Adapt", m.Adapt(l), want)
	}
	for want, spoil := range map[string]func(t *testing.T, dir string){
		"peft_type":               changed("peft_type", "LOHA"),
		"use_dora":                changed("use_dora", true),
		"it is [4 32]":            changed("rank_pattern", map[string]any{"q_proj": 4}),
		"layers.1.mlp":            changed("layers_to_transform", []int{0}),
		"has no base":             changed("target_modules", "all-linear"),
		"regular express":         changed("target_modules", `.*(?=q)q_proj`),
		`is "pissa", for which`:   changed("init_lora_weights", "pissa"),
		`"pissa_niter_4"`:         changed("init_lora_weights", "pissa_niter_4"),
		`"olora"`:                 changed("init_lora_weights", "olora"),
		`"loftq"`:                 changed("init_lora_weights", "loftq"),
		"alora":                   changed("alora_invocation_tokens", []int{5}),
		"trainable_token":         changed("trainable_token_indices", []int{5}),
		"new_key":                 changed("new_key", 1),
		"SEQ_CLS":                 changed("task_type", "SEQ_CLS"),
		"no linear layer":         changed("target_modules", []string{"embed_tokens"}),
		"no such layers":          changed("target_modules", []string{"c_attn"}),
		"modules_to_save":         changed("modules_to_save", []string{"proj"}),
		"is 0, want 1":            changed("r", 0),
		"without layers_t":        changed("layers_pattern", "layers"),
		"has shape [3 32]":        changed("r", 4),
		"more than 1048576 bytes": file("adapter_config.json", make([]byte, 2<<20)),
		"has no base_model.model.model.layers.0.self_attn.k_proj": changed("target_modules",
			[]string{"k_proj"}),
		"by adapter_config.json there is none": changed("target_modules", []string{"q_proj"}),
	} {
		m := load(t, "testdata/llama3")
		dir := copied(t, filepath.Join("llama3", "adapter"))
		spoil(t, dir)
		err := m.LoadAdapter(dir)
		if err == nil {
			err = builds(t, m)
		}
		require.Fails(t, "builds", err, want)
	}
	m := load(t, "testdata/llama3")
	require.Fails(t, "SaveAdapter", m.SaveAdapter(t.TempDir(), maps.All(learned(t, m))),
		"call Adapt")
	require.Fails(t, "Adapt after Logits", m.Adapt(models.LoRA{Rank: 2}), "before Logits")
	m = load(t, "testdata/llama3")
	require.NoError(t, m.Adapt(models.LoRA{Rank: 2}))
	const first = "model.layers.0.self_attn.q_proj.lora_A.weight"
	one := tensor.New(tensor.FromScalar(1.))
	require.Fails(t, "SaveAdapter", m.SaveAdapter(copied(t, "gpt2"), maps.All(learned(t, m))),
		"it has a model")
	for want, spoil := range map[string]func(w map[string]*tensor.Dense){
		"no " + first:      func(w map[string]*tensor.Dense) { delete(w, first) },
		"9 learnables":     func(w map[string]*tensor.Dense) { w["x.lora_A.weight"] = w[first] },
		"nil or a scalar":  func(w map[string]*tensor.Dense) { w[first] = one },
		"q_proj.weight is": func(w map[string]*tensor.Dense) { w["q_proj.weight"] = w[first] },
		"[0 1] is NaN": func(w map[string]*tensor.Dense) {
			w[first] = w[first].Clone().(*tensor.Dense)
			w[first].Data().([]float32)[w[first].Shape()[1]] = float32(math.NaN())
		},
	} {
		weights := map[string]*tensor.Dense{}
		for name, x := range learned(t, m) {
			if strings.Contains(name, ".lora_") {
				weights[name] = x
			}
		}
		spoil(weights)
		require.Fails(t, "SaveAdapter", m.SaveAdapter(t.TempDir(), maps.All(weights)), want)
	}
}

// builds builds the graph of a model.
func builds(t *testing.T, m *models.Model) (err error) {
	t.Helper()
	within(t, layers.Sizes{DP: 1, SP: 1, TP: 1}, func(l *layers.Layout, build sync.Locker) error {
		build.Lock()
		defer build.Unlock()
		b := layers.NewBuilder(gorgonia.NewGraph(), l, tensor.Float32, 1)
		_, err = m.Logits(b, b.Tokens("tokens", 1, 2, 4))
		return nil
	})
	return err
}

// TestAnAdapterIsNotSavedWhereAModelMayBe: a store that does not say whether there is one.
func TestAnAdapterIsNotSavedWhereAModelMayBe(t *testing.T) {
	m := require.Value(models.Load("testdata/llama3", func(string) (fs.FS, error) {
		return refusing{}, nil
	}))(t)
	t.Cleanup(func() { require.NoError(t, m.Close()) })
	require.NoError(t, m.Adapt(models.LoRA{Rank: 2}))
	err := m.SaveAdapter("s3://bucket/adapter", maps.All(learned(t, m)))
	require.Fails(t, "SaveAdapter", err, fs.ErrPermission)
}

// refusing is an empty store that does not say whether it has a config.json.
type refusing struct{}

func (refusing) Open(name string) (fs.File, error) {
	if path.Base(name) == "config.json" {
		return nil, fs.ErrPermission
	}
	return nil, fs.ErrNotExist
}
