package kernels

import (
	"errors"
	"slices"
	"testing"

	"github.com/euryale-ml/euryale/backend"
)

// TestConvolutionIsAProductOfPatches compares all passes with Im2Col, Multiply and Col2Im.
func TestConvolutionIsAProductOfPatches(t *testing.T) {
	c := Convolution{
		Images:  Images{Batch: 2, C: 3, H: 7, W: 6, OutH: 4, OutW: 3, KernelH: 3, KernelW: 2, PadH: 1, PadW: 2, StrideH: 1, StrideW: 2, DilationH: 2, DilationW: 3},
		Filters: 4, DType: backend.F64,
	}
	nx, nw, ny := c.lengths()
	x, w, dy := make([]float64, nx), make([]float64, nw), make([]float64, ny)
	for n, s := range [][]float64{x, w, dy} {
		for i := range s {
			s[i] = float64((i*(n+3)+i/5)%7 - 3)
		}
	}
	patches, places := make([]float64, c.patches()), c.OutH*c.OutW
	if err := (Host{}).Im2Col(backend.Of(patches), backend.Of(x), c.Images); err != nil {
		t.Fatal(err)
	}
	matrix := func(data []float64, pitch int, transposed bool) Matrix {
		return Matrix{Buffer: backend.Of(data), Pitch: pitch, Transposed: transposed}
	}
	y, dx, dw := make([]float64, ny), make([]float64, nx), make([]float64, nw)
	for b := range c.Batch { // y = w patches^T, dw += dy patches, dpatches = dy^T w
		of := patches[b*places*c.Columns():][:places*c.Columns()]
		from := b * c.Filters * places
		errs := errors.Join(
			Host{}.Multiply(Product{M: c.Filters, N: places, K: c.Columns(), Alpha: 1, A: matrix(w, c.Columns(), false), B: matrix(of, c.Columns(), true), C: matrix(y[from:], places, false)}),
			Host{}.Multiply(Product{M: c.Filters, N: c.Columns(), K: places, Alpha: 1, Beta: 1, A: matrix(dy[from:], places, false), B: matrix(of, c.Columns(), false), C: matrix(dw, c.Columns(), false)}),
			Host{}.Multiply(Product{M: places, N: c.Columns(), K: c.Filters, Alpha: 1, A: matrix(dy[from:], places, true), B: matrix(w, c.Columns(), false), C: matrix(of, c.Columns(), false)}))
		if errs != nil {
			t.Fatal(errs)
		}
	}
	if err := (Host{}).Col2Im(backend.Of(dx), backend.Of(patches), c.Images); err != nil {
		t.Fatal(err)
	}
	for _, test := range []struct {
		pass Pass
		a, b []float64
		want []float64
	}{{Forward, x, w, y}, {InputGradient, dy, w, dx}, {FilterGradient, x, dy, dw}} {
		c.Pass = test.pass
		got := make([]float64, len(test.want))
		if err := (Host{}).Convolve(c, backend.Of(got), backend.Of(test.a), backend.Of(test.b)); err != nil {
			t.Fatal(err)
		}
		if !slices.Equal(got, test.want) {
			t.Errorf("%v is %v, want %v", test.pass, got, test.want)
		}
	}
}

func TestConvolutionsThatDoNotFitAreRefused(t *testing.T) {
	c := Convolution{Images: small, Filters: 2, DType: backend.F32}
	x, w, y := backend.Of(make([]float32, 9)), backend.Of(make([]float32, 8)), backend.Of(make([]float32, 8))
	if err := (Host{}).Convolve(c, y, x, w); err != nil {
		t.Error(err)
	}
	for name, wrong := range map[string]func(c *Convolution){
		"three filters": func(c *Convolution) { c.Filters = 3 },
		"another dtype": func(c *Convolution) { c.DType = backend.F64 },
		"another pass":  func(c *Convolution) { c.Pass = InputGradient },
		"no such pass":  func(c *Convolution) { c.Pass = FilterGradient + 1 },
		"a stride of 0": func(c *Convolution) { c.StrideW = 0 },
	} {
		c := c
		if wrong(&c); !errors.Is((Host{}).Convolve(c, y, x, w), backend.ErrArgument) {
			t.Errorf("%s: no error", name)
		}
	}
}
