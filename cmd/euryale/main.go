// Command euryale starts programs on many ranks, measures collectives, and reports what
// Euryale can use on a machine. "euryale --help" lists its commands.
package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"reflect"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"github.com/alecthomas/kong"

	"github.com/euryale-ml/euryale/internal/bench"
	"github.com/euryale-ml/euryale/internal/exit"
	"github.com/euryale-ml/euryale/internal/launch"
	"github.com/euryale-ml/euryale/rendezvous"
)

// cli is the command line, with a field for each command. The type of a command has its
// flags and a method Run that returns an error. Run may take a context.Context, which
// ends with SIGINT or SIGTERM, and *streams.
type cli struct {
	Version kong.VersionFlag `help:"Print the version of this program."`

	Run     runCmd     `cmd:"" help:"Start a program on several ranks, of this machine or of hosts."`
	Host    hostCmd    `cmd:"" hidden:"" help:"What euryale run -H starts on hosts."`
	Bench   benchCmd   `cmd:"" help:"Measure collectives and verify their results."`
	Explain explainCmd `cmd:"" help:"Explain which algorithm a collective uses, with the candidates and their times."`
	Env     envCmd     `cmd:"" help:"Print the shell environment for building with GPU support."`
	Doctor  doctorCmd  `cmd:"" help:"Report what this build and machine can use, and why not the rest."`
	Report  reportCmd  `cmd:"" help:"Make one page of the logs and traces of a job's ranks."`
	Top     topCmd     `cmd:"" help:"Show the ranks of running jobs, and which one is slow."`
	Token   tokenCmd   `cmd:"" help:"Print a new secret for EURYALE_TOKEN."`

	Completion completionCmd `cmd:"" help:"Print what makes a shell complete command lines."`
	Help       helpCmd       `cmd:"" help:"Describe a command, like COMMAND --help."`
}

// streams are what a command reads and writes.
type streams struct {
	in       *os.File
	out, err io.Writer
}

// helpCmd is "euryale help".
type helpCmd struct {
	Command []string `arg:"" optional:"" predictor:"command" help:"The command to describe; an overview if not given."`
}

// Run prints the help text.
func (h *helpCmd) Run(parsed *kong.Context) error {
	about, err := kong.Trace(parsed.Kong, h.Command)
	if err != nil {
		return fmt.Errorf("help: %w", err)
	}
	if about.Error != nil {
		return usageError{about.Error}
	}
	return about.PrintUsage(false)
}

// usageError is the error of a wrong command line.
type usageError struct{ error }

func (usageError) ExitCode() int   { return exit.Usage }
func (e usageError) Unwrap() error { return e.error }

func main() {
	if isInit() {
		os.Exit(asInit())
	}
	ctx, stop := signalContext(syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	os.Exit(run(ctx, os.Args[1:], &streams{os.Stdin, os.Stdout, os.Stderr}, os.Exit))
}

// signalContext returns a context that the first of the signals ends, with a
// [launch.Interrupted] as its cause. The second signal ends the program.
func signalContext(which ...os.Signal) (_ context.Context, stop func()) {
	ctx, cancel := context.WithCancelCause(context.Background())
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, which...)
	go func() {
		select {
		case s := <-signals:
			signal.Stop(signals)
			cancel(&launch.Interrupted{Signal: s})
		case <-ctx.Done():
		}
	}()
	return ctx, func() {
		signal.Stop(signals)
		cancel(nil)
	}
}

// run runs a command line and returns the exit code. end ends the program
// early, after help or the version was asked for.
func run(ctx context.Context, args []string, s *streams, end func(int)) int {
	var c cli
	parser, err := kong.New(&c,
		kong.Name("euryale"),
		kong.Description("Differentiable collectives and data-parallel training for Gorgonia."),
		kong.Writers(s.out, s.err),
		kong.Exit(end),
		kong.BindTo(ctx, (*context.Context)(nil)),
		kong.ConfigureHelp(kong.HelpOptions{Compact: true}),
		kong.KindMapper(reflect.Int, kong.MapperFunc(wholeNumber)),
		vars(),
	)
	if err != nil {
		fmt.Fprintln(s.err, "euryale:", err)
		return exit.Usage
	}
	if completing(parser) {
		return 0
	}
	if len(args) == 0 {
		args = []string{"--help"}
	}
	command, err := parser.Parse(args)
	if err != nil {
		about := ""
		if slices.ContainsFunc(parser.Model.Children, func(n *kong.Node) bool {
			return n.Name == args[0]
		}) {
			about = " " + args[0]
		}
		fmt.Fprintf(s.err, "euryale: %s (see euryale%s --help)\n", cmp.Or(hint(args), plain(err)),
			about)
		return exit.Usage
	}
	if err := emptyFlag(command.Flags()); err != nil {
		return exitCode(ctx, err, s)
	}
	return exitCode(ctx, command.Run(s), s)
}

// emptyFlag returns an error for a flag whose value is an empty text, nil if there is none: a job
// on the hosts of a shell variable that is not set would run here, and its logs nowhere.
func emptyFlag(flags []*kong.Flag) error {
	for _, f := range flags {
		if f.Set && f.Target.Kind() == reflect.String && f.Target.Len() == 0 {
			return usageError{fmt.Errorf("--%s is empty: give it a value, or leave it out", f.Name)}
		}
	}
	return nil
}

// vars are the values in help texts and defaults.
func vars() kong.Vars {
	return kong.Vars{"ranks": strconv.Itoa(defaultRanks()), "version": "euryale " +
		bench.Version()}
}

// defaultRanks is the number of ranks when none is given: one for each CPU, 8 at most.
func defaultRanks() int { return min(runtime.NumCPU(), 8) }

// wholeNumber reads the value of a flag, also one that looks like a flag, such as -1: the command
// says what its limits are.
func wholeNumber(c *kong.DecodeContext, to reflect.Value) error {
	token := c.Scan.Pop()
	if token.IsEOL() {
		return errors.New("expected a value, but nothing follows")
	}
	n, err := strconv.Atoi(token.String())
	if err != nil {
		return fmt.Errorf("%s is not a whole number", token)
	}
	to.SetInt(int64(n))
	return nil
}

// plain is what the parser says of a value, as a sentence.
func plain(err error) string {
	return strings.NewReplacer("expected value value", "expected a value",
		` but got "EOL" (<EOL>)`, ", but nothing follows", `expected "<program> ..."`, noProgram).
		Replace(err.Error())
}

// hint translates a flag of another launcher, "" if args has none.
func hint(args []string) string {
	for _, arg := range args {
		name, _, _ := strings.Cut(arg, "=")
		switch strings.ReplaceAll(name, "_", "-") {
		case "-np", "--np", "--nproc", "--nproc-per-node", "--ntasks":
			return fmt.Sprintf("instead of %s write -n and the number of ranks, such as -n 4",
				name)
		}
	}
	return ""
}

// exitCode prints the error of a command and returns its exit code. A command that was
// ended by a signal has 128 plus the number of the signal.
func exitCode(ctx context.Context, err error, s *streams) int {
	if err == nil {
		return 0
	}
	var failed *launch.Failed
	if why := context.Cause(ctx); why != nil && !errors.As(err, &failed) {
		err = why // it caused the command's own error
	}
	// Errors of package euryale begin with the same prefix.
	text := rendezvous.Printable(strings.TrimPrefix(err.Error(), "euryale: "))
	fmt.Fprintln(s.err, "euryale:", text) // it may quote files, peers and hosts
	return exit.Of(err)
}
