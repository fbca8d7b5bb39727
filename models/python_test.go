package models_test

import (
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/safetensors"
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
	if text, err := c.CombinedOutput(); err != nil {
		t.Fatalf("%v: %v\n%s", c.Args, err, text)
	}
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
		if err := m.Save(dir, learned(t, m)); err != nil {
			t.Fatal(err)
		}
		args = append(args, data, dir, "-")
		if m.LoadAdapter(filepath.Join(data, "adapter")) != nil {
			continue // it has none
		}
		adapter := t.TempDir()
		if err := m.SaveAdapter(adapter, learned(t, m)); err != nil {
			t.Fatal(err)
		}
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
		now, err := safetensors.Open(filepath.Join(dir, folder, "expected.safetensors"))
		if err != nil {
			t.Fatal(err)
		}
		defer now.Close()
		for _, name := range was.Names() {
			w, err := was.Read(name)
			if err != nil {
				t.Fatal(err)
			}
			n, err := now.Read(name)
			if err != nil {
				t.Fatal(err)
			}
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
