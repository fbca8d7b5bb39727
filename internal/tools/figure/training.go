package main

import (
	"bytes"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/dustin/go-humanize"
)

// row is a row of a table of docs/benchmarks.md: its cells, by the titles of their columns.
type row map[string]string

// rows returns the rows of the first table below a heading. An empty first cell means the one above
// it.
func rows(page []byte, heading string) (found []row, err error) {
	_, section, _ := bytes.Cut(page, []byte("\n"+heading+"\n"))
	var titles []string
	for line := range strings.Lines(string(section)) {
		cells := strings.Split(strings.Trim(line, " \n"), "|")
		if len(cells) > 2 {
			cells = cells[1 : len(cells)-1] // between the first bar and the last
		}
		switch {
		case line[0] == '#' || len(found) > 0 && line[0] != '|':
			return found, nil
		case line[0] != '|' || strings.HasPrefix(line, "|---"):
		case titles == nil:
			titles = cells
		default:
			if len(cells) != len(titles) {
				return nil, fmt.Errorf("%s: %d cells below %d titles: %s", heading, len(cells),
					len(titles), line)
			}
			r := row{}
			for i, title := range titles {
				r[strings.TrimSpace(title)] = strings.TrimSpace(cells[i])
			}
			if first := strings.TrimSpace(titles[0]); r[first] == "" && len(found) > 0 {
				r[first] = found[len(found)-1][first]
			}
			found = append(found, r)
		}
	}
	return nil, fmt.Errorf("docs/benchmarks.md has no table below %q", heading)
}

// span returns the least and the greatest number of a cell such as 0.98-0.99.
func span(cell string) (least, most float64, err error) {
	from, to, several := strings.Cut(strings.ReplaceAll(cell, ",", ""), "-")
	if least, err = strconv.ParseFloat(from, 64); err != nil || !several {
		return least, least, err
	}
	most, err = strconv.ParseFloat(to, 64)
	return least, most, err
}

// What the picture of training shows: GPT-2, of which a GPU takes so many tokens a step.
const (
	title = "Training GPT-2 124M in bf16, a batch of 16 x 1024 on each GPU: " +
		"thousand tokens a second"
	pictured = "GPT-2 124M, context 1024, batch 16, bf16"
	tokens   = 16 * 1024
)

// bar is what GPUs do in a way, and the column that has the time of a step.
type bar struct {
	on, way, column string
}

var bars = []bar{
	{"1 H200", "Euryale", "Euryale, us"},
	{"1 H200", "torch.compile", "compile, us"},
	{"1 H200", "PyTorch, eager", "eager, us"},
	{"2 H100", "Euryale", "Euryale, us"},
	{"2 H100", "PyTorch DDP, eager", "DDP, us"},
	{"4 H100", "Euryale", "Euryale, us"},
	{"4 H100", "PyTorch DDP, eager", "DDP, us"},
}

// drawTraining draws how many tokens a second GPUs train on, from the rows of the page of
// benchmarks. Of several rows and runs the slowest one counts.
func drawTraining(output, root string) error {
	page, err := os.ReadFile(filepath.Join(root, "docs", "benchmarks.md"))
	if err != nil {
		return err
	}
	one, err := rows(page, "## Training steps")
	if err != nil {
		return err
	}
	several, err := rows(page, "### On several GPUs")
	if err != nil {
		return err
	}
	const width, left, longest, high = 860, 250, 400, 26
	var drawn bytes.Buffer
	y, above, scale := 40, "", 0.0
	for _, b := range slices.Backward(bars) { // the last ones are the longest
		rate, _, err := b.rate(append(one, several...))
		if err != nil {
			return err
		}
		scale = max(scale, rate)
	}
	for _, b := range bars {
		rate, efficiency, err := b.rate(append(one, several...))
		if err != nil {
			return err
		}
		colour := "#9aa5b1"
		if b.way == "Euryale" {
			colour = "#c0392b"
		}
		if b.on != above {
			y += high / 2
			fmt.Fprintf(&drawn, `<text x="10" y="%d" font-weight="bold">%s</text>`+"\n", y+16, b.on)
			above = b.on
		}
		long := int(longest * rate / scale)
		fmt.Fprintf(&drawn, `<text x="%d" y="%d" text-anchor="end">%s</text>`+"\n", left-8, y+16,
			b.way)
		fmt.Fprintf(&drawn, `<rect x="%d" y="%d" width="%d" height="%d" fill="%s"/>`+"\n", left, y,
			long, high-6, colour)
		fmt.Fprintf(&drawn, `<text x="%d" y="%d">%s%s</text>`+"\n", left+long+8, y+16,
			humanize.Comma(int64(math.Round(rate/1e3))), efficiency)
		y += high
	}
	return os.WriteFile(output, fmt.Appendf(nil, `<svg xmlns="http://www.w3.org/2000/svg" `+
		`viewBox="0 0 %d %d" font-family="sans-serif" font-size="14">`+"\n"+
		`<rect width="100%%" height="100%%" fill="white"/>`+"\n"+
		`<text x="10" y="26" font-size="16">%s</text>`+"\n%s</svg>\n", width, y+12, title, &drawn),
		0o666)
}

// rate returns the tokens a second of the slowest run, and what to say of its efficiency.
func (b bar) rate(all []row) (rate float64, efficiency string, err error) {
	n := float64(b.on[0] - '0')
	slowest := 0.0
	for _, r := range all {
		on := r["GPUs"]
		if on == "" {
			on = "1 " + r["machine"]
		}
		if r["model"] != pictured || on != b.on || r[b.column] == "" {
			continue
		}
		_, micros, err := span(r[b.column])
		if err != nil {
			return 0, "", err
		}
		if slowest = max(slowest, micros); slowest == micros && r["efficiency"] != "" {
			least, _, err := span(r["efficiency"])
			if err != nil {
				return 0, "", err
			}
			efficiency = fmt.Sprintf(" (efficiency %.3g)", least)
		}
	}
	if slowest == 0 {
		return 0, "", fmt.Errorf("docs/benchmarks.md has no %s of %s on %s", b.column, pictured,
			b.on)
	}
	if b.way != "Euryale" {
		efficiency = "" // it is ours
	}
	return n * tokens / slowest * 1e6, efficiency, nil
}
