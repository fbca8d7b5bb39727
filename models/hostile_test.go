package models_test

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"runtime"
	"strings"
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
	"github.com/euryale-ml/euryale/models/tokenizer"
)

// copied returns a copy of a folder of testdata.
func copied(t *testing.T, folder string) string {
	t.Helper()
	dir := t.TempDir()
	require.NoError(t, os.CopyFS(dir, os.DirFS(filepath.Join("testdata", folder))))
	return dir
}

// configured is a change of config.json, and changed one of adapter_config.json.
func configured(key string, value any) func(t *testing.T, dir string) {
	return changedIn("config.json", key, value)
}

func changed(key string, value any) func(t *testing.T, dir string) {
	return changedIn("adapter_config.json", key, value)
}

func changedIn(name, key string, value any) func(t *testing.T, dir string) {
	return func(t *testing.T, dir string) {
		path := filepath.Join(dir, name)
		text, err := os.ReadFile(path)
		require.NoError(t, err)
		var c map[string]any
		if err = json.Unmarshal(text, &c); err == nil {
			c[key] = value
			text, err = json.Marshal(c)
		}
		if err == nil {
			err = os.WriteFile(path, text, 0o600)
		}
		require.NoError(t, err)
	}
}

// rewritten is a change of the tensors of model.safetensors.
func rewritten(change func(map[string]safetensors.Tensor)) func(t *testing.T, dir string) {
	return rewrittenIn("model.safetensors", change)
}

func rewrittenIn(name string, change func(map[string]safetensors.Tensor)) func(t *testing.T,
	dir string) {
	return func(t *testing.T, dir string) {
		path := filepath.Join(dir, name)
		f, err := safetensors.Open(files.Disk(path), ".")
		require.NoError(t, err)
		defer f.Close()
		all := map[string]safetensors.Tensor{}
		for _, name := range f.Names() {
			if all[name], err = f.Read(name); err != nil {
				t.Fatal(err)
			}
		}
		change(all)
		to, err := os.Create(path)
		if err == nil {
			err = safetensors.Write(to, all, nil)
		}
		require.That(t, err == nil && to.Close() == nil, "%v", err)
	}
}

// file is another text of a file, or its first bytes.
func file(name string, text []byte) func(t *testing.T, dir string) {
	return func(t *testing.T, dir string) {
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), text, 0o600))
	}
}

func shortened(t *testing.T, dir string) {
	require.NoError(t, os.Truncate(filepath.Join(dir, "model.safetensors"), 5000))
}

// TestAFolderWithoutAFileSaysWhatToDo: an adapter is no model, and a model no adapter, and files of
// other formats are not read.
func TestAFolderWithoutAFileSaysWhatToDo(t *testing.T) {
	without := func(name string) string {
		dir := copied(t, "llama3")
		require.NoError(t, os.Remove(filepath.Join(dir, name)))
		return dir
	}
	m := load(t, "testdata/llama3")
	_, words := tokenizer.Load(without("tokenizer.json"))
	_, adapter := models.Load("testdata/llama3/adapter")
	_, weights := models.Load(without("model.safetensors"))
	_, empty := models.Load(t.TempDir())
	python := without("model.safetensors")
	file("pytorch_model.bin", nil)(t, python)
	_, ofPython := models.Load(python)
	noAdapter := m.LoadAdapter("testdata/llama3")
	for want, err := range map[string]error{
		"load the model that adapter_config.json names":     adapter,
		"and then the adapter, by LoadAdapter or --adapter": adapter,
		"save_pretrained of transformers writes it":         weights,
		"AutoTokenizer writes it":                           words,
		"give a folder of Hugging Face, with config.json":   empty,
		"that SaveAdapter or PEFT has written":              noAdapter,
		"the folder has pytorch_model.bin":                  ofPython,
	} {
		require.Check(t, errors.Is(err, fs.ErrNotExist) && strings.Contains(err.Error(), want) &&
			strings.Count(err.Error(), ".json") <= 3, "the error is %v, want %q", err, want)
	}
}

// pointer is what Git LFS leaves in place of a file.
const pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"

// Whatever is wrong with a folder is an error that says so, of Load or of Logits, and costs little
// memory.
func TestWrongFoldersAreRefused(t *testing.T) {
	const norm = "model.norm.weight"
	for _, test := range []struct {
		folder string
		spoil  func(t *testing.T, dir string)
		want   []string // in the error
	}{
		{"gpt2", configured("model_type", "bert"), []string{"unsupported", "model_type", `"bert"`}},
		{"gpt2", configured("activation_function", "relu"),
			[]string{"activation_function", "relu"}},
		{"gpt2", configured("n_embd", 23), []string{"4 heads of a width of 23"}},
		{"gpt2", configured("n_embd", 1<<40), []string{"width", "want 1 to"}},
		{"gpt2", configured("n_layer", 3), []string{"no file has", "h.2.ln_1"}},
		{"gpt2", configured("n_layer", 1), []string{"has transformer.h.1", "there is none"}},
		{"gpt2", configured("vocab_size", 60), []string{"wte.weight", "[61 24]", "[60 24]"}},
		{"gpt2", configured("n_layer", "two"), []string{"config.json", "n_layer"}},
		{"qwen2", configured("pad_token_id", 61), []string{"pad_token_id is 61", "or -61"}},
		{"llama3", configured("pad_token_id", -62), []string{"pad_token_id is -62"}},
		{"gpt2", file("config.json", []byte("{")), []string{"config.json"}},
		{"gpt2", file("config.json", make([]byte, 2<<20)), []string{"config.json",
			"more than 1048576 bytes"}},
		{"llama3", configured("hidden_act", "gelu"), []string{"hidden_act", "gelu"}},
		{"llama3", configured("rope_parameters", map[string]any{"rope_type": "su"}),
			[]string{"rope_parameters", "su"}},
		{"llama3", configured("rope_scaling", map[string]any{"type": "mrope"}),
			[]string{"rope_scaling", "mrope"}},
		{"llama3", configured("rope_scaling", map[string]any{"type": "linear", "factor": 2,
			"mrope_section": []int{1, 1}}), []string{"rope_scaling", "mrope_section"}},
		{"llama3", configured("partial_rotary_factor", 0.5), []string{"partial_rotary_factor"}},
		{"llama3", configured("rope_parameters", map[string]any{"rope_type": "linear"}),
			[]string{"rope_parameters", "the factor is 0"}},
		{"llama3", configured("num_key_value_heads", 3), []string{"8 heads share 3"}},
		{"llama3", configured("quantization_config", map[string]any{"bits": 4}),
			[]string{"quantization_config"}},
		{"llama3", configured("eos_token_id", []any{1, nil}),
			[]string{"eos_token_id", "an element is null"}},
		{"mistral", configured("sliding_window", 0), []string{"sliding_window is 0"}},
		{"llama3", configured("sliding_window", 16), []string{"sliding_window is 16", "not known"}},
		{"qwen3", configured("layer_types", []string{"sliding_attention", "full_attention"}),
			[]string{"layer_types", "sliding_attention"}},
		{"gpt2", configured("is_causal", false), []string{"is_causal is false"}},
		{"qwen2", configured("attention_bias", true), []string{"attention_bias"}},
		{"llama3", configured("logits_scaling", 2), []string{"logits_scaling is 2", "not known"}},
		{"gpt2", configured("attn_pdrop", 1), []string{"attention", "is 1"}},
		{"gpt2", configured("architectures", []string{"GPT2ForSequenceClassification"}),
			[]string{"architectures", "GPT2ForSequenceClassification"}},
		{"llama3", rewritten(func(all map[string]safetensors.Tensor) { delete(all, norm) }),
			[]string{"no file has " + norm}},
		{"llama3", rewritten(func(all map[string]safetensors.Tensor) {
			all[norm] = all["model.embed_tokens.weight"]
		}), []string{norm, "[61 32]", "[32]"}},
		{"llama3", rewritten(func(all map[string]safetensors.Tensor) { all["extra"] = all[norm] }),
			[]string{"has extra", "there is none"}},
		{"llama3", rewritten(func(all map[string]safetensors.Tensor) {
			all[norm] = safetensors.New(backend.I32, all[norm].Shape)
		}), []string{norm, "weights of i32"}},
		{"llama3", file("model.safetensors", []byte(pointer)), []string{"model.safetensors",
			"git lfs pull"}},
		{"gpt2", rewritten(func(all map[string]safetensors.Tensor) {
			all["h.0.attn.bias"] = safetensors.New(backend.U8, []int{1, 1, 80, 80})
		}), []string{"has h.0.attn.bias"}},
		{"llama3", rewritten(func(all map[string]safetensors.Tensor) {
			all["model.layers.0.self_attn.rotary_emb.inv_freq"] = safetensors.New(backend.F32,
				[]int{2})
		}), []string{"inv_freq"}},
		{"llama3", shortened, []string{"model.safetensors", "damaged or not whole"}},
		{"llama3", file("model.safetensors", binary.LittleEndian.AppendUint64(nil, 2<<30)),
			[]string{"a header of 2147483648 bytes"}},
		{"qwen3", file("model-00002-of-00003.safetensors", nil), []string{"no length of a header"}},
		{"qwen3", file("model.safetensors.index.json", []byte(`{"weight_map":{"a":"../x"}}`)),
			[]string{`"../x"`}},
		{"qwen3", file("model.safetensors.index.json", []byte(`{"weight_map":{"lm_head.weight":`+
			`"model-00001-of-00003.safetensors"}}`)), []string{"it has not"}},
		{"qwen3", func(t *testing.T, dir string) {
			path := filepath.Join(dir, "model-00001-of-00003.safetensors")
			require.NoError(t, os.Remove(path))
		}, []string{"model-00001-of-00003.safetensors", "no such file"}},
	} {
		dir := copied(t, test.folder)
		test.spoil(t, dir)
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		err := built(t, dir)
		runtime.ReadMemStats(&after)
		if err == nil {
			t.Errorf("%s, %v: no error", test.folder, test.want)
			continue
		}
		for _, part := range test.want {
			require.Fails(t, "built", err, part)
		}
		took := after.TotalAlloc - before.TotalAlloc
		require.Check(t, took <= 20<<20, "%v: %d bytes of memory", test.want, took)
	}
}

// built loads a folder and builds its graph.
func built(t *testing.T, dir string) error {
	t.Helper()
	m, err := models.Load(dir)
	if err != nil {
		return err
	}
	defer m.Close()
	return builds(t, m)
}

// TestAConfigMayLeaveOutWhatTransformersTakes: no epsilon is not one of 0.
func TestAConfigMayLeaveOutWhatTransformersTakes(t *testing.T) {
	dir := copied(t, "llama3")
	configured("rms_norm_eps", nil)(t, dir)
	require.Equal(t, "the epsilon", load(t, dir).Epsilon, 1e-6)
}

func TestOlderFilesOfGPT2HaveShorterNamesAndMasks(t *testing.T) {
	dir := copied(t, "gpt2")
	rewritten(func(all map[string]safetensors.Tensor) {
		for name, x := range maps.Clone(all) {
			delete(all, name)
			all[strings.TrimPrefix(name, "transformer.")] = x
		}
		mask := safetensors.New(backend.U8, []int{1, 1, 80, 80})
		for i := range mask.Data.Len() {
			if i%80 <= i/80 {
				mask.Data.Bytes()[i] = 1
			}
		}
		all["h.0.attn.bias"] = mask
		number := safetensors.New(backend.F32, nil)
		backend.View[float32](number.Data)[0] = -1e4
		all["h.0.attn.masked_bias"] = number
	})(t, dir)
	require.NoError(t, built(t, dir))
}

func TestLongerSequencesThanTheModelHasAreRefused(t *testing.T) {
	m := load(t, "testdata/gpt2")
	within(t, layers.Sizes{DP: 1, SP: 1, TP: 1}, func(l *layers.Layout, build sync.Locker) error {
		build.Lock()
		defer build.Unlock()
		b := layers.NewBuilder(gorgonia.NewGraph(), l, tensor.Float32, 1)
		require.Fails(t, "Logits", require.Err(m.Logits(b, b.Tokens("tokens", 1, 2, 81))),
			"use shorter sequences")
		return nil
	})
}
