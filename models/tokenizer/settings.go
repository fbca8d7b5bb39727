package tokenizer

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"math"
	"slices"
	"strings"

	"github.com/euryale-ml/euryale/internal/files"
)

const (
	configName = "tokenizer_config.json"
	mapName    = "special_tokens_map.json"
	olderName  = "added_tokens.json"
	modelName  = "config.json"

	// Classes of transformers that take the vocabulary, merges, added tokens and the post-processor
	// of tokenizer.json, and make all else anew.
	llama, gpt2Class, qwen2 = "LlamaTokenizer", "GPT2Tokenizer", "Qwen2Tokenizer"

	anyID = math.MinInt // of a token that has the id of its word, or the next one
)

// settings are what the other files of a folder say of the tokenizer.
type settings struct {
	class       string // one of the above, or "" if tokenizer.json counts as it stands
	prefixSpace *bool
	legacy      bool
	named       map[string]added // the standard special tokens, by key
	own         []added          // special tokens that have other names
	extra       []added          // special tokens without names
	pads        bool             // with the token of tokenizer.json's padding: it is pad_token
	listed      []added          // added_tokens_decoder, nil for none
	older       map[string]int   // added_tokens.json
}

// standard are the special tokens that all classes have, in the order in which they get ids.
var standard = []string{"bos_token", "eos_token", "unk_token", "sep_token", "pad_token",
	"cls_token", "mask_token"}

// idle are the keys of tokenizer_config.json that change neither ids nor texts: of chats, of files,
// of what callers ask for, such as padding, and some that transformers ignores beside a
// tokenizer.json, or for BPE.
var idle = []string{"add_bos_token", "add_eos_token", "backend", "chat_control_tokens",
	"chat_template", "clean_up_tokenization_spaces", "errors", "from_slow", "is_local",
	"local_files_only", "max_len", "max_length", "model_input_names", "model_max_length",
	"name_or_path", "pad_to_multiple_of", "pad_token_type_id", "padding_side", "processor_class",
	"response_schema", "response_template", "sp_model_kwargs", "spaces_between_special_tokens",
	"special_tokens_map_file", "stride", "tokenizer_class", "tokenizer_file",
	"transformers_version", "truncation_side", "truncation_strategy", "trust_remote_code",
	"use_default_system_prompt", "use_fast", "verbose", "vocab_file"}

// defaults are the special tokens that classes have if no file names any.
var defaults = map[string]map[string]string{
	llama:     {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"},
	gpt2Class: {"unk_token": endOfText, "bos_token": endOfText, "eos_token": endOfText},
	qwen2:     {"unk_token": endOfText, "pad_token": endOfText, "eos_token": endOfText},
}

const (
	endOfText  = "<|endoftext|>"
	qwen2Words = `(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|` +
		` ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|` + lastSpace
)

// values is an object of JSON.
type values map[string]json.RawMessage

// readSettings reads the files beside tokenizer.json, which has ByteLevel somewhere or not.
func readSettings(in files.Dir, onBytes bool) (s settings, err error) {
	var config, names, model values
	err = errors.Join(optional(in, configName, &config), optional(in, modelName, &model))
	if config["added_tokens_decoder"] == nil { // with that, older files do not count
		err = errors.Join(err, optional(in, mapName, &names), optional(in, olderName, &s.older))
	}
	if err == nil {
		s.class, err = classOf(config, model, onBytes)
	}
	if err != nil {
		return s, err
	}
	s.pads = config["pad_token"] == nil && names["pad_token"] == nil &&
		(s.class == "" || s.class == llama)
	s.named = map[string]added{}
	for key, content := range defaults[s.class] {
		s.named[key] = added{ID: anyID, Content: content, Special: true}
	}
	if err = s.read(config); err != nil {
		return s, fmt.Errorf("%s: %w", configName, err)
	}
	extra := s.extra
	s.extra = nil
	if err = s.read(names); err == nil && extra != nil && len(s.extra) > 0 &&
		!slices.EqualFunc(extra, s.extra, func(a, b added) bool { return a.Content == b.Content }) {
		err = fmt.Errorf("%w: other special tokens than in %s", ErrUnsupported, configName)
	}
	if s.extra = append(s.extra, extra...); err != nil {
		err = fmt.Errorf("%s: %w", mapName, err)
	}
	return s, err
}

// optional reads a file of JSON that need not be there.
func optional(in files.Dir, name string, to any) error {
	_, err := in.ReadJSON(name, maxFile, to)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

// text returns a string, "" for null or none.
func (v values) text(key string) (text string, err error) {
	if v[key] != nil {
		err = json.Unmarshal(v[key], &text)
	}
	if err == nil && string(v[key]) == `""` {
		err = fmt.Errorf("%w: it is empty", ErrUnsupported)
	}
	if err != nil {
		err = fmt.Errorf("%s: %w", key, err)
	}
	return text, err
}

// classOf returns the class that transformers' AutoTokenizer takes, "" for the one for which
// tokenizer.json counts as it stands.
func classOf(config, model values, onBytes bool) (string, error) {
	kind, err := model.text("model_type")
	name, wrong := config.text("tokenizer_class")
	other, worse := model.text("tokenizer_class")
	if err = errors.Join(err, wrong, worse); err != nil {
		return "", err
	}
	name = strings.TrimSuffix(cmp.Or(name, other), "Fast")
	of, known := map[string]string{"": "", "llama": "", "mistral": "", "gpt2": gpt2Class,
		"qwen2": qwen2, "qwen3": qwen2}[kind]
	switch {
	case !known:
		return "", fmt.Errorf("%w: model_type %.80s of %s", ErrUnsupported, kind, modelName)
	case name == "" || kind == "mistral" || kind == "qwen2":
		return of, nil
	case name == llama && onBytes || name == "PreTrainedTokenizer" || name == "TokenizersBackend":
		return "", nil
	case defaults[name] != nil:
		return name, nil
	}
	return "", fmt.Errorf("%w: tokenizer_class %.80q", ErrUnsupported, name)
}

// read takes the keys of an object, in place of those that are there.
func (s *settings) read(of values) (err error) {
	for _, key := range slices.Sorted(maps.Keys(of)) {
		text := of[key]
		first := of["extra_special_tokens"] // a list of some counts, and additional ones do not
		switch {
		case key == "add_prefix_space":
			err = json.Unmarshal(text, &s.prefixSpace)
		case key == "legacy":
			err = json.Unmarshal(text, &s.legacy)
		case key == "added_tokens_decoder":
			err = s.readListed(text)
		case slices.Contains(standard, key):
			delete(s.named, key)
			if string(text) != "null" {
				s.named[key], err = token(text, true)
			}
		case text[0] == '{' && strings.HasSuffix(key, "_special_tokens"):
			err = readTokens(&s.own, text)
		case (text[0] == '{' || text[0] == '"') && strings.HasSuffix(key, "_token"):
			err = readTokens(&s.own, fmt.Appendf(nil, "[%s]", text))
		case key == "additional_special_tokens" && !files.Empty(first) && first[0] == '[':
		case key == "extra_special_tokens" || key == "additional_special_tokens":
			err = readTokens(&s.extra, text)
		case !slices.Contains(idle, key) && !files.Empty(text):
			return fmt.Errorf("%w: %.80s: %.80s, which this package does not know", ErrUnsupported,
				key, text)
		}
		if err != nil {
			return fmt.Errorf("%.80s: %w", key, err)
		}
	}
	return nil
}

// readListed reads added_tokens_decoder, in the order of ids.
func (s *settings) readListed(text []byte) error {
	var all map[int]added
	err := json.Unmarshal(text, &all)
	s.listed = []added{}
	for _, id := range slices.Sorted(maps.Keys(all)) {
		a := all[id]
		a.ID = id
		s.listed = append(s.listed, a)
	}
	return err
}

// readTokens appends the tokens of a list, or of an object, whose keys are names.
func readTokens(to *[]added, text []byte) error {
	var list []json.RawMessage
	err := json.Unmarshal(text, &list)
	if text[0] == '{' {
		var names values
		err = json.Unmarshal(text, &names)
		list = slices.Collect(maps.Values(names))
	}
	*to = append([]added{}, *to...) // not nil, if the list is empty
	for _, text := range list {
		a, wrong := token(text, false)
		*to, err = append(*to, a), errors.Join(err, wrong)
	}
	return err
}

// token reads a token: a string, or an object as in added_tokens.
func token(text []byte, special bool) (a added, err error) {
	if text[0] == '"' {
		special, err = true, json.Unmarshal(text, &a.Content)
	} else {
		err = json.Unmarshal(text, &a)
	}
	a.ID, a.Special = anyID, a.Special || special
	if err == nil && a.Content == "" {
		err = errors.New("it is empty")
	}
	return a, err
}

// tokens returns the added tokens of the file and the settings, as transformers adds them.
func (f *file) tokens() (out []added, err error) {
	at, old, again := map[string]int{}, 0, map[string]bool{}
	add := func(a added) *added {
		i, there := at[a.Content]
		if !there {
			i = len(out)
			at[a.Content], out = i, append(out, a)
		} else if i >= old && out[i] != a {
			err = fmt.Errorf("%w: the added token %.80q is there twice, with other flags: in %s, "+
				"%s or %s", ErrUnsupported, a.Content, fileName, configName, mapName)
		}
		return &out[i]
	}
	if f.class == "" || f.listed == nil {
		for _, a := range f.Added {
			add(a)
		}
	}
	for _, a := range f.listed {
		add(a)
		again[a.Content] = true
	}
	if old = len(out); f.pads && f.Padding.Token != "" {
		f.named["pad_token"] = added{ID: anyID, Content: f.Padding.Token, Special: true}
	}
	for _, key := range standard {
		if a, ok := f.named[key]; ok {
			if t := add(a); f.listed == nil || again[a.Content] { // it is added again
				t.Special = true
			}
		}
	}
	for content, id := range f.older {
		if i, ok := at[content]; !ok || out[i].ID != id {
			err = fmt.Errorf("%w: %s has %.80q with id %d, and %s has not", ErrUnsupported,
				olderName, content, id, fileName)
		}
	}
	for _, a := range f.own {
		if i, ok := at[a.Content]; !ok || i >= old || !out[i].Special {
			err = fmt.Errorf("%w: %.80q is a special token of %s, and not of %s", ErrUnsupported,
				a.Content, configName, fileName)
		}
	}
	for _, a := range f.extra {
		add(a)
	}
	if old = 0; f.class == qwen2 { // which adds special tokens once more
		for _, a := range slices.Concat(slices.Collect(maps.Values(f.named)), f.own, f.extra) {
			if i, ok := at[a.Content]; ok {
				add(added{ID: out[i].ID, Content: a.Content, Special: true})
			}
		}
	}
	return out, err
}

// remake replaces the steps of the file by those of the class.
func (f *file) remake() error {
	text, space := "{}", f.prefixSpace != nil && *f.prefixSpace
	const onBytes = `"decoder": {"type": "ByteLevel"}, "pre_tokenizer": `
	switch f.class {
	case "":
		return nil
	case llama:
		scheme, strip := "first", `, {"type": "Strip", "content": " ", "start": 1}`
		switch {
		case f.prefixSpace != nil && !space:
			scheme, strip = "never", ""
		case f.legacy:
			scheme = "always"
		}
		text = fmt.Sprintf(`{"pre_tokenizer": {"type": "Metaspace", "replacement": "▁",
			"prepend_scheme": %q, "split": false}, "decoder": {"type": "Sequence", "decoders": [
			{"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
			{"type": "ByteFallback"}, {"type": "Fuse"}%s]}}`, scheme, strip)
	case gpt2Class:
		text = fmt.Sprintf(`{%s{"type": "ByteLevel", "add_prefix_space": %v}}`, onBytes, space)
	case qwen2:
		text = fmt.Sprintf(`{"normalizer": {"type": "NFC"}, %s{"type": "Sequence", "pretokenizers":
			[{"type": "Split", "behavior": "Isolated", "pattern": {"Regex": %q}}, {"type":
			"ByteLevel", "add_prefix_space": %v, "use_regex": false}]}}`, onBytes, qwen2Words,
			space)
	}
	f.Normalizer, f.PreTokenizer, f.Decoder = nil, nil, nil
	return json.Unmarshal([]byte(text), f)
}
