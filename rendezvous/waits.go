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

// A rank that waits itself is not to blame when others wait for it. So a rank that waits for long
// shows the others for whom, and a rank whose time is up follows these waits to ranks that do not
// wait.
const (
	waitsPrefix = "euryale/waits/"
	// showPause is the time between two looks at whether the rank still waits.
	showPause = 50 * time.Millisecond
	// freshLooks is the number of looks, 300 ms in all, after which a rank no longer counts as
	// waiting if it has not said so again. It says so several times in that time. A clock instead
	// of looks would withdraw the wait whenever the process gets no core for so long, just when
	// others ask.
	freshLooks = 6
	// mostAsked bounds how many ranks are asked at a time.
	mostAsked = 64
)

// waits lists the ranks that this rank waits for, which it shows to the others.
type waits struct {
	mu    sync.Mutex
	ranks []int
	looks int  // since the rank last said so
	shows bool // a goroutine shows it
}

// Waits shows the other ranks that this one waits for ranks, numbered as in the job. Call it again
// within 300 ms to keep this shown. It does not wait for the store.
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

// show tells the store for whom the rank waits, until it no longer waits or leaves.
func (w *World) show() {
	tick := time.NewTicker(showPause)
	defer tick.Stop()
	said := ""
	for {
		now := w.waitsFor()
		if now != said {
			// by then it is known if a server is stopped
			ctx, cancel := context.WithTimeout(w.down, w.Timeout/4)
			err := w.inner.Set(ctx, waitsPrefix+strconv.Itoa(w.Rank), []byte(now))
			cancel()
			if err != nil {
				now = "" // the store cannot be told: the next wait tries again
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

// waitsFor returns the text to show, "" if the rank does not wait.
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

// Missing returns the ranks that really keep others from going on, given the ranks that seem to. It
// follows those that wait to the ranks for which they wait, directly or through others, and returns
// all that do not wait. Numbers are of the job. If all wait for each other it returns seem. If the
// store does not answer until ctx ends, or soon if it was silent before, Missing returns the rank
// that serves it, or the one that its last report names. It does the same if the store ends, since
// its server is often the first whose time is up.
func (w *World) Missing(ctx context.Context, seem []int) []int {
	if w.NewsTime(-1) == silentTime {
		var cancel func()
		ctx, cancel = context.WithTimeout(ctx, 2*silentTime)
		defer cancel()
	}
	s := newSearch(w.Rank, seem)
	for level := s.level(); len(level) > 0; level = s.level() {
		answers, err := w.askAfter(ctx, level)
		if err != nil {
			var f *Failure
			if c, ok := w.inner.(*client); ok && ctx.Err() != nil {
				f = c.reports.instead(&Failure{Rank: c.server.rank, Cause: err}, time.Now())
			} else if !errors.As(err, &f) {
				return seem
			}
			return []int{f.Rank}
		}
		for i, r := range level {
			s.answered(r, answers[i])
		}
	}
	return s.result()
}

// search decides whom Missing asks, and names. It is pure.
type search struct {
	seem, next, missing []int
	asked               map[int]bool
}

func newSearch(rank int, seem []int) *search {
	return &search{seem: seem, next: seem, asked: map[int]bool{rank: true}}
}

// level returns the ranks to ask at a time, none at the end.
func (s *search) level() (ranks []int) {
	for len(s.next) > 0 && len(ranks) < mostAsked {
		if r := s.next[0]; !s.asked[r] {
			ranks, s.asked[r] = append(ranks, r), true
		}
		s.next = s.next[1:]
	}
	return ranks
}

// answered hears for whom a rank waits, nil for nobody.
func (s *search) answered(rank int, waits []int) {
	if s.next = slices.Concat(s.next, waits); waits == nil {
		s.missing = append(s.missing, rank)
	}
}

// result returns those that do not wait, or those that seem to be missing if all wait.
func (s *search) result() []int {
	if len(s.missing) == 0 {
		return s.seem
	}
	slices.Sort(s.missing)
	return s.missing
}

// askAfter returns for whom each of some ranks waits, nil for ranks that do not wait.
func (w *World) askAfter(ctx context.Context, ranks []int) ([][]int, error) {
	answers, errs := make([][]int, len(ranks)), make([]error, len(ranks))
	var all sync.WaitGroup
	for i, r := range ranks {
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
