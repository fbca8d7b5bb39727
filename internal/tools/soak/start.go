//go:build linux

package main

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/euryale-ml/euryale/internal/testing/proctest"
)

const (
	// lastWords is how long a process that hangs may take to write its stacks, and
	// one that is killed to be gone.
	lastWords = 2 * time.Second
	// pipeDelay is how long an output is read that another process still holds open.
	pipeDelay = time.Second
)

// process is a process that the soak has started.
type process struct {
	rank   int // -1 for a launcher, and for one of all ranks
	cmd    *exec.Cmd
	output bytes.Buffer // to be read once it has ended
	ended  chan struct{}
}

// site is where a job runs.
type site struct {
	tmp, shm string                // where it has directories
	machines []*proctest.Namespace // nil if they cannot be made
	dir      string                // that it saves to, if it does
	pulse    *pulse
}

// running is a job that is being run.
type running struct {
	site
	job       job
	id        string // in the environment of all its processes
	processes []*process
	ground    *proctest.Ground // what it needs besides processes
	began     time.Time
	stop      context.CancelFunc // ends what disturbs it
	others    sync.WaitGroup     // that disturb or watch it
	visits    atomic.Int64       // of unauthenticated clients
	struck    atomic.Int64       // when the failure happened, if that was seen, in microseconds
}

// execute runs a job to its end, in directories of its own at a site.
func (j job) execute(ctx context.Context, at site) (o outcome, err error) {
	if j.mode == saves {
		return j.executeSaves(ctx, at)
	}
	r, err := j.beginJob(ctx, at)
	if err != nil {
		return o, err
	}
	return r.awaitEnd(ctx), nil
}

// beginJob starts a job.
func (j job) beginJob(ctx context.Context, at site) (r *running, err error) {
	r = &running{site: at, job: j, id: rand.Text(), ground: &proctest.Ground{}, began: time.Now()}
	for _, dir := range []*string{&r.tmp, &r.shm} {
		if *dir, err = os.MkdirTemp(*dir, "job-"); err != nil {
			return nil, errors.Join(err, r.ground.Leave())
		}
		r.ground.Cleanup(func() { os.RemoveAll(*dir) })
	}
	if err := r.ground.Run(r.start); err != nil {
		r.signalAll(syscall.SIGKILL)
		return nil, errors.Join(err, r.ground.Leave())
	}
	disturbing, stop := context.WithCancel(ctx)
	r.stop = stop
	if j.visitors > 0 && j.mode != far {
		r.others.Go(func() { r.disturb(disturbing) })
	}
	switch j.failure.name {
	case killed:
		r.others.Go(func() { r.killLater(disturbing) })
	case cut:
		r.others.Go(func() { r.cutLater(disturbing) })
	case none:
	default:
		r.others.Go(func() { r.watch(disturbing) })
	}
	return r, nil
}

// awaitEnd waits for the job's end.
func (r *running) awaitEnd(ctx context.Context) (o outcome) {
	o.hung = !r.wait(ctx)
	o.took = time.Since(r.began)
	r.stop()
	r.others.Wait() // or they might cut off a machine of the next job
	r.finish(o.hung)
	for _, p := range r.processes {
		o.ends = append(o.ends, ending{p.rank, exitCode(p.cmd.ProcessState), p.output.String()})
	}
	o.stays = r.leftovers()
	r.signalAll(syscall.SIGKILL)
	o.struck, o.stall = r.struck.Load(), r.pulse.worst(r.began)
	if err := r.ground.Leave(); err != nil {
		o.stays = append(o.stays, err.Error())
	}
	o.visits = int(r.visits.Load())
	return o
}

// exitCode is the code of a process, as shells count.
func exitCode(s *os.ProcessState) int {
	if status, ok := s.Sys().(syscall.WaitStatus); ok && status.Signaled() {
		return 128 + int(status.Signal())
	}
	return s.ExitCode()
}

// start starts the processes of the job.
func (r *running) start() error {
	env := append(r.environment(), fmt.Sprintf("EURYALE_TIMEOUT=%v", r.job.timeout()))
	switch r.job.mode {
	case launched:
		return r.startProcess(-1, append(env, envRole+"="+roleLauncher))
	case goroutines:
		return r.startProcess(-1, append(env, envRole+"="+roleGoroutines))
	}
	port, err := freePort()
	if err != nil {
		return err
	}
	host, ports := "127.0.0.1", slices.Repeat([]int{port}, r.job.ranks)
	if r.job.mode == machines && r.machines != nil {
		host = r.machines[0].Addr
	}
	if r.job.mode == far {
		r.besiege(ports)
	}
	share := r.job.ranks / r.job.agents
	env = append(env, envRole+"="+roleRank, "EURYALE_JOB=soak-"+r.id,
		"EURYALE_TOKEN="+rand.Text()+rand.Text(), "MASTER_ADDR="+host,
		fmt.Sprintf("WORLD_SIZE=%d", r.job.ranks), fmt.Sprintf("LOCAL_WORLD_SIZE=%d", share))
	for rank := range r.job.ranks {
		own := []string{fmt.Sprintf("RANK=%d", rank), fmt.Sprintf("LOCAL_RANK=%d", rank%share),
			fmt.Sprintf("GROUP_RANK=%d", rank/share), fmt.Sprintf("MASTER_PORT=%d", ports[rank])}
		if err := r.startProcess(rank, slices.Concat(env, own)); err != nil {
			return err
		}
	}
	return nil
}

// environment is the environment of all processes of the job. It contains none of the soak's own
// variables that could affect them.
func (r *running) environment() []string {
	j := r.job
	env := []string{
		"PATH=" + os.Getenv("PATH"), "HOME=" + r.tmp, "TMPDIR=" + r.tmp, "EURYALE_SHM_DIR=" + r.shm,
		envRun + "=" + r.id, fmt.Sprintf("%s=%d", envSeed, j.seed), fmt.Sprintf("%s=%d", envNumber,
			j.number), envFailure + "=" + j.failure.name,
	}
	if j.topology != "" {
		env = append(env, "EURYALE_TOPOLOGY="+j.topology)
	}
	if j.backend != "" {
		env = append(env, "EURYALE_BACKEND="+j.backend)
	}
	if j.tls {
		env = append(env, "EURYALE_TLS=1")
	}
	if j.mode == saves {
		env = append(env, fmt.Sprintf("%s=%d", envPart, j.part), envDir+"="+r.dir)
	}
	if j.failure.injected() {
		env = append(env, "EURYALE_FAULT="+j.failure.String())
	}
	return env
}

func (r *running) startProcess(rank int, env []string) error {
	program, err := os.Executable()
	if err != nil {
		return err
	}
	p := &process{rank: rank, cmd: exec.Command(program), ended: make(chan struct{})}
	p.cmd.Env = env
	if r.job.mode == machines && r.machines != nil {
		if p.cmd, err = r.onMachine(p.cmd, r.job.machineOf(rank)); err != nil {
			return err
		}
	}
	p.cmd.Stdout, p.cmd.Stderr = &p.output, &p.output
	p.cmd.WaitDelay = pipeDelay
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	if err := p.cmd.Start(); err != nil {
		return err
	}
	r.processes = append(r.processes, p)
	go func() {
		p.cmd.Wait() // its error is in the process state
		close(p.ended)
	}()
	return nil
}

// wait waits for all processes that end by themselves, and reports whether they
// did in time: that is longer where they wait for cores.
func (r *running) wait(ctx context.Context) bool {
	late := time.NewTimer(r.job.limit)
	defer late.Stop()
	for _, p := range r.processes {
		if r.job.failure.name == stop && p.rank == r.job.failure.rank {
			continue
		}
		for ended := false; !ended; {
			select {
			case <-p.ended:
				ended = true
			case <-late.C:
				more := r.job.limit + 2*wakes*r.pulse.worst(r.began) - time.Since(r.began)
				if more <= 0 {
					return false
				}
				late.Reset(more)
			case <-ctx.Done():
				return true
			}
		}
	}
	return true
}

// finish ends the remaining processes of the job: a stopped one, or all if the job hangs. These
// write their stacks first.
func (r *running) finish(hung bool) {
	if hung {
		r.signalAll(syscall.SIGQUIT)
		time.Sleep(lastWords)
		r.signalAll(syscall.SIGKILL)
	}
	for _, p := range r.processes {
		select {
		case <-p.ended:
			continue
		default:
			p.cmd.Process.Kill()
		}
		<-p.ended
	}
}

// signalAll signals all processes of the job, also those that it started itself.
func (r *running) signalAll(s syscall.Signal) {
	for _, pid := range processesOf(r.id) {
		syscall.Kill(pid, s)
	}
}

// killLater kills a rank at its time, whatever it does then.
func (r *running) killLater(ctx context.Context) {
	select {
	case <-ctx.Done():
	case <-time.After(r.job.failure.after):
		for _, pid := range processesOf(r.id, fmt.Sprintf("RANK=%d", r.job.failure.rank)) {
			syscall.Kill(pid, syscall.SIGKILL)
		}
		r.struck.Store(time.Now().UnixMicro())
	}
}

// cutLater cuts the machine of a rank off at its time.
func (r *running) cutLater(ctx context.Context) {
	select {
	case <-ctx.Done():
	case <-time.After(r.job.failure.after):
		m := r.machines[r.job.machineOf(r.job.failure.rank)]
		r.ground.Cleanup(func() { m.Mend(r.ground) })
		if err := r.ground.Run(func() error { m.Cut(r.ground); return nil }); err == nil {
			r.struck.Store(time.Now().UnixMicro())
		}
	}
}

// processesOf returns the processes with an id and all other variables in their
// environment.
func processesOf(id string, also ...string) (pids []int) {
	dirs, _ := filepath.Glob("/proc/[0-9]*")
	for _, dir := range dirs {
		text, err := os.ReadFile(filepath.Join(dir, "environ"))
		if err != nil {
			continue // it is another user's, or has ended
		}
		env := "\x00" + string(text)
		all := strings.Contains(env, "\x00"+envRun+"="+id+"\x00")
		for _, v := range also {
			all = all && strings.Contains(env, "\x00"+v+"\x00")
		}
		var pid int
		if _, err := fmt.Sscanf(filepath.Base(dir), "%d", &pid); all && err == nil {
			pids = append(pids, pid)
		}
	}
	return pids
}

// onMachine makes a command one that runs on a machine, with directories there that are the job's.
func (r *running) onMachine(cmd *exec.Cmd, machine int) (*exec.Cmd, error) {
	m := r.machines[machine]
	tmp, shm := filepath.Join(r.tmp, m.Name), filepath.Join(m.Shm(), r.id)
	for _, dir := range []string{tmp, shm} {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return nil, err
		}
		r.ground.Cleanup(func() { os.RemoveAll(dir) })
	}
	there := m.Command(cmd)
	there.Env = append(there.Env, "TMPDIR="+tmp, "EURYALE_SHM_DIR=/dev/shm/"+r.id)
	return there, nil
}

// leftovers returns the processes and files that are left of the job, after a while for ended
// processes to vanish. The directory of join records stays.
func (r *running) leftovers() (found []string) {
	for end := time.Now().Add(lastWords); ; time.Sleep(10 * time.Millisecond) {
		found = nil
		for _, pid := range processesOf(r.id) {
			found = append(found, fmt.Sprintf("process %d", pid))
		}
		found = append(append(found, r.files(r.tmp)...), r.files(r.shm)...)
		for _, m := range r.machines {
			found = append(found, r.files(filepath.Join(m.Shm(), r.id))...)
		}
		if len(found) == 0 || time.Now().After(end) {
			return found
		}
	}
}

// files returns the files in a directory, if there is one, except the directories of machines and
// of join records.
func (r *running) files(dir string) (found []string) {
	known := []string{".", fmt.Sprintf("euryale-%d", os.Getuid())}
	for _, m := range r.machines {
		known = append(known, m.Name)
	}
	filepath.WalkDir(dir, func(path string, _ fs.DirEntry, err error) error {
		if name, _ := filepath.Rel(dir, path); !slices.Contains(known, name) {
			found = append(found, "file "+name)
		}
		return err
	})
	return found
}
