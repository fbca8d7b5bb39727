package simd

import "testing"

func TestLevelsEndWithTheBest(t *testing.T) {
	levels := Levels()
	for i, l := range levels {
		if l != Level(i) || l.String() == "" {
			t.Errorf("level %d is %d, %v", i, int(l), l)
		}
	}
	if last := levels[len(levels)-1]; last != Best() {
		t.Errorf("the last level is %v, the best one %v", last, Best())
	}
}
