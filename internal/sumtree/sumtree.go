// Package sumtree says in which order a tree of sums adds its terms: a backend.Tree, whoever has
// the terms.
package sumtree

import "math/bits"

// Branches takes the n terms from first on, of all terms of a tree. It appends the sizes of the
// largest branches that these terms make up, at most 2*log2(n). A branch begins at a multiple of a
// power of two and has that many terms, or those up to the last one of all.
//
//	terms 3 to 5 of 8: 1, 2    terms 4 to 6 of 7: 3
func Branches(to []int, first, n, all int) []int {
	for end := first + n; first < end; {
		size := 1
		for first%(2*size) == 0 && first+size < end && min(first+2*size, all) <= end {
			size *= 2
		}
		size = min(size, end-first)
		to, first = append(to, size), first+size
	}
	return to
}

// Carry says how to add term number at of a branch of size terms. The terms come in order, and are
// added up like the digits of a binary counter: add the sums of levels add to the term, one after
// the other, and keep the result as the sum of level to. A sum of level k has 2^k terms. At the end
// the sum of the largest level, [TopLevel], is the branch itself.
func Carry(at, size int) (add []int, to int) {
	levels := uint(at)
	if to = TopLevel(size); at < size-1 {
		to = bits.TrailingZeros(^uint(at))
		levels = 1<<to - 1
	}
	for ; levels > 0; levels &= levels - 1 {
		add = append(add, bits.TrailingZeros(levels))
	}
	return add, to
}

// TopLevel returns the largest level of the sums of a branch: -1 for a single term, which is not
// added to anything.
func TopLevel(size int) int { return bits.Len(uint(size-1)) - 1 }
