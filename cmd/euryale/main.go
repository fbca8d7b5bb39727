// Command euryale starts programs on many ranks, and looks at what Euryale can
// do on a machine. "euryale --help" lists its commands.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"

	"github.com/alecthomas/kong"
)

// cli is the command line: a field for each command, which is a type with its
// flags and a method Run that returns an error, in a file of its own. Run may
// take a context.Context, which is over after SIGINT or SIGTERM, and *streams.
type cli struct {
	Run     runCmd     `cmd:"" help:"Start a program on several ranks of this machine."`
	Bench   benchCmd   `cmd:"" help:"Measure collectives and verify their results."`
	Explain explainCmd `cmd:"" help:"Say how a collective runs, and why: the choice, its rivals and their times."`
	Env     envCmd     `cmd:"" help:"Print the environment that a build with GPU support needs, for a shell."`
	Doctor  doctorCmd  `cmd:"" help:"Say what this build and machine can use, and why not what they cannot."`
}

// streams are what a command reads and writes.
type streams struct {
	in       *os.File
	out, err io.Writer
}

// usageCode is the exit code of a command line that is wrong.
const usageCode = 2

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	context.AfterFunc(ctx, stop) // a second signal ends the program
	os.Exit(run(ctx, os.Args[1:], &streams{os.Stdin, os.Stdout, os.Stderr}, os.Exit))
}

// run runs a command line and returns the exit code. exit ends the program
// early, after help was asked for.
func run(ctx context.Context, args []string, s *streams, exit func(int)) int {
	var c cli
	parser, err := kong.New(&c,
		kong.Name("euryale"),
		kong.Description("Differentiable collectives and data-parallel training for Gorgonia."),
		kong.Writers(s.out, s.err),
		kong.Exit(exit),
		kong.BindTo(ctx, (*context.Context)(nil)),
		kong.ConfigureHelp(kong.HelpOptions{Compact: true}),
		vars(),
	)
	if err != nil {
		fmt.Fprintln(s.err, "euryale:", err)
		return usageCode
	}
	if len(args) == 0 {
		args = []string{"--help"}
	}
	command, err := parser.Parse(args)
	if err != nil {
		fmt.Fprintf(s.err, "euryale: %v (see euryale --help)\n", err)
		return usageCode
	}
	return exitCode(command.Run(s), s)
}

// exitCode prints the error of a command and returns what it means to a shell.
func exitCode(err error, s *streams) int {
	if err == nil {
		return 0
	}
	fmt.Fprintln(s.err, "euryale:", err)
	var coded interface{ ExitCode() int }
	if errors.As(err, &coded) && coded.ExitCode() > 0 {
		return coded.ExitCode()
	}
	return 1
}
