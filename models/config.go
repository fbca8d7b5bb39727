package models

import (
	"errors"
	"fmt"
	"math"

	"github.com/euryale-ml/euryale/backend"
)

const (
	configName = "config.json"
	// layerNormEpsilon is what layers.LayerNorm adds to variances.
	layerNormEpsilon = 1e-5
	// maxConfig is the most bytes of a config.json. Those of large models have a few kB.
	maxConfig = 1 << 20

	sliding, full = "sliding_attention", "full_attention"
)

// Config describes a model, as a folder's config.json does. A key that is missing there means what
// the class of transformers takes for this type of model.
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
	// Tied says that the embedding is the output head, too. It is false if the folder has another
	// head, whatever config.json says, as in transformers.
	Tied    bool
	Epsilon float64 // of the norms
	rotary  rotary  // of the Llama family
	// Window is how many positions one attends to, itself among them, in the blocks that have a
	// sliding window: 0 for all.
	Window     int
	layerTypes []string // of the blocks, nil if windowFrom says where windows begin
	windowFrom int
	padding    []int // the token whose row lookups do not learn, nil for none
	// Biased says which linear layers have a bias.
	Biased struct{ QKV, Out, MLP bool }
	// NormedHeads says that queries and keys are normalised, head by head.
	NormedHeads bool
	// Dropout has the probabilities of training: of weights of attention, of elements of
	// embeddings, and of what GPT-2's blocks add.
	Dropout struct{ Attention, Embedding, Residual float64 }
	// BOS and EOS are the tokens before and after a text, as the folder has them: -1 for none.
	BOS int
	EOS []int
}

// defaults returns what the classes of transformers take for missing keys.
func defaults(kind string) Config {
	c := Config{Type: kind, Epsilon: 1e-6, BOS: 1, EOS: []int{2}}
	switch kind {
	case gpt2:
		c.Vocabulary, c.Width, c.Blocks, c.Heads, c.Positions = 50257, 768, 12, 12, 1024
		c.Tied, c.Epsilon, c.BOS, c.EOS = true, layerNormEpsilon, 50256, []int{50256}
		c.Dropout.Attention, c.Dropout.Embedding, c.Dropout.Residual = 0.1, 0.1, 0.1
		c.Biased.QKV, c.Biased.Out, c.Biased.MLP = true, true, true
	case llama:
		c.Vocabulary, c.Width, c.Blocks, c.Heads, c.Positions = 32000, 4096, 32, 32, 2048
		c.Hidden = 11008
	case mistral:
		c.Vocabulary, c.Width, c.Blocks, c.Heads, c.Positions = 32000, 4096, 32, 32, 4096*32
		c.Hidden, c.KeyHeads, c.Window = 14336, 8, 4096
	default: // Qwen 2 and 3
		c.Vocabulary, c.Width, c.Blocks, c.Heads, c.Positions = 151936, 4096, 32, 32, 32768
		c.Hidden, c.KeyHeads, c.Window, c.windowFrom = 22016, 32, 4096, 28
		c.BOS, c.EOS = -1, nil
		c.Biased.QKV = kind == qwen2
		if c.NormedHeads = kind == qwen3; c.NormedHeads {
			c.HeadWidth = 128
		}
	}
	return c
}

// read takes the values of config.json, if this package supports such a model.
func (c *Config) read(o *object) error {
	var kind string
	if err := errors.Join(o.only(map[string][]any{
		"model_type": {gpt2, llama, mistral, qwen2, qwen3}, "is_causal": {true, nil},
	}), o.into(map[string]any{"model_type": &kind})); err != nil {
		return err
	}
	*c = defaults(kind)
	err := errors.Join(c.readTokens(o), o.names("architectures", architectures[kind]...))
	family := c.readLlama
	if kind == gpt2 {
		family = c.readGPT2
	}
	for key := range o.values { // those of generation: see readGeneration
		o.known[key] = o.known[key] || known(key)
	}
	if err = errors.Join(err, family(o), o.rest(harmless(kind)...)); err == nil {
		err = c.check()
	}
	return err
}

// architectures are the classes whose files have what is read.
var architectures = map[string][]string{
	gpt2: {"GPT2LMHeadModel", "GPT2Model"}, llama: {"LlamaForCausalLM", "LlamaModel"},
	mistral: {"MistralForCausalLM", "MistralModel"}, qwen2: {"Qwen2ForCausalLM", "Qwen2Model"},
	qwen3: {"Qwen3ForCausalLM", "Qwen3Model"},
}

// readTokens reads bos_token_id, and eos_token_id, which is a number or a list.
func (c *Config) readTokens(o *object) error {
	bos, eos := &c.BOS, &c.EOS
	err := o.into(map[string]any{"bos_token_id": &bos})
	if wrong := o.into(map[string]any{"eos_token_id": &eos}); wrong != nil {
		c.EOS = []int{0}
		if eos = &c.EOS; o.into(map[string]any{"eos_token_id": &c.EOS[0]}) != nil {
			err = errors.Join(err, wrong)
		}
	}
	if bos == nil {
		c.BOS = -1
	}
	if eos == nil {
		c.EOS = nil
	}
	return err
}

func (c *Config) readGPT2(o *object) error {
	o.rename(map[string]string{"hidden_size": "n_embd", "max_position_embeddings": "n_positions",
		"num_attention_heads": "n_head", "num_hidden_layers": "n_layer"})
	err := errors.Join(o.into(map[string]any{
		"vocab_size": &c.Vocabulary, "n_embd": &c.Width, "n_layer": &c.Blocks, "n_head": &c.Heads,
		"n_inner": &c.Hidden, "n_positions": &c.Positions, "tie_word_embeddings": &c.Tied,
		"attn_pdrop": &c.Dropout.Attention, "embd_pdrop": &c.Dropout.Embedding,
		"resid_pdrop": &c.Dropout.Residual,
	}), o.only(map[string][]any{
		"activation_function": {"gelu_new", "gelu_pytorch_tanh", "gelu_python_tanh", "gelu_fast",
			nil},
		"layer_norm_epsilon":              {layerNormEpsilon, nil},
		"scale_attn_by_inverse_layer_idx": {false, nil},
		"scale_attn_weights":              {true, nil},
	}))
	c.KeyHeads, c.HeadWidth = c.Heads, c.Width/max(c.Heads, 1)
	if c.Hidden == 0 {
		c.Hidden = 4 * c.Width
	}
	return err
}

func (c *Config) readLlama(o *object) error {
	heads, width := &c.KeyHeads, &c.HeadWidth // nil for null, which is one for each head of queries
	var padding *int
	err := errors.Join(o.into(map[string]any{
		"vocab_size": &c.Vocabulary, "hidden_size": &c.Width, "num_hidden_layers": &c.Blocks,
		"num_attention_heads": &c.Heads, "num_key_value_heads": &heads, "head_dim": &width,
		"intermediate_size": &c.Hidden, "max_position_embeddings": &c.Positions,
		"rms_norm_eps": &c.Epsilon, "tie_word_embeddings": &c.Tied,
		"attention_dropout": &c.Dropout.Attention, "pad_token_id": &padding,
	}), o.only(map[string][]any{"hidden_act": {"silu", "swish", nil}}))
	if c.Type == llama {
		err = errors.Join(err, o.into(map[string]any{"mlp_bias": &c.Biased.MLP}))
	}
	if c.Type == llama || c.Type == qwen3 { // the others have no such key
		err = errors.Join(err, o.into(map[string]any{"attention_bias": &c.Biased.Out}))
		c.Biased.QKV = c.Biased.Out
	}
	if padding != nil {
		c.padding = []int{*padding}
	}
	if heads == nil || c.KeyHeads == 0 {
		c.KeyHeads = c.Heads
	}
	if width == nil || c.HeadWidth == 0 {
		c.HeadWidth = c.Width / max(c.Heads, 1)
	}
	return errors.Join(err, c.readWindow(o), c.rotary.read(o, c.Positions, c.HeadWidth))
}

// readWindow reads which blocks have a sliding window, and how wide it is.
func (c *Config) readWindow(o *object) error {
	used, window := c.Type == mistral, &c.Window // nil for null
	var err error
	if c.Type == qwen2 || c.Type == qwen3 {
		err = o.into(map[string]any{"use_sliding_window": &used,
			"max_window_layers": &c.windowFrom})
	}
	if c.Type != llama {
		err = errors.Join(err, o.into(map[string]any{"sliding_window": &window}))
	}
	err = errors.Join(err, o.into(map[string]any{"layer_types": &c.layerTypes}))
	if window == nil || !used {
		c.Window = 0
	} else if c.Window < 1 {
		err = errors.Join(err, fmt.Errorf("%w: sliding_window is %d: want 1 or more, or null",
			backend.ErrArgument, c.Window))
	}
	if c.layerTypes == nil {
		return err
	}
	if len(c.layerTypes) != c.Blocks {
		err = errors.Join(err, fmt.Errorf("%w: layer_types has %d entries for %d layers",
			backend.ErrArgument, len(c.layerTypes), c.Blocks))
	}
	for i, kind := range c.layerTypes {
		free := c.Type == qwen2 || c.Type == qwen3 // which follow the list
		if kind != full && (kind != sliding || c.Window == 0) || !free && c.Window > 0 &&
			kind != sliding {
			return errors.Join(err, fmt.Errorf("%w: layer_types has %.80q for layer %d, with a "+
				"window of %d: use %q, and with a window %q", backend.ErrUnsupported, kind, i,
				c.Window, full, sliding))
		}
	}
	return err
}

// window returns how many positions a position of block i attends to, 0 for all.
func (c *Config) window(i int) int {
	if c.layerTypes != nil && c.layerTypes[i] == full || c.layerTypes == nil && i < c.windowFrom {
		return 0
	}
	return c.Window
}

// check returns what is wrong with sizes. Each is bounded, so that products of a few do not
// overflow.
func (c *Config) check() error {
	const most = 1 << 24
	for _, s := range []struct {
		what string
		is   int
	}{
		{"the vocabulary", c.Vocabulary}, {"the width", c.Width},
		{"the number of layers", c.Blocks}, {"the number of heads", c.Heads},
		{"the number of heads of keys", c.KeyHeads}, {"the width of a head", c.HeadWidth},
		{"the number of hidden units", c.Hidden}, {"the number of positions", c.Positions},
	} {
		if s.is < 1 || s.is > most {
			return fmt.Errorf("%w: %s is %d, want 1 to %d", backend.ErrArgument, s.what, s.is, most)
		}
	}
	for what, p := range map[string]float64{"weights of attention": c.Dropout.Attention,
		"embeddings": c.Dropout.Embedding, "what blocks add": c.Dropout.Residual} {
		if !(p >= 0 && p < 1) {
			return fmt.Errorf("%w: the dropout of %s is %v: want 0 to less than 1",
				backend.ErrArgument, what, p)
		}
	}
	for _, id := range c.padding {
		if id < -c.Vocabulary || id >= c.Vocabulary {
			return fmt.Errorf("%w: pad_token_id is %d in a vocabulary of %d: use null, or -%d to "+
				"%d, where a negative number counts from the end, as in transformers",
				backend.ErrArgument, id, c.Vocabulary, c.Vocabulary, c.Vocabulary-1)
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

// harmless returns the keys of config.json that change nothing of what is computed, whatever their
// values: what transformers writes about files and other tasks, and what programs that wrote
// well-known folders have added.
func harmless(kind string) []string {
	keys := []string{"transformers_version", "dtype", "torch_dtype", "initializer_range",
		"_name_or_path", "name_or_path", "_commit_hash", "_num_labels", "num_labels", "id2label",
		"label2id", "problem_type", "finetuning_task", "task_specific_params",
		"cls_token_id", "sep_token_id", "tokenizer_class", "is_decoder", "output_attentions",
		"output_hidden_states", "return_dict", "chunk_size_feed_forward", "tie_encoder_decoder",
		"attn_implementation", "_attn_implementation", "_attn_implementation_autoset",
		"gradient_checkpointing", "pretraining_tp", "torchscript", "max_sequence_length",
		"is_llama_config", "transformers.js_config", "unsloth_version", "unsloth_fixed"}
	if kind == gpt2 {
		keys = append(keys, "n_ctx", "output_past", "reorder_and_upcast_attn", "summary_activation",
			"summary_first_dropout", "summary_proj_to_labels", "summary_type", "summary_use_proj",
			"pad_token_id")
	}
	return keys
}
