package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"gonum.org/v1/plot/font"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/vg/draw"
	"gonum.org/v1/plot/vg/recorder"
)

func TestThePictureShowsEveryWay(t *testing.T) {
	unlessShort(t)
	file := filepath.Join(t.TempDir(), "loss.svg")
	cfg := config{model: "mlp", epochs: 2, batch: 48, solver: "adam", lr: 0.003, seed: 1, plot: file}
	if err := drawLosses(cfg); err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if !strings.HasPrefix(string(text), "<?xml") || strings.Contains(string(text), "<text") {
		t.Errorf("the picture is not SVG, or has text that depends on the fonts of the machine: %.100s", text)
	}
}

// drawn returns what a picture writes, and how many marks it has.
func drawn(t *testing.T, p picture) (written []*recorder.FillString, marks int) {
	t.Helper()
	var canvas recorder.Canvas
	if err := p.draw(draw.NewCanvas(&canvas, pictureWidth, pictureHeight)); err != nil {
		t.Fatal(err)
	}
	for _, action := range canvas.Actions {
		switch a := action.(type) {
		case *recorder.FillString:
			written = append(written, a)
		case *recorder.Fill, *recorder.Stroke:
			marks++
		}
	}
	return written, marks
}

// A legend that is cut, axes without labels and a curve of one point that is not there are
// what the first pictures had.
func TestFoundPicturesAreCutOrEmpty(t *testing.T) {
	for name, points := range map[string]plotter.XYs{
		"one point":     {{X: 3.1e5, Y: 1.6}},
		"a narrow one":  {{X: 3.1e5, Y: 1.6}, {X: 3.2e5, Y: 1.5}},
		"three decades": {{X: 3.1e5, Y: 1.6}, {X: 3e6, Y: 0.3}, {X: 1.1e8, Y: 0.002}},
		"many decades":  {{X: 1, Y: 1e-9}, {X: 1e12, Y: 10}},
	} {
		p := picture{title: "a title", x: "bytes", y: "loss"}
		_, before := drawn(t, picture{curves: []curve{{"", points}}})
		for _, way := range ways {
			p.curves = append(p.curves, curve{way.String(), points})
		}
		written, after := drawn(t, p)
		if least := len(ways) * len(points); after-before < least {
			t.Errorf("%s: %d curves add %d marks, want %d or more", name, len(ways), after-before, least)
		}
		var bytes, losses int
		for _, w := range written {
			face := font.DefaultCache.Lookup(w.Font, w.Font.Size)
			switch end := w.Point.X + face.Width(w.String); {
			case end > pictureWidth || w.Point.X < 0 && w.String != p.y:
				t.Errorf("%s: %q is from %v to %v in a picture of %v", name, w.String, w.Point.X, end, pictureWidth)
			case strings.HasSuffix(w.String, "B"):
				bytes++
			case strings.Trim(w.String, "0123456789.e-") == "":
				losses++
			}
		}
		if bytes < 2 || losses < 2 {
			t.Errorf("%s: %d and %d labels on the axes, want two or more on each", name, bytes, losses)
		}
	}
}

func TestAxesHaveLabelsThatReadWell(t *testing.T) {
	for _, c := range []struct {
		low, high float64
		want      string
	}{
		{1e5, 2e6, "100 kB 200 kB 500 kB 1 MB 2 MB"},
		{3e5, 4e5, "300 kB 400 kB"},
		{1, 1e9, "1 B 10 B 100 B 1 kB 10 kB 100 kB 1 MB 10 MB 100 MB 1 GB"},
	} {
		var labels []string
		for _, tick := range logTicks(bytesText).Ticks(c.low, c.high) {
			if tick.Label != "" {
				labels = append(labels, tick.Label)
			}
		}
		if got := strings.Join(labels, " "); got != c.want {
			t.Errorf("%v to %v: %s, want %s", c.low, c.high, got, c.want)
		}
	}
}

// Seven trainings for nothing are not begun.
func TestPicturesThatCannotBe(t *testing.T) {
	for want, change := range map[string]func(*config){
		"must end in .svg or .png":  func(c *config) { c.plot = "loss.gif" },
		"leave out --compress":      func(c *config) { c.compress = "bf16" },
		", --no-feedback":           func(c *config) { c.noFeedback = true },
		", --partial":               func(c *config) { c.partial = true },
		", --topology":              func(c *config) { c.topology = "2x2" },
		" and --checkpoint":         func(c *config) { c.solver, c.checkpoint = "momentum", "state" },
		"no such file or directory": func(c *config) { c.plot = filepath.Join(t.TempDir(), "no", "loss.svg") },
	} {
		cfg := defaults(t, func(c *config) { c.plot = filepath.Join(t.TempDir(), "loss.svg"); change(c) })
		err := cfg.check(nil)
		if err == nil {
			err = drawLosses(cfg)
		}
		if err == nil || !strings.Contains(err.Error(), "--plot") || !strings.Contains(err.Error(), want) {
			t.Errorf("error %v, want %q", err, want)
		}
	}
	t.Setenv("RANK", "1")
	t.Setenv("WORLD_SIZE", "2")
	t.Setenv("EURYALE_JOB", "by-hand")
	cfg := defaults(t, func(c *config) { c.plot = "loss.PNG" })
	if err := cfg.check(nil); err == nil || !strings.Contains(err.Error(), "not on 2 ranks") {
		t.Errorf("on one of two ranks: %v", err)
	}
}

func TestAPictureIsNotLostToAnError(t *testing.T) {
	file := filepath.Join(t.TempDir(), "loss.svg")
	if err := os.WriteFile(file, []byte("old"), 0o666); err != nil {
		t.Fatal(err)
	}
	if err := drawLosses(defaults(t, func(c *config) { c.plot, c.batch = file, 47 })); err == nil {
		t.Error("a batch of 47 is no error")
	}
	if text, err := os.ReadFile(file); string(text) != "old" {
		t.Errorf("the file has %q (%v)", text, err)
	}
}

func TestFewerBytesAreCounted(t *testing.T) {
	cfg := config{model: "mlp", epochs: 2, batch: 48, solver: "adam", lr: 0.003, seed: 1, plot: "unused"}
	bytes := map[string]float64{}
	for _, compress := range []string{"none", "bf16", "topk=0.05"} {
		cfg.compress = compress
		history, err := historyOf(cfg)
		if err != nil {
			t.Fatal(err)
		}
		if len(history) != 2 || history[1].bytes <= history[0].bytes || history[1].loss >= history[0].loss {
			t.Errorf("%s: the history is %+v", compress, history)
		}
		bytes[compress] = history[1].bytes
	}
	if bytes["bf16"] != bytes["none"]/2 || bytes["topk=0.05"] > 0.21*bytes["none"] {
		t.Errorf("the bytes are %v", bytes)
	}
}
