package fuse_test

import (
	"bytes"
	"errors"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/testing/fusetest"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/kernels/fuse"
)

// descent is one step of momentum along n parameters, with a rate.
func descent(n int) *fuse.Program {
	p := &fuse.Program{Shape: []int{n}}
	w, v, dw, rate := p.Load(backend.F32, 1), p.Load(backend.F32, 1), p.Load(backend.BF16, 1),
		p.Load(backend.F32, 0)
	v = p.Do(fuse.Add, p.Do(fuse.Mul, v, p.Const(backend.F32, 0.9)), dw)
	p.Store(p.Do(fuse.Sub, w, p.Do(fuse.Mul, rate, v)), backend.F32, 1)
	p.Store(v, backend.F32, 1)
	return p
}

// Programs of many lengths run at once, each on its own memory: more than one launch can name, some
// with a rest that fills no vector, some longer than a block's part.
func TestProgramsRunAtOnce(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 9))
	var all []*fuse.Program
	var cases []*fusetest.Case
	for i := range 110 {
		n := 1 + i%13
		if i == 70 {
			n = 5000
		}
		all = append(all, descent(n))
		cases = append(cases, fusetest.New(r, all[i]))
		cases[i].Src[3] = cases[0].Src[3] // the rate
	}
	for _, vectors := range []bool{false, true} {
		k := require.Value(fuse.PTXAll(all, vectors, fuse.Ampere))(t)
		require.Check(t, len(k.Launches) == 2, "%d launches", len(k.Launches))
		want := make([][]backend.Buffer, len(cases))
		for i, c := range cases { // before: a case may be in place
			n := c.Program.Shape[0]
			want[i] = []backend.Buffer{backend.Of(make([]float32, n)),
				backend.Of(make([]float32, n))}
			loop, err := fuse.Host(c.Program, nil)
			if err = errors.Join(err, loop.Run(want[i], c.Src, backend.Buffer{})); err != nil {
				t.Fatal(err)
			}
		}
		m := parse(t, k.Text)
		var addresses []uint64
		place := func(b backend.Buffer) {
			at := uint64(len(m.regions)+1) << 32
			if !vectors {
				at += uint64(b.DType().Size())
			}
			m.regions = append(m.regions, region{at, b.Bytes()})
			addresses = append(addresses, at)
		}
		for _, c := range cases {
			for _, b := range c.Dst {
				place(b)
			}
		}
		for _, c := range cases {
			for _, b := range c.Src {
				place(b)
			}
		}
		for _, l := range k.Launches {
			var params []uint64
			for _, number := range l.Params {
				params = append(params, addresses[number])
			}
			require.NoError(t, m.launch(l.Entry, l.Blocks, l.Threads, params))
		}
		for i, c := range cases {
			for k := range want[i] {
				if !bytes.Equal(want[i][k].Bytes(), c.Dst[k].Bytes()[:want[i][k].NBytes()]) {
					t.Fatalf("vectors %v: result %d of program %d, of length %d, is another one",
						vectors, k, i, c.Program.Shape[0])
				}
			}
		}
	}
}

// addends is how many operands the sum of [squares] has.
const addends = 8

// squares is the sum of the squares of n sums.
func squares(n int) *fuse.Program {
	p := &fuse.Program{Shape: []int{n}, Reduced: []bool{true}}
	x := p.Load(backend.F32, 1)
	for range addends - 1 {
		x = p.Do(fuse.Add, x, p.Load(backend.F32, 1))
	}
	x = p.Cast(backend.F64, x)
	p.Fold(backend.Sum, p.Do(fuse.Mul, x, x), backend.F64, 0)
	return p
}

// Programs that fold to a number each run at once: more than one launch can name, some with a rest
// that fills no vector, some longer than the parts of two blocks. Numbers are whole, so that every
// order gives the same sum.
func TestProgramsFoldAtOnce(t *testing.T) {
	var all []*fuse.Program
	var numbers [][]float32
	want := make([]float64, 60)
	for i := range want {
		n := i%9 + 1
		if i%58 == 1 {
			n = 9011 + 2*i
		}
		all, numbers = append(all, squares(n)), append(numbers, make([]float32, n))
		for k := range n {
			x := (i + 3*k) % 11
			numbers[i][k] = float32(x)
			want[i] += float64(addends * x * addends * x)
		}
	}
	for _, vectors := range []bool{false, true} {
		k := require.Value(fuse.PTXAll(all, vectors, fuse.Ampere))(t)
		require.Check(t, len(k.Launches) == 4, "%d launches", len(k.Launches))
		m := parse(t, k.Text)
		var addresses []uint64
		place := func(b []byte) {
			at := uint64(len(m.regions)+1) << 32
			m.regions, addresses = append(m.regions, region{at, b}), append(addresses, at)
		}
		got := make([]float64, len(want))
		for i := range got {
			place(backend.Of(got[i : i+1]).Bytes())
		}
		for _, x := range numbers { // all addends
			place(backend.Of(x).Bytes())
			for range addends - 1 {
				addresses = append(addresses, addresses[len(addresses)-1])
			}
		}
		place(make([]byte, k.Scratch))
		for _, l := range k.Launches {
			var params []uint64
			for _, number := range l.Params {
				params = append(params, addresses[number])
			}
			require.NoError(t, m.launch(l.Entry, l.Blocks, l.Threads, params))
		}
		require.Check(t, slices.Equal(got, want), "vectors %v: %v, want %v", vectors, got, want)
	}
}

func TestOnlyProgramsAlikeRunAtOnce(t *testing.T) {
	folds := descent(4)
	folds.Reduced, folds.Outputs = []bool{true}, slices.Clone(folds.Outputs)
	folds.Fold(backend.Sum, 0, backend.F32, 0)
	other := descent(4)
	other.Code = slices.Clone(other.Code)
	other.Code[len(other.Code)-1].Op = fuse.Add
	folded := squares(5)
	for _, p := range []*fuse.Program{folds, other, folded, meansOfHalves()} {
		if descent(5).Alike(p) {
			t.Errorf("alike:\n%v%v", descent(5), p)
		}
		require.Fails(t, "PTXAll", require.Err(fuse.PTXAll([]*fuse.Program{descent(5), p}, true,
			fuse.Ampere)), backend.ErrArgument)
	}
	mean := squares(5)
	mean.Outputs[0].Op = backend.Avg
	require.Check(t, !mean.Alike(mean), "means are of their length")
	require.Check(t, descent(5).Alike(descent(7)) && folded.Alike(squares(7)), "lengths count")
}
