package models_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/internal/testing/require"
)

// TestAModelIsSavedInShards: as transformers divides and names them, with an index that has their
// sizes, and Load reads them. A smaller model takes the place of a larger one, and the other way
// round.
func TestAModelIsSavedInShards(t *testing.T) {
	for _, folder := range folders {
		m, dir := load(t, filepath.Join("testdata", folder)), filepath.Join(t.TempDir(), "out")
		weights := learned(t, m)
		for _, most := range []int64{0, 9000, 0, 1} {
			m.MaxShardSize = most
			require.NoError(t, m.Save(dir, maps.All(weights)))
			for name, x := range learned(t, load(t, dir)) {
				require.Check(t, slices.Equal(x.Data().([]float32),
					weights[name].Data().([]float32)), "%s, %d bytes: %s differs", folder, most,
					name)
			}
			shards := require.Value(filepath.Glob(filepath.Join(dir, "model*.safetensors")))(t)
			text, err := os.ReadFile(filepath.Join(dir, "model.safetensors.index.json"))
			if most == 0 {
				require.Check(t, len(shards) == 1 && errors.Is(err, fs.ErrNotExist) &&
					filepath.Base(shards[0]) == "model.safetensors", "%v, %v", shards, err)
				continue
			}
			require.NoError(t, err)
			var index struct {
				Metadata struct {
					Bytes int64 `json:"total_size"`
				}
				Files map[string]string `json:"weight_map"`
			}
			require.NoError(t, json.Unmarshal(text, &index))
			total := int64(0)
			for i, shard := range shards {
				require.Equal(t, "the name", filepath.Base(shard),
					fmt.Sprintf("model-%05d-of-%05d.safetensors", i+1, len(shards)))
				total += require.Value(os.Stat(shard))(t).Size()
			}
			require.Check(t, len(shards) > 1 && (most > 1 || len(shards) == len(index.Files)) &&
				index.Metadata.Bytes > 0 && index.Metadata.Bytes < total,
				"%s: %d files for %d tensors, %d bytes", folder, len(shards), len(index.Files),
				index.Metadata.Bytes)
		}
	}
}

// TestTransformersDividesTensorsAlike: its own function gives each tensor the file that Save gives
// it. It needs a Python that has huggingface_hub, named by EURYALE_PYTHON.
func TestTransformersDividesTensorsAlike(t *testing.T) {
	python := os.Getenv("EURYALE_PYTHON")
	if python == "" {
		t.Skip("needs EURYALE_PYTHON, with huggingface_hub")
	}
	for _, folder := range folders {
		m := load(t, filepath.Join("testdata", folder))
		for _, most := range []int64{1, 3000, 9000, 20000, 1 << 30} {
			m.MaxShardSize = most
			dir := t.TempDir()
			require.NoError(t, m.Save(dir, maps.All(learned(t, m))))
			output(t, python, "testdata/shards.py", dir, fmt.Sprint(most))
		}
	}
}

// TestAKilledSaveLeavesOneModelOrNone: whenever the process is killed, what is there is the model
// of before or the new one, whole, or nothing that loads; the next Save removes what is left.
func TestAKilledSaveLeavesOneModelOrNone(t *testing.T) {
	m := load(t, filepath.Join("testdata", "llama3"))
	m.MaxShardSize = 9000
	if dir := os.Getenv("EURYALE_SAVE_TO"); dir != "" { // until it is killed
		weights := learned(t, m)
		for i := 0; ; i++ {
			if m.MaxShardSize = 9000; i%3 == 0 {
				m.MaxShardSize = 0
			}
			require.NoError(t, m.Save(dir, maps.All(filled(weights, float32(i%8)))))
			fmt.Println("saved")
		}
	}
	whole, none := 0, 0
	weights := learned(t, m)
	dir := filepath.Join(t.TempDir(), "out")
	for i := range 12 {
		if i%4 == 0 {
			require.NoError(t, os.RemoveAll(dir))
		}
		c := exec.Command(require.Value(os.Executable())(t), "-test.run", t.Name())
		c.Env = append(os.Environ(), "EURYALE_SAVE_TO="+dir)
		out := require.Value(c.StdoutPipe())(t)
		require.NoError(t, c.Start())
		if i%4 > 0 { // else maybe before there is anything
			_ = require.Value(out.Read(make([]byte, 6)))(t)
		} else {
			time.Sleep(200 * time.Millisecond)
		}
		time.Sleep(time.Duration(rand.IntN(20000)) * time.Microsecond)
		require.NoError(t, c.Process.Kill())
		_ = c.Wait()
		if _, err := os.Stat(filepath.Join(dir, "config.json")); err != nil {
			none++
			continue
		}
		whole++
		values := map[float32]bool{}
		for _, x := range learned(t, load(t, dir)) {
			for _, v := range x.Data().([]float32) {
				values[v] = true
			}
		}
		require.Check(t, len(values) == 1, "it has parts of %d models", len(values))
	}
	t.Logf("%d whole, %d times nothing that loads", whole, none)
	require.NoError(t, m.Save(dir, maps.All(weights)))
	left := require.Value(filepath.Glob(filepath.Join(dir, ".*")))(t)
	require.Check(t, len(left) == 0, "the next Save leaves %v", left)
}

// filled returns tensors of the same shapes with one value.
func filled(weights map[string]*tensor.Dense, v float32) map[string]*tensor.Dense {
	all := map[string]*tensor.Dense{}
	for name, x := range weights {
		all[name] = x.Clone().(*tensor.Dense)
		_ = all[name].Memset(v)
	}
	return all
}

// TestASaveThatFailsLeavesTheFolder as it was, and one at work is not disturbed by another.
func TestASaveThatFailsLeavesTheFolder(t *testing.T) {
	m, dir := load(t, filepath.Join("testdata", "llama3")), filepath.Join(t.TempDir(), "out")
	weights := learned(t, m)
	require.NoError(t, m.Save(dir, maps.All(filled(weights, 1))))
	listed := func() (names []string) {
		for _, e := range require.Value(os.ReadDir(dir))(t) {
			names = append(names, e.Name())
		}
		return names
	}
	before := listed()
	delete(weights, "model.norm.gain")
	require.Fails(t, "Save", m.Save(dir, maps.All(weights)), "there is no model.norm.weight")
	require.Slices(t, "files", listed(), before)
	outer := func(yield func(string, *tensor.Dense) bool) {
		require.NoError(t, m.Save(dir, maps.All(filled(learned(t, m), 2))))
		all := listed()
		require.Check(t, slices.ContainsFunc(all, func(n string) bool {
			return strings.HasPrefix(n, ".euryale-save-")
		}), "the inner Save has removed the files of the outer one: %v", all)
		maps.All(filled(learned(t, m), 3))(yield)
	}
	require.NoError(t, m.Save(dir, outer))
	require.Slices(t, "files", listed(), before)
	for name, x := range learned(t, load(t, dir)) {
		require.Equal(t, name, x.Data().([]float32)[0], 3)
	}
}
