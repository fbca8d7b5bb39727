package tokenizer

import (
	"fmt"
	"regexp"
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"

	"golang.org/x/text/unicode/norm"
)

// added is a token of a file's added_tokens.
type added struct {
	ID         int    `json:"id"`
	Content    string `json:"content"`
	SingleWord bool   `json:"single_word"`
	LStrip     bool   `json:"lstrip"`
	RStrip     bool   `json:"rstrip"`
	Normalized bool   `json:"normalized"`
	Special    bool   `json:"special"`
}

// finder finds added tokens in a text, the longest where several begin. A nil finder has none.
type finder struct {
	any    *regexp.Regexp
	tokens map[string]added
}

func newFinder(tokens map[string]added) (*finder, error) {
	var words []string
	for word := range tokens {
		words = append(words, regexp.QuoteMeta(word))
	}
	if len(words) == 0 {
		return nil, nil
	}
	slices.Sort(words)
	re, err := regexp.Compile(strings.Join(words, "|"))
	if err != nil {
		return nil, fmt.Errorf("added_tokens: %w", err)
	}
	re.Longest()
	return &finder{any: re, tokens: tokens}, nil
}

// cut passes the tokens of a text, and the parts between them, to its arguments.
func (f *finder) cut(text string, part func(text string, at int), token func(id int)) {
	at := 0
	if f != nil {
		for _, m := range f.any.FindAllStringIndex(text, -1) {
			begin, end := m[0], m[1]
			a := f.tokens[text[begin:end]]
			last, _ := utf8.DecodeLastRuneInString(text[:begin])
			next, _ := utf8.DecodeRuneInString(text[end:])
			if a.SingleWord && (inWord(last) || inWord(next)) {
				continue
			}
			if a.LStrip {
				begin = max(at, len(strings.TrimRightFunc(text[:begin], unicode.IsSpace)))
			}
			if a.RStrip {
				end = len(text) - len(strings.TrimLeftFunc(text[end:], unicode.IsSpace))
			}
			if at < begin {
				part(text[at:begin], at)
			}
			if begin < end { // else they are spaces that the token before has taken
				token(a.ID)
			}
			at = end // again, of spaces that two tokens take
		}
	}
	if at < len(text) {
		part(text[at:], at)
	}
}

// inWord reports whether a letter is one of words, as \w is in Unicode.
func inWord(r rune) bool {
	return r != utf8.RuneError && unicode.In(r, unicode.L, unicode.M, unicode.Nd, unicode.Nl,
		unicode.Pc, unicode.Other_Alphabetic, unicode.Join_Control)
}

// gpt2 is the regular expression of ByteLevel.
const gpt2 = `'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|` + lastSpace

// lastSpace, at the end of an expression, leaves the last of several spaces to what follows them.
// Package regexp has no lookahead: the spaces are a group instead, and split looks ahead.
const lastSpace = `\s+(?!\S)|\s+`

// splitter cuts pieces into matches of an expression and the text between them.
type splitter struct {
	re     *regexp.Regexp
	spaces int // the group that stands for lastSpace, 0 for none
}

const (
	spaces = `\t-\r\x{85}\p{Z}` // of Unicode, in a class: \s is ASCII to package regexp
	escape = `\\(?:[nrs]|p\{\w+\})`
	// alike matches what package regexp reads like Oniguruma, which Hugging Face uses, except \s.
	alike = `\(\?i?:|` + escape + `|\[\^?(?:` + escape + `|[^]\\[&^])+]|\{\d+,\d+}|` +
		`[^]\\^$.([{}]`
)

func newSplitter(pattern string) (*splitter, error) {
	wrong := fmt.Errorf("%w: regular expression %.200q", ErrUnsupported, pattern)
	head, ok := strings.CutSuffix(pattern, lastSpace)
	ok = ok && (head == "" || strings.HasSuffix(head, "|"))
	if !ok {
		head = pattern
	}
	if len(pattern) > maxPattern || !regexp.MustCompile(`^(?:`+alike+`)*$`).MatchString(head) {
		return nil, wrong
	}
	head = regexp.MustCompile(alike).ReplaceAllStringFunc(head, func(part string) string {
		if part == `\s` {
			return `[` + spaces + `]`
		}
		return strings.ReplaceAll(part, `\s`, spaces)
	})
	if ok {
		head += `([` + spaces + `]+)`
	}
	re, err := regexp.Compile(head)
	if err != nil || re.MatchString("") {
		return nil, wrong
	}
	return &splitter{re: re, spaces: re.NumSubexp()}, nil
}

// split is a pretokenizer.
func (s *splitter) split(pieces []string, _ bool) []string {
	var out []string
	for _, text := range pieces {
		for text != "" {
			m := s.re.FindStringSubmatchIndex(text)
			if m == nil {
				out = append(out, text)
				break
			}
			begin, end := m[0], m[1]
			if s.spaces > 0 && m[2*s.spaces] >= 0 && end < len(text) {
				if _, n := utf8.DecodeLastRuneInString(text[:end]); end-begin > n {
					end -= n
				}
			}
			if begin > 0 {
				out = append(out, text[:begin])
			}
			out = append(out, text[begin:end])
			text = text[end:]
		}
	}
	return out
}

// nfc returns a text in Unicode's form C. Package norm separates runs of more than 30 marks by
// U+034F, which that form does not.
func nfc(text string) string {
	normal := norm.NFC.String(text)
	if strings.Count(normal, "\u034f") == strings.Count(text, "\u034f") {
		return normal
	}
	var letters []rune
	for _, r := range text {
		letters = append(letters, []rune(norm.NFD.String(string(r)))...)
	}
	for i := 0; i < len(letters); i++ {
		n := i
		for n < len(letters) && class(letters[n]) > 0 {
			n++
		}
		slices.SortStableFunc(letters[i:n], func(a, b rune) int { return class(a) - class(b) })
		i = n
	}
	out := letters[:0]
	base, before := -1, 0 // the letter that marks join, and the class of the mark before
	for _, r := range letters {
		c := class(r)
		if base >= 0 && (before < c || base == len(out)-1) {
			joined := []rune(norm.NFC.String(string(out[base]) + string(r)))
			if len(joined) == 1 {
				out[base] = joined[0]
				continue
			}
		}
		out = append(out, r)
		if before = c; c == 0 {
			base = len(out) - 1
		}
	}
	return string(out)
}

// class is the canonical combining class.
func class(r rune) int { return int(norm.NFC.PropertiesString(string(r)).CCC()) }
