package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"runtime"
	"runtime/debug"
	"strings"
	"time"

	"github.com/euryale-ml/euryale"
	"github.com/euryale-ml/euryale/internal/bench"
	"github.com/euryale-ml/euryale/internal/env"
	"github.com/euryale-ml/euryale/internal/gpu"
	"github.com/euryale-ml/euryale/internal/launchers"
	"github.com/euryale-ml/euryale/internal/shm"
	"github.com/euryale-ml/euryale/internal/tuning"
	"github.com/euryale-ml/euryale/rendezvous"
)

// doctorCmd reports what this build and machine can use.
type doctorCmd struct{}

// Help is what --help says below the title.
func (doctorCmd) Help() string {
	return `Each line is one thing that this build needs or could use: ok, or no with the reason
and what to do. The doctor copies memory between each pair of GPUs, verifies it and times it. It
runs all-reduces among ranks on the host and, with several GPUs, among ranks on all of them. The
command fails only if no ranks can work together at all.

Example:

	euryale doctor`
}

const (
	// checkupTime bounds each checkup. GPUs take seconds to initialize.
	checkupTime = time.Minute
	// graceTime is for a checkup to say what has kept it: a launcher gives ranks a second to end.
	graceTime = 3 * time.Second
)

// queues is the driver's variable for how many hardware queues a context gets.
const queues = "CUDA_DEVICE_MAX_CONNECTIONS"

// selfTestCalls is how long the calls of one size take. 200 calls of 16 MiB among the processes of
// one host took 2 s by sockets (bench/results/2026-11/2026-11-27-h100x4.md).
const selfTestCalls = 50 * time.Millisecond

// Run writes the report.
func (doctorCmd) Run(ctx context.Context, s *streams) error {
	d := doctor{getenv: env.Lookup(os.Environ()), environ: os.Environ(), open: openGPUs,
		tests: selfTests, limit: checkupTime, grace: graceTime}
	// Contexts with the 32 queues that programs ask for take 0.4 s more each
	// (bench/results/2026-11/2026-11-27-doctor.md). Ranks of a self test have one call under way at
	// a time, so 8 do. In training more kernels wait for other ranks at once: on queues that share
	// one of the hardware they could wait for each other for ever.
	if os.Getenv(queues) == "" {
		if err := os.Setenv(queues, "8"); err != nil {
			return fmt.Errorf("doctor: %w", err)
		}
	}
	// These are for the ranks of a job, not for those of a self test.
	for _, name := range []env.Grammar{env.Fault, env.Topology, env.Hierarchy} {
		if err := os.Unsetenv(string(name)); err != nil {
			return fmt.Errorf("doctor: %w", err)
		}
	}
	return d.examine(ctx, s.out)
}

// doctor examines a build and a machine. Its fields are what a test replaces.
type doctor struct {
	getenv  func(string) string
	environ []string
	open    func() (*gpus, error)
	tests   func(gpus int) []selfTest
	limit   time.Duration // of each checkup
	grace   time.Duration // beyond it
}

// finding is one line of the report.
type finding struct {
	about string
	text  string // if err is nil
	err   error
}

// examine writes the report, each line as soon as it is known. Checkups follow each other, since
// even the start of ranks slows what is timed meanwhile. It returns an error if all self tests
// fail, and the cause if ctx ends.
func (d doctor) examine(ctx context.Context, w io.Writer) error {
	r := &report{w: w}
	r.add(build(), machine())
	r.add(d.environment()...)
	r.add(measurements())
	r.add(sharedMemory(env.ShmDir.Read(d.getenv)), loopback(ctx))
	g := d.gpus(ctx, r)
	r.add(d.try(ctx, "gpu copies", g.copies)...)
	r.add(d.try(ctx, "backends", backends)...)
	works := false
	for _, t := range d.tests(len(g.usable)) {
		findings := d.try(ctx, t.about, func(ctx context.Context) []finding {
			text, err := t.run(ctx)
			return []finding{{t.about, text, err}}
		})
		r.add(findings...)
		works = works || findings[0].err == nil
	}
	r.add(d.try(ctx, "gpu", g.closeGPUs)...)
	if err := context.Cause(ctx); err != nil {
		return err // what failed then says nothing about the machine
	}
	if !works && r.err == nil {
		return errors.New("doctor: no ranks can work together on this machine: see the lines " +
			"that say no")
	}
	return r.err
}

// gpus opens the GPUs and reports what they are.
func (d doctor) gpus(ctx context.Context, r *report) *gpus {
	opened := make(chan *gpus, 1)
	r.add(d.try(ctx, "gpu", func(context.Context) []finding {
		g, err := d.open()
		if err != nil {
			return []finding{{about: "gpu", err: err}}
		}
		findings := g.describe()
		opened <- g
		return findings
	})...)
	select {
	case g := <-opened:
		return g
	default: // there are none, or they hang
		return &gpus{close: func() error { return nil }}
	}
}

// try runs a checkup and returns its lines. One that exceeds the time limit gets the grace time to
// report why; after that it is abandoned, and its line says that it timed out.
func (d doctor) try(
	ctx context.Context, about string, checkup func(context.Context) []finding,
) []finding {
	ctx, cancel := context.WithTimeoutCause(ctx, d.limit,
		fmt.Errorf("it took longer than %v", d.limit))
	defer cancel()
	found := make(chan []finding, 1)
	go func() { found <- checkup(ctx) }()
	select {
	case findings := <-found:
		return findings
	case <-ctx.Done():
	}
	select {
	case findings := <-found:
		return findings
	case <-time.After(d.grace):
		return []finding{{about: about, err: context.Cause(ctx)}}
	}
}

// report is where findings are written.
type report struct {
	w   io.Writer
	err error // of writing
}

func (r *report) add(findings ...finding) {
	for _, f := range findings {
		if r.err == nil {
			r.err = f.write(r.w)
		}
	}
}

// write writes the line. Further lines of a reason are aligned below the first.
func (f finding) write(w io.Writer) error {
	verdict, text := "ok", f.text
	if f.err != nil {
		verdict, text = "no", f.err.Error()
	}
	text = strings.ReplaceAll(rendezvous.Printable(text), "\n", "\n"+strings.Repeat(" ", 20))
	_, err := fmt.Fprintf(w, "%-15s %-3s %s\n", f.about, verdict, text)
	return err
}

// build describes this program.
func build() finding {
	text := fmt.Sprintf("%s, %s, %s/%s", bench.Version(), runtime.Version(), runtime.GOOS,
		runtime.GOARCH)
	if info, ok := debug.ReadBuildInfo(); ok {
		for _, s := range info.Settings {
			if s.Key == "-tags" || s.Key == "CGO_ENABLED" || s.Key == "-race" {
				text += fmt.Sprintf(", %s=%s", s.Key, s.Value)
			}
		}
	}
	return finding{about: "build", text: text}
}

// machine describes the machine and the cores that this process may use.
func machine() finding {
	text := bench.Machine()
	if all := bench.Cores(); all > runtime.NumCPU() {
		text += fmt.Sprintf("; this process may use %d of them: its affinity (taskset, mpirun, a "+
			"container) says so", runtime.NumCPU())
	}
	if procs := runtime.GOMAXPROCS(0); procs < runtime.NumCPU() {
		text += fmt.Sprintf("; Go uses %d at a time (GOMAXPROCS, or a container's quota): more "+
			"ranks than that take turns", procs)
	}
	return finding{about: "machine", text: text}
}

// environment reports which job this process would join, and the variables that affect it.
func (d doctor) environment() []finding {
	job, err := rendezvous.ReadEnv(d.getenv)
	f := finding{about: "environment", err: err}
	switch {
	case err != nil:
	case job.Size == 1:
		f.text = fmt.Sprintf("%s: a program started here is a job of one rank", job.Launcher)
	default:
		f.text = fmt.Sprintf("%s: rank %d of %d, job %s", job.Launcher, job.Rank, job.Size, job.Job)
	}
	if m, err := launchers.Machine(d.getenv); err == nil && m.Size > 1 {
		f.text += fmt.Sprintf("; euryale run -n N starts N ranks for each of %d, and here for "+
			"number %d", m.Size, m.Rank)
	}
	return append(append([]finding{f}, d.variables()...), d.unread()...)
}

// variables reports those of Euryale's variables that are set, and whether they can be read.
func (d doctor) variables() (findings []finding) {
	for _, v := range env.All() {
		switch text := d.getenv(v.Name()); {
		case v.Foreign || text == "":
		case v.Secret:
			findings = append(findings, finding{about: v.Name(), text: "is set"})
		default:
			findings = append(findings, finding{about: v.Name(), text: text,
				err: v.Check(d.getenv)})
		}
	}
	return findings
}

// unread reports the variables that may be misspelt.
func (d doctor) unread() (findings []finding) {
	for _, name := range env.Unread(d.environ) {
		meant := "There are " + strings.Join(env.Names(), ", ")
		if one := nearest(name, env.Names()); one != "" {
			meant = fmt.Sprintf("Did you mean %s?", one)
		}
		err := errors.New("nothing reads this variable: is it misspelt? " + meant)
		findings = append(findings, finding{about: name, err: err})
	}
	return findings
}

// measurements reports whether this machine was measured, for the choice of algorithms.
func measurements() finding {
	f := finding{about: "measurements"}
	if tuning.Off() {
		f.text = fmt.Sprintf("%s=off: algorithms are chosen by built-in timings", env.Tuning)
		return f
	}
	path, err := tuning.Path()
	if err == nil {
		_, err = os.Stat(path)
	}
	if err != nil {
		f.text = "no tuning file: algorithms are chosen by built-in timings, or by those that " +
			"ranks measure as they connect, until euryale bench --tune measures this machine"
		return f
	}
	f.text = path
	_, f.err = gpu.Measured()
	return f
}

// littleMemory is too little for the buckets of a usual model.
const littleMemory = 256 << 20

// sharedMemory reports the size of the shared memory for ranks that are processes.
func sharedMemory(dir string) finding {
	if dir == "" {
		dir = "/dev/shm"
	}
	f := finding{about: "shared memory"}
	room, err := shm.RoomOf(dir)
	if err != nil {
		f.err = err
		return f
	}
	f.text = fmt.Sprintf("%s has %s of %s free", dir, megabytes(room.Free), megabytes(room.All))
	if !room.IsTmpfs {
		f.text += "; it is not a tmpfs, so it may be written to a disk: name a tmpfs in " +
			"EURYALE_SHM_DIR"
	}
	if room.Free < littleMemory {
		f.text += "; that is little: each rank needs about its parameters' size. Enlarge it " +
			"(docker run --shm-size, mount -o remount,size=)"
	}
	return f
}

func megabytes(n uint64) string { return fmt.Sprintf("%d MiB", n>>20) }

// loopback connects this process to itself.
func loopback(ctx context.Context) finding {
	f := finding{about: "loopback"}
	ctx, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	l, err := (&net.ListenConfig{}).Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		f.err = fmt.Errorf("cannot listen on 127.0.0.1, where processes find each other: %w", err)
		return f
	}
	defer l.Close()
	conn, err := (&net.Dialer{}).DialContext(ctx, "tcp", l.Addr().String())
	if err != nil {
		f.err = fmt.Errorf("cannot connect to 127.0.0.1, where processes find each other: %w: "+
			"check the firewall", err)
		return f
	}
	f.text = "127.0.0.1 takes connections"
	f.err = conn.Close()
	return f
}

// backends asks every backend of this build.
func backends(context.Context) []finding {
	var findings []finding
	for _, b := range euryale.Backends() {
		f := finding{"backend " + b.Name(), "available", b.Available()}
		if text, err := describe(b); f.err == nil && (text != "" || err != nil) {
			f.text, f.err = "available: "+text, err
		}
		if l, ok := b.(interface{ Lacks() []string }); ok && f.err == nil {
			f.text = strings.Join(append([]string{f.text}, l.Lacks()...), "; ")
		}
		findings = append(findings, f)
	}
	return findings
}

// selfTest tests that ranks work together.
type selfTest struct {
	about string
	run   func(context.Context) (string, error)
}

// selfTests returns the self tests of a machine: two ranks on the host, and with several
// GPUs one rank for each, as goroutines and as processes.
func selfTests(gpus int) []selfTest {
	var tests []selfTest
	for _, b := range euryale.Backends() {
		c := benchCmd{
			N: 2, Backend: b.Name(), Collective: "allreduce", DType: "f32", Op: "sum", Min: 4 << 10,
			Max: 4 << 10, Factor: 2, Time: selfTestCalls, Algorithm: "auto", JSON: true,
		}
		add := func(how string, start starter) {
			tests = append(tests, selfTest{b.Name() + how, c.selfTest(start)})
		}
		if b.Name() == "mpi" {
			continue // its ranks need a launcher of its own
		}
		if b.Name() == "tcp" && !shm.BetweenProcesses {
			add(" processes", (*benchCmd).asProcesses)
		}
		if b.Name() != "host" {
			if gpus < 2 || b.Available() != nil {
				continue
			}
			c.N, c.Max, c.Factor = gpus, 16<<20, 4<<10
		}
		add(" goroutines", (*benchCmd).asGoroutines)
		if shm.BetweenProcesses {
			add(" processes", (*benchCmd).asProcesses)
		}
	}
	return tests
}

// starter starts the ranks of a benchmark.
type starter func(*benchCmd, context.Context, *streams) error

// selfTest returns a test that ranks, goroutines or processes, can all-reduce.
func (b benchCmd) selfTest(start starter) func(context.Context) (string, error) {
	return func(ctx context.Context) (string, error) {
		var out, notes bytes.Buffer
		if err := start(&b, ctx, &streams{out: &out, err: &notes}); err != nil {
			return "", fmt.Errorf("%w%s", err, complaints(notes.String()))
		}
		return b.summary(&out)
	}
}

// complaints returns the errors that processes have printed, one on each line.
func complaints(notes string) string {
	var b strings.Builder
	for line := range strings.Lines(notes) {
		if !strings.HasPrefix(line, "#") {
			b.WriteString("\n" + strings.TrimSpace(line))
		}
	}
	return b.String()
}

// summary summarizes the JSON lines of a benchmark.
func (b benchCmd) summary(lines io.Reader) (string, error) {
	var times []string
	for in := json.NewDecoder(lines); ; {
		var r bench.Result
		if err := in.Decode(&r); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			return "", fmt.Errorf("read the result of the self test: %w", err)
		}
		call := r.P50Micros
		if r.StreamMicros > 0 {
			call = r.StreamMicros
		}
		text := fmt.Sprintf("%v in %.1f us", bench.Size(r.Bytes), call)
		if r.Used != "" {
			text += " by " + r.Used
		}
		times = append(times, text)
	}
	if len(times) == 0 {
		return "", errors.New("the self test gave no result")
	}
	return fmt.Sprintf("%d ranks all-reduce right on backend %s, %s", b.N, b.Backend,
		strings.Join(times, ", ")), nil
}
