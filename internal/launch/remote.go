package launch

import (
	"bufio"
	"cmp"
	"context"
	_ "embed"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
)

const (
	// greetTime bounds the login on a host. stallTime bounds each megabyte that is copied: a slow
	// line has a few more of them under way.
	greetTime = 30 * time.Second
	stallTime = 2 * time.Minute
)

// remote is a host in an attempt, and the connection to it.
type remote struct {
	host
	lost  bool // in an earlier attempt
	agent bool // another launcher has started its launcher

	platform       platform
	address, guest string // of the host and of this machine, on the connection
	port           string // a free one on the host
	kit            []file // the files it gets: this program, then the job's unless it is its own

	ssh  process
	in   io.WriteCloser
	out  *bufio.Reader
	pipe io.Closer // of out
	said *liner    // standard error

	late      *alarm // of its silence
	orders    chan order
	over      chan struct{} // closed when the connection has ended
	listening sync.WaitGroup
	hangUp    sync.Once
	why       error                  // why the connection has ended
	cut       atomic.Pointer[string] // why this end cut the connection
}

// isLost reports whether the host was reached and then lost.
func (h *host) isLost() bool { return errors.As(h.down, new(*HostLost)) }

// wasLost reports whether the host was lost, in this attempt or an earlier one.
func (h *remote) wasLost() bool { return h.lost || h.isLost() }

// about adds the name of this host to an error.
func (h *remote) about(err error) error { return fmt.Errorf("host %s: %w", h.Name, err) }

// span names ranks of a host, in their order.
func span(ranks []int) string {
	first, last := ranks[0], ranks[len(ranks)-1]
	switch {
	case first == last:
		return fmt.Sprint("rank ", first)
	case last-first == len(ranks)-1:
		return fmt.Sprintf("ranks %d to %d", first, last)
	}
	return "ranks " + strings.Trim(strings.ReplaceAll(fmt.Sprint(ranks), " ", ", "), "[]")
}

// sshOptions make ssh ask nothing, since nobody could tell which host asks; run this program's
// command over a separate connection, whatever the user's configuration says; and notice within 5
// seconds that a host is gone.
const sshOptions = "-T -a -x -S none -o BatchMode=yes -o ConnectTimeout=10 -o LogLevel=ERROR " +
	"-o ServerAliveInterval=1 -o ServerAliveCountMax=4 -o ClearAllForwardings=yes " +
	"-o PermitLocalCommand=no -o RemoteCommand=none --"

// script is what hosts run.
//
//go:embed host.sh
var script string

// start starts ssh, which ends when the thread does.
func (h *remote) start() error {
	cmd := exec.Command("ssh", append(strings.Fields(sshOptions), h.Name,
		// All login shells accept this, and none of them sees the script.
		fmt.Sprintf(`exec sh -c 'eval "$(head -c %d)"'`, len(script)))...)
	h.said = &liner{screen: newScreen(), to: io.Discard, tail: &tail{}}
	cmd.Stderr = h.said
	out, err := cmd.StdoutPipe()
	if err == nil {
		h.out, h.pipe = bufio.NewReader(out), out
		h.in, err = cmd.StdinPipe()
	}
	if err == nil {
		h.ssh.cmd = cmd
		err = h.ssh.start()
	}
	if err != nil {
		return fmt.Errorf("start ssh, which reaches hosts: %w", err)
	}
	h.orders, h.over = make(chan order), make(chan struct{})
	return nil
}

// greet waits for the host to say what it is. The output of login scripts comes first.
func (h *remote) greet() error {
	defer h.mustSpeakWithin(greetTime).Stop()
	_, err := io.WriteString(h.in, script)
	for err == nil {
		var line string
		line, err = h.out.ReadString('\n')
		if words := strings.Fields(line); len(words) > 2 && words[0] == "euryale-host" {
			h.said.tail.forget()
			h.platform = platformOf(words[1], words[2])
			h.address = h.Name[strings.LastIndexByte(h.Name, '@')+1:]
			if len(words) == 7 { // sshd has set SSH_CONNECTION
				h.guest, h.address = words[3], words[5]
			}
			return nil
		}
	}
	return h.close(err)
}

// prepare copies the files of the kit unless the host has them, and makes it a launcher. Until all
// hosts are ready, the host must know that this end is alive.
func (h *remote) prepare() error {
	for _, f := range h.kit {
		if err := h.send(f); err != nil {
			return fmt.Errorf("copy %s (%.1f MB): %w", f.name, float64(f.size)/1e6, h.close(err))
		}
	}
	defer h.mustSpeakWithin(greetTime).Stop()
	_, err := fmt.Fprintf(h.in, "%s run %s\n", h.kit[0].hash, h.kit[0].name)
	if err == nil {
		h.port, err = h.out.ReadString('\n')
	}
	if err != nil {
		return fmt.Errorf("start euryale there: %w", h.close(err))
	}
	h.port = strings.TrimSpace(h.port)
	go speak(h.in, h.orders, h.over)
	return nil
}

// send copies a file unless the host has it.
func (h *remote) send(f file) error {
	late := h.mustSpeakWithin(stallTime)
	defer late.Stop()
	if _, err := fmt.Fprintln(h.in, f.hash, f.size, f.name); err != nil {
		return err
	}
	answer, err := h.out.ReadString('\n')
	if err != nil || answer == "have\n" {
		return err
	}
	content, err := os.Open(f.path)
	if err != nil {
		return err
	}
	defer content.Close()
	for left := f.size; left > 0 && err == nil; left -= 1e6 {
		late.Reset()
		_, err = io.CopyN(h.in, content, min(left, 1e6))
	}
	if err != nil {
		return err
	}
	if answer, err = h.out.ReadString('\n'); err == nil && answer != "have\n" {
		err = fmt.Errorf("the host says %q", answer)
	}
	return err
}

// order sends an order, until the connection has ended.
func (h *remote) order(o order) {
	select {
	case h.orders <- o:
	case <-h.over:
	}
}

// listen handles what the host reports of its ranks until the connection, and with it the ranks,
// end.
func (h *remote) listen(w *watch) {
	err := hear(h.out, h.late, func(n news) { h.take(w, n) })
	if err = h.close(err); err == nil {
		return // the attempt has ended
	}
	h.endAll(w, &HostLost{Host: h.Name, why: err})
}

// take handles a report from the host.
func (h *remote) take(w *watch, n news) {
	c := w.child(n.Number)
	switch {
	case n.Notice != "":
		w.notice("host " + h.Name + ": " + n.Notice)
	case n.Leaves:
		w.pass(leaving{h.number})
	case n.Failed != "" && n.End == nil:
		h.endAll(w, h.about(errors.New(n.Failed)))
	case c == nil: // a sign of life
	case n.Out != nil:
		c.out.Write(n.Out)
	case n.Err != nil:
		c.err.Write(n.Err)
	case n.Stops, n.Goes:
		w.pass(halted{n.Number, n.Stops})
	case n.End != nil:
		n.End.at = time.Now().Add(-n.End.Late)
		if n.Failed != "" {
			n.End.why = h.about(errors.New(n.Failed))
		}
		w.exit(c, *n.End)
	}
}

// endAll reports that the host is down, why, and that its ranks have ended; for some it is the
// second report. The supervisor starts none there any more.
func (h *remote) endAll(w *watch, why error) {
	w.pass(down{h.number, why})
	w.mu.Lock()
	children, why := slices.Clone(w.children), cmp.Or(h.down, why)
	w.mu.Unlock()
	for _, c := range children {
		if c.host == h {
			w.exit(c, ending{at: time.Now(), why: why})
		}
	}
}

// mustSpeakWithin cuts the connection unless the alarm is turned off in time.
func (h *remote) mustSpeakWithin(limit time.Duration) *alarm {
	return newAlarm(limit, func() {
		h.cutOff(fmt.Sprintf("nothing was heard of it for %v", limit))
	})
}

// cutOff kills ssh, and with it the connection. The kernel may hold ssh, and processes that it
// started may hold the pipe.
func (h *remote) cutOff(why string) {
	h.cut.CompareAndSwap(nil, &why)
	h.ssh.signal(syscall.SIGKILL)
	h.pipe.Close()
}

// release ends the connections of an attempt that has ended. Hosts then end their ranks. It does
// not wait for output that nobody reads.
func release(hosts []*remote) {
	<-forAll(hosts, func(h *remote) {
		if h.over != nil { // ssh was started
			h.close(nil)
			within(drainTime, h.listening.Wait)
			h.pipe.Close()
		}
	})
}

// close ends the connection, given an error err that indicates its end. It returns why the host is
// lost; nil if it is not lost, only no longer needed.
func (h *remote) close(err error) error {
	h.hangUp.Do(func() {
		h.in.Close()
		if h.agent {
			close(h.over)
			if err != nil {
				h.why = h.reason(err, ending{})
			}
			return
		}
		ctx, cancel := context.WithTimeoutCause(context.Background(), 2*drainTime,
			errors.New("ssh did not end"))
		defer cancel()
		e, late := h.ssh.end(ctx, nil)
		close(h.over)
		h.said.flush()
		h.said.tail.tell(&e)
		if err != nil {
			h.why = h.reason(cmp.Or(late, err), e)
		}
	})
	return h.why
}

// reason says why the connection has ended, given such an error and how ssh ended.
func (h *remote) reason(err error, e ending) error {
	switch cut := h.cut.Load(); {
	case cut != nil:
		err = errors.New(*cut)
	case len(e.lines) > 0:
		err = errors.New(strings.Join(e.lines, "\n    "))
	case h.agent:
		return fmt.Errorf("its launcher has ended, or the connection to it: %w", err)
	case errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) ||
		errors.Is(err, syscall.EPIPE):
		err = fmt.Errorf("ssh has ended with %s", e.how())
	}
	if h.platform == (platform{}) && e.Status.ExitStatus() == 255 { // ssh's own failure
		err = fmt.Errorf("%w\nssh -o BatchMode=yes %s true must work: the host's key must be "+
			"known, and the login must ask nothing", err, h.Name)
	}
	return err
}
