package models_test

import (
	"context"
	"encoding/json"
	"errors"
	"maps"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/models"
)

// generations is what testdata/generation.py writes.
type generations struct {
	Prompt []int
	Cases  []struct {
		Folder             string
		Config, Generation map[string]any
		Tokens             []int
	}
	Draws []struct {
		Generation   map[string]any
		Logits       []float32
		Tokens, Kept []int
	}
}

// readGenerations returns the file, and in a full test another one, of more cases that are made
// now.
func readGenerations(t *testing.T) (all []generations) {
	t.Helper()
	text := require.Value(os.ReadFile(filepath.Join("testdata", "generation.json")))(t)
	texts := [][]byte{text}
	if interpreter := python(t); interpreter != "" {
		text, err := exec.Command(interpreter, "testdata/generation.py", "150").Output()
		require.NoError(t, err)
		texts = append(texts, text)
	}
	for _, text := range texts {
		var g generations
		require.NoError(t, json.Unmarshal(text, &g))
		all = append(all, g)
	}
	return all
}

// other makes a folder like one of testdata, with more keys in its config.json, and a
// generation_config.json if that is not nil.
func other(t *testing.T, folder string, config, generation map[string]any) string {
	t.Helper()
	dir := t.TempDir()
	require.NoError(t, os.CopyFS(dir, os.DirFS(filepath.Join("testdata", folder))))
	write := func(name string, keys map[string]any) {
		text, err := json.Marshal(keys)
		if err == nil {
			err = os.WriteFile(filepath.Join(dir, name), text, 0o600)
		}
		require.NoError(t, err)
	}
	keys := map[string]any{}
	text, err := os.ReadFile(filepath.Join(dir, "config.json"))
	if err == nil {
		err = json.Unmarshal(text, &keys)
	}
	require.NoError(t, err)
	maps.Copy(keys, config)
	write("config.json", keys)
	if generation != nil {
		write("generation_config.json", generation)
	}
	return dir
}

// continuation generates from a folder.
func continuation(dir string, prompt []int, s models.Sampling) (out []int, err error) {
	m, err := models.Load(dir)
	if err != nil {
		return nil, err
	}
	defer m.Close()
	g, err := models.NewGenerator(m, nil, models.GenerateOptions{Context: len(prompt) + 20})
	if err != nil {
		return nil, err
	}
	defer g.Close()
	err = g.Generate(context.Background(), [][]int{prompt}, s, func(_, token int) error {
		out = append(out, token)
		return nil
	})
	return out, err
}

func TestFoldersGenerateWhatTransformersDoesOrAreRefused(t *testing.T) {
	equal, refused := 0, 0
	for _, all := range readGenerations(t) {
		for i, c := range all.Cases {
			got, err := continuation(other(t, c.Folder, c.Config, c.Generation), all.Prompt,
				models.Sampling{})
			named := slices.ContainsFunc(slices.Concat(slices.Collect(maps.Keys(c.Config)),
				slices.Collect(maps.Keys(c.Generation))), func(key string) bool {
				return err != nil && strings.Contains(err.Error(), key)
			})
			switch {
			case err == nil && c.Tokens != nil && slices.Equal(got, c.Tokens):
				equal++
			case err != nil && named && (i > 20 || c.Tokens == nil):
				refused++
			default:
				t.Errorf("case %d: %v, %v: %v, %v, want %v", i, c.Config, c.Generation, got, err,
					c.Tokens)
			}
		}
	}
	t.Logf("%d are equal, %d are refused", equal, refused)
}

func TestTokensAreDrawnOfThoseThatTransformersKeeps(t *testing.T) {
	for _, all := range readGenerations(t) {
		for i, c := range all.Draws {
			m := load(t, other(t, "gpt2", nil, c.Generation))
			s := require.Value(m.Sampling(models.Sampling{}))(t)
			r, drawn := rand.New(rand.NewPCG(1, uint64(i))), map[int]bool{}
			for range 20000 {
				token := require.Value(models.Draw(s, c.Logits, r, c.Tokens...))(t)
				drawn[token] = true
			}
			for token := range drawn {
				require.Check(t, slices.Contains(c.Kept, token), "%v: %d is drawn, and %v are kept",
					c.Generation, token, c.Kept)
			}
			require.Check(t, len(c.Kept) > 10 || len(drawn) >= len(c.Kept) || !(s.Temperature >= 1),
				"%v: %v are drawn, and %v are kept", c.Generation, drawn, c.Kept)
		}
	}
}

func TestWhatChangesTokensIsRefusedByName(t *testing.T) {
	prompt := []int{1, 5, 7}
	for key, value := range map[string]any{
		"num_beams": 4, "penalty_alpha": 0.6, "no_repeat_ngram_size": 3, "stop_strings": []any{"."},
		"forced_eos_token_id": 2, "min_new_tokens": 3, "cache_implementation": "quantized",
		"watermarking_config": map[string]any{"bias": 2}, "a_new_key": 1, "max_time": 0.5,
		"temperature": "hot", "top_p": -0.5, "repetition_penalty": 0, "dola_layers": "high",
	} {
		dir := other(t, "gpt2", nil, map[string]any{key: value, "do_sample": true})
		_, err := continuation(dir, prompt, models.Sampling{})
		require.Check(t, err != nil && strings.Contains(err.Error(), "generation_config.json") &&
			strings.Contains(strings.ReplaceAll(err.Error(), "top-p", "top_p"), key) &&
			(errors.Is(err, backend.ErrUnsupported) ||
				errors.Is(err, backend.ErrArgument)), "%s: the error is %v", key, err)
		_, err = continuation(dir, prompt, models.Sampling{NoDefaults: true})
		require.Check(t, err == nil, "%s, without defaults: %v", key, err)
	}
}

func TestCallersHaveTheLastWord(t *testing.T) {
	m := load(t, other(t, "gpt2", nil, map[string]any{"do_sample": true, "top_p": 0.9,
		"temperature": 0.6, "eos_token_id": 7, "max_new_tokens": 5, "use_cache": true}))
	for name, test := range map[string]struct{ given, want models.Sampling }{
		"nothing": {models.Sampling{}, models.Sampling{Temperature: 0.6, TopK: 50, TopP: 0.9,
			Max: 5, Stop: []int{7}, RepetitionPenalty: 1, NoDefaults: true}},
		"all": {models.Sampling{Temperature: 2, TopK: 3, TopP: 0.5, Max: 8, Stop: []int{},
			RepetitionPenalty: 1.5}, models.Sampling{Temperature: 2, TopK: 3, TopP: 0.5, Max: 8,
			Stop: []int{}, RepetitionPenalty: 1.5, NoDefaults: true}},
		"greedy": {models.Sampling{Greedy: true}, models.Sampling{Greedy: true, Max: 5,
			Stop: []int{7}, RepetitionPenalty: 1, NoDefaults: true}},
		"no defaults": {models.Sampling{NoDefaults: true}, models.Sampling{NoDefaults: true}},
	} {
		got, err := m.Sampling(test.given)
		text, _ := json.Marshal(got)
		want, _ := json.Marshal(test.want)
		require.Check(t, err == nil && string(text) == string(want), "%s: %s, %v, want %s", name,
			text, err, want)
	}
}
