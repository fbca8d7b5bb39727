package simd

import (
	bytesof "encoding/binary"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/euryale-ml/euryale/backend"
)

var dtypes = []backend.DType{backend.F16, backend.BF16, backend.F32, backend.F64, backend.I32,
	backend.I64, backend.U8}

// operand is n elements at an odd place, with guards around them.
type operand struct {
	all  []byte
	at   backend.Buffer
	from int
}

const guardByte = 0xa7

// operandOf puts elements offset bytes behind a guard: vectors need no alignment.
func operandOf(d backend.DType, elements []byte, offset int) operand {
	const guard = 64
	all := slices.Concat(slices.Repeat([]byte{guardByte}, guard+offset), elements,
		slices.Repeat([]byte{guardByte}, guard))
	from := guard + offset
	return operand{all, backend.Of(all[from : from+len(elements)]).As(d), from}
}

func (o operand) elements() []byte { return o.all[o.from : o.from+o.at.NBytes()] }

// intact says whether nothing was written around the elements.
func (o operand) intact() bool {
	around := slices.Concat(o.all[:o.from], o.all[o.from+o.at.NBytes():])
	return !slices.ContainsFunc(around, func(b byte) bool { return b != guardByte })
}

// value returns element i as a float64, and its bits.
func value(d backend.DType, elements []byte, i int) (float64, uint64) {
	switch e := elements[i*d.Size():]; d {
	case backend.F16:
		bits := bytesof.NativeEndian.Uint16(e)
		return float64(WidenF16(bits)), uint64(bits)
	case backend.BF16:
		bits := bytesof.NativeEndian.Uint16(e)
		return float64(math.Float32frombits(uint32(bits) << 16)), uint64(bits)
	case backend.F32:
		bits := bytesof.NativeEndian.Uint32(e)
		return float64(math.Float32frombits(bits)), uint64(bits)
	case backend.F64:
		bits := bytesof.NativeEndian.Uint64(e)
		return math.Float64frombits(bits), bits
	default:
		var wide [8]byte
		copy(wide[:], e[:d.Size()])
		return 0, bytesof.LittleEndian.Uint64(wide[:])
	}
}

// differ returns the first element that differs in its bits; those of NaNs may.
func differ(d backend.DType, got, want []byte) (i int, differs bool) {
	for i := range len(want) / d.Size() {
		x, xBits := value(d, got, i)
		y, yBits := value(d, want, i)
		if xBits != yBits && (x == x || y == y) {
			return i, true
		}
	}
	return 0, false
}

// special are the elements that are treated in their own way somewhere.
func special(d backend.DType) []uint64 {
	return map[backend.DType][]uint64{
		backend.F16: {0, 0x8000, 0x7c00, 0xfc00, 0x7e00, 0x7c01, 0xfe02, 1, 0x8001, 0x3ff, 0x400,
			0x7bff, 0x3c00},
		backend.BF16: {0, 0x8000, 0x7f80, 0xff80, 0x7fc0, 0x7f81, 0xffc2, 1, 0x8001, 0x7f, 0x80,
			0x7f7f, 0x3f80},
		backend.F32: {0, 1 << 31, 0x7f800000, 0xff800000, 0x7fc00000, 0x7f800001, 0xffc00002, 1,
			0x80000001, 0x7fffff, 0x800000, 0x7f7fffff, 0x3f800000, 0x3f808000, 0x7f7f8000},
		backend.F64: {0, 1 << 63, 0x7ff << 52, 0xfff << 52, 0x7ff8 << 48, 0x7ff0<<48 + 1,
			0xfff8<<48 + 2, 1, 1<<63 + 1, 1 << 52, 0x7fef_ffff_ffff_ffff},
	}[d]
}

// random returns n elements of random bits, a fourth of them special, and the others of floats
// mostly of a moderate size.
func random(r *rand.Rand, d backend.DType, n int) []byte {
	xs := make([]byte, n*d.Size())
	values := special(d)
	for i := range n {
		var wide [8]byte
		bits := r.Uint64()
		if values != nil && r.IntN(4) == 0 {
			bits = values[r.IntN(len(values))]
		} else if d.Float() && r.IntN(4) > 0 {
			bits = moderate(d, r.NormFloat64())
		}
		bytesof.LittleEndian.PutUint64(wide[:], bits)
		copy(xs[i*d.Size():], wide[:d.Size()])
	}
	return xs
}

func moderate(d backend.DType, x float64) uint64 {
	switch d {
	case backend.F16:
		return uint64(NarrowF16(float32(x)))
	case backend.BF16:
		return uint64(NarrowBF16(float32(x)))
	case backend.F32:
		return uint64(math.Float32bits(float32(x)))
	}
	return math.Float64bits(x)
}

// reduced returns what a level makes of sources, and fails if it writes around the destination.
// The destination is a source if alias is one's number.
func reduced(t *testing.T, l Level, op backend.ReduceOp, d backend.DType, sources [][]byte, offset,
	alias int) []byte {
	t.Helper()
	srcs := make([]backend.Buffer, len(sources))
	dst := operandOf(d, make([]byte, len(sources[0])), offset)
	for s, elements := range sources {
		o := operandOf(d, elements, (offset+s*d.Size())%17)
		if s == alias {
			dst = o
		}
		srcs[s] = o.at
	}
	Reduce(l, op, dst.at, srcs)
	if !dst.intact() {
		t.Errorf("%v: %v of %d sources of %d %v: wrote around the destination", l, op, len(sources),
			dst.at.Len(), d)
	}
	return dst.elements()
}

// checkReduce compares all levels: with the loop in Go but for the bits of NaNs, and among each
// other.
func checkReduce(t *testing.T, op backend.ReduceOp, d backend.DType, sources [][]byte, offset,
	alias int) {
	t.Helper()
	want := reduced(t, Go, op, d, sources, offset, alias)
	var vector []byte
	for _, l := range Levels()[1:] {
		got := reduced(t, l, op, d, sources, offset, alias)
		if i, differs := differ(d, got, want); differs {
			_, g := value(d, got, i)
			_, w := value(d, want, i)
			t.Fatalf("%v: %v of %d sources of %v, offset %d, alias %d: element %d of %d is %#x, "+
				"in Go %#x", l, op, len(sources), d, offset, alias, i, len(want)/d.Size(), g, w)
		}
		if vector == nil {
			vector = got
		}
		if !slices.Equal(got, vector) {
			t.Fatalf("%v: %v of %d sources of %v, offset %d: other bits of NaNs than %v", l, op,
				len(sources), d, offset, Levels()[1])
		}
	}
}

func TestReduceGivesTheSameBitsAtEachLevel(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	for _, d := range dtypes {
		// What is left behind vectors, one vector, several, and more than a block of the loop in
		// Go.
		lengths := []int{0, 1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 33, 63, 64, 65, 127, 129, 255, 257,
			300, block + 77}
		for _, op := range backend.ReduceOps() {
			for _, sources := range []int{1, 2, 3, 4, 8, 9, 65} {
				for _, n := range lengths {
					xs := make([][]byte, sources)
					for s := range xs {
						xs[s] = random(r, d, n)
					}
					checkReduce(t, op, d, xs, r.IntN(17), r.IntN(sources+1)-1)
				}
			}
		}
	}
}

func FuzzReduce(f *testing.F) {
	f.Add(uint8(0), uint8(2), uint8(2), uint8(1),
		[]byte("0123456789abcdef0123456789abcdef0123456789abcdef"))
	f.Fuzz(func(t *testing.T, op, dtype, sources, offset uint8, data []byte) {
		ops := backend.ReduceOps()
		d, n := dtypes[int(dtype)%len(dtypes)], 1+int(sources)%9
		each := len(data) / n / d.Size() * d.Size()
		xs := make([][]byte, n)
		for s := range xs {
			xs[s] = data[s*each : (s+1)*each]
		}
		checkReduce(t, ops[int(op)%len(ops)], d, xs, int(offset)%64, int(offset)%(n+1)-1)
	})
}

// Of two NaNs a sum keeps the first one, in vectors and in what is left.
func TestSumKeepsTheFirstNaN(t *testing.T) {
	for _, l := range Levels()[1:] {
		const n = 77
		x, y, dst := make([]float32, n), make([]float32, n), make([]float32, n)
		for i := range x {
			x[i], y[i] = math.Float32frombits(0x7fc00001), math.Float32frombits(0x7fc00002)
		}
		Reduce(l, backend.Sum, backend.Of(dst), []backend.Buffer{backend.Of(x), backend.Of(y)})
		for i, s := range dst {
			if math.Float32bits(s) != 0x7fc00001 {
				t.Fatalf("%v: element %d of %d is %#x", l, i, n, math.Float32bits(s))
			}
		}
	}
}

// checkHalf compares the casts of all levels, of all bits, and with guards.
func checkHalf[H half](t *testing.T) {
	d := backend.DTypeOf[H]()
	all := make([]H, 1<<16)
	for i := range all {
		all[i] = H(i)
	}
	for _, l := range Levels() {
		wide, again := make([]float32, len(all)), make([]H, len(all))
		Widen(l, wide, all)
		Narrow(l, again, wide)
		if i, differs := differ(d, backend.Of(again).Bytes(), backend.Of(all).Bytes()); differs {
			t.Fatalf("%v: %v %#x widened and narrowed is %#x", l, d, all[i], again[i])
		}
		want := make([]float32, len(all))
		Widen(Go, want, all)
		if i, differs := differ(backend.F32, backend.Of(wide).Bytes(),
			backend.Of(want).Bytes()); differs {
			t.Fatalf("%v: %v %#x widened is %v, in Go %v", l, d, all[i], wide[i], want[i])
		}
	}
	r := rand.New(rand.NewPCG(3, 4))
	for range 300 {
		n := r.IntN(300)
		src := operandOf(backend.F32, random(r, backend.F32, n), r.IntN(17))
		var want []byte
		for _, l := range Levels() {
			dst := operandOf(d, make([]byte, n*d.Size()), r.IntN(17))
			Narrow(l, backend.View[H](dst.at), backend.View[float32](src.at))
			if !dst.intact() {
				t.Fatalf("%v: narrowing %d elements to %v wrote around them", l, n, d)
			}
			if l == Go {
				want = dst.elements()
			}
			if !slices.Equal(dst.elements(), want) { // bits of NaNs, too
				t.Fatalf("%v: narrowing %d elements to %v: %x, in Go %x", l, n, d, dst.elements(),
					want)
			}
			back := operandOf(backend.F32, make([]byte, n*4), r.IntN(17))
			Widen(l, backend.View[float32](back.at), backend.View[H](dst.at))
			if !back.intact() {
				t.Fatalf("%v: widening %d elements of %v wrote around them", l, n, d)
			}
		}
	}
}

func TestHalvesAtEachLevel(t *testing.T) {
	t.Run("f16", checkHalf[backend.Float16])
	t.Run("bf16", checkHalf[backend.BFloat16])
}

// Around each midpoint between two 16-bit floats, where rounding decides.
func TestNarrowRoundsAlikeAtEachLevel(t *testing.T) {
	var around []float32
	for i := range 1 << 16 {
		for _, bits := range []uint32{uint32(i)<<16 | 0x8000,
			math.Float32bits(WidenF16(uint16(i))) | 0x1000} {
			around = append(around, math.Float32frombits(bits-1), math.Float32frombits(bits),
				math.Float32frombits(bits+1))
		}
	}
	for _, l := range Levels()[1:] {
		f16, bf16 := make([]backend.Float16, len(around)), make([]backend.BFloat16, len(around))
		Narrow(l, f16, around)
		Narrow(l, bf16, around)
		for i, x := range around {
			if uint16(f16[i]) != NarrowF16(x) || uint16(bf16[i]) != NarrowBF16(x) {
				t.Fatalf("%v: %v (%#x) is %#x and %#x, in Go %#x and %#x", l, x,
					math.Float32bits(x), f16[i], bf16[i], NarrowF16(x), NarrowBF16(x))
			}
		}
	}
}

func TestScaleAtEachLevel(t *testing.T) {
	r := rand.New(rand.NewPCG(5, 6))
	for n := range 200 {
		offset := r.IntN(17)
		single, double := random(r, backend.F32, n), random(r, backend.F64, n)
		for _, l := range Levels()[1:] {
			for _, alias := range []bool{false, true} {
				checkScale(t, l, backend.F32, single, offset, alias, float32(0.3))
				checkScale(t, l, backend.F64, double, offset, alias, 0.3)
			}
		}
	}
}

func checkScale[T float32 | float64](t *testing.T, l Level, d backend.DType, elements []byte,
	offset int, alias bool, factor T) {
	want := operandOf(d, elements, offset)
	Scale(Go, backend.View[T](want.at), backend.View[T](want.at), factor)
	src := operandOf(d, elements, offset)
	dst := src
	if !alias {
		dst = operandOf(d, make([]byte, len(elements)), offset/2)
	}
	Scale(l, backend.View[T](dst.at), backend.View[T](src.at), factor)
	if i, differs := differ(d, dst.elements(), want.elements()); differs || !dst.intact() {
		t.Fatalf("%v: scaling %d %v: element %d, or around them", l, dst.at.Len(), d, i)
	}
}

func BenchmarkReduce(b *testing.B) {
	for _, d := range dtypes {
		for _, sources := range []int{2, 4, 8} {
			for _, l := range Levels() {
				b.Run(fmt.Sprintf("%v/%d/%v", d, sources, l), func(b *testing.B) {
					const nbytes = 64 << 10
					srcs := make([]backend.Buffer, sources)
					for i := range srcs {
						srcs[i] = backend.Of(make([]byte, nbytes)).As(d)
					}
					b.SetBytes(nbytes)
					for b.Loop() {
						Reduce(l, backend.Sum, srcs[0], srcs)
					}
				})
			}
		}
	}
}
