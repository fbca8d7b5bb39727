package report

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/euryale-ml/euryale/backend"
)

// traceID says whose trace it is. Jobs that are not elastic have one generation.
type traceID struct{ generation, rank int }

// trace is what a rank has recorded.
type trace struct {
	traceID
	path   string
	calls  []*event // whole ones and parts, in the order of their starts
	clock  clock
	common map[callID]*event // the whole ones
}

// callID is what a call has in common on all ranks of its group.
type callID struct {
	group string
	seq   uint64
}

// event is a call of a rank, or a part of one, see observe.Recorder.WriteChrome.
type event struct {
	Name     string `json:"name"`
	Category string `json:"cat"`
	Phase    string `json:"ph"`
	Start    nanos  `json:"ts"`
	Took     nanos  `json:"dur"`
	Queue    int    `json:"tid"`
	Args     struct {
		Call, Group, Algorithm, Error string
		Seq                           uint64
		Rank, Root                    int
		Bytes                         int64
	} `json:"args"`

	kind backend.Kind
	rank int // in the job
}

func (c *event) id() callID { return callID{c.Args.Group, c.Args.Seq} }
func (c *event) end() nanos { return c.Start + c.Took }

// whole reports whether c is no part of a call.
func (c *event) whole() bool { return c.Category == "collective" }

// syncs reports whether no rank's call can end before every rank's has begun.
func (c *event) syncs() bool {
	switch c.kind {
	case backend.AllReduce, backend.ReduceScatter, backend.AllGather, backend.AllToAll:
		return c.whole() && c.Args.Bytes > 0 && c.Phase == "X" && c.Args.Error == ""
	}
	return false
}

// nanos are nanoseconds, which a trace has as microseconds with three decimals: more digits than a
// float64.
type nanos int64

// UnmarshalJSON reads microseconds.
func (n *nanos) UnmarshalJSON(text []byte) error {
	whole, part, _ := strings.Cut(string(text), ".")
	value, err := strconv.ParseInt(whole+(part + "000")[:3], 10, 64)
	*n = nanos(value)
	return err
}

// MarshalJSON writes microseconds.
func (n nanos) MarshalJSON() ([]byte, error) {
	return fmt.Appendf(nil, "%d.%03d", n/1000, n%1000), nil
}

func (n nanos) millis() float64 { return float64(n) / 1e6 }

// errEmpty: a session makes the file when it starts, and writes it at its end.
var errEmpty = errors.New("the trace is empty: the rank was killed, or still runs")

func readTrace(path string, id traceID) (*trace, error) {
	var file struct {
		Events []*event `json:"traceEvents"`
	}
	if err := decodeTrace(path, &file); err != nil || file.Events == nil {
		return nil, err
	}
	t := &trace{traceID: id, path: path, common: map[callID]*event{}}
	for _, c := range file.Events {
		if c.Phase != "X" && c.Phase != "B" || c.Category != "collective" && c.Category != "part" {
			continue
		}
		c.rank = id.rank
		if id.generation > 0 { // whose calls are counted anew
			c.Args.Group += fmt.Sprintf(" of generation %d", id.generation)
		}
		if c.whole() {
			c.kind, _ = backend.ParseKind(c.Name)
			t.common[c.id()] = c
		}
		t.calls = append(t.calls, c)
	}
	return t, nil
}

func decodeTrace(path string, to any) error {
	text, err := os.ReadFile(path)
	if err == nil && len(text) == 0 {
		return errEmpty
	}
	if err == nil {
		err = json.Unmarshal(text, to)
	}
	return err
}

// WriteChrome writes the traces of all ranks as one, on the clock of the first.
//
// Errors: ErrArgument if there is no trace; those of w.
func (j *Job) WriteChrome(w io.Writer) error {
	if len(j.traces) == 0 {
		return fmt.Errorf("report: %w: there is no trace to write: set EURYALE_TRACE",
			backend.ErrArgument)
	}
	type fields map[string]json.RawMessage
	var all struct {
		Events []fields `json:"traceEvents"`
		Unit   string   `json:"displayTimeUnit"`
	}
	for _, t := range j.traces {
		var file struct {
			Events []fields `json:"traceEvents"`
		}
		if err := decodeTrace(t.path, &file); err != nil {
			return fmt.Errorf("report: %s: %w", t.path, err)
		}
		for _, e := range file.Events {
			var at nanos
			if text, ok := e["ts"]; ok && at.UnmarshalJSON(text) == nil {
				e["ts"], _ = t.clock.common(at).MarshalJSON()
			}
		}
		all.Events = append(all.Events, file.Events...)
	}
	all.Unit = "ns"
	return json.NewEncoder(w).Encode(all)
}

// clock says how far a rank's clock is ahead of the first one's, at some times of its own.
type clock struct {
	at, ahead []nanos
	within    nanos // half of what the bounds leave
	unknown   bool  // the ranks have no call in common
}

// common returns a time of the rank's on the common clock.
func (c clock) common(t nanos) nanos {
	n := len(c.at)
	if n == 0 {
		return t
	}
	i, found := slices.BinarySearch(c.at, t)
	switch {
	case found || i == 0:
		return t - c.ahead[min(i, n-1)]
	case i == n:
		return t - c.ahead[n-1]
	}
	part := float64(t-c.at[i-1]) / float64(c.at[i]-c.at[i-1])
	return t - c.ahead[i-1] - nanos(part*float64(c.ahead[i]-c.ahead[i-1]))
}

// callsOfBound is from how many calls a bound of a clock is taken at least, and maxBounds how many
// bounds there are at most.
const (
	callsOfBound = 64
	maxBounds    = 32
	// sameClock is how far two recorders of one machine may be apart, whose processes measure a
	// tick each.
	sameClock nanos = 20_000
)

// align brings the traces of a generation onto the clock of the first one.
func align(traces []*trace) {
	for i, t := range traces {
		if i > 0 {
			t.clock = clockOf(t, traces[0])
		}
		for _, c := range t.calls {
			from, to := t.clock.common(c.Start), t.clock.common(c.end())
			c.Start, c.Took = from, to-from
		}
		slices.SortStableFunc(t.calls, func(a, b *event) int {
			return cmp.Compare(a.Start, b.Start)
		})
	}
}

// clockOf bounds how far the clock of t is ahead of another.
func clockOf(t, of *trace) (c clock) {
	var at, low, high []nanos
	for _, mine := range t.calls {
		other := of.common[mine.id()]
		if mine.syncs() && other != nil && other.syncs() {
			at = append(at, mine.Start)
			low = append(low, mine.Start-other.end())
			high = append(high, mine.end()-other.Start)
		}
	}
	if len(at) == 0 {
		return clock{unknown: true}
	}
	n, apart := min(max(len(at)/callsOfBound, 1), maxBounds), 0
	for i := range n {
		from, to := i*len(at)/n, (i+1)*len(at)/n
		slices.Sort(low[from:to])
		slices.Sort(high[from:to])
		// A rank may have been off its core between a call and its note: some bounds are wrong.
		wrong := (to - from) / 20
		least, most := low[to-1-wrong], high[from+wrong]
		if least > sameClock || most < -sameClock {
			apart++
		}
		c.at = append(c.at, at[(from+to)/2])
		c.ahead = append(c.ahead, least+(most-least)/2)
		c.within = max(c.within, (most-least)/2, (least-most)/2)
	}
	if apart <= n/8 {
		return clock{}
	}
	return c
}

// numbered matches what differs between the calls of two steps.
var numbered = regexp.MustCompile(`\(call \d+|^replay \d+`)

// signature is what a call has in common with that of the next step.
func (c *event) signature() string {
	return c.Args.Group + " " + numbered.ReplaceAllString(c.Args.Call, "")
}
