package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/alecthomas/kong"

	"github.com/euryale-ml/euryale/rendezvous/launch"
)

// runCmd is "euryale run".
type runCmd struct {
	N           rankCount     `short:"n" default:"${ranks}" help:"Number of ranks (default: one per CPU, 8 at most; here ${ranks})."`
	Grace       time.Duration `default:"1s" help:"Time between the signal that tells ranks to end, which they may use to save, and SIGKILL."`
	LogDir      string        `placeholder:"DIR" help:"Also write the output of each rank to a file, DIR/attempt_0/rank_0.log and so on."`
	MaxRestarts int           `default:"0" help:"When a rank fails, start all ranks anew, at most so many times."`
	Command     []string      `arg:"" passthrough:"" name:"program" help:"An executable or the directory of a Go package, which is built first. Everything after it goes to the program."`
}

// Help says what the one-line help leaves out.
func (*runCmd) Help() string {
	return `Every rank is a process of its own, with RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT, EURYALE_JOB and EURYALE_TOKEN set. With several ranks, every line of output begins with its rank. When a rank fails, the others are stopped, and its error and its exit code are those of euryale run.

Signals go to the ranks: SIGINT, SIGTERM and SIGHUP tell them to end, and those that have not when the grace is over are killed; a second signal kills at once. On SIGQUIT (Ctrl-\) each rank prints its last collectives (EURYALE_LAST_CALLS, 10) and the stacks of its goroutines, and ends. The exit code is then 128 and the number of the signal.

With --max-restarts, each attempt is a job of its own, with TORCHELASTIC_RESTART_COUNT counting from 0: load a checkpoint where there is one. Ranks are not started anew after a signal to euryale run, nor if all end with exit status 2, as for a wrong command line. Standard input is for the first attempt.

Example: euryale run -n 4 ./examples/digits --epochs 3`
}

// Validate finds numbers that make no sense.
func (c *runCmd) Validate() error {
	switch {
	case c.Grace <= 0:
		return fmt.Errorf("--grace=%v: the time must be positive", c.Grace)
	case c.MaxRestarts < 0:
		return fmt.Errorf("--max-restarts=%d: the number must not be negative", c.MaxRestarts)
	}
	return nil
}

// vars are the values that help texts and defaults mention.
func vars() kong.Vars { return kong.Vars{"ranks": strconv.Itoa(launch.DefaultRanks())} }

// Run starts the ranks and waits for them. Signals reach them as they are, so
// the context that a signal ends is of no use here.
func (c *runCmd) Run(s *streams) error {
	program, args, err := c.split()
	if err != nil {
		return err
	}
	signals, stop := jobSignals()
	defer stop()
	err = launch.Run(context.Background(), launch.Job{
		Program: program, Args: args, Ranks: int(c.N),
		Stdin: s.in, Stdout: s.out, Stderr: s.err, Signals: signals,
		LogDir: c.LogDir, Grace: c.Grace, MaxRestarts: c.MaxRestarts,
		Notice: func(text string) { fmt.Fprintln(s.err, "euryale:", text) },
	})
	return misplaced(err, args)
}

// jobSignals returns the signals that go to the ranks.
func jobSignals() (signals chan os.Signal, stop func()) {
	signals = make(chan os.Signal, 4)
	signal.Notify(signals, syscall.SIGINT, syscall.SIGTERM, syscall.SIGQUIT)
	if !signal.Ignored(syscall.SIGHUP) { // as under nohup
		signal.Notify(signals, syscall.SIGHUP)
	}
	// An output that nobody reads then gives an error, which says so.
	pipe := make(chan os.Signal, 1)
	signal.Notify(pipe, syscall.SIGPIPE)
	return signals, func() {
		signal.Stop(signals)
		signal.Stop(pipe)
	}
}

// misplaced adds a hint to the error of a program that does not like its command
// line, if euryale run may have been meant.
func misplaced(err error, args []string) error {
	var f *launch.Failed
	if errors.As(err, &f) && f.Usage() && slices.Contains(args, "-n") {
		return fmt.Errorf("%w\n-n came after the program and went to it: euryale run -n N PROGRAM starts N ranks", err)
	}
	return err
}

// rankCount is a number of ranks that one machine can start.
type rankCount int

// UnmarshalText reads the number. It must not be so large that starting takes all
// memory.
func (n *rankCount) UnmarshalText(text []byte) error {
	parsed, err := strconv.Atoi(string(text))
	if err != nil || parsed < 1 || parsed > launch.MaxRanks {
		return fmt.Errorf("%q is no number of ranks: write one from 1 to %d", text, launch.MaxRanks)
	}
	*n = rankCount(parsed)
	return nil
}

// split tells the program from its arguments. Kong takes everything from the
// first word on that is no flag it knows.
func (c *runCmd) split() (program string, args []string, err error) {
	words := c.Command
	if len(words) > 0 && words[0] == "--" {
		words = words[1:]
	} else if len(words) > 0 && strings.HasPrefix(words[0], "-") {
		return "", nil, fmt.Errorf("run has no flag %s: see euryale run --help; flags of the program come after it", words[0])
	}
	if len(words) == 0 {
		return "", nil, errors.New("run which program? Give an executable or the directory of a Go package")
	}
	return words[0], words[1:], nil
}
