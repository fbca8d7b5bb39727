package interpret

import (
	"fmt"
	"math"

	"github.com/euryale-ml/euryale/kernels"
	"github.com/euryale-ml/euryale/kernels/fuse"
	"github.com/euryale-ml/euryale/vm/internal/ir"
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

// eachWeight calls f with each key that a query sees: their places in the arrays, and the key's
// weight. It returns the logarithm of the sum of each query's exponentials.
func (a arithmetic) eachWeight(
	causal bool, scale float64, q, k Array, f func(query, key int, weight Number),
) Array {
	queries, keys, size := q.Shape.At(2), k.Shape.At(2), q.Shape.At(3)
	lse := Array{Shape: q.Shape.Without(3), Data: make([]Number, q.Shape.Without(3).Size())}
	for i := range lse.Data {
		var scores []Number
		for j := range keys {
			if causal && j > i%queries+keys-queries {
				break
			}
			s := a.sum()
			for c := range size {
				s.product(q.Data[i*size+c], k.Data[(i/queries*keys+j)*size+c])
			}
			scores = append(scores, a.mul(s.result(), a.rounded(scale, 0, false)))
		}
		most, total := largest(scores), a.sum()
		for j := range scores {
			scores[j] = a.do(fuse.Exp, a.sub(scores[j], most))
			total.add(scores[j])
		}
		lse.Data[i] = a.add(most, a.do(fuse.Log, total.result()))
		for j := range scores {
			f(i*size, (i/queries*keys+j)*size, a.div(scores[j], total.result()))
		}
	}
	return lse
}

func (a arithmetic) attention(op ir.Attention, args []Array) []Array {
	q, k, v := args[0], args[1], args[2]
	y := a.sums(q.Shape)
	lse := a.eachWeight(op.Causal, op.Scale, q, k, func(query, key int, w Number) {
		for c := range q.Shape.At(3) {
			y[query+c].product(w, v.Data[key+c])
		}
	})
	return []Array{results(q.Shape, y), lse}
}

func (a arithmetic) attentionGrad(op ir.AttentionGrad, args []Array) []Array {
	q, k, v, y, dy := args[0], args[1], args[2], args[3], args[5]
	dq, dk, dv := a.sums(q.Shape), a.sums(k.Shape), a.sums(k.Shape)
	scale := a.rounded(op.Scale, 0, false)
	a.eachWeight(op.Causal, op.Scale, q, k, func(query, key int, w Number) {
		ds := a.sum()
		for c := range q.Shape.At(3) {
			ds.product(dy.Data[query+c], v.Data[key+c])
			ds.product(dy.Data[query+c], a.neg(y.Data[query+c]))
		}
		each := a.mul(a.mul(ds.result(), w), scale)
		for c := range q.Shape.At(3) {
			dq[query+c].product(each, k.Data[key+c])
			dk[key+c].product(each, q.Data[query+c])
			dv[key+c].product(w, dy.Data[query+c])
		}
	})
	return []Array{results(q.Shape, dq), results(k.Shape, dk), results(k.Shape, dv)}
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
		open := func(p int) bool {
			return x.Data[p].Err > 0 && seen.Data[p].Value+seen.Data[p].Err >= low
		}
		unsure := Number{0, math.Abs(dy.Data[at].Value) + dy.Data[at].Err}
		doubt := false
		for _, p := range places {
			reaches := seen.Data[p].Value+seen.Data[p].Err >= low
			if p != winner && (open(p) || open(winner) && reaches) {
				sums[p].add(unsure)
				doubt = true
			}
		}
		most := x.Data[winner]
		kink := op.Rectified && most.Err > 0 && math.Abs(most.Value) <= most.Err
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
			if h < 0 || h >= x.Shape.At(2) || column < 0 || column >= x.Shape.At(3) {
				return
			}
			atX := offsetOf(x.Shape, []int{i[0], first + k[1], h, column})
			atW := offsetOf(w.Shape, []int{i[1], k[1], k[2], k[3]})
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
