package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"strings"
	"syscall"

	"github.com/euryale-ml/euryale/rendezvous/launch"
)

// runCmd is "euryale run".
type runCmd struct {
	N       int      `short:"n" default:"${ranks}" help:"Number of ranks (default: one per CPU, 8 at most; here ${ranks})."`
	Command []string `arg:"" passthrough:"" name:"program" help:"An executable or the directory of a Go package, which is built first. Everything after it goes to the program."`
}

// Help says what the one-line help leaves out.
func (*runCmd) Help() string {
	return `Every rank is a process of its own, with RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT, EURYALE_JOB and EURYALE_TOKEN set. With several ranks, every line of output begins with its rank. When a rank fails, the others are stopped, and its error and its exit code are those of euryale run. Signals go to the ranks; one second later they are killed.

Example: euryale run -n 4 ./examples/digits --epochs 3`
}

// Run starts the ranks and waits for them. Signals reach them as they are, so
// the context that a signal ends is of no use here.
func (c *runCmd) Run(s *streams) error {
	program, args, err := c.split()
	if err != nil {
		return err
	}
	signals := make(chan os.Signal, 4)
	signal.Notify(signals, syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP)
	defer signal.Stop(signals)
	return launch.Run(context.Background(), launch.Job{
		Program: program, Args: args, Ranks: c.N,
		Stdin: s.in, Stdout: s.out, Stderr: s.err, Signals: signals,
	})
}

// split tells the program from its arguments. Kong takes everything from the
// first word on that is no flag it knows.
func (c *runCmd) split() (program string, args []string, err error) {
	words := c.Command
	if len(words) > 0 && words[0] == "--" {
		words = words[1:]
	} else if len(words) > 0 && strings.HasPrefix(words[0], "-") {
		return "", nil, usageError{fmt.Errorf("run has no flag %s: see euryale run --help; flags of the program come after it%s", words[0], hint(words[:1]))}
	}
	if len(words) == 0 {
		return "", nil, usageError{errors.New("run which program? Give an executable or the directory of a Go package")}
	}
	return words[0], words[1:], nil
}
