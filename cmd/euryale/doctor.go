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
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/euryale-ml/euryale"
	"github.com/euryale-ml/euryale/bench"
	"github.com/euryale-ml/euryale/rendezvous"
)

// doctorCmd says what this build and machine can use.
type doctorCmd struct{}

// Help is what --help says below the title.
func (doctorCmd) Help() string {
	return `Each line is one thing this build needs or could use: ok, or no with the reason and what to do. The command fails only if no ranks can work together at all.`
}

// selfTestTime bounds each self test.
const selfTestTime = 20 * time.Second

// Run writes the report.
func (doctorCmd) Run(ctx context.Context, s *streams) error {
	d := doctor{getenv: os.Getenv, environ: os.Environ(), goroutines: selfTest((*benchCmd).asGoroutines), processes: selfTest((*benchCmd).asProcesses)}
	return d.examine(ctx, s.out)
}

// doctor examines a build and a machine. Its fields are what a test replaces.
type doctor struct {
	getenv                func(string) string
	environ               []string
	goroutines, processes func(context.Context) (string, error) // self tests, with what they have to tell
}

// finding is one line of the report.
type finding struct {
	about string
	text  string // if err is nil
	err   error
}

// examine writes the report. It fails if both self tests do.
func (d doctor) examine(ctx context.Context, w io.Writer) error {
	findings := []finding{build(), machine()}
	findings = append(findings, d.environment()...)
	findings = append(findings, sharedMemory(d.getenv("EURYALE_SHM_DIR")), loopback(ctx))
	findings = append(findings, backends()...)
	findings = append(findings, absent()...)
	inProcess := tell(ctx, "goroutines", d.goroutines)
	processes := tell(ctx, "processes", d.processes)
	for _, f := range append(findings, inProcess, processes) {
		if err := f.write(w); err != nil {
			return err
		}
	}
	if inProcess.err != nil && processes.err != nil {
		return errors.New("doctor: no ranks can work together on this machine: see the lines that say no")
	}
	return nil
}

// write writes the line: reasons often hold several sentences, so each further
// line of one is aligned below the first.
func (f finding) write(w io.Writer) error {
	verdict, text := "ok", f.text
	if f.err != nil {
		verdict, text = "no", f.err.Error()
	}
	text = strings.ReplaceAll(text, "\n", "\n"+strings.Repeat(" ", 20))
	_, err := fmt.Fprintf(w, "%-15s %-3s %s\n", f.about, verdict, text)
	return err
}

func tell(ctx context.Context, about string, test func(context.Context) (string, error)) finding {
	text, err := test(ctx)
	return finding{about, text, err}
}

// build says what this program is.
func build() finding {
	text := fmt.Sprintf("%s, %s, %s/%s", bench.Version(), runtime.Version(), runtime.GOOS, runtime.GOARCH)
	if info, ok := debug.ReadBuildInfo(); ok {
		for _, s := range info.Settings {
			if s.Key == "-tags" || s.Key == "CGO_ENABLED" || s.Key == "-race" {
				text += fmt.Sprintf(", %s=%s", s.Key, s.Value)
			}
		}
	}
	return finding{about: "build", text: text}
}

// machine counts the cores that are there for this process.
func machine() finding {
	text := bench.Machine()
	if all := bench.Cores(); all > runtime.NumCPU() {
		text += fmt.Sprintf("; this process may use %d of them: its affinity (taskset, mpirun, a container) says so", runtime.NumCPU())
	}
	if procs := runtime.GOMAXPROCS(0); procs < runtime.NumCPU() {
		text += fmt.Sprintf("; Go uses %d at a time (GOMAXPROCS, or a container's quota): more ranks than that take turns", procs)
	}
	return finding{about: "machine", text: text}
}

// known are the variables that Euryale reads.
var known = []string{
	"EURYALE_BACKEND", "EURYALE_CHECK", "EURYALE_JOB", "EURYALE_PORT", "EURYALE_SHM_DIR", "EURYALE_TIMEOUT", "EURYALE_TOKEN",
	"EURYALE_TRACE",
}

// environment says which job this process would join, and which variables
// matter to it.
func (d doctor) environment() []finding {
	env, err := rendezvous.ReadEnv(d.getenv)
	f := finding{about: "environment", err: err}
	switch {
	case err != nil:
	case env.Size == 1:
		f.text = fmt.Sprintf("%s: a program started here is a job of one rank", env.Launcher)
	default:
		f.text = fmt.Sprintf("%s: rank %d of %d, job %s", env.Launcher, env.Rank, env.Size, env.Job)
	}
	findings := []finding{f}
	for _, entry := range d.environ {
		name, value, _ := strings.Cut(entry, "=")
		switch {
		case !strings.HasPrefix(name, "EURYALE_"):
		case !slices.Contains(known, name):
			findings = append(findings, finding{about: name, err: errors.New("nothing reads this variable: is it misspelt? There are " + strings.Join(known, ", "))})
		case name == "EURYALE_TOKEN":
			findings = append(findings, finding{about: name, text: "is set"}) // a secret
		default:
			findings = append(findings, finding{about: name, text: value})
		}
	}
	return findings
}

// littleMemory is where buckets of a usual model no longer fit.
const littleMemory = 256 << 20

// sharedMemory says how much there is for ranks that are processes.
func sharedMemory(dir string) finding {
	if dir == "" {
		dir = "/dev/shm"
	}
	f := finding{about: "shared memory"}
	var fs unix.Statfs_t
	if err := unix.Statfs(dir, &fs); err != nil {
		f.err = fmt.Errorf("%s: %w: name a tmpfs in EURYALE_SHM_DIR", dir, err)
		return f
	}
	free := fs.Bavail * uint64(fs.Bsize)
	f.text = fmt.Sprintf("%s has %s of %s free", dir, megabytes(free), megabytes(fs.Blocks*uint64(fs.Bsize)))
	if fs.Type != unix.TMPFS_MAGIC {
		f.text += "; it is no tmpfs, so it may be written to a disk: name one in EURYALE_SHM_DIR"
	}
	if free < littleMemory {
		f.text += "; that is little: each rank needs about its parameters' size. Enlarge it (docker run --shm-size, mount -o remount,size=)"
	}
	return f
}

func megabytes(n uint64) string { return fmt.Sprintf("%d MiB", n>>20) }

// loopback tries a connection of this process with itself.
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
		f.err = fmt.Errorf("cannot connect to 127.0.0.1, where processes find each other: %w: look at the firewall", err)
		return f
	}
	f.text = "127.0.0.1 takes connections"
	f.err = conn.Close()
	return f
}

// backends asks every backend of this build.
func backends() []finding {
	var findings []finding
	for _, b := range euryale.Backends() {
		findings = append(findings, finding{"backend " + b.Name(), "available", b.Available()})
	}
	return findings
}

// absent names the backends that this build does not have.
func absent() []finding {
	gpu := "not in this build: GPUs need a build with tag gpu, which this version does not have yet"
	if driver, err := os.ReadFile("/proc/driver/nvidia/version"); err == nil {
		first, _, _ := strings.Cut(string(driver), "\n")
		gpu += " (this machine has one: " + strings.TrimSpace(first) + ")"
	}
	return []finding{
		{about: "backend nccl", err: errors.New(gpu)},
		{about: "backend mpi", err: errors.New("not in this build: MPI needs a build with tag mpi, which this version does not have yet; programs started by mpirun work all the same")},
	}
}

// selfTest returns a test that two ranks, goroutines or processes, really
// all-reduce.
func selfTest(start func(*benchCmd, context.Context, *streams) error) func(context.Context) (string, error) {
	return func(ctx context.Context) (string, error) {
		ctx, cancel := context.WithTimeoutCause(ctx, selfTestTime, fmt.Errorf("the self test took longer than %v", selfTestTime))
		defer cancel()
		b := benchCmd{
			N: 2, Collective: "allreduce", DType: "f32", Op: "sum", Min: 4 << 10, Max: 4 << 10, Factor: 2, Iters: 200,
			Algorithm: "auto", JSON: true,
		}
		var out, notes bytes.Buffer
		if err := start(&b, ctx, &streams{out: &out, err: &notes}); err != nil {
			return "", err
		}
		var r bench.Result
		if err := json.Unmarshal(out.Bytes(), &r); err != nil {
			return "", fmt.Errorf("read the result of the self test: %w", err)
		}
		return fmt.Sprintf("2 ranks all-reduce right on backend %s, 4K in %.1f us", r.Backend, r.P50Micros), nil
	}
}
