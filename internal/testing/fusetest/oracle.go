package fusetest

import (
	"fmt"
	"math"
	"slices"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/kernels"
	"github.com/euryale-ml/euryale/kernels/fuse"
)

// number is a value: f of floats, i of integers. A result may be off by err, and loose says
// that it may be anything: rounded functions were used.
type number struct {
	t     backend.DType
	f     float64
	i     int64
	err   float64
	loose bool
}

// result is what an element of an output must be; one that is not written stays as it was.
type result struct {
	number
	written bool
	before  uint64 // its bits
}

// expect runs the interpreter on the memory of the case.
func (c *Case) expect() {
	p := c.Program
	for _, b := range c.Dst {
		list := make([]result, b.Len())
		for i := range list {
			list[i].before = bits(b, i)
		}
		c.want = append(c.want, list)
	}
	folds := map[[2]int][]number{} // of output and place
	index := make([]int, len(p.Shape))
	for {
		row := [][]int{slices.Clone(index)}
		more := advance(index, p.Shape)
		for more && index[len(index)-1] != 0 {
			row = append(row, slices.Clone(index))
			more = advance(index, p.Shape)
		}
		for i, values := range c.row(row) {
			for k, out := range p.Outputs {
				at := offset(row[i], out.Strides)
				if out.Folded {
					folds[[2]int{k, at}] = append(folds[[2]int{k, at}], values[out.Value])
				} else {
					c.want[k][at].number, c.want[k][at].written = values[out.Value], true
				}
			}
		}
		if !more {
			break
		}
	}
	for place, list := range folds {
		k, at := place[0], place[1]
		c.want[k][at].number, c.want[k][at].written = fold(p.Outputs[k].Op, list), true
	}
}

// advance goes to the next index in row-major order.
func advance(index, shape []int) bool {
	for k := len(shape) - 1; k >= 0; k-- {
		if index[k]++; index[k] < shape[k] {
			return true
		}
		index[k] = 0
	}
	return false
}

func offset(index, strides []int) (at int) {
	for k := range index {
		at += index[k] * strides[k]
	}
	return at
}

// row returns all values of each element of a row of the loop.
func (c *Case) row(row [][]int) [][]number {
	values := make([][]number, len(row))
	for k, in := range c.Program.Code {
		if in.Op.FoldsRows() {
			var all []number
			for i := range row {
				all = append(all, values[i][in.Args[0]])
			}
			folded := fold(map[fuse.Op]backend.ReduceOp{fuse.SumRow: backend.Sum,
				fuse.MaxRow: backend.Max, fuse.MinRow: backend.Min}[in.Op], all)
			for i := range row {
				values[i] = append(values[i], folded)
			}
			continue
		}
		for i, index := range row {
			values[i] = append(values[i], c.value(k, index, values[i]))
		}
	}
	return values
}

// value returns value k of one element, given those before it.
func (c *Case) value(k int, index []int, values []number) number {
	p, in := c.Program, c.Program.Code[k]
	switch in.Op {
	case fuse.Load:
		return get(c.Src[in.Args[0]], offset(index, p.Inputs[in.Args[0]].Strides))
	case fuse.Const:
		return number{t: in.Type, f: math.Float64frombits(in.Bits), i: int64(in.Bits)}
	case fuse.Index:
		return number{t: in.Type, i: int64(offset(index, p.Indices[in.Args[0]]))}
	}
	var args []number
	for _, x := range in.Args[:in.Op.Operands()] {
		args = append(args, values[x])
	}
	return apply(in.Op, in.Type, args)
}

// get returns an element in the type in which it is computed.
func get(b backend.Buffer, i int) number {
	t := fuse.Type(b.DType())
	switch b.DType() {
	case backend.U8:
		return number{t: t, i: int64(b.Bytes()[i])}
	case backend.I32:
		return number{t: t, i: int64(backend.View[int32](b)[i])}
	case backend.I64:
		return number{t: t, i: backend.View[int64](b)[i]}
	case backend.F64:
		return number{t: t, f: backend.View[float64](b)[i]}
	}
	var wide [1]float64
	if err := (kernels.Host{}).Cast(backend.Of(wide[:]), b.Slice(i, i+1)); err != nil {
		panic(err)
	}
	return number{t: t, f: wide[0]}
}

// put stores a float64 or an int64 as an element.
func put(b backend.Buffer, i int, x any) {
	switch x := x.(type) {
	case float64:
		if b.DType() != backend.F64 { // rounded to float32 first, as values are
			x = float64(float32(x))
		}
		if err := (kernels.Host{}).Cast(b.Slice(i, i+1), backend.Of([]float64{x})); err != nil {
			panic(err)
		}
	case int64:
		switch b.DType() {
		case backend.U8:
			b.Bytes()[i] = byte(x)
		case backend.I32:
			backend.View[int32](b)[i] = int32(x)
		case backend.I64:
			backend.View[int64](b)[i] = x
		}
	}
}

// bits returns the bits of an element.
func bits(b backend.Buffer, i int) (x uint64) {
	size := b.DType().Size()
	for k, e := range b.Bytes()[i*size : (i+1)*size] {
		x |= uint64(e) << (8 * k)
	}
	return x
}

// Check compares outputs with what they must be. Every bit counts, except those of a NaN, and
// behind rounded functions and in folds, where a result may be off by the bound of its error;
// checked is the part of the elements that have one.
func (c *Case) Check(dst []backend.Buffer) (checked float64, err error) {
	all, loose := 0, 0
	for k, list := range c.want {
		for i, want := range list {
			all++
			if want.loose {
				loose++
				continue
			}
			if !want.same(dst[k], i) {
				return 0, fmt.Errorf("output %d, element %d is %v (%x), want %v, in\n%v", k, i,
					get(dst[k], i), bits(dst[k], i), want, c.Program)
			}
		}
	}
	return 1 - float64(loose)/float64(all), nil
}

// Equal compares the outputs of another run with dst, bit by bit, except NaN.
func (c *Case) Equal(dst, other []backend.Buffer) error {
	for k, list := range c.want {
		for i, want := range list {
			x, y := dst[k], other[k]
			if nan := get(x, i).f != get(x, i).f && get(y, i).f != get(y, i).f; want.written &&
				!nan && bits(x, i) != bits(y, i) {
				return fmt.Errorf("output %d, element %d is %v (%x), not %v (%x), in\n%v", k, i,
					get(y, i), bits(y, i), get(x, i), bits(x, i), c.Program)
			}
		}
	}
	return nil
}

// same compares one element.
func (r result) same(b backend.Buffer, i int) bool {
	if !r.written {
		return bits(b, i) == r.before
	}
	if !b.DType().Float() {
		one := backend.Of([]int64{0}).As(b.DType()).Slice(0, 1)
		put(one, 0, r.i)
		return bits(b, i) == bits(one, 0)
	}
	one := backend.Of([]float64{0}).As(b.DType()).Slice(0, 1)
	put(one, 0, r.f)
	got, want := get(b, i).f, get(one, 0).f
	switch {
	case got != got || want != want:
		return got != got && want != want
	case bits(b, i) == bits(one, 0):
		return true
	case r.err == 0 || math.IsInf(want, 0):
		return false
	}
	return math.Abs(got-want) <= r.err+2*ulp(b.DType(), want)
}

// ulp returns the distance of floats at x, or more.
func ulp(d backend.DType, x float64) float64 {
	x = math.Abs(x)
	switch d {
	case backend.F16:
		return x*0x1p-10 + 0x1p-24
	case backend.BF16:
		return x*0x1p-7 + 0x1p-133
	case backend.F32:
		return x*0x1p-23 + 0x1p-149
	}
	return x*0x1p-52 + 0x1p-1074
}
