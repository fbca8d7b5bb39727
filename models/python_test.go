package models_test

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/autograd"
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/files"
	"github.com/euryale-ml/euryale/internal/safetensors"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/layers"
	"github.com/euryale-ml/euryale/models"
	"github.com/euryale-ml/euryale/vm"
)

// python returns a Python that has torch, transformers and peft, "" if there is none or the test is
// a short one.
func python(t *testing.T) string {
	t.Helper()
	if os.Getenv("EURYALE_FULL") != "1" {
		return ""
	}
	if exec.Command("python3", "-c", "import torch, transformers, peft").Run() != nil {
		t.Log("python3 has no torch, transformers and peft: nothing is compared")
		return ""
	}
	return "python3"
}

// output runs a command.
func output(t *testing.T, name string, args ...string) {
	t.Helper()
	c := exec.Command(name, args...)
	c.Env = append(os.Environ(), "HF_HUB_OFFLINE=1")
	text, err := c.CombinedOutput()
	require.That(t, err == nil, "%v: %v\n%s", c.Args, err, text)
}

func TestTransformersReadsWhatSaveWrites(t *testing.T) {
	interpreter := python(t)
	if interpreter == "" {
		return
	}
	args := []string{"testdata/check.py"}
	for _, folder := range folders {
		data := filepath.Join("testdata", folder)
		m := load(t, data)
		dir := t.TempDir()
		require.NoError(t, m.Save(dir, maps.All(learned(t, m))))
		args = append(args, data, dir, "-")
		if m.LoadAdapter(filepath.Join(data, "adapter")) != nil {
			continue // it has none
		}
		adapter := t.TempDir()
		require.NoError(t, m.SaveAdapter(adapter, maps.All(learned(t, m))))
		args = append(args, data, dir, adapter)
	}
	output(t, interpreter, args...)
}

// The committed files are what the script makes, up to the rounding of another machine.
func TestTestdataIsMadeByItsScript(t *testing.T) {
	interpreter := python(t)
	if interpreter == "" {
		return
	}
	dir := t.TempDir()
	output(t, interpreter, "testdata/make.py", dir)
	for _, folder := range folders {
		was := expect(t, folder)
		now, err := safetensors.Open(files.Disk(filepath.Join(dir, folder)), "expected.safetensors")
		require.NoError(t, err)
		defer now.Close()
		for _, name := range was.Names() {
			w := require.Value(was.Read(name))(t)
			n := require.Value(now.Read(name))(t)
			if w.Data.DType() != backend.F32 {
				continue // tokens: greedy ones may differ after a rounding
			}
			a, b := backend.View[float32](w.Data), backend.View[float32](n.Data)
			for i := range a {
				if math.Abs(float64(a[i]-b[i])) > 1e-4*math.Max(1, math.Abs(float64(a[i]))) {
					t.Fatalf("%s: %s: %v, now %v", folder, name, a[i], b[i])
				}
			}
		}
	}
}

// TestRandomFoldersAreEqualOrRefused: folders and adapters of random keys, options and tensors give
// the logits of transformers and PEFT, and texts of 200 tokens, or are refused, and they find the
// same in what is saved of them. EURYALE_FOLDERS and EURYALE_SEED say how many, and which.
func TestRandomFoldersAreEqualOrRefused(t *testing.T) {
	interpreter := python(t)
	if interpreter == "" {
		return
	}
	dir := t.TempDir()
	output(t, interpreter, "testdata/folders.py", dir, cmp.Or(os.Getenv("EURYALE_FOLDERS"), "200"),
		cmp.Or(os.Getenv("EURYALE_SEED"), "1"))
	folders := require.Value(os.ReadDir(dir))(t)
	equal, refused, both, alone, texts := 0, 0, 0, 0, 0
	saved := []string{"testdata/check.py"}
	for _, f := range folders {
		folder := filepath.Join(dir, f.Name())
		what := require.Value(os.ReadFile(filepath.Join(folder, "what.json")))(t)
		theirs := false
		want, err := safetensors.Open(files.Disk(folder), "expected.safetensors")
		if err == nil {
			defer want.Close()
		} else if theirs = errors.Is(err, fs.ErrNotExist); !theirs {
			t.Fatal(err)
		}
		logits, again, err := logitsOf(t, folder)
		switch {
		case err != nil && theirs:
			both++
		case err != nil:
			refused++
			t.Logf("refused %s: %s: %v", f.Name(), what, err)
		case theirs:
			alone++
			t.Logf("refused there alone %s: %s", f.Name(), what)
		default:
			equal++
			saved = append(saved, again...)
			if err := within1e5(expected{want}, logits); err != nil {
				t.Errorf("%s: %s: %v", f.Name(), what, err)
			}
			if _, _, long := want.Of("greedy"); long && continuesAs(t, folder, expected{want}) {
				texts++
			}
		}
	}
	output(t, interpreter, saved...)
	t.Logf("%d folders: %d equal, %d with texts, %d refused here, %d there, %d by both",
		len(folders), equal, texts, refused, alone, both)
}

// continuesAs compares a greedy text of a folder, and reports whether the context is not refused.
func continuesAs(t *testing.T, folder string, want expected) bool {
	m := load(t, filepath.Join(folder, "model"))
	adapter := filepath.Join(folder, "adapter")
	if _, none := os.Stat(adapter); none == nil {
		require.NoError(t, m.LoadAdapter(adapter))
	}
	prompt, text := want.rows(t, "tokens")[0][:8], want.rows(t, "greedy")[0]
	g, err := models.NewGenerator(m, nil, models.GenerateOptions{Context: 8 + len(text)})
	if err != nil {
		t.Logf("no text of %s: %v", folder, err)
		return false
	}
	defer g.Close()
	got := generated(t, g, models.Sampling{Max: len(text), Stop: []int{}}, prompt)
	require.Check(t, fmt.Sprint(got[0]) == fmt.Sprint(text), "%s continues with %v, want %v",
		folder, got[0], text)
	return true
}

// logitsOf returns the logits of the tokens of a folder of folders.py, and saves it: again are the
// arguments that check.py takes for that.
func logitsOf(t *testing.T, folder string) (logits []float64, again []string, err error) {
	m, err := models.Load(filepath.Join(folder, "model"))
	if err != nil {
		return nil, nil, err
	}
	defer m.Close()
	again = []string{folder, filepath.Join(folder, "saved"), "-"}
	save, adapter := m.Save, filepath.Join(folder, "adapter")
	if _, none := os.Stat(adapter); none == nil {
		if err := m.LoadAdapter(adapter); err != nil {
			return nil, nil, err
		}
		save, again[1], again[2] = m.SaveAdapter, filepath.Join(folder, "model"), again[1]
	}
	f, err := safetensors.Open(files.Disk(folder), "tokens.safetensors")
	if err != nil {
		return nil, nil, err
	}
	defer f.Close()
	x, err := f.Read("tokens")
	if err != nil {
		return nil, nil, err
	}
	var ids []int
	for _, id := range backend.View[int64](x.Data) {
		ids = append(ids, int(id))
	}
	l, err := layers.NewLayout(autograd.Solo(), 1, 1, 1)
	if err != nil {
		return nil, nil, err
	}
	defer l.Close()
	b := layers.NewBuilder(gorgonia.NewGraph(), l, tensor.Float32, 1)
	tokens := b.Tokens("tokens", 1, 1, len(ids))
	y, err := m.Logits(b, tokens)
	if err != nil {
		return nil, nil, err
	}
	machine, err := vm.New(b.Graph(), nil, vm.Eval(), vm.Keep(y.Node))
	if err != nil {
		return nil, nil, err
	}
	defer machine.Close()
	weights := map[string]*tensor.Dense{}
	for _, n := range b.Learnables() {
		weights[n.Name()] = n.Value().(*tensor.Dense)
	}
	err = errors.Join(tokens.Set(ids), machine.RunAll(),
		save(filepath.Join(folder, "saved"), maps.All(weights)))
	return numbers(y.Value()), again, err
}

// within1e5 compares logits, within 1e-5 of the largest.
func within1e5(want expected, got []float64) error {
	w, _, err := want.floats("logits")
	if err != nil {
		return err
	}
	largest, off := 0.0, 0.0
	for i := range w {
		largest, off = max(largest, math.Abs(w[i])), max(off, math.Abs(w[i]-got[i]))
	}
	if !(off <= 1e-5*max(1, largest)) {
		return fmt.Errorf("logits differ by %v, the largest is %v", off, largest)
	}
	return nil
}
