package fuse_test

import (
	"errors"
	"fmt"
	"log"
	"math/rand/v2"
	"testing"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/testing/fusetest"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/kernels/fuse"
)

// Add a bias to each row of a matrix, apply tanh, and sum the columns, in one loop.
func Example() {
	const rows, columns = 2, 3
	p := &fuse.Program{Shape: []int{rows, columns}, Reduced: []bool{true, false}}
	x := p.Load(backend.F32, columns, 1)
	bias := p.Load(backend.F32, 0, 1) // the same for each row
	y := p.Do(fuse.Relu, p.Do(fuse.Add, x, bias))
	p.Store(y, backend.F32, columns, 1)
	p.Fold(backend.Sum, y, backend.F32, 0, 1)
	loop, err := fuse.Host(p, nil)
	if err != nil {
		log.Fatal(err)
	}
	xs, biases := []float32{1, -2, 3, 4, 5, -6}, []float32{0, 1, 2}
	ys, sums := make([]float32, 6), make([]float32, 3)
	err = loop.Run([]backend.Buffer{backend.Of(ys), backend.Of(sums)},
		[]backend.Buffer{backend.Of(xs), backend.Of(biases)}, backend.Buffer{})
	fmt.Println(ys, sums, err)
	// Output: [1 0 5 4 6 0] [5 6 5] <nil>
}

// run runs a case on host memory.
func run(t *testing.T, c *fusetest.Case) {
	t.Helper()
	loop, err := fuse.Host(c.Program, nil)
	require.That(t, err == nil, "%v\n%v", err, c.Program)
	require.NoError(t, loop.Run(c.Dst, c.Src, backend.Buffer{}))
	require.NoError(t, require.Err(c.Check(c.Dst)))
}

func TestHostComputesWhatProgramsSay(t *testing.T) {
	for seed := range uint64(300) {
		run(t, fusetest.Random(rand.New(rand.NewPCG(seed, 1)), 5000))
	}
}

func FuzzHost(f *testing.F) {
	f.Add(uint64(1), uint64(2), uint16(100))
	f.Add(uint64(49), uint64(56), uint16(101))  // an index that an i32 wraps to 0
	f.Add(uint64(250), uint64(215), uint16(89)) // two rounded numbers that may be equal
	f.Add(uint64(52), uint64(168), uint16(46))  // the sine of 3e38
	f.Fuzz(func(t *testing.T, a, b uint64, size uint16) {
		run(t, fusetest.Random(rand.New(rand.NewPCG(a, b)), 1+int(size)%20000))
	})
}

// The words that the authors of Philox publish for a counter and a key of zeros.
func TestUniformIsPhilox(t *testing.T) {
	p := &fuse.Program{Shape: []int{4}}
	zero := p.Const(backend.I64, 0)
	u := p.Do(fuse.Uniform, zero, zero, zero, p.Index(1))
	p.Code[u].Type = backend.F64
	p.Store(u, backend.F64, 1)
	loop := require.Value(fuse.Host(p, nil))(t)
	got := make([]float64, 4)
	require.NoError(t, loop.Run([]backend.Buffer{backend.Of(got)}, nil, backend.Buffer{}))
	for i, word := range []uint32{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8} {
		if got[i] != float64(word)/(1<<32) {
			t.Errorf("word %d is %v, want %v", i, got[i], float64(word)/(1<<32))
		}
	}
}

func TestHostAllocatesNothing(t *testing.T) {
	for seed := range uint64(20) {
		c := fusetest.Random(rand.New(rand.NewPCG(seed, 3)), 3000)
		loop, err := fuse.Host(c.Program, nil)
		require.NoError(t, err)
		if n := testing.AllocsPerRun(2, func() {
			err = errors.Join(err, loop.Run(c.Dst, c.Src, backend.Buffer{}))
		}); n != 0 || err != nil {
			t.Errorf("%v allocations, %v, of\n%v", n, err, c.Program)
		}
	}
}

func TestWrongBuffersAreRefused(t *testing.T) {
	p := &fuse.Program{Shape: []int{2, 3}}
	p.Store(p.Do(fuse.Neg, p.Load(backend.F32, 3, 1)), backend.F32, 3, 1)
	loop := require.Value(fuse.Host(p, nil))(t)
	six, five := backend.Of(make([]float32, 6)), backend.Of(make([]float32, 5))
	for name, test := range map[string]struct {
		dst, src []backend.Buffer
		says     string
	}{
		"no inputs":    {[]backend.Buffer{six}, nil, "1 outputs and 1 inputs runs with 1 and 0"},
		"short input":  {[]backend.Buffer{six}, []backend.Buffer{five}, "input 0 is 5 f32"},
		"short output": {[]backend.Buffer{five}, []backend.Buffer{six}, "output 0 is 5 f32"},
		"integer input": {[]backend.Buffer{six}, []backend.Buffer{six.As(backend.I32)},
			"input 0 is 6 i32"},
		"device memory": {[]backend.Buffer{backend.OnDevice(backend.F32, 64, 6)},
			[]backend.Buffer{six}, "6 f32 of device memory, want at least 6 f32 of host memory"},
	} {
		require.Fails(t, name, loop.Run(test.dst, test.src, backend.Buffer{}), backend.ErrArgument,
			test.says)
	}
	p.Outputs = nil
	require.Fails(t, "a program without outputs", require.Err(fuse.Host(p, nil)),
		backend.ErrArgument)
}
