package autograd

import (
	"errors"
	"fmt"
	"math"
	"path/filepath"
	"strings"
	"testing"

	"github.com/euryale-ml/euryale/autograd/internal/checkpoint"
	"github.com/euryale-ml/euryale/backend"
)

// elementsOf returns where each element of a region is in the whole.
func elementsOf(r region) (at []int) {
	part := 0
	for i := range product(r.Shape) {
		place := i / r.row() % (r.block() / r.row())
		if place >= r.Start && place < r.Start+r.Length {
			if part >= r.From && part < r.From+r.n {
				at = append(at, i)
			}
			part++
		}
	}
	return at
}

// TestRegionsMeetWhereTheyHaveTheSameElements compares runs with elements one by one.
func TestRegionsMeetWhereTheyHaveTheSameElements(t *testing.T) {
	var all []region
	shape := []int{3, 4, 2}
	for axis, d := range shape {
		for start := range d {
			for length := 1; start+length <= d; length++ {
				n := product(shape) / d * length
				for from := 0; from <= n; from += 5 {
					all = append(all, region{shape, axis, start, length, from, min(7, n-from)},
						region{shape, axis, start, length, from, n - from})
				}
			}
		}
	}
	for _, a := range all {
		if err := a.check(24); err != nil {
			t.Fatal(err)
		}
		mine := elementsOf(a)
		for _, b := range all {
			theirs, want, got := elementsOf(b), 0, 0
			for _, at := range mine {
				for _, other := range theirs {
					if at == other {
						want++
					}
				}
			}
			a.meet(b, func(i, k, n int) {
				for j := range n {
					if mine[i+j] != theirs[k+j] {
						t.Fatalf("%+v has %d where %+v has %d", a, mine[i+j], b, theirs[k+j])
					}
				}
				got += n
			})
			if got != want {
				t.Fatalf("%+v and %+v have %d elements in common, want %d", a, b, got, want)
			}
		}
	}
}

// TestRegionsThatAreNoneAreRefused: what a hostile file says costs nothing.
func TestRegionsThatAreNoneAreRefused(t *testing.T) {
	const huge = math.MaxInt
	for _, r := range []region{
		{[]int{2, 3}, 2, 0, 1, 0, 1}, {[]int{2, 3}, -1, 0, 1, 0, 1}, {[]int{2, 3}, 0, 1, 2, 0, 1},
		{[]int{2, 3}, 0, -1, 2, 0, 1}, {[]int{2, 3}, 0, 0, -1, 0, 1}, {[]int{2, 3}, 1, 0, 2, 1, 4},
		{[]int{2, 3}, 1, 0, 2, -1, 4}, {[]int{2, 3}, 0, huge, huge, 0, 1},
		{[]int{2, 3}, 0, 0, 2, huge, 1}, {[]int{-2, -3}, 0, 0, 2, 0, 1}, {nil, 0, 0, 1, 0, 2},
		{[]int{huge, huge}, 0, 0, 1, 0, 1}, {[]int{0, huge, huge}, 0, 0, 0, 0, 1},
		{[]int{100}, 0, 0, 100, 0, 50}, {nil, 0, 0, 0, 0, 1}, {[]int{2, 3}, 0, 0, 0, 0, 1},
	} {
		if err := r.check(24); err == nil {
			t.Errorf("%+v is accepted", r)
		}
	}
	for _, r := range []region{{nil, 0, 0, 1, 0, 1}, {[]int{0}, 0, 0, 0, 0, 0},
		{[]int{2, 3}, 0, 0, 2, 6, 0}} {
		if err := r.check(24); err != nil {
			t.Error(err)
		}
	}
}

// TestShardsOfMoreThanTheFilesAreRefused: tensors of which a file has no element, but which are all
// as large as the file, as it says.
func TestShardsOfMoreThanTheFilesAreRefused(t *testing.T) {
	dir, of := t.TempDir(), checkpoint.Stamp{ID: "this"}
	write := func(name string, tensors map[string]stored, said string) {
		f, err := writeTensors(filepath.Join(dir, name), tensors, remarks{save: of.ID,
			shards: said}, finiteness{})
		if err != nil {
			t.Fatal(err)
		}
		of.Files = append(of.Files, f)
	}
	const count = 100
	shards, says := map[string]stored{}, []string{}
	for i := range count {
		name := fmt.Sprint("w", i)
		shards[name] = vector(backend.Of([]float32{}))
		says = append(says, fmt.Sprintf(`"%s":{"shape":[1000],"length":1000}`, name))
	}
	b := vector(backend.Of(make([]float32, 1000)))
	write(checkpoint.ModelName, map[string]stored{"b": b}, "")
	write(checkpoint.RankName(0), shards, "{"+strings.Join(says, ",")+"}")
	a := assembly{dir: dir, of: of, need: func(_ string, has region, _ backend.DType) (region,
		[]int, bool) {
		return whole(has.Shape), has.Shape, true
	}}
	_, err := a.assemble(1)
	damaged := &checkpoint.Damaged{}
	if !errors.As(err, &damaged) || !strings.Contains(err.Error(), "fewer elements") {
		t.Error(err)
	}
}
