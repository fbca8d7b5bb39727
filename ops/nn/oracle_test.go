package nn

import (
	"fmt"
	"math"
	"slices"
	"sync"
	"testing"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/backend"
)

// looped computes an operation by the loops of loops_test.go.
func looped[T float](s spec, y array[T], x []array[T]) error {
	switch s := s.(type) {
	case geluSpec:
		return gelu(s, y, x[0])
	case softMaxSpec:
		return softmax(s, y, x[0])
	case layerNormSpec:
		return layerNorm(s, y, x[0], x[1], x[2])
	case normSpec:
		return norm(s, y, x[0])
	case crossEntropySpec:
		return crossEntropy(s, y, x[0], x[1].ints)
	case backSpec:
		n := len(x) - 2
		return loopedBack(s.Forward, s.Operand, y, x[:n], x[n], x[n+1])
	case dropoutSpec:
		return dropout(s, y, x[0])
	}
	return loopedMoves(s, y, x)
}

// loopedBack computes the gradient of an operation by operand i.
func loopedBack[T float](s spec, i int, dx array[T], x []array[T], y, dy array[T]) error {
	switch s := s.(type) {
	case geluSpec:
		return geluGrad(s, dx, x[0], dy)
	case softMaxSpec:
		return softmaxGrad(s, dx, y, dy)
	case layerNormSpec:
		switch i {
		case 0:
			return layerNormGrad(s, dx, x[0], x[1], dy)
		case 1:
			return layerNormGainGrad(s, dx, x[0], dy)
		}
		return layerNormBiasGrad(dx, dy)
	case normSpec:
		return normGrad(s, dx, x[0], y, dy)
	case crossEntropySpec:
		return crossEntropyGrad(s, dx, x[0], x[1].ints, dy)
	case attentionSpec:
		return attentionGrad(s, i, dx, x, y, dy)
	}
	return loopedBasicsBack(s, i, dx, x, y, dy)
}

// loopedMoves is looped of operations that move and multiply.
func loopedMoves[T float](s spec, y array[T], x []array[T]) error {
	switch s := s.(type) {
	case sliceSpec:
		return slice(s, y, x[0])
	case unsliceSpec:
		return unslice(s, y, x[0])
	case concatSpec:
		return concat(s, y, x)
	case byIndicesSpec:
		return byIndices(s, y, x[0], x[1].ints)
	case byIndicesGradSpec:
		return byIndicesGrad(s, y, x[0], x[1].ints)
	case batchedMatMulSpec:
		return batchedMatMul(s, y, x[0], x[1])
	case outerProdSpec:
		return outer(y, x[0], x[1])
	case matVecSpec:
		return matVec(s, y, x[0], x[1])
	case attentionSpec:
		return attention(s, y, x)
	case convSpec:
		return convolution(s, y, x)
	case channelSumSpec:
		return channelSum(y, x[0])
	case channelSpreadSpec:
		return channelSpread(y, x[0])
	case maxPool2DSpec:
		return maxPool(s, y, x[0])
	case maxPool2DGradSpec:
		return maxPoolGrad(s, y, x[0], x[1])
	case avgPool2DSpec:
		return avgPool(s, y, x[0])
	case avgPool2DGradSpec:
		return avgPoolGrad(s, y, x[0])
	}
	return loopedBasics(s, y, x)
}

// elementsOf returns an operand of loops.
func elementsOf[T float](t *testing.T, v gorgonia.Value) array[T] {
	t.Helper()
	memory, err := elements(v)
	if err != nil {
		t.Fatal(err)
	}
	x := array[T]{shape: v.Shape()}
	switch {
	case v.Dtype() == tensor.Int:
		x.ints = integers(memory)
	case memory.DType() == backend.F32:
		x.data = convert[T](backend.View[float32](memory))
	default:
		x.data = convert[T](backend.View[float64](memory))
	}
	return x
}

func convert[T, S float](x []S) []T {
	y := make([]T, len(x))
	for i, v := range x {
		y[i] = T(v)
	}
	return y
}

// agreesWithLoop compares the result of Do with the loop's in float64: they may differ by a share
// of the largest element of it.
func agreesWithLoop(t *testing.T, o *Op, x []gorgonia.Value) gorgonia.Value {
	t.Helper()
	tolerance := 1e-13
	if o.dtype == tensor.Float32 {
		tolerance = 4e-6
	}
	var wide []array[float64]
	for _, v := range x {
		wide = append(wide, elementsOf[float64](t, v))
	}
	want := array[float64]{shape: o.out, data: make([]float64, product(o.out))}
	if err := looped(o.spec, want, wide); err != nil {
		t.Fatal(err)
	}
	largest := 1.0
	for _, w := range want.data {
		largest = max(largest, math.Abs(w))
	}
	for range 3 {
		if m, _ := o.Mask(); m != nil {
			m.Random.Seek(m.Random.Step(), m.Random.First())
		}
		y, err := o.Do(x...)
		if err != nil {
			t.Fatal(err)
		}
		for i, v := range elementsOf[float64](t, y).data {
			if w := want.data[i]; !(math.Abs(v-w) <= tolerance*largest) && !(v != v && w != w) {
				t.Fatalf("%v of %v: element %d is %v, want %v", o, o.in, i, v, w)
			}
		}
	}
	return filledLike(t, o, want.data)
}

// filledLike returns a value of the result's shape and dtype.
func filledLike(t *testing.T, o *Op, data []float64) gorgonia.Value {
	t.Helper()
	y, memory, err := fresh(o.out, o.dtype)
	if err != nil {
		t.Fatal(err)
	}
	for i, v := range data {
		if o.dtype == tensor.Float32 {
			backend.View[float32](memory)[i] = float32(v)
		} else {
			backend.View[float64](memory)[i] = v
		}
	}
	return y
}

// oracleCases are operations on operands of many forms: short rows and long ones, rows that a loop
// folds, and axes that it does not.
func oracleCases() map[string]struct {
	in    []operand
	build builder
} {
	type example = struct {
		in    []operand
		build builder
	}
	all := map[string]example{}
	add := func(build builder, in ...operand) { all[fmt.Sprint(len(all))] = example{in, build} }
	for _, shape := range [][]int{nil, {1}, {7}, {3, 1}, {1, 5}, {3, 4}, {2, 3, 5}, {2, 9000},
		{70, 8200}, {5, 1100}} {
		x := normal(1, shape...)
		add(one(GELU), x)
		add(one(GELUTanh), x)
		if len(shape) == 0 {
			continue
		}
		n := shape[len(shape)-1]
		add(normed(1e-5), x, normal(2, n), normal(3, n))
		add(dropper(0.3, NewRandom(5)), x)
		for axis := range shape {
			if product(shape[:axis]) > 1 && len(x.data) > 1e5 || len(x.data) > 1e5 && axis == 0 {
				continue
			}
			add(softmaxer(axis), x)
			add(logSoftmaxer(axis), x)
			add(pNorm(1+n%4, axis), x)
			add(slicer(axis, shape[axis]/2, shape[axis], 2), x)
			add(concatenated(axis), x, x, x)
			add(two(func(x, i *gorgonia.Node) (*gorgonia.Node, error) {
				return ByIndices(axis, x, i)
			}), x, drawnLabels(shape[axis], 3, 2))
		}
		if len(shape) > 1 {
			for _, ignore := range []int{NoLabel, 0} {
				add(two(func(x, l *gorgonia.Node) (*gorgonia.Node, error) {
					o := CrossEntropyOptions{Ignore: ignore, IgnoreFirst: ignore == 0}
					return CrossEntropyWith(o, x, l)
				}),
					x, drawnLabels(n, shape[:len(shape)-1]...))
			}
		}
	}
	for trans := range 4 {
		a, b := normal(1, 2, 3, 4, 5), normal(2, 2, 3, 5, 6)
		if trans&1 > 0 {
			a = normal(1, 2, 3, 5, 4)
		}
		if trans&2 > 0 {
			b = normal(2, 2, 3, 6, 5)
		}
		add(multiplied(trans&1 > 0, trans&2 > 0), a, b)
	}
	add(two(OuterProd), normal(1, 7), normal(2, 3))
	for _, causal := range []bool{false, true} {
		add(attended(AttentionOptions{Causal: causal}), normal(1, 2, 3, 5, 4),
			normal(2, 2, 3, 7, 4), normal(3, 2, 3, 7, 4))
		add(attended(AttentionOptions{Causal: causal}), normal(1, 1, 2, 70, 9),
			normal(2, 1, 2, 66, 9), normal(3, 1, 2, 66, 9))
	}
	for _, o := range hidingOptions {
		add(attended(o.AttentionOptions), o.operands()...)
	}
	for _, w := range [][3]int{{2, 0, 2}, {3, 1, 2}, {3, 1, 1}, {5, 0, 1}, {4, 3, 3}} {
		add(averaged(w[0], w[1], w[2]), normal(1, 2, 3, 5, 5))
	}
	basicCases(add)
	imageCases(add)
	return all
}

// drawnLabels makes labels, or indices, of n things.
func drawnLabels(n int, shape ...int) operand {
	x := indices(shape, make([]int, product(shape))...)
	for i := range x.ints {
		x.ints[i] = i * 7919 % n
	}
	return x
}

// TestDoIsWhatLoopsCompute: results and gradients of every operation, and the gradients of those,
// agree with plain loops.
func TestDoIsWhatLoopsCompute(t *testing.T) {
	seen := map[string]bool{}
	for _, test := range oracleCases() {
		for _, dt := range []tensor.Dtype{tensor.Float32, tensor.Float64} {
			_, x, y := graph(t, dt, test.in, test.build)
			var values []gorgonia.Value
			for _, n := range x {
				values = append(values, n.Value())
			}
			agreeWithLoops(t, y.Op().(*Op), values, seen, 2)
		}
	}
	if len(seen) != 52 {
		t.Errorf("%d kinds of operations were computed, want all 52: %v", len(seen), seen)
	}
}

// agreeWithLoops compares an operation, and its gradients to a depth.
func agreeWithLoops(t *testing.T, o *Op, x []gorgonia.Value, seen map[string]bool,
	depth int) {
	t.Helper()
	if back, ok := o.spec.(backSpec); ok {
		seen[fmt.Sprintf("%T %d", back.Forward, back.Operand)] = true
	}
	seen[fmt.Sprintf("%T", o.spec)] = true
	y := agreesWithLoop(t, o, x)
	back, gradients, err := o.backward()
	if err != nil || depth == 0 {
		return // it has none
	}
	dy := filledLike(t, o, normal(9, o.out...).data)
	for i, g := range gradients {
		if back[i] != nil {
			agreeWithLoops(t, back[i], choose(g.of, x, y, dy), seen, depth-1)
		}
	}
}

// TestAnOperationRunsOnSeveralGoroutines: each run has memory of its own.
func TestAnOperationRunsOnSeveralGoroutines(t *testing.T) {
	_, x, y := graph(t, tensor.Float64, []operand{normal(1, 40, 300)}, softmaxer(0))
	op := y.Op()
	want, err := op.Do(x[0].Value())
	if err != nil {
		t.Fatal(err)
	}
	var group sync.WaitGroup
	for range 8 {
		group.Go(func() {
			for range 20 {
				got, err := op.Do(x[0].Value())
				if err != nil || !slices.Equal(numbers(t, got), numbers(t, want)) {
					t.Errorf("another result, or %v", err)
				}
			}
		})
	}
	group.Wait()
}
