package models

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math"
	"reflect"
	"slices"

	"github.com/euryale-ml/euryale/backend"
)

const (
	configName = "config.json"
	// layerNormEpsilon is what layers.LayerNorm adds to variances.
	layerNormEpsilon = 1e-5
	// maxConfig is the most bytes of a config.json. Those of large models have a few kB.
	maxConfig = 1 << 20
)

// Config describes a model, as a folder's config.json does.
type Config struct {
	Type       string // model_type: "gpt2", "llama", "mistral", "qwen2" or "qwen3"
	Vocabulary int
	Width      int // of what goes from block to block
	Blocks     int
	Heads      int // of queries
	KeyHeads   int // of keys and values, which neighbouring heads share
	HeadWidth  int
	Hidden     int // units of the layers between attentions
	Positions  int // the longest sequence that it was trained for
	Tied       bool
	Epsilon    float64 // of the norms
	rotary     rotary  // of the Llama family
	// Biased says which projections of attention have a bias.
	Biased struct{ QKV, Out bool }
	// NormedHeads says that queries and keys are normalised, head by head.
	NormedHeads bool
	// BOS and EOS are the tokens before and after a text, as the folder has them: -1 for none.
	BOS int
	EOS []int
}

// read takes the values of config.json, if this package supports such a model.
func (c *Config) read(o object) error {
	*c = Config{BOS: -1, Epsilon: 1e-6} // what transformers takes
	if err := o.only(map[string][]any{
		"model_type":          {gpt2, "llama", "mistral", qwen2, qwen3},
		"quantization_config": {nil},
	}); err != nil {
		return err
	}
	err := o.into(map[string]any{"model_type": &c.Type, "bos_token_id": &c.BOS})
	if o.into(map[string]any{"eos_token_id": &c.EOS}) != nil { // it is no list
		c.EOS = []int{0}
		err = errors.Join(err, o.into(map[string]any{"eos_token_id": &c.EOS[0]}))
	}
	family := c.readLlama
	if c.Type == gpt2 {
		family = c.readGPT2
	}
	for _, s := range c.sizes() {
		key := s.llama
		if c.Type == gpt2 {
			key = s.gpt2
		}
		err = errors.Join(err, o.into(map[string]any{key: s.of}))
	}
	if err = errors.Join(err, family(o)); err == nil {
		err = c.check()
	}
	return err
}

// size is a number of a Config, with its keys in config.json. GPT-2 has no keys for some.
type size struct {
	what, gpt2, llama string
	of                *int
}

func (c *Config) sizes() []size {
	return []size{
		{"the vocabulary", "vocab_size", "vocab_size", &c.Vocabulary},
		{"the width", "n_embd", "hidden_size", &c.Width},
		{"the number of layers", "n_layer", "num_hidden_layers", &c.Blocks},
		{"the number of heads", "n_head", "num_attention_heads", &c.Heads},
		{"the number of heads of keys", "", "num_key_value_heads", &c.KeyHeads},
		{"the width of a head", "", "head_dim", &c.HeadWidth},
		{"the number of hidden units", "n_inner", "intermediate_size", &c.Hidden},
		{"the number of positions", "n_positions", "max_position_embeddings", &c.Positions},
	}
}

func (c *Config) readGPT2(o object) error {
	c.KeyHeads, c.HeadWidth = c.Heads, c.Width/max(c.Heads, 1)
	c.Hidden = cmp.Or(c.Hidden, 4*c.Width)
	c.Tied, c.Biased.QKV, c.Biased.Out = true, true, true
	c.Epsilon = layerNormEpsilon
	return o.only(map[string][]any{
		"activation_function":             {"gelu_new", "gelu_pytorch_tanh"},
		"layer_norm_epsilon":              {layerNormEpsilon},
		"scale_attn_by_inverse_layer_idx": {nil, false},
		"scale_attn_weights":              {nil, true},
		"tie_word_embeddings":             {nil, true},
	})
}

func (c *Config) readLlama(o object) error {
	window, windowed := c.Positions, true
	err := errors.Join(o.into(map[string]any{
		"attention_bias": &c.Biased.Out, "rms_norm_eps": &c.Epsilon, "tie_word_embeddings": &c.Tied,
		"sliding_window": &window, "use_sliding_window": &windowed,
	}), o.only(map[string][]any{"hidden_act": {"silu"}, "mlp_bias": {nil, false}}))
	if windowed && window < c.Positions {
		err = errors.Join(err, fmt.Errorf("%w: sliding_window: attention to a window: set it to "+
			"null if sequences are shorter than it", backend.ErrUnsupported))
	}
	c.KeyHeads = cmp.Or(c.KeyHeads, c.Heads)
	c.HeadWidth = cmp.Or(c.HeadWidth, c.Width/max(c.Heads, 1))
	c.NormedHeads = c.Type == qwen3
	c.Biased.QKV = c.Biased.Out || c.Type == qwen2
	return errors.Join(err, c.rotary.read(o))
}

// check returns what is wrong with sizes. Each is bounded, so that products of a few do not
// overflow.
func (c *Config) check() error {
	const most = 1 << 24
	for _, s := range c.sizes() {
		if *s.of < 1 || *s.of > most {
			return fmt.Errorf("%w: %s is %d, want 1 to %d", backend.ErrArgument, s.what, *s.of,
				most)
		}
	}
	switch {
	case c.Heads%c.KeyHeads != 0:
		return fmt.Errorf("%w: %d heads share %d heads of keys: the second number divides the "+
			"first", backend.ErrArgument, c.Heads, c.KeyHeads)
	case c.Type == gpt2 && c.Width%c.Heads != 0:
		return fmt.Errorf("%w: %d heads of a width of %d", backend.ErrArgument, c.Heads, c.Width)
	case c.Type != gpt2 && c.HeadWidth%2 != 0:
		return fmt.Errorf("%w: head_dim is %d, and rotary positions turn pairs",
			backend.ErrArgument, c.HeadWidth)
	case !(c.Epsilon >= 0) || math.IsInf(c.Epsilon, 1):
		return fmt.Errorf("%w: the epsilon of norms is %v", backend.ErrArgument, c.Epsilon)
	}
	return nil
}

// rotary describes the angles by which pairs of elements of queries and keys are turned.
type rotary struct {
	Base float64
	// Factor is how much slower waves longer than Original/Low positions turn, as in Llama 3.1;
	// those shorter than Original/High are unchanged, with a transition in between. 0 or 1 changes
	// nothing; with Original 0 all turn slower (linear scaling).
	Factor, Low, High float64
	Original          int
}

// angles returns the angle of a position's step for each pair of elements of a head.
func (r rotary) angles(headWidth int) []float64 {
	angles := make([]float64, headWidth/2)
	for i := range angles {
		angle := math.Pow(r.Base, -2*float64(i)/float64(headWidth))
		if r.Factor > 1 {
			kept := 0.0 // of the angle as it was
			if r.Original > 0 {
				turns := float64(r.Original) * angle / (2 * math.Pi) // within the original context
				kept = min(max(0, (turns-r.Low)/(r.High-r.Low)), 1)
			}
			angle = (1-kept)*angle/r.Factor + kept*angle
		}
		angles[i] = angle
	}
	return angles
}

// read takes the values of a config.json of transformers 4 or 5.
func (r *rotary) read(o object) error {
	key, kind, older := "rope_parameters", "", ""
	var said, before object
	err := o.into(map[string]any{key: &said, "rope_scaling": &before, "rope_theta": &r.Base})
	if said == nil {
		key, said = "rope_scaling", before
	}
	err = errors.Join(err, said.into(map[string]any{
		"rope_type": &kind, "type": &older, "rope_theta": &r.Base, "factor": &r.Factor,
		"low_freq_factor": &r.Low, "high_freq_factor": &r.High,
		"original_max_position_embeddings": &r.Original,
	}))
	r.Base = cmp.Or(r.Base, 10000) // what transformers takes
	switch kind = cmp.Or(kind, older, "default"); {
	case err != nil:
		return err
	case kind == "default":
		*r = rotary{Base: r.Base}
	case kind != "linear" && kind != "llama3":
		return fmt.Errorf("%w: %s: it is %q: use default, linear or llama3", backend.ErrUnsupported,
			key, kind)
	case !(r.Factor >= 1):
		return fmt.Errorf("%s: %w: the factor is %v, want 1 or more", key, backend.ErrArgument,
			r.Factor)
	case kind == "linear":
		*r = rotary{Base: r.Base, Factor: r.Factor}
	case !(r.High > r.Low) || r.Original < 1:
		return fmt.Errorf("%s: %w: factors %v to %v of %d positions", key, backend.ErrArgument,
			r.Low, r.High, r.Original)
	}
	return nil
}

// object is an object of JSON.
type object map[string]json.RawMessage

// into stores the values of the object's keys where fields point. Keys that are missing or null
// change nothing.
func (o object) into(fields map[string]any) (err error) {
	for _, key := range slices.Sorted(maps.Keys(fields)) {
		if text, ok := o[key]; ok {
			if wrong := json.Unmarshal(text, fields[key]); wrong != nil {
				err = errors.Join(err, fmt.Errorf("%s: %w", key, wrong))
			}
		}
	}
	return err
}

// only returns an error for a key whose value this package does not support. nil is a key that is
// missing or null.
func (o object) only(values map[string][]any) error {
	for _, key := range slices.Sorted(maps.Keys(values)) {
		var is any
		_ = json.Unmarshal(o[key], &is) // nil without the key: all of the text has been parsed
		if !slices.ContainsFunc(values[key], func(v any) bool { return reflect.DeepEqual(v, is) }) {
			has, _ := json.Marshal(values[key])
			return fmt.Errorf("%w: %s is %.80s: use one of %s", backend.ErrUnsupported, key,
				cmp.Or(string(o[key]), "missing"), has)
		}
	}
	return nil
}
