package nn

import (
	"testing"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/ops"
)

// TestSlotsAreQueuesOfExperts: the second sample begins anew, and what comes too late has no slot.
func TestSlotsAreQueuesOfExperts(t *testing.T) {
	slots := two(func(choices, gates *gorgonia.Node) (*gorgonia.Node, error) {
		y, _, err := Slots(3, 2, choices, gates)
		return y, err
	})
	kept := two(func(choices, gates *gorgonia.Node) (*gorgonia.Node, error) {
		return apply(keptSpec{3, 2}, choices, gates) // no other result: lisp machines want one
	})
	choices := indices([]int{2, 5}, 1, 0, 1, 1, 2, 2, 2, 2, 9, 1)
	// rows of [3 experts, 2 samples, 2 places]
	checkInts(t, []operand{choices, count(2, 5)}, slots, []int{2, 5}, 4, 0, 5, 0, 8, 10, 11, 0, 0,
		6)
	in := []operand{choices, count(2, 5)}
	checkForward(t, in, kept, of([]int{2, 5}, 1, 2, 3, 0, 5, 6, 7, 0, 0, 10), 0)
	checkGradient(t, in, kept)
	deep := indices([]int{1, 2, 2}, 1, 1, 1, 0)
	checkInts(t, []operand{deep, count(1, 2, 2)}, slots, []int{1, 2, 2}, 2, 3, 0, 0)
	checkDistinct(t, in, slots, kept)
}

func TestSlotsErrors(t *testing.T) {
	g := gorgonia.NewGraph()
	choices := indices([]int{1, 2}, 0, 1).node(g, "c", tensor.Int)
	gates := count(1, 2).node(g, "g", tensor.Float64)
	_, _, err := Slots(0, 1, choices, gates)
	checkRefused(t, err, backend.ErrArgument, "0 experts with 1 slots")
	_, _, err = Slots(1<<20, 1<<20, choices, gates)
	checkRefused(t, err, backend.ErrArgument, "at most 16777216")
	_, _, err = Slots(1<<40, 1<<40, choices, gates) // whose product is 0 in 64 bits
	checkRefused(t, err, backend.ErrArgument, "at most 16777216")
	_, _, err = Slots(1, 1, gates, gates)
	checkRefused(t, err, ops.ErrDType, "choices are float64, not Int")
	_, _, err = Slots(1, 1, choices, count(2, 1).node(g, "h", tensor.Float64))
	checkRefused(t, err, ops.ErrShape, "choices have shape (1, 2)")
}
