package launch

import (
	"bytes"
	"fmt"
	"io"
	"regexp"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// maxLine is the length, in bytes, at which a line without an end is broken.
const maxLine = 64 << 10

// eraseLine moves a terminal's cursor to the start of its line and clears it.
const eraseLine = "\r\x1b[K"

// screen is where the outputs of all ranks come together: they may be one terminal, so one lock
// orders them all.
//
// When an output stops accepting data, the launcher has failed, not the rank that happens to write.
// So ranks do not learn of it.
type screen struct {
	broken chan error   // the first error of an output
	since  atomic.Int64 // when the current write began, in ns of Unix time; 0 for none

	mu     sync.Mutex
	status []byte    // the unfinished line on the terminal
	on     io.Writer // the terminal with that line
	usage  string    // what the first rank has said of a wrong command line
}

func newScreen() *screen { return &screen{broken: make(chan error, 1)} }

// failure returns the first error of an output, unless it was already received.
func (s *screen) failure() error {
	select {
	case err := <-s.broken:
		return err
	default:
		return nil
	}
}

// write writes to an output.
func (s *screen) write(w io.Writer, text []byte) {
	s.since.Store(time.Now().UnixNano())
	defer s.since.Store(0)
	if _, err := w.Write(text); err != nil {
		select {
		case s.broken <- fmt.Errorf("the output of the ranks cannot be written: %w", err):
		default: // not the first
		}
	}
}

// unread reports whether nobody reads an output: a write has waited for too long.
func (s *screen) unread() bool {
	since := s.since.Load()
	return since > 0 && time.Since(time.Unix(0, since)) > drainTime
}

// print writes a whole line to an output. An unfinished line moves below it.
func (s *screen) print(w io.Writer, line []byte) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.status == nil {
		s.write(w, line)
		return
	}
	s.write(s.on, []byte(eraseLine))
	s.write(w, line)
	s.write(s.on, s.status)
}

// show replaces the unfinished line; nil removes it.
func (s *screen) show(w io.Writer, status []byte) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.status == nil && status == nil {
		return
	}
	s.status, s.on = bytes.Clone(status), w
	s.write(w, append([]byte(eraseLine), status...))
}

// firstSaid takes what a rank says of a wrong command line: whether it is the first one, and
// whether the first one has said the same, but for the time.
func (s *screen) firstSaid(lines [][]byte) (first, same bool) {
	text := stamp.ReplaceAllString(string(bytes.Join(lines, nil)), "")
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.usage == "" {
		s.usage = text
		return true, false
	}
	return false, s.usage == text
}

// stamp is the time with which package log begins a line.
var stamp = regexp.MustCompile(`(?m)^\d{4}/\d\d/\d\d \d\d:\d\d:\d\d `)

// liner turns the output of a rank into prefixed lines.
type liner struct {
	screen *screen
	to     io.Writer
	log    io.Writer // takes the lines without prefixes; may be nil
	prefix string
	live   bool   // show lines as they are while they are being rewritten
	tail   *tail  // remembers the lines; may be nil
	aside  bool   // the tail remembers only whom they blame
	errors *liner // of the standard output: the rank's standard error; may be nil

	mu        sync.Mutex
	line      []byte
	back      bool // the last byte was a carriage return
	rewritten bool // this line had one
	holding   *time.Timer
	held      [][]byte // lines of a rank's first moment, while holding is set
}

// hold holds the lines from now on for a time: a rank that ends for a wrong command line does so
// before it does anything else, and each rank says the same.
func (l *liner) hold(d time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.holding = time.AfterFunc(d, l.release)
}

// release prints what is held.
func (l *liner) release() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.let(l.prefix)
}

// let prints what is held, and holds no more.
func (l *liner) let(prefix string) {
	if l.holding == nil {
		return
	}
	l.holding.Stop()
	for _, line := range l.held {
		l.screen.print(l.to, append([]byte(prefix), line...))
	}
	l.holding, l.held = nil, nil
}

// refuse prints what is held of a rank that has ended for a wrong command line, unless another rank
// has said the same. The first one stands for all, and has no prefix. It reports whether all was
// held.
func (l *liner) refuse() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.holding == nil || len(l.held) == 0 {
		return false
	}
	switch first, same := l.screen.firstSaid(l.held); {
	case first:
		l.let("")
	case same:
		l.held = nil
	}
	l.let(l.prefix)
	return true
}

// Write takes any piece of output. It never fails.
func (l *liner) Write(p []byte) (int, error) {
	if l.errors != nil {
		l.errors.release()
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	for rest := p; len(rest) > 0; {
		i := bytes.IndexAny(rest, "\r\n")
		if i < 0 {
			l.add(rest)
			break
		}
		l.add(rest[:i])
		if rest[i] == '\r' { // the next text replaces the line, unless it ends the line
			l.back, l.rewritten = true, true
		} else {
			l.end()
		}
		rest = rest[i+1:]
	}
	if l.live && l.rewritten {
		l.show()
	}
	return len(p), nil
}

// show shows the unfinished line as it is now. Programs remove it by writing blanks.
func (l *liner) show() {
	l.let(l.prefix)
	if l.blank() {
		l.screen.show(l.to, nil)
		return
	}
	l.screen.show(l.to, append([]byte(l.prefix), l.line...))
}

func (l *liner) blank() bool { return len(bytes.TrimSpace(l.line)) == 0 }

// add appends text to the line. After a carriage return it starts a new line that replaces the old.
func (l *liner) add(text []byte) {
	if len(text) == 0 {
		return
	}
	if l.back {
		l.line, l.back = l.line[:0], false
	}
	for len(l.line)+len(text) > maxLine {
		n := max(maxLine-len(l.line), 0)
		l.line = append(l.line, text[:n]...)
		text = text[n:]
		l.end()
	}
	l.line = append(l.line, text...)
}

// end prints the line.
func (l *liner) end() {
	l.clear()
	switch {
	case l.tail == nil:
	case l.aside:
		l.tail.overhear(l.line)
	default:
		l.tail.add(l.line)
	}
	whole := append(append([]byte(l.prefix), l.line...), '\n')
	if l.log != nil {
		l.screen.write(l.log, whole[len(l.prefix):])
	}
	if l.holding != nil {
		l.held = append(l.held, whole[len(l.prefix):])
	} else {
		l.screen.print(l.to, whole)
	}
	l.line = l.line[:0]
}

// clear removes the unfinished line from the terminal.
func (l *liner) clear() {
	if l.live && l.rewritten {
		l.screen.show(l.to, nil)
	}
	l.back, l.rewritten = false, false
}

// flush prints a last line that has no newline.
func (l *liner) flush() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.line) > 0 && !(l.rewritten && l.blank()) {
		l.end()
	} else {
		l.clear()
	}
}

// The tail of a rank: how many lines, and how much of each, in bytes.
const (
	tailLines = 20
	tailLine  = 500
)

// tail remembers the last lines of a rank's standard error. For a Go program that crashed, it
// remembers the lines where the crash begins, because the end is only stacks. It also remembers
// whom the last error blamed, which may stand above a crash.
type tail struct {
	mu      sync.Mutex
	lines   []string
	crash   bool
	blames  []int
	blaming string // the line that blames them
	heard   bool   // it is of the standard output, where programs print errors, too
}

// overhear takes a line of the standard output. What the standard error blames counts for more.
func (t *tail) overhear(line []byte) {
	ranks := blamed(line)
	if ranks == nil {
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.blames == nil || t.heard {
		t.blames, t.blaming, t.heard = ranks, string(line[:min(len(line), tailLine)]), true
	}
}

func (t *tail) add(line []byte) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(bytes.TrimSpace(line)) == 0 {
		return
	}
	text := string(line[:min(len(line), tailLine)])
	if ranks := blamed(line); ranks != nil {
		t.blames, t.blaming, t.heard = ranks, text, false
	}
	if !t.crash && isCrash(text) {
		t.lines, t.crash = nil, true
	}
	if len(t.lines) == tailLines {
		if t.crash {
			return
		}
		t.lines = t.lines[1:]
	}
	t.lines = append(t.lines, text)
}

// crashed reports whether the lines are of a crash.
func (t *tail) crashed() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.crash
}

// tell adds what is remembered to the ending of the rank.
func (t *tail) tell(e *ending) {
	t.mu.Lock()
	defer t.mu.Unlock()
	e.lines, e.blames, e.blaming = slices.Clone(t.lines), t.blames, t.blaming
}

// forget forgets what was remembered so far.
func (t *tail) forget() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.lines, t.crash, t.blames, t.blaming, t.heard = nil, false, nil, "", false
}
