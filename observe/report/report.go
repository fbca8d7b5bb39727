package report

import (
	"cmp"
	_ "embed"
	"fmt"
	"html/template"
	"io"
	"maps"
	"slices"
	"strings"

	"github.com/euryale-ml/euryale/backend"
)

//go:embed page.html
var pageText string

// Limits on what the page shows.
const (
	mostPoints = 2000   // of a curve
	mostSlow   = 10     // steps
	mostCalls  = 20000  // in timelines
	mostRanks  = 64     // in the matrix
	mostLate   = 100000 // numbers, of ranks in steps
)

// page is the data that the page shows and its script reads.
type page struct {
	Job      string       `json:"job"`
	Size     int          `json:"ranks"`
	Charts   []chart      `json:"charts"`
	Some     []*trainStep `json:"steps"`
	Ranks    []rankLine   `json:"perRank"`
	Calls    []callLine   `json:"perCall"`
	Layers   []layerLine  `json:"perLayer"`
	Matrix   [][]int64    `json:"matrix"`
	Attempts []*attempt   `json:"attempts"`
	Remarks  []string     `json:"remarks"`

	Steps     []*trainStep   `json:"-"`
	Slow      []slow         `json:"-"`
	Usual     *trainStep     `json:"-"`
	Timelines []timelineStep `json:"-"`
	Kinds     []backend.Kind `json:"-"`
	Most      int64          `json:"-"` // of Matrix
	Plans     []memory       `json:"-"`
	Within    float64        `json:"-"` // microseconds, of the clocks
}

// rankLine is a row of the table of ranks: the mean over steps.
type rankLine struct {
	Rank        int     `json:"rank"`
	LateMillis  float64 `json:"late_ms"`
	WaitMillis  float64 `json:"wait_ms"`
	CallsMillis float64 `json:"calls_ms"`
	Sent        int64   `json:"sent_bytes"`
	AheadMillis float64 `json:"clock_ahead_ms"`
	Unknown     bool    `json:"clock_unknown"`
	Latest      bool    `json:"-"`
}

// timelineStep is a step with its picture.
type timelineStep struct {
	Name    string
	Picture template.HTML
}

// WriteHTML writes the page: one file that needs no other.
//
// Errors: those of w.
func (j *Job) WriteHTML(w io.Writer) error {
	part := func(n, most int64) int64 { return int64(80 * float64(n) / float64(max(most, 1))) }
	text, err := template.New("page").Funcs(template.FuncMap{"bytes": bytesText,
		"part": part}).Parse(pageText)
	if err != nil {
		return fmt.Errorf("report: %w", err)
	}
	return text.Execute(w, j.page())
}

func (j *Job) page() *page {
	p := &page{Job: j.name, Size: j.size, Steps: j.steps, Matrix: j.matrix(), Plans: j.plans}
	p.Remarks = j.remarks
	p.Some, p.Charts = thinned(p.Steps, mostLate/max(p.Size, 1)), j.charts()
	p.Slow, p.Usual = slowest(p.Steps, mostSlow)
	if p.Usual != nil {
		p.Ranks, p.Calls = j.ranks(p.Steps, p.Matrix), exchanges(j.traces)
		p.Layers = layers(j.traces, p.Usual.Millis)
		p.timelines()
	}
	if p.Size < 2 || p.Size > mostRanks {
		p.Matrix = nil
	}
	for _, row := range p.Matrix {
		p.Most = max(p.Most, slices.Max(append(row, 0)))
	}
	for _, m := range j.plans {
		p.Charts = append(p.Charts, m.chart())
	}
	for _, n := range slices.Sorted(maps.Keys(j.attempts)) {
		p.Attempts = append(p.Attempts, j.attempts[n])
	}
	for _, t := range j.traces {
		p.Within = max(p.Within, float64(t.clock.within)/1e3)
	}
	return p
}

// charts returns the curves; those of training and validation share a chart.
func (j *Job) charts() (all []chart) {
	ids := slices.SortedFunc(maps.Keys(j.curves), func(a, b curveID) int {
		return cmp.Or(strings.Compare(a.over, b.over), strings.Compare(a.chart(), b.chart()),
			strings.Compare(a.name, b.name))
	})
	for i, id := range ids {
		line := curve{Name: id.name}
		for _, x := range slices.Sorted(maps.Keys(j.curves[id])) {
			line.Points = append(line.Points, [2]float64{x, j.curves[id][x]})
		}
		line.Points = thinned(line.Points, mostPoints)
		if i > 0 && id.chart() == ids[i-1].chart() && id.over == ids[i-1].over {
			all[len(all)-1].Lines = append(all[len(all)-1].Lines, line)
		} else {
			all = append(all, chart{Title: id.chart(), X: id.over, Lines: []curve{line}})
		}
	}
	return all
}

// chart is the title of the chart that a curve is in.
func (id curveID) chart() string { return strings.TrimPrefix(id.name, "val_") }

// thinned keeps points at equal distances, and the last.
func thinned[T any](points []T, most int) (some []T) {
	every := max(1, (len(points)+most-1)/max(most, 1))
	for i := (len(points) - 1) % every; i < len(points) && i >= 0; i += every {
		some = append(some, points[i])
	}
	return some
}

// stepCurves adds the times and the throughput of the steps in the traces.
func (j *Job) stepCurves() {
	const over, window = "step of the traces", 20
	for _, s := range j.steps {
		j.point(curveID{"time of a step, ms", over}, float64(s.Number), s.Millis, true)
	}
	for some := range slices.Chunk(j.steps, window) {
		last := some[len(some)-1]
		if took := (last.to - some[0].from).Millis(); took > 0 {
			j.point(curveID{"steps a second", over}, float64(last.Number),
				1000*float64(len(some))/took, true)
		}
	}
}

// ranks returns the table of ranks.
func (j *Job) ranks(steps []*trainStep, sent [][]int64) (all []rankLine) {
	n := float64(len(steps))
	lines := make([]rankLine, j.size)
	for _, s := range steps {
		for r, late := range s.Late {
			lines[r].LateMillis += late / n
		}
		busy := map[int]nanos{} // until when a rank is in calls
		for _, c := range s.calls {
			line, until := &lines[c.Process], busy[c.Process]
			line.WaitMillis += max(min(c.last-c.Start, c.Took), 0).Millis() / n
			if c.isCall() && c.endTime() > until {
				line.CallsMillis += (c.endTime() - max(c.Start, until)).Millis() / n
				busy[c.Process] = c.endTime()
			}
		}
	}
	latest := 0
	for _, t := range j.traces {
		if slices.ContainsFunc(all, func(l rankLine) bool { return l.Rank == t.rank }) {
			continue // of an earlier generation
		}
		l := &lines[t.rank]
		l.Rank, l.Unknown = t.rank, t.clock.unknown
		if len(t.clock.ahead) > 0 {
			l.AheadMillis = median(t.clock.ahead).Millis()
		}
		for _, b := range sent[t.rank] {
			l.Sent += b
		}
		all = append(all, *l)
		if l.LateMillis > all[latest].LateMillis {
			latest = len(all) - 1
		}
	}
	all[latest].Latest = all[latest].LateMillis > 0
	return all
}

// timelines draws the usual step and the slowest ones, as many as keep the page small.
func (p *page) timelines() {
	some, calls := append([]slow{{trainStep: p.Usual, Why: "a usual one"}}, p.Slow...), 0
	for i, s := range some {
		if calls += len(s.calls); i > 0 && calls > mostCalls {
			break
		}
		name := fmt.Sprintf("step %d, %.3f ms: %s", s.Number, s.Millis, s.Why)
		p.Timelines = append(p.Timelines, timelineStep{name, timeline(s.trainStep)})
		for _, c := range s.calls {
			if c.isCall() && !slices.Contains(p.Kinds, c.kind) {
				p.Kinds = append(p.Kinds, c.kind)
			}
		}
	}
	slices.Sort(p.Kinds)
}

// chart draws a plan's memory by its steps.
func (m memory) chart() chart {
	line := curve{Name: "bytes"}
	for i, s := range m.Steps {
		line.Points = append(line.Points, [2]float64{float64(i), float64(s.Bytes)})
	}
	return chart{"memory of " + m.Name, "step of the plan", []curve{line}, true}
}

// Peak says when the plan uses the most memory.
func (m memory) Peak() string {
	text, most := "nothing", int64(0)
	for i, s := range m.Steps {
		if s.Bytes > most {
			most = s.Bytes
			text = fmt.Sprintf("%s in step %d, %s", bytesText(most), i, s.Does)
		}
	}
	return text
}
