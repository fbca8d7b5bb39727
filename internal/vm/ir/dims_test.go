package ir_test

import (
	"testing"

	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/internal/vm/ir"
)

// TestReshapedViews: which reshapes of views need no copy.
func TestReshapedViews(t *testing.T) {
	tests := []struct {
		shape, strides, to, want ir.Dims
		ok                       bool
	}{
		{ir.Of(2, 3, 4), ir.Of(12, 4, 1), ir.Of(6, 4), ir.Of(4, 1), true},
		{ir.Of(4, 6), ir.Of(1, 4), ir.Of(4, 2, 3), ir.Of(1, 12, 4), true},
		{ir.Of(4, 6), ir.Of(1, 4), ir.Of(24), ir.Dims{}, false},
		{ir.Of(3, 4), ir.Of(0, 1), ir.Of(3, 2, 2), ir.Of(0, 2, 1), true},
		{ir.Of(3, 4), ir.Of(0, 1), ir.Of(12), ir.Dims{}, false},
		{ir.Of(2, 3), ir.Of(0, 0), ir.Of(6), ir.Of(0), true},
		{ir.Of(4, 1, 3), ir.Of(8, 7, 2), ir.Of(1, 4, 3, 1), ir.Of(0, 8, 2, 0), true},
		{ir.Of(4, 3), ir.Of(8, 1), ir.Of(2, 2, 3), ir.Of(16, 8, 1), true},
		{ir.Of(4, 3), ir.Of(8, 1), ir.Of(2, 6), ir.Dims{}, false},
	}
	for _, test := range tests {
		got, ok := ir.Reshaped(test.shape, test.strides, test.to)
		for i := range test.to.Len() { // the stride of an axis of length 1 is of no account
			if ok && test.to.At(i) == 1 {
				got = got.With(i, test.want.At(i))
			}
		}
		require.Check(t, ok == test.ok && (!ok || got == test.want),
			"%v/%v as %v: %v %v, want %v %v", test.shape, test.strides, test.to, got, ok, test.want,
			test.ok)
	}
}
