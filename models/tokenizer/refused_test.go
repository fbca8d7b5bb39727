package tokenizer

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/euryale-ml/euryale/internal/testing/require"
)

// object is an object of JSON.
type object = map[string]any

// folder writes a folder with files, and returns its name.
func folder(t testing.TB, files map[string]string) string {
	t.Helper()
	dir := t.TempDir()
	for name, text := range files {
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600))
	}
	return dir
}

// changed returns a style's folder with its tokenizer.json changed.
func changed(t testing.TB, style string, change func(file object)) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("testdata", style, fileName))
	require.NoError(t, err)
	var file object
	require.NoError(t, json.Unmarshal(text, &file))
	change(file)
	if text, err = json.Marshal(file); err != nil {
		t.Fatal(err)
	}
	return folder(t, map[string]string{fileName: string(text)})
}

// split is a pre-tokenizer of a regular expression, before ByteLevel.
func split(pattern string) object {
	return object{"type": "Sequence", "pretokenizers": []any{
		object{"type": "Split", "behavior": "Isolated", "pattern": object{"Regex": pattern}},
		object{"type": "ByteLevel", "add_prefix_space": false, "use_regex": false},
	}}
}

func TestWhatIsNotSupportedIsNamed(t *testing.T) {
	set := func(key string, value any) func(object) {
		return func(file object) { file[key] = value }
	}
	model := func(key string, value any) func(object) {
		return func(file object) { file["model"].(object)[key] = value }
	}
	for name, test := range map[string]struct {
		change func(object)
		says   string
	}{
		"unigram":     {model("type", "Unigram"), "model Unigram"},
		"wordpiece":   {model("type", "WordPiece"), "model WordPiece"},
		"dropout":     {model("dropout", 0.1), "dropout"},
		"suffix":      {model("end_of_word_suffix", "</w>"), "end_of_word_suffix"},
		"fallback":    {model("byte_fallback", true), "byte_fallback"},
		"normalizer":  {set("normalizer", object{"type": "NFKC"}), "normalizer NFKC"},
		"precompiled": {set("normalizer", object{"type": "Precompiled"}), "Precompiled"},
		"digits":      {set("pre_tokenizer", object{"type": "Digits"}), "pre_tokenizer Digits"},
		"metaspace": {set("pre_tokenizer", object{"type": "Metaspace", "split": true}),
			"pre_tokenizer Metaspace"},
		"lookahead":  {set("pre_tokenizer", split(`a(?=b)|\s+`)), "a(?=b)"},
		"anchor":     {set("pre_tokenizer", split(`^a`)), "^a"},
		"boundary":   {set("pre_tokenizer", split(`a\b`)), `a\\b`},
		"classes":    {set("pre_tokenizer", split(`[a-z&&[^b]]`)), "&&"},
		"possessive": {set("pre_tokenizer", split(`a++b`)), "a++b"},
		"empty":      {set("pre_tokenizer", split(`a*`)), "a*"},
		"long":       {set("pre_tokenizer", split(strings.Repeat("a", 1<<20))), "aaa"},
		"bert": {set("post_processor", object{"type": "BertProcessing"}),
			"post_processor BertProcessing"},
		"decoder":    {set("decoder", object{"type": "WordPiece"}), "decoder of WordPiece"},
		"no decoder": {set("decoder", nil), "decoder"},
	} {
		_, err := Load(changed(t, "gpt2", test.change))
		require.Check(t, errors.Is(err, ErrUnsupported) &&
			strings.Contains(err.Error(), test.says) && len(err.Error()) <= 500, "%s: the error "+
			"is %.500v", name, err)
	}
}

func TestDamagedFilesAreErrors(t *testing.T) {
	token := func(id int, content string) object { return object{"id": id, "content": content} }
	const head = `{"decoder":{"type":"ByteLevel"},"model":{"type":"BPE",`
	for name, test := range map[string]struct{ text, says string }{
		"empty":      {``, "unexpected end"},
		"no model":   {`{}`, "model"},
		"truncated":  {head + `"vocab":{"a":0`, "unexpected end"},
		"deep":       {strings.Repeat(`{"normalizer":`, 20000), "depth"},
		"list":       {head + `"vocab":["a"]}}`, "vocab"},
		"same id":    {head + `"vocab":{"a":1,"b":1},"merges":[]}}`, "id 1"},
		"negative":   {head + `"vocab":{"a":-1},"merges":[]}}`, "-1"},
		"huge id":    {head + `"vocab":{"a":99999999999},"merges":[]}}`, "99999999999"},
		"fraction":   {head + `"vocab":{"a":0.5},"merges":[]}}`, "0.5"},
		"no merges":  {head + `"vocab":{"a":0}}}`, "merges"},
		"one":        {head + `"vocab":{"a":0},"merges":["a"]}}`, "no pair"},
		"three":      {head + `"vocab":{"a":0},"merges":[["a","a","a"]]}}`, "no pair"},
		"not both":   {head + `"vocab":{"a":0},"merges":[["a","a"]]}}`, "not in vocab"},
		"unknown":    {head + `"vocab":{"a":0},"merges":[],"unk_token":"<unk>"}}`, "<unk>"},
		"not a file": {`[]`, "array"},
	} {
		_, err := Load(folder(t, map[string]string{fileName: test.text}))
		require.Fails(t, name, err, test.says, fileName)
	}
	for name, tokens := range map[string][]any{
		"gap":     {token(700, "<a>")},
		"other":   {token(3, "<a>")},
		"no text": {token(640, "")},
	} {
		_, err := Load(changed(t, "gpt2", func(f object) { f["added_tokens"] = tokens }))
		require.Fails(t, name, err, "added_tokens")
	}
	require.Fails(t, "an empty folder", require.Err(Load(t.TempDir())), fs.ErrNotExist)
}

func TestFilesThatAreTooLongAreNotRead(t *testing.T) {
	dir := folder(t, map[string]string{fileName: "{}"})
	require.NoError(t, os.Truncate(filepath.Join(dir, fileName), 1<<40))
	require.Fails(t, "Load", require.Err(Load(dir)), "bytes")
	objects := `{"normalizer":{"normalizers":[{}` + strings.Repeat(",{}", maxRest/3) + `]}}`
	_, err := Load(folder(t, map[string]string{fileName: objects}))
	require.Fails(t, "many objects", err, "not the model")
	many := []any{object{"id": 640, "content": strings.Repeat("x", maxAdded+1)}}
	_, err = Load(changed(t, "gpt2", func(f object) { f["added_tokens"] = many }))
	require.Fails(t, "a long added token", err, ErrUnsupported)
}

func TestEndsAreThoseOfTheFolder(t *testing.T) {
	text, err := os.ReadFile(filepath.Join("testdata", "llama2", fileName))
	require.NoError(t, err)
	for config, want := range map[string][2]int{
		`{"bos_token": "<s>", "eos_token": {"content": "</s>"}}`: {1, 2},
		`{"bos_token": null}`: {-1, -1},
		`{"bos_token": "<new>", "eos_token": "the", "cls_token": "<s>"}`: {644, 645},
		`{"tokenizer_class": "LlamaTokenizer", "eos_token": null}`:       {1, -1},
	} {
		tok := load(t, folder(t, map[string]string{fileName: string(text), configName: config,
			modelName: `{"model_type": "llama"}`}))
		require.Equal(t, config, [2]int{tok.BOS, tok.EOS}, want)
	}
	if tok := load(t, filepath.Join("testdata", "llama2")); tok.BOS != -1 || tok.EOS != -1 {
		t.Errorf("without a configuration: %d, %d", tok.BOS, tok.EOS)
	}
	for _, config := range []string{"{", `{"eos_token": 7}`} {
		_, err = Load(folder(t, map[string]string{fileName: string(text), configName: config}))
		require.Fails(t, config, err, configName)
	}
}

func TestMergesMayBeLinesAsInOlderFiles(t *testing.T) {
	c := readCases(t, "testdata")
	dir := changed(t, "gpt2", func(file object) {
		model := file["model"].(object)
		delete(model, "type")
		lines := []any{"#version: 0.2"}
		for _, pair := range model["merges"].([]any) {
			p := pair.([]any)
			lines = append(lines, p[0].(string)+" "+p[1].(string))
		}
		model["merges"] = lines
	})
	tok := load(t, dir)
	for i, text := range c.Texts {
		checkIDs(t, tok, text, false, c.Tokenizers["gpt2"].Plain[i])
	}
}

func TestKeysThatAreNotKnownAreNamed(t *testing.T) {
	template := func(token string, id int) object {
		return object{"type": "TemplateProcessing", "single": []any{
			object{"SpecialToken": object{"id": token}}, object{"Sequence": object{"id": "A"}}},
			"special_tokens": object{token: object{"ids": []int{id}}}}
	}
	for name, test := range map[string]struct {
		change func(object)
		says   string
	}{
		"of the file":  {func(f object) { f["new"] = 1 }, "new"},
		"of the model": {func(f object) { f["model"].(object)["new"] = true }, "new"},
		"inverted": {func(f object) {
			f["pre_tokenizer"] = split(`\p{L}`)
			f["pre_tokenizer"].(object)["pretokenizers"].([]any)[0].(object)["invert"] = true
		}, "invert"},
		"of a token": {func(f object) {
			f["added_tokens"] = []any{object{"id": 640, "content": "x y", "new": 1}}
		}, "new"},
		"of a template": {func(f object) {
			f["post_processor"] = template("a", 1)
			f["post_processor"].(object)["single"].([]any)[0].(object)["new"] = 1
		}, "TemplateProcessing, single has new"},
		"of a text of a pair": {func(f object) {
			f["post_processor"] = template("a", 1)
			f["post_processor"].(object)["pair"] = []any{
				object{"Sequence": object{"id": "B", "new": "x"}}}
		}, "TemplateProcessing, pair, Sequence has new"},
		"of a special token": {func(f object) {
			f["post_processor"] = template("a", 1)
			f["post_processor"].(object)["special_tokens"].(object)["a"].(object)["new"] = 1
		}, "TemplateProcessing, special_tokens, a has new"},
		"of a pattern": {func(f object) {
			f["normalizer"] = object{"type": "Replace", "content": "",
				"pattern": object{"String": "x", "new": 1}}
		}, "Replace, pattern has new"},
		"two templates": {func(f object) {
			f["post_processor"] = object{"type": "Sequence", "processors": []any{
				template("a", 1), template("b", 2)}}
		}, "second post_processor"},
	} {
		_, err := Load(changed(t, "gpt2", test.change))
		require.Fails(t, name, err, ErrUnsupported, test.says)
	}
	dir := changed(t, "gpt2", func(object) {})
	for config, says := range map[string]string{
		`{"split_special_tokens": true}`:            "split_special_tokens: true",
		`{"new": 1}`:                                "new: 1",
		`{"extra_special_tokens": [{"new": 1}]}`:    "new: 1",
		`{"tokenizer_class": "GPTNeoXTokenizer"}`:   `tokenizer_class "GPTNeoXTokenizer"`,
		`{"tokenizer_class": ""}`:                   "tokenizer: it is empty",
		`{"image_token": "<none>"}`:                 `"<none>" is a special token of`,
		`{"extra_special_tokens": [""]}`:            "extra_special_tokens: it is empty",
		`{"chat_template": "x", "new": [], "a": 0}`: "a: 0",
	} {
		require.NoError(t, os.WriteFile(filepath.Join(dir, configName), []byte(config), 0o600))
		_, err := Load(dir)
		require.Fails(t, config, err, says)
	}
}

// TestKeysThatTransformersIgnoresAreAccepted: the post-processor alone adds tokens.
func TestKeysThatTransformersIgnoresAreAccepted(t *testing.T) {
	dir := changed(t, "llama3", func(object) {})
	want := []int{640, 39, 68, 408, 78, 11, 283, 263, 75, 67, 0}
	for _, config := range []string{
		`{"tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": false}`,
		`{"tokenizer_class": "LlamaTokenizerFast", "add_eos_token": true, "legacy": true}`,
		`{"clean_up_tokenization_spaces": true, "add_prefix_space": true, "max_len": 7}`,
	} {
		require.NoError(t, os.WriteFile(filepath.Join(dir, configName), []byte(config), 0o600))
		checkIDs(t, load(t, dir), "Hello, world!", true, want)
	}
}

// As for Hugging Face's tokenizers, ids of added tokens decode to what normalizers make of them.
func TestAddedTokensDecodeToTheirNormalizedText(t *testing.T) {
	replace := object{"type": "Replace", "pattern": object{"String": "q"}, "content": "w"}
	for text, test := range map[string]struct {
		normalizer object
		want       string
	}{
		"qq":       {replace, "ww"},
		"e\u0301z": {object{"type": "NFC"}, "\ufffdz"},
		"<qq>":     {object{"type": "Prepend", "prepend": "_"}, "_<qq>"},
	} {
		dir := changed(t, "gpt2", func(f object) {
			f["normalizer"] = test.normalizer
			f["added_tokens"] = append(f["added_tokens"].([]any), object{"id": 641,
				"content": text, "normalized": true})
		})
		require.Equal(t, fmt.Sprintf("%q with %v", text, test.normalizer),
			load(t, dir).Decode([]int{641}, false), test.want)
	}
}
