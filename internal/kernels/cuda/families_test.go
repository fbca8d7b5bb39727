package cuda

import (
	"slices"
	"testing"

	"github.com/euryale-ml/euryale/internal/testing/require"
)

// TestEveryFamilyIsLoadedBySomeone compares the lists with the PTX that is embedded.
func TestEveryFamilyIsLoadedBySomeone(t *testing.T) {
	texts := require.Value(textsWith("", hopper))(t)
	listed := append(append(QueueFamilies(), PeerFamilies(true)...), Products, Convolutions, Images,
		IndexedRows, Recurrences, FewRowProducts)
	listed = append(listed, AttentionFamilies()...)
	for _, family := range listed {
		_, ok := texts[family]
		require.Check(t, ok, "there is no family %q", family)
	}
	for family := range texts {
		require.Check(t, slices.Contains(listed, family),
			"family %q is in no list: it would be loaded in the middle of a run", family)
	}
	require.Check(t, len(listed) == len(texts), "%d families are listed, and there are %d",
		len(listed), len(texts))
}

// TestKernelsHaveOneFamily: a launch finds its kernel by the name alone.
func TestKernelsHaveOneFamily(t *testing.T) {
	texts := require.Value(textsWith("", hopper))(t)
	homes := map[string]string{}
	for family, text := range texts {
		for name := range bodies(text) {
			if other, taken := homes[name]; taken {
				t.Errorf("kernel %s is in families %s and %s", name, other, family)
			}
			homes[name] = family
		}
	}
}
