package main

import (
	"context"
	"fmt"
	"io"
	"os"

	"github.com/euryale-ml/euryale/internal/cuda"
	"github.com/euryale-ml/euryale/internal/sdk"
)

// envCmd prepares a machine for builds with tag gpu.
type envCmd struct {
	Dir string `type:"path" placeholder:"DIR" predictor:"directory" help:"Directory for the headers and libraries of the build; one in the user's cache if not given."`
}

// Help is what --help says below the flags' titles.
func (envCmd) Help() string {
	return `Prints CGO_ENABLED, CGO_CFLAGS and CGO_LDFLAGS as lines for a shell. It needs a C
compiler and ar, but no CUDA toolkit: it uses the headers of one that it finds (CUDA_HOME,
CUDA_PATH, or the usual places), else it downloads them with pip, once. Programs built this way
start on any machine, with or without a driver.

Comments say where this machine has cuBLAS and cuDNN, which programs open at run time, or how to
get them.

Example, in a module that requires Euryale:

	eval "$(euryale env)" && go build -tags gpu ./...`
}

// Run prepares and prints.
func (e envCmd) Run(ctx context.Context, s *streams) error {
	made, err := sdk.Prepare(ctx, e.Dir)
	if err != nil {
		return fmt.Errorf("env: %w", err)
	}
	script := made.Script()
	for _, library := range cuda.Libraries() {
		script += found(library)
	}
	_, err = io.WriteString(s.out, script)
	return err
}

// found is a comment of the script that says where programs find a library on this machine, or how
// to get it.
func found(l cuda.Library) string {
	switch path := l.Find(); {
	case l.Variable.Off(os.Getenv):
		return fmt.Sprintf("# %s: %s=off: without it, %s.\n", l.Name, l.Variable, l.Without)
	case path != "":
		return fmt.Sprintf("# %s: %s\n", l.Name, path)
	default:
		return fmt.Sprintf("# %s: not found: without it, %s. Get it: %s; or name its file in "+
			"%s. euryale doctor, built with -tags gpu, says what programs open.\n",
			l.Name, l.Without, l.Install, l.Variable)
	}
}
