package main

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
	"github.com/euryale-ml/euryale/internal/exit"
	"github.com/euryale-ml/euryale/rendezvous"
)

// usageError is the error of a wrong command line.
type usageError struct{ Err error }

// Error implements error.
func (e usageError) Error() string { return e.Err.Error() }

// Unwrap returns what is wrong.
func (e usageError) Unwrap() error { return e.Err }

// ExitCode is exit.Usage.
func (usageError) ExitCode() int { return exit.Usage }

// usage returns a usageError.
func usage(format string, args ...any) error { return usageError{fmt.Errorf(format, args...)} }

// parseArgs parses a command line. --help prints all flags; an error does not, or they would be all
// that a launcher shows of the last lines.
func parseArgs(flags *flag.FlagSet, args []string) error {
	flags.SetOutput(io.Discard)
	err := flags.Parse(args)
	flags.SetOutput(os.Stderr)
	switch {
	case errors.Is(err, flag.ErrHelp):
		flags.Usage()
		return err
	case err != nil:
		return usage("%w: see --help", err)
	}
	return nil
}

// leave ends the program with the exit status of an outcome, and says what failed.
func leave(name string, err error) {
	if err != nil && !errors.Is(err, exit.ErrStopped) { // that was said on rank 0
		fmt.Fprintf(os.Stderr, "%s: %v\n", name, err)
	}
	os.Exit(euryale.ExitStatus(err))
}

// inJob joins the job, runs the training of this rank, and leaves. If it saves, ctx ends with a
// signal; otherwise a signal ends the program at once. Graphs are built under the
// lock.
func inJob(saves bool, run func(ctx context.Context, comm backend.Communicator,
	build sync.Locker) error) error {
	ctx := context.Background()
	comm, err := euryale.Init(ctx)
	if err != nil {
		return err
	}
	if saves {
		var stop func()
		ctx, stop = signal.NotifyContext(ctx, syscall.SIGTERM, syscall.SIGINT)
		defer stop()
	}
	// The lock is for ranks that share a process; here each has its own.
	err = run(ctx, comm, new(sync.Mutex))
	if err != nil && !errors.Is(err, exit.ErrStopped) {
		comm.Abort(err) // so that the others learn of it at once
	}
	return errors.Join(err, comm.Close())
}

// checkDevice checks the value of --device: cpu, gpu or auto.
func checkDevice(name string) error {
	if !slices.Contains([]string{"cpu", "gpu", "auto"}, name) {
		return fmt.Errorf("--device %s: use cpu, gpu or auto", name)
	}
	return nil
}

// chooseDevice returns where a rank computes by the value of --device; nil is the host.
func chooseDevice(name string, comm backend.Communicator) (backend.Device, error) {
	d := comm.Device()
	switch onHost := d == nil || d.Name() == "host"; {
	case name == "gpu" && onHost:
		return nil, usage("--device gpu: backend %s has no GPU: see euryale doctor",
			comm.Capabilities().Backend)
	case name == "cpu" || onHost:
		return nil, nil
	}
	return d, nil
}

// compression returns how gradients travel by the value of --compress: none, f16, bf16, topk=0.05
// or threshold=0.001. feedback keeps what was not sent for the next step.
func compression(flag string, feedback bool) ([]autograd.Option, error) {
	var sparsely []sparse.Option
	if !feedback {
		sparsely = append(sparsely, sparse.WithoutFeedback())
	}
	name, _, numbered := strings.Cut(flag, "=")
	switch name {
	case "none", "f16", "bf16":
		if numbered {
			return nil, fmt.Errorf("--compress %s: %s takes no number: use --compress %s", flag,
				name, name)
		}
		if !feedback {
			return nil, fmt.Errorf("--no-feedback: --compress %s leaves no gradients out: use it "+
				"with topk=0.05 or threshold=0.001", name)
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

// sameFlags returns an error unless a training of a checkpoint was started with the flags of this
// one.
func sameFlags(dir, kept, flags string) error {
	if kept == flags {
		return nil
	}
	return usage("--checkpoint %s: it is of a training with %s, and this one is with %s: start "+
		"it as that was, or name another directory",
		dir, differing(kept, flags), differing(flags, kept))
}

// differing returns the flags that are in one list and not in another.
func differing(flags, others string) string {
	all := strings.Fields(others)
	mine := slices.DeleteFunc(strings.Fields(flags), func(flag string) bool {
		return slices.Contains(all, flag)
	})
	return strings.Join(mine, " ")
}

// progressBar returns a progress bar of a training, which shows on a terminal only.
func progressBar(steps int) *progressbar.ProgressBar {
	if !rendezvous.Terminal(os.Getenv) {
		return progressbar.DefaultSilent(int64(steps))
	}
	return progressbar.NewOptions(steps, progressbar.OptionSetWriter(os.Stderr),
		progressbar.OptionSetDescription("training"),
		progressbar.OptionSetItsString("steps"), progressbar.OptionShowIts(),
		progressbar.OptionClearOnFinish(),
		progressbar.OptionThrottle(100*time.Millisecond))
}
