// Command ab compares the speed of two versions of Euryale, or of Euryale and another library:
//
//	go run ./bench/ab --old DIR [--new DIR] [--rounds 5]
//	go run ./bench/ab --peer openmpi --ranks 2,4 [--backend tcp] [--new DIR]
//	go run ./bench/ab --old before.jsonl --new after.jsonl
//
// DIR is a source tree, which is built, or a program that was built from one. The two
// programs run `euryale bench` in turn: all collectives from 1 KiB to 64 MiB, among 2, 4 and 8
// processes on the host as far as the machine has CPUs, and among 2 ranks on GPUs where there
// are two. The last line is
//
//	cells=216 geomean=1.004 worst=1.061 (host, 4 ranks, allgather of 1048576 bytes)
//
// A cell is one size of one collective. Its ratio is the median over the rounds of the new time
// by the old one. Groups with a cell above the limit are measured again, up to three times in
// all; a cell's worst ratio is the lowest of these. The exit status is 1 if the geometric mean
// is above 1.02 or the worst ratio above 1.10.
//
// A peer takes the place of the old version, on the host: openmpi (it needs mpicc and mpirun; with
// --backend tcp it uses TCP, too) or gloo (python3 with torch). Times are p50 then, as in files of
// lines of euryale bench --json and of the programs of bench/peers, which are compared as they are.
package main

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/euryale-ml/euryale/bench/peers"
	"github.com/euryale-ml/euryale/internal/bench"
)

// What a new version may cost.
const (
	geomeanLimit = 1.02
	cellLimit    = 1.10
	repeats      = 3 // of a group that has a cell above its limit
)

var collectives = []string{"allreduce", "reducescatter", "allgather", "alltoall", "broadcast",
	"reduce", "gather", "scatter"}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := run(ctx, os.Stdout, os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "ab:", err)
		os.Exit(1)
	}
}

// options are the command line.
type options struct {
	old, new    string
	peer        string // in place of the old version
	backend     string // on the host
	tags        string
	rounds      int
	collectives string
	ranks       string
	gpus        int
	bench.Config
}

func parse(args []string) (options, error) {
	var o options
	f := flag.NewFlagSet("ab", flag.ContinueOnError)
	f.StringVar(&o.old, "old", "", "the old version: a source tree, a program or a file")
	f.StringVar(&o.new, "new", ".", "the new version: a source tree, a program or a file")
	f.StringVar(&o.peer, "peer", "", "in place of an old version: openmpi or gloo")
	f.StringVar(&o.backend, "backend", "host", "for ranks on the host")
	f.StringVar(&o.tags, "tags", "", "build tags for source trees, such as gpu")
	f.IntVar(&o.rounds, "rounds", 5, "how often both versions run")
	f.StringVar(&o.collectives, "collectives", strings.Join(collectives, ","), "what to measure")
	f.StringVar(&o.ranks, "ranks", hostRanks(runtime.NumCPU()),
		"numbers of ranks on the host; empty for none")
	f.IntVar(&o.gpus, "gpus", gpuRanks(), "number of ranks on GPUs; 0 for none")
	o.Min, o.Max = 1<<10, 64<<20
	size := func(of *bench.Size) func(string) error {
		return func(text string) error { return of.UnmarshalText([]byte(text)) }
	}
	f.Func("min", "the first size (default 1K)", size(&o.Min))
	f.Func("max", "the largest size (default 64M)", size(&o.Max))
	f.IntVar(&o.Factor, "factor", 4, "each size is this many times the one before")
	f.DurationVar(&o.Budget, "time", 100*time.Millisecond, "how long to time one size")
	if err := f.Parse(args); err != nil {
		return o, err
	}
	if (o.old == "") == (o.peer == "") || o.rounds < 1 || f.NArg() > 0 {
		return o, errors.New("usage: ab --old DIR|PROGRAM|FILE or --peer NAME [--new " +
			"DIR|PROGRAM|FILE] [--rounds 5]; see --help")
	}
	if o.peer != "" {
		o.gpus = 0
		o.collectives = strings.Join(slices.DeleteFunc(strings.Split(o.collectives, ","),
			func(c string) bool { return !slices.Contains(peers.Kinds(o.peer), c) }), ",")
		if o.collectives == "" {
			return o, fmt.Errorf("--peer %s runs none of that: openmpi runs %v, gloo %v", o.peer,
				peers.Kinds("openmpi"), peers.Kinds("gloo"))
		}
	}
	return o, nil
}

// hostRanks lists those of 2, 4 and 8 ranks that have a CPU each.
func hostRanks(cpus int) string {
	var list []string
	for _, n := range []int{2, 4, 8} {
		if n <= cpus {
			list = append(list, strconv.Itoa(n))
		}
	}
	return strings.Join(list, ",")
}

// gpuRanks is 2 on a machine with two GPUs or more, else 0.
func gpuRanks() int {
	out, err := exec.Command("nvidia-smi", "-L").Output()
	if err != nil || bytes.Count(out, []byte("\n")) < 2 {
		return 0
	}
	return 2
}

// groups lists what to measure.
func (o options) groups() ([]group, error) {
	var all []group
	for _, text := range strings.FieldsFunc(o.ranks, func(r rune) bool { return r == ',' }) {
		n, err := strconv.Atoi(text)
		if err != nil {
			return nil, fmt.Errorf("--ranks: %w", err)
		}
		for _, c := range strings.Split(o.collectives, ",") {
			all = append(all, group{"host", n, c})
		}
	}
	if o.gpus > 0 {
		for _, c := range strings.Split(o.collectives, ",") {
			all = append(all, group{"gpu", o.gpus, c})
		}
	}
	if all == nil {
		return nil, errors.New("nothing to measure: this machine has neither two CPUs nor two GPUs")
	}
	return all, nil
}

func run(ctx context.Context, w io.Writer, args []string) error {
	o, err := parse(args)
	if err != nil {
		return err
	}
	cells, err := o.measure(ctx, w)
	if err != nil {
		return err
	}
	fmt.Fprintln(w, summary(cells))
	return judge(cells)
}

// measure compares all groups, and writes their cells.
func (o options) measure(ctx context.Context, w io.Writer) (all []cell, err error) {
	groups, measure := []group(nil), measurement(nil)
	if strings.HasSuffix(o.old, ".jsonl") {
		o.rounds = 1
		groups, measure, err = inFiles(o.old, o.new)
	} else {
		dir, failed := os.MkdirTemp("", "euryale-ab-")
		if failed != nil {
			return nil, failed
		}
		defer os.RemoveAll(dir)
		groups, measure, err = o.programs(ctx, dir)
	}
	if err != nil {
		return nil, err
	}
	for _, g := range groups {
		found, err := g.compare(o.rounds, measure)
		if err != nil {
			return nil, err
		}
		for _, c := range found {
			fmt.Fprintln(w, c)
		}
		all = append(all, found...)
	}
	return all, nil
}

// measurement returns the times of a version, 0 being the old one.
type measurement = func(version int, g group) (times, error)

// programs builds the versions into dir, and returns what measures them.
func (o options) programs(ctx context.Context, dir string) ([]group, measurement, error) {
	groups, err := o.groups()
	if err != nil {
		return nil, nil, err
	}
	var programs [2]string
	for i, from := range []string{o.old, o.new} {
		if from == "" {
			continue // a peer is the old one
		}
		if programs[i], err = program(ctx, from, filepath.Join(dir, []string{"old", "new"}[i]),
			o.tags); err != nil {
			return nil, nil, err
		}
	}
	return groups, func(version int, g group) (times, error) {
		if programs[version] == "" {
			return o.ofPeer(ctx, g)
		}
		return o.run(ctx, programs[version], g)
	}, nil
}

// inFiles returns what two files of results have of each group.
func inFiles(names ...string) (groups []group, measure measurement, err error) {
	var all [2]map[group]times
	for i, name := range names {
		f, err := os.Open(name)
		if err != nil {
			return nil, nil, err
		}
		results, err := bench.ReadJSON(f)
		if err = errors.Join(err, f.Close()); err != nil {
			return nil, nil, fmt.Errorf("%s: %w", name, err)
		}
		all[i] = map[group]times{}
		for _, r := range results {
			g := group{"file", r.Ranks, r.Collective + " of " + r.DType}
			if all[i][g] == nil {
				all[i][g] = times{}
				if i == 0 {
					groups = append(groups, g)
				}
			}
			all[i][g][r.Bytes] = cmp.Or(r.StreamMicros, r.P50Micros)
		}
	}
	return groups, func(version int, g group) (times, error) { return all[version][g], nil }, nil
}

// ofPeer measures a group by the peer's program.
func (o options) ofPeer(ctx context.Context, g group) (times, error) {
	program, err := peers.Prepare(ctx, o.peer, g.collective, g.ranks, o.Config, o.backend == "tcp")
	if err != nil {
		return nil, err
	}
	results, err := program.Run(ctx)
	return o.times(results), errors.Join(err, program.Close())
}

// program returns the program of a version, which it builds into out if it is a source tree.
func program(ctx context.Context, from, out, tags string) (string, error) {
	info, err := os.Stat(from)
	if err != nil {
		return "", err
	}
	if !info.IsDir() {
		return filepath.Abs(from)
	}
	build := exec.CommandContext(ctx, "go", "build", "-tags", tags, "-o", out, "./cmd/euryale")
	build.Dir, build.Stderr = from, os.Stderr
	if err := build.Run(); err != nil {
		return "", fmt.Errorf("build %s: %w", from, err)
	}
	return out, nil
}

// run runs a program's benchmark of the group, and returns the time of each size.
func (o options) run(ctx context.Context, program string, g group) (times, error) {
	args := []string{"bench", fmt.Sprint("--n=", g.ranks), "--collective=" + g.collective,
		fmt.Sprint("--min=", o.Min), fmt.Sprint("--max=", o.Max), fmt.Sprint("--factor=", o.Factor),
		fmt.Sprint("--time=", o.Budget), "--json"}
	if o.peer == "gloo" {
		args = append(args, "--in-place")
	}
	if g.where == "host" { // on GPUs, each version takes its own best
		args = append(args, "--backend="+o.backend)
	}
	cmd := exec.CommandContext(ctx, program, args...)
	var said bytes.Buffer
	cmd.Stderr = &said
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("%s %s: %w\n%s", program, strings.Join(args, " "), err, said.Bytes())
	}
	results, err := bench.ReadJSON(bytes.NewReader(out))
	return o.times(results), err
}

// times returns what calls take on a stream or, on the host, their means: medians beside a peer,
// whose programs print these.
func (o options) times(results []bench.Result) times {
	all := times{}
	for _, r := range results {
		if all[r.Bytes] = cmp.Or(r.StreamMicros, r.MeanMicros); o.peer != "" {
			all[r.Bytes] = r.P50Micros
		}
	}
	return all
}
