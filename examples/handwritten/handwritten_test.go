package handwritten_test

import (
	"fmt"
	"slices"
	"testing"

	"github.com/euryale-ml/euryale/examples/handwritten"
	"github.com/euryale-ml/euryale/internal/testing/require"
)

func TestHeldOutImagesAreNotTrainedOn(t *testing.T) {
	train, heldOut, err := handwritten.Load(3, []int{handwritten.Pixels})
	require.NoError(t, err)
	if heldOut.Count() != 359 || train.Count() != 1797-359 {
		t.Fatalf("%d and %d images", train.Count(), heldOut.Count())
	}
	seen := map[string]bool{}
	for row := range slices.Chunk(train.Images.Data().([]float32), handwritten.Pixels) {
		seen[fmt.Sprint(row)] = true
	}
	for row := range slices.Chunk(heldOut.Images.Data().([]float32), handwritten.Pixels) {
		if seen[fmt.Sprint(row)] {
			t.Errorf("a held-out image is also trained on: %v", row)
		}
	}
	again, _, err := handwritten.Load(3, []int{handwritten.Pixels})
	require.Check(t, err == nil && slices.Equal(again.Classes, train.Classes) &&
		slices.Equal(again.Images.Data().([]float32),
			train.Images.Data().([]float32)), "the same seed gives other images (%v)", err)
}
