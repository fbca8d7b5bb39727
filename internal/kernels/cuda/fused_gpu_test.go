//go:build gpu

package cuda

import (
	"bytes"
	"errors"
	"math/rand/v2"
	"os"
	"runtime"
	"slices"
	"testing"

	"gorgonia.org/cu"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/testing/fusetest"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/kernels/fuse"
)

// onDevice is a case whose memory is in an arena, apart by at least 16 bytes.
type onDevice struct {
	*fusetest.Case
	memory   []byte // of the arena
	dst, src []backend.Buffer
	scratch  backend.Buffer
}

// place lays out a case, at multiples of 256 bytes or one element behind.
func place(g *gpu, c *fusetest.Case, scratch int, aligned bool) *onDevice {
	d := &onDevice{Case: c}
	at := map[uintptr]int{} // of host memory that is placed
	put := func(b backend.Buffer) backend.Buffer {
		offset, placed := at[b.Addr()]
		if !placed {
			if offset = (len(d.memory) + 16 + 255) / 256 * 256; !aligned {
				offset += b.DType().Size()
			}
			d.memory = append(d.memory, make([]byte, offset+b.NBytes()-len(d.memory))...)
			copy(d.memory[offset:], b.Bytes())
			at[b.Addr()] = offset
		}
		return backend.OnDevice(b.DType(), uintptr(g.addr)+uintptr(offset), b.Len())
	}
	for _, b := range c.Dst {
		d.dst = append(d.dst, put(b))
	}
	for _, b := range c.Src {
		d.src = append(d.src, put(b))
	}
	if scratch > 0 {
		end := (len(d.memory) + 255) / 256 * 256
		d.scratch = backend.OnDevice(backend.U8, uintptr(g.addr)+uintptr(end), scratch)
		d.memory = append(d.memory, make([]byte, end+scratch-len(d.memory))...)
	}
	return d
}

// results returns the outputs in the memory of a run, on the host.
func (d *onDevice) results(g *gpu, memory []byte) (list []backend.Buffer) {
	for _, b := range d.dst {
		offset := int(b.Addr() - uintptr(g.addr))
		own := backend.Of(make([]float64, b.Len())).As(b.DType()).Slice(0, b.Len())
		copy(own.Bytes(), memory[offset:])
		list = append(list, own)
	}
	return list
}

// run runs the case from the same memory, and returns the arena.
func (d *onDevice) run(t *testing.T, g *gpu, loop fuse.Loop) []byte {
	t.Helper()
	after := make([]byte, len(d.memory))
	if err := errors.Join(g.Write(d.memory), loop.Run(d.dst, d.src, d.scratch),
		g.Read(after)); err != nil {
		t.Fatalf("%v\n%v", err, d.Program)
	}
	return after
}

func TestGPUFusedKernelsComputeWhatProgramsSay(t *testing.T) {
	g := openGPU(t, 64<<20)
	checked, n, size := 0.0, 400, 50000
	if os.Getenv("EMULATED_DEVICES") != "" { // which interprets the text
		n, size = 60, 2000
	}
	for seed := range uint64(n) {
		c := fusetest.Random(rand.New(rand.NewPCG(seed, 11)), size)
		loop, err := g.Launcher.(*Stream).Fuse(c.Program)
		if err != nil {
			t.Fatalf("%v\n%v", err, c.Program)
		}
		d := place(g, c, loop.Scratch(), seed%4 > 0)
		after := d.run(t, g, loop)
		part := require.Value(c.Check(d.results(g, after)))(t)
		checked += part
		again := d.run(t, g, loop)
		if n := len(d.memory) - d.scratch.NBytes(); !bytes.Equal(after[:n], again[:n]) {
			t.Fatalf("another run gives other bits, of\n%v", c.Program)
		}
	}
	require.Check(t, !(checked < 0.9*float64(n)), "the results of %v cases of %d were compared",
		checked, n)
}

// Wherever InPlace lets outputs be the memory of inputs, a program computes what it computes with
// memory for each, to the bit.
func TestGPUOutputsInPlaceAreTheSame(t *testing.T) {
	g := openGPU(t, 64<<20)
	n, size := 2000, 50000
	if os.Getenv("EMULATED_DEVICES") != "" { // which interprets the text
		n, size = 60, 500
	}
	var cases []*fusetest.Case
	for seed := range uint64(n) {
		cases = append(cases, fusetest.Random(rand.New(rand.NewPCG(seed, 12)), size))
	}
	for seed, p := range []*fuse.Program{fusetest.FoldBeside(50, 40), fusetest.FoldBeside(7, 300),
		fusetest.UnreadFold(7, 200), fusetest.LayerNormGrads(backend.F32, 7, 200)} {
		cases = append(cases, fusetest.New(rand.New(rand.NewPCG(uint64(seed), 13)), p))
	}
	for i, c := range cases {
		loop, err := g.Launcher.(*Stream).Fuse(c.Program)
		if err != nil {
			t.Fatalf("%v\n%v", err, c.Program)
		}
		var want []backend.Buffer
		for k, placed := range c.Placements() {
			d := place(g, placed, loop.Scratch(), i%4 > 0)
			got := d.results(g, d.run(t, g, loop))
			if k == 0 {
				want = got
			}
			if err := c.Equal(want, got); err != nil {
				t.Fatalf("case %d, placement %d: %v", i, k, err)
			}
		}
	}
}

// Programs that fold to a number each, of one block and of several, run at once. Numbers are whole,
// so that every order gives the same sum.
func TestGPUFoldsAtOnce(t *testing.T) {
	g := openGPU(t, 64<<20)
	lengths := []int{1, 6, 8192, 20003, 3_000_001}
	if os.Getenv("EMULATED_DEVICES") != "" { // which interprets the text
		lengths = []int{1, 6, 20003}
	}
	c := &fusetest.Case{}
	var all []*fuse.Program
	var want []float64
	for i, n := range lengths {
		p := &fuse.Program{Shape: []int{n}, Reduced: []bool{true}}
		x := p.Cast(backend.F64, p.Load(backend.F32, 1))
		p.Fold(backend.Sum, p.Do(fuse.Mul, x, x), backend.F64, 0)
		numbers, sum := make([]float32, n), 0.0
		for k := range numbers {
			numbers[k] = float32((i + 3*k) % 11)
			sum += float64(numbers[k] * numbers[k])
		}
		all, want = append(all, p), append(want, sum)
		c.Dst, c.Src = append(c.Dst, backend.Of(make([]float64, 1))),
			append(c.Src, backend.Of(numbers))
	}
	loop := require.Value(g.Launcher.(*Stream).FuseAll(all))(t)
	for _, aligned := range []bool{true, false} {
		d := place(g, c, loop.Scratch(), aligned)
		var got []float64
		for _, sum := range d.results(g, d.run(t, g, loop)) {
			got = append(got, backend.View[float64](sum)...)
		}
		require.Check(t, slices.Equal(got, want), "aligned %v: the sums are %v, want %v", aligned,
			got, want)
	}
}

// Rows of a few threads up to those that no block keeps, of layers.
func TestGPUFusedRows(t *testing.T) {
	g := openGPU(t, 64<<20)
	programs := []func(d backend.DType, rows, n int) *fuse.Program{
		fusetest.SoftMax, fusetest.LayerNorm, fusetest.LayerNormGrad, fusetest.CrossEntropy,
		fusetest.LayerNormGrads}
	lengths := []int{1, 3, 32, 33, 260, 1000, 4096, 8193, 16384, 20000, 50257}
	if os.Getenv("EMULATED_DEVICES") != "" { // which interprets the text
		lengths = []int{1, 3, 33, 260, 4096}
	}
	for i, program := range programs {
		for _, n := range lengths {
			for _, d := range []backend.DType{backend.F32, backend.F64, backend.BF16} {
				if d != backend.F32 && n > 2000 || i == len(programs)-1 && n > fuse.MaxFoldedRow {
					continue // the interpreter, to compare with, takes seconds
				}
				c := fusetest.New(rand.New(rand.NewPCG(uint64(n), uint64(i))),
					program(d, 2+300/n, n))
				loop, err := g.Launcher.(*Stream).Fuse(c.Program)
				if err != nil {
					t.Fatalf("%v\n%v", err, c.Program)
				}
				for _, aligned := range []bool{false, true} {
					on := place(g, c, loop.Scratch(), aligned)
					if _, err := c.Check(on.results(g, on.run(t, g, loop))); err != nil {
						t.Errorf("%v, aligned %v: %v", d, aligned, err)
					}
				}
			}
		}
	}
}

func TestGPUFusedRunsRefuseWrongMemory(t *testing.T) {
	g := openGPU(t, 1<<20)
	p := &fuse.Program{Shape: []int{1 << 16}, Reduced: []bool{true}}
	p.Fold(backend.Sum, p.Load(backend.F32, 1), backend.F32, 0)
	loop := require.Value(g.Launcher.(*Stream).Fuse(p))(t)
	x, y := backend.OnDevice(backend.F32, uintptr(g.addr), 1<<16), backend.OnDevice(backend.F32,
		uintptr(g.addr)+1<<19, 1)
	for name, err := range map[string]error{
		"no scratch": loop.Run([]backend.Buffer{y}, []backend.Buffer{x}, backend.Buffer{}),
		"host scratch": loop.Run([]backend.Buffer{y}, []backend.Buffer{x},
			backend.Of(make([]byte, loop.Scratch()))),
		"short input": loop.Run([]backend.Buffer{y}, []backend.Buffer{y}, backend.Buffer{}),
		"host input": loop.Run([]backend.Buffer{y},
			[]backend.Buffer{backend.Of(make([]float32, 1<<16))}, backend.Buffer{}),
	} {
		require.Check(t, errors.Is(err, backend.ErrArgument), "%s: %v", name, err)
	}
	p.Outputs = nil
	if _, err := g.Launcher.(*Stream).Fuse(p); !errors.Is(err, backend.ErrArgument) {
		t.Errorf("a program without outputs: %v", err)
	}
}

// benchmarked are programs on n elements of F32, as 4096 columns, with the bytes that they move.
func benchmarked(n int) map[string]*fuse.Program {
	const columns = 4096
	rows := n / columns
	all := map[string]*fuse.Program{}
	make2 := func(name string) *fuse.Program {
		p := &fuse.Program{Shape: []int{rows, columns}}
		all[name] = p
		return p
	}
	p := make2("bias+relu")
	p.Store(p.Do(fuse.Relu, p.Do(fuse.Add, p.Load(backend.F32, columns, 1),
		p.Load(backend.F32, 0, 1))), backend.F32, columns, 1)
	p = make2("gelu")
	x := p.Load(backend.F32, columns, 1)
	cdf := p.Do(fuse.Add, p.Const(backend.F32, 1),
		p.Do(fuse.Erf, p.Do(fuse.Mul, x, p.Const(backend.F32, 0.70710678))))
	p.Store(p.Do(fuse.Mul, p.Do(fuse.Mul, x, p.Const(backend.F32, 0.5)), cdf), backend.F32,
		columns, 1)
	p = make2("bf16 tanh")
	p.Store(p.Do(fuse.Tanh, p.Load(backend.BF16, columns, 1)), backend.BF16, columns, 1)
	p = make2("dropout")
	zero := p.Const(backend.I64, 7)
	keep := p.Do(fuse.Less, p.Const(backend.F32, 0.1), p.Do(fuse.Uniform, zero, zero, p.Index(1, 0),
		p.Index(0, 1)))
	p.Store(p.Do(fuse.Mul, p.Load(backend.F32, columns, 1), keep), backend.F32, columns, 1)
	p = make2("transposed add")
	p.Store(p.Do(fuse.Add, p.Load(backend.F32, columns, 1), p.Load(backend.F32, 1, rows)),
		backend.F32, columns, 1)
	all["softmax of rows"] = fusetest.SoftMax(backend.F32, rows, columns)
	all["softmax of short rows"] = fusetest.SoftMax(backend.F32, n/512, 512)
	all["softmax of bf16 rows"] = fusetest.SoftMax(backend.BF16, rows, columns)
	all["layer norm of rows"] = fusetest.LayerNorm(backend.F32, n/1024, 1024)
	all["layer norm gradient of rows"] = fusetest.LayerNormGrad(backend.F32, n/1024, 1024)
	all["layer norm gradients, and sums of columns"] = fusetest.LayerNormGrads(backend.F32, n/1024,
		1024)
	all["cross-entropy over 50,000 classes"] = fusetest.CrossEntropy(backend.F32, n/50000, 50000)
	all["cross-entropy over 50,257 classes"] = fusetest.CrossEntropy(backend.F32, n/50257, 50257)
	for name, reduced := range map[string][]bool{"sum of rows": {false, true},
		"sum of columns": {true, false}, "sum": {true, true}} {
		p = make2(name)
		p.Reduced = reduced
		strides := map[string][]int{"sum of rows": {1, 0}, "sum of columns": {0, 1},
			"sum": {0, 0}}[name]
		p.Fold(backend.Sum, p.Do(fuse.Square, p.Load(backend.F32, columns, 1)), backend.F32,
			strides...)
	}
	return all
}

// benchmarkGPU opens the first device for a benchmark, on this thread.
func benchmarkGPU(b *testing.B, nbytes int) (loaded *Loaded, s cu.Stream, ctx cu.CUContext,
	memory uintptr) {
	b.Helper()
	if count, err := cu.NumDevices(); err != nil || count == 0 {
		b.Skip("no GPU")
	}
	runtime.LockOSThread()
	b.Cleanup(runtime.UnlockOSThread)
	check := func(err error) {
		if err != nil {
			b.Helper()
			b.Fatal(err)
		}
	}
	ctx, err := cu.Device(0).MakeContext(cu.SchedAuto)
	check(err)
	b.Cleanup(func() { ctx.Destroy() })
	loaded, err = Load()
	check(err)
	s, err = cu.MakeStream(cu.NonBlocking)
	check(err)
	address, err := cu.MemAlloc(int64(nbytes))
	check(err)
	return loaded, s, ctx, uintptr(address)
}

// BenchmarkGPUFused compares fused kernels with a copy: bytes of operands in each second.
func BenchmarkGPUFused(b *testing.B) {
	const n, scratchBytes = 64 << 20, 64 << 20
	loaded, s, ctx, memory := benchmarkGPU(b, 3*4*n+scratchBytes)
	stream := loaded.Launcher(s)
	part := func(k int, d backend.DType) backend.Buffer {
		return backend.OnDevice(d, memory+uintptr(k*4*n), n)
	}
	measure := func(name string, nbytes int, run func() error) {
		b.Run(name, func(b *testing.B) {
			runtime.LockOSThread() // this is another goroutine
			defer runtime.UnlockOSThread()
			err := errors.Join(cu.SetCurrentContext(ctx), run(), s.Synchronize())
			b.SetBytes(int64(nbytes))
			b.ResetTimer()
			for range b.N {
				err = errors.Join(err, run())
			}
			require.NoError(b, errors.Join(err, s.Synchronize()))
		})
	}
	measure("copy", 8*n, func() error {
		return New(stream).Copy(part(0, backend.F32), part(1, backend.F32))
	})
	scratch := backend.OnDevice(backend.U8, memory+3*4*n, scratchBytes)
	for name, p := range benchmarked(n) {
		loop := require.Value(stream.Fuse(p))(b)
		var dst, src []backend.Buffer
		large, small := 0, 0 // parts, and pieces of the scratch, from its end
		put := func(o fuse.Operand) backend.Buffer {
			if o.Strides[0] > 0 && o.Strides[1] > 0 {
				large++
				return part(large-1, o.DType)
			}
			small++
			at := memory + 3*4*n + scratchBytes - uintptr(small)<<20
			return backend.OnDevice(o.DType, at, 1<<20/o.DType.Size())
		}
		for _, out := range p.Outputs {
			dst = append(dst, put(out.Operand))
		}
		for _, in := range p.Inputs {
			src = append(src, put(in))
		}
		measure(name, moved(p), func() error { return loop.Run(dst, src, scratch) })
	}
}

// moved returns the bytes that a program reads and writes, but for broadcasts and folds.
func moved(p *fuse.Program) (nbytes int) {
	operands := slices.Clone(p.Inputs)
	for _, out := range p.Outputs {
		operands = append(operands, out.Operand)
	}
	for _, o := range operands {
		if o.Strides[0] > 0 && o.Strides[1] > 0 {
			nbytes += p.Shape[0] * p.Shape[1] * o.DType.Size()
		}
	}
	return nbytes
}
