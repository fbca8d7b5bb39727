package models

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"slices"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/files"
)

const generationName = "generation_config.json"

// generation is what a folder says of how it generates: generation_config.json or, without that
// file, the keys that config.json has of it. So transformers does.
type generation struct {
	name string // of the file
	keys map[string]json.RawMessage
}

func (g *generation) object() *object {
	return &object{values: g.keys, known: map[string]bool{}}
}

// neutral are the keys that change tokens, each with the values that do not. null never does.
var neutral = map[string][]any{
	"assistant_early_exit":             nil,
	"assistant_ensemble_weight":        nil,
	"bad_words_ids":                    nil,
	"begin_suppress_tokens":            nil,
	"constraints":                      nil,
	"dola_layers":                      nil,
	"encoder_no_repeat_ngram_size":     {0.0},
	"encoder_repetition_penalty":       {1.0},
	"exponential_decay_length_penalty": nil,
	"force_words_ids":                  nil,
	"forced_bos_token_id":              nil,
	"forced_eos_token_id":              nil,
	"guidance_scale":                   {1.0},
	"is_assistant":                     nil,
	"max_time":                         nil,
	"min_length":                       {0.0},
	"min_new_tokens":                   {0.0},
	"no_repeat_ngram_size":             {0.0},
	"num_beam_groups":                  {1.0},
	"num_beams":                        {1.0},
	"num_return_sequences":             {1.0},
	"penalty_alpha":                    {0.0},
	"sequence_bias":                    nil,
	"stop_strings":                     nil,
	"suppress_tokens":                  nil,
	"token_healing":                    nil,
	"watermarking_config":              nil,
}

// neutralDraws are those that change tokens only where they are drawn.
var neutralDraws = map[string][]any{
	"epsilon_cutoff": {0.0, 1.0},
	"eta_cutoff":     {0.0, 1.0},
	"top_h":          nil,
	"typical_p":      {1.0},
}

// idle are the keys that change no token: of beams, of what is returned, of how it is computed, and
// of padding, which no position sees.
var idle = []string{"_commit_hash", "_from_model_config", "assistant_confidence_threshold",
	"assistant_lookbehind", "compile_config", "continuous_batching_config",
	"decoder_start_token_id", "disable_compile", "diversity_penalty", "early_stopping",
	"length_penalty", "low_memory", "max_cache_len", "max_matching_ngram_size",
	"num_assistant_tokens", "num_assistant_tokens_schedule", "output_attentions",
	"output_hidden_states", "output_logits", "output_scores", "pad_token_id",
	"prefill_chunk_size", "prompt_lookup_num_tokens", "remove_invalid_values",
	"renormalize_logits", "return_dict_in_generate", "speculation_type", "target_lookbehind",
	"transformers_version", "use_cache", "use_mtp"}

// taken are the keys that Sampling and EOS take, and cache_implementation.
var taken = []string{"bos_token_id", "cache_implementation", "do_sample", "eos_token_id",
	"max_length", "max_new_tokens", "min_p", "repetition_penalty", "temperature", "top_k", "top_p"}

// readGeneration reads a folder's generation config, and takes EOS from it.
func (m *Model) readGeneration(config object) error {
	g := &m.generation
	g.name, g.keys = generationName, nil
	_, err := m.dir.ReadJSON(generationName, maxConfig, &g.keys)
	if errors.Is(err, fs.ErrNotExist) {
		*g = generation{configName, maps.Clone(config.values)}
		maps.DeleteFunc(g.keys, func(key string, _ json.RawMessage) bool { return !known(key) })
		return nil // Config has EOS
	}
	if err != nil {
		return err
	}
	m.EOS = nil
	if err = m.readTokens(g.object()); err != nil {
		return fmt.Errorf("%s: %w", generationName, err)
	}
	return nil
}

// known reports whether a key is one of generation.
func known(key string) bool {
	_, changes := neutral[key]
	_, draws := neutralDraws[key]
	return changes || draws || slices.Contains(idle, key) || slices.Contains(taken, key)
}

// Sampling returns s with the folder's values in place of fields that are zero, as
// [Generator.Generate] takes it: with NoDefaults, so it is s if that is set already. They come
// from generation_config.json and, without that file, from config.json, as in transformers.
// Missing keys mean what transformers' GenerationConfig means by them: no do_sample is a
// Temperature of 0, and do_sample alone one of 1 and a TopK of 50. Lengths have no default.
//
// Errors: [backend.ErrUnsupported] names a key that changes tokens in a way that this package
// lacks, such as num_beams; [backend.ErrArgument] for values that are out of range or of another
// type.
func (m *Model) Sampling(s Sampling) (_ Sampling, err error) {
	defer named(&err, "sampling of "+m.dir.Path(""))
	if s.NoDefaults {
		return s, s.check()
	}
	g := &m.generation
	if s, err = g.over(s); err == nil {
		err = errors.Join(s.check(), g.only(neutral), g.onlyKnown())
	}
	if err == nil && s.Temperature > 0 {
		err = g.only(neutralDraws)
	}
	if err != nil {
		return s, fmt.Errorf("%s: %w: change the file, or set NoDefaults, and other fields as you "+
			"want them", g.name, err)
	}
	if s.NoDefaults = true; s.Stop == nil {
		s.Stop = slices.Clone(m.EOS)
	}
	return s, nil
}

// over returns s with the folder's values in place of zeros.
func (g *generation) over(s Sampling) (Sampling, error) {
	var k *int
	var p *float64
	draws, most, length, least, penalty, temperature := false, 0, 0, 0.0, 1.0, 1.0
	err := g.object().into(map[string]any{"do_sample": &draws, "temperature": &temperature,
		"top_k": &k, "top_p": &p, "min_p": &least, "repetition_penalty": &penalty,
		"max_new_tokens": &most, "max_length": &length})
	if s.Max == 0 && s.MaxLength == 0 {
		if s.Max = most; most == 0 {
			s.MaxLength = length
		}
	}
	s.RepetitionPenalty = cmp.Or(s.RepetitionPenalty, penalty)
	if draws = draws && !s.Greedy; draws {
		s.Temperature = cmp.Or(s.Temperature, temperature)
		fifty := 50
		k = cmp.Or(k, &fifty)
	}
	switch {
	case err != nil:
		return s, fmt.Errorf("%w: %w", backend.ErrArgument, err)
	case penalty == 0 || draws && temperature == 0:
		return s, fmt.Errorf("%w: a repetition_penalty of %v, and do_sample with a temperature "+
			"of %v: neither may be 0", backend.ErrArgument, penalty, temperature)
	case s.Temperature == 0:
		return s, nil
	}
	if s.TopK == 0 && k != nil {
		s.TopK = *k
	}
	if s.TopP == 0 && p != nil {
		if s.TopP = min(*p, 1); *p == 0 {
			s.TopP, s.TopK = 1, 1 // the likeliest token remains
		}
	}
	s.MinP = cmp.Or(s.MinP, least)
	return s, nil
}

// only returns an error for keys that have other values than those of a table.
func (g *generation) only(values map[string][]any) (err error) {
	for _, key := range slices.Sorted(maps.Keys(values)) {
		if text, ok := g.keys[key]; ok && !files.Empty(text) && !slices.ContainsFunc(values[key],
			func(v any) bool { return equals(text, v) }) {
			err = errors.Join(err, fmt.Errorf("%w: %s is %.80s, which changes the tokens",
				backend.ErrUnsupported, key, text))
		}
	}
	return err
}

// onlyKnown returns an error for a key that this package does not know.
func (g *generation) onlyKnown() error {
	for _, key := range slices.Sorted(maps.Keys(g.keys)) {
		if !known(key) && !files.Empty(g.keys[key]) {
			return fmt.Errorf("%w: %.80s is no key that this package knows", backend.ErrUnsupported,
				key)
		}
	}
	if text := g.keys["cache_implementation"]; equals(text, "quantized") {
		return fmt.Errorf("%w: cache_implementation is quantized", backend.ErrUnsupported)
	}
	return nil
}

// equals reports whether a value is a number or a string.
func equals(text json.RawMessage, want any) bool {
	var v any
	return json.Unmarshal(text, &v) == nil && v == want
}
