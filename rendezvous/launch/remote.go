package launch

import (
	"bufio"
	"cmp"
	_ "embed"
	"encoding/gob"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"slices"
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
	// greetTime bounds the login on a host, and stallTime each megabyte that is copied: a slow
	// line has some more of them under way.
	greetTime = 30 * time.Second
	stallTime = 2 * time.Minute
)

// remote is a host in an attempt, and the connection to it.
type remote struct {
	Host
	first, ranks int   // what it has of the attempt; of an elastic job, how many it takes
	lost         bool  // the connection has ended, or that of an attempt before
	gone         error // why it could not be reached

	platform       platform
	address, guest string // of the host and of this machine, on the connection
	port           int    // a free one on the host
	kit            kit

	cmd    *exec.Cmd
	family family
	in     io.WriteCloser
	out    *bufio.Reader
	said   *tail // standard error

	writing sync.Mutex
	orders  *gob.Encoder // used under writing
	news    *gob.Decoder
	over    chan struct{} // closed when the connection has ended

	listening sync.WaitGroup
	hangUp    sync.Once
	why       error // that the connection has ended

	mu      sync.Mutex
	running map[int]*rank // by their numbers
	failed  error         // why no process can start there
	ended   bool          // ssh was waited for
	unused  bool          // the attempt is over
	cut     string        // why this end has cut the connection
}

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

// sshOptions have ssh ask nothing, since nobody could tell which host asks; run this program's
// command over a connection of its own, whatever the user's configuration says; and notice within
// 5 seconds that a host is gone.
const sshOptions = "-T -a -x -S none -o BatchMode=yes -o ConnectTimeout=10 -o LogLevel=ERROR " +
	"-o ServerAliveInterval=1 -o ServerAliveCountMax=4 -o ClearAllForwardings=yes " +
	"-o PermitLocalCommand=no -o RemoteCommand=none --"

// script is what hosts run.
//
//go:embed host.sh
var script string

// start starts ssh, which ends with the thread.
func (h *remote) start() (err error) {
	h.cmd = exec.Command("ssh", append(strings.Fields(sshOptions), h.Name,
		// All login shells take this, and none of them gets to see the script.
		fmt.Sprintf(`exec sh -c 'eval "$(head -c %d)"'`, len(script)))...)
	h.said, h.over = &tail{}, make(chan struct{})
	h.cmd.Stderr = &liner{screen: newScreen(), to: io.Discard, tail: h.said}
	h.cmd.WaitDelay = drainTime
	out, err := h.cmd.StdoutPipe()
	if err == nil {
		h.out = bufio.NewReader(out)
		h.in, err = h.cmd.StdinPipe()
	}
	if err == nil {
		h.family, err = start(h.cmd)
	}
	if err != nil {
		return fmt.Errorf("start ssh, which reaches hosts: %w", err)
	}
	return nil
}

// greet waits for the host to say what it is. What login scripts print comes first.
func (h *remote) greet() error {
	defer h.within(greetTime).Stop()
	_, err := io.WriteString(h.in, script)
	for err == nil {
		var line string
		line, err = h.out.ReadString('\n')
		if words := strings.Fields(line); len(words) > 2 && words[0] == "euryale-host" {
			h.said.forget()
			h.platform = platformOf(words[1], words[2])
			h.address = h.Name[strings.LastIndexByte(h.Name, '@')+1:]
			if len(words) == 7 { // sshd has set SSH_CONNECTION
				h.guest, h.address = words[3], words[5]
			}
			return nil
		}
	}
	return h.whyLost(err)
}

// prepare copies the files of the kit unless the host has them, and has it become a launcher. Until
// all hosts have, it must know that this end lives.
func (h *remote) prepare() error {
	files := []file{h.kit.launcher}
	if h.kit.program != nil {
		files = append(files, *h.kit.program)
	}
	for _, f := range files {
		if err := h.send(f); err != nil {
			return fmt.Errorf("copy %s (%.1f MB): %w", f.name, float64(f.size)/1e6, h.whyLost(err))
		}
	}
	defer h.within(greetTime).Stop()
	_, err := fmt.Fprintf(h.in, "%s run %s\n", files[0].hash, files[0].name)
	h.orders, h.news = gob.NewEncoder(h.in), gob.NewDecoder(h.out)
	var first news
	if err == nil {
		err = h.news.Decode(&first)
	}
	if err != nil {
		return fmt.Errorf("start euryale there: %w", h.whyLost(err))
	}
	h.port = first.Port
	go pulse(h.over, func() { h.order(order{}) })
	return nil
}

// send copies a file unless the host has it.
func (h *remote) send(f file) error {
	late := h.within(stallTime)
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
		late.Reset(stallTime)
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

// order sends an order.
func (h *remote) order(o order) {
	h.writing.Lock()
	defer h.writing.Unlock()
	_ = h.orders.Encode(o) // an error is the end of the connection, and listen says why
}

// begin starts a rank, with variables of its own. On a host that was just lost it ends at once.
func (h *remote) begin(w *watch, r *rank, slot int, own []string) {
	h.mu.Lock()
	r.host, r.slot, h.running[r.number] = h, slot, r
	ended, failed := h.ended, h.failed
	h.mu.Unlock()
	switch {
	case failed != nil:
		go h.endAll(w, failed)
	case ended:
		go func() { h.endAll(w, &HostLost{Host: h.Name, why: h.whyLost(nil)}) }()
	default:
		h.order(order{Start: &process{r.number, own}})
	}
}

// listen takes what the host tells of its ranks until the connection ends, and the ranks with it.
func (h *remote) listen(w *watch) {
	for {
		var n news
		heard := h.within(silence)
		err := h.news.Decode(&n)
		heard.Stop()
		h.mu.Lock()
		r := h.running[n.Number]
		h.mu.Unlock()
		switch {
		case err != nil:
			why := h.whyLost(err)
			h.mu.Lock()
			lost := !h.unused
			h.lost = h.lost || lost
			h.mu.Unlock()
			if lost && w.pool != nil { // of another job this is the error
				w.job.notice(fmt.Sprintf("host %s is lost: %v", h.Name, why))
			}
			h.endAll(w, &HostLost{Host: h.Name, why: why})
			return
		case n.Notice != "":
			w.job.notice("host " + h.Name + ": " + n.Notice)
		case n.Failed != "" && n.End == nil:
			h.mu.Lock()
			h.failed = fmt.Errorf("host %s: %s", h.Name, n.Failed)
			h.mu.Unlock()
			h.endAll(w, h.failed)
		case r == nil: // a sign of life
		case n.Out != nil:
			r.out.Write(n.Out)
		case n.Err != nil:
			r.err.Write(n.Err)
		case n.End != nil:
			e := ending{status: n.End.Status, asked: n.End.Asked, stopped: n.End.Stopped,
				hang: n.End.Hang}
			if n.Failed != "" {
				e.why = fmt.Errorf("host %s: %s", h.Name, n.Failed)
			}
			h.end(w, r, e)
		}
	}
}

// end tells that a rank has ended.
func (h *remote) end(w *watch, r *rank, e ending) {
	h.mu.Lock()
	delete(h.running, r.number)
	h.mu.Unlock()
	r.flush()
	e.rank, e.at, e.host = r.number, time.Now(), h.Name
	r.tail.tell(&e)
	w.exit(e)
}

// endAll tells that all ranks have ended, and why. It takes them away at once: begin and listen may
// both call it, and each rank ends once.
func (h *remote) endAll(w *watch, why error) {
	h.mu.Lock()
	all := h.running
	h.running = map[int]*rank{}
	h.mu.Unlock()
	numbers := slices.Sorted(maps.Keys(all))
	if lost, ok := why.(*HostLost); ok && len(numbers) > 0 {
		lost.ranks = span(numbers)
	}
	for _, number := range numbers {
		h.end(w, all[number], ending{why: why})
	}
}

// hang says that a rank has not ended, "" if it has. The host says where it hangs, if it can.
func (h *remote) hang(r *rank) string {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.running[r.number] == nil {
		return ""
	}
	return fmt.Sprintf("rank %d on host %s has not ended after SIGKILL", r.number, h.Name)
}

// free returns the first slot of the host that no rank has. A host that is lost, or that cannot
// start ranks, has none.
func (h *remote) free() (slot int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.ended || h.failed != nil {
		return h.ranks
	}
	taken := map[int]bool{}
	for _, r := range h.running {
		taken[r.slot] = true
	}
	for taken[slot] {
		slot++
	}
	return slot
}

// within cuts the connection unless the timer is stopped in time.
func (h *remote) within(limit time.Duration) *time.Timer {
	return time.AfterFunc(limit, func() {
		h.cutOff(fmt.Sprintf("nothing was heard of it for %v", limit))
	})
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

// release ends the connections of an attempt that is over. Hosts end their ranks then. It does not
// wait for output that nobody reads.
func release(hosts []*remote) {
	forAll(hosts, func(h *remote) {
		if h.cmd == nil || h.cmd.Process == nil {
			return
		}
		h.mu.Lock()
		h.unused = true
		h.mu.Unlock()
		h.whyLost(nil) // nobody asks why
		heard := make(chan struct{})
		go func() {
			h.listening.Wait()
			close(heard)
		}()
		select {
		case <-heard:
		case <-time.After(drainTime):
		}
	})
}

// whyLost ends the connection, of whose end err is a sign, and says why the host is lost.
func (h *remote) whyLost(err error) error {
	h.hangUp.Do(func() { h.why = h.close(err) })
	return h.why
}

func (h *remote) close(err error) error {
	h.in.Close()
	late := time.AfterFunc(2*drainTime, func() { h.cutOff("ssh did not end") })
	h.family.wait()
	late.Stop()
	h.mu.Lock()
	h.ended = true
	h.family.end()
	h.mu.Unlock()
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
