package hierarchy

import (
	"testing"

	"github.com/euryale-ml/euryale/backend"
)

// awaited is a queue that counts what it waits for.
type awaited struct {
	backend.Queue
	events []backend.Event
}

func (q *awaited) Wait(e backend.Event) error {
	q.events = append(q.events, e)
	return nil
}

// Calls overlap if none writes what the other one reads or writes.
func TestCallsWaitForThoseThatShareTheirMemory(t *testing.T) {
	at := func(lo, hi uintptr) extent { return extent{lo, hi} }
	for _, test := range []struct {
		name     string
		dst, src extent
		flat     bool
		want     int // the call that is waited for, -1 for none
	}{
		{"other memory", at(500, 600), at(600, 700), false, -1},
		{"writes what the first reads", at(150, 160), at(600, 700), false, 0},
		{"reads what the second writes", at(500, 600), at(299, 300), false, 1},
		{"reads what both read", at(500, 600), at(100, 400), false, 1},
		{"writes behind the second", at(400, 500), at(600, 700), false, -1},
		{"no memory", extent{}, extent{}, false, -1},
		{"a flat call", at(500, 600), at(600, 700), true, 1},
	} {
		var ends [2]until
		var r recent
		for i := range ends {
			ends[i] = make(until)
		}
		r.calls = []earlier{
			{dst: at(0, 100), src: at(100, 200), call: &call{end: ends[0]}},
			{dst: at(200, 300), src: at(300, 400), call: &call{end: ends[1]}},
		}
		q := &awaited{}
		if err := r.order(q, test.dst, test.src, test.flat); err != nil {
			t.Fatal(err)
		}
		if test.want < 0 && len(q.events) > 0 || test.want >= 0 && (len(q.events) != 1 || q.events[0] != backend.Event(ends[test.want])) {
			t.Errorf("%s: it waits for %d events, want call %d", test.name, len(q.events), test.want)
		}
	}
}

// The list is bounded: the call that leaves it is waited for.
func TestNoMoreCallsOverlapThanAreRemembered(t *testing.T) {
	var r recent
	q := &awaited{}
	for i := range 3 * maxRecent {
		if err := r.order(q, extent{uintptr(10 * i), uintptr(10*i + 1)}, extent{}, false); err != nil {
			t.Fatal(err)
		}
		r.calls = append(r.calls, earlier{call: &call{end: make(until)}})
	}
	if len(r.calls) != maxRecent || len(q.events) != 2*maxRecent {
		t.Errorf("%d calls are remembered, %d were waited for", len(r.calls), len(q.events))
	}
}
