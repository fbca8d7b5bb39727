// Command ab compares the speed of two versions of Euryale:
//
//	go run ./internal/tools/ab --old DIR [--new DIR] [--rounds 5]
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
	tags        string
	rounds      int
	collectives string
	ranks       string
	gpus        int
	args        []string // for euryale bench
}

func parse(args []string) (options, error) {
	var o options
	f := flag.NewFlagSet("ab", flag.ContinueOnError)
	f.StringVar(&o.old, "old", "", "the old version: a source tree or a program")
	f.StringVar(&o.new, "new", ".", "the new version: a source tree or a program")
	f.StringVar(&o.tags, "tags", "", "build tags for source trees, such as gpu")
	f.IntVar(&o.rounds, "rounds", 5, "how often both versions run")
	f.StringVar(&o.collectives, "collectives", strings.Join(collectives, ","), "what to measure")
	f.StringVar(&o.ranks, "ranks", hostRanks(runtime.NumCPU()),
		"numbers of ranks on the host; empty for none")
	f.IntVar(&o.gpus, "gpus", gpuRanks(), "number of ranks on GPUs; 0 for none")
	low, high := f.String("min", "1K", "the first size"), f.String("max", "64M", "the largest size")
	factor, budget := f.Int("factor", 4, "each size is this many times the one before"),
		f.Duration("time", 100*time.Millisecond, "how long to time one size")
	if err := f.Parse(args); err != nil {
		return o, err
	}
	if o.old == "" || o.rounds < 1 || f.NArg() > 0 {
		return o, errors.New("usage: ab --old DIR|PROGRAM [--new DIR|PROGRAM] [--rounds 5]; see " +
			"--help")
	}
	o.args = []string{"--min=" + *low, "--max=" + *high, fmt.Sprint("--factor=", *factor),
		fmt.Sprint("--time=", *budget), "--json"}
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
	groups, err := o.groups()
	if err != nil {
		return err
	}
	dir, err := os.MkdirTemp("", "euryale-ab-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	var programs [2]string
	for i, from := range []string{o.old, o.new} {
		if programs[i], err = program(ctx, from, filepath.Join(dir, []string{"old", "new"}[i]),
			o.tags); err != nil {
			return err
		}
	}
	measure := func(version int, g group) (times, error) {
		return g.run(ctx, programs[version], o.args)
	}
	var cells []cell
	for _, g := range groups {
		found, err := g.compare(o.rounds, measure)
		if err != nil {
			return err
		}
		for _, c := range found {
			fmt.Fprintln(w, c)
		}
		cells = append(cells, found...)
	}
	fmt.Fprintln(w, summary(cells))
	return judge(cells)
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
func (g group) run(ctx context.Context, program string, args []string) (times, error) {
	args = slices.Concat([]string{"bench", fmt.Sprint("--n=", g.ranks), "--collective=" +
		g.collective}, args)
	if g.where == "host" { // on GPUs, each version takes its own best
		args = append(args, "--backend=host")
	}
	cmd := exec.CommandContext(ctx, program, args...)
	var said bytes.Buffer
	cmd.Stderr = &said
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("%s %s: %w\n%s", program, strings.Join(args, " "), err, said.Bytes())
	}
	return read(bytes.NewReader(out))
}

// read reads the lines of a benchmark.
func read(r io.Reader) (times, error) {
	results, err := bench.ReadJSON(r)
	all := times{}
	for _, result := range results {
		all[result.Bytes] = cmp.Or(result.StreamMicros, result.MeanMicros)
	}
	return all, err
}
