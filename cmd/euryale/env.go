package main

import (
	"context"
	"fmt"
	"io"

	"github.com/euryale-ml/euryale/gpu/sdk"
)

// envCmd prepares a machine for builds with tag gpu.
type envCmd struct {
	Dir string `type:"path" placeholder:"DIR" help:"Directory for the headers and libraries of the build; one in the user's cache if not given."`
}

// Help is what --help says below the flags' titles.
func (envCmd) Help() string {
	return `Prints CGO_ENABLED, CGO_CFLAGS and CGO_LDFLAGS as lines for a shell. It needs a C compiler and ar, but no CUDA toolkit: it uses the headers of one that it finds (CUDA_HOME, CUDA_PATH, or the usual places), else it downloads them with pip, once. Programs built this way start on any machine, with or without a driver.

Example, in a module that requires Euryale: eval "$(euryale env)" && go build -tags gpu ./...`
}

// Run prepares and prints.
func (e envCmd) Run(ctx context.Context, s *streams) error {
	dir := e.Dir
	if dir == "" {
		var err error
		if dir, err = sdk.CacheDir(); err != nil {
			return fmt.Errorf("env: %w: use --dir", err)
		}
	}
	made, err := sdk.Prepare(ctx, dir)
	if err != nil {
		return fmt.Errorf("env: %w", err)
	}
	_, err = io.WriteString(s.out, made.Script())
	return err
}
