package tokenizer

import (
	"encoding/json"
	"fmt"
	"maps"
	"slices"

	"github.com/euryale-ml/euryale/internal/files"
)

// keysOf are the keys of components that are understood, or change no ids, by types. Components of
// other types are refused as a whole.
var keysOf = map[string][]string{
	"NFC":                nil,
	"Prepend":            {"prepend"},
	"Replace":            {"pattern", "content"},
	"ByteLevel":          {"add_prefix_space", "trim_offsets", "use_regex"},
	"Split":              {"pattern", "behavior"},
	"Metaspace":          {"replacement", "prepend_scheme", "split", "add_prefix_space"},
	"TemplateProcessing": {"single", "pair", "special_tokens"},
	"Sequence":           {"normalizers", "pretokenizers", "processors", "decoders"},
	"ByteFallback":       nil,
	"Fuse":               nil,
	"Strip":              {"content", "start", "stop"},
}

var (
	fileKeys = []string{"version", "truncation", "padding", "added_tokens", "normalizer",
		"pre_tokenizer", "post_processor", "decoder", "model"}
	addedKeys = []string{"id", "content", "single_word", "lstrip", "rstrip", "normalized",
		"special"}
	modelKeys = []string{"type", "dropout", "unk_token", "continuing_subword_prefix",
		"end_of_word_suffix", "fuse_unk", "byte_fallback", "ignore_merges", "vocab", "merges"}
)

// onlyKeys returns an error for a key of an object that is not among some, and has a value that is
// not null, false or empty.
func onlyKeys(what string, text []byte, keys []string) error {
	var o map[string]json.RawMessage
	if json.Unmarshal(text, &o) != nil {
		return nil // who reads its fields says so
	}
	for _, key := range slices.Sorted(maps.Keys(o)) {
		if is := o[key]; !slices.Contains(keys, key) && !files.Empty(is) {
			return fmt.Errorf("%w: %.80s has %.80s: %.80s, which this package does not know",
				ErrUnsupported, what, key, is)
		}
	}
	return nil
}

// UnmarshalJSON reads a component, and refuses keys that its type is not known to have.
func (c *component) UnmarshalJSON(text []byte) error {
	type fields component
	if err := json.Unmarshal(text, (*fields)(c)); err != nil {
		return err
	}
	keys, known := keysOf[c.Type]
	if !known {
		return nil
	}
	return onlyKeys(c.Type, text, append([]string{"type"}, keys...))
}

// UnmarshalJSON reads a token, and refuses keys that are not known.
func (a *added) UnmarshalJSON(text []byte) error {
	type fields added
	if err := json.Unmarshal(text, (*fields)(a)); err != nil {
		return err
	}
	return onlyKeys("an added token", text, append([]string{"__type"}, addedKeys...))
}
