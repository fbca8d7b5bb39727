package proof

import "math/bits"

// numbers gives keys the numbers 0, 1 and so on, in the order in which they come first: a hash
// table with open addressing. [Verify] spends most of its time here. A Go map would take longer: it
// hashes all words of a key, also those that are not in use, and needs a slice of the keys besides.
type numbers[K comparable] struct {
	keys    []K
	entries []entry // their number is a power of two
}

// entry is a place of the table.
type entry struct {
	hash uint32
	next int32 // the number after the key's, 0 if no key is here
}

// newNumbers has room for about n keys.
func newNumbers[K comparable](n int) numbers[K] {
	return numbers[K]{make([]K, 0, n), make([]entry, 1<<bits.Len(uint(4*n/3)))}
}

// of returns the number of a key.
func (t *numbers[K]) of(key *K, h hash) int32 {
	if 4*len(t.keys) >= 3*len(t.entries) {
		t.grow()
	}
	upper := uint32(h >> 32)
	i := t.first(upper)
	for ; t.entries[i].next > 0; i = (i + 1) & (len(t.entries) - 1) {
		if s := t.entries[i]; s.hash == upper && t.keys[s.next-1] == *key {
			return s.next - 1
		}
	}
	t.keys = append(t.keys, *key)
	t.entries[i] = entry{upper, int32(len(t.keys))}
	return int32(len(t.keys) - 1)
}

// first is where the search for a key begins.
func (t *numbers[K]) first(hash uint32) int {
	return int(uint64(hash) * uint64(len(t.entries)) >> 32)
}

// grow doubles the table.
func (t *numbers[K]) grow() {
	old := t.entries
	t.entries = make([]entry, 2*len(old))
	for _, s := range old {
		if s.next == 0 {
			continue
		}
		i := t.first(s.hash)
		for ; t.entries[i].next > 0; i = (i + 1) & (len(t.entries) - 1) {
		}
		t.entries[i] = s
	}
}

// hash is a hash of words, best in its upper bits.
type hash uint64

// and adds a word.
func (h hash) and(word uint64) hash {
	return hash((bits.RotateLeft64(uint64(h), 23) ^ word) * 0x9e3779b97f4a7c15)
}
