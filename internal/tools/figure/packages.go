package main

import (
	"bytes"
	"cmp"
	"fmt"
	"os"
	"slices"
	"strings"
)

// The picture of packages, in pixels.
const (
	pictureWidth = 1000
	rowHeight    = 88
	roomHeight   = 36
	letter       = 7 // of a title
	smallLetter  = 6
	top          = 16
	laneGap      = 10 // between arrows that pass a row
)

const style = `<style>
rect.page{fill:#fff} text{font:12px ui-monospace,Menlo,Consolas,monospace;fill:#1f2328}
text.small{font-size:10px} text.note{font:12px system-ui,sans-serif;fill:#59636e}
rect.room{stroke:#8c959f} path{fill:none;stroke:#8c959f;stroke-width:1.2} marker path{fill:#8c959f}
.program{fill:#f6f8fa} .graph{fill:#ddf4ff} .leaf{fill:#dafbe1} .kernel{fill:#fff1e5}
.contract{fill:#fff8c5}
@media (prefers-color-scheme:dark){
rect.page{fill:#0d1117} text{fill:#e6edf3} text.note{fill:#9198a1}
rect.room{stroke:#656c76} path{stroke:#7d8590} marker path{fill:#7d8590}
.program{fill:#21262d} .graph{fill:#0c2d4d} .leaf{fill:#0f3320} .kernel{fill:#4a2a10}
.contract{fill:#3f3205}
}
</style>
<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7"
 orient="auto"><path d="M0,0 L8,4 L0,8 z"/></marker></defs>
`

// drawPackages writes the picture of the packages of the module at root and of what they import.
func drawPackages(output, root string) error {
	found, err := imports(root)
	if err != nil {
		return err
	}
	from, err := arrows(found)
	if err != nil {
		return err
	}
	var svg bytes.Buffer
	height := top + len(rooms)*rowHeight
	fmt.Fprintf(&svg, `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %d %d" role="img">`+"\n"+
		"<title>Packages and what they import</title>\n%s"+
		`<rect class="page" width="%[1]d" height="%[2]d"/>`+"\n", pictureWidth, height, style)
	for _, way := range route(from) {
		fmt.Fprintf(&svg, `<path marker-end="url(#head)" d="%s"/>`+"\n", way)
	}
	for row, rooms := range rooms {
		for _, r := range rooms {
			r.draw(&svg, rowTop(row))
		}
	}
	note(&svg, height)
	svg.WriteString("</svg>\n")
	return os.WriteFile(output, svg.Bytes(), 0o666)
}

// note says what the picture leaves out.
func note(svg *bytes.Buffer, height int) {
	for i, line := range []string{
		"An arrow points from a package to one that it imports. Arrows that follow from others " +
			"are left out, as are tests and tools.",
		"Below all of them, without arrows: " + strings.Join(everywhere, ", ") + ".",
	} {
		fmt.Fprintf(svg, `<text class="note" x="16" y="%d">%s</text>`+"\n", height-32+18*i, line)
	}
}

func (r room) draw(svg *bytes.Buffer, y int) {
	fmt.Fprintf(svg, `<rect class="room %s" x="%d" y="%d" width="%d" height="%d" rx="5"/>`, r.kind,
		r.x-r.width()/2, y, r.width(), roomHeight)
	title := y + 22
	if r.others != "" {
		title = y + 16
		fmt.Fprintf(svg, `<text class="small" x="%d" y="%d" text-anchor="middle">%s</text>`, r.x,
			y+29, r.others)
	}
	fmt.Fprintf(svg, `<text x="%d" y="%d" text-anchor="middle">%s</text>`+"\n", r.x, title, r.title)
}

func (r room) width() int { return max(letter*len(r.title), smallLetter*len(r.others)) + 16 }

func rowTop(row int) int { return top + row*rowHeight }

// arrow is one arrow of the picture: the x at which it leaves its room, passes each row between,
// and enters the other room.
type arrow struct {
	from, to cell
	x        []int
}

// route lays the arrows between the rooms, and returns their paths.
func route(from map[cell][]cell) []string {
	var all []arrow
	for source, targets := range from {
		for _, target := range targets {
			all = append(all, arrow{from: source, to: target})
		}
	}
	slices.SortFunc(all, func(a, b arrow) int { // short ones first: they go straight
		return cmp.Or(cmp.Compare(a.to.row-a.from.row, b.to.row-b.from.row),
			compareCells(a.from, b.from), compareCells(a.to, b.to))
	})
	lanes := map[cell]cell{} // by row and x: the target of the arrow that passes there
	for i := range all {
		all[i].pass(lanes)
	}
	spread(all, func(a arrow) (cell, int) { return a.from, 0 })
	spread(all, func(a arrow) (cell, int) { return a.to, len(a.x) - 1 })
	var ways []string
	for _, a := range all {
		ways = append(ways, a.path())
	}
	return ways
}

// pass finds where an arrow passes the rows between its rooms: as near to the straight line as
// rooms and other arrows allow. Arrows to the same room share a lane.
func (a *arrow) pass(lanes map[cell]cell) {
	x, goal := rooms[a.from.row][a.from.column].x, rooms[a.to.row][a.to.column].x
	a.x = []int{x}
	for row := a.from.row + 1; row < a.to.row; row++ {
		x += (goal - x) / (a.to.row - row + 1)
		for away := 0; ; away++ {
			if a.free(lanes, row, x+away) {
				x += away
				break
			}
			if a.free(lanes, row, x-away) {
				x -= away
				break
			}
		}
		lanes[cell{row, x}] = a.to
		a.x = append(a.x, x)
	}
	a.x = append(a.x, goal)
}

// free reports whether an arrow can pass a row at x.
func (a *arrow) free(lanes map[cell]cell, row, x int) bool {
	for _, r := range rooms[row] {
		if x > r.x-r.width()/2-laneGap && x < r.x+r.width()/2+laneGap {
			return false
		}
	}
	for near := x - laneGap + 1; near < x+laneGap; near++ {
		if target, ok := lanes[cell{row, near}]; ok && (target != a.to || near != x) {
			return false
		}
	}
	return true
}

// spread gives arrows that meet at one room, at the end which the function names, places along its
// edge, in the order from which they come. Those of one lane have one place.
func spread(all []arrow, end func(arrow) (cell, int)) {
	meet := map[cell][]*arrow{}
	for i := range all {
		at, _ := end(all[i])
		meet[at] = append(meet[at], &all[i])
	}
	for at, arrows := range meet {
		r := rooms[at.row][at.column]
		lane := func(a *arrow) int { // the next x, seen from the room
			if _, index := end(*a); index > 0 {
				return a.x[index-1]
			}
			return a.x[1]
		}
		slices.SortStableFunc(arrows, func(a, b *arrow) int {
			return cmp.Compare(lane(a), lane(b))
		})
		var xs []int
		for _, a := range arrows {
			xs = append(xs, lane(a))
		}
		xs = slices.Compact(xs)
		gap := min(24, r.width()/(len(xs)+1))
		for _, a := range arrows {
			_, index := end(*a)
			a.x[index] = r.x + gap*slices.Index(xs, lane(a)) - gap*(len(xs)-1)/2
		}
	}
}

// path returns the arrow as the data of an SVG path.
func (a *arrow) path() string {
	var d strings.Builder
	y := rowTop(a.from.row) + roomHeight
	fmt.Fprintf(&d, "M%d,%d", a.x[0], y)
	for i, x := range a.x[1:] {
		row := a.from.row + 1 + i
		half := (rowTop(row) - y) / 2
		fmt.Fprintf(&d, " C%d,%d %d,%d %d,%d", a.x[i], y+half, x, y+half, x, rowTop(row))
		if y = rowTop(row) + roomHeight; row < a.to.row {
			fmt.Fprintf(&d, " V%d", y)
		}
	}
	return d.String()
}
