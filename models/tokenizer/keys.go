package tokenizer

import (
	"cmp"
	"encoding/json"
	"errors"
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

// inside are the keys of objects that are values of some keys, or elements of these.
var inside = map[string][]string{
	"pattern": {"String", "Regex"}, "single": {"SpecialToken", "Sequence"},
	"pair": {"SpecialToken", "Sequence"}, "SpecialToken": {"id", "type_id"},
	"Sequence": {"id", "type_id"}, "special_tokens": nil, "": {"id", "ids", "tokens"},
}

// onlyKeys returns an error for a key of an object, or of an object inside, that is not among those
// it may have, and has a value that is not null, false or empty.
func onlyKeys(what string, text []byte, keys []string) error {
	var o map[string]json.RawMessage
	if json.Unmarshal(text, &o) != nil {
		return nil // who reads its fields says so
	}
	for _, key := range slices.Sorted(maps.Keys(o)) {
		is := o[key]
		if keys != nil && !slices.Contains(keys, key) && !files.Empty(is) {
			return fmt.Errorf("%w: %.80s has %.80s: %.80s, which this package does not know",
				ErrUnsupported, what, key, is)
		}
		of := key
		if keys == nil { // of names
			of = ""
		}
		within, ok := inside[of]
		if !ok {
			continue
		}
		all := []json.RawMessage{is}
		_ = json.Unmarshal(is, &all) // it is a list, or one object
		for _, one := range all {
			if err := onlyKeys(what+", "+cmp.Or(of, key), one, within); err != nil {
				return err
			}
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
	var has struct{ Normalized *bool }
	err := errors.Join(json.Unmarshal(text, (*fields)(a)), json.Unmarshal(text, &has))
	if err != nil {
		return err
	}
	if has.Normalized == nil {
		a.Normalized = !a.Special
	}
	return onlyKeys("an added token", text, append([]string{"__type"}, addedKeys...))
}
