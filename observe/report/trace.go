package report

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"regexp"
	"slices"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/observe/internal/chrome"
)

// traceID says whose trace it is. Jobs that are not elastic have one generation.
type traceID struct {
	generation, rank int
	elastic          bool
}

// trace is what a rank has recorded.
type trace struct {
	traceID
	names  []*chrome.Event
	calls  []*event // whole ones, parts, and layers of recorded steps, in the order of their starts
	clock  clock
	common map[callID]*event // the whole ones
}

// callID is what a call has in common on all ranks of its group.
type callID struct {
	group string
	seq   uint64
}

// event is a call of a rank, a part of one, or a layer.
type event struct {
	*chrome.Event
	kind         backend.Kind
	last, behind nanos // when the last rank began the call; how much earlier the median rank did
}

func (c *event) id() callID     { return callID{c.Args.Group, c.Args.Seq} }
func (c *event) endTime() nanos { return c.Start + c.Took }

// isCall reports whether c is a whole call, not a part of one.
func (c *event) isCall() bool { return c.Category == chrome.Collective }

// syncs reports whether no rank's call can end before every rank's has begun.
func (c *event) syncs() bool {
	switch c.kind {
	case backend.AllReduce, backend.ReduceScatter, backend.AllGather, backend.AllToAll:
		return c.isCall() && c.Args.Bytes > 0 && c.Phase == "X" && c.Args.Error == ""
	}
	return false
}

type nanos = chrome.Nanos

// groupName finds the name of a job in the name of its group, before the part that is unique to the
// group. generationName finds what an elastic job has in between.
var (
	groupName      = regexp.MustCompile(`^(.*)-[A-Z2-7]{8}`)
	generationName = regexp.MustCompile(`\.\d+$`)
)

// jobOf returns what all traces of a job have in common.
func (t *trace) jobOf() string {
	name := groupName.FindString(t.calls[0].Args.Group)
	if t.elastic {
		name = generationName.ReplaceAllString(groupName.ReplaceAllString(name, "$1"), "")
	}
	return name
}

// leastEvent is how many bytes of a file an event of a rank has at least, but for a few, such as
// names, that have so many together.
const leastEvent, leastEvents = 128, 4096

// readTrace returns nil for a file that is not a trace.
func readTrace(in io.Reader, id traceID) (*trace, error) {
	file, key := json.NewDecoder(in), json.Token(nil)
	first, err := file.Token()
	switch {
	case err == io.EOF: // a session makes the file when it starts
		return nil, errors.New("the trace is empty: the rank was killed, or still runs")
	case id.rank >= mostSize:
		return nil, fmt.Errorf("a page shows %d ranks", mostSize)
	case first != json.Delim('{'):
		return nil, err
	}
	var t *trace
	for err == nil && file.More() {
		if key, err = file.Token(); err != nil || key != "traceEvents" || t != nil {
			err = cmp.Or(err, file.Decode(&json.RawMessage{}))
			continue
		}
		t = &trace{traceID: id, common: map[callID]*event{}}
		if first, err = file.Token(); err == nil && first != json.Delim('[') {
			return nil, nil
		}
		texts, all := map[string]string{}, int64(0)
		for err == nil && file.More() {
			var e *chrome.Event
			err = file.Decode(&e)
			if all++; err == nil && all*leastEvent > file.InputOffset()+leastEvents {
				err = fmt.Errorf("events of less than %d bytes are not those of a rank", leastEvent)
			}
			if err == nil && e != nil {
				err = t.add(e, texts)
			}
		}
		if err == nil {
			_, err = file.Token() // the end of the array
		}
	}
	if err == nil {
		_, err = file.Token()
	}
	if err == io.EOF || errors.Is(err, io.ErrUnexpectedEOF) {
		err = errors.New("unexpected end of JSON input")
	}
	if err != nil {
		return nil, err
	}
	return t, nil
}

// The bounds of numbers in a trace: sums of them are none beyond 64 bits.
const (
	mostNanos = 1 << 61 // since 1970: in 2043
	mostOfAll = 1 << 40 // bytes of a call, and whatever else is counted
)

// add adds an event. Its texts are kept once.
func (t *trace) add(e *chrome.Event, texts map[string]string) error {
	all := []*string{&e.Name, &e.Category, &e.Phase, &e.Args.Label}
	f := e.Args.Fields
	if f != nil {
		all = append(all, &f.Group, &f.DType, &f.Algorithm, &f.Error)
		if f.Rank < 0 || f.Rank >= mostSize || f.Bytes < 0 || f.Bytes > mostOfAll || e.Start < 0 ||
			e.Start > mostNanos || e.Took < 0 || e.Took > mostNanos || f.Busy < 0 ||
			f.Busy > mostNanos {
			return errors.New("it has a rank, a size or a time that no call has")
		}
		f.What = clean(f.What) // it has a number
	}
	for _, text := range all {
		if kept, known := texts[*text]; known {
			*text = kept
		} else {
			kept = clean(*text)
			texts[*text], *text = kept, kept
		}
	}
	kinds := []string{chrome.Collective, chrome.Part, chrome.Layer}
	if f == nil || !slices.Contains(kinds, e.Category) {
		t.names = append(t.names, e)
		return nil
	}
	e.Process = t.rank    // in the job
	if t.generation > 0 { // its calls are counted from the start again
		f.Group += fmt.Sprintf(" of generation %d", t.generation)
	}
	c := &event{Event: e}
	if c.isCall() {
		c.kind, _ = backend.ParseKind(c.Name)
		t.common[c.id()] = c
	}
	t.calls = append(t.calls, c)
	return nil
}

// WriteChrome writes the traces of all ranks as one, on the clock of the first.
//
// Errors: ErrArgument if there is no trace; those of w.
func (j *Job) WriteChrome(w io.Writer) error {
	if len(j.traces) == 0 {
		return fmt.Errorf("report: %w: there is no trace to write: set EURYALE_TRACE",
			backend.ErrArgument)
	}
	var all []*chrome.Event
	for _, t := range j.traces {
		all = append(all, t.names...)
		for _, c := range t.calls {
			all = append(all, c.Event)
		}
	}
	return chrome.Write(w, all)
}

// clock says how far a rank's clock is ahead of the first rank's, at some times on the rank's
// clock.
type clock struct {
	at, ahead []nanos
	within    nanos // half of the interval that the bounds leave
	unknown   bool  // the ranks have no call in common
}

// common converts a time of the rank to the common clock.
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

// callsOfBound is the minimum number of calls for a bound of a clock, and maxBounds the maximum
// number of bounds.
const (
	callsOfBound = 64
	maxBounds    = 32
	// sameClock is how far apart two recorders of one machine may be: each process measures the
	// length of a tick itself.
	sameClock nanos = 20_000
)

// align converts the traces of a generation to the clock of the first one.
func align(traces []*trace) {
	for i, t := range traces {
		if i > 0 {
			t.clock = clockOf(t, traces[0])
		}
		for _, c := range t.calls {
			from, to := t.clock.common(c.Start), t.clock.common(c.endTime())
			c.Start, c.Took = from, to-from
		}
		slices.SortStableFunc(t.calls, func(a, b *event) int {
			return cmp.Compare(a.Start, b.Start)
		})
	}
}

// clockOf bounds how far the clock of t is ahead of the clock of another trace. A collective in
// which every rank needs the data of all others is a round trip: no rank ends before the last one
// has begun. So each such call bounds the difference from both sides, and many bound it closely. If
// the bounds allow it, the clocks count as one, as on one machine. Otherwise the middle is taken,
// anew every few hundred calls, since clocks drift.
func clockOf(t, of *trace) (c clock) {
	var at, low, high []nanos
	for _, mine := range t.calls {
		other := of.common[mine.id()]
		if mine.syncs() && other != nil && other.syncs() {
			at = append(at, mine.Start)
			low = append(low, mine.Start-other.endTime())
			high = append(high, mine.endTime()-other.Start)
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
		// A rank may have been off its core between a call and its record: some bounds are wrong.
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

// numbered matches the numbers that differ between the calls of two steps.
var numbered = regexp.MustCompile(`\(call \d+|^replay \d+`)

// signature is the part of a call that the next step's call shares.
func (c *event) signature() string {
	return c.Args.Group + " " + numbered.ReplaceAllString(c.Args.What, "")
}
