//go:build linux

package main

import (
	"bufio"
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
)

const (
	// hangTime is how long a job has no step that hangs.
	hangTime = time.Minute
	// fullTime is how long a job may take to have all ranks again, in which it is left alone in
	// half of the cases.
	fullTime = 10 * time.Second
	// maxUnfit is how many replacements in a row are struck on a machine before their first step:
	// the launcher would start none there any more after a few more.
	maxUnfit = 3
	// youth is after how long a process of a program has the parameters, if the training goes on:
	// three times what the slowest start took on two busy cores.
	youth = 6 * time.Second
	// lastPart is the part of a program's steps in which nothing is struck: nobody takes the place
	// of who ends after the last one.
	lastPart = 0.05
)

// job is a job whose processes are killed.
type job struct {
	config
	site   site
	random *rand.Rand
	want   []string // the parameters after each step
	cmd    *exec.Cmd

	mu        sync.Mutex
	log       bytes.Buffer
	began     time.Time
	processes map[int]*process // by pid
	unfit     map[string][]int // numbers of those that were struck before a step, by machine
	step      int              // the last one
	stepped   time.Time        // when it was heard
	killed    time.Time        // the last kill that no step has followed yet
	full      bool             // the last step was one of all ranks
	spared    time.Time        // until when a job that is not full is left alone
	struck    time.Time        // the last kill or stop
	late      bool             // one was struck that had done the last step, before that was heard
	ends      map[string]bool
	wrong     error     // of the first step with other parameters
	cut       cut       // the last one
	returns   time.Time // when the host that has left does; zero: none has
	verdict
}

// process is a process of the job.
type process struct {
	*os.Process
	number  int    // the launcher's
	machine string // the network that it is on
	settled bool   // it has done a step, so it has the parameters
	found   time.Time
	struck  bool // it was killed or stopped, which may take a while
}

// run runs the job, and kills its processes meanwhile.
func (j *job) run(seed uint64) (err error) {
	args := append([]string{"--elastic", "-n", strconv.Itoa(j.ranks), "--standby",
		strconv.Itoa(j.standby), "--min-ranks", strconv.Itoa(j.least)}, j.trains()...)
	if j.trainer == "" {
		args = append(append(args, "-pause", stepPause), strings.Fields(j.args)...)
	}
	if j.site.user != nil {
		if err := j.site.list(j.config, -1); err != nil {
			return err
		}
	}
	j.cmd = j.site.start(j.config, args...)
	reader, writer := io.Pipe()
	j.cmd.Stdout, j.cmd.Stderr = writer, writer
	j.began, j.stepped = time.Now(), time.Now()
	if err := j.cmd.Start(); err != nil {
		return err
	}
	var reading sync.WaitGroup
	reading.Go(func() {
		for lines := bufio.NewScanner(reader); lines.Scan(); {
			j.hear(lines.Text())
		}
	})
	ended := make(chan error, 1)
	go func() { ended <- j.cmd.Wait() }()
	err = j.disturb(ended)
	writer.Close()
	reading.Wait()
	j.mend(true)
	for _, p := range j.processes {
		p.Release()
	}
	return j.judge(err, seed)
}

// disturb kills processes until the job has ended.
func (j *job) disturb(ended <-chan error) error {
	for {
		select {
		case err := <-ended:
			return err
		case <-time.After(time.Duration(j.random.ExpFloat64() * float64(j.mean))):
		}
		j.mu.Lock()
		hangs := time.Since(j.stepped) > hangTime
		j.mend(false)
		j.find()
		j.comeAndGo()
		if pending := !j.cut.at.IsZero() && !j.cut.stepped; !pending || j.random.IntN(4) == 0 {
			j.strike()
		}
		j.mu.Unlock()
		if hangs {
			for pid := range j.processes {
				if state(pid) == 'T' {
					continue // as the kills have left it
				}
				j.processes[pid].Signal(syscall.SIGQUIT)
			}
			j.cmd.Process.Signal(syscall.SIGQUIT)
			return errors.Join(errors.New("the job hangs"), <-ended)
		}
	}
}

// judge returns what was wrong with a job that has ended, and keeps the log of such a job.
func (j *job) judge(err error, seed uint64) error {
	if exit := (*exec.ExitError)(nil); j.late && errors.As(err, &exit) &&
		exit.ExitCode() == 128+int(syscall.SIGKILL) {
		err = nil // as it has to be: nobody takes the place of one that ends after the last step
	}
	if j.hashes = len(j.ends); err == nil && j.hashes != 1 {
		err = fmt.Errorf("%d hashes at the end", j.hashes)
	}
	if err = cmp.Or(j.wrong, err); err == nil && j.logs == "" {
		return nil
	}
	path := filepath.Join(cmp.Or(j.logs, os.TempDir()), fmt.Sprintf("immortal-%s-%d.log", j.model,
		seed))
	if err != nil {
		err = fmt.Errorf("%w: see %s", err, path)
	}
	return errors.Join(err, os.WriteFile(path, j.log.Bytes(), 0o600))
}

// What the program prints.
var (
	stepText  = regexp.MustCompile(`step (\d+): pid=(\d+) rank (\d+) of (\d+) params=([0-9a-f]+)`)
	startText = regexp.MustCompile(`\[(\d+)\] pid=(\d+) starts`)
	// of programs
	progressText = regexp.MustCompile(`(?:step|epoch) (\d+)/(\d+)`)
	endText      = regexp.MustCompile(` params=([0-9a-f]{16,})`)
)

// note keeps a line for the log. j.mu is held.
func (j *job) note(format string, args ...any) {
	fmt.Fprintf(&j.log, "%9.3f %s\n", time.Since(j.began).Seconds(), fmt.Sprintf(format, args...))
}

// hear takes a line of the job.
func (j *job) hear(line string) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.note("%s", line)
	if j.trainer != "" {
		j.hearProgram(line)
		return
	}
	if start := startText.FindStringSubmatch(line); start != nil {
		pid, _ := strconv.Atoi(start[2])
		if p, err := os.FindProcess(pid); err == nil {
			machine, _ := os.Readlink(fmt.Sprintf("/proc/%d/ns/net", pid)) // none: it has ended
			number, _ := strconv.Atoi(start[1])
			j.processes[pid] = &process{Process: p, number: number, machine: machine}
		}
		return
	}
	if strings.Contains(line, "takes its place") {
		j.replacements++
	}
	step := stepText.FindStringSubmatch(line)
	if step == nil {
		return
	}
	number, _ := strconv.Atoi(step[1]) // digits, as the others
	pid, _ := strconv.Atoi(step[2])
	if p := j.processes[pid]; p != nil && !p.settled {
		p.settled = true
		j.unfit[p.machine] = slices.DeleteFunc(j.unfit[p.machine], func(number int) bool {
			return number < p.number
		})
	}
	if number == j.steps {
		j.ends[step[5]] = true
		j.late = j.late || j.processes[pid] != nil && j.processes[pid].struck
	}
	if step[5] != j.want[number] && j.wrong == nil {
		j.wrong = fmt.Errorf("step %d has other parameters than without kills: %s", number, line)
	}
	if number <= j.step {
		return
	}
	j.passes()
	j.step, j.stepped, j.full = number, time.Now(), step[4] == strconv.Itoa(j.ranks)
	if !j.killed.IsZero() {
		j.times = append(j.times, time.Since(j.killed))
		j.killed = time.Time{}
	}
}

// hearProgram takes a line of a job of a program. j.mu is held.
func (j *job) hearProgram(line string) {
	if strings.Contains(line, "takes its place") {
		j.replacements++
	}
	if end := endText.FindStringSubmatch(line); end != nil {
		j.ends[end[1]] = true
		if end[1] != j.want[0] && j.wrong == nil {
			j.wrong = fmt.Errorf("it ends with other parameters than without kills: %s", line)
		}
	}
	step := progressText.FindStringSubmatch(line)
	if step == nil {
		return
	}
	number, _ := strconv.Atoi(step[1]) // digits
	if j.steps, _ = strconv.Atoi(step[2]); float64(number) > (1-lastPart)*float64(j.steps) {
		number = j.steps
	}
	if number <= j.step {
		return
	}
	j.step, j.stepped, j.full = number, time.Now(), true
	for _, p := range j.processes {
		if p.settled = p.settled || !p.struck && time.Since(p.found) > youth; p.settled {
			delete(j.unfit, p.machine)
		}
	}
	alive := 0
	for _, p := range j.processes {
		if p.settled && !p.struck {
			alive++
		}
	}
	j.full = alive == j.ranks
}

// find finds the processes of a program, which do not say that they start. j.mu is held.
func (j *job) find() {
	if j.trainer == "" {
		return
	}
	all, _ := filepath.Glob("/proc/[0-9]*/exe")
	for _, link := range all {
		path, err := os.Readlink(link)
		if err != nil || filepath.Base(path) != filepath.Base(j.program) {
			continue
		}
		dir := filepath.Dir(link)
		pid, _ := strconv.Atoi(filepath.Base(dir)) // digits
		p, err := os.FindProcess(pid)
		if err != nil || j.processes[pid] != nil {
			continue
		}
		machine, _ := os.Readlink(filepath.Join(dir, "ns/net")) // none: it has ended
		j.processes[pid] = &process{Process: p, number: len(j.processes), machine: machine,
			found: time.Now()}
	}
}

// comeAndGo has a host leave or return. j.mu is held.
func (j *job) comeAndGo() {
	hosts := len(j.site.hosts)
	switch away := !j.returns.IsZero(); {
	case away && time.Now().After(j.returns):
		j.fails(j.site.list(j.config, -1))
		j.note("immortal: the host returns")
		j.returns = time.Time{}
	case !away && j.leaves > 0 && hosts > 1 && j.full && j.random.IntN(j.leaves) == 0:
		leaves := j.random.IntN(hosts)
		j.fails(j.site.list(j.config, leaves))
		j.note("immortal: %s leaves", j.site.hosts[leaves].Addr)
		j.returns = time.Now().Add(time.Duration(2+3*j.random.Float64()) * fullTime / 4)
		j.left++
		j.full, j.spared = false, time.Now().Add(fullTime)
	}
}

// strike kills or stops a random process, if one that has the parameters remains. In half of the
// cases the job is left alone then until it has all ranks again. j.mu is held.
func (j *job) strike() {
	if !j.full && time.Now().Before(j.spared) || j.step == j.steps { // they end, or save
		return
	}
	var alive []int
	settled, stopped := 0, false
	for pid, p := range j.processes {
		switch is := state(pid); {
		case is == 0 || is == 'Z' || is == 'X':
			delete(j.processes, pid)
			p.Release()
		case p.struck:
			stopped = stopped || is == 'T'
		default:
			if alive = append(alive, pid); p.settled {
				settled++
			}
		}
	}
	if len(alive) == 0 {
		return
	}
	slices.Sort(alive) // so that a seed has one order
	victim := alive[j.random.IntN(len(alive))]
	p := j.processes[victim]
	if settled == 0 || p.settled && (settled == 1 || j.shards && settled < j.ranks) ||
		!p.settled && len(j.unfit[p.machine]) == maxUnfit {
		return
	}
	if j.share > 0 && j.cut.at.IsZero() && j.random.IntN(j.share) == 0 {
		j.sever()
		return
	}
	p.struck = true
	j.struck, j.cut.alone = time.Now(), false
	if !p.settled {
		j.unfit[p.machine] = append(j.unfit[p.machine], p.number)
	}
	if j.stops > 0 && j.random.IntN(j.stops) == 0 {
		if p.Signal(syscall.SIGSTOP) == nil {
			j.stopped++
			j.note("immortal: %d is stopped", victim)
		}
		j.killed = time.Time{} // the next step takes longer
	} else if p.Kill() == nil {
		j.kills++
		j.note("immortal: %d is killed", victim)
		if !stopped {
			j.killed = time.Now()
		}
	}
	if j.random.IntN(2) == 0 {
		j.full, j.spared = false, time.Now().Add(fullTime)
	}
}

// state returns how a process is, as /proc names it, 0 for one that is no more.
func state(pid int) byte {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0
	}
	_, rest, _ := bytes.Cut(text, []byte(") "))
	return append(rest, 0)[0]
}
