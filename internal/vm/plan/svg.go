package plan

import (
	"fmt"
	"html"
	"strings"
	"unicode/utf8"
)

// The drawing's sizes, in pixels.
const (
	svgWidth  = 1200 // of the arena, with the margins
	svgArena  = 480  // height of the arena
	svgLine   = 14   // height of a line of text
	svgLetter = 6.6  // width of a letter, whatever the font
	svgMargin = 20
)

// SVG returns the plan as a drawing. Each value in the arena is a bar: from left to right the steps
// during which it lives, from top to bottom its bytes in the arena. Bars of results have an edge.
// Below is the plan's text.
func (p *Plan) SVG() string {
	lines := strings.Split(strings.TrimSpace(p.String()), "\n")
	top := svgMargin + svgArena + 2*svgLine
	width := float64(svgWidth)
	for _, line := range lines {
		width = max(width, 2*svgMargin+svgTextWidth(line))
	}
	var b strings.Builder
	fmt.Fprintf(&b, `<svg xmlns="http://www.w3.org/2000/svg" width="%.0f" height="%d" `+
		`font-family="monospace" font-size="%d">`+"\n", width, top+(len(lines)+1)*svgLine,
		svgLine-3)
	svgText(&b, svgLine, fmt.Sprintf("%d bytes by %d steps", p.ArenaBytes, len(p.Steps)))
	names := p.writers()
	for i, buffer := range p.Buffers {
		if buffer.Kind == Arena && buffer.Last >= 0 && buffer.Bytes > 0 {
			b.WriteString(p.bar(buffer, names[i]))
		}
	}
	for i, line := range lines {
		svgText(&b, top+i*svgLine, line)
	}
	b.WriteString("</svg>\n")
	return b.String()
}

// svgTextWidth returns the width of a line of text.
func svgTextWidth(line string) float64 { return svgLetter * float64(utf8.RuneCountInString(line)) }

// svgText draws a line of text. Its length is given, so that no font is wider than the drawing.
func svgText(b *strings.Builder, y int, line string) {
	if line != "" {
		fmt.Fprintf(b, `<text x="%d" y="%d" textLength="%.1f" lengthAdjust="spacingAndGlyphs" `+
			`xml:space="preserve">%s</text>`+"\n", svgMargin, y, svgTextWidth(line),
			html.EscapeString(line))
	}
}

// writers returns, for each buffer, the steps that write to it.
func (p *Plan) writers() map[int]string {
	names := map[int]string{}
	for i, s := range p.Steps {
		for _, d := range s.Dsts {
			names[d.Buffer] += fmt.Sprintf("\n%d: %v of %s", i, s.Op, s.Name)
		}
	}
	return names
}

// bar draws the life of a buffer.
func (p *Plan) bar(b Buffer, writers string) string {
	step := float64(svgWidth-2*svgMargin) / float64(len(p.Steps)+1)
	scale := svgArena / float64(p.ArenaBytes)
	edge := "none"
	if b.Last == len(p.Steps) {
		edge = "black"
	}
	const hues, stride = 360, 47 // neighbours differ
	return fmt.Sprintf(
		`<rect x="%.1f" y="%.1f" width="%.1f" height="%.1f" `+
			`fill="hsl(%d,60%%,70%%)" stroke="%s"><title>%s</title></rect>`+"\n",
		svgMargin+float64(b.First)*step, svgMargin+float64(b.Offset)*scale, float64(
			b.Last-b.First+1)*step, float64(b.Bytes)*scale,
		b.First*stride%hues, edge, html.EscapeString(fmt.Sprintf("%d bytes at %d, steps %d to %d%s",
			b.Bytes, b.Offset, b.First, b.Last, writers)))
}
