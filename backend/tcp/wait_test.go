package tcp

import (
	"fmt"
	"testing"

	"github.com/euryale-ml/euryale/backend"
)

// Rank 0 of four waits in a two-shot all-reduce of 64 bytes to each. Who owes it a sum may miss an
// operand, too, and who owes it an operand waits for nobody.
func TestLateIsWhoWaitsForNobody(t *testing.T) {
	const operand = backend.HeaderSize + 64
	for _, c := range []struct {
		moved []int // bytes that have come from ranks 1, 2 and 3
		late  []int
		sure  bool
	}{
		{[]int{operand, 0, operand}, []int{2}, true},
		{[]int{operand, operand - 1, backend.HeaderSize}, []int{2, 3}, true},
		{[]int{operand + 64, 0, operand}, []int{2}, true},
		{[]int{operand + 64, operand, operand + 63}, []int{2, 3}, false},
		{[]int{operand + 64, operand + 64, operand + 64}, nil, false},
	} {
		result := backend.Of(make([]float32, 16))
		e := engine{links: []*link{nil, {}, {}, {}}, relay: relay{result: result, from: everyone,
			asked: result.Len()}}
		for i, moved := range c.moved {
			in := &e.links[i+1].in
			in.reset(0)
			in.add(make([]byte, operand+64))
			in.advance(moved)
		}
		if late, sure := e.stragglers(); fmt.Sprint(late) != fmt.Sprint(c.late) || sure != c.sure {
			t.Errorf("of %v bytes: %v are late, for sure: %v; want %v, %v", c.moved, late, sure,
				c.late, c.sure)
		}
	}
}
