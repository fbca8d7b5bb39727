package nn

import (
	"math"
	"slices"
	"testing"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/ops"
)

// dropped returns what a Dropout makes of ones.
func dropped(t *testing.T, random *Random, dt tensor.Dtype, p float64, rows, columns int,
	options ...gorgonia.VMOpt) []float64 {
	t.Helper()
	x := count(rows, columns)
	for i := range x.data {
		x.data[i] = 1
	}
	g, _, y := graph(t, dt, []operand{x}, dropper(p, random))
	var v gorgonia.Value
	gorgonia.Read(y, &v)
	runAll(t, gorgonia.NewTapeMachine(g, options...))
	return numbers(t, v)
}

func dropper(p float64, random *Random) builder {
	return one(func(x *gorgonia.Node) (*gorgonia.Node, error) { return Dropout(p, random, x) })
}

func TestDropout(t *testing.T) {
	for _, p := range []float64{0, 0.25, 0.5} {
		y := dropped(t, NewRandom(1), tensor.Float64, p, 100, 99)
		kept := 0
		for _, v := range y {
			if v != 0 {
				kept++
				if math.Abs(v-1/(1-p)) > 1e-15 {
					t.Fatalf("p %v: an element that is kept is %v", p, v)
				}
			}
		}
		// 4 standard deviations
		if share := float64(kept) / float64(len(y)); math.Abs(share-(1-p)) > 0.02 {
			t.Errorf("p %v: %v of the elements are kept", p, share)
		}
	}
	if y := dropped(t, NewRandom(1), tensor.Float64, 0.5, 2, 5,
		gorgonia.EvalMode()); slices.Contains(y, 0) || slices.Contains(y, 2) {
		t.Errorf("in evaluation ones become %v", y)
	}
}

// The mask follows from seed, operation, step, sample and element, and from nothing else.
func TestMasks(t *testing.T) {
	const p, rows, columns = 0.5, 8, 10
	mask := func(seed uint32, op int, step uint64, first, rows int) []float64 {
		r := NewRandom(seed)
		r.Seek(step, first)
		for range op {
			r.operation()
		}
		return dropped(t, r, tensor.Float64, p, rows, columns)
	}
	whole := mask(1, 2, 3, 0, rows)
	require.Check(t, slices.Equal(whole, mask(1, 2, 3, 0, rows)), "two runs differ")
	require.Check(t, slices.Equal(whole, slices.Concat(mask(1, 2, 3, 0, 3), mask(1, 2, 3, 3, 5))),
		"a batch that two ranks share has another mask")
	for _, other := range [][]float64{mask(2, 2, 3, 0, rows), mask(1, 1, 3, 0, rows),
		mask(1, 2, 4, 0, rows), mask(1, 2, 3, 1, rows)} {
		require.Check(t, !slices.Equal(whole, other), "two masks are equal that must differ")
	}
	small := NewRandom(1)
	small.Seek(3, 0)
	small.operation()
	small.operation()
	require.Check(t, slices.Equal(whole, dropped(t, small, tensor.Float32, p, rows, columns)),
		"float32 has another mask")
}

// The gradient has the mask and the scale of the forward pass: it is y/x, with w = 1.
func TestDropoutGradient(t *testing.T) {
	for _, lisp := range []bool{false, true} {
		random := NewRandom(5)
		random.Seek(7, 3)
		x := normal(1, 20, 7)
		y := dropped(t, randomLike(random), tensor.Float64, 0.2, 20, 7)
		dx := gradients(t, []operand{x}, dropper(0.2, random), lisp)[0]
		w := weights(tensor.Shape{20, 7}).data
		for i := range dx {
			if math.Abs(dx[i]-w[i]*y[i]) > 1e-12 {
				t.Fatalf("lisp %v: the gradient of element %d is %v, want %v", lisp, i, dx[i],
					w[i]*y[i])
			}
		}
	}
}

// randomLike returns one at the same place.
func randomLike(r *Random) *Random {
	other := NewRandom(r.Seed())
	other.Seek(r.Step(), r.First())
	return other
}

// A second run at one step is an error; Next and Seek allow one more.
func TestDropoutWantsNext(t *testing.T) {
	random := NewRandom(1)
	g, _, y := graph(t, tensor.Float64, []operand{count(2, 8)}, dropper(0.5, random))
	op := y.Op()
	x := g.Inputs()[0].Value()
	first := require.Value(op.Do(x))(t)
	require.Fails(t, "a second run at one step", require.Err(op.Do(x)), backend.ErrArgument)
	random.Next(0)
	second, err := op.Do(x)
	if err != nil || random.Step() != 1 {
		t.Fatal(err, random.Step())
	}
	random.Seek(0, 0)
	third := require.Value(op.Do(x))(t)
	require.Check(t, !slices.Equal(numbers(t, first), numbers(t, second)) && slices.Equal(numbers(t,
		first), numbers(t, third)), "masks of steps 0, 1, 0: %v, %v, %v", first, second, third)
}

func TestDropoutErrors(t *testing.T) {
	g := gorgonia.NewGraph()
	x := count(2, 3).node(g, "x", tensor.Float64)
	for _, p := range []float64{-0.1, 1, math.NaN()} {
		_, err := Dropout(p, NewRandom(0), x)
		checkRefused(t, err, backend.ErrArgument, "the probability is")
	}
	_, err := Dropout(0.5, nil, x)
	checkRefused(t, err, backend.ErrArgument, "random is nil: make one with NewRandom")
	_, err = Dropout(0.5, NewRandom(0), gorgonia.NewScalar(g, gorgonia.Float64,
		gorgonia.WithName("s")))
	checkRefused(t, err, ops.ErrShape, "x is a scalar")
	random := NewRandom(0)
	a, errA := Dropout(0.5, random, x)
	b, errB := Dropout(0.5, random, x)
	if errA != nil || errB != nil || a == b {
		t.Error("two Dropouts of one x are one node", errA, errB)
	}
}
