package models_test

import (
	"fmt"
	"math"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"sync"
	"testing"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/kernels"
	"github.com/euryale-ml/euryale/internal/residence"
	"github.com/euryale-ml/euryale/internal/safetensors"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/layers"
	"github.com/euryale-ml/euryale/models"
	"github.com/euryale-ml/euryale/vm"
)

// halved returns a folder with tensors of 16 bits, and one with the same numbers in F32.
func halved(t *testing.T, folder string, d backend.DType) (half, wide string) {
	t.Helper()
	half, wide = stored(t, folder, d), t.TempDir()
	require.NoError(t, os.CopyFS(wide, os.DirFS(half)))
	rewritten(func(all map[string]safetensors.Tensor) {
		for name, x := range all {
			all[name] = safetensors.New(backend.F32, x.Shape)
			require.NoError(t, kernels.Host{}.Cast(all[name].Data, x.Data))
		}
	})(t, wide)
	return half, wide
}

// frozenLogits returns the logits of a folder whose weights are frozen, those of an adapter apart,
// and the frozen variables, on the first of ranks that shard weights.
func frozenLogits(t *testing.T, dir string, lora bool, tp int) (logits []float64,
	frozen gorgonia.Nodes) {
	t.Helper()
	within(t, layers.Sizes{DP: 1, SP: 1, TP: tp}, func(l *layers.Layout, build sync.Locker) error {
		m, err := models.Load(dir)
		if err != nil {
			return err
		}
		defer m.Close()
		build.Lock()
		b := layers.NewBuilder(gorgonia.NewGraph(), l, tensor.Float32, 1)
		b.Freeze(func(string) bool { return true })
		if lora {
			err = m.Adapt(models.LoRA{Rank: 2, Targets: []string{"all-linear"}})
		}
		tokens := b.Tokens("tokens", 1, 1, 4)
		y, wrong := m.Logits(b, tokens)
		build.Unlock()
		if err != nil || wrong != nil {
			return fmt.Errorf("%w, %w", err, wrong)
		}
		machine, err := vm.New(b.Graph(), nil, vm.Eval(), vm.Keep(y.Node),
			vm.WithFrozen(b.Frozen()...))
		if err != nil {
			return err
		}
		defer machine.Close()
		if err := tokens.Set([]int{3, 1, 4, 1}); err != nil {
			return err
		}
		if err := machine.RunAll(); err != nil {
			return err
		}
		if l.Comm(layers.Tensor).Rank() == 0 {
			logits, frozen = numbers(y.Value()), b.Frozen()
		}
		return nil
	})
	return logits, frozen
}

// TestAFolderOf16BitsStaysSo: frozen matrices are variables of 16 bits, on one rank and on two that
// shard them, beside an adapter, too, and compute what those of F32 do.
func TestAFolderOf16BitsStaysSo(t *testing.T) {
	for _, folder := range []string{"gpt2", "llama3", "qwen2"} {
		for _, d := range []backend.DType{backend.BF16, backend.F16} {
			half, wide := halved(t, folder, d)
			for _, lora := range []bool{false, true} {
				for tp := 1; tp <= 2; tp++ {
					what := fmt.Sprintf("%s in %v, adapter %v, %d ranks", folder, d, lora, tp)
					got, frozen := frozenLogits(t, half, lora, tp)
					want, _ := frozenLogits(t, wide, lora, tp)
					for i := range want {
						require.That(t, len(got) == len(want) && math.Abs(got[i]-want[i]) <= 1e-5,
							"%s: logit %d is %v, of F32 %v", what, i, got[i], want[i])
					}
					require.Check(t, len(frozen) > 4, "%s: %d frozen", what, len(frozen))
					for _, n := range frozen {
						require.Check(t, residence.Half(n.Dtype()) == (n.Dims() > 1),
							"%s: %s is %v", what, n.Name(), n.Dtype())
					}
				}
			}
		}
	}
}

// TestGraphsReadAFolderWhereItLies: what is frozen has the memory of the mapped file in each graph,
// and texts are as in F32.
func TestGraphsReadAFolderWhereItLies(t *testing.T) {
	half, wide := halved(t, "llama3", backend.BF16)
	m := load(t, half)
	at := func() (all []uintptr) {
		within(t, layers.Sizes{DP: 1, SP: 1, TP: 1}, func(l *layers.Layout, _ sync.Locker) error {
			b := layers.NewBuilder(gorgonia.NewGraph(), l, tensor.Float32, 1)
			b.Freeze(func(string) bool { return true })
			_, err := m.Logits(b, b.Tokens("tokens", 1, 1, 4))
			for _, n := range b.Frozen() {
				if n.Dims() > 1 {
					memory := require.Value(residence.Memory(n.Value(), backend.BF16))(t)
					all = append(all, memory.Addr())
				}
			}
			return err
		})
		return all
	}
	first := at()
	require.Slices(t, "where it lies", at(), first)
	require.Check(t, len(first) > 0, "nothing is of 16 bits")
	var texts [][]int
	for _, dir := range []string{half, wide} {
		m := load(t, dir)
		g := require.Value(models.NewGenerator(m, nil, models.GenerateOptions{Context: 24}))(t)
		require.NoError(t, m.Close()) // graphs of longer prompts are made after it
		var text []int
		for _, prompt := range [][]int{{1, 2, 3}, slices.Repeat([]int{5}, 17)} {
			require.NoError(t, g.Generate(t.Context(), [][]int{prompt}, models.Sampling{Max: 6,
				Greedy: true}, func(_, token int) error {
				text = append(text, token)
				return nil
			}))
		}
		require.NoError(t, g.Close())
		texts = append(texts, text)
	}
	require.Slices(t, "the text", texts[0], texts[1])
}

// TestAFileThatIsCutOffIsAnError: before it is mapped, and where its numbers are converted; the
// process goes on.
func TestAFileThatIsCutOffIsAnError(t *testing.T) {
	for _, mapped := range []bool{false, true} {
		half, _ := halved(t, "llama3", backend.BF16)
		m := load(t, half)
		if mapped {
			require.NoError(t, builds(t, m))
		}
		require.NoError(t, os.Truncate(filepath.Join(half, "model.safetensors"), 8))
		want := "has others now"
		if mapped {
			want = "has become shorter"
		}
		require.Fails(t, fmt.Sprintf("a graph, mapped before: %v", mapped), builds(t, m), want)
	}
}

// TestAFingerprintIsOfWhatWasOpened: not of a file that has its name since.
func TestAFingerprintIsOfWhatWasOpened(t *testing.T) {
	if runtime.GOOS == "windows" {
		t.Skip("windows replaces no file that is open")
	}
	dir, other := copied(t, "llama3"), copied(t, "mistral")
	m := load(t, dir)
	was := require.Value(m.Fingerprint())(t)
	require.NoError(t, os.Rename(filepath.Join(other, "model.safetensors"),
		filepath.Join(dir, "model.safetensors")))
	require.Equal(t, "the fingerprint", require.Value(m.Fingerprint())(t), was)
}
