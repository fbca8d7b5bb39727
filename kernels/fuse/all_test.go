package fuse_test

import (
	"bytes"
	"errors"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/kernels/fuse"
	"github.com/euryale-ml/euryale/kernels/fuse/fusetest"
)

// descent is one step of momentum along n parameters, with a rate.
func descent(n int) *fuse.Program {
	p := &fuse.Program{Shape: []int{n}}
	w, v, dw, rate := p.Load(backend.F32, 1), p.Load(backend.F32, 1), p.Load(backend.BF16, 1), p.Load(backend.F32, 0)
	v = p.Do(fuse.Add, p.Do(fuse.Mul, v, p.Const(backend.F32, 0.9)), dw)
	p.Store(p.Do(fuse.Sub, w, p.Do(fuse.Mul, rate, v)), backend.F32, 1)
	p.Store(v, backend.F32, 1)
	return p
}

// Programs of many lengths run at once, each on its own memory: more than one launch can name, some with a rest that
// fills no vector, some longer than a block's part.
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
		k, err := fuse.PTXAll(all, vectors, fuse.Ampere)
		if err != nil {
			t.Fatal(err)
		}
		if len(k.Launches) != 2 {
			t.Errorf("%d launches", len(k.Launches))
		}
		want := make([][]backend.Buffer, len(cases))
		for i, c := range cases { // before: a case may be in place
			n := c.Program.Shape[0]
			want[i] = []backend.Buffer{backend.Of(make([]float32, n)), backend.Of(make([]float32, n))}
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
			if err := m.launch(l.Entry, l.Blocks, l.Threads, params); err != nil {
				t.Fatal(err)
			}
		}
		for i, c := range cases {
			for k := range want[i] {
				if !bytes.Equal(want[i][k].Bytes(), c.Dst[k].Bytes()[:want[i][k].NBytes()]) {
					t.Fatalf("vectors %v: result %d of program %d, of length %d, is another one", vectors, k, i, c.Program.Shape[0])
				}
			}
		}
	}
}

func TestOnlyProgramsAlikeRunAtOnce(t *testing.T) {
	folds := descent(4)
	folds.Reduced, folds.Outputs = []bool{true}, slices.Clone(folds.Outputs)
	folds.Fold(backend.Sum, 0, backend.F32, 0)
	other := descent(4)
	other.Code = slices.Clone(other.Code)
	other.Code[len(other.Code)-1].Op = fuse.Add
	for _, p := range []*fuse.Program{folds, other, meansOfHalves()} {
		if descent(5).Alike(p) {
			t.Errorf("alike:\n%v%v", descent(5), p)
		}
		if _, err := fuse.PTXAll([]*fuse.Program{descent(5), p}, true, fuse.Ampere); !errors.Is(err, backend.ErrArgument) {
			t.Errorf("the error is %v", err)
		}
	}
	if !descent(5).Alike(descent(7)) {
		t.Error("lengths count")
	}
}
