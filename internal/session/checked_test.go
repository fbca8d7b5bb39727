package session

import (
	"errors"
	"testing"
	"time"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/backend/compress/half"
	"github.com/euryale-ml/euryale/backend/compress/sparse"
	"github.com/euryale-ml/euryale/backend/host"
	"github.com/euryale-ml/euryale/internal/buildlock"
	"github.com/euryale-ml/euryale/internal/fault"
	"github.com/euryale-ml/euryale/internal/group"
	"github.com/euryale-ml/euryale/internal/testing/reference"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/observe"
	"github.com/euryale-ml/euryale/rendezvous"
)

// door is a communicator that counts the calls which come in by each way.
type door struct {
	backend.Communicator
	start, checked int
}

func (d *door) Start(backend.Queue, backend.Collective, backend.Buffer,
	backend.Buffer) (backend.Work, error) {
	d.start++
	return backend.Finished(nil), nil
}

func (d *door) StartChecked(backend.Queue, backend.Collective, int, backend.Buffer,
	backend.Buffer) (backend.Work, error) {
	d.checked++
	return backend.Finished(nil), nil
}

// foreign is a communicator from outside, whose only way in is Start, and that does not compare
// calls.
type foreign struct{ backend.Communicator }

func (foreign) Capabilities() backend.Capabilities { return backend.Capabilities{} }

// wrappers are all that this module can put around a communicator and its calls. Those that only
// pass calls on check nothing, since what is below them does.
func wrappers(t *testing.T) map[string]struct {
	wrap   func(backend.Communicator) (backend.Communicator, error)
	passes bool
} {
	type w = struct {
		wrap   func(backend.Communicator) (backend.Communicator, error)
		passes bool
	}
	always := func(wrap func(backend.Communicator) backend.Communicator) func(
		backend.Communicator) (backend.Communicator, error) {
		return func(c backend.Communicator) (backend.Communicator, error) { return wrap(c), nil }
	}
	return map[string]w{
		"hooks": {wrap: always(func(c backend.Communicator) backend.Communicator {
			return backend.WithHooks(c, observe.New(0, 8))
		})},
		"compared": {wrap: always(func(c backend.Communicator) backend.Communicator {
			c = group.Compared(c)
			c.Capabilities().Verify(false) // the exchange of headers is a call, too
			return c
		})},
		"half":   {wrap: half.Wrap(backend.BF16)},
		"sparse": {wrap: sparse.Wrap(sparse.TopK(0.5))},
		"fault": {always(func(c backend.Communicator) backend.Communicator {
			return fault.New(c, fault.Plan{Rank: 1})
		}), true},
		"session": {always(func(c backend.Communicator) backend.Communicator {
			return &Session{Base: backend.Wrap(c)}
		}), true},
		"part": {always(func(c backend.Communicator) backend.Communicator {
			return &part{Base: backend.Wrap(c)}
		}), true},
		"building": {always(func(c backend.Communicator) backend.Communicator {
			return buildlock.New(time.Minute).Rank(0).Watch(c)
		}), true},
	}
}

// TestCallsAreCheckedOnce: in a stack of wrappers the first one that can check a call does, and
// those below take its word. The call here is one that Check refuses and that nothing else looks
// at: StartChecked hands it down to the door below, and Start does not. A foreign one gets it by
// Start, and checks for itself.
func TestCallsAreCheckedOnce(t *testing.T) {
	wrong := backend.Collective{Kind: backend.AllReduce, Op: backend.Max, Algorithm: 99}
	right := backend.Collective{Kind: backend.AllReduce}
	for name, w := range wrappers(t) {
		x := backend.Of(make([]float32, 8))
		start := func(below func(*door) backend.Communicator,
			call func(backend.CheckedStarter) error) (*door, error) {
			d := &door{Communicator: reference.New("test", 2, time.Minute)[0]}
			c := require.Value(w.wrap(below(d)))(t)
			return d, call(c.(backend.CheckedStarter))
		}
		for _, what := range []backend.Collective{wrong, right} {
			checked := func(c backend.CheckedStarter) error {
				_, err := c.StartChecked(nil, what, 8, x, x)
				return err
			}
			if d, err := start(func(d *door) backend.Communicator {
				return mute{d}
			}, checked); err != nil || d.start != 0 || d.checked != 1 {
				t.Errorf("%s: StartChecked of %v: %v; below: %d calls of Start and %d of "+
					"StartChecked, want 0 and 1", name, what, err, d.start, d.checked)
			}
			if d, err := start(func(d *door) backend.Communicator {
				return foreign{d}
			}, checked); err != nil || d.start != 1 || d.checked != 0 {
				t.Errorf("%s of foreign: StartChecked of %v: %v; below: %d calls of Start and "+
					"%d of StartChecked, want 1 and 0", name, what, err, d.start, d.checked)
			}
		}
		d, err := start(func(d *door) backend.Communicator {
			return mute{d}
		}, func(c backend.CheckedStarter) error { _, err := c.Start(nil, wrong, x, x); return err })
		require.Check(t, errors.Is(err, backend.ErrArgument) != w.passes && d.checked == 0 &&
			(d.start == 1) == w.passes, "%s: Start: %v; below: %d calls of Start and %d of "+
			"StartChecked", name, err, d.start, d.checked)
	}
}

// mute is a door of a communicator that does not compare calls.
type mute struct{ *door }

func (mute) Capabilities() backend.Capabilities { return backend.Capabilities{} }

// TestLeavesTakeCheckedCalls: package host does not check what was checked.
func TestLeavesTakeCheckedCalls(t *testing.T) {
	worlds := require.Value(rendezvous.Local(1, time.Minute))(t)
	c := require.Value(host.Backend{}.Connect(t.Context(), worlds[0]))(t)
	defer worlds[0].Close()
	defer c.Close()
	x, wrong := backend.Of(make([]float32, 8)), backend.Collective{Kind: backend.AllReduce,
		Algorithm: 99}
	require.Fails(t, "Start", require.Err(c.Start(nil, wrong, x, x)), backend.ErrArgument)
	_, err := c.(backend.CheckedStarter).StartChecked(nil, wrong, 8, x, x)
	require.Check(t, err == nil, "StartChecked: the error is %v", err)
}
