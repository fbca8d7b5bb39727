package tokenizer

import (
	"math"
	"slices"
	"unicode/utf8"
)

// bpe merges neighbours in a word: at each step, the pair that was learnt first.
type bpe struct {
	bytes    bool // the vocabulary is of bytes, not letters
	ids      map[string]int32
	merges   map[[2]int32]merge
	whole    bool        // a word of the vocabulary is itself, whatever the merges: ignore_merges
	fallback *[256]int32 // -1: there is no such token
	unknown  int32       // -1: what the vocabulary has not is left out
	fuse     bool        // neighbours that are unknown are one
}

type merge struct{ rank, id int32 }

// symbol is a token of a word, between its neighbours: -1 for none. One that was merged has id -1.
type symbol struct{ id, before, after int32 }

// encode appends the ids of a word.
func (m *bpe) encode(word string, ids []int) []int {
	if id, ok := m.ids[word]; ok && m.whole {
		return append(ids, int(id))
	}
	symbols := m.symbols(word)
	var queue queue
	for i := range len(symbols) - 1 {
		m.offer(&queue, symbols, int32(i))
	}
	for len(queue) > 0 {
		rank, at := queue.pop()
		s := &symbols[at]
		if s.id < 0 || s.after < 0 {
			continue
		}
		next := symbols[s.after]
		if merged, ok := m.merges[[2]int32{s.id, next.id}]; !ok || merged.rank != rank {
			continue // one of the two has been merged since
		} else {
			s.id = merged.id
		}
		symbols[s.after].id = -1
		s.after = next.after
		if s.after >= 0 {
			symbols[s.after].before = at
			m.offer(&queue, symbols, at)
		}
		if s.before >= 0 {
			m.offer(&queue, symbols, s.before)
		}
	}
	for _, s := range symbols {
		if s.id >= 0 {
			ids = append(ids, int(s.id))
		}
	}
	return ids
}

// symbols returns the letters or bytes of a word.
func (m *bpe) symbols(word string) []symbol {
	symbols := make([]symbol, 0, len(word))
	add := func(id int32) {
		n := int32(len(symbols))
		symbols = append(symbols, symbol{id: id, before: n - 1, after: n + 1})
	}
	pending := false // a token for what is unknown, which bytes of other letters overtake
	for at := 0; at < len(word); {
		n := 1
		if !m.bytes {
			_, n = utf8.DecodeRuneInString(word[at:])
		}
		letter := word[at : at+n]
		at += n
		id, known := m.ids[letter]
		switch {
		case known:
			if pending {
				add(m.unknown)
			}
			add(id)
			pending = false
		case m.fallsBack(letter):
			for _, b := range []byte(letter) {
				add(m.fallback[b])
			}
		case m.unknown >= 0:
			if pending && !m.fuse {
				add(m.unknown)
			}
			pending = true
		}
	}
	if pending {
		add(m.unknown)
	}
	if n := len(symbols); n > 0 {
		symbols[n-1].after = -1
	}
	return symbols
}

// fallsBack reports whether there are tokens for all bytes of a letter.
func (m *bpe) fallsBack(letter string) bool {
	return m.fallback != nil && !slices.ContainsFunc([]byte(letter), func(b byte) bool {
		return m.fallback[b] < 0
	})
}

// offer queues the pair of a symbol and the one after it, if they merge.
func (m *bpe) offer(q *queue, symbols []symbol, at int32) {
	s := symbols[at]
	if merged, ok := m.merges[[2]int32{s.id, symbols[s.after].id}]; ok {
		q.push(merged.rank, at)
	}
}

// queue is a heap of pairs by rank, and from the left among equals.
type queue []uint64

func (q *queue) push(rank, at int32) {
	*q = append(*q, uint64(rank)<<32|uint64(at))
	h := *q
	for i := len(h) - 1; i > 0 && h[i] < h[(i-1)/2]; i = (i - 1) / 2 {
		h[i], h[(i-1)/2] = h[(i-1)/2], h[i]
	}
}

func (q *queue) pop() (rank, at int32) {
	h := *q
	top, n := h[0], len(h)-1
	h[0] = h[n]
	*q, h = h[:n], h[:n]
	for i := 0; ; {
		least := i
		for child := 2*i + 1; child < min(2*i+3, n); child++ {
			if h[child] < h[least] {
				least = child
			}
		}
		if least == i {
			return int32(top >> 32), int32(top & math.MaxUint32)
		}
		h[i], h[least] = h[least], h[i]
		i = least
	}
}
