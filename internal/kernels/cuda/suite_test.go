package cuda

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"testing"
	"unsafe"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/kernels"
)

// machine is what the suite runs on: an arena of device memory and a launcher.
type machine interface {
	Launcher
	// Arena returns the address of device memory and its size.
	Arena() (addr uintptr, nbytes int)
	// Write and Read copy all of it, after everything launched so far.
	Write(data []byte) error
	Read(data []byte) error
}

// bench runs a kernel on the device and on a copy of its memory on the host, and
// compares all of it: what a kernel may not write as well.
type bench struct {
	t        *testing.T
	m        machine
	device   Kernels
	host     kernels.Host
	shadow   []byte // of the arena
	rnd      *rand.Rand
	used     int
	expected []operand // what is compared as floats
	zeroed   bool      // workspace has tickets
}

// operand is a buffer of both memories.
type operand struct{ host, device backend.Buffer }

func newBench(t *testing.T, m machine, seed uint64) *bench {
	_, n := m.Arena()
	b := &bench{t: t, m: m, device: New(m), shadow: make([]byte, n)}
	b.reset(seed)
	return b
}

// reset frees all operands and fills the memory that a case may use.
func (b *bench) reset(seed uint64) {
	b.rnd = rand.New(rand.NewPCG(seed, 7))
	b.used, b.expected = 0, nil
}

// guard is the distance between operands.
const guard = 64

// alloc returns n elements of random bits, `offset` elements after a multiple of
// 16 bytes.
func (b *bench) alloc(d backend.DType, n, offset int) operand {
	b.t.Helper()
	at := (b.used+15)/16*16 + guard + offset*d.Size()
	b.used = at + n*d.Size() + guard
	if b.used > len(b.shadow) {
		b.t.Fatalf("the arena is too small for %d more %v", n, d)
	}
	addr, _ := b.m.Arena()
	o := operand{
		host:   backend.Host(d, unsafe.Pointer(unsafe.SliceData(b.shadow[at:])), n),
		device: backend.OnDevice(d, addr+uintptr(at), n),
	}
	b.randomise(o.host)
	return o
}

// randomise fills half of a buffer with any bits, and half with numbers that
// arithmetic rounds.
func (b *bench) randomise(buf backend.Buffer) {
	data := buf.Bytes()
	for i := 0; i+8 <= len(data); i += 8 {
		binary.LittleEndian.PutUint64(data[i:], b.rnd.Uint64())
	}
	for i := range buf.Len() {
		if b.rnd.IntN(2) == 0 {
			continue
		}
		x := (b.rnd.Float64() - 0.5) * 200
		switch buf.DType() {
		case backend.F32:
			backend.View[float32](buf)[i] = float32(x)
		case backend.F64:
			backend.View[float64](buf)[i] = x
		case backend.BF16:
			backend.View[uint16h](buf)[i] = uint16h(math.Float32bits(float32(x)) >> 16)
		case backend.I32:
			backend.View[int32](buf)[i] = int32(x)
		case backend.I64:
			backend.View[int64](buf)[i] = int64(x)
		}
	}
}

// spread puts numbers in the place of most elements of a buffer.
func (b *bench) spread(buf backend.Buffer, numbers ...float64) {
	for i := range buf.Len() {
		if b.rnd.IntN(4) == 0 {
			continue
		}
		if x := numbers[b.rnd.IntN(len(numbers))]; buf.DType() == backend.F32 {
			backend.View[float32](buf)[i] = float32(x)
		} else {
			backend.View[float64](buf)[i] = x
		}
	}
}

type uint16h = backend.BFloat16

func (o operand) slice(lo, hi int) operand {
	return operand{o.host.Slice(lo, hi), o.device.Slice(lo, hi)}
}

// run does something on both sides and compares the memory. NaNs of dst are
// alike, whatever their payload.
func (b *bench) run(name string, dst operand, onDevice, onHost func() error) {
	b.t.Helper()
	if err := b.m.Write(b.shadow[:b.used]); err != nil {
		b.t.Fatal(err)
	}
	if err := errors.Join(onDevice(), onHost()); err != nil {
		b.t.Fatalf("%s: %v", name, err)
	}
	got := make([]byte, b.used)
	if err := b.m.Read(got); err != nil {
		b.t.Fatalf("%s: %v", name, err)
	}
	if bytes.Equal(got, b.shadow[:b.used]) {
		return
	}
	at := 0
	if dst.host.Len() > 0 {
		at = int(uintptr(dst.host.Addr()) - uintptr(unsafe.Pointer(unsafe.SliceData(b.shadow))))
	}
	end := at + dst.host.NBytes()
	if !bytes.Equal(got[:at], b.shadow[:at]) || !bytes.Equal(got[end:], b.shadow[end:b.used]) {
		b.t.Fatalf("%s: wrote outside the destination", name)
	}
	result := backend.Of(got[at:end]).As(dst.host.DType())
	for i := range dst.host.Len() {
		g, w := result.Slice(i, i+1), dst.host.Slice(i, i+1)
		if !bytes.Equal(g.Bytes(), w.Bytes()) && !(isNaN(g) && isNaN(w)) {
			b.t.Fatalf("%s: element %d of %d is %x, want %x", name, i, dst.host.Len(), g.Bytes(),
				w.Bytes())
		}
	}
}

// isNaN reports whether the only element of a buffer is NaN.
func isNaN(b backend.Buffer) bool {
	bits := func(exponent uint64) bool {
		var word [8]byte
		copy(word[:], b.Bytes())
		x := binary.LittleEndian.Uint64(word[:]) << (64 - 8*b.DType().Size()) << 1 >> 1
		return x > exponent<<(64-8*b.DType().Size())
	}
	switch b.DType() {
	case backend.F16:
		return bits(0x7c00)
	case backend.BF16:
		return bits(0x7f80)
	case backend.F32:
		return bits(0x7f800000)
	case backend.F64:
		return bits(0x7ff0000000000000)
	}
	return false
}

// large is more than a grid does at once.
const large = 1e6 + 1

// lengths hold the boundaries of vectors, warps and blocks.
func (b *bench) lengths() []int {
	ns := []int{0, 1, 3, 8, 31, 32, 33, 1023, 1025, 4099}
	if _, slow := b.m.(*emulator); !slow || os.Getenv("EURYALE_FULL") != "" {
		ns = append(ns, large)
	}
	return ns
}

// suite runs every kernel on m.
func suite(t *testing.T, m machine) {
	t.Run("zero", func(t *testing.T) { testZero(t, m) })
	t.Run("copy", func(t *testing.T) { testCopy(t, m) })
	t.Run("copy2d", func(t *testing.T) { testCopy2D(t, m) })
	t.Run("cast", func(t *testing.T) { testCast(t, m) })
	t.Run("divide", func(t *testing.T) { testDivide(t, m) })
	t.Run("reduce", func(t *testing.T) { testReduce(t, m) })
	t.Run("gather", func(t *testing.T) { testGather(t, m) })
	t.Run("images", func(t *testing.T) { testImages(t, m) })
	t.Run("rows", func(t *testing.T) { testRows(t, m) })
	t.Run("convolutions", func(t *testing.T) { testConvolutions(t, m) })
	t.Run("convolution tiles", func(t *testing.T) { testConvolutionTiles(t, m) })
	t.Run("gemm", func(t *testing.T) { testGemm(t, m) })
	t.Run("few rows", func(t *testing.T) { testFewRows(t, m) })
	t.Run("attention", func(t *testing.T) { testAttention(t, m) })
	t.Run("widen", func(t *testing.T) { testWiden(t, m) })
	t.Run("select", func(t *testing.T) { testSelect(t, m) })
	t.Run("combine", func(t *testing.T) { testCombine(t, m) })
	t.Run("notfinite", func(t *testing.T) { testNotFinite(t, m) })
}

func testZero(t *testing.T, m machine) {
	b := newBench(t, m, 1)
	for _, d := range backend.DTypes() {
		for _, n := range b.lengths() {
			for offset := range 3 {
				b.reset(uint64(n))
				dst := b.alloc(d, n, offset)
				name := fmt.Sprintf("zero of %d %v + %d", n, d, offset)
				b.run(name, dst, func() error { return b.device.Zero(dst.device) }, func() error {
					return b.host.Zero(dst.host)
				})
			}
		}
	}
	b.reset(0)
	dst := b.alloc(backend.I64, 1000, 1)
	b.run("fill", dst, func() error { return b.device.Fill(dst.device, 1<<64-5) }, func() error {
		x := backend.View[int64](dst.host)
		for i := range x {
			x[i] = -5
		}
		return nil
	})
}

func testCopy(t *testing.T, m machine) {
	b := newBench(t, m, 2)
	for _, d := range backend.DTypes() {
		for _, n := range b.lengths() {
			for _, offset := range [][2]int{{0, 0}, {1, 1}, {0, 1}, {3, 1}, {2, 4}} {
				b.reset(uint64(n))
				dst, src := b.alloc(d, n, offset[0]), b.alloc(d, n, offset[1])
				name := fmt.Sprintf("copy of %d %v + %v", n, d, offset)
				b.run(name, dst, func() error { return b.device.Copy(dst.device, src.device) },
					func() error { return b.host.Copy(dst.host, src.host) })
			}
		}
	}
	for to := range 3 {
		for from := range 17 {
			for _, n := range []int{1, 15, 16, 17, 47, 5001} {
				b.reset(uint64(n))
				dst, src := b.alloc(backend.U8, n, to), b.alloc(backend.U8, n, from)
				name := fmt.Sprintf("copy of %d bytes from %d to %d", n, from, to)
				b.run(name, dst, func() error { return b.device.Copy(dst.device, src.device) },
					func() error { return b.host.Copy(dst.host, src.host) })
			}
		}
	}
	for _, apart := range []int{0, 1, 2, 100, 16384, 20000} {
		b.reset(uint64(apart))
		all := b.alloc(backend.U8, 70000, 0)
		lo, hi := all.slice(0, 70000-apart), all.slice(apart, 70000)
		b.run(fmt.Sprint("copy down by ", apart), lo, func() error {
			return b.device.Copy(lo.device, hi.device)
		}, func() error { return b.host.Copy(lo.host, hi.host) })
		b.run(fmt.Sprint("copy up by ", apart), hi, func() error {
			return b.device.Copy(hi.device, lo.device)
		}, func() error { return b.host.Copy(hi.host, lo.host) })
	}
}

func testCopy2D(t *testing.T, m machine) {
	b := newBench(t, m, 3)
	for _, d := range backend.DTypes() {
		for _, rows := range []int{0, 1, 7, 300} {
			for _, width := range []int{0, 1, 4, 5, 16, 300} {
				for _, more := range [][2]int{{0, 0}, {1, 0}, {0, 3}, {16, 32}} {
					b.reset(uint64(rows + width))
					dstPitch, srcPitch := width+more[0], width+more[1]
					dst, src := b.alloc(d, rows*dstPitch, more[0]%4),
						b.alloc(d, rows*srcPitch, more[1]%4)
					name := fmt.Sprintf("copy2d of %d x %d %v, pitches %d, %d", rows, width, d,
						dstPitch, srcPitch)
					b.run(name, dst, func() error {
						return b.device.Copy2D(dst.device, dstPitch, src.device, srcPitch, width,
							rows)
					}, func() error {
						return b.host.Copy2D(dst.host, dstPitch, src.host, srcPitch, width, rows)
					})
				}
			}
		}
	}
}

func testCast(t *testing.T, m machine) {
	floats := []backend.DType{backend.F16, backend.BF16, backend.F32, backend.F64}
	b := newBench(t, m, 4)
	for _, from := range floats {
		for _, to := range floats {
			for _, n := range append(b.lengths(), 1<<16) {
				for offset := range 2 {
					b.reset(uint64(n))
					dst, src := b.alloc(to, n, offset), b.alloc(from, n, offset)
					if n == 1<<16 {
						everyHalf(src.host)
					}
					name := fmt.Sprintf("cast of %d %v to %v + %d", n, from, to, offset)
					b.run(name, dst, func() error { return b.device.Cast(dst.device, src.device) },
						func() error { return b.host.Cast(dst.host, src.host) })
				}
			}
		}
	}
}

// everyHalf fills a buffer of floats with what is, or lies between, 16-bit
// floats: the bits that decide a rounding.
func everyHalf(b backend.Buffer) {
	for i := range b.Len() {
		half := uint32(i)
		tie := math.Float32frombits(half<<16 | 0x8000 + half&1)
		switch b.DType() {
		case backend.F16, backend.BF16:
			backend.View[backend.BFloat16](b.As(backend.BF16))[i] = backend.BFloat16(half)
		case backend.F32:
			backend.View[float32](b)[i] = tie
		case backend.F64:
			backend.View[float64](b)[i] = math.Nextafter(float64(tie), float64(half&2)-1)
		}
	}
}

func testDivide(t *testing.T, m machine) {
	b := newBench(t, m, 5)
	for _, d := range backend.DTypes() {
		for _, n := range b.lengths() {
			for _, by := range []int{1, 3, 256} {
				for offset := range 2 {
					b.reset(uint64(n))
					dst, src := b.alloc(d, n, 0), b.alloc(d, n, offset)
					name := fmt.Sprintf("%d %v + %d over %d", n, d, offset, by)
					b.run(name, dst, func() error {
						return b.device.Divide(dst.device, src.device, by)
					}, func() error { return b.host.Divide(dst.host, src.host, by) })
					b.run(name+" in place", src, func() error {
						return b.device.Divide(src.device, src.device, by)
					}, func() error { return b.host.Divide(src.host, src.host, by) })
				}
			}
		}
	}
}

func testReduce(t *testing.T, m machine) {
	b := newBench(t, m, 6)
	for _, d := range backend.DTypes() {
		for _, op := range backend.ReduceOps() {
			for _, sources := range []int{1, 2, 3, 4, 5, 8, 9, 256} {
				for _, n := range b.lengths() {
					if sources > 8 && n > 1025 || sources == 256 && n > 33 || n == large &&
						sources != 4 {
						continue
					}
					for _, offset := range []int{0, 1} {
						b.reset(uint64(n + sources))
						b.reduce(op, d, sources, n, offset)
					}
				}
			}
		}
	}
}

func (b *bench) reduce(op backend.ReduceOp, d backend.DType, sources, n, offset int) {
	b.t.Helper()
	dst := b.alloc(d, n, 0)
	var onDevice, onHost []backend.Buffer
	for s := range sources {
		src := b.alloc(d, n, offset*(s%2))
		onDevice, onHost = append(onDevice, src.device), append(onHost, src.host)
	}
	name := fmt.Sprintf("%v of %d x %d %v + %d", op, sources, n, d, offset)
	b.run(name, dst, func() error { return b.device.Reduce(op, dst.device, onDevice...) },
		func() error { return b.host.Reduce(op, dst.host, onHost...) })
	last := operand{onHost[sources-1], onDevice[sources-1]}
	b.run(name+" in place", last, func() error {
		return b.device.Reduce(op, last.device, onDevice...)
	}, func() error { return b.host.Reduce(op, last.host, onHost...) })
}

func testGather(t *testing.T, m machine) {
	b := newBench(t, m, 7)
	for i, d := range []backend.DType{backend.U8, backend.BF16, backend.F32, backend.F64} {
		for j, c := range []struct{ dims, perm []int }{
			{[]int{}, []int{}},
			{[]int{1, 1}, []int{1, 0}},
			{[]int{0, 3}, []int{1, 0}},
			{[]int{100}, []int{0}},
			{[]int{64, 64}, []int{1, 0}},
			{[]int{33, 65}, []int{1, 0}},
			{[]int{129, 3}, []int{1, 0}},
			{[]int{5, 31, 17}, []int{0, 2, 1}},
			{[]int{5, 31, 17}, []int{2, 1, 0}},
			{[]int{5, 31, 17}, []int{2, 0, 1}},
			{[]int{6, 4, 16}, []int{1, 0, 2}},
			{[]int{6, 4, 5}, []int{1, 0, 2}},
			{[]int{2, 3, 1, 4, 5, 6}, []int{5, 4, 3, 2, 1, 0}},
			{[]int{20, 3, 2, 4, 3, 18}, []int{5, 4, 3, 2, 1, 0}},
			{[]int{3, 20, 2, 4, 3, 18}, []int{5, 2, 0, 4, 3, 1}},
			// Tiles: one, and a little less and more.
			{[]int{16, 16}, []int{1, 0}},
			{[]int{128, 128}, []int{1, 0}},
			{[]int{127, 129}, []int{1, 0}},
			{[]int{112, 144}, []int{1, 0}},
			{[]int{144, 272}, []int{1, 0}},
			{[]int{545, 131}, []int{1, 0}},
			{[]int{147, 1003}, []int{1, 0}},
			{[]int{2, 80, 48}, []int{0, 2, 1}},
			{[]int{2, 3, 32, 48}, []int{1, 3, 0, 2}},
			{[]int{48, 2, 3, 32}, []int{3, 2, 1, 0}},
			// Several bands of them, and a row of less high ones.
			{[]int{2, 19, 1612}, []int{0, 2, 1}},
			{[]int{2, 32, 3328}, []int{0, 2, 1}},
			{[]int{2, 144, 3344}, []int{0, 2, 1}},
			{[]int{3, 16, 17, 8}, []int{0, 2, 1, 3}},
			// Runs of elements that become one.
			{[]int{17, 70, 2}, []int{1, 0, 2}},
			{[]int{65, 18, 4}, []int{1, 0, 2}},
			{[]int{33, 34, 16}, []int{1, 0, 2}},
			{[]int{3, 20, 18, 8}, []int{0, 2, 1, 3}},
			// The elements of a block, and a little less and more.
			{[]int{2, 3, 5, 17}, []int{2, 1, 0, 3}},
			{[]int{2, 256}, []int{1, 0}},
			{[]int{3, 9, 19}, []int{1, 0, 2}},
			// Planes, split and joined: a piece of them, and more.
			{[]int{2, 1024, 3}, []int{0, 2, 1}},
			{[]int{2, 3, 1025}, []int{0, 2, 1}},
			{[]int{2, 4097, 4}, []int{0, 2, 1}},
			{[]int{2, 4, 4064}, []int{0, 2, 1}},
			{[]int{8161, 2}, []int{1, 0}},
			{[]int{2, 8163}, []int{1, 0}},
			{[]int{2, 3, 4099}, []int{0, 2, 1}},
			{[]int{4, 2064}, []int{1, 0}},
			{[]int{3, 7, 1169}, []int{0, 2, 1}},
			{[]int{1031, 15}, []int{1, 0}},
			{[]int{15, 1033}, []int{1, 0}},
			{[]int{2, 3, 2031, 5}, []int{1, 3, 0, 2}},
			{[]int{5, 2, 8, 1025}, []int{1, 0, 3, 2}},
		} {
			n := 1
			for _, x := range c.dims {
				n *= x
			}
			for k, offset := range [][2]int{{0, 0}, {1, 0}, {0, 1}, {2, 4}} {
				if slow(m) && k > 0 && (i+j+k)%3 > 0 {
					continue // one of the offsets that are not 0
				}
				b.reset(1)
				dst, src := b.alloc(d, n, offset[0]), b.alloc(d, n, offset[1])
				name := fmt.Sprintf("permute of %v %v by %v + %v", c.dims, d, c.perm, offset)
				dims, strides := permuted(c.dims, c.perm)
				b.run(name, dst, func() error {
					return b.device.CopyStrided(dst.device, src.device, dims, strides)
				}, func() error { return gatherLoop(dst.host, src.host, dims, strides) })
			}
		}
		for _, c := range []struct{ dims, strides []int }{
			{[]int{7, 300}, []int{0, 1}},        // broadcast rows
			{[]int{300, 7}, []int{1, 0}},        // repeat each element
			{[]int{50, 40}, []int{0, 0}},        // one element
			{[]int{50, 3, 40}, []int{1, 0, 50}}, // transposed and repeated
			{[]int{10, 20}, []int{40, 2}},       // a slice with steps
			{[]int{20, 32}, []int{40, 1}},       // a slice of rows
			{[]int{32, 48}, []int{1, 40}},       // a slice of columns, transposed
			{[]int{24, 48}, []int{1, 64}},       // the same, aligned
			{[]int{3, 32, 48}, []int{0, 1, 32}}, // transposed and repeated, whole
		} {
			b.reset(2)
			last, n := 1, 1
			for i, x := range c.dims {
				last += (x - 1) * c.strides[i]
				n *= x
			}
			dst, src := b.alloc(d, n, 0), b.alloc(d, last, 1)
			name := fmt.Sprintf("gather of %v %v with strides %v", c.dims, d, c.strides)
			b.run(name, dst, func() error {
				return b.device.CopyStrided(dst.device, src.device, c.dims, c.strides)
			}, func() error { return gatherLoop(dst.host, src.host, c.dims, c.strides) })
		}
	}
}

// permute gathers a permutation of the axes of src.
func permute(k Kernels, dst, src backend.Buffer, dims, perm []int) error {
	toDims, toStrides := permuted(dims, perm)
	return k.CopyStrided(dst, src, toDims, toStrides)
}

// permuted returns the shape of a tensor whose axis i is axis perm[i] of one in row-major order,
// and where its elements are there.
func permuted(dims, perm []int) (toDims, toStrides []int) {
	strides := make([]int, len(dims))
	stride := 1
	for i := len(dims) - 1; i >= 0; i-- {
		strides[i] = stride
		stride *= dims[i]
	}
	for _, p := range perm {
		toDims, toStrides = append(toDims, dims[p]), append(toStrides, strides[p])
	}
	return toDims, toStrides
}

// gatherLoop is the meaning of Gather.
func gatherLoop(dst, src backend.Buffer, dims, strides []int) error {
	index := make([]int, len(dims))
	for i := range dst.Len() {
		from := 0
		for a, x := range index {
			from += x * strides[a]
		}
		copy(dst.Slice(i, i+1).Bytes(), src.Slice(from, from+1).Bytes())
		for a := len(dims) - 1; a >= 0; a-- {
			if index[a]++; index[a] < dims[a] {
				break
			}
			index[a] = 0
		}
	}
	return nil
}
