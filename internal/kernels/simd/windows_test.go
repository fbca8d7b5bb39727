package simd

import (
	"fmt"
	"math"
	"math/rand/v2"
	"testing"
)

func TestWindowsAreTheLoop(t *testing.T) {
	t.Run("f32", testWindows[float32])
	t.Run("f64", testWindows[float64])
}

// testWindows compares all levels with the loop, of windows that overlap or are apart, with NaN,
// infinities and zeros of both signs, and checks that nothing around the results is written.
func testWindows[T Float](t *testing.T) {
	const around = 17
	r := rand.New(rand.NewPCG(5, 6))
	edges := []T{0, T(math.Copysign(0, -1)), T(math.NaN()), T(math.Inf(1)), T(math.Inf(-1)),
		-math.MaxFloat32, 1}
	numbers := func(n int) []T {
		x := make([]T, n)
		for i := range x {
			if x[i] = T(r.NormFloat64()); r.IntN(3) == 0 {
				x[i] = edges[r.IntN(len(edges))]
			}
		}
		return x
	}
	for columns := range 36 {
		for _, kernel := range [][2]int{{1, 1}, {1, 2}, {2, 2}, {3, 2}, {3, 3}, {2, 4}} {
			for stride := 1; stride <= 3; stride++ {
				height, width := kernel[0], max(columns-1, 0)*stride+kernel[1]+r.IntN(2)
				w := Windows{Rows: r.IntN(4), Columns: columns, Pitch: (height + r.IntN(2)) * width,
					Stride: stride}
				for k := range height * kernel[1] {
					w.Pixels = append(w.Pixels, k/kernel[1]*width+k%kernel[1])
				}
				x, dy := numbers(max(w.Rows, 1)*w.Pitch), numbers(w.Rows*columns)
				n, apart, least := len(dy), stride >= kernel[1], []T{T(math.Inf(-1)), 0}[r.IntN(2)]
				results := func(l Level) []T {
					all := make([]T, 2*n+len(x)+4*around)
					most, at, dx := all[around:][:n], all[n+2*around:][:n],
						all[2*n+3*around:][:len(x)]
					Largest(l, most, at, x, &w, least)
					Give(l, dx, x, dy, at, &w, apart, least)
					return all
				}
				want := results(Go)
				for _, level := range Levels()[1:] {
					same(t, fmt.Sprintf("%v, %+v, least %v", level, w, least), results(level), want)
				}
			}
		}
	}
}
