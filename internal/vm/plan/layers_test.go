package plan

import (
	"fmt"
	"testing"

	"github.com/euryale-ml/euryale/internal/testing/require"
)

func TestLayersAreNamedByLearnables(t *testing.T) {
	for name, want := range map[string]string{"w0": "w0", "words.weight": "words",
		"model.layers.3.mlp.up_proj.weight": "model.layers.3", "h.11.ln_1.bias": "h.11",
		"layer1.0.conv1.weight": "layer1.0", "v.0": "v.0", "": ""} {
		require.Equal(t, "the layer of "+name, layerOf(name), want)
	}
}

// However many layers there are, a step of a device notes the time some dozens of times.
func TestManyLayersAreJoined(t *testing.T) {
	for _, n := range []int{1, mostLayers, mostLayers + 1, 1000} {
		var names []string
		for i := range n {
			layer := fmt.Sprint("h.", i)
			names = append(names, layer, layer)
		}
		joined, changes := coarser(names), 0
		for i := range joined {
			if i == 0 || joined[i] != joined[i-1] {
				changes++
			}
		}
		require.Check(t, len(joined) == 2*n && changes <= mostLayers && changes >= min(n,
			mostLayers/2), "%d layers become %d", n, changes)
	}
	names := make([]string, mostLayers+1)
	for i := range names {
		names[i] = fmt.Sprint("h.", i)
	}
	joined := coarser(names)
	require.Check(t, joined[1] == "h.0 to h.1" && joined[mostLayers] == "h.64", "%q", joined)
}
