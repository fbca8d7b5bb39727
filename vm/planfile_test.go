package vm_test

import (
	"encoding/json"
	"encoding/xml"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"unicode/utf8"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/vm"
)

// TestPlanFile: EURYALE_PLAN gets what Plan prints, or a drawing with a bar for each buffer of the
// arena, and the same text.
func TestPlanFile(t *testing.T) {
	for _, kind := range []string{".txt", ".svg"} {
		path := filepath.Join(t.TempDir(), "plan"+kind)
		t.Setenv("EURYALE_PLAN", path)
		m := machine(t, mlp(t, tensor.Float32).g)
		text := require.Value(os.ReadFile(path))(t)
		if want := m.Plan().String(); kind == ".txt" && string(text) != want {
			t.Errorf("the file is\n%s\nwant\n%s", text, want)
		}
		if kind == ".svg" {
			bars, lines := drawing(t, string(text))
			if want := strings.Split(strings.TrimSpace(m.Plan().String()), "\n"); len(lines) != len(
				want)+1 || lines[len(lines)-1] != want[len(want)-1] {
				t.Errorf("%d lines, the last of them %q", len(lines), lines[len(lines)-1])
			}
			require.Check(t, bars >= 3 && strings.Contains(string(text), "matmul"),
				"%d bars in\n%s", bars, text)
		}
	}
}

// TestPlanFileForReports: as JSON, EURYALE_PLAN gets what is in use of the arena in each step: most
// of it in one, and never more than all.
func TestPlanFileForReports(t *testing.T) {
	path := filepath.Join(t.TempDir(), "plan.json")
	t.Setenv("EURYALE_PLAN", path)
	want := machine(t, mlp(t, tensor.Float32).g).Plan().String()
	text := require.Value(os.ReadFile(path))(t)
	var file struct {
		Arena int `json:"arena_bytes"`
		Steps []struct {
			Does  string
			Bytes int
		}
	}
	require.NoError(t, json.Unmarshal(text, &file))
	peak := 0
	for i, s := range file.Steps {
		peak = max(peak, s.Bytes)
		require.Check(t, s.Does != "" && s.Bytes > 0, "step %d: %+v", i, s)
	}
	for _, part := range []string{fmt.Sprintf("\nsteps=%d ", len(file.Steps)),
		fmt.Sprintf(" arena_bytes=%d ", file.Arena)} {
		require.Check(t, strings.Contains(want, part), "no %q in\n%s", part, want)
	}
	require.Check(t, peak > file.Arena/2 && peak <= file.Arena, "%d of %d bytes in use", peak,
		file.Arena)
}

// TestPlanFileOfEvaluation: a training and its evaluation have a file each.
func TestPlanFileOfEvaluation(t *testing.T) {
	dir := t.TempDir()
	t.Setenv("EURYALE_PLAN", filepath.Join(dir, "plan.txt"))
	m := mlp(t, tensor.Float32)
	for name, made := range map[string]*vm.Machine{"plan.txt": machine(t, m.g),
		"plan.eval.txt": machine(t, m.g, vm.Eval())} {
		if text, err := os.ReadFile(filepath.Join(dir, name)); err != nil ||
			string(text) != made.Plan().String() {
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
		require.NoError(t, err)
		if e, ok := token.(xml.StartElement); ok && e.Name.Local == "rect" {
			bars++
		} else if ok && e.Name.Local == "text" {
			var line string
			require.NoError(t, d.DecodeElement(&line, &e))
			lines = append(lines, strings.TrimSpace(line))
		}
	}
}

// TestPlanFileErrors: a file that cannot be written, or of another kind, is an error of New.
func TestPlanFileErrors(t *testing.T) {
	for path, want := range map[string]error{"plan.png": backend.ErrArgument,
		"no/such/directory/plan.txt": os.ErrNotExist} {
		t.Setenv("EURYALE_PLAN", path)
		require.Fails(t, path, require.Err(vm.New(mlp(t, tensor.Float32).g, nil)), want,
			"EURYALE_PLAN")
	}
}

// Nothing of a drawing is cut off: it is as wide as its longest line, in any font, and as high as
// its last one.
func TestPlanFileIsAsWideAsItsLines(t *testing.T) {
	path := filepath.Join(t.TempDir(), "plan.svg")
	t.Setenv("EURYALE_PLAN", path)
	m := &model{g: gorgonia.NewGraph()}
	long := m.variable(strings.Repeat("block <0> & ä ", 60), tensor.Float64, 2, 3)
	machine(t, must(gorgonia.Exp(long)).Graph())
	file := require.Value(os.ReadFile(path))(t)
	var picture struct {
		Width  float64 `xml:"width,attr"`
		Height float64 `xml:"height,attr"`
		Letter float64 `xml:"font-size,attr"`
		Lines  []struct {
			X      float64 `xml:"x,attr"`
			Y      float64 `xml:"y,attr"`
			Length float64 `xml:"textLength,attr"`
			Text   string  `xml:",chardata"`
		} `xml:"text"`
		Bars []struct {
			X     float64 `xml:"x,attr"`
			Width float64 `xml:"width,attr"`
		} `xml:"rect"`
	}
	require.NoError(t, xml.Unmarshal(file, &picture))
	longest := 0
	for _, line := range picture.Lines {
		letters := utf8.RuneCountInString(line.Text)
		longest = max(longest, letters)
		require.Check(t, line.X+line.Length <= picture.Width && line.Y+picture.Letter <=
			picture.Height, "%q ends at (%v, %v) of (%v, %v)", line.Text, line.X+line.Length,
			line.Y, picture.Width, picture.Height)
		require.Check(t, line.Length >= picture.Letter/2*float64(letters), "%q is squeezed into %v",
			line.Text, line.Length)
	}
	require.Check(t, longest >= 800, "the longest line has %d letters", longest)
	for _, bar := range picture.Bars {
		require.Check(t, bar.X+bar.Width <= picture.Width, "a bar ends at %v of %v",
			bar.X+bar.Width, picture.Width)
	}
}
