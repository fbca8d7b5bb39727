package tokenizer

import (
	"strconv"
	"strings"
	"unicode/utf8"
)

// decoder is what a file's decoders do: the alphabet of bytes, or the others, in this order.
type decoder struct {
	bytes   bool
	replace [2]string
	strip   int // spaces that begin the text
}

// Stream decodes ids one by one, and never returns a part of a character. Its results together are
// what Decode returns, except for runs of ByteFallback's bytes that begin with characters but are
// not UTF-8: Decode returns none of these characters.
type Stream struct {
	t       *Tokenizer
	skip    bool
	whole   bool // a run of bytes counts as a whole
	strip   int
	pending []byte
}

// Next returns the text that an id completes, which may be empty.
func (s *Stream) Next(id int) string {
	word, ok := s.t.vocabulary[id]
	if !ok || s.skip && s.t.special[id] {
		return ""
	}
	d := s.t.decoder
	if d.bytes {
		if b, ok := fromAlphabet(word); ok {
			word = b
		}
		s.pending = append(s.pending, word...)
		return s.take(false)
	}
	word = strings.ReplaceAll(word, d.replace[0], d.replace[1])
	if b, ok := byteOf(word); ok {
		s.pending = append(s.pending, b)
		if s.whole {
			return ""
		}
		return s.stripped(s.take(false))
	}
	return s.stripped(s.take(true) + word)
}

// End returns what is left, U+FFFD for a part of a character, and begins another text.
func (s *Stream) End() string {
	text := s.stripped(s.take(true))
	s.strip = s.t.decoder.strip
	return text
}

// take returns the characters that are complete, or all.
func (s *Stream) take(all bool) string {
	d := s.t.decoder
	b := s.pending
	spoilt := s.whole && !d.bytes && !utf8.Valid(b)
	var text strings.Builder
	for len(b) > 0 && (all || utf8.FullRune(b)) {
		r, n := utf8.DecodeRune(b)
		if r == utf8.RuneError && n == 1 && d.bytes {
			n = cutShort(b)
		} else if spoilt {
			r, n = utf8.RuneError, 1
		}
		text.WriteRune(r)
		b = b[n:]
	}
	s.pending = append(s.pending[:0], b...)
	return text.String()
}

// stripped returns a part of the text without the spaces that begin the text.
func (s *Stream) stripped(text string) string {
	for ; s.strip > 0 && text != ""; s.strip-- {
		rest, ok := strings.CutPrefix(text, " ")
		if !ok {
			s.strip = 0
			break
		}
		text = rest
	}
	return text
}

// cutShort returns how many bytes of b, which does not begin with a whole character, belong to one
// that is cut short: they become one U+FFFD.
func cutShort(b []byte) int {
	n := min(len(b), utf8.UTFMax-1)
	for n > 1 && utf8.FullRune(b[:n]) {
		n--
	}
	return n
}

// byteOf returns the byte of a token such as <0x41>.
func byteOf(word string) (byte, bool) {
	if len(word) != 6 || word[:3] != "<0x" || word[5] != '>' {
		return 0, false
	}
	b, err := strconv.ParseUint(word[3:5], 16, 8)
	return byte(b), err == nil
}

// byteFor returns the byte of a letter in the alphabet of GPT-2: printable bytes of Latin-1 are
// themselves, and the 68 others are U+0100 and up, in order.
func byteFor(letter rune) (b byte, ok bool) {
	n := letter - 0x100 // of those that are not printable
	switch {
	case letter > ' ' && letter < 0x7f || letter > 0xa0 && letter < 0x100 && letter != 0xad:
		return byte(letter), true
	case n >= 0 && n <= ' ':
		return byte(n), true
	case n > ' ' && n < 0x43:
		return byte(n - 0x21 + 0x7f), true
	}
	return 0xad, n == 0x43
}

// fromAlphabet returns the bytes of a word in the alphabet of GPT-2, or false.
func fromAlphabet(word string) (string, bool) {
	b := make([]byte, 0, len(word))
	for _, letter := range word {
		x, ok := byteFor(letter)
		if !ok {
			return "", false
		}
		b = append(b, x)
	}
	return string(b), true
}
