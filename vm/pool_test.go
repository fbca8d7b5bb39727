package vm_test

import (
	"reflect"
	"testing"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/vm"
)

// unevenPool is a max pool of a batch of 2 with 2 channels.
type unevenPool struct {
	name                  string
	h, w                  int
	kernel, pad, stride   []int // the padding is north, south, west, east
	outHeight, outColumns int
}

var unevenPools = []unevenPool{
	{"SAME of an even size", 4, 6, []int{3, 3}, []int{0, 1, 0, 1}, []int{2, 2}, 2, 3},
	{"SAME of an even kernel", 3, 4, []int{2, 2}, []int{0, 1, 0, 1}, []int{1, 1}, 3, 4},
	{"ceil mode", 5, 5, []int{2, 2}, []int{0, 1, 0, 1}, []int{2, 2}, 3, 3},
	{"north and east", 4, 5, []int{3, 2}, []int{2, 0, 0, 1}, []int{1, 3}, 4, 2},
	{"south and west", 5, 4, []int{2, 3}, []int{0, 1, 2, 0}, []int{3, 1}, 2, 4},
	{"three against one", 6, 6, []int{4, 4}, []int{3, 1, 1, 3}, []int{2, 3}, 4, 3},
}

// loop returns the pool of x and the gradient by x of the sum of its products with dy.
func (p unevenPool) loop(x, dy []float64) (y, dx []float64) {
	dx = make([]float64, len(x))
	for image := 0; image < len(x); image += p.h * p.w {
		for oh := range p.outHeight {
			for ow := range p.outColumns {
				most := -1
				top, left := oh*p.stride[0]-p.pad[0], ow*p.stride[1]-p.pad[2]
				for i := max(0, top); i < min(p.h, top+p.kernel[0]); i++ {
					for j := max(0, left); j < min(p.w, left+p.kernel[1]); j++ {
						if at := image + i*p.w + j; most < 0 || x[at] > x[most] {
							most = at
						}
					}
				}
				dx[most] += dy[len(y)]
				y = append(y, x[most])
			}
		}
	}
	return y, dx
}

// A max pool with uneven padding begins at the padding north and west, as the caller wrote, forward
// and backward. Gorgonia's machines begin at the padding of the other side.
func TestUnevenPoolsAreWhatTheCallerWrote(t *testing.T) {
	for _, p := range unevenPools {
		for where, device := range devices {
			t.Run(p.name+" "+where, func(t *testing.T) { p.check(t, device(t)) })
		}
	}
}

// images are a batch of 2 with 2 channels.
func images(g *gorgonia.ExprGraph, name string, pixels []float64, h, w int) node {
	value := tensor.New(tensor.WithShape(2, 2, h, w), tensor.WithBacking(pixels))
	return gorgonia.NewTensor(g, tensor.Float64, 4, gorgonia.WithShape(2, 2, h, w),
		gorgonia.WithName(name), gorgonia.WithValue(value))
}

func (p unevenPool) check(t *testing.T, device backend.Device) {
	pixels, places := 4*p.h*p.w, 4*p.outHeight*p.outColumns
	x, dy := make([]float64, pixels), make([]float64, places)
	for i := range x {
		x[i] = float64(i*37%101 - 50)
	}
	for i := range dy {
		dy[i] = float64(i%7 + 1)
	}
	wantY, wantDX := p.loop(x, dy)
	m := &model{g: gorgonia.NewGraph()}
	image := images(m.g, "x", x, p.h, p.w)
	share := images(m.g, "dy", dy, p.outHeight, p.outColumns)
	y := must(gorgonia.MaxPool2D(image, p.kernel, p.pad, p.stride))
	m.params = nodes{image}
	m.grad(t, sum(times(y, share)))
	machine := machineOn(t, device, m.g, vm.Keep(y), vm.Notice(func(string) {}))
	for i := range 3 {
		run(t, machine)
		for what, pair := range map[string][2]any{
			"the value":    {y.Value().Data(), wantY},
			"the gradient": {image.Deriv().Value().Data(), wantDX},
		} {
			if !reflect.DeepEqual(pair[0], pair[1]) {
				t.Fatalf("run %d: %s is %v, want %v", i, what, pair[0], pair[1])
			}
		}
	}
}

// Gorgonia's AveragePool2D, whose Do divides by the width of the image, is the mean of each window,
// forward and backward. Padding counts as zeros.
func TestAveragePoolsAreMeans(t *testing.T) {
	for _, p := range averagePools {
		for where, device := range devices {
			t.Run(p.name+" "+where, func(t *testing.T) { p.checkMean(t, device(t)) })
		}
	}
}

var averagePools = []unevenPool{
	{"side by side", 4, 6, []int{2, 2}, []int{0, 0}, []int{2, 2}, 2, 3},
	{"overlapping", 4, 4, []int{2, 2}, []int{0, 0}, []int{1, 1}, 3, 3},
	{"padded", 4, 5, []int{4, 2}, []int{1, 1}, []int{2, 2}, 2, 3},
	{"the image", 4, 2, []int{4, 2}, []int{0, 0}, []int{1, 1}, 1, 1},
}

// mean returns the means of x and the gradient by x of their sum.
func (p unevenPool) mean(x []float64) (y, dx []float64) {
	dx, size := make([]float64, len(x)), float64(p.kernel[0]*p.kernel[1])
	for image := 0; image < len(x); image += p.h * p.w {
		for oh := range p.outHeight {
			for ow := range p.outColumns {
				total, top, left := 0.0, oh*p.stride[0]-p.pad[0], ow*p.stride[1]-p.pad[1]
				for i := max(0, top); i < min(p.h, top+p.kernel[0]); i++ {
					for j := max(0, left); j < min(p.w, left+p.kernel[1]); j++ {
						total += x[image+i*p.w+j]
						dx[image+i*p.w+j] += 1 / size
					}
				}
				y = append(y, total/size)
			}
		}
	}
	return y, dx
}

func (p unevenPool) checkMean(t *testing.T, device backend.Device) {
	x := make([]float64, 4*p.h*p.w)
	for i := range x {
		x[i] = float64(i*37%101 - 50)
	}
	wantY, wantDX := p.mean(x)
	m := &model{g: gorgonia.NewGraph()}
	image := images(m.g, "x", x, p.h, p.w)
	y := must(gorgonia.AveragePool2D(image, p.kernel, p.pad, p.stride))
	m.params = nodes{image}
	m.grad(t, sum(y))
	machine := machineOn(t, device, m.g, vm.Keep(y), vm.Notice(func(string) {}))
	for i := range 3 {
		run(t, machine)
		if got := y.Value().Data(); !reflect.DeepEqual(got, wantY) {
			t.Fatalf("run %d: the value is %v, want %v", i, got, wantY)
		}
		if got := image.Deriv().Value().Data(); !reflect.DeepEqual(got, wantDX) {
			t.Fatalf("run %d: the gradient is %v, want %v", i, got, wantDX)
		}
	}
}
