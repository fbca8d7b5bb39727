package exec

import (
	"testing"

	"github.com/euryale-ml/euryale/internal/testing/require"
)

// Also the last one of what a goroutine compares.
func TestEachByteIsComparedRaced(t *testing.T) {
	for _, size := range []int{0, 5, 2*comparedAtOnce - 1, 7*comparedAtOnce + 3} {
		a, b := make([]byte, size), make([]byte, size)
		require.Check(t, equal(a, b), "%d bytes: equal ones differ", size)
		for i := 0; i < size; i += max(1, size/1000) {
			if b[i] = 1; equal(a, b) {
				t.Errorf("%d bytes: byte %d is not compared", size, i)
			}
			b[i] = 0
		}
		require.Check(t, !equal(a, append(b, 0)), "%d bytes: one more is equal", size)
		if size > 0 {
			if b[size-1] = 1; equal(a, b) {
				t.Errorf("%d bytes: the last one is not compared", size)
			}
		}
	}
}
