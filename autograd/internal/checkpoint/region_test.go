package checkpoint

import (
	"errors"
	"fmt"
	"math"
	"strings"
	"testing"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/files"
	"github.com/euryale-ml/euryale/internal/testing/require"
)

// elementsOf returns where each element of a region is in the whole.
func elementsOf(r Region) (at []int) {
	part := 0
	for i := range Elements(r.Shape) {
		place := i / r.row() % (r.block() / r.row())
		if place >= r.Start && place < r.Start+r.Length {
			if part >= r.From && part < r.From+r.N {
				at = append(at, i)
			}
			part++
		}
	}
	return at
}

// TestRegionsMeetWhereTheyHaveTheSameElements compares runs with elements one by one.
func TestRegionsMeetWhereTheyHaveTheSameElements(t *testing.T) {
	var all []Region
	shape := []int{3, 4, 2}
	for axis, d := range shape {
		for start := range d {
			for length := 1; start+length <= d; length++ {
				n := Elements(shape) / d * length
				for from := 0; from <= n; from += 5 {
					all = append(all, Region{shape, axis, start, length, from, min(7, n-from)},
						Region{shape, axis, start, length, from, n - from})
				}
			}
		}
	}
	for _, a := range all {
		require.NoError(t, a.check(24))
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
			a.Meet(b, func(i, k, n int) {
				for j := range n {
					if mine[i+j] != theirs[k+j] {
						t.Fatalf("%+v has %d where %+v has %d", a, mine[i+j], b, theirs[k+j])
					}
				}
				got += n
			})
			require.That(t, got == want, "%+v and %+v have %d elements in common, want %d", a, b,
				got, want)
		}
	}
}

// TestRegionsThatAreNoneAreRefused: what a hostile file says costs nothing.
func TestRegionsThatAreNoneAreRefused(t *testing.T) {
	const huge = math.MaxInt
	for _, r := range []Region{
		{[]int{2, 3}, 2, 0, 1, 0, 1}, {[]int{2, 3}, -1, 0, 1, 0, 1}, {[]int{2, 3}, 0, 1, 2, 0, 1},
		{[]int{2, 3}, 0, -1, 2, 0, 1}, {[]int{2, 3}, 0, 0, -1, 0, 1}, {[]int{2, 3}, 1, 0, 2, 1, 4},
		{[]int{2, 3}, 1, 0, 2, -1, 4}, {[]int{2, 3}, 0, huge, huge, 0, 1},
		{[]int{2, 3}, 0, 0, 2, huge, 1}, {[]int{-2, -3}, 0, 0, 2, 0, 1}, {nil, 0, 0, 1, 0, 2},
		{[]int{huge, huge}, 0, 0, 1, 0, 1}, {[]int{0, huge, huge}, 0, 0, 0, 0, 1},
		{[]int{100}, 0, 0, 100, 0, 50}, {nil, 0, 0, 0, 0, 1}, {[]int{2, 3}, 0, 0, 0, 0, 1},
	} {
		err := r.check(24)
		require.Check(t, err != nil, "%+v is accepted", r)
	}
	for _, r := range []Region{{nil, 0, 0, 1, 0, 1}, {[]int{0}, 0, 0, 0, 0, 0},
		{[]int{2, 3}, 0, 0, 2, 6, 0}} {
		require.Report(t, r.check(24))
	}
}

// TestShardsOfMoreThanTheFilesAreRefused: tensors of which a file has no element, but which are all
// as large as the file, as it says.
func TestShardsOfMoreThanTheFilesAreRefused(t *testing.T) {
	in, of := files.Disk(t.TempDir()), Stamp{ID: "this"}
	tensors := []Tensor{Whole("b", []int{1000}, backend.Of(make([]float32, 1000)), Common)}
	for i := range 100 {
		tensors = append(tensors, Tensor{Name: fmt.Sprint("w", i), Shape: []int{0},
			Data: backend.Of([]float32{}), Region: Region{Shape: []int{1000}, Length: 1000},
			Merge: Divided})
	}
	common, own, err := Write(in, RankName(0), true, tensors, Remarks{Save: of.ID})
	require.NoError(t, err)
	of.Files = append(common, own)
	_, err = Read(in, of, 1, Wanted{Rest: func(string) bool { return true }})
	damaged := &Damaged{}
	require.Check(t, errors.As(err, &damaged) && strings.Contains(err.Error(), "fewer elements"),
		"%v", err)
}
