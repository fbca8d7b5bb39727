package vm_test

import (
	"encoding/xml"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/vm"
)

// TestPlanFile: EURYALE_PLAN gets what Plan prints, or a drawing with a bar for each buffer of the
// arena, and the same text.
func TestPlanFile(t *testing.T) {
	for _, kind := range []string{".txt", ".svg"} {
		path := filepath.Join(t.TempDir(), "plan"+kind)
		t.Setenv("EURYALE_PLAN", path)
		m := machine(t, mlp(t, tensor.Float32).g)
		text, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		if want := m.Plan().String(); kind == ".txt" && string(text) != want {
			t.Errorf("the file is\n%s\nwant\n%s", text, want)
		}
		if kind == ".svg" {
			bars, lines := drawing(t, string(text))
			if want := strings.Split(strings.TrimSpace(m.Plan().String()), "\n"); len(lines) != len(want)+1 || lines[len(lines)-1] != want[len(want)-1] {
				t.Errorf("%d lines, the last of them %q", len(lines), lines[len(lines)-1])
			}
			if bars < 3 || !strings.Contains(string(text), "matmul") {
				t.Errorf("%d bars in\n%s", bars, text)
			}
		}
	}
}

// TestPlanFileOfEvaluation: a training and its evaluation have a file each.
func TestPlanFileOfEvaluation(t *testing.T) {
	dir := t.TempDir()
	t.Setenv("EURYALE_PLAN", filepath.Join(dir, "plan.txt"))
	m := mlp(t, tensor.Float32)
	for name, made := range map[string]*vm.Machine{"plan.txt": machine(t, m.g), "plan.eval.txt": machine(t, m.g, vm.Eval())} {
		if text, err := os.ReadFile(filepath.Join(dir, name)); err != nil || string(text) != made.Plan().String() {
			t.Errorf("%s (%v) is\n%s\nwant\n%s", name, err, text, made.Plan())
		}
	}
}

// drawing returns the number of bars and the lines of text of an SVG.
func drawing(t *testing.T, text string) (bars int, lines []string) {
	t.Helper()
	d := xml.NewDecoder(strings.NewReader(text))
	for {
		token, err := d.Token()
		if errors.Is(err, io.EOF) {
			return bars, lines
		}
		if err != nil {
			t.Fatal(err)
		}
		if e, ok := token.(xml.StartElement); ok && e.Name.Local == "rect" {
			bars++
		} else if ok && e.Name.Local == "text" {
			var line string
			if err := d.DecodeElement(&line, &e); err != nil {
				t.Fatal(err)
			}
			lines = append(lines, strings.TrimSpace(line))
		}
	}
}

// TestPlanFileErrors: a file that cannot be written, or of another kind, is an error of New.
func TestPlanFileErrors(t *testing.T) {
	for path, want := range map[string]error{"plan.png": backend.ErrArgument, "no/such/directory/plan.txt": os.ErrNotExist} {
		t.Setenv("EURYALE_PLAN", path)
		if _, err := vm.New(mlp(t, tensor.Float32).g, nil); !errors.Is(err, want) || !strings.Contains(err.Error(), "EURYALE_PLAN") {
			t.Errorf("%s: %v, want %v", path, err, want)
		}
	}
}
