package models

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"path/filepath"

	"github.com/euryale-ml/euryale/backend"
)

// ErrUnsupported is the error of a folder whose model this package does not have.
var ErrUnsupported = errors.New("unsupported model")

// Config is what a folder's config.json says of a model.
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
	Rotary     Rotary  // of the Llama family
	// Biased says which projections of attention have a bias.
	Biased struct{ QKV, Out bool }
	// NormedHeads says that queries and keys are normalised, head by head.
	NormedHeads bool
	// BOS and EOS are the tokens before and behind a text, as the folder has them: -1 for none.
	BOS int
	EOS []int
}

// Rotary says by which angles pairs of elements of queries and keys are turned.
type Rotary struct {
	Base float64
	// Factor is how much slower waves longer than Original/Low positions turn, as in Llama 3.1;
	// those shorter than Original/High turn as they did, and between there is a transition. 0 or 1
	// changes nothing; with Original 0 all turn slower (linear scaling).
	Factor, Low, High float64
	Original          int
}

// Angles returns the angle of a position's step for each pair of elements of a head.
func (r Rotary) Angles(headWidth int) []float64 {
	angles := make([]float64, headWidth/2)
	for i := range angles {
		a := math.Pow(r.Base, -2*float64(i)/float64(headWidth))
		if r.Factor > 1 {
			a = r.scaled(a)
		}
		angles[i] = a
	}
	return angles
}

func (r Rotary) scaled(angle float64) float64 {
	if r.Original == 0 {
		return angle / r.Factor
	}
	turns := float64(r.Original) * angle / (2 * math.Pi) // within the original context
	switch {
	case turns < r.Low:
		return angle / r.Factor
	case turns > r.High:
		return angle
	}
	smooth := (turns - r.Low) / (r.High - r.Low)
	return (1-smooth)*angle/r.Factor + smooth*angle
}

// file is config.json as it stands. Pointers tell what is missing.
type file struct {
	Type       string `json:"model_type"`
	Vocabulary int    `json:"vocab_size"`

	// of GPT-2
	NPositions int     `json:"n_positions"`
	NEmbd      int     `json:"n_embd"`
	NLayer     int     `json:"n_layer"`
	NHead      int     `json:"n_head"`
	NInner     int     `json:"n_inner"`
	Activation string  `json:"activation_function"`
	LayerNorm  float64 `json:"layer_norm_epsilon"`
	ByLayer    bool    `json:"scale_attn_by_inverse_layer_idx"`
	Unscaled   *bool   `json:"scale_attn_weights"`

	// of the Llama family
	HiddenSize    int             `json:"hidden_size"`
	Intermediate  int             `json:"intermediate_size"`
	HiddenLayers  int             `json:"num_hidden_layers"`
	Heads         int             `json:"num_attention_heads"`
	KeyHeads      int             `json:"num_key_value_heads"`
	HeadDim       int             `json:"head_dim"`
	MaxPositions  int             `json:"max_position_embeddings"`
	HiddenAct     string          `json:"hidden_act"`
	RMSNorm       *float64        `json:"rms_norm_eps"`
	AttentionBias bool            `json:"attention_bias"`
	MLPBias       bool            `json:"mlp_bias"`
	Theta         float64         `json:"rope_theta"`
	Scaling       *rope           `json:"rope_scaling"`
	Parameters    *rope           `json:"rope_parameters"` // of transformers 5
	Window        *int            `json:"sliding_window"`
	UseWindow     *bool           `json:"use_sliding_window"`
	Tied          *bool           `json:"tie_word_embeddings"`
	Quantization  json.RawMessage `json:"quantization_config"`

	BOS *int            `json:"bos_token_id"`
	EOS json.RawMessage `json:"eos_token_id"` // a number or a list
}

// rope is what a config says of rotary positions.
type rope struct {
	Type     string  `json:"rope_type"`
	OldType  string  `json:"type"`
	Theta    float64 `json:"rope_theta"`
	Factor   float64 `json:"factor"`
	Low      float64 `json:"low_freq_factor"`
	High     float64 `json:"high_freq_factor"`
	Original int     `json:"original_max_position_embeddings"`
}

const (
	configName = "config.json"
	// layerNormEpsilon is what layers.LayerNorm adds to variances.
	layerNormEpsilon = 1e-5
	// maxConfig is how long a config.json may be. Those of large models have a few kB.
	maxConfig = 1 << 20
)

// readConfig reads config.json of a folder, and returns its text, too.
func readConfig(dir string) (c Config, text []byte, err error) {
	path := filepath.Join(dir, configName)
	var f file
	if text, err = readJSON(path, maxConfig, &f); err != nil {
		return c, nil, err
	}
	if c, err = f.config(); err != nil {
		return c, nil, fmt.Errorf("%s: %w", path, err)
	}
	return c, text, nil
}

// config returns what a file says, if this package has such a model.
func (f file) config() (c Config, err error) {
	if f.Quantization != nil && string(f.Quantization) != "null" {
		return c, unsupported("quantization_config", "its weights are quantized")
	}
	switch f.Type {
	case gpt2:
		c, err = f.gpt2()
	case "llama", "mistral", qwen2, qwen3:
		c, err = f.llama()
	default:
		return c, unsupported("model_type", "it is %q: use gpt2, llama, mistral, qwen2 or qwen3",
			f.Type)
	}
	if err != nil {
		return c, err
	}
	c.Type, c.Vocabulary, c.BOS = f.Type, f.Vocabulary, -1
	if f.BOS != nil {
		c.BOS = *f.BOS
	}
	if c.EOS, err = f.ends(); err != nil {
		return c, err
	}
	return c, c.check()
}

// unsupported returns the error of a key.
func unsupported(key, why string, values ...any) error {
	return fmt.Errorf("%w: %s: %s", ErrUnsupported, key, fmt.Sprintf(why, values...))
}

// ends returns the tokens that end a text.
func (f file) ends() (ends []int, err error) {
	if f.EOS == nil || string(f.EOS) == "null" {
		return nil, nil
	}
	var one int
	if json.Unmarshal(f.EOS, &one) == nil {
		return []int{one}, nil
	}
	if err = json.Unmarshal(f.EOS, &ends); err != nil {
		return nil, fmt.Errorf("eos_token_id: %w", err)
	}
	return ends, nil
}

func (f file) gpt2() (c Config, err error) {
	switch {
	case f.Activation != "gelu_new" && f.Activation != "gelu_pytorch_tanh":
		return c, unsupported("activation_function", "it is %q: use gelu_new", f.Activation)
	case f.ByLayer:
		return c, unsupported("scale_attn_by_inverse_layer_idx", "scores are scaled by layer")
	case f.Unscaled != nil && !*f.Unscaled:
		return c, unsupported("scale_attn_weights", "scores are not scaled")
	case f.LayerNorm != layerNormEpsilon:
		return c, unsupported("layer_norm_epsilon", "it is %v: use %v", f.LayerNorm,
			layerNormEpsilon)
	case f.Tied != nil && !*f.Tied:
		return c, unsupported("tie_word_embeddings", "GPT-2 with a head of its own")
	}
	c = Config{Width: f.NEmbd, Blocks: f.NLayer, Heads: f.NHead, KeyHeads: f.NHead,
		HeadWidth: f.NEmbd / max(f.NHead, 1), Hidden: cmp.Or(f.NInner, 4*f.NEmbd),
		Positions: f.NPositions, Tied: true, Epsilon: f.LayerNorm}
	c.Biased.QKV, c.Biased.Out = true, true
	return c, nil
}

func (f file) llama() (c Config, err error) {
	windowed := f.Window != nil && *f.Window < f.MaxPositions
	if f.UseWindow != nil {
		windowed = windowed && *f.UseWindow
	}
	switch {
	case f.HiddenAct != "silu":
		return c, unsupported("hidden_act", "it is %q: use silu", f.HiddenAct)
	case windowed:
		return c, unsupported("sliding_window", "attention to a window: set it to null if "+
			"sequences are shorter than it")
	case f.MLPBias:
		return c, unsupported("mlp_bias", "a bias in the layers between attentions")
	}
	c = Config{Width: f.HiddenSize, Blocks: f.HiddenLayers, Heads: f.Heads,
		KeyHeads: cmp.Or(f.KeyHeads, f.Heads), Hidden: f.Intermediate, Positions: f.MaxPositions,
		HeadWidth: cmp.Or(f.HeadDim, f.HiddenSize/max(f.Heads, 1)),
		Tied:      f.Tied != nil && *f.Tied, NormedHeads: f.Type == qwen3,
		Epsilon: 1e-6} // what transformers takes
	if f.RMSNorm != nil {
		c.Epsilon = *f.RMSNorm
	}
	c.Biased.QKV, c.Biased.Out = f.AttentionBias || f.Type == qwen2, f.AttentionBias
	c.Rotary, err = f.rotary()
	return c, err
}

// rotary returns the rotary positions, of transformers 4 or 5.
func (f file) rotary() (Rotary, error) {
	said, key := cmp.Or(f.Parameters, f.Scaling, new(rope)), "rope_parameters"
	if f.Parameters == nil {
		key = "rope_scaling"
	}
	r := Rotary{Base: cmp.Or(said.Theta, f.Theta, 10000)} // what transformers takes
	kind := cmp.Or(said.Type, said.OldType)
	switch kind {
	case "", "default":
	case "linear":
		r.Factor = said.Factor
	case "llama3":
		r.Factor, r.Low, r.High, r.Original = said.Factor, said.Low, said.High, said.Original
		if !(r.High > r.Low) || r.Original < 1 {
			return r, fmt.Errorf("%s: %w: factors %v to %v of %d positions", key,
				backend.ErrArgument, r.Low, r.High, r.Original)
		}
	default:
		return r, unsupported(key, "it is %q: use default, linear or llama3", kind)
	}
	if scaled := kind == "linear" || kind == "llama3"; scaled && !(r.Factor >= 1) {
		return r, fmt.Errorf("%s: %w: the factor is %v, want 1 or more", key, backend.ErrArgument,
			r.Factor)
	}
	return r, nil
}

// check returns what is wrong with sizes. Each is bounded, so that products of a few do not
// overflow.
func (c Config) check() error {
	const most = 1 << 24
	for _, n := range []struct {
		key string
		n   int
	}{
		{"vocab_size", c.Vocabulary}, {"the width", c.Width}, {"the number of layers", c.Blocks},
		{"the number of heads", c.Heads}, {"num_key_value_heads", c.KeyHeads},
		{"head_dim", c.HeadWidth}, {"the number of hidden units", c.Hidden},
		{"the number of positions", c.Positions},
	} {
		if n.n < 1 || n.n > most {
			return fmt.Errorf("%w: %s is %d, want 1 to %d", backend.ErrArgument, n.key, n.n, most)
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
