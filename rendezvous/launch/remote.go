package launch

import (
	"bufio"
	"cmp"
	_ "embed"
	"encoding/gob"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"time"
)

const (
	// beat is the time between signs of life, and silence the time after which the other end
	// of a connection counts as dead. Together with the default Job.Grace it keeps a lost
	// connection from holding ranks for longer than 5 seconds.
	beat    = 500 * time.Millisecond
	silence = 4 * time.Second
	// greetTime bounds the login on a host.
	greetTime = 30 * time.Second
)

// remote is a host, and the connection to it.
type remote struct {
	Host
	platform       platform
	address, guest string // of the host and of this machine, on the connection
	kit            kit

	cmd    *exec.Cmd
	family family
	in     io.WriteCloser
	out    *bufio.Reader
	said   *tail // standard error

	mu      sync.Mutex
	ended   bool   // ssh was waited for
	cut     string // why this end has cut the connection
	writing sync.Mutex
	orders  *gob.Encoder // used under writing
	news    *gob.Decoder

	over chan struct{} // closed when the connection has ended

	// What follows only the cluster uses.
	live         bool  // the host is connected
	lost         bool  // the connection has ended, or there was none
	gone         error // why it could not be reached
	port         int   // a free one on the host
	first, ranks int   // what it has of the attempt
}

// sshOptions have ssh ask nothing, since nobody could tell which host asks; take no connection of
// another ssh, which would outlive this one; and notice within 5 seconds that a host is gone.
func sshOptions() []string {
	args := []string{"-T", "-a", "-x", "-S", "none"}
	for _, option := range []string{"BatchMode=yes", "ConnectTimeout=10", "LogLevel=ERROR",
		"ServerAliveInterval=1", "ServerAliveCountMax=4", "ClearAllForwardings=yes",
		"PermitLocalCommand=no"} {
		args = append(args, "-o", option)
	}
	return args
}

// script is what hosts run.
//
//go:embed host.sh
var script string

// start starts ssh, which ends with the thread. Another connection takes another remote.
func (h *remote) start() error {
	h.cmd = exec.Command("ssh", append(sshOptions(), "--", h.Name,
		// All login shells take this, and none of them gets to see the script.
		fmt.Sprintf(`exec sh -c 'eval "$(head -c %d)"'`, len(script)))...)
	h.said = &tail{}
	h.cmd.Stderr = &liner{screen: newScreen(), to: io.Discard, tail: h.said}
	h.cmd.WaitDelay = drainTime
	in, err := h.cmd.StdinPipe()
	if err != nil {
		return err
	}
	out, err := h.cmd.StdoutPipe()
	if err != nil {
		return err
	}
	h.in, h.out = in, bufio.NewReader(out)
	if h.family, err = start(h.cmd); err != nil {
		return fmt.Errorf("start ssh, which reaches hosts: %w", err)
	}
	h.over = make(chan struct{})
	return nil
}

// greet waits for the host to say what it is.
func (h *remote) greet() error {
	defer h.within(greetTime)()
	if _, err := io.WriteString(h.in, script); err != nil {
		return h.whyLost(err)
	}
	for { // what login scripts print comes first
		line, err := h.out.ReadString('\n')
		if err != nil {
			return h.whyLost(err)
		}
		if words := strings.Fields(line); len(words) > 2 && words[0] == "euryale-host" {
			h.platform = platformOf(words[1], words[2])
			h.address, h.guest = h.bare(), ""
			if len(words) == 7 { // sshd has set SSH_CONNECTION
				h.guest, h.address = words[3], words[5]
			}
			return nil
		}
	}
}

// bare is the host's name without a user.
func (h *remote) bare() string { return h.Name[strings.LastIndexByte(h.Name, '@')+1:] }

// begin copies the files of the kit unless the host has them, and has it become a launcher.
func (h *remote) begin() error {
	files := []file{h.kit.launcher}
	if h.kit.program != nil {
		files = append(files, *h.kit.program)
	}
	for _, f := range files {
		if err := h.send(f); err != nil {
			return fmt.Errorf("copy %s (%.1f MB): %w", f.name, float64(f.size)/1e6, h.whyLost(err))
		}
	}
	if _, err := fmt.Fprintf(h.in, "%s run %s\n", files[0].hash, files[0].name); err != nil {
		return h.whyLost(err)
	}
	h.orders, h.news = gob.NewEncoder(h.in), gob.NewDecoder(h.out)
	defer h.within(greetTime)()
	var first news
	if err := h.news.Decode(&first); err != nil {
		return fmt.Errorf("start euryale there: %w", h.whyLost(err))
	}
	h.port = first.Port
	return nil
}

// send copies a file unless the host has it.
func (h *remote) send(f file) error {
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
	if _, err := io.Copy(h.in, io.LimitReader(content, f.size)); err != nil {
		return err
	}
	if answer, err = h.out.ReadString('\n'); err == nil && answer != "have\n" {
		err = fmt.Errorf("the host says %q", answer)
	}
	return err
}

// order sends an order, unless close has ended the orders. An error ends the connection, which
// listen sees.
func (h *remote) order(o order) {
	h.writing.Lock()
	defer h.writing.Unlock()
	if err := h.orders.Encode(o); err != nil && !errors.Is(err, os.ErrClosed) {
		h.cutOff("it takes no orders")
	}
}

// pulse does something, such as to send a sign of life, every half second until the end.
func pulse(end <-chan struct{}, f func()) {
	ticker := time.NewTicker(beat)
	defer ticker.Stop()
	for {
		select {
		case <-ticker.C:
			f()
		case <-end:
			return
		}
	}
}

// hangUp ends a connection that listen does not serve, unless it has ended.
func (h *remote) hangUp() {
	h.mu.Lock()
	ended := h.ended
	h.mu.Unlock()
	h.lost = true
	if !ended {
		h.in.Close()
		h.whyLost(errors.ErrUnsupported) // nobody asks why
	}
}

// within cuts the connection unless stop is called in time.
func (h *remote) within(limit time.Duration) (stop func() bool) {
	return time.AfterFunc(limit, func() {
		h.cutOff(fmt.Sprintf("nothing was heard of it for %v", limit))
	}).Stop
}

// cutOff kills ssh, and with it the connection.
func (h *remote) cutOff(why string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if !h.ended {
		h.cut = cmp.Or(h.cut, why)
		h.family.send(syscall.SIGKILL)
	}
}

// whyLost waits for the end of ssh, of which err is a sign, and says why the host is lost.
func (h *remote) whyLost(err error) error {
	late := time.AfterFunc(2*drainTime, func() { h.cutOff("ssh did not end") })
	h.family.wait()
	late.Stop()
	h.mu.Lock()
	h.ended = true
	h.family.end()
	h.mu.Unlock()
	h.in.Close()
	h.cmd.Wait() // the state says it
	h.cmd.Stderr.(*liner).flush()
	close(h.over)
	var e ending
	h.said.tell(&e)
	switch {
	case h.cut != "":
		err = errors.New(h.cut)
	case len(e.lines) > 0:
		err = errors.New(strings.Join(e.lines, "\n    "))
	case errors.Is(err, io.EOF) || errors.Is(err, syscall.EPIPE):
		err = fmt.Errorf("ssh has ended with %v", h.cmd.ProcessState)
	}
	if h.platform == (platform{}) && h.cmd.ProcessState.ExitCode() == 255 { // ssh's own failure
		err = fmt.Errorf("%w\nssh -o BatchMode=yes %s true must work: the host's key must be "+
			"known, and the login must ask nothing", err, h.Name)
	}
	return err
}
