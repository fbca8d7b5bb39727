package simd

import (
	"unsafe"

	"github.com/euryale-ml/euryale/backend"
)

// Float is an element of a product.
type Float interface{ float32 | float64 }

// Product is a product of matrices whose operands fit into a cache, C = Alpha*A*B + Beta*C, where C
// is only written if Beta is 0. Distances are in elements.
type Product[T Float] struct {
	M, N, K     int // A is M x K, B is K x N, C is M x N
	A, C        []T
	B           backend.Buffer // of T; of 16 bits, too, for few rows without panels
	ARow, AStep int            // from a row of A to the next one, and from a column to the next one
	BStep       int            // from a row of B to the next one; what is in a row is contiguous
	// from a panel of PanelWidth columns of B to the next one; 0 where rows are whole
	BPanel      int
	CPitch      int // from a row of C to the next one; what is in a row is contiguous
	Alpha, Beta T
}

// FewRows is how many rows of A are few: B need not be packed for them.
const FewRows = 4

// PanelWidth returns how many columns a panel of a packed B has.
func PanelWidth[T Float](l Level) int { return packedVectors * lanes[T](l) }

// packedVectors is how many vectors a row of a panel has, as in gen/gemm.
const packedVectors = 2

// lanes returns how many elements a vector has.
func lanes[T Float](l Level) int {
	size := int(unsafe.Sizeof(*new(T)))
	if l == AVX512 {
		return 64 / size
	}
	return 32 / size
}

// TileRows returns how many rows the tallest tile has.
func TileRows(l Level) int { return heights(l)[0] }

// heights returns those of the tiles, the tallest first.
func heights(l Level) []int {
	if l == AVX512 {
		return []int{12, 8, 4, 3, 2, 1}
	}
	return []int{6, 4, 3, 2, 1}
}

// wideVectors returns how many vectors the widest tile has, for a B that is not packed.
func wideVectors(l Level, rows int) int {
	switch {
	case l == AVX512 && rows <= 2:
		return 8
	case l == AVX512 && rows <= 4, l == AVX2 && rows == 1:
		return 6
	}
	return packedVectors
}

// Multiply computes a product. A tile of rows of A stays in the first-level cache while it is
// multiplied by all of B.
func Multiply[T Float](l Level, p *Product[T]) {
	row := 0
	for _, height := range heights(l) {
		for ; p.M-row >= height; row += height {
			p.multiplyRows(l, row, height)
		}
	}
}

// multiplyRows computes rows of C. A tile has a whole number of panels' columns unless it is the
// last one.
func (p *Product[T]) multiplyRows(l Level, row, height int) {
	width, vector := PanelWidth[T](l), lanes[T](l)
	wide := wideVectors(l, height) * vector
	t := tile[T]{rows: height, k: p.K, aRow: p.ARow, aStep: p.AStep, bStep: p.BStep,
		cPitch: p.CPitch, alpha: p.Alpha, beta: p.Beta}
	if p.K > 0 {
		t.a = &p.A[row*p.ARow]
	}
	for j := 0; j < p.N; j += t.columns {
		b := j
		if t.columns = min(width, p.N-j); p.BPanel > 0 {
			b = j / width * p.BPanel
		} else if p.N-j >= wide {
			t.columns = wide
		}
		if p.K > 0 {
			t.b = p.B.Slice(b, p.B.Len())
		}
		if t.halves() && t.columns > vector {
			t.columns -= t.columns % vector
		}
		t.c = &p.C[row*p.CPitch+j]
		t.multiply(l)
	}
}

// tile is a product of a few rows and columns.
type tile[T Float] struct {
	a, c             *T
	b                backend.Buffer // if it has 16 bits, columns are whole vectors or less than one
	aRow, aStep      int            // elements
	bStep, cPitch    int
	rows, columns, k int
	alpha, beta      T
}

// halves reports whether b has 16 bits.
func (t *tile[T]) halves() bool { return t.k > 0 && t.b.DType().Size() == 2 }

// multiply computes a tile.
func (t *tile[T]) multiply(l Level) {
	size := int(unsafe.Sizeof(*t.c))
	switch halves := t.halves(); {
	case l == Go || halves && t.columns < lanes[T](l):
		t.multiplyGo()
	case halves:
		widenedVectors(l, t.b.DType(), (*float32)(unsafe.Pointer(t.a)), address(t.b),
			(*float32)(unsafe.Pointer(t.c)), t.aRow*size, t.aStep*size, t.bStep*2, t.cPitch*size,
			t.k, t.rows, t.columns, float32(t.alpha), float32(t.beta))
	default:
		tileVectors(l, t.a, (*T)(t.b.Pointer()), t.c, t.aRow*size, t.aStep*size, t.bStep*size,
			t.cPitch*size, t.k, t.rows, t.columns, t.alpha, t.beta)
	}
}

// multiplyGo is the loop that defines a tile, which has at most as many columns as a panel.
func (t *tile[T]) multiplyGo() {
	b, halves := (*T)(t.b.Pointer()), t.halves()
	for i := range t.rows {
		var row, wide [packedVectors * vectorBytes / 4]T
		sums, rights := row[:t.columns], wide[:t.columns]
		for k := range t.k {
			left := *at(t.a, i*t.aRow+k*t.aStep)
			if halves {
				load(rights, t.b, k*t.bStep)
			} else {
				rights = unsafe.Slice(at(b, k*t.bStep), t.columns)
			}
			for j, right := range rights {
				sums[j] += left * right
			}
		}
		for j, c := range unsafe.Slice(at(t.c, i*t.cPitch), t.columns) {
			if sums[j] *= t.alpha; t.beta != 0 {
				sums[j] += t.beta * c
			}
		}
		copy(unsafe.Slice(at(t.c, i*t.cPitch), t.columns), sums)
	}
}

// at returns the element that is i from p.
func at[T Float](p *T, i int) *T {
	return (*T)(unsafe.Add(unsafe.Pointer(p), i*int(unsafe.Sizeof(*p))))
}
