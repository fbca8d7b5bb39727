package launch

import (
	"bytes"
	"io"
	"sync"
)

// maxLine is where a line without an end is broken, in bytes.
const maxLine = 64 << 10

// eraseLine moves a terminal's cursor to the start of its line and clears it.
const eraseLine = "\r\x1b[K"

// screen is where the outputs of all ranks come together: they may be one
// terminal, so that one lock orders them all.
type screen struct {
	mu     sync.Mutex
	status []byte    // the unfinished line that stands on the terminal
	on     io.Writer // the terminal it stands on
}

// print writes a whole line. A line that stands unfinished is put below it.
func (s *screen) print(w io.Writer, line []byte) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.status == nil {
		_, err := w.Write(line)
		return err
	}
	io.WriteString(s.on, eraseLine)
	_, err := w.Write(line)
	s.on.Write(s.status)
	return err
}

// show replaces the unfinished line; nil takes it away.
func (s *screen) show(w io.Writer, status []byte) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.status == nil && status == nil {
		return
	}
	s.status, s.on = bytes.Clone(status), w
	io.WriteString(w, eraseLine)
	w.Write(status)
}

// liner turns the output of a rank into prefixed lines.
type liner struct {
	screen *screen
	to     io.Writer
	prefix string
	live   bool  // show lines that are rewritten as they are
	tail   *tail // remembers the lines; may be nil

	mu   sync.Mutex
	line []byte
	back bool // the last byte was a carriage return
}

// Write takes any piece of output.
func (l *liner) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for rest := p; len(rest) > 0; {
		i := bytes.IndexAny(rest, "\r\n")
		if i < 0 {
			l.add(rest)
			break
		}
		l.add(rest[:i])
		if rest[i] == '\r' {
			l.rewind()
		} else if err := l.end(); err != nil {
			return 0, err
		}
		rest = rest[i+1:]
	}
	return len(p), nil
}

// add appends text to the line. After a carriage return it is a new line in
// place of the old.
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

// rewind is a carriage return: what comes next takes the line's place, unless
// it is the line's end.
func (l *liner) rewind() {
	if l.live && len(l.line) > 0 {
		l.screen.show(l.to, append([]byte(l.prefix), l.line...))
	}
	l.back = true
}

// end prints the line.
func (l *liner) end() error {
	if l.live {
		l.screen.show(l.to, nil)
	}
	if l.tail != nil {
		l.tail.add(l.line)
	}
	whole := append(append([]byte(l.prefix), l.line...), '\n')
	l.line, l.back = l.line[:0], false
	return l.screen.print(l.to, whole)
}

// flush prints a last line that has no end.
func (l *liner) flush() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.line) > 0 {
		l.end()
	}
}

// The tail of a rank: how many lines, and how much of each, in bytes.
const (
	tailLines = 20
	tailLine  = 500
)

// tail remembers the last lines of a rank's standard error; of a Go program
// that crashed, the lines where the crash begins, for the end is only stacks.
type tail struct {
	mu    sync.Mutex
	lines []string
	crash bool
}

func (t *tail) add(line []byte) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(bytes.TrimSpace(line)) == 0 {
		return
	}
	if !t.crash && (bytes.HasPrefix(line, []byte("panic: ")) || bytes.HasPrefix(line, []byte("fatal error: "))) {
		t.lines, t.crash = nil, true
	}
	if len(t.lines) == tailLines {
		if t.crash {
			return
		}
		t.lines = t.lines[1:]
	}
	t.lines = append(t.lines, string(line[:min(len(line), tailLine)]))
}

func (t *tail) text() []string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return append([]string{}, t.lines...)
}
