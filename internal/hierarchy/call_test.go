package hierarchy

import (
	"fmt"
	"sync/atomic"
	"testing"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/serial"
	"github.com/euryale-ml/euryale/internal/testing/fakedevice"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/internal/testing/testranks"
)

// counted is a device that counts what one rank records and waits for on its queues.
// On a GPU each is a call of the driver.
type counted struct {
	backend.Device
	records, waits atomic.Int64
}

func (d *counted) Default() backend.Queue { return countedQueue{d.Device.Default(), d} }

func (d *counted) NewQueue() (backend.Queue, error) {
	q, err := d.Device.NewQueue()
	return countedQueue{q, d}, err
}

type countedQueue struct {
	backend.Queue
	device *counted
}

func (q countedQueue) Record() (backend.Event, error) {
	q.device.records.Add(1)
	return q.Queue.Record()
}

func (q countedQueue) Wait(e backend.Event) error {
	q.device.waits.Add(1)
	return q.Queue.Wait(e)
}

// countedComm runs on such queues.
type countedComm struct {
	backend.Communicator
	device *counted
}

func (c countedComm) Device() backend.Device { return c.device }

func (c countedComm) Start(q backend.Queue, what backend.Collective, dst,
	src backend.Buffer) (backend.Work, error) {
	w, err := c.Communicator.Start(q.(countedQueue).Queue, what, dst, src)
	return countedWork{w}, err
}

func (c countedComm) Split(color, key int) (backend.Communicator, error) {
	part, err := c.Communicator.Split(color, key)
	return countedComm{part, c.device}, err
}

type countedWork struct{ backend.Work }

func (w countedWork) Wait(q backend.Queue) error {
	own := q.(countedQueue)
	own.device.waits.Add(1)
	return w.Work.Wait(own.Queue)
}

// Each phase but the first waits for the one before it, and collectives are their own
// events; what more slices of a call would wait for, the last one waits for.
func TestSlicesAddFewCallsOfTheDriver(t *testing.T) {
	const n, slices = 1 << 12, 16
	for _, test := range []struct {
		what           backend.Collective
		layout         Layout
		records, waits int64 // of each slice
	}{
		{allReduce, Grid(2, 2), 0, 3}, // exchange, add, gather
		{allReduce, Grid(4, 1), 1, 2}, // a slot is freed and waited for; add
		// the same; reduce after pack, exchange, add
		{reduceScatter, Grid(2, 2), 2, 4},
		{allGather, Grid(2, 2), 1, 3}, // the same; gather, unpack
	} {
		t.Run(fmt.Sprintf("%v as %v", test.what.Kind, test.layout), func(t *testing.T) {
			d := guarded(t)
			wrap := func(c backend.Communicator) backend.Communicator {
				return countedComm{fakedevice.Over(c, d), &counted{Device: d}}
			}
			o := Options{Mode: Always, SliceBytes: 4 * n / slices, Slots: slices}
			ranksOver(t, test.layout, o, wrap, func(c *Communicator) error {
				one := testranks.Must(driverCalls(c, test.what, n/slices))
				all := testranks.Must(driverCalls(c, test.what, n))
				want := driver{(slices - 1) * test.records, (slices - 1) * test.waits}
				if got := (driver{all.records - one.records, all.waits - one.waits}); got != want {
					return fmt.Errorf("%d more slices take %+v, want %+v: one slice takes %+v",
						slices-1, got, want, one)
				}
				return nil
			})
		})
	}
}

// driver are calls of the driver.
type driver struct{ records, waits int64 }

// driverCalls returns those of one call on n elements of the larger operand, whose slots
// were used before.
func driverCalls(c *Communicator, what backend.Collective, n int) (made driver, err error) {
	d := c.Device().(*counted)
	nsrc, ndst := n, n
	if what.Kind != backend.AllReduce {
		nsrc, ndst = lengths(what, c.Size(), n/c.Size())
	}
	dst, err := d.Alloc(4 * ndst)
	if err != nil {
		return made, err
	}
	src, err := d.Alloc(4 * nsrc)
	if err != nil {
		return made, err
	}
	for range len(c.slots.all) + 1 {
		records, waits := d.records.Load(), d.waits.Load()
		if err := backend.Run(c, what, dst.As(backend.F32), src.As(backend.F32)); err != nil {
			return made, err
		}
		made = driver{d.records.Load() - records, d.waits.Load() - waits}
	}
	if err := d.Free(src); err != nil {
		return made, err
	}
	return made, d.Free(dst)
}

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
		var ends [2]serial.Event
		var r recent
		for i := range ends {
			ends[i] = make(serial.Event)
		}
		r.calls = []earlier{
			{dst: at(0, 100), src: at(100, 200), call: &call{end: ends[0]}},
			{dst: at(200, 300), src: at(300, 400), call: &call{end: ends[1]}},
		}
		q := &awaited{}
		require.NoError(t, r.order(q, test.dst, test.src, test.flat))
		require.Check(t, (test.want >= 0 || len(q.events) <= 0) &&
			(test.want < 0 || len(q.events) == 1 &&
				q.events[0] == backend.Event(ends[test.want])), "%s: it waits for %d events, want "+
			"call %d", test.name, len(q.events), test.want)
	}
}

// The list is bounded: the call that leaves it is waited for.
func TestNoMoreCallsOverlapThanAreRemembered(t *testing.T) {
	var r recent
	q := &awaited{}
	for i := range 3 * maxRecent {
		require.NoError(t, r.order(q, extent{uintptr(10 * i), uintptr(10*i + 1)}, extent{},
			false))
		r.calls = append(r.calls, earlier{call: &call{end: make(serial.Event)}})
	}
	require.Check(t, len(r.calls) == maxRecent && len(q.events) == 2*maxRecent,
		"%d calls are remembered, %d were waited for", len(r.calls), len(q.events))
}
