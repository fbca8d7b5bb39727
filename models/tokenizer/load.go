package tokenizer

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
)

const (
	fileName   = "tokenizer.json"
	maxFile    = 128 << 20 // bytes. Those of 260,000 words have 33 MB.
	maxAdded   = 1 << 20   // bytes of added tokens
	maxPattern = 1 << 12   // bytes of a regular expression
)

// file is tokenizer.json as it stands.
type file struct {
	Added         []added         `json:"added_tokens"`
	Normalizer    *component      `json:"normalizer"`
	PreTokenizer  *component      `json:"pre_tokenizer"`
	PostProcessor *component      `json:"post_processor"`
	Decoder       *component      `json:"decoder"`
	Model         json.RawMessage `json:"model"`
}

// model is a file's model of type BPE.
type model struct {
	Type         string          `json:"type"`
	Dropout      float64         `json:"dropout"`
	Unknown      string          `json:"unk_token"`
	Prefix       string          `json:"continuing_subword_prefix"`
	Suffix       string          `json:"end_of_word_suffix"`
	Fuse         bool            `json:"fuse_unk"`
	ByteFallback bool            `json:"byte_fallback"`
	IgnoreMerges bool            `json:"ignore_merges"`
	Vocabulary   map[string]int  `json:"vocab"`
	Merges       json.RawMessage `json:"merges"`
}

// component is a step of a file's pipelines, with the keys of all types.
type component struct {
	Type string `json:"type"`

	Normalizers   []component `json:"normalizers"` // of a Sequence
	PreTokenizers []component `json:"pretokenizers"`
	Processors    []component `json:"processors"`
	Decoders      []component `json:"decoders"`

	Prepend string `json:"prepend"`
	Pattern struct{ String, Regex *string }
	Content string `json:"content"`
	Start   int    `json:"start"`
	Stop    int    `json:"stop"`

	Behavior    string `json:"behavior"`
	PrefixSpace *bool  `json:"add_prefix_space"`
	UseRegex    *bool  `json:"use_regex"`
	Individual  bool   `json:"individual_digits"`
	Replacement string `json:"replacement"`
	Scheme      string `json:"prepend_scheme"`
	Split       *bool  `json:"split"`

	Single []struct {
		Special  *struct{ ID string } `json:"SpecialToken"`
		Sequence *struct{ ID string }
	} `json:"single"`
	Tokens map[string]struct{ IDs []int } `json:"special_tokens"`
}

// unsupported returns the error of a component.
func (c *component) unsupported(kind, what string) error {
	return fmt.Errorf("%w: %s %s%s", ErrUnsupported, kind, c.Type, what)
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
	for _, list := range [][]component{c.Normalizers, c.PreTokenizers, c.Processors, c.Decoders} {
		for _, step := range list {
			out = append(out, step.steps()...)
		}
	}
	return out
}

// Load reads the tokenizer.json of a folder. The tokens around texts come from
// tokenizer_config.json, and those that end them from generation_config.json or config.json if
// these have any.
//
// Errors: [ErrUnsupported] for what this package has not; a damaged file; those of the file system.
func Load(dir string) (*Tokenizer, error) {
	var f file
	path := filepath.Join(dir, fileName)
	err := read(path, &f)
	t := &Tokenizer{BOS: -1, words: map[int]string{}, special: map[int]bool{}}
	for _, build := range []func(*file) error{
		t.setPreTokenizer, t.setModel, t.setNormalizer, t.setAdded, t.setTemplate, t.setDecoder,
	} {
		if err == nil {
			err = build(&f)
		}
	}
	if err != nil {
		return nil, fmt.Errorf("tokenizer: load %s: %w", path, err)
	}
	if err := t.setEnds(dir); err != nil {
		return nil, fmt.Errorf("tokenizer: load %s: %w", dir, err)
	}
	return t, nil
}

func read(path string, into any) error {
	info, err := os.Stat(path)
	if err == nil && info.Size() > maxFile {
		err = fmt.Errorf("%d bytes: this package reads %d", info.Size(), maxFile)
	}
	if err != nil {
		return err
	}
	text, err := os.ReadFile(path)
	if err == nil {
		err = json.Unmarshal(text, into)
	}
	return err
}

func (t *Tokenizer) setNormalizer(f *file) error {
	for _, c := range f.Normalizer.steps() {
		switch {
		case c.Type == "NFC":
			t.normalize = append(t.normalize, nfc)
		case c.Type == "Prepend":
			t.normalize = append(t.normalize, func(text string) string {
				if text == "" {
					return ""
				}
				return c.Prepend + text
			})
		case c.Type == "Replace" && c.Pattern.String != nil && *c.Pattern.String != "":
			t.normalize = append(t.normalize, func(text string) string {
				return strings.ReplaceAll(text, *c.Pattern.String, c.Content)
			})
		default:
			return c.unsupported("normalizer", "")
		}
	}
	return nil
}

func (t *Tokenizer) setPreTokenizer(f *file) error {
	for _, c := range f.PreTokenizer.steps() {
		if t.model.bytes {
			return c.unsupported("pre_tokenizer", " after ByteLevel")
		}
		pattern := ""
		switch {
		case c.Type == "ByteLevel":
			t.model.bytes = true
			if c.PrefixSpace == nil || *c.PrefixSpace {
				t.pretokenize = append(t.pretokenize, prefix(" "))
			}
			if c.UseRegex == nil || *c.UseRegex {
				pattern = gpt2
			}
		case c.Type == "Digits" && c.Individual:
			pattern = `\p{N}`
		case c.Type == "Digits":
			pattern = `\p{N}+`
		case c.Type == "Metaspace" && c.Replacement != "":
			t.pretokenize = append(t.pretokenize, c.metaspace)
		case c.Type == "Split" && c.Behavior == "Isolated" && c.Pattern.Regex != nil:
			pattern = *c.Pattern.Regex
		case c.Type == "Split" && c.Behavior == "Isolated" && c.Pattern.String != nil:
			pattern = regexp.QuoteMeta(*c.Pattern.String)
		default:
			return c.unsupported("pre_tokenizer", " "+c.Behavior)
		}
		if pattern == "" {
			continue
		}
		s, err := newSplitter(pattern)
		if err != nil {
			return err
		}
		t.pretokenize = append(t.pretokenize, s.split)
	}
	return nil
}

// prefix returns a pretokenizer that begins each piece by a prefix.
func prefix(prefix string) pretokenizer {
	return func(pieces []string, _ bool) []string {
		for i, piece := range pieces {
			if !strings.HasPrefix(piece, prefix) {
				pieces[i] = prefix + piece
			}
		}
		return pieces
	}
}

// metaspace is a pretokenizer: words begin by a letter that stands for a space.
func (c *component) metaspace(pieces []string, begins bool) []string {
	var out []string
	scheme := c.Scheme
	if scheme == "" && c.PrefixSpace != nil && !*c.PrefixSpace { // as older files have it
		scheme = "never"
	}
	for i, piece := range pieces {
		piece = strings.ReplaceAll(piece, " ", c.Replacement)
		if scheme != "never" && (scheme != "first" || begins && i == 0) {
			piece = strings.TrimPrefix(piece, c.Replacement)
			piece = c.Replacement + piece
		}
		if c.Split != nil && !*c.Split {
			out = append(out, piece)
			continue
		}
		for piece != "" {
			n := strings.Index(piece[1:], c.Replacement) + 1
			if n == 0 {
				n = len(piece)
			}
			out = append(out, piece[:n])
			piece = piece[n:]
		}
	}
	return out
}

// setModel reads the vocabulary and what merges.
func (t *Tokenizer) setModel(f *file) error {
	var kind struct{ Type string }
	if f.Model == nil {
		return errors.New("there is no model")
	}
	if err := json.Unmarshal(f.Model, &kind); err != nil {
		return fmt.Errorf("model: %w", err)
	}
	if kind.Type != "BPE" && kind.Type != "" { // GPT-2's has no type
		return fmt.Errorf("%w: model %s", ErrUnsupported, kind.Type)
	}
	var m model
	if err := json.Unmarshal(f.Model, &m); err != nil {
		return fmt.Errorf("model: %w", err)
	}
	f.Model = nil
	if m.Dropout != 0 || m.Prefix != "" || m.Suffix != "" {
		return fmt.Errorf("%w: model BPE with dropout, continuing_subword_prefix or "+
			"end_of_word_suffix", ErrUnsupported)
	}
	t.ids = m.Vocabulary
	b := &t.model
	b.ids, b.whole, b.fuse = make(map[string]int32, len(t.ids)), m.IgnoreMerges, m.Fuse
	for word, id := range t.ids {
		other, taken := t.words[id]
		if taken || id < 0 || id > math.MaxInt32 {
			return fmt.Errorf("vocab: %q has id %d, and so has %q: ids are >= 0 and differ",
				word, id, other)
		}
		t.words[id] = word
		if letters, ok := fromAlphabet(word); ok && b.bytes {
			b.ids[letters] = int32(id)
		} else if !b.bytes {
			b.ids[word] = int32(id)
		}
	}
	if err := t.setUnknown(&m); err != nil {
		return err
	}
	return t.setMerges(m.Merges)
}

// setUnknown reads what letters become that the vocabulary has not.
func (t *Tokenizer) setUnknown(m *model) error {
	b := &t.model
	b.unknown = -1
	if id, ok := t.ids[m.Unknown]; ok {
		b.unknown = int32(id)
	} else if m.Unknown != "" {
		return fmt.Errorf("vocab has no unk_token %q", m.Unknown)
	}
	if !m.ByteFallback {
		return nil
	}
	b.fallback = new([256]int32)
	for i := range b.fallback {
		id, ok := t.ids[fmt.Sprintf("<0x%02X>", i)]
		if _, letter := b.ids[string([]byte{byte(i)})]; !ok && !(b.bytes && letter) {
			return fmt.Errorf("%w: byte_fallback, and vocab has no <0x%02X>", ErrUnsupported, i)
		}
		b.fallback[i] = int32(id)
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
			return fmt.Errorf("merges: %q is no pair", p)
		}
		a, okA := t.ids[p[0]]
		b, okB := t.ids[p[1]]
		both, ok := t.ids[p[0]+p[1]]
		if !okA || !okB || !ok {
			return fmt.Errorf("merges: %q or both together are not in vocab", p)
		}
		t.model.merges[[2]int32{int32(a), int32(b)}] = merge{int32(rank), int32(both)}
	}
	return nil
}

// setAdded reads tokens that are found before the model reads a text.
func (t *Tokenizer) setAdded(f *file) error {
	raw, normal := map[string]added{}, map[string]added{}
	next, size := len(t.ids), 0
	for _, a := range f.Added {
		size += len(a.Content)
		if size > maxAdded {
			return fmt.Errorf("%w: added_tokens of more than %d bytes", ErrUnsupported, maxAdded)
		}
		id, ok := t.ids[a.Content]
		if !ok {
			id = next
		}
		if a.Content == "" || !ok && a.ID != id || ok && a.ID != id {
			return fmt.Errorf("added_tokens: %q has id %d, and by the order of ids it is %d",
				a.Content, a.ID, id)
		}
		next = max(next, id+1)
		t.ids[a.Content], t.words[id] = id, a.Content
		t.special[id] = a.Special
		if !a.Normalized {
			raw[a.Content] = a
			continue
		}
		for _, normalize := range t.normalize {
			a.Content = normalize(a.Content)
		}
		normal[a.Content] = a
	}
	var err error
	if t.raw, err = newFinder(raw); err == nil {
		t.normal, err = newFinder(normal)
	}
	return err
}

// setTemplate reads the tokens around a text.
func (t *Tokenizer) setTemplate(f *file) error {
	for _, c := range f.PostProcessor.steps() {
		switch c.Type {
		case "ByteLevel": // changes offsets alone
			continue
		case "TemplateProcessing":
		default:
			return c.unsupported("post_processor", "")
		}
		var around [2][]int
		side := 0
		for _, part := range c.Single {
			if part.Special != nil {
				ids := c.Tokens[part.Special.ID].IDs
				around[side] = append(around[side], ids...)
			} else if side++; side > 1 || part.Sequence == nil || part.Sequence.ID != "A" {
				break
			}
		}
		if side != 1 {
			return c.unsupported("post_processor", " whose single has not A once")
		}
		t.before = slices.Concat(around[0], t.before)
		t.after = slices.Concat(t.after, around[1])
	}
	return nil
}

func (t *Tokenizer) setDecoder(f *file) error {
	d := &t.decoder
	steps := f.Decoder.steps()
	order, last := []string{"Replace", "ByteFallback", "Fuse", "Strip"}, 0
	for _, c := range steps {
		at := slices.Index(order, c.Type)
		switch {
		case c.Type == "ByteLevel" && len(steps) == 1:
			d.bytes = true
			continue
		case c.Type == "Replace" && (c.Pattern.String == nil || *c.Pattern.String == ""),
			c.Type == "Strip" && (c.Content != " " || c.Stop != 0 || d.strip != 0),
			at < last:
			return c.unsupported("decoder", " as it stands here")
		case c.Type == "Replace":
			d.replace = append(d.replace, [2]string{*c.Pattern.String, c.Content})
		case c.Type == "ByteFallback":
			d.fallback = true
		case c.Type == "Strip":
			d.strip = c.Start
		}
		last = at
	}
	if !d.bytes && !slices.ContainsFunc(steps, func(c component) bool { return c.Type == "Fuse" }) {
		return fmt.Errorf("%w: decoder without ByteLevel or Fuse", ErrUnsupported)
	}
	return nil
}

// setEnds reads BOS and EOS.
func (t *Tokenizer) setEnds(dir string) error {
	var names struct {
		BOS json.RawMessage `json:"bos_token"`
		EOS json.RawMessage `json:"eos_token"`
	}
	if err := readIfAny(dir, "tokenizer_config.json", &names); err != nil {
		return err
	}
	if id, ok := t.named(names.BOS); ok {
		t.BOS = id
	}
	for _, name := range []string{"generation_config.json", "config.json"} {
		var ids struct {
			EOS json.RawMessage `json:"eos_token_id"`
		}
		if err := readIfAny(dir, name, &ids); err != nil {
			return err
		}
		var one *int
		if json.Unmarshal(ids.EOS, &t.EOS) != nil && json.Unmarshal(ids.EOS, &one) == nil {
			t.EOS = []int{*one}
		}
		if len(t.EOS) > 0 {
			return nil
		}
	}
	if id, ok := t.named(names.EOS); ok {
		t.EOS = []int{id}
	}
	return nil
}

// named returns the id of a token that a configuration names by a string, or by an object.
func (t *Tokenizer) named(text json.RawMessage) (int, bool) {
	var name string
	if json.Unmarshal(text, &name) != nil {
		var token added
		if json.Unmarshal(text, &token) != nil {
			return 0, false
		}
		name = token.Content
	}
	return t.ID(name)
}

func readIfAny(dir, name string, into any) error {
	err := read(filepath.Join(dir, name), into)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	return nil
}
