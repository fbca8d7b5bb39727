package tokenizer

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"strings"

	"github.com/euryale-ml/euryale/internal/files"
)

const (
	fileName   = "tokenizer.json"
	maxFile    = 64 << 20 // bytes. Those of a vocabulary of 260,000 have 33 MB.
	maxRest    = 4 << 20  // bytes of what is not the model, which take 100 times the memory
	maxAdded   = 1 << 20  // bytes of added tokens
	maxPattern = 1 << 12  // bytes of a regular expression
)

// file is tokenizer.json as it stands.
type file struct {
	Added         []added         `json:"added_tokens"`
	Normalizer    *component      `json:"normalizer"`
	PreTokenizer  *component      `json:"pre_tokenizer"`
	PostProcessor *component      `json:"post_processor"`
	Decoder       *component      `json:"decoder"`
	Model         json.RawMessage `json:"model"`
	Padding       struct {
		Token string `json:"pad_token"`
	} `json:"padding"`
	settings
}

// model is a file's model of type BPE.
type model struct {
	Type         string           `json:"type"`
	Dropout      float64          `json:"dropout"`
	Unknown      string           `json:"unk_token"`
	Prefix       string           `json:"continuing_subword_prefix"`
	Suffix       string           `json:"end_of_word_suffix"`
	Fuse         bool             `json:"fuse_unk"`
	ByteFallback bool             `json:"byte_fallback"`
	IgnoreMerges bool             `json:"ignore_merges"`
	Vocabulary   map[string]int32 `json:"vocab"`
	Merges       json.RawMessage  `json:"merges"`
}

// component is a step of a file's pipelines, with the keys of all types.
type component struct {
	Type string `json:"type"`

	Normalizers   []component `json:"normalizers"` // of a Sequence
	PreTokenizers []component `json:"pretokenizers"`
	Processors    []component `json:"processors"`
	Decoders      []component `json:"decoders"`

	Prepend string `json:"prepend"`
	Pattern struct{ String, Regex string }
	Content string `json:"content"`
	Start   int    `json:"start"`
	Stop    int    `json:"stop"`

	Behavior    string `json:"behavior"`
	PrefixSpace *bool  `json:"add_prefix_space"`
	UseRegex    *bool  `json:"use_regex"`
	Replacement string `json:"replacement"`
	Scheme      string `json:"prepend_scheme"`
	Split       *bool  `json:"split"`

	Single []struct{ SpecialToken, Sequence struct{ ID string } } `json:"single"`
	Tokens map[string]struct{ IDs []int }                         `json:"special_tokens"`
}

// steps returns the components of a pipeline without its Sequences.
func (c *component) steps() []component {
	if c == nil {
		return nil
	}
	if c.Type != "Sequence" {
		return []component{*c}
	}
	var out []component
	for _, step := range slices.Concat(c.Normalizers, c.PreTokenizers, c.Processors, c.Decoders) {
		out = append(out, step.steps()...)
	}
	return out
}

// unsupported returns the error of a component.
func (c *component) unsupported(kind string) error {
	return fmt.Errorf("%w: %s %.80s, as it stands here", ErrUnsupported, kind, c.Type)
}

// Load reads the tokenizer of a folder as transformers' AutoTokenizer does: tokenizer.json, and in
// other files which class makes a tokenizer of it, with which settings and special tokens. store
// opens dir if that is a URL, such as bucket.Open.
//
// Errors: [ErrUnsupported] names what this package lacks; a damaged file; those of the file system.
func Load(dir string, store ...func(url string) (fs.FS, error)) (_ *Tokenizer, err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("tokenizer: load %s: %w", dir, err)
		}
	}()
	var f file
	t := &Tokenizer{vocabulary: map[int]string{}, special: map[int]bool{}}
	in, err := files.At(dir, store...)
	if err != nil {
		return nil, err
	}
	text, err := in.Read(fileName, maxFile)
	if errors.Is(err, fs.ErrNotExist) {
		err = fmt.Errorf("%w: save_pretrained of transformers' AutoTokenizer writes it", err)
	}
	if err != nil {
		return nil, err // which names the file
	}
	onBytes := bytes.Contains(text, []byte(`"ByteLevel"`))
	if f.settings, err = readSettings(in, onBytes); err != nil {
		return nil, err
	}
	err = f.parse(text)
	for _, set := range []func(*file) error{
		t.setPreTokenizer, t.setModel, t.setNormalizer, t.setAdded, t.setTemplate, t.setDecoder,
	} {
		if err == nil {
			err = set(&f)
		}
	}
	if err != nil {
		return nil, fmt.Errorf("%s: %w", fileName, err)
	}
	t.BOS, t.EOS, t.Named = t.end(f.named["bos_token"]), t.end(f.named["eos_token"]),
		map[string]string{}
	for key, a := range f.named {
		t.Named[key] = a.Content
	}
	return t, nil
}

// end returns the id of a special token, -1 for none.
func (t *Tokenizer) end(a added) int {
	if id, ok := t.ids[a.Content]; ok && a.Content != "" {
		return id
	}
	return -1
}

func (f *file) parse(text []byte) error {
	var large struct{ Model json.RawMessage }
	if err := json.Unmarshal(text, &large); err != nil {
		return fmt.Errorf("%w: it is damaged: take another copy", err)
	}
	if n := len(text) - len(large.Model); n > maxRest {
		return fmt.Errorf("%d bytes are not the model: this package reads %d", n, maxRest)
	}
	if err := onlyKeys("the file", text, fileKeys); err != nil {
		return err
	}
	if err := json.Unmarshal(text, f); err != nil {
		return err
	}
	return f.remake()
}

func (t *Tokenizer) setNormalizer(f *file) error {
	for _, c := range f.Normalizer.steps() {
		var normalize func(string) string
		switch {
		case c.Type == "NFC":
			normalize = nfc
		case c.Type == "Prepend":
			normalize = func(text string) string { return c.Prepend + text }
		case c.Type == "Replace" && c.Pattern.String != "":
			normalize = strings.NewReplacer(c.Pattern.String, c.Content).Replace
		default:
			return c.unsupported("normalizer")
		}
		t.normalize = append(t.normalize, normalize)
	}
	return nil
}

func (t *Tokenizer) setPreTokenizer(f *file) error {
	no := func(flag *bool) bool { return flag != nil && !*flag }
	for _, c := range f.PreTokenizer.steps() {
		pattern := ""
		switch {
		case t.model.bytes:
			return c.unsupported("pre_tokenizer")
		case c.Type == "ByteLevel" && c.PrefixSpace != nil:
			t.model.bytes = true
			if *c.PrefixSpace {
				t.pretokenize = append(t.pretokenize, prefixed)
			}
			if no(c.UseRegex) {
				continue
			}
			pattern = gpt2
		case c.Type == "Split" && c.Behavior == "Isolated" && c.Pattern.Regex != "":
			pattern = c.Pattern.Regex
		case c.Type == "Metaspace" && c.Scheme == "first" && len(t.pretokenize) > 0 &&
			f.Normalizer != nil: // what it finds at the beginning depends on what is replaced there
			return c.unsupported("pre_tokenizer behind another one and a normalizer")
		case c.Type == "Metaspace" && no(c.Split) && c.Replacement != "" &&
			slices.Contains([]string{"always", "first", "never"}, c.Scheme):
			t.pretokenize = append(t.pretokenize, c.metaspace)
			continue
		default:
			return c.unsupported("pre_tokenizer")
		}
		s, err := newSplitter(pattern)
		if err != nil {
			return err
		}
		t.pretokenize = append(t.pretokenize, s.split)
	}
	return nil
}

// prefixed is a pretokenizer: a space begins each piece.
func prefixed(pieces []string, _ bool) []string {
	for i, piece := range pieces {
		pieces[i] = " " + strings.TrimPrefix(piece, " ")
	}
	return pieces
}

// metaspace is a pretokenizer: a letter replaces each space, and begins texts.
func (c *component) metaspace(pieces []string, begins bool) []string {
	for i, piece := range pieces {
		piece = strings.ReplaceAll(piece, " ", c.Replacement)
		if c.Scheme == "always" || c.Scheme == "first" && begins && i == 0 {
			piece = c.Replacement + strings.TrimPrefix(piece, c.Replacement)
		}
		pieces[i] = piece
	}
	return pieces
}

// setModel reads the vocabulary and the merges.
func (t *Tokenizer) setModel(f *file) error {
	m := model{Type: "BPE"} // GPT-2's has no type
	err := json.Unmarshal(f.Model, &m)
	if f.class != "" { // which makes it anew
		m = model{Type: m.Type, Vocabulary: m.Vocabulary, Merges: m.Merges,
			ByteFallback: f.class == llama}
	}
	switch {
	case m.Type != "BPE":
		return fmt.Errorf("%w: model %.80s: use one of BPE", ErrUnsupported, m.Type)
	case err != nil:
		return fmt.Errorf("model: %w", err)
	case m.Dropout != 0 || m.Prefix != "" || m.Suffix != "":
		return fmt.Errorf("%w: model BPE with dropout, continuing_subword_prefix or "+
			"end_of_word_suffix", ErrUnsupported)
	}
	if err := onlyKeys("the model", f.Model, modelKeys); err != nil {
		return err
	}
	t.ids = map[string]int{}
	b := &t.model
	b.ids, b.whole, b.fuse = make(map[string]int32, len(m.Vocabulary)), m.IgnoreMerges, m.Fuse
	for word, id := range m.Vocabulary {
		if other, taken := t.vocabulary[int(id)]; taken || id < 0 {
			return fmt.Errorf("vocab: %.80q has id %d, and %.80q has it: ids are >= 0 and differ",
				word, id, other)
		}
		t.ids[word], t.vocabulary[int(id)] = int(id), word
		if letters, ok := fromAlphabet(word); ok || !b.bytes {
			if b.bytes {
				word = letters
			}
			b.ids[word] = id
		}
	}
	if err := t.setUnknown(&m); err != nil {
		return err
	}
	return t.setMerges(m.Merges)
}

// setUnknown reads what replaces letters that the vocabulary lacks.
func (t *Tokenizer) setUnknown(m *model) error {
	b := &t.model
	b.unknown = -1
	if m.Unknown != "" {
		id, ok := t.ids[m.Unknown]
		if !ok {
			return fmt.Errorf("vocab has no unk_token %.80q", m.Unknown)
		}
		b.unknown = int32(id)
	}
	if !m.ByteFallback {
		return nil
	}
	if b.bytes {
		return fmt.Errorf("%w: byte_fallback with ByteLevel", ErrUnsupported)
	}
	b.fallback = new([256]int32)
	for i := range b.fallback {
		b.fallback[i] = -1
		if id, ok := t.ids[fmt.Sprintf("<0x%02X>", i)]; ok {
			b.fallback[i] = int32(id)
		}
	}
	return nil
}

// setMerges reads pairs: ["a", "b"], or "a b" as older files have them.
func (t *Tokenizer) setMerges(text json.RawMessage) error {
	var pairs [][]string
	if err := json.Unmarshal(text, &pairs); err != nil {
		var lines []string
		if json.Unmarshal(text, &lines) != nil {
			return fmt.Errorf("merges: %w", err)
		}
		pairs = nil
		for _, line := range lines {
			if !strings.HasPrefix(line, "#version") {
				pairs = append(pairs, strings.Split(line, " "))
			}
		}
	}
	t.model.merges = make(map[[2]int32]merge, len(pairs))
	for rank, p := range pairs {
		if len(p) != 2 {
			return fmt.Errorf("merges: %.80q is no pair", p)
		}
		a, okA := t.ids[p[0]]
		b, okB := t.ids[p[1]]
		both, ok := t.ids[p[0]+p[1]]
		if !okA || !okB || !ok {
			return fmt.Errorf("merges: %.80q or both together are not in vocab", p)
		}
		t.model.merges[[2]int32{int32(a), int32(b)}] = merge{int32(rank), int32(both)}
	}
	return nil
}

// setAdded reads tokens that are found before the model reads a text.
func (t *Tokenizer) setAdded(f *file) error {
	raw, normal, special := map[string]added{}, map[string]added{}, map[string]bool{}
	next, size := len(t.ids), 0
	tokens, err := f.tokens()
	if err != nil {
		return err
	}
	for _, a := range tokens {
		size += len(a.Content)
		if size > maxAdded {
			return fmt.Errorf("%w: added_tokens of more than %d bytes", ErrUnsupported, maxAdded)
		}
		id, ok := t.ids[a.Content]
		if !ok {
			id = next
		}
		if a.ID == anyID {
			a.ID = id
		}
		if a.Content == "" || a.ID != id {
			return fmt.Errorf("added_tokens: %.80q has id %d, and by the order of ids it is %d",
				a.Content, a.ID, id)
		}
		next = max(next, id+1)
		t.ids[a.Content], t.vocabulary[id] = id, a.Content
		if a.Special {
			special[a.Content] = true
		}
		if !a.Normalized {
			raw[a.Content] = a
			continue
		}
		for _, normalize := range t.normalize {
			a.Content = normalize(a.Content)
		}
		if t.vocabulary[id] = a.Content; a.Content != "" { // ids decode to what is found
			normal[a.Content] = a
		}
	}
	for _, a := range tokens { // which are special by their text, as ids decode to it
		t.special[t.ids[a.Content]] = special[t.vocabulary[t.ids[a.Content]]]
	}
	if t.raw, err = newFinder(raw); err == nil {
		t.normal, err = newFinder(normal)
	}
	return err
}

// setTemplate reads the tokens around a text.
func (t *Tokenizer) setTemplate(f *file) error {
	templates := 0
	for _, c := range f.PostProcessor.steps() {
		if c.Type == "ByteLevel" { // changes offsets alone
			continue
		}
		if templates++; templates > 1 {
			return fmt.Errorf("%w: a second post_processor that adds tokens: %.80s", ErrUnsupported,
				c.Type)
		}
		var around [2][]int
		side := 0
		for _, part := range c.Single {
			token, ok := c.Tokens[part.SpecialToken.ID]
			switch {
			case part.Sequence.ID == "A" && side == 0:
				side = 1
			case !ok:
				return c.unsupported("post_processor")
			}
			around[side] = append(around[side], token.IDs...)
		}
		if c.Type != "TemplateProcessing" || side != 1 {
			return c.unsupported("post_processor")
		}
		t.before, t.after = around[0], around[1]
	}
	return nil
}

func (t *Tokenizer) setDecoder(f *file) error {
	d := &t.decoder
	types := ""
	for _, c := range f.Decoder.steps() {
		types += " " + c.Type
		switch {
		case c.Type == "Replace" && c.Pattern.String != "":
			d.replace = [2]string{c.Pattern.String, c.Content}
		case c.Type == "Strip" && c.Content == " " && c.Stop == 0:
			d.strip = c.Start
		case c.Type == "Strip" || c.Type == "Replace":
			return c.unsupported("decoder")
		}
	}
	switch types {
	case " ByteLevel":
		d.bytes = true
	case " Replace ByteFallback Fuse", " Replace ByteFallback Fuse Strip":
	default:
		return fmt.Errorf("%w: decoder of%.200s", ErrUnsupported, types)
	}
	return nil
}
