package nn

import (
	"math"

	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/internal/program"
	"github.com/euryale-ml/euryale/kernels"
)

// This file computes convolutions and pools by plain loops.

func avgPool[T float](s avgPool2DSpec, y, x array[T]) error {
	eachWindow(s.Window, x.shape, y.shape, func(window int, pixels []int, h, w [2]int) {
		sum := 0.0
		for _, p := range pixels {
			sum += float64(x.data[p])
		}
		y.data[window] = T(sum / s.counted(x.shape, h, w))
	})
	return nil
}

// counted returns how many pixels of a window count, given the first of height and width, and the
// one behind the last.
func (s avgPool2DSpec) counted(image tensor.Shape, h, w [2]int) float64 {
	n := 1
	for i, seen := range [][2]int{h, w} {
		from, to := -s.Pad[i], image[2+i]+s.Padded[i]
		if s.Exclude {
			from, to = 0, image[2+i]
		}
		there := 0
		for at := seen[0]; at < seen[1]; at += s.Dilation[i] {
			if at >= from && at < to {
				there++
			}
		}
		n *= there
	}
	return float64(n)
}

// eachWindow calls f for every window with the places of its pixels inside, and what it reaches.
func eachWindow(w program.Window, image, out tensor.Shape,
	f func(window int, pixels []int, h, w [2]int)) {
	height, width := image[2], image[3]
	for window := range product(out) {
		plane, row, column := window/(out[2]*out[3]), window/out[3]%out[2], window%out[3]
		top, left := row*w.Stride[0]-w.Pad[0], column*w.Stride[1]-w.Pad[1]
		h, v := [2]int{top, top + w.Reach(0)}, [2]int{left, left + w.Reach(1)}
		var pixels []int
		for i := h[0]; i < h[1]; i += w.Dilation[0] {
			for j := v[0]; j < v[1]; j += w.Dilation[1] {
				if i >= 0 && i < height && j >= 0 && j < width {
					pixels = append(pixels, (plane*height+i)*width+j)
				}
			}
		}
		f(window, pixels, h, v)
	}
}

func avgPoolGrad[T float](s avgPool2DGradSpec, dx, dy array[T]) error {
	eachWindow(s.Pool.Window, dx.shape, dy.shape, func(window int, pixels []int, h, w [2]int) {
		for _, p := range pixels {
			dx.data[p] += T(float64(dy.data[window]) / s.Pool.counted(dx.shape, h, w))
		}
	})
	return nil
}

func maxPool[T float](s maxPool2DSpec, y, x array[T]) error {
	eachWindow(s.Window, x.shape, y.shape, func(window int, pixels []int, _, _ [2]int) {
		y.data[window] = T(math.Inf(-1))
		if at := largestOf(x, pixels); at >= 0 {
			y.data[window] = x.data[at]
		}
	})
	return nil
}

func maxPoolGrad[T float](s maxPool2DGradSpec, dx, x, dy array[T]) error {
	eachWindow(s.Window, x.shape, dy.shape, func(window int, pixels []int, _, _ [2]int) {
		if at := largestOf(x, pixels); at >= 0 {
			dx.data[at] += dy.data[window]
		}
	})
	return nil
}

// largestOf returns the place of the first largest pixel, or of the last NaN.
func largestOf[T float](x array[T], pixels []int) int {
	most := -1
	for _, p := range pixels {
		if most < 0 || x.data[p] > x.data[most] || x.data[p] != x.data[p] {
			most = p
		}
	}
	return most
}

// convolution adds the products of a pass one by one.
func convolution[T float](s convSpec, to array[T], in []array[T]) error {
	x, w, y := in[0], in[1], to
	switch s.Pass {
	case kernels.InputGradient:
		x, y = to, in[0]
	case kernels.FilterGradient:
		w, y = to, in[1]
	}
	sums := make([]float64, len(to.data))
	eachProduct(s, x.shape, w.shape, y.shape, func(x1, w1, y1 int) {
		switch s.Pass {
		case kernels.Forward:
			sums[y1] += float64(x.data[x1]) * float64(w.data[w1])
		case kernels.InputGradient:
			sums[x1] += float64(y.data[y1]) * float64(w.data[w1])
		default:
			sums[w1] += float64(x.data[x1]) * float64(y.data[y1])
		}
	})
	for i, sum := range sums {
		if len(in) == 3 {
			_, channels, behind := around(to.shape, 1)
			sum += float64(in[2].data[i/behind%channels])
		}
		to.data[i] = T(sum)
	}
	return nil
}

// eachProduct calls f with the places of the factors and of the result.
func eachProduct(s convSpec, x, w, y tensor.Shape, f func(x, w, y int)) {
	n := func(shape tensor.Shape) [3]int { // depth, height and width
		all := [3]int{1, 1, 1}
		copy(all[3-s.Axes:], shape[2:])
		return all
	}
	image, out := n(x), n(y)
	for at := range product(y) {
		for tap := range product(w[1:]) {
			rest, k, pixel, inside := at, tap, 0, true
			var place, reach [3]int
			for i := 2; i >= 0; i-- {
				place[i], reach[i] = rest%out[i], k%s.Kernel[i]
				rest, k = rest/out[i], k/s.Kernel[i]
			}
			filter, b := rest%y[1], rest/y[1]
			channel := filter/(w[0]/s.Groups)*w[1] + k
			for i := range 3 {
				p := place[i]*s.Stride[i] - s.Pad[i] + reach[i]*s.Dilation[i]
				inside = inside && p >= 0 && p < image[i]
				pixel = pixel*image[i] + p
			}
			if inside {
				planes := b*x[1] + channel
				f(planes*image[0]*image[1]*image[2]+pixel, filter*product(w[1:])+tap, at)
			}
		}
	}
}

func channelSum[T float](y, x array[T]) error {
	_, channels, behind := around(x.shape, 1)
	for i, v := range x.data {
		y.data[i/behind%channels] += v
	}
	return nil
}

func channelSpread[T float](y, x array[T]) error {
	_, channels, behind := around(y.shape, 1)
	for i := range y.data {
		y.data[i] = x.data[i/behind%channels]
	}
	return nil
}
