package fuse_test

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/kernels"
	"github.com/euryale-ml/euryale/internal/testing/fusetest"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/kernels/fuse"
)

// half and toHalf convert binary16, which package kernels proves.
func half(x uint16) float64 {
	var wide [1]float64
	if err := (kernels.Host{}).Cast(backend.Of(wide[:]),
		backend.Of([]backend.Float16{backend.Float16(x)})); err != nil {
		panic(err)
	}
	return wide[0]
}

func toHalf(x float32) uint64 {
	var narrow [1]backend.Float16
	if err := (kernels.Host{}).Cast(backend.Of(narrow[:]), backend.Of([]float32{x})); err != nil {
		panic(err)
	}
	return uint64(narrow[0])
}

// capability returns one of those that kernels differ for.
func capability[N int | uint64](seed N) int { return [...]int{fuse.Ampere, 70}[seed%2] }

// emulate runs the kernel of a case and compares what it computes with what the program says.
func emulate(t *testing.T, c *fusetest.Case, vectors bool, capability int) (checked float64) {
	t.Helper()
	k, err := fuse.PTX(c.Program, vectors, capability)
	require.That(t, err == nil, "%v\n%v", err, c.Program)
	launch(t, c, k, vectors)
	checked, err = c.Check(c.Dst)
	require.That(t, err == nil, "vectors=%v: %v\n%v", vectors, err, k.Text)
	return checked
}

// launch runs the kernel of a case on a machine whose memory begins at addresses that are aligned
// to vectors, or only to elements.
func launch(t *testing.T, c *fusetest.Case, k fuse.Kernel, vectors bool) {
	t.Helper()
	m := parse(t, k.Text)
	var params []uint64
	place := func(memory []byte, size int) {
		for _, r := range m.regions {
			if len(memory) > 0 && &r.bytes[0] == &memory[0] { // in place
				params = append(params, r.base)
				return
			}
		}
		at := uint64(len(m.regions)+1) << 32
		if !vectors {
			at += uint64(size)
		}
		m.regions = append(m.regions, region{at, memory})
		params = append(params, at)
	}
	for _, b := range append(c.Dst[:len(c.Dst):len(c.Dst)], c.Src...) {
		place(b.Bytes(), b.DType().Size())
	}
	place(make([]byte, k.Scratch), 0)
	for _, l := range k.Launches {
		if err := m.launch(l.Entry, l.Blocks, l.Threads, params); err != nil {
			t.Fatalf("%v\n%v\n%v", err, c.Program, k.Text)
		}
	}
}

func TestKernelsComputeWhatProgramsSay(t *testing.T) {
	checked, n := 0.0, 150
	for seed := range uint64(n) {
		checked += emulate(t, fusetest.Random(rand.New(rand.NewPCG(seed, 5)), 2000), seed%4 != 0,
			capability(seed/4))
	}
	require.Check(t, checked >= 0.9*float64(n), "the results of %v cases of %d were compared",
		checked, n)
}

// Neighbours share the words of one counter, ten rounds for four elements, where the first
// element is a multiple of four.
func TestDropoutDrawsFourNumbersAtOnce(t *testing.T) {
	for _, test := range []struct {
		element []int
		most    int // multiplications: two of the coordinates, and two of each round
	}{
		{[]int{0, 1}, 2 + 20}, {[]int{40, 1}, 2 + 20}, {[]int{41, 1}, 2 + 80}, {[]int{1, 6},
			2 + 80},
	} {
		p := &fuse.Program{Shape: []int{6, 40}}
		key, step := p.Load(backend.I64, 0, 0), p.Load(backend.I64, 0, 0)
		u := p.Do(fuse.Uniform, key, step, p.Index(1, 0), p.Index(test.element...))
		keep := p.Do(fuse.Less, p.Const(backend.F32, 0.1), u)
		p.Store(p.Do(fuse.Mul, p.Load(backend.F32, 40, 1), keep), backend.F32, 40, 1)
		k := require.Value(fuse.PTX(p, true, fuse.Ampere))(t)
		if n := strings.Count(k.Text, "mul.hi.u32"); n > test.most || n < test.most-2 {
			t.Errorf("strides %v: %d multiplications", test.element, n)
		}
		emulate(t, fusetest.New(rand.New(rand.NewPCG(1, 1)), p), true, 70)
		emulate(t, fusetest.New(rand.New(rand.NewPCG(1, 1)), p), false, fuse.Ampere)
	}
}

// Where all operands are 16-bit floats, a thread loads eight at once.
func TestHalvesMoveInVectorsOfEight(t *testing.T) {
	for _, d := range []backend.DType{backend.F16, backend.BF16} {
		for seed, shape := range [][]int{{4096}, {1003}, {5}, {24, 40}} {
			p := &fuse.Program{Shape: shape, Reduced: make([]bool, len(shape))}
			p.Reduced[len(shape)-1] = true
			strides, kept := []int{1}, []int{0}
			if len(shape) == 2 {
				strides, kept = []int{shape[1], 1}, []int{1, 0}
			}
			x := p.Do(fuse.Add, p.Load(d, strides...), p.Load(d, strides...))
			p.Store(x, d, strides...)
			if seed%2 == 1 {
				p.Fold(backend.Sum, x, backend.F32, kept...)
			}
			k := require.Value(fuse.PTX(p, true, fuse.Ampere))(t)
			if whole := shape[len(shape)-1]%8 == 0 || len(shape) == 1 &&
				seed == 0; whole != strings.Contains(k.Text, "ld.global.v4.u32") {
				t.Errorf("shape %v loads eight at once: %v", shape, !whole)
			}
			for _, vectors := range []bool{false, true} {
				emulate(t, fusetest.New(rand.New(rand.NewPCG(uint64(seed), 3)), p), vectors,
					capability(seed/2))
			}
		}
	}
}

// Operands that are transposed to each other are read in tiles, of all sizes.
func TestTransposedOperandsAreReadInTiles(t *testing.T) {
	for seed, shape := range [][]int{{64, 64}, {1, 100}, {33, 65}, {100, 4}, {7, 130}} {
		for _, transposed := range []string{"input", "output"} {
			rows, columns := shape[0], shape[1]
			p := &fuse.Program{Shape: []int{3, rows, columns}}
			straight, across := []int{rows * columns, columns, 1}, []int{rows * columns, 1, rows}
			x := p.Do(fuse.Add, p.Load(backend.F32, straight...), p.Load(backend.F32, across...))
			if transposed == "output" {
				straight = across
			}
			p.Store(x, backend.F32, straight...)
			for _, vectors := range []bool{false, true} {
				emulate(t, fusetest.New(rand.New(rand.NewPCG(uint64(seed), 2)), p), vectors,
					capability(seed))
			}
		}
	}
}

func FuzzKernels(f *testing.F) {
	f.Add(uint64(1), uint64(2), uint16(100), true)
	f.Fuzz(func(t *testing.T, a, b uint64, size uint16, vectors bool) {
		emulate(t, fusetest.Random(rand.New(rand.NewPCG(a, b)), 1+int(size)%20000), vectors,
			capability(a))
	})
}

// The elementary functions are held to the errors that are promised, at arguments of all
// magnitudes.
func TestFunctionsAreAccurate(t *testing.T) {
	for _, o := range fuse.Ops() {
		if !o.Rounded() {
			continue
		}
		t.Run(o.String(), func(t *testing.T) {
			testAccuracy(t, o, backend.F32)
			// Go's own Pow is off by more: the tests of internal/kernels/cuda measure ours.
			if o != fuse.Pow {
				testAccuracy(t, o, backend.F64)
			}
		})
	}
}

// arguments returns numbers of all magnitudes, those at which functions end, and powers for them.
func arguments(r *rand.Rand) (src [2][]float64) {
	for _, x := range []float64{math.Inf(1), math.Inf(-1), math.NaN(), 0, math.Copysign(0, -1),
		3.4e38, -3.4e38, 1e-45, 88.7228, 88.73, -87.4, -103.9, -104.1} {
		src[0], src[1] = append(src[0], x), append(src[1], 0)
	}
	for i := range 4000 {
		x := math.Ldexp(r.Float64()*2-1, r.IntN(60)-30)
		if i%2 == 0 {
			x = r.NormFloat64() * 4
		}
		src[0], src[1] = append(src[0], x), append(src[1], r.NormFloat64()*8)
	}
	return src
}

// testAccuracy computes one function of both types on the device, and in float64 on the host.
func testAccuracy(t *testing.T, o fuse.Op, d backend.DType) {
	t.Helper()
	src := arguments(rand.New(rand.NewPCG(1, uint64(o))))
	n := len(src[0])
	p := &fuse.Program{Shape: []int{n}}
	args := []fuse.Value{p.Load(d, 1), p.Load(d, 1)}
	p.Store(p.Do(o, args[:o.Operands()]...), d, 1)
	c := &fusetest.Case{Program: p}
	for _, x := range src {
		b := backend.Of(make([]float64, n)).As(d).Slice(0, n)
		require.NoError(t, errors.Join((kernels.Host{}).Cast(b, backend.Of(x)),
			(kernels.Host{}).Cast(backend.Of(x), b)))
		c.Src = append(c.Src, b)
	}
	c.Dst = []backend.Buffer{backend.Of(make([]float64, n)).As(d).Slice(0, n)}
	emulate(t, c, true, fuse.Ampere)
	got, want := make([]float64, n), make([]float64, n)
	require.NoError(t, (kernels.Host{}).Cast(backend.Of(got), c.Dst[0]))
	wide := &fuse.Program{Shape: p.Shape}
	args = []fuse.Value{wide.Load(backend.F64, 1), wide.Load(backend.F64, 1)}
	wide.Store(wide.Do(o, args[:o.Operands()]...), backend.F64, 1)
	loop := require.Value(fuse.Host(wide, nil))(t)
	require.NoError(t, loop.Run([]backend.Buffer{backend.Of(want)},
		[]backend.Buffer{backend.Of(src[0]), backend.Of(src[1])}, backend.Buffer{}))
	worst, at := 0.0, 0
	for i := range want {
		if off := units(d, got[i], want[i]); off > worst {
			worst, at = off, i
		}
	}
	t.Logf("%v is off by %.2f units of the last place", d, worst)
	if worst >= 4 {
		t.Errorf("%v(%v, %v) of %v is %v, want %v", o, src[0][at], src[1][at], d, got[at], want[at])
	}
}

// units returns how far got is from want, in units of the last place of the type.
func units(d backend.DType, got, want float64) float64 {
	least, digits, largest := -1022, 52, math.MaxFloat64
	if d == backend.F32 {
		least, digits, largest = -126, 23, math.MaxFloat32
	}
	switch {
	case got == want || got != got && want != want:
		return 0
	case got != got || want != want:
		return math.Inf(1)
	case math.IsInf(got, 0) && math.Abs(want) > largest*(1-0x1p-22):
		return 0
	}
	exponent := least
	if want != 0 {
		exponent = max(math.Ilogb(want), least)
	}
	return math.Abs(got-want) / math.Ldexp(1, exponent-digits)
}

// ptxas of make ptx-check assembles kernels of all kinds.
func TestAssemblerTakesKernels(t *testing.T) {
	ptxas, err := filepath.Glob("../../.gpu-sdk/ptxas/nvidia/cuda_nvcc/bin/ptxas")
	if err != nil || len(ptxas) == 0 {
		t.Skip("no ptxas: make ptx-check downloads it")
	}
	programs := []*fuse.Program{meansOfHalves(), sumWithTransposed()}
	for _, program := range rowPrograms {
		programs = append(programs, program(backend.F32, 100, 16384),
			program(backend.BF16, 100, 8192), program(backend.F32, 100, 50257))
	}
	for seed := range uint64(10) {
		programs = append(programs, fusetest.Random(rand.New(rand.NewPCG(seed, 7)), 100).Program)
	}
	text := filepath.Join(t.TempDir(), "kernel.ptx")
	for i, p := range programs {
		c := capability(i)
		k := require.Value(fuse.PTX(p, i%3 != 2, c))(t)
		require.NoError(t, os.WriteFile(text, []byte(k.Text), 0o644))
		if out, err := exec.Command(ptxas[0], fmt.Sprint("-arch=sm_", c), "-o", os.DevNull,
			text).CombinedOutput(); err != nil {
			t.Fatalf("%v: %s\n%v\n%s", err, out, p, k.Text)
		}
	}
}

// meansOfHalves has vectors of eight elements, and segments.
func meansOfHalves() *fuse.Program {
	p := &fuse.Program{Shape: []int{1 << 20}, Reduced: []bool{true}}
	x := p.Do(fuse.Tanh, p.Load(backend.BF16, 1))
	p.Store(x, backend.F16, 1)
	p.Fold(backend.Avg, x, backend.BF16, 0)
	return p
}

// sumWithTransposed has tiles.
func sumWithTransposed() *fuse.Program {
	p := &fuse.Program{Shape: []int{1000, 640}}
	p.Store(p.Do(fuse.Add, p.Load(backend.F16, 640, 1), p.Load(backend.F32, 1, 1000)), backend.F32,
		640, 1)
	return p
}
