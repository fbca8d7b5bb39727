// Package tokenizer turns text into the ids of a model's tokens and back, as the tokenizer.json of
// a Hugging Face folder says. It gives the ids and texts of Hugging Face's library tokenizers.
//
//	t, err := tokenizer.Load("Llama-3.2-1B")
//	ids := t.Encode("The quick brown fox", true)
//	text := t.Decode(ids, true)
//
// # What is read
//
// Models are BPE, on bytes (GPT-2, Llama 3, Qwen 2 and 3, Mistral's Tekken), or on characters with
// bytes for those that the vocabulary lacks (Llama 2, Mistral). Unigram and WordPiece are not read.
// Normalizers are NFC, Prepend and Replace; pre-tokenizers are ByteLevel, Metaspace and Split by a
// regular expression; post-processors are ByteLevel and TemplateProcessing for one text; decoders
// are ByteLevel, or Replace, ByteFallback, Fuse and Strip. Added tokens may have every flag.
//
// Other files count as for AutoTokenizer of transformers 5.24. The tokenizer_class of
// tokenizer_config.json and the model_type of config.json say which class makes the tokenizer.
// GPT2Tokenizer, Qwen2Tokenizer and, without ByteLevel, LlamaTokenizer take vocabulary, merges,
// added tokens and post-processor from tokenizer.json, and make the rest anew; for
// PreTrainedTokenizerFast, and for Mistral, all of it counts. Tokens that these files name are
// special tokens. Beside a tokenizer.json, add_bos_token and add_eos_token change nothing.
//
// Anything else that a file asks for is [ErrUnsupported], which names it, as each key that is not
// known. So no folder loads and then gives other ids: testdata/folders.py makes random ones, and
// compares. Like transformers, the package ignores a file's truncation and padding. It does not
// read chat templates: package models/texts does.
//
// # Unicode
//
// A byte of a text that is not UTF-8 counts as U+FFFD. The Go release knows letters, digits and
// spaces of one version of Unicode, [unicode.Version]: ids of texts with characters of later
// versions may differ. So may ids of texts with several marks on one letter, if the file asks for
// NFC and Unicode has had one of the marks only since version 10: Hugging Face's library does not
// order them.
//
// # Cost
//
// Encode takes time in proportion to the text, and to the logarithm of the longest word, whatever
// the regular expression is: package regexp does not backtrack without limit. Load takes memory for
// up to 25 times the file, which may have 64 MB. Package models/tokenizer is compared with other
// libraries in bench/results/2026-11/2026-11-26-tokenizers.md.
package tokenizer

import (
	"errors"
	"strings"
	"unicode/utf8"
)

// ErrUnsupported is the error of a file that asks for something this package lacks.
var ErrUnsupported = errors.New("unsupported tokenizer")

// Tokenizer has the vocabulary of a model. Its methods may be called concurrently.
type Tokenizer struct {
	// BOS and EOS are the tokens before and after a text, from tokenizer_config.json: -1 for none.
	// Models may also end texts with other tokens, which config.json lists.
	BOS, EOS int
	// Named are the special tokens that these files name, by keys such as "bos_token".
	Named map[string]string

	raw, normal   *finder // added tokens, in the text and in the normalized text
	normalize     []func(string) string
	pretokenize   []pretokenizer
	model         bpe
	before, after []int // tokens that addSpecial adds
	decoder       decoder
	vocabulary    map[int]string // as the file has them
	special       map[int]bool
	ids           map[string]int // of added tokens, too
}

// pretokenizer cuts pieces. The first begins the whole text if begins is true.
type pretokenizer func(pieces []string, begins bool) []string

// Encode returns the ids of a text. With addSpecial they include the tokens that the file puts
// around every text, such as the one that begins it. Special tokens that are spelled out in the
// text become those tokens.
//
// Cost: see the package.
func (t *Tokenizer) Encode(text string, addSpecial bool) []int {
	if !utf8.ValidString(text) {
		text = string([]rune(text))
	}
	ids := []int{}
	add := func(id int) { ids = append(ids, id) }
	if addSpecial {
		ids = append(ids, t.before...)
	}
	t.raw.cut(text, func(part string, at int) {
		for _, normalize := range t.normalize {
			if part != "" {
				part = normalize(part)
			}
		}
		t.normal.cut(part, func(part string, inner int) {
			pieces := []string{part}
			for _, p := range t.pretokenize {
				pieces = p(pieces, at == 0 && inner == 0)
			}
			for _, piece := range pieces {
				ids = t.model.encode(piece, ids)
			}
		}, add)
	}, add)
	if addSpecial {
		ids = append(ids, t.after...)
	}
	return ids
}

// Decode returns the text of ids, without special tokens if skipSpecial. It skips ids that the file
// lacks. Bytes that are not UTF-8 become U+FFFD.
func (t *Tokenizer) Decode(ids []int, skipSpecial bool) string {
	s := t.Stream(skipSpecial)
	s.whole = true
	var text strings.Builder
	for _, id := range ids {
		text.WriteString(s.Next(id))
	}
	text.WriteString(s.End())
	return text.String()
}

// Stream returns a decoder of ids that come one by one.
func (t *Tokenizer) Stream(skipSpecial bool) *Stream {
	return &Stream{t: t, skip: skipSpecial, strip: t.decoder.strip}
}
