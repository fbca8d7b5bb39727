package models_test

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"math"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/files"
	"github.com/euryale-ml/euryale/internal/kernels"
	"github.com/euryale-ml/euryale/internal/safetensors"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/internal/testing/testenv"
	"github.com/euryale-ml/euryale/internal/testing/testranks"
	"github.com/euryale-ml/euryale/layers"
	"github.com/euryale-ml/euryale/models"
	"github.com/euryale-ml/euryale/ops"
	"github.com/euryale-ml/euryale/vm"
)

// folders are the models that testdata/make.py makes.
var folders = []string{"gpt2", "llama3", "llama3-tied", "mistral", "qwen2", "qwen3"}

// layouts divide samples, positions and weights.
var layouts = []layers.Sizes{{DP: 1, SP: 1, TP: 1}, {DP: 2, SP: 1, TP: 1}, {DP: 1, SP: 2, TP: 1},
	{DP: 1, SP: 1, TP: 2}, {DP: 1, SP: 2, TP: 2}}

// expected is what torch and transformers compute.
type expected struct{ *safetensors.File }

func expect(t *testing.T, folder string) expected {
	t.Helper()
	f, err := safetensors.Open(files.Disk(filepath.Join("testdata", folder)),
		"expected.safetensors")
	require.NoError(t, err)
	t.Cleanup(func() { f.Close() })
	return expected{f}
}

// floats returns a tensor.
func (e expected) floats(name string) ([]float64, []int, error) {
	x, err := e.Read(name)
	if err != nil {
		return nil, nil, err
	}
	y := make([]float64, x.Data.Len())
	return y, x.Shape, kernels.Host{}.Cast(backend.Of(y), x.Data)
}

// tokens returns the tokens from one on of each of the rows, and how many.
func (e expected) tokens(t *testing.T, from int) (ids []int, rows, each int) {
	t.Helper()
	x := require.Value(e.Read("tokens"))(t)
	rows, each = x.Shape[0], x.Shape[1]-1
	for i, id := range backend.View[int64](x.Data) {
		if at := i % x.Shape[1]; at >= from && at < from+each {
			ids = append(ids, int(id))
		}
	}
	return ids, rows, each
}

// within runs a function as all ranks of a layout, on the host.
func within(t testing.TB, s layers.Sizes, f func(l *layers.Layout, build sync.Locker) error) {
	t.Helper()
	var build sync.Mutex
	withinOf(t, testenv.Hosts, s, func(_ *testenv.Rank, l *layers.Layout) error {
		return f(l, &build)
	})
}

// withinOf runs a function as all ranks of a layout.
func withinOf(t testing.TB, k testenv.Kind, s layers.Sizes, f func(r *testenv.Rank,
	l *layers.Layout) error) {
	t.Helper()
	P := s.DP * s.SP * s.TP
	testranks.Within(t, P, 20*time.Second, k.Connect(t, P), func(r *testenv.Rank) error {
		l, err := layers.NewLayout(r.Comm, s.DP, s.SP, s.TP)
		if err != nil {
			return err
		}
		if err = f(r, l); err != nil {
			r.Comm.Abort(err)
		}
		return errors.Join(err, l.Close())
	})
}

// Every folder and layout gives the logits, the loss and all gradients of transformers.
func TestHuggingFaceModelsComputeWhatTheyDoThere(t *testing.T) {
	for _, folder := range folders {
		for _, s := range layouts {
			t.Run(fmt.Sprint(folder, "/", s), func(t *testing.T) {
				want := expect(t, folder)
				ids, rows, each := want.tokens(t, 0)
				next, _, _ := want.tokens(t, 1)
				within(t, s, func(l *layers.Layout, build sync.Locker) error {
					mine := rows / s.DP * each
					return run(folder, "", l, build, want, rows/s.DP, each,
						ids[l.Replica*mine:][:mine], next[l.Replica*mine:][:mine])
				})
			})
		}
	}
}

// With an adapter of PEFT, too. Nothing else has gradients then.
func TestAdaptersComputeWhatTheyDoThere(t *testing.T) {
	for _, folder := range []string{"gpt2", "llama3"} {
		for _, s := range layouts {
			t.Run(fmt.Sprint(folder, "/", s), func(t *testing.T) {
				want := expect(t, folder)
				ids, rows, each := want.tokens(t, 0)
				next, _, _ := want.tokens(t, 1)
				within(t, s, func(l *layers.Layout, build sync.Locker) error {
					mine := rows / s.DP * each
					return run(folder, "adapter", l, build, want, rows/s.DP, each,
						ids[l.Replica*mine:][:mine], next[l.Replica*mine:][:mine])
				})
			})
		}
	}
}

// run computes logits, loss and gradients of this rank's replica, and compares them.
func run(folder, adapter string, l *layers.Layout, build sync.Locker, want expected, rows,
	each int, ids, next []int) error {
	if !filepath.IsAbs(folder) {
		folder = filepath.Join("testdata", folder)
	}
	m, err := models.Load(folder)
	if err != nil {
		return err
	}
	defer m.Close()
	if adapter != "" {
		if err := m.LoadAdapter(filepath.Join(folder, adapter)); err != nil {
			return err
		}
		adapter += "."
	}
	build.Lock()
	b := layers.NewBuilder(gorgonia.NewGraph(), l, tensor.Float32, 1)
	tokens, targets := b.Tokens("tokens", 1, rows, each), b.Tokens("targets", 1, rows, each)
	logits, err := m.Logits(b, tokens)
	if err != nil {
		build.Unlock()
		return err
	}
	loss := b.CrossEntropy(logits, targets)
	all := b.To(b.To(logits, layers.Tensor, layers.Replicated), layers.Sequence, layers.Replicated)
	learnables, err := b.Grad(loss)
	build.Unlock()
	if err != nil {
		return err
	}
	machine, err := vm.New(b.Graph(), nil, vm.Keep(all.Node, loss.Node))
	if err != nil {
		return err
	}
	defer machine.Close()
	if err := errors.Join(tokens.Set(ids), targets.Set(next)); err != nil {
		return err
	}
	for range 3 {
		if err := machine.RunAll(); err != nil {
			return ops.Cause(err)
		}
		m.Random.Next(0)
	}
	if err := sameLogits(want, adapter+"logits", all.Node, l.Replica*rows, rows, each); err != nil {
		return err
	}
	share := []float64{numbers(loss.Value())[0]}
	if err := addUp(l.Data, share); err != nil {
		return err
	}
	if err := near("loss", share, want, adapter+"loss"); err != nil {
		return err
	}
	return sameGradients(want, l, b, learnables)
}

func sameLogits(want expected, name string, logits *gorgonia.Node, first, rows, each int) error {
	whole, shape, err := want.floats(name)
	if err != nil {
		return err
	}
	var mine []float64
	for row := first; row < first+rows; row++ {
		mine = append(mine, whole[row*shape[1]*shape[2]:][:each*shape[2]]...)
	}
	return closeTo("logits", numbers(logits.Value()), mine)
}

// sameGradients compares this rank's parts of the sums of the gradients.
func sameGradients(want expected, l *layers.Layout, b *layers.Builder,
	learnables gorgonia.Nodes) error {
	divided := b.Sharded()
	for _, n := range learnables {
		gradient := numbers(n.Deriv().Value())
		if err := addUp(l.Data, gradient); err != nil {
			return err
		}
		name := n.Name()
		if gain, ok := strings.CutSuffix(name, ".gain"); ok {
			name = gain + ".weight"
		}
		whole, shape, err := want.floats("grad." + name)
		if err != nil {
			return err
		}
		mine := n.Shape().Clone()
		axis, parts := divided[n.Name()]
		start := 0
		if parts {
			all := []float64{float64(mine[axis])}
			if err := addUp(l.Comm(layers.Tensor), all); err != nil {
				return err
			}
			mine[axis] = int(all[0])
			for _, n := range backend.Even(mine[axis], l.TP)[:l.Comm(layers.Tensor).Rank()] {
				start += n
			}
		}
		if strings.HasSuffix(name, "_proj.weight") && !strings.Contains(name, "c_proj") ||
			strings.Contains(name, ".lora_") {
			whole = transposed(whole, shape[0], shape[1])
		}
		if parts {
			whole = slice(whole, mine, axis, start, n.Shape()[axis])
		}
		if err := closeTo(n.Name(), gradient, whole); err != nil {
			return err
		}
	}
	return nil
}

func transposed(x []float64, rows, columns int) []float64 {
	y := make([]float64, len(x))
	for i, v := range x {
		y[i%columns*rows+i/columns] = v
	}
	return y
}

// slice returns n elements of an axis, from start on.
func slice(x []float64, shape []int, axis, start, n int) (part []float64) {
	behind := tensor.Shape(shape[axis+1:]).TotalSize()
	row := shape[axis] * behind
	for at := 0; at < len(x); at += row {
		part = append(part, x[at+start*behind:][:n*behind]...)
	}
	return part
}

// addUp adds up the numbers of all ranks.
func addUp(comm backend.Communicator, x []float64) error {
	b := backend.Of(x)
	return backend.Run(comm, backend.Collective{Kind: backend.AllReduce, Op: backend.Sum}, b, b)
}

func near(what string, got []float64, want expected, name string) error {
	w, _, err := want.floats(name)
	if err != nil {
		return err
	}
	return closeTo(what, got, w)
}

// closeTo compares numbers, within 1e-4 of the largest.
func closeTo(what string, got, want []float64) error {
	if len(got) != len(want) {
		return fmt.Errorf("%s: %d numbers, want %d", what, len(got), len(want))
	}
	largest := 0.0
	for _, w := range want {
		largest = max(largest, math.Abs(w))
	}
	for i, w := range want {
		if !(math.Abs(got[i]-w) <= 1e-4*largest) {
			return fmt.Errorf("%s: number %d of %d is %v, want %v", what, i, len(want), got[i], w)
		}
	}
	return nil
}

func numbers(v gorgonia.Value) []float64 {
	switch data := v.Data().(type) {
	case float32:
		return []float64{float64(data)}
	case float64:
		return []float64{data}
	case []float32:
		x := make([]float64, len(data))
		for i, f := range data {
			x[i] = float64(f)
		}
		return x
	case []float64:
		return slices.Clone(data)
	}
	return nil
}

// learned returns the values of all learnables of a folder on one rank.
func learned(t testing.TB, m *models.Model) map[string]*tensor.Dense {
	t.Helper()
	weights := map[string]*tensor.Dense{}
	within(t, layers.Sizes{DP: 1, SP: 1, TP: 1}, func(l *layers.Layout, build sync.Locker) error {
		build.Lock()
		defer build.Unlock()
		b := layers.NewBuilder(gorgonia.NewGraph(), l, tensor.Float32, 1)
		_, err := m.Logits(b, b.Tokens("tokens", 1, 2, 4))
		for _, n := range b.Learnables() {
			weights[n.Name()] = n.Value().(*tensor.Dense)
		}
		return err
	})
	return weights
}

// load loads a folder, and closes it at the test's end.
func load(t *testing.T, dir string) *models.Model {
	t.Helper()
	m := require.Value(models.Load(dir))(t)
	t.Cleanup(func() { m.Close() })
	return m
}

func TestSavedFoldersAreLoaded(t *testing.T) {
	for _, folder := range folders {
		t.Run(folder, func(t *testing.T) {
			m := load(t, filepath.Join("testdata", folder))
			weights := learned(t, m)
			for _, x := range weights { // a training
				data := x.Data().([]float32)
				for i := range data {
					data[i] += float32(i%5) / 8
				}
			}
			dir := filepath.Join(t.TempDir(), "tuned")
			for range 2 { // over itself, too
				require.NoError(t, m.Save(dir, maps.All(weights)))
			}
			again := load(t, dir)
			require.Check(t, reflect.DeepEqual(again.Config, m.Config), "%+v, want %+v",
				again.Config, m.Config)
			for name, x := range learned(t, again) {
				require.Check(t, slices.Equal(x.Data().([]float32),
					weights[name].Data().([]float32)), "%s has other values", name)
			}
		})
	}
}

// TestSaveReplacesTheFilesOfAnIndex: what Load reads is what Save wrote, whatever was there, and so
// is what programs read that take all files. Those of other names stay.
func TestSaveReplacesTheFilesOfAnIndex(t *testing.T) {
	m, dir := load(t, filepath.Join("testdata", "qwen3")), copied(t, "qwen3")
	weights := learned(t, m)
	for _, x := range weights {
		require.NoError(t, x.Memset(float32(0.5)))
	}
	own := []string{"model-best.safetensors", "model-1-of-2.safetensors", "notes"}
	for _, name := range own {
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), nil, 0o666))
	}
	require.NoError(t, m.Save(dir, maps.All(weights)))
	var left []string
	all, err := os.ReadDir(dir)
	for _, e := range all {
		left = append(left, e.Name())
	}
	want := append([]string{"config.json", "expected.safetensors", "model.safetensors"}, own...)
	if slices.Sort(want); err != nil || !slices.Equal(left, want) {
		t.Errorf("the directory has %q, want %q: %v", left, want, err)
	}
	for name, x := range learned(t, load(t, dir)) {
		require.Check(t, slices.Equal(x.Data().([]float32), weights[name].Data().([]float32)),
			"%s has the values of before", name)
	}
}

// TestSaveLeavesNothingOfAnEarlierModel: programs would apply an adapter to the model, or read the
// weights or the tokenizer of another one. Files that are no part of a model stay.
func TestSaveLeavesNothingOfAnEarlierModel(t *testing.T) {
	m, dir := load(t, "testdata/llama3"), copied(t, "llama3/adapter")
	weights := learned(t, m)
	old := []string{"adapter_model.bin", "pytorch_model.bin", "pytorch_model.bin.index.json",
		"pytorch_model-00001-of-00002.bin", "model-00001-of-00002.safetensors",
		"model.safetensors.index.json", "merges.txt", "config.json"}
	own := []string{"notes.txt", "pytorch_model-best.bin", "train.py"}
	for _, name := range append(own, old...) {
		file(name, []byte("{}"))(t, dir)
	}
	require.NoError(t, m.Save(dir, maps.All(weights)))
	var left []string
	all, err := os.ReadDir(dir)
	for _, e := range all {
		left = append(left, e.Name())
	}
	want := append([]string{"config.json", "model.safetensors", "tokenizer.json"}, own...)
	if slices.Sort(want); err != nil || !slices.Equal(left, want) {
		t.Errorf("the directory has %q, want %q: %v", left, want, err)
	}
}

// TestSaveLeavesNothingThatChangesTheSameModel: with an equal config.json, too, transformers would
// stop at the tokens of another model, or read its tokenizer. While files change, nothing loads.
func TestSaveLeavesNothingThatChangesTheSameModel(t *testing.T) {
	m, dir := load(t, other(t, "llama3", nil, nil)), t.TempDir()
	weights := learned(t, m)
	require.NoError(t, m.Save(dir, maps.All(weights)))
	for _, name := range []string{"generation_config.json", "tokenizer_config.json", "tekken.json",
		"added_tokens.json"} {
		file(name, []byte(`{"eos_token_id": 5}`))(t, dir)
		require.NoError(t, m.Save(dir, maps.All(weights)))
		require.Fails(t, fmt.Sprintf("%s is still there", name),
			require.Err(os.Stat(filepath.Join(dir, name))), fs.ErrNotExist)
	}
	require.Slices(t, "the tokens that end a text", load(t, dir).EOS, m.EOS)
	path := filepath.Join(dir, "generation_config.json")
	require.NoError(t, os.MkdirAll(filepath.Join(path, "x"), 0o777))
	require.Check(t, m.Save(dir, maps.All(weights)) != nil, "what cannot be removed is no error")
	require.Fails(t, "with a part of another model there is a config.json",
		require.Err(os.Stat(filepath.Join(dir, "config.json"))), fs.ErrNotExist)
}

// TestNoCrashLeavesPartsOfTwoModels: whatever step fails, what is there loads as a whole or not at
// all.
func TestNoCrashLeavesPartsOfTwoModels(t *testing.T) {
	m, other := load(t, "testdata/llama3"), load(t, "testdata/qwen2")
	weights := learned(t, m)
	for _, inTheWay := range []string{"model.safetensors", "tokenizer.json",
		"pytorch_model-00001-of-00002.bin"} {
		dir := t.TempDir()
		require.NoError(t, other.Save(dir, maps.All(learned(t, other))))
		path := filepath.Join(dir, inTheWay)
		require.NoError(t, errors.Join(os.RemoveAll(path), os.MkdirAll(filepath.Join(path, "x"),
			0o777)))
		require.That(t, m.Save(dir, maps.All(weights)) != nil,
			"%s is a directory, and Save does not say so", inTheWay)
		_, err := os.Stat(filepath.Join(dir, "config.json"))
		before := inTheWay == "model.safetensors"
		require.Check(t, (err == nil) == before, "%s is in the way: config.json: %v", inTheWay, err)
	}
}

func TestSaveWantsAllLearnablesAndNoOthers(t *testing.T) {
	m := load(t, "testdata/llama3")
	for what, spoil := range map[string]func(w map[string]*tensor.Dense) (dir string){
		"no model.norm.weight": func(w map[string]*tensor.Dense) string {
			delete(w, "model.norm.gain")
			return "x"
		},
		"no file has adapter": func(w map[string]*tensor.Dense) string {
			w["adapter"] = w["model.norm.gain"]
			return "x"
		},
		"but the model has no such weight": func(w map[string]*tensor.Dense) string {
			w["q_proj.lora_A.weight"] = w["model.embed_tokens.weight"]
			return "x"
		},
		"has shape [32]": func(w map[string]*tensor.Dense) string {
			w["model.norm.gain"] = tensor.New(tensor.Of(tensor.Float32), tensor.WithShape(31))
			return "x"
		},
		"o_proj.weight has shape [32 32]": func(w map[string]*tensor.Dense) string {
			w["model.layers.0.self_attn.o_proj.weight"] = tensor.New(tensor.Of(tensor.Float32),
				tensor.WithShape(7))
			return "x"
		},
		"a scalar": func(w map[string]*tensor.Dense) string {
			w["model.embed_tokens.weight"] = tensor.New(tensor.FromScalar(float32(1)))
			return "x"
		},
		"it is nil": func(w map[string]*tensor.Dense) string {
			w["model.norm.gain"] = nil
			return "x"
		},
		"loaded from there": func(map[string]*tensor.Dense) string { return "testdata/llama3" },
	} {
		weights := learned(t, m)
		dir := spoil(weights)
		if dir == "x" {
			dir = filepath.Join(t.TempDir(), dir)
		}
		require.Fails(t, "Save", m.Save(dir, maps.All(weights)), what)
	}
}
