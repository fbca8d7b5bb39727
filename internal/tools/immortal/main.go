//go:build linux

// Command immortal kills random processes of an elastic job at random moments, for as long as it is
// told to, and compares how it ends with a job in which nobody dies:
//
//	go run ./internal/tools/immortal -minutes 5 -seed 1
//	kills=240 stops=61 hashes=1 p50_ms=46 p99_ms=131 worst_ms=152
//
// With -runs it does so again and again, by one seed after the other, and sums up. EURYALE_BACKEND
// chooses how ranks communicate.
//
// The times are from a kill to the end of the step that follows it; those of stops, which take
// seconds to be noticed, are not among them. Processes are killed and stopped in steps and in
// recoveries alike. A rank of the last step of as many ranks as the job can have is left beside the
// victim: otherwise no process with the parameters would be left.
package main

import (
	"bufio"
	"cmp"
	"context"
	"errors"
	"flag"
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

// hangTime is how long a job has no step that hangs.
const hangTime = time.Minute

// lag is how long after a step its line is heard at most.
const lag = 200 * time.Millisecond

// config is the command line.
type config struct {
	minutes              float64
	seed                 uint64
	runs                 int
	programs             string // a folder
	ranks, spares, stops int
	least                int
	command, program     string
	args                 string // of the program
}

func main() {
	c := config{}
	flag.Float64Var(&c.minutes, "minutes", 5, "how long to kill")
	flag.Uint64Var(&c.seed, "seed", 1, "what the kills follow from")
	flag.IntVar(&c.runs, "runs", 1, "how many jobs, one after the other")
	flag.StringVar(&c.programs, "programs", "", "a folder with euryale and elastic, the example: "+
		"they are built if there is none")
	flag.IntVar(&c.ranks, "n", 4, "ranks of the job")
	flag.IntVar(&c.spares, "spares", 1, "spares of the job")
	flag.IntVar(&c.least, "min-ranks", 1, "ranks with which the job goes on")
	flag.IntVar(&c.stops, "stops", 5, "one of so many victims is stopped, 0 for none")
	flag.StringVar(&c.args, "args", "", "more flags of the program, which the job without kills "+
		"does not get")
	flag.Parse()
	verdict, err := immortal(context.Background(), c)
	fmt.Println(verdict)
	if err != nil {
		fmt.Fprintln(os.Stderr, "immortal:", err)
		os.Exit(1)
	}
}

// immortal builds the programs and runs the jobs, those with kills and the one without.
func immortal(ctx context.Context, c config) (all verdict, err error) {
	if c.programs == "" {
		if c.programs, err = os.MkdirTemp("", "immortal-"); err != nil {
			return all, err
		}
		defer os.RemoveAll(c.programs)
		build := exec.CommandContext(ctx, "go", "build", "-o", c.programs, "./cmd/euryale",
			"./examples/elastic")
		if text, err := build.CombinedOutput(); err != nil {
			return all, fmt.Errorf("%w\n%s", err, text)
		}
	}
	c.command = filepath.Join(c.programs, "euryale")
	c.program = filepath.Join(c.programs, "elastic")
	seconds := int(c.minutes * 60)
	steps, ends := strconv.Itoa(max(100, seconds*stepsPerSecond)), map[string]bool{}
	for run := range c.runs {
		j := &job{config: c, random: rand.New(rand.NewPCG(c.seed+uint64(run), 39)), ends: ends}
		err := j.run(ctx, steps, time.Duration(seconds)*time.Second)
		if j.hashes = len(ends); c.runs > 1 {
			fmt.Printf("seed=%d %v\n", c.seed+uint64(run), j.verdict)
		}
		if all.add(j.verdict); err != nil {
			return all, fmt.Errorf("%w\n%s", err, strings.Join(j.last, "\n"))
		}
	}
	alone := exec.CommandContext(ctx, c.command, "run", "--elastic", "-n", "1", c.program, "-steps",
		steps)
	text, err := alone.CombinedOutput()
	if err != nil {
		return all, fmt.Errorf("the job without kills: %w\n%s", err, text)
	}
	(&job{ends: ends}).hear(string(text))
	if all.hashes = len(ends); all.hashes != 1 {
		err = errors.New("the jobs did not end as one without kills")
	}
	return all, err
}

const (
	// stepPause makes a step take about as long as one of a small model, and stepsPerSecond
	// more of them than there is time for, so that the job outlives the kills.
	stepsPerSecond = 60
	stepPause      = "20ms"
)

// verdict is the line at the end.
type verdict struct {
	kills, stopped, hashes int
	times                  []time.Duration
}

// add adds what was found in a job.
func (v *verdict) add(of verdict) {
	v.kills, v.stopped, v.hashes = v.kills+of.kills, v.stopped+of.stopped, of.hashes
	v.times = append(v.times, of.times...)
}

// String is the line.
func (v verdict) String() string {
	slices.Sort(v.times)
	at := func(part int) int64 {
		if len(v.times) == 0 {
			return 0
		}
		return v.times[(len(v.times)-1)*part/100].Milliseconds()
	}
	return fmt.Sprintf("kills=%d stops=%d hashes=%d p50_ms=%d p99_ms=%d worst_ms=%d",
		v.kills, v.stopped, v.hashes, at(50), at(99), at(100))
}

// job is the job whose processes are killed.
type job struct {
	config
	random *rand.Rand
	cmd    *exec.Cmd

	mu      sync.Mutex
	stepped time.Time // the last line of a step
	killed  time.Time // the last kill that no step has followed yet
	// The last line of a step of all ranks, and the last one before it that another such line has
	// followed: who was there has the parameters, or is a spare.
	full, whole time.Time
	ends        map[string]bool
	last        []string // lines of its output
	verdict
}

// run runs the job, and kills its processes for a while.
func (j *job) run(ctx context.Context, steps string, d time.Duration) error {
	j.cmd = exec.CommandContext(ctx, j.command, "run", "--elastic", "-n", strconv.Itoa(j.ranks),
		"--spares", strconv.Itoa(j.spares), "--min-ranks", strconv.Itoa(j.least), j.program,
		"-steps", steps, "-pause", stepPause, "-every", "1")
	j.cmd.Args = append(j.cmd.Args, strings.Fields(j.args)...)
	reader, writer := io.Pipe()
	j.cmd.Stdout, j.cmd.Stderr = writer, writer
	if err := j.cmd.Start(); err != nil {
		return err
	}
	j.stepped = time.Now()
	var reading sync.WaitGroup
	reading.Go(func() {
		for lines := bufio.NewScanner(reader); lines.Scan(); {
			j.hear(lines.Text())
		}
	})
	ended := make(chan error, 1)
	go func() { ended <- j.cmd.Wait() }()
	for end := time.Now().Add(d); time.Now().Before(end); {
		select {
		case err := <-ended:
			return cmp.Or(err, errors.New("the job has ended before the last kill"))
		case <-time.After(time.Duration(j.random.ExpFloat64() * float64(time.Second))):
			j.strike()
		}
	}
	err := j.end(ended)
	writer.Close()
	reading.Wait()
	return err
}

// end waits for the end of the job, as long as there are steps.
func (j *job) end(ended <-chan error) error {
	for {
		select {
		case err := <-ended:
			return err
		case <-time.After(time.Second):
		}
		j.mu.Lock()
		hangs := time.Since(j.stepped) > hangTime
		j.mu.Unlock()
		if hangs {
			j.cmd.Process.Signal(syscall.SIGQUIT)
			return errors.Join(errors.New("the job hangs"), <-ended)
		}
	}
}

// What the program prints of a step, and at its end.
var (
	stepText = regexp.MustCompile(`step \d+: loss.* on (\d+) ranks`)
	endText  = regexp.MustCompile(`params=[0-9a-f]+`)
)

// hear takes a line of the job.
func (j *job) hear(line string) {
	j.mu.Lock()
	defer j.mu.Unlock()
	if step := stepText.FindStringSubmatch(line); step != nil {
		j.stepped = time.Now()
		if step[1] != strconv.Itoa(j.ranks) {
			j.full = time.Time{}
		} else {
			if !j.full.IsZero() {
				j.whole = j.full
			}
			j.full = time.Now().Add(-lag)
		}
		if !j.killed.IsZero() {
			j.times = append(j.times, time.Since(j.killed))
			j.killed = time.Time{}
		}
		return
	}
	if strings.Contains(line, "was repeated") {
		j.full = time.Time{} // newcomers may have been let in, and not have the parameters yet
	}
	for _, end := range endText.FindAllString(line, -1) {
		j.ends[end] = true
	}
	const kept = 40
	if j.last = append(j.last, line); len(j.last) > kept {
		j.last = j.last[1:]
	}
}

// strike kills or stops a random process, if one that is settled remains.
func (j *job) strike() {
	processes := children(j.cmd.Process.Pid)
	if len(processes) == 0 {
		return
	}
	victim := processes[j.random.IntN(len(processes))]
	j.mu.Lock()
	defer j.mu.Unlock()
	remain := 0
	for _, p := range processes {
		if p.pid != victim.pid && p.age > time.Since(j.whole) && !p.stopped {
			remain++
		}
	}
	if remain <= j.spares { // they may all be spares
		return
	}
	if j.stops > 0 && j.random.IntN(j.stops) == 0 {
		if syscall.Kill(victim.pid, syscall.SIGSTOP) == nil {
			j.stopped++
		}
		j.killed = time.Time{} // the next step takes longer
		return
	}
	if syscall.Kill(victim.pid, syscall.SIGKILL) == nil {
		j.kills++
		if !slices.ContainsFunc(processes, func(p process) bool { return p.stopped }) {
			j.killed = time.Now()
		}
	}
}

// process is a child of the launcher.
type process struct {
	pid     int
	age     time.Duration
	stopped bool
}

// children returns the processes of a job.
func children(parent int) (all []process) {
	files, _ := filepath.Glob("/proc/[0-9]*/stat")
	for _, file := range files {
		text, err := os.ReadFile(file)
		info, failed := os.Stat(filepath.Dir(file))
		if err != nil || failed != nil {
			continue // it has ended
		}
		_, rest, _ := strings.Cut(string(text), ") ")
		fields := strings.Fields(rest)
		if len(fields) < 2 || fields[1] != strconv.Itoa(parent) || fields[0] == "Z" {
			continue
		}
		pid, _ := strconv.Atoi(filepath.Base(filepath.Dir(file)))
		all = append(all, process{pid, time.Since(info.ModTime()), fields[0] == "T"})
	}
	return all
}
