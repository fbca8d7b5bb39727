package rendezvous

import (
	"context"
	"errors"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"
)

// Who waits himself is not to blame for it that others wait for him. So a rank that waits for long
// shows the others for whom, and a rank whose time is up follows them to those who do not wait.
const (
	waitsPrefix = "euryale/waits/"
	// showPause is between two looks whether what is shown is still so.
	showPause = 50 * time.Millisecond
	// freshLooks is after how many of them, 300 ms, a rank that has not said so again no longer
	// waits. It says so several times in that time. A clock in their place would take back what is
	// shown whenever the process has had no core for so long, just when others ask.
	freshLooks = 6
	// mostAsked bounds how many ranks are asked after at a time.
	mostAsked = 64
)

// waits is what this rank shows of its own.
type waits struct {
	mu    sync.Mutex
	ranks []int
	looks int  // since the rank has said so
	shows bool // a goroutine shows it
}

// Waits shows the other ranks that this one waits for some, which are numbers of the job, for as
// long as it says so again within 300 ms. It does not wait for the store.
func (w *World) Waits(ranks []int) {
	s := &w.waits
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ranks, s.looks = ranks, 0
	if !s.shows {
		s.shows = true
		go w.show()
	}
}

// show tells the store for whom the rank waits, until it no longer does or leaves.
func (w *World) show() {
	tick := time.NewTicker(showPause)
	defer tick.Stop()
	said := ""
	for {
		now := w.waitsFor()
		if now != said {
			// a server that is stopped is known then
			ctx, cancel := context.WithTimeout(w.down, w.Timeout/4)
			err := w.inner.Set(ctx, waitsPrefix+strconv.Itoa(w.Rank), []byte(now))
			cancel()
			if err != nil {
				now = "" // nobody can be told: the next wait tries again
			}
			said = now
		}
		if said == "" && w.ceases() {
			return
		}
		select {
		case <-tick.C:
		case <-w.watched: // the rank leaves, or the job has failed
			return
		}
	}
}

// waitsFor returns what is to be shown, "" if the rank does not wait.
func (w *World) waitsFor() string {
	s := &w.waits
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.looks++; s.looks > freshLooks {
		return ""
	}
	return encodeRanks(s.ranks)
}

// ceases ends the showing, unless there is something new to show.
func (w *World) ceases() bool {
	s := &w.waits
	s.mu.Lock()
	defer s.mu.Unlock()
	s.shows = s.looks <= freshLooks && w.down.Err() == nil
	return !s.shows
}

func encodeRanks(list []int) string {
	var text []string
	for _, r := range list {
		text = append(text, strconv.Itoa(r))
	}
	return strings.Join(text, ",")
}

func decodeRanks(text string, size int) (list []int) {
	for field := range strings.SplitSeq(text, ",") {
		if r, err := strconv.Atoi(field); err == nil && r >= 0 && r < size {
			list = append(list, r)
		}
	}
	return list
}

// Missing returns the ranks that keep others from going on, where some seem to: those of them that
// do not wait for others, and whom those that wait are waiting for, directly or through others.
// Numbers are of the job. If all wait for each other it returns the ranks that seem to. If the
// store does not answer until ctx ends, or soon if it has not answered before, it returns the rank
// that serves it, or whom that one's will names. So it does if the store ends: its server often
// is the first whose time is up.
func (w *World) Missing(ctx context.Context, seem []int) []int {
	if c, ok := w.inner.(*client); ok && c.silent.Load() {
		var cancel func()
		ctx, cancel = context.WithTimeout(ctx, 2*silentTime)
		defer cancel()
	}
	asked := map[int]bool{w.Rank: true}
	var missing []int
	for next := seem; len(next) > 0; {
		level := next[:min(len(next), mostAsked)]
		next = nil
		answers, err := w.askAfter(ctx, level, asked)
		if err != nil {
			var f *Failure
			if c, ok := w.inner.(*client); ok && ctx.Err() != nil {
				f = c.wills.instead(&Failure{c.server.rank, err})
			} else if !errors.As(err, &f) {
				return seem
			}
			return []int{f.Rank}
		}
		for i, r := range level {
			switch {
			case asked[r]:
			case answers[i] == nil:
				missing = append(missing, r)
			default:
				next = append(next, answers[i]...)
			}
			asked[r] = true
		}
	}
	if len(missing) == 0 {
		return seem
	}
	slices.Sort(missing)
	return missing
}

// askAfter returns for whom each of some ranks waits, nil where it does not or was asked before.
func (w *World) askAfter(ctx context.Context, ranks []int, asked map[int]bool) ([][]int, error) {
	answers, errs := make([][]int, len(ranks)), make([]error, len(ranks))
	var all sync.WaitGroup
	for i, r := range ranks {
		if asked[r] {
			continue
		}
		all.Go(func() {
			value, err := look(ctx, w.inner, waitsPrefix+strconv.Itoa(r))
			answers[i], errs[i] = decodeRanks(string(value), w.Size), err
		})
	}
	all.Wait()
	for _, err := range errs {
		if err != nil {
			return nil, err
		}
	}
	return answers, nil
}
