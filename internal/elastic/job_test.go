package elastic

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/euryale-ml/euryale/internal/testing/require"
)

// table is a register that can be late.
type table struct {
	mu     sync.Mutex
	values map[string][]byte
	more   chan struct{} // closed with the next change
	late   time.Time     // it answers nobody before
	calls  int
}

func newTable() *table { return &table{values: map[string][]byte{}, more: make(chan struct{})} }

func (r *table) CompareAndSwap(ctx context.Context, key string, old, new []byte) ([]byte, bool,
	error) {
	if err := r.answers(ctx); err != nil {
		return nil, false, err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	there := r.values[key]
	if !bytes.Equal(there, old) {
		return there, false, nil
	}
	r.set(key, new)
	return new, true, nil
}

func (r *table) Set(ctx context.Context, key string, value []byte) error {
	if err := r.answers(ctx); err != nil {
		return err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.set(key, value)
	return nil
}

func (r *table) Append(ctx context.Context, key string, i int, value []byte) (int, error) {
	if err := r.answers(ctx); err != nil {
		return 0, err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	for r.values[fmt.Sprintf("%s/%d", key, i)] != nil {
		i++
	}
	r.set(fmt.Sprintf("%s/%d", key, i), value)
	return i, nil
}

func (r *table) Entries(ctx context.Context, key string, i int) (all [][]byte, err error) {
	value, err := r.Get(ctx, fmt.Sprintf("%s/%d", key, i))
	if err != nil {
		return nil, err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	for ; value != nil; value = r.values[fmt.Sprintf("%s/%d", key, i)] {
		all = append(all, value)
		i++
	}
	return all, nil
}

// set sets a value. r.mu is held.
func (r *table) set(key string, value []byte) {
	r.values[key] = value
	close(r.more)
	r.more = make(chan struct{})
}

func (r *table) Get(ctx context.Context, key string) ([]byte, error) {
	if err := r.answers(ctx); err != nil {
		return nil, err
	}
	for {
		r.mu.Lock()
		value, more, late := r.values[key], r.more, time.Until(r.late)
		r.mu.Unlock()
		if value != nil && late <= 0 {
			return value, nil
		}
		select {
		case <-more:
		case <-time.After(max(late, time.Second)):
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

// answers waits until the register answers.
func (r *table) answers(ctx context.Context) error {
	r.mu.Lock()
	r.calls++
	late := time.Until(r.late)
	r.mu.Unlock()
	select {
	case <-time.After(late):
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// stop has the register answer nobody for a while.
func (r *table) stop(d time.Duration) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.late = time.Now().Add(d)
}

// begin starts the members of a first generation, which connect.
func begin(t *testing.T, r Register, first View) (jobs []*Job) {
	for _, id := range first.Members {
		j := Start(r, id, Limits{1, len(first.Members) + 1}, first, time.Minute, nil)
		t.Cleanup(j.Close)
		connect(t, j)
		jobs = append(jobs, j)
	}
	return jobs
}

// connect has a process take part in the next generation.
func connect(t *testing.T, j *Job) View {
	t.Helper()
	v, _, err := j.Next(t.Context())
	require.NoError(t, err)
	j.Connected(v.Generation)
	j.CaughtUp(v.Generation)
	return v
}

// posted is where a process has stopped in the first generation.
func posted(id ID, at Position) *Posted { return &Posted{ID: id, Position: at} }

// breaks has a process find a generation broken in which it has completed a step.
func breaks(j *Job, generation int) {
	j.Stepped(generation)
	j.Broken(View{Generation: generation}, errors.New("broken"))
}

// TestALateRegisterLeavesNobodyBehind: a launcher that has no time for longer than the grace takes
// all posts at once then.
func TestALateRegisterLeavesNobodyBehind(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newTable()
		jobs := begin(t, r, First(1, 2, 3))
		synctest.Wait()
		r.stop(5 * grace)
		for _, j := range jobs {
			time.Sleep(grace / 4)
			breaks(j, 0)
		}
		for _, j := range jobs {
			if v := connect(t, j); len(v.Members) != 3 {
				t.Errorf("generation %d has members %v", v.Generation, v.Members)
			}
		}
	})
}

// TestABusyMemberIsWaitedFor: it computes a micro-batch when another one is lost, or evaluates when
// replacements are let in. One that is stopped cannot say that it lives, and one that hangs does
// not come.
func TestABusyMemberIsWaitedFor(t *testing.T) {
	for _, c := range []struct {
		stops func(j *Job, generation int)
		busy  time.Duration // process 3
		lives bool
		want  int
	}{{breaks, 20 * time.Second, true, 3}, {breaks, 20 * time.Second, false, 2},
		{breaks, 40 * time.Second, true, 2}, {(*Job).Admits, 20 * time.Second, true, 3},
		{(*Job).Admits, 40 * time.Second, true, 2}} {
		synctest.Test(t, func(t *testing.T) {
			r := newTable()
			first := First(1, 2, 3)
			members := first.Members
			if !c.lives {
				members = members[:2]
			}
			var jobs []*Job
			for _, id := range members {
				j := Start(r, id, Limits{1, 3}, first, time.Minute, nil)
				t.Cleanup(j.Close)
				connect(t, j)
				jobs = append(jobs, j)
			}
			synctest.Wait()
			c.stops(jobs[0], 0)
			c.stops(jobs[1], 0)
			if c.lives {
				time.AfterFunc(c.busy, func() { c.stops(jobs[2], 0) })
			}
			if v := connect(t, jobs[0]); len(v.Members) != c.want {
				t.Errorf("busy %v, lives: %t: the members are %v", c.busy, c.lives, v.Members)
			}
		})
	}
}

// TestAProcessWhoseLauncherDoesNotAnswerSaysSo: it was stopped, say, when another process died.
func TestAProcessWhoseLauncherDoesNotAnswerSaysSo(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newTable()
		jobs := begin(t, r, First(1, 2))
		synctest.Wait()
		r.stop(time.Hour)
		breaks(jobs[0], 0)
		const says = "process 0: euryale run, which keeps the log of the elastic job, has not " +
			"answered for 1m0s"
		_, _, err := jobs[0].Next(t.Context())
		require.Check(t, err != nil && strings.HasPrefix(err.Error(), says) &&
			errors.Is(err, context.DeadlineExceeded), "the error is %v", err)
		before := time.Now()
		if jobs[0].Close(); time.Since(before) > 0 {
			t.Errorf("it waits %v for more answers", time.Since(before))
		}
	})
}

// TestAStandbyHasNoTimersOfPastGenerations: it may wait for weeks.
func TestAStandbyHasNoTimersOfPastGenerations(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newTable()
		first := First(1)
		member := Start(r, 1, Limits{1, 1}, first, time.Minute, nil)
		t.Cleanup(member.Close)
		connect(t, member)
		standby := Start(r, 2, Limits{1, 1}, first, time.Minute, nil)
		t.Cleanup(standby.Close)
		go standby.Next(t.Context())
		for g := range 20 {
			synctest.Wait()
			breaks(member, g)
			connect(t, member)
		}
		synctest.Wait()
		standby.mu.Lock()
		defer standby.mu.Unlock()
		n := len(standby.timers)
		require.Check(t, n <= 3, "it has %d timers", n)
	})
}

// TestAReplacementReadsOnlyTheEndOfTheLog: it knows the members and who of them is dead.
func TestAReplacementReadsOnlyTheEndOfTheLog(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newTable()
		first := First(1, 2, 3)
		jobs := begin(t, r, first)
		const generations = 50
		for g := range generations {
			if g == generations-2 {
				require.NoError(t, Bury(t.Context(), r, 0, 3, func(int, Event) {}))
				jobs[2].Close()
				jobs = jobs[:2]
			}
			for _, j := range jobs {
				breaks(j, g)
			}
			for _, j := range jobs {
				connect(t, j)
			}
			synctest.Wait()
		}
		r.calls = 0
		j := Start(r, 4, Limits{1, 3}, first, time.Minute, nil)
		t.Cleanup(j.Close)
		go j.Next(t.Context())
		synctest.Wait()
		require.Check(t, r.calls <= 30, "a replacement asks %d times", r.calls)
		require.Check(t, jobs[0].Waits(), "the others do not know of it")
		for _, old := range jobs {
			old.Admits(generations)
		}
		v := connect(t, jobs[0])
		require.Check(t, len(v.Members) == 3 && v.New(4), "the members are %v", v.Members)
	})
}

func TestAnObserverTellsWhoHasLeftOrWasLeftBehind(t *testing.T) {
	r := newTable()
	first := First(1, 2, 3, 4)
	next := View{Generation: 1, Members: []ID{2, 3}, At: first.At[:2]}
	for i, entry := range []record{{Posted: posted(2, first.At[0])},
		{Posted: posted(4, Position{Leaving: true})}, {Dead: 4}, {Decided: &next},
		{Decided: &View{Generation: 1}}} {
		require.NoError(t, require.Err(write(t.Context(), r, i, entry, nil)))
	}
	var behind []ID
	o := NewObserver(first, func(_ View, ids []ID) { behind = append(behind, ids...) })
	heard := 0
	for id := range ID(4) {
		err := Bury(t.Context(), r, heard, id+1, func(i int, e Event) {
			require.Check(t, i == heard, "entry %d comes before entry %d", i, heard)
			heard++
			o.Hear(e)
		})
		left, finished := o.Left(id + 1)
		require.Check(t, left == (id == 3) && finished && err == nil, "process %d: %t, %t, %v",
			id+1, left, finished, err)
	}
	require.Check(t, slices.Equal(behind, []ID{1}), "%v are left behind", behind)
	if e, err := Entry(t.Context(), r, 8); heard != 9 || e != Event(Dead{4}) || err != nil {
		t.Errorf("%d entries are heard, and the last one is %v, %v", heard, e, err)
	}
}

// TestAnObserverTellsWhoIsAwaited: members that have stopped wait, and neither replacements nor
// those that have done their last step.
func TestAnObserverTellsWhoIsAwaited(t *testing.T) {
	first := First(1, 2, 3, 4)
	for _, c := range []struct {
		news  []Event
		want  []ID
		whole bool
	}{
		{[]Event{*posted(9, Position{}), *posted(1, Position{Leaving: true})}, nil, false},
		{[]Event{*posted(1, first.At[0]), Dead{2}}, []ID{3, 4}, true},
		{[]Event{*posted(1, Position{})}, []ID{2, 3, 4}, false},
		{[]Event{*posted(1, first.At[0]), Dead{1}}, []ID{2, 3, 4}, false},
		{[]Event{*posted(1, first.At[0]), Decided{View{Generation: 1, Members: first.Members[:1],
			At: first.At[:1]}}}, nil, false},
	} {
		o := NewObserver(first, func(View, []ID) {})
		for _, e := range c.news {
			o.Hear(e)
		}
		if ids, whole := o.Awaited(); !slices.Equal(ids, c.want) || whole != c.whole {
			t.Errorf("%v: %v, %t", c.news, ids, whole)
		}
	}
}

// TestAnObserverTellsThatTheStateIsLost: not once a process has done its last step.
func TestAnObserverTellsThatTheStateIsLost(t *testing.T) {
	for _, leaves := range []bool{false, true} {
		o := NewObserver(First(1, 2), func(View, []ID) {})
		o.Hear(*posted(1, Position{Leaving: leaves}))
		for id := range ID(3) { // the third was a standby
			err := o.Lost()
			require.Check(t, err == nil || id >= 2, "%v", err)
			o.Hear(Dead{id + 1})
		}
		if errors.As(o.Lost(), new(*StoppedError)) == leaves {
			t.Errorf("leaves: %t: %v", leaves, o.Lost())
		}
	}
}

// TestHoldersAreThoseThatAreKnownToHaveTheState: a replacement once it has posted so.
func TestHoldersAreThoseThatAreKnownToHaveTheState(t *testing.T) {
	view := First(1, 2, 3)
	view.At[2] = Position{}
	o := NewObserver(view, nil)
	for _, c := range []struct {
		e    Event
		want []ID
	}{
		{nil, []ID{1, 2}},
		{Dead{1}, []ID{2}},
		{Posted{ID: 3, Generation: 0, Position: Position{Phase: Empty}}, []ID{2}},
		{Posted{ID: 3, Generation: 0, Position: Position{Phase: Computing}}, []ID{2, 3}},
	} {
		o.Hear(c.e)
		require.Slices(t, fmt.Sprintf("after %+v", c.e), o.Holders(), c.want)
	}
}

// TestAReplacementIsMadeForThePartThatTheFewestHave: dead ones have none.
func TestAReplacementIsMadeForThePartThatTheFewestHave(t *testing.T) {
	r, first := newTable(), First(1, 2, 3, 4)
	o := NewObserver(first, nil)
	for _, c := range []struct {
		id   ID
		dies []ID // before
		want int
	}{{1, nil, 0}, {2, nil, 1}, {3, nil, 0}, {4, nil, 1}, {5, []ID{2}, 1}, {6, nil, 0},
		{7, []ID{4, 5}, 1}, {8, nil, 1}, {9, []ID{1, 6}, 0}} {
		for _, id := range c.dies {
			require.NoError(t, Bury(t.Context(), r, 0, id, func(int, Event) {}))
		}
		j := Start(r, c.id, Limits{1, 4}, first, time.Minute, nil)
		t.Cleanup(j.Close)
		for range 2 { // one layout, and another one
			part, err := j.Divide(t.Context(), 2)
			require.NoError(t, err)
			require.Equal(t, fmt.Sprintf("the part of process %v", c.id), part, c.want)
		}
		_, err := j.Divide(t.Context(), 4)
		require.Fails(t, "other parts", err, "use one layout")
	}
	e, err := Entry(t.Context(), r, 0)
	require.NoError(t, err)
	o.Hear(e)
	require.Equal(t, "what an observer knows of process 1", o.Part(2), 1)
	_, err = Start(r, 1, Limits{1, 4}, first, time.Minute, nil).Divide(t.Context(), 3)
	require.Fails(t, "parts that do not divide the ranks", err, "start a multiple of 3")
}
