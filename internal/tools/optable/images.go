package main

import (
	"fmt"
	"math"
	"slices"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// window is a kernel that is moved over an image: [height, width] each, and the padding before and
// behind each axis.
type window struct {
	kernel, stride, dilation [2]int
	pad                      [4]int // north, south, west, east
}

func (w window) out(h, v int) (int, int) {
	return (h+w.pad[0]+w.pad[1]-w.dilation[0]*(w.kernel[0]-1)-1)/w.stride[0] + 1,
		(v+w.pad[2]+w.pad[3]-w.dilation[1]*(w.kernel[1]-1)-1)/w.stride[1] + 1
}

// fold combines the pixels of each window: f gets the sum so far, the pixel and its place in the
// kernel. Pixels of the padding are left out.
func (w window) fold(x array, f func(sum, pixel float64, i, j int) float64) array {
	h, v := w.out(x.shape[2], x.shape[3])
	return generate([]int{x.shape[0], x.shape[1], h, v}, func(at []int) float64 {
		sum := math.NaN()
		for i := range w.kernel[0] {
			for j := range w.kernel[1] {
				row, column := at[2]*w.stride[0]+i*w.dilation[0]-w.pad[0],
					at[3]*w.stride[1]+j*w.dilation[1]-w.pad[2]
				if row >= 0 && column >= 0 && row < x.shape[2] && column < x.shape[3] {
					sum = f(sum, x.at(at[0], at[1], row, column), i, j)
				}
			}
		}
		return sum
	})
}

func (w window) max(x array) array {
	return w.fold(x, func(sum, pixel float64, _, _ int) float64 {
		if math.IsNaN(sum) {
			return pixel
		}
		return max(sum, pixel)
	})
}

// mean divides by the whole kernel: padding counts as zeros.
func (w window) mean(x array) array {
	return w.fold(x, func(sum, pixel float64, _, _ int) float64 {
		if math.IsNaN(sum) {
			sum = 0
		}
		return sum + pixel/float64(w.kernel[0]*w.kernel[1])
	})
}

// convolve is the correlation of images [b, c, h, w] with filters [l, c, kernel...].
func (w window) convolve(x, filter array) array {
	h, v := w.out(x.shape[2], x.shape[3])
	columns := w.columns(x)
	return generate([]int{x.shape[0], filter.shape[0], h, v}, func(at []int) float64 {
		sum := 0.0
		for k := range columns.shape[3] {
			sum += columns.at(at[0], at[2], at[3], k) * filter.reshape(filter.shape[0],
				columns.shape[3]).at(at[1], k)
		}
		return sum
	})
}

// columns is [b, h, w, c*kernel]: the pixels of each window, zeros from the padding.
func (w window) columns(x array) array {
	h, v := w.out(x.shape[2], x.shape[3])
	return generate([]int{x.shape[0], h, v, x.shape[1] * w.kernel[0] * w.kernel[1]},
		func(at []int) float64 {
			c, i, j := at[3]/(w.kernel[0]*w.kernel[1]), at[3]/w.kernel[1]%w.kernel[0],
				at[3]%w.kernel[1]
			row, column := at[1]*w.stride[0]+i*w.dilation[0]-w.pad[0],
				at[2]*w.stride[1]+j*w.dilation[1]-w.pad[2]
			if row < 0 || column < 0 || row >= x.shape[2] || column >= x.shape[3] {
				return 0
			}
			return x.at(at[0], c, row, column)
		})
}

// square is a window with equal numbers for both axes.
func square(kernel, pad, stride, dilation int) window {
	return window{[2]int{kernel, kernel}, [2]int{stride, stride}, [2]int{dilation, dilation},
		[4]int{pad, pad, pad, pad}}
}

func imageRows() []row {
	return append(convolutionRows(), append(poolRows(), upsampleRows()...)...)
}

func convolutionRows() []row {
	var rows []row
	for _, r := range []struct {
		x, filter                     []int
		kernel, pad, stride, dilation int
	}{
		{[]int{2, 3, 5, 5}, []int{4, 3, 3, 3}, 3, 0, 1, 1}, {[]int{2, 3, 5, 5}, []int{4, 3, 3, 3},
			3, 1, 1, 1},
		{[]int{2, 3, 6, 6}, []int{4, 3, 2, 2}, 2, 0, 2, 1}, {[]int{1, 2, 7, 7}, []int{3, 2, 3, 3},
			3, 0, 1, 2},
		{[]int{1, 1, 3, 3}, []int{1, 1, 3, 3}, 3, 0, 1, 1}, {[]int{1, 2, 5, 5}, []int{3, 2, 1, 1},
			1, 0, 1, 1}, {[]int{1, 1, 7, 7}, []int{2, 1, 3, 3}, 3, 1, 2, 2},
	} {
		w := square(r.kernel, r.pad, r.stride, r.dilation)
		rows = append(
			rows,
			of2(fmt.Sprintf("Conv2d(x, y), %d channels, kernel %d, pad %d, stride %d, dilation %d",
				r.x[1], r.kernel, r.pad, r.stride, r.dilation), r.x, r.filter,
				func(x, y N) (N, error) {
					return G.Conv2d(x, y, tensor.Shape{r.kernel, r.kernel},
						[]int{r.pad, r.pad},
						[]int{r.stride, r.stride}, []int{r.dilation, r.dilation})
				}, w.convolve))
	}
	tall := window{[2]int{3, 2}, [2]int{2, 1}, [2]int{1, 1}, [4]int{1, 1, 0, 0}}
	rows = append(rows,
		of2("Conv2d(x, y), kernel (3, 2), pad (1, 0), stride (2, 1)", []int{1, 2, 5, 4},
			[]int{3, 2, 3, 2}, func(x, y N) (N, error) {
				return G.Conv2d(x, y, tensor.Shape{3, 2}, []int{1, 0}, []int{2, 1}, []int{1, 1})
			}, tall.convolve))
	return slices.Concat(rows, lineRows(), patchRows())
}

// lineRows are convolutions of images of height 1.
func lineRows() (rows []row) {
	for _, r := range []struct {
		batch, channels, width, filters, kernel, pad, stride,
		dilation int
	}{
		{2, 3, 7, 4, 3, 1, 2, 1}, {1, 1, 5, 1, 2, 0, 1, 1}, {2, 2, 8, 3, 3, 0, 1, 2}, {1, 3, 4, 2,
			1, 0, 1, 1}, {3, 1, 6, 2, 3, 2, 3, 1},
	} {
		w := window{[2]int{1, r.kernel}, [2]int{1, r.stride}, [2]int{1, r.dilation},
			[4]int{0, 0, r.pad, r.pad}}
		x, filter := []int{r.batch, r.channels, 1, r.width}, []int{r.filters, r.channels, 1,
			r.kernel}
		rows = append(rows, of2(fmt.Sprintf("Conv1d(x, y, %d, %d, %d, %d), %s", r.kernel, r.pad,
			r.stride, r.dilation, shown(x)), x, filter,
			func(x, y N) (N, error) {
				return G.Conv1d(x, y, r.kernel, r.pad, r.stride, r.dilation)
			}, w.convolve))
	}
	return rows
}

func patchRows() (rows []row) {
	for _, r := range []struct{ kernel, pad, stride, dilation int }{{2, 1, 2, 1}, {3, 0, 1, 1},
		{2, 0, 1, 2}, {1, 0, 1, 1}, {4, 0, 1, 1}} {
		call := fmt.Sprintf("Im2Col(x), kernel %d, pad %d, stride %d, dilation %d", r.kernel, r.pad,
			r.stride, r.dilation)
		rows = append(rows, of1(call, []int{1, 2, 4, 4}, im2col(r.kernel, r.pad, r.stride,
			r.dilation),
			square(r.kernel, r.pad, r.stride, r.dilation).columns))
	}
	return rows
}

func im2col(kernel, pad, stride, dilation int) node1 {
	return func(x N) (N, error) {
		both := func(n int) tensor.Shape { return tensor.Shape{n, n} }
		return G.Im2Col(x, both(kernel), both(pad), both(stride), both(dilation))
	}
}

func poolRows() []row {
	type pool = func(x N, kernel tensor.Shape, pad, stride []int) (N, error)
	at := func(f pool, kernel, stride int, pad ...int) node1 {
		return func(x N) (N, error) {
			return f(x, tensor.Shape{kernel, kernel}, pad, []int{stride, stride})
		}
	}
	type poolCase struct {
		size           []int
		kernel, stride int
		pad            []int // of two or of four sides
	}
	cases := []poolCase{
		{[]int{2, 3, 4, 4}, 2, 2, []int{0, 0}}, {[]int{2, 1, 6, 6}, 2, 2, []int{0, 0}},
		{[]int{1, 2, 5, 5}, 3, 1, []int{0, 0}},
		{[]int{1, 2, 4, 4}, 3, 2, []int{1, 1}}, {[]int{1, 2, 4, 6}, 2, 2, []int{0, 0}},
		{[]int{3, 1, 2, 2}, 2, 2, []int{0, 0}}, {[]int{1, 1, 3, 3}, 1, 1, []int{0, 0}},
	}
	uneven := []poolCase{
		{[]int{1, 2, 4, 4}, 3, 2, []int{1, 1, 1, 1}}, {[]int{1, 2, 4, 4}, 3, 2, []int{0, 1, 0, 1}},
		{[]int{1, 2, 5, 5}, 2, 2, []int{0, 1, 0, 1}},
		{[]int{1, 2, 4, 5}, 3, 1, []int{2, 0, 0, 1}}, {[]int{2, 1, 3, 3}, 2, 1, []int{1, 0, 1, 0}},
	}
	rowOf := func(name string, f pool, c poolCase, loop func(w window) func(array) array) row {
		w := square(c.kernel, c.pad[0], c.stride, 1)
		w.pad = [4]int{c.pad[0], c.pad[0], c.pad[1], c.pad[1]}
		if len(c.pad) == 4 {
			w.pad = [4]int(c.pad) // north, south, west, east
		}
		call := fmt.Sprintf("%s(x), %s, kernel %d, stride %d, pad %s", name, shown(c.size),
			c.kernel, c.stride, shown(c.pad))
		return of1(call, c.size, at(f, c.kernel, c.stride, c.pad...), loop(w))
	}
	var rows []row
	for _, c := range slices.Concat(cases, uneven) {
		rows = append(rows, rowOf("MaxPool2D", G.MaxPool2D, c,
			func(w window) func(array) array { return w.max }))
	}
	for _, c := range cases {
		rows = append(rows, rowOf("AveragePool2D", G.AveragePool2D, c,
			func(w window) func(array) array { return w.mean }).instead("`nn.AvgPool2D`"))
	}
	for _, width := range []int{6, 4, 2, 8, 10} {
		line := window{[2]int{1, 2}, [2]int{1, 2}, [2]int{1, 1}, [4]int{}}
		shape := []int{1, 2, 1, width}
		rows = append(rows,
			of1("MaxPool1D(x, 2, 0, 2), "+shown(shape), shape, func(x N) (N, error) {
				return G.MaxPool1D(x, 2, 0, 2)
			}, line.max),
			of1("AveragePool1D(x, 2, 0, 2), "+shown(shape), shape, func(x N) (N, error) {
				return G.AveragePool1D(x, 2, 0, 2)
			}, line.mean).instead("`nn.AvgPool2D`"))
	}
	return append(rows, globalRows()...)
}

func globalRows() (rows []row) {
	for _, shape := range [][]int{{2, 3, 4, 4}, {1, 1, 2, 2}, {2, 3, 1, 1}, {1, 2, 3, 5},
		{3, 1, 6, 2}} {
		pixels := float64(shape[2] * shape[3])
		rows = append(rows, of1("GlobalAveragePool2D(x), "+shown(shape), shape,
			G.GlobalAveragePool2D, func(x array) array {
				return x.reduce(plus, 2, 3).apply(func(s float64) float64 {
					return s / pixels
				}).reshape(shape[0], shape[1], 1, 1)
			}).instead("`nn.GlobalAvgPool2D`"))
	}
	return rows
}

func upsampleRows() (rows []row) {
	for _, r := range []struct {
		shape []int
		scale int
	}{{[]int{1, 2, 3, 3}, 2}, {[]int{2, 1, 2, 3}, 3}, {[]int{1, 1, 1, 1}, 2}, {[]int{1, 3, 2, 1},
		2}, {[]int{2, 2, 3, 2}, 1}} {
		rows = append(rows, of1(fmt.Sprintf("Upsample2D(x, %d), %s", r.scale, shown(r.shape)),
			r.shape,
			func(x N) (N, error) {
				return G.Upsample2D(x, r.scale)
			}, func(x array) array {
				return generate([]int{r.shape[0], r.shape[1], r.shape[2] * r.scale,
					r.shape[3] * r.scale},
					func(i []int) float64 { return x.at(i[0], i[1], i[2]/r.scale, i[3]/r.scale) })
			}))
	}
	return rows
}
