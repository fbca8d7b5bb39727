package interpret

import (
	"fmt"
	"math"

	"github.com/euryale-ml/euryale/internal/kernels"
	"github.com/euryale-ml/euryale/internal/vm/ir"
	"github.com/euryale-ml/euryale/kernels/fuse"
)

// layer evaluates the operations of layers.
func (a arithmetic) layer(v ir.Value, args []Array) (Array, error) {
	switch op := v.Op.(type) {
	case ir.Convolution:
		return a.convolved(v, op, args), nil
	case ir.MaxPool:
		y := Array{Shape: v.Shape, Data: make([]Number, v.Shape.Size())}
		seen := rectified(args[0], op.Rectified)
		each(v.Shape, func(at int, i []int) {
			var window []Number
			for _, from := range inside(op.Window, seen.Shape, i) {
				window = append(window, seen.Data[from])
			}
			y.Data[at] = largest(window)
		})
		return y, nil
	case ir.MaxPoolGrad:
		return a.maxPoolGrad(v, op, args[0], args[1]), nil
	}
	return Array{}, fmt.Errorf("no such operation %T", v.Op)
}

// attentionOf are the operands of attention or its gradient, from which keys are hidden.
type attentionOf struct {
	ir.Attention
	q, k, v, mask Array
	lengths       []Number // nil for none
	starts        []Number // likewise
}

func operandsOf(op ir.Op, args []Array) attentionOf {
	o, mask, counts := ir.Hiding(op)
	x := attentionOf{Attention: o, q: args[0], k: args[1], v: args[2]}
	if mask >= 0 {
		x.mask = args[mask]
	}
	switch {
	case o.Lengths:
		x.lengths = args[counts].Data
	case o.Starts:
		x.starts = args[counts].Data
	}
	return x
}

// key returns which row of k and v is key j of query i, of all heads.
func (x *attentionOf) key(i, j int) int {
	heads, queries := x.q.Shape.At(1), x.q.Shape.At(2)
	shared, keys := x.k.Shape.At(1), x.k.Shape.At(2)
	entry, head := i/(heads*queries), i/queries%heads
	return (entry*shared+head/(heads/shared))*keys + j
}

// seen returns how many keys query i sees, masked ones included.
func (x *attentionOf) seen(i int) int {
	heads, queries, n := x.q.Shape.At(1), x.q.Shape.At(2), x.k.Shape.At(2)
	end := n
	if x.lengths != nil {
		n = min(n, int(x.lengths[i/(heads*queries)].Value))
	}
	if x.Appended {
		end = n
	}
	if x.Causal {
		n = min(n, i%queries+1+end-queries)
	}
	return max(n, 0)
}

// sees reports whether query i sees key j, of those that are seen: it is behind the start, and in
// the window.
func (x *attentionOf) sees(i, j int) bool {
	heads, queries, end := x.q.Shape.At(1), x.q.Shape.At(2), x.k.Shape.At(2)
	if x.starts != nil && float64(j) < x.starts[i/(heads*queries)*queries+i%queries].Value {
		return false
	}
	if x.Appended {
		end = max(0, min(end, int(x.lengths[i/(heads*queries)].Value)))
	}
	own := i%queries + end - queries // the last key of a causal query
	return x.Window == 0 || j > own-x.Window
}

// score returns the score of key j for query i, and the derivative of its cap.
func (a arithmetic) score(x *attentionOf, i, j int) (s, slope Number) {
	size, total := x.q.Shape.At(3), a.sum()
	for c := range size {
		total.product(x.q.Data[i*size+c], x.k.Data[x.key(i, j)*size+c])
	}
	s, slope = a.mul(total.result(), a.rounded(x.Scale, 0, false)), Number{Value: 1}
	if x.SoftCap > 0 {
		most := a.rounded(x.SoftCap, 0, false)
		t := a.do(fuse.Tanh, a.div(s, most))
		s, slope = a.mul(t, most), a.sub(slope, a.mul(t, t))
	}
	if x.mask.Data != nil {
		heads, queries, m := x.q.Shape.At(1), x.q.Shape.At(2), x.mask.Shape
		at := []int{i / (heads * queries), i / queries % heads, i % queries, j}
		for axis := range at {
			at[axis] %= m.At(axis)
		}
		if s = a.add(s, x.mask.Data[offsetOf(m, at)]); math.IsInf(s.Value, -1) {
			s.Err = 0
		}
	}
	return s, slope
}

// eachWeight calls f with each key that a query sees: the query among those of all heads, the row
// of k and v, the key's weight, and that times the derivative of the cap. It returns the logarithm
// of the sum of each query's exponentials.
func (a arithmetic) eachWeight(x *attentionOf, f func(query, key int, w, sloped Number)) Array {
	lse := Array{Shape: x.q.Shape.Without(3)}
	lse.Data = make([]Number, lse.Shape.Size())
	for i := range lse.Data {
		var scores, slopes []Number
		var keys []int
		for j := range x.seen(i) {
			if !x.sees(i, j) {
				continue
			}
			if s, slope := a.score(x, i, j); !math.IsInf(s.Value, -1) {
				scores, slopes, keys = append(scores, s), append(slopes, slope), append(keys,
					x.key(i, j))
			}
		}
		most, total := largest(scores), a.sum()
		for j := range scores {
			scores[j] = a.do(fuse.Exp, a.sub(scores[j], most))
			total.add(scores[j])
		}
		lse.Data[i] = a.add(most, a.do(fuse.Log, total.result()))
		for j := range scores {
			w := a.div(scores[j], total.result())
			f(i, keys[j], w, a.mul(w, slopes[j]))
		}
	}
	return lse
}

func (a arithmetic) attention(op ir.Attention, args []Array) []Array {
	x := operandsOf(op, args)
	width := x.v.Shape.At(3)
	shape := x.q.Shape.With(3, width)
	y := a.sums(shape)
	lse := a.eachWeight(&x, func(query, key int, w, _ Number) {
		for c := range width {
			y[query*width+c].product(w, x.v.Data[key*width+c])
		}
	})
	return []Array{results(shape, y), lse}
}

func (a arithmetic) attentionGrad(op ir.AttentionGrad, args []Array) []Array {
	x, y, dy := operandsOf(op, args), args[3], args[5]
	size, width := x.q.Shape.At(3), x.v.Shape.At(3)
	dq, dk, dv := a.sums(x.q.Shape), a.sums(x.k.Shape), a.sums(x.v.Shape)
	scale := a.rounded(op.Scale, 0, false)
	a.eachWeight(&x, func(query, key int, w, sloped Number) {
		ds := a.sum()
		for c := range width {
			of := dy.Data[query*width+c]
			ds.product(of, x.v.Data[key*width+c])
			ds.product(of, a.neg(y.Data[query*width+c]))
			dv[key*width+c].product(w, of)
		}
		each := a.mul(a.mul(ds.result(), sloped), scale)
		for c := range size {
			dq[query*size+c].product(each, x.k.Data[key*size+c])
			dk[key*size+c].product(each, x.q.Data[query*size+c])
		}
	})
	return []Array{results(x.q.Shape, dq), results(x.k.Shape, dk), results(x.v.Shape, dv)}
}

// rectified returns x without negative numbers.
func rectified(x Array, on bool) Array {
	if !on {
		return x
	}
	y := Array{Shape: x.Shape, Data: make([]Number, len(x.Data))}
	for i, e := range x.Data {
		y.Data[i] = Number{relu(e.Value), e.Err}
	}
	return y
}

// maxPoolGrad gives dy to the first largest element of each window, or to the last NaN. Where a
// bound leaves open which that is, any of those that it may be is wrong by dy.
func (a arithmetic) maxPoolGrad(v ir.Value, op ir.MaxPoolGrad, x, dy Array) Array {
	sums, seen := a.sums(v.Shape), rectified(x, op.Rectified)
	each(dy.Shape, func(at int, i []int) {
		places := inside(op.Window, x.Shape, i)
		winner, low := places[0], math.Inf(-1)
		for _, p := range places {
			if e := seen.Data[p]; e.Value > seen.Data[winner].Value || math.IsNaN(e.Value) {
				winner = p
			}
			low = max(low, seen.Data[p].Value-seen.Data[p].Err)
		}
		reaches := func(p int) bool { return !(seen.Data[p].Value+seen.Data[p].Err < low) }
		open := func(p int) bool {
			return x.Data[p].Err > 0 && reaches(p)
		}
		unsure := Number{0, math.Abs(dy.Data[at].Value) + dy.Data[at].Err}
		doubt := false
		for _, p := range places {
			if p != winner && (open(p) || open(winner) && reaches(p)) {
				sums[p].add(unsure)
				doubt = true
			}
		}
		most := x.Data[winner]
		kink := op.Rectified && most.Err > 0 && !(math.Abs(most.Value) > most.Err)
		if doubt || kink {
			sums[winner].add(unsure)
		}
		if !op.Rectified || !(x.Data[winner].Value < 0) {
			sums[winner].add(dy.Data[at])
		}
	})
	return results(v.Shape, sums)
}

// convolved evaluates a convolution or one of its gradients.
func (a arithmetic) convolved(v ir.Value, op ir.Convolution, args []Array) Array {
	dst := Array{Shape: v.Shape}
	x, w, y := args[0], args[1], dst
	switch op.Pass {
	case kernels.InputGradient:
		x, y = dst, args[0]
	case kernels.FilterGradient:
		w, y = dst, args[1]
	}
	sums, win, groups := a.sums(v.Shape), op.Window, max(op.Groups, 1)
	each(y.Shape, func(atY int, i []int) {
		first := i[1] / (w.Shape.At(0) / groups) * w.Shape.At(1) // channel of the group
		each(w.Shape.With(0, 1), func(_ int, k []int) {
			h := i[2]*win.StrideH - win.PadH + k[2]*win.DilationH
			column := i[3]*win.StrideW - win.PadW + k[3]*win.DilationW
			atW := offsetOf(w.Shape, []int{i[1], k[1], k[2], k[3]})
			if h < 0 || h >= x.Shape.At(2) || column < 0 || column >= x.Shape.At(3) {
				switch op.Pass {
				case kernels.Forward:
					sums[atY].padding(w.Data[atW])
				case kernels.FilterGradient:
					sums[atW].padding(y.Data[atY])
				}
				return
			}
			atX := offsetOf(x.Shape, []int{i[0], first + k[1], h, column})
			switch op.Pass {
			case kernels.Forward:
				sums[atY].product(x.Data[atX], w.Data[atW])
			case kernels.InputGradient:
				sums[atX].product(y.Data[atY], w.Data[atW])
			case kernels.FilterGradient:
				sums[atW].product(x.Data[atX], y.Data[atY])
			}
		})
	})
	return results(v.Shape, sums)
}

// pixel returns which pixel element i of the patches shows.
func pixel(w ir.Window, image ir.Dims, i []int) (c, h, column int, ok bool) {
	c = i[3] / (w.H * w.W)
	h = i[1]*w.StrideH - w.PadH + i[3]/w.W%w.H*w.DilationH
	column = i[2]*w.StrideW - w.PadW + i[3]%w.W*w.DilationW
	return c, h, column, h >= 0 && h < image.At(2) && column >= 0 && column < image.At(3)
}

// inside returns the places of the elements of window i that are in the image.
func inside(w ir.Window, image ir.Dims, i []int) (places []int) {
	for kh := range w.H {
		for kw := range w.W {
			h, column := i[2]*w.StrideH-w.PadH+kh*w.DilationH,
				i[3]*w.StrideW-w.PadW+kw*w.DilationW
			if h >= 0 && h < image.At(2) && column >= 0 && column < image.At(3) {
				places = append(places, offsetOf(image, []int{i[0], i[1], h, column}))
			}
		}
	}
	return places
}
