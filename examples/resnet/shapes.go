package main

import (
	"math"
	"math/rand/v2"

	"github.com/euryale-ml/euryale/fit"
	"github.com/euryale-ml/euryale/fit/data"
)

// kinds are the classes of shapes. Each says whether a point is in the shape, which has its centre
// at 0 and its corners at about 1 from it.
var kinds = []func(x, y float64) bool{
	func(x, y float64) bool { return math.Hypot(x, y) < 1 },                           // circle
	func(x, y float64) bool { return math.Hypot(x, y) < 1 && math.Hypot(x, y) > 0.6 }, // ring
	func(x, y float64) bool { return max(math.Abs(x), math.Abs(y)) < 0.75 },           // square
	func(x, y float64) bool { return y > -0.5 && y < 1-math.Sqrt(3)*math.Abs(x) },     // triangle
	func(x, y float64) bool { return math.Abs(x*y) < 0.2 && math.Hypot(x, y) < 1 },    // cross
}

const (
	leastSize, mostSize = 6, 12 // of a shape from its centre, in pixels
	noise               = 0.1   // standard deviation
)

// shapes returns pictures of shapes, which follow from the seed and their numbers.
func shapes(n int, seed uint64) fit.Set {
	return data.Of(n, func(sample int, row []any) error {
		kind := sample % len(kinds)
		draw(rand.New(rand.NewPCG(seed, uint64(sample))), kinds[kind], row[0].([]float32))
		row[1].([]int)[0] = kind
		return nil
	})
}

// draw draws a shape to pixels [3, 32, 32].
func draw(r *rand.Rand, inside func(x, y float64) bool, pixels []float32) {
	var colours [2][3]float64 // of the background, which is darker, and of the shape
	for c := range 3 {
		colours[0][c], colours[1][c] = 0.4*r.Float64(), 0.5+0.5*r.Float64()
	}
	size := leastSize + (mostSize-leastSize)*r.Float64()
	left, top := size+(side-2*size)*r.Float64(), size+(side-2*size)*r.Float64()
	sin, cos := math.Sincos(2 * math.Pi * r.Float64())
	for i := range pixels {
		x, y := (float64(i%side)-left)/size, (float64(i/side%side)-top)/size
		colour := colours[0]
		if inside(cos*x-sin*y, sin*x+cos*y) {
			colour = colours[1]
		}
		pixels[i] = float32(colour[i/(side*side)] + noise*r.NormFloat64())
	}
}
