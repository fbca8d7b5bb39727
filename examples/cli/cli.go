// Package cli is what the examples share besides their training: its start, exit codes, signals, devices, ways
// to compress gradients, checkpoints to resume from, a progress bar.
package cli

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/schollz/progressbar/v3"

	"github.com/euryale-ml/euryale"
	"github.com/euryale-ml/euryale/autograd"
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/backend/compress/half"
	"github.com/euryale-ml/euryale/backend/compress/sparse"
	"github.com/euryale-ml/euryale/rendezvous"
)

// UsageCode is the exit code of a wrong command line.
const UsageCode = 2

// UsageError is the error of a wrong command line.
type UsageError struct{ Err error }

// Error implements error.
func (e UsageError) Error() string { return e.Err.Error() }

// Unwrap returns what is wrong.
func (e UsageError) Unwrap() error { return e.Err }

// ExitCode is UsageCode.
func (UsageError) ExitCode() int { return UsageCode }

// Usage returns a UsageError.
func Usage(format string, args ...any) error { return UsageError{fmt.Errorf(format, args...)} }

// Parse parses a command line. --help prints all flags; an error does not, or they would be all that a
// launcher shows of the last lines.
func Parse(flags *flag.FlagSet, args []string) error {
	flags.SetOutput(io.Discard)
	err := flags.Parse(args)
	flags.SetOutput(os.Stderr)
	switch {
	case errors.Is(err, flag.ErrHelp):
		flags.Usage()
		return err
	case err != nil:
		return Usage("%w: see --help", err)
	}
	return nil
}

// ExitCode returns the exit code of an outcome: that of the error, or 1.
func ExitCode(err error) int {
	if err == nil {
		return 0
	}
	var coded interface{ ExitCode() int }
	if errors.As(err, &coded) {
		return coded.ExitCode()
	}
	return 1
}

// Exit ends the program with the exit code of an outcome, and says what failed.
func Exit(name string, err error) {
	if err != nil && !errors.As(err, new(Interrupted)) { // that was said on rank 0
		fmt.Fprintf(os.Stderr, "%s: %v\n", name, err)
	}
	os.Exit(ExitCode(err))
}

// Train joins the job, runs the training of this rank, and leaves. If it saves, ctx ends with a signal ([Signals]);
// otherwise a signal ends the program at once. Graphs are built under the lock.
func Train(saves bool, run func(ctx context.Context, comm backend.Communicator, build sync.Locker) error) error {
	ctx := context.Background()
	if saves {
		var stop func()
		ctx, stop = Signals()
		defer stop()
	}
	comm, err := euryale.Init(ctx)
	if err != nil {
		return errors.Join(context.Cause(ctx), err)
	}
	// The lock is for ranks that share a process; here each has its own.
	err = run(ctx, comm, new(sync.Mutex))
	if err != nil && !errors.As(err, new(Interrupted)) {
		comm.Abort(err) // so that the others learn of it at once
	}
	return errors.Join(err, comm.Close())
}

// Interrupted is the error of a training that a signal has ended.
type Interrupted struct{ Signal syscall.Signal }

// Error implements error.
func (i Interrupted) Error() string { return fmt.Sprintf("stopped by a signal: %v", i.Signal) }

// ExitCode is 128 plus the number of the signal, as in shells.
func (i Interrupted) ExitCode() int { return 128 + int(i.Signal) }

// Signals returns a context that SIGTERM or SIGINT ends; its cause is an [Interrupted]. A second
// signal ends the program.
func Signals() (_ context.Context, stop func()) {
	ctx, cancel := context.WithCancelCause(context.Background())
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, syscall.SIGTERM, syscall.SIGINT)
	go func() {
		select {
		case s := <-signals:
			signal.Stop(signals)
			number, _ := s.(syscall.Signal)
			cancel(Interrupted{number})
		case <-ctx.Done():
		}
	}()
	return ctx, func() {
		signal.Stop(signals)
		cancel(nil)
	}
}

// Stopped returns why a training ends that this rank or another one was told to end.
func Stopped(ctx context.Context) error {
	if ctx.Err() == nil {
		return Interrupted{syscall.SIGTERM}
	}
	return context.Cause(ctx)
}

// CheckDevice checks the value of --device: cpu, gpu or auto.
func CheckDevice(name string) error {
	if !slices.Contains([]string{"cpu", "gpu", "auto"}, name) {
		return fmt.Errorf("--device %s: use cpu, gpu or auto", name)
	}
	return nil
}

// Device returns where a rank computes by the value of --device; nil is the host.
func Device(name string, comm backend.Communicator) (backend.Device, error) {
	d := comm.Device()
	switch onHost := d == nil || d.Name() == "host"; {
	case name == "gpu" && onHost:
		return nil, Usage("--device gpu: backend %s has no GPU: see euryale doctor", comm.Capabilities().Backend)
	case name == "cpu" || onHost:
		return nil, nil
	}
	return d, nil
}

// Compression returns how gradients travel by the value of --compress: none, f16, bf16, topk=0.05 or
// threshold=0.001. feedback keeps what was not sent for the next step.
func Compression(flag string, feedback bool) ([]autograd.Option, error) {
	var sparsely []sparse.Option
	if !feedback {
		sparsely = append(sparsely, sparse.WithoutFeedback())
	}
	name, _, numbered := strings.Cut(flag, "=")
	switch name {
	case "none", "f16", "bf16":
		if numbered {
			return nil, fmt.Errorf("--compress %s: %s takes no number: use --compress %s", flag, name, name)
		}
		if !feedback {
			return nil, fmt.Errorf("--no-feedback: --compress %s leaves no gradients out: use it with topk=0.05 or threshold=0.001", name)
		}
		if name == "none" {
			return nil, nil
		}
		dtype, err := backend.ParseDType(name)
		return []autograd.Option{autograd.WithCompression(half.Wrap(dtype))}, err
	case "topk", "threshold":
		how, err := sparse.ParseSelection(flag)
		if err != nil {
			return nil, fmt.Errorf("--compress %s: %w", flag, err)
		}
		return []autograd.Option{autograd.WithCompression(sparse.Wrap(how, sparsely...))}, nil
	}
	return nil, fmt.Errorf("--compress %s: use none, f16, bf16, topk=0.05 or threshold=0.001", flag)
}

// SameFlags returns an error unless a training of a checkpoint was started with the flags of this one.
func SameFlags(dir, kept, flags string) error {
	if kept == flags {
		return nil
	}
	return Usage("--checkpoint %s: it is of a training with %s, and this one is with %s: start it as that was, or name another directory",
		dir, differing(kept, flags), differing(flags, kept))
}

// differing returns the flags that are in one list and not in another.
func differing(flags, others string) string {
	all := strings.Fields(others)
	mine := slices.DeleteFunc(strings.Fields(flags), func(flag string) bool { return slices.Contains(all, flag) })
	return strings.Join(mine, " ")
}

// Bar returns a progress bar of a training, which shows on a terminal only.
func Bar(steps int) *progressbar.ProgressBar {
	if !rendezvous.Terminal(os.Getenv) {
		return progressbar.DefaultSilent(int64(steps))
	}
	return progressbar.NewOptions(steps, progressbar.OptionSetWriter(os.Stderr), progressbar.OptionSetDescription("training"),
		progressbar.OptionSetItsString("steps"), progressbar.OptionShowIts(), progressbar.OptionClearOnFinish(),
		progressbar.OptionThrottle(100*time.Millisecond))
}
