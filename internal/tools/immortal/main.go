//go:build linux

// Command immortal kills random processes of elastic jobs at random moments, one job after the
// other, and compares each step with that of a job in which nobody dies:
//
//	go run ./internal/tools/immortal -minutes 5 -seed 1
//	kills=240 stops=61 replacements=297 jobs=3 hashes=1 p50_ms=46 p99_ms=131 worst_ms=152
//
// With -machines, ranks are on so many network namespaces, which takes root, and with -leaves hosts
// leave the hostfile and return. EURYALE_BACKEND chooses how ranks communicate.
//
// With -program, such as an example, the jobs run that, and the hash at its end is compared alone:
//
//	go run ./internal/tools/immortal -program ./examples/digits -args '-elastic -epochs 2000'
//
// With -shards, ranks have parts of the model, each with few copies: only where all ranks have done
// a step is one of them struck, and replacements at any time. Of tensor ranks give a multiple for
// -n, and with -min-ranks how many the job without kills has.
//
// The times are from a kill to the end of the step that follows it; those of stops, which take
// seconds to be noticed, are not among them. Processes are killed and stopped as they start, in
// steps and in recoveries alike. One that has done a step is left beside the victim: otherwise
// nobody with the parameters would be left. With -cuts, links between machines are cut, and the
// times from a cut to the next step follow, of those that have held up a step, and then of those
// among them for which nothing else was to be noticed meanwhile, no kill and no stop.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/euryale-ml/euryale/internal/testing/proctest"
)

// config is the command line.
type config struct {
	minutes               float64
	enough                int // kills
	seed                  uint64
	model                 string
	steps                 int
	mean                  time.Duration
	ranks, standby, stops int
	least, machines       int
	enoughJobs            int
	share                 int // one of so many strikes cuts a link
	leaves                int // in one of so many a host leaves
	trainer               string
	shards                bool
	timeout               time.Duration
	wire                  proctest.Wire
	args                  string // of the program
	command, program      string
	logs                  string // a folder
}

// stepPause makes a step take about as long as one of a small model.
const stepPause = "20ms"

func main() {
	if len(os.Args) > 1 && os.Args[1] == roleTrain {
		if err := train(context.Background(), os.Args[2:]); err != nil {
			fmt.Fprintln(os.Stderr, "immortal:", err)
			os.Exit(1)
		}
		return
	}
	c := config{}
	flag.Float64Var(&c.minutes, "minutes", 5, "how long to begin jobs")
	flag.IntVar(&c.enough, "kills", 0, "after how many kills to begin none, 0 for any number")
	flag.Uint64Var(&c.seed, "seed", 1, "what the kills follow from: that of the first job")
	flag.StringVar(&c.model, "model", "digits", "what jobs train: digits, convnet or gpt")
	flag.IntVar(&c.steps, "steps", 1500, "steps of a job")
	flag.DurationVar(&c.mean, "mean", 400*time.Millisecond, "mean time between kills")
	flag.IntVar(&c.ranks, "n", 4, "ranks of a job")
	flag.IntVar(&c.standby, "standby", 1, "processes of a job on standby")
	flag.IntVar(&c.least, "min-ranks", 1, "ranks with which a job goes on, and which the job "+
		"without kills has")
	flag.IntVar(&c.stops, "stops", 5, "one of so many victims is stopped, 0 for none")
	flag.IntVar(&c.machines, "machines", 0, "network namespaces to run on, 0 for this machine")
	flag.IntVar(&c.enoughJobs, "jobs", 0, "after how many jobs to begin none, 0 for any number")
	flag.IntVar(&c.share, "cuts", 0, "with machines: one of so many strikes cuts a link between "+
		"two of them, 0 for none")
	flag.IntVar(&c.leaves, "leaves", 0, "with machines: in one of so many strikes a host leaves, "+
		"to return, 0 for none")
	flag.StringVar(&c.trainer, "program", "", "the folder of a program that jobs run in place of "+
		"a model, without standbys: -args has its flags")
	flag.BoolVar(&c.shards, "shards", false, "ranks have parts of the model or of its state: one "+
		"that has done a step is struck only if all have")
	flag.DurationVar(&c.timeout, "timeout", time.Minute, "EURYALE_TIMEOUT of the jobs")
	flag.DurationVar(&c.wire.Delay, "delay", 0, "of what machines send, each way")
	flag.Float64Var(&c.wire.Loss, "loss", 0, "the part that is lost of what machines send")
	flag.StringVar(&c.args, "args", "", "more flags of the program, which the job without kills "+
		"does not get")
	flag.StringVar(&c.command, "command", "", "the command euryale: it is built if there is none")
	flag.StringVar(&c.logs, "logs", "", "a folder for the logs of all jobs: without, that of one "+
		"that fails is kept")
	flag.Parse()
	verdict, err := immortal(context.Background(), c)
	fmt.Println(verdict)
	if err != nil {
		fmt.Fprintln(os.Stderr, "immortal:", err)
		os.Exit(1)
	}
}

// immortal runs the jobs, that without kills first.
func immortal(ctx context.Context, c config) (all verdict, err error) {
	ground := &proctest.Ground{}
	defer func() { err = errors.Join(err, ground.Leave()) }()
	if c.program, err = os.Executable(); err != nil {
		return all, err
	}
	at := site{}
	build := func(folder, name string) (string, error) {
		path := filepath.Join(ground.TempDir(), name)
		text, err := exec.CommandContext(ctx, "go", "build", "-o", path, folder).CombinedOutput()
		if err != nil {
			err = fmt.Errorf("%w\n%s", err, text)
		}
		return path, err
	}
	err = ground.Run(func() (err error) {
		if c.machines > 0 {
			at = newSite(ground, c)
		}
		if c.command == "" {
			c.command, err = build("./cmd/euryale", "euryale")
		}
		if c.trainer != "" && err == nil { // no other process has that name
			c.program, err = build(c.trainer, fmt.Sprint("immortal-", os.Getpid()))
		}
		return err
	})
	if err != nil {
		return all, err
	}
	if c.trainer != "" {
		c.standby = 0 // which have no parameters, and do not say so
	}
	want, err := alone(ctx, c)
	for end := time.Now().Add(time.Duration(c.minutes * float64(time.Minute))); err == nil &&
		time.Now().Before(end) && (c.enough == 0 || all.kills < c.enough) &&
		(c.enoughJobs == 0 || all.jobs < c.enoughJobs); {
		seed := c.seed + uint64(all.jobs)
		j := &job{config: c, site: at, random: rand.New(rand.NewPCG(seed, 39)), want: want,
			processes: map[int]*process{}, unfit: map[string][]int{}, ends: map[string]bool{}}
		if err = j.run(seed); err != nil {
			err = fmt.Errorf("seed %d: %w", seed, err)
		}
		j.jobs = 1
		all.add(j.verdict)
		fmt.Printf("seed=%d %v\n", seed, j.verdict)
	}
	return all, err
}

// trains is the command line of what a process trains.
func (c config) trains() []string {
	if c.trainer != "" {
		return append([]string{c.program}, strings.Fields(c.args)...)
	}
	return []string{c.program, roleTrain, "-steps", strconv.Itoa(c.steps), "-model", c.model}
}

// alone returns the parameters after each step of a job without kills, or of a program those at its
// end.
func alone(ctx context.Context, c config) ([]string, error) {
	text, err := exec.CommandContext(ctx, c.command, append([]string{"run", "--elastic", "-n",
		strconv.Itoa(c.least)}, c.trains()...)...).CombinedOutput()
	if err != nil {
		return nil, fmt.Errorf("the job without kills: %w\n%s", err, text)
	}
	if c.trainer != "" {
		end := endText.FindStringSubmatch(string(text))
		if end == nil {
			return nil, fmt.Errorf("the job without kills says no params= at its end:\n%s", text)
		}
		return end[1:], nil
	}
	want := make([]string, c.steps+1)
	for _, step := range stepText.FindAllStringSubmatch(string(text), -1) {
		number, _ := strconv.Atoi(step[1]) // digits
		want[number] = step[5]
	}
	if slices.Contains(want[1:], "") {
		return nil, fmt.Errorf("the job without kills does not tell of all steps:\n%s", text)
	}
	return want, nil
}

// verdict is the line at the end.
type verdict struct {
	kills, stopped, replacements, jobs, hashes, cuts int
	left                                             int // hosts
	times, cutTimes                                  []time.Duration
	aloneTimes                                       []time.Duration // those without other faults
}

// add adds what was found in a job.
func (v *verdict) add(of verdict) {
	v.kills, v.stopped = v.kills+of.kills, v.stopped+of.stopped
	v.replacements, v.jobs = v.replacements+of.replacements, v.jobs+of.jobs
	v.hashes = max(v.hashes, of.hashes)
	v.cuts, v.left = v.cuts+of.cuts, v.left+of.left
	v.times, v.cutTimes = append(v.times, of.times...), append(v.cutTimes, of.cutTimes...)
	v.aloneTimes = append(v.aloneTimes, of.aloneTimes...)
}

// String is the line.
func (v verdict) String() string {
	return fmt.Sprintf("kills=%d stops=%d replacements=%d jobs=%d hashes=%d %s cuts=%d "+
		"held_up=%d %s "+
		"alone=%d %s hosts_left=%d",
		v.kills, v.stopped, v.replacements, v.jobs, v.hashes, spread(v.times), v.cuts,
		len(v.cutTimes), spread(v.cutTimes), len(v.aloneTimes), spread(v.aloneTimes), v.left)
}

// spread is the part of the line that is of times.
func spread(times []time.Duration) string {
	slices.Sort(times)
	at := func(part int) int64 {
		if len(times) == 0 {
			return 0
		}
		return times[(len(times)-1)*part/100].Milliseconds()
	}
	return fmt.Sprintf("p50_ms=%d p99_ms=%d worst_ms=%d", at(50), at(99), at(100))
}

// site is machines with sshd, and one from which jobs are started on them.
type site struct {
	ground *proctest.Ground
	ssh    proctest.SSH
	hosts  []*proctest.Namespace
	user   *proctest.Namespace // nil without machines
	file   string              // of hosts
}

// newSite makes machines.
func newSite(g *proctest.Ground, c config) site {
	all := proctest.Machines(g, c.machines+1, c.wire)
	s := site{g, proctest.NewSSH(g), all[:c.machines], all[c.machines],
		filepath.Join(g.TempDir(), "hosts")}
	for _, h := range s.hosts {
		s.ssh.Serve(g, h)
	}
	return s
}

// start returns a command that starts a job on the machines, which have room for its processes.
func (s site) start(c config, args ...string) *exec.Cmd {
	if s.user == nil {
		return exec.Command(c.command, append([]string{"run"}, args...)...)
	}
	args = append([]string{"run", "--hostfile", s.file}, args...)
	cmd := exec.Command(c.command, args...)
	cmd.Env = append(os.Environ(), "PATH="+s.ssh.Path+":"+os.Getenv("PATH"),
		"TEST_SSH_KEY=authorized", fmt.Sprint("EURYALE_TIMEOUT=", c.timeout))
	return s.user.Command(cmd)
}

// list writes the hostfile, without one host or, for -1, with all, which have room for all
// processes.
func (s site) list(c config, without int) error {
	text, room := "", (c.ranks+c.standby+len(s.hosts)-1)/len(s.hosts)
	for i, h := range s.hosts {
		if i != without {
			text += fmt.Sprintf("%s slots=%d\n", h.Addr, room)
		}
	}
	next := s.file + ".next"
	return errors.Join(os.WriteFile(next, []byte(text), 0o600), os.Rename(next, s.file))
}
