package host

import (
	"math"
	"unsafe"

	"github.com/euryale-ml/euryale/vm/internal/ir"
)

// images are the sizes of an operation on images [B, C, H, W] with a window at OH x OW places.
type images struct {
	ir.Window
	b, c, h, w, oh, ow int
}

func imagesOf(x ir.Dims, oh, ow int, w ir.Window) images {
	return images{w, x.At(0), x.At(1), x.At(2), x.At(3), oh, ow}
}

// patches calls f for each element of each patch [B, OH, OW, C, KH, KW] in order: patch is its
// place, and pixel that of the pixel which it shows, -1 outside of the image.
func (i images) patches(f func(patch, pixel int)) {
	patch := 0
	for b := range i.b {
		for oh := range i.oh {
			for ow := range i.ow {
				for c := range i.c {
					plane := (b*i.c + c) * i.h
					for kh := range i.H {
						row := oh*i.StrideH - i.PadH + kh*i.DilationH
						for kw := range i.W {
							column := ow*i.StrideW - i.PadW + kw*i.DilationW
							pixel := -1
							if row >= 0 && row < i.h && column >= 0 && column < i.w {
								pixel = (plane+row)*i.w + column
							}
							f(patch, pixel)
							patch++
						}
					}
				}
			}
		}
	}
}

// im2col copies patches out of images.
func im2col[T float](y, x []T, i images) {
	i.patches(func(patch, pixel int) {
		if pixel >= 0 {
			y[patch] = x[pixel]
		} else {
			y[patch] = 0
		}
	})
}

// col2im adds patches up to images.
func col2im[T float](y, x []T, i images) {
	clear(y)
	i.patches(func(patch, pixel int) {
		if pixel >= 0 {
			y[pixel] += x[patch]
		}
	})
}

// windows calls f for each window of each plane: out is the place of the result, plane that
// of the plane's first pixel, and the window has rows h0 to h1 and columns w0 to w1 of it.
func (i images) windows(f func(out, plane, h0, h1, w0, w1 int)) {
	for plane := range i.b * i.c {
		for oh := range i.oh {
			h := oh*i.StrideH - i.PadH
			for ow := range i.ow {
				w := ow*i.StrideW - i.PadW
				f((plane*i.oh+oh)*i.ow+ow, plane*i.h*i.w, max(h, 0), min(h+i.H, i.h), max(w, 0), min(w+i.W, i.w))
			}
		}
	}
}

// largest returns the place and the value of the first largest element of a window; without
// one that is larger than the least finite number, the place is -1, as in Gorgonia.
func largest[T float](x []T, plane, width, h0, h1, w0, w1 int) (int, T) {
	at, most := -1, least[T]()
	for h := h0; h < h1; h++ {
		for w := w0; w < w1; w++ {
			if i := plane + h*width + w; x[i] > most {
				at, most = i, x[i]
			}
		}
	}
	return at, most
}

// least returns the least finite number.
func least[T float]() T {
	if unsafe.Sizeof(T(0)) == 4 {
		return T(-math.MaxFloat32)
	}
	most := math.MaxFloat64
	return T(-most)
}

// maxPool finds the largest element of each window.
func maxPool[T float](y, x []T, i images) {
	i.windows(func(out, plane, h0, h1, w0, w1 int) {
		_, y[out] = largest(x, plane, i.w, h0, h1, w0, w1)
	})
}

// maxPoolGrad adds the gradient of each window to that of its first largest element.
func maxPoolGrad[T float](dx, x, dy []T, i images) {
	clear(dx)
	i.windows(func(out, plane, h0, h1, w0, w1 int) {
		if at, _ := largest(x, plane, i.w, h0, h1, w0, w1); at >= 0 {
			dx[at] += dy[out]
		}
	})
}
