package backend

import "math/bits"

// Branches appends, for each operand that rank r passes to an AllReduce in a [Tree] with Splits,
// how many terms it is the sum of.
func (c Collective) Branches(to []int, r int) []int {
	return Branches(to, sum(c.Splits[:r]), c.Splits[r], sum(c.Splits))
}

// Branches appends the sizes of the largest branches that the terms from first on, n of all, make
// up in the [Tree] of all: there are at most 2*log2(n). A branch begins at a multiple of a power of
// two and has so many terms, or those up to the last one of all.
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

// Carry says how term number at of a branch of size terms, which come in order, is added up, as the
// digits of a binary counter are: the sums of levels add are added to it, one after the other, and
// the result is kept as the sum of level to. A sum of level k has 2^k terms. The largest level, of
// [TopLevel], is the branch itself in the end.
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

// TopLevel returns the largest level of the sums of a branch: -1 for one term, which is added to
// nothing.
func TopLevel(size int) int { return bits.Len(uint(size-1)) - 1 }
