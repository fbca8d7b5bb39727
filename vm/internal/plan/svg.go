package plan

import (
	"fmt"
	"html"
	"strings"
)

// The drawing's sizes, in pixels.
const (
	svgWidth  = 1200
	svgArena  = 480 // height of the arena
	svgLine   = 14  // height of a line of text
	svgMargin = 20
)

// SVG returns the plan as a drawing. Each value in the arena is a bar: from left to right the steps
// during which it lives, from top to bottom its bytes in the arena. Bars of results have an edge.
// Below is the plan's text.
func (p *Plan) SVG() string {
	lines := strings.Split(strings.TrimSpace(p.String()), "\n")
	top := svgMargin + svgArena + 2*svgLine
	var b strings.Builder
	fmt.Fprintf(&b, `<svg xmlns="http://www.w3.org/2000/svg" width="%d" height="%d" font-family="monospace" font-size="%d">`+"\n",
		svgWidth, top+(len(lines)+1)*svgLine, svgLine-3)
	fmt.Fprintf(&b, `<text x="%d" y="%d">%d bytes by %d steps</text>`+"\n", svgMargin, svgLine, p.ArenaBytes, len(p.Steps))
	names := p.writers()
	for i, buffer := range p.Buffers {
		if buffer.Kind == Arena && buffer.Last >= 0 && buffer.Bytes > 0 {
			b.WriteString(p.bar(buffer, names[i]))
		}
	}
	for i, line := range lines {
		fmt.Fprintf(&b, `<text x="%d" y="%d" xml:space="preserve">%s</text>`+"\n", svgMargin, top+i*svgLine, html.EscapeString(line))
	}
	b.WriteString("</svg>\n")
	return b.String()
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
	return fmt.Sprintf(`<rect x="%.1f" y="%.1f" width="%.1f" height="%.1f" fill="hsl(%d,60%%,70%%)" stroke="%s"><title>%s</title></rect>`+"\n",
		svgMargin+float64(b.First)*step, svgMargin+float64(b.Offset)*scale, float64(b.Last-b.First+1)*step, float64(b.Bytes)*scale,
		b.First*stride%hues, edge, html.EscapeString(fmt.Sprintf("%d bytes at %d, steps %d to %d%s", b.Bytes, b.Offset, b.First, b.Last, writers)))
}
