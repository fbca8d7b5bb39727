package report

import (
	"fmt"
	"html"
	"html/template"
	"maps"
	"math"
	"slices"
	"strconv"
	"strings"

	"github.com/dustin/go-humanize"

	"github.com/euryale-ml/euryale/observe/internal/chrome"
)

// chart is lines over a common axis. The page's script reads it, too.
type chart struct {
	Title string  `json:"title"`
	X     string  `json:"x"`
	Lines []curve `json:"lines"`
	area  bool
}

// curve is one line of a chart.
type curve struct {
	Name   string       `json:"name"`
	Points [][2]float64 `json:"points"`
}

// drawing is an SVG being written.
type drawing struct{ strings.Builder }

func (d *drawing) add(format string, args ...any) { fmt.Fprintf(d, format+"\n", args...) }

// text writes words; anchor is start, middle or end.
func (d *drawing) text(x, y float64, anchor, words string) {
	d.add(`<text x="%.1f" y="%.1f" text-anchor="%s">%s</text>`, x, y, anchor,
		html.EscapeString(words))
}

func (d *drawing) done() template.HTML {
	d.WriteString("</svg>")
	return template.HTML(d.String()) // numbers, and escaped texts
}

// open begins a drawing of a given size, with a CSS class and a name for screen readers.
func (d *drawing) open(class, name string, width, height float64, more string) {
	d.add(`<svg class="%s" viewBox="0 0 %.0f %.0f" role="img" aria-label="%s"%s>`, class, width,
		height, html.EscapeString(name), more)
}

// The sizes of a chart, also used by the script.
const (
	chartWidth, chartHeight         = 360.0, 194.0
	chartLeft, chartRight, chartTop = 46.0, 342.0, 8.0
	chartBottom, colours, mostDots  = 166.0, 4, 24
)

// SVG draws the chart; number is its index among the charts that the script knows. A chart without
// points is empty.
func (c chart) SVG(number int) template.HTML {
	low, high := c.limits()
	if high[0] < low[0] {
		return ""
	}
	x := func(v float64) float64 {
		return chartLeft + (v-low[0])/(high[0]-low[0])*(chartRight-chartLeft)
	}
	y := func(v float64) float64 {
		return chartBottom - (v-low[1])/(high[1]-low[1])*(chartBottom-chartTop)
	}
	var d drawing
	d.open("chart", c.Title, chartWidth, chartHeight, fmt.Sprintf(
		` data-chart="%d" data-low="%g" data-high="%g"`, number, low[0], high[0]))
	for _, v := range ticks(low[1], high[1], 4) {
		d.add(`<line class="grid" x1="%.1f" x2="%.1f" y1="%.1f" y2="%.1[3]f"/>`, chartLeft,
			chartRight, y(v))
		words := short(v)
		if c.area {
			words = bytesText(int64(v))
		}
		d.text(chartLeft-4, y(v)+3, "end", words)
	}
	for _, v := range ticks(low[0], high[0], 5) {
		d.text(x(v), chartBottom+13, "middle", short(v))
	}
	d.text(chartRight, chartHeight-4, "end", c.X)
	for i, line := range c.Lines {
		var points, dots drawing
		for _, p := range line.Points {
			points.add(`%.1f,%.1f`, x(p[0]), y(p[1]))
			dots.add(`<circle class="dot l%d" cx="%.1f" cy="%.1f" r="2"/>`, i%colours, x(p[0]),
				y(p[1]))
		}
		if c.area {
			d.add(`<polygon class="area" points="%.1f,%.1f %s%.1f,%.1[2]f"/>`, chartLeft,
				chartBottom, points.String(), chartRight)
		}
		d.add(`<polyline class="line l%d" points="%s"/>`, i%colours, points.String())
		if len(line.Points) <= mostDots && !c.area {
			d.WriteString(dots.String())
		}
	}
	return d.done()
}

// limits returns the ranges of the axes, extended to 0 if that is near; without points, high is
// below low.
func (c chart) limits() (low, high [2]float64) {
	low, high = [2]float64{math.Inf(1), math.Inf(1)}, [2]float64{math.Inf(-1), math.Inf(-1)}
	for _, line := range c.Lines {
		for _, p := range line.Points {
			for i := range p {
				low[i], high[i] = min(low[i], p[i]), max(high[i], p[i])
			}
		}
	}
	if c.area || low[1] > 0 && low[1] < high[1]/2 {
		low[1] = 0
	}
	for i := range high {
		if high[i] == low[i] {
			low[i], high[i] = low[i]-0.5, high[i]+0.5
		}
	}
	return low, high
}

// ticks returns about n round numbers from low to high.
func ticks(low, high float64, n int) (all []float64) {
	unit := math.Pow(10, math.Floor(math.Log10((high-low)/float64(n))))
	for _, m := range []float64{1, 2, 5, 10} {
		if (high-low)/(m*unit) <= float64(n) {
			unit *= m
			break
		}
	}
	// Beyond 2^53, i + 1 may be i.
	for i := math.Ceil(low/unit - 1e-9); i*unit <= high+unit*1e-9 && len(all) <= n; i++ {
		all = append(all, i*unit+0) // no -0
	}
	return all
}

// short writes a number in few characters.
func short(v float64) string {
	if math.Abs(v) >= 1e4 && math.Abs(v) < 1e7 {
		return strconv.FormatFloat(math.Round(v/10)/100, 'g', 5, 64) + "k"
	}
	return strconv.FormatFloat(v, 'g', 4, 64)
}

// bytesText writes bytes in the largest unit of which there is at least one.
func bytesText(n int64) string { return humanize.Bytes(uint64(n)) }

// The sizes of a timeline.
const (
	timelineLeft, timelineWidth = 58.0, 900.0
	laneHeight, gap             = 15.0, 5.0
	thinnest                    = 0.4
)

// lanes says where the calls of each rank's queues are drawn, from the top.
type lanes map[[2]int]float64

// timeline draws a step with all ranks: a row for each, and in it a lane for each queue.
func timeline(s *trainStep) template.HTML {
	var rows drawing
	calls := s.calls[:min(len(s.calls), mostCalls)]
	at, height := rows.lanes(calls)
	scale := (timelineWidth - timelineLeft) / max(s.Millis, 1e-6)
	drawn := lanes{}
	for _, c := range calls {
		lane := [2]int{c.Process, c.Thread}
		from := timelineLeft + max(0, (c.Start-s.from).Millis()*scale)
		to := min(timelineWidth, timelineLeft+(c.endTime()-s.from).Millis()*scale)
		if to < drawn[lane]+thinnest {
			continue // too thin, and next to another
		}
		drawn[lane] = max(to, from+thinnest)
		rows.call(c, from, drawn[lane], at[lane])
		until := timelineLeft + (c.last-s.from).Millis()*scale
		if until > from+thinnest {
			rows.add(`<rect class="wait" x="%.2f" y="%.1f" width="%.2f" height="%.0f"/>`, from,
				at[lane], min(until, drawn[lane])-from, laneHeight-3)
		}
	}
	var d drawing
	d.open("timeline", fmt.Sprintf("step %d", s.Number), timelineWidth+20, height+24, "")
	for _, t := range ticks(0, s.Millis, 8) {
		x := timelineLeft + t*scale
		d.add(`<line class="grid" x1="%.1f" x2="%.1[1]f" y1="0" y2="%.1f"/>`, x, height+4)
		d.text(x, height+18, "middle", short(t)+" ms")
	}
	d.WriteString(rows.String())
	return d.done()
}

// lanes draws the empty lanes of calls.
func (d *drawing) lanes(calls []*event) (at lanes, height float64) {
	at, height = lanes{}, gap
	for _, c := range calls {
		at[[2]int{c.Process, c.Thread}] = 0
	}
	rank := -1
	for _, lane := range slices.SortedFunc(maps.Keys(at), func(a, b [2]int) int {
		return slices.Compare(a[:], b[:])
	}) {
		if lane[0] != rank {
			rank, height = lane[0], height+gap
			d.text(timelineLeft-6, height+11, "end", fmt.Sprintf("rank %d", rank))
		}
		at[lane] = height
		d.add(`<rect class="idle" x="%.0f" y="%.1f" width="%.0f" height="%.0f"/>`, timelineLeft,
			height, timelineWidth-timelineLeft, laneHeight-3)
		height += laneHeight
	}
	return at, height
}

// call draws a call.
func (d *drawing) call(c *event, from, to, y float64) {
	height := laneHeight - 3
	if !c.isCall() {
		y, height = y+2, height-4
	}
	about := fmt.Sprintf("rank %d: %s%s, %s, %.3f ms", c.Process, c.Args.What,
		map[string]string{chrome.Part: ", " + c.Name}[c.Category], bytesText(c.Args.Bytes),
		c.Took.Millis())
	if c.Args.Algorithm != "" {
		about += ", " + c.Args.Algorithm
	}
	if c.Args.Error != "" {
		about += ": " + c.Args.Error
	}
	d.add(`<rect class="k%d" x="%.2f" y="%.1f" width="%.2f" height="%.0f"><title>%s</title></rect>`,
		c.kind, from, y, to-from, height, html.EscapeString(about))
}
