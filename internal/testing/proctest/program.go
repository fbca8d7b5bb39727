package proctest

import (
	"bytes"
	"os/exec"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/euryale-ml/euryale/internal/testing/require"
)

// Program is a program under way, such as a launcher.
type Program struct {
	*exec.Cmd
	output output
	ended  chan struct{}
	err    error // of Wait, once it has ended
}

// Launch starts a program. The test's end kills it.
func Launch(t *testing.T, cmd *exec.Cmd) *Program {
	t.Helper()
	p := &Program{Cmd: cmd, output: output{more: make(chan struct{})}, ended: make(chan struct{})}
	cmd.Stdout, cmd.Stderr = &p.output, &p.output
	cmd.WaitDelay = time.Second // for what holds its output open
	require.NoError(t, cmd.Start())
	go func() {
		p.err = cmd.Wait()
		close(p.ended)
	}()
	t.Cleanup(func() {
		cmd.Process.Kill() // it may have ended
		<-p.ended
	})
	return p
}

// Says waits until the program's output, standard error included, matches a pattern, and reports
// false if that takes longer than limit, or if the program ends without.
func (p *Program) Says(pattern *regexp.Regexp, limit time.Duration) bool {
	late := time.After(limit)
	for {
		text, more := p.output.read()
		if pattern.MatchString(text) {
			return true
		}
		select {
		case <-more:
		case <-p.ended:
			text, _ = p.output.read()
			return pattern.MatchString(text)
		case <-late:
			return false
		}
	}
}

// Output returns what the program has said so far.
func (p *Program) Output() string {
	text, _ := p.output.read()
	return text
}

// Ends waits for the end of the program, for a time at most, and returns the error of its Wait.
func (p *Program) Ends(t *testing.T, limit time.Duration) error {
	t.Helper()
	select {
	case <-p.ended:
		return p.err
	case <-time.After(limit):
		t.Fatalf("it still runs after %v, and says\n%s", limit, p.Output())
		return nil
	}
}

// output keeps what is written.
type output struct {
	mu   sync.Mutex
	text bytes.Buffer
	more chan struct{} // closed with the next write
}

func (o *output) Write(b []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	close(o.more)
	o.more = make(chan struct{})
	return o.text.Write(b)
}

func (o *output) read() (text string, more <-chan struct{}) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.text.String(), o.more
}

// Notice keeps what is written, and calls Then once Text is in it.
type Notice struct {
	bytes.Buffer
	Text string
	Then func()
}

// Write implements [io.Writer].
func (n *Notice) Write(p []byte) (int, error) {
	defer func() {
		if n.Then != nil && strings.Contains(n.String(), n.Text) {
			n.Then()
			n.Then = nil
		}
	}()
	return n.Buffer.Write(p)
}
