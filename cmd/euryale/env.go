package main

import (
	"context"
	"fmt"
	"io"

	"github.com/euryale-ml/euryale/gpu/sdk"
)

// envCmd makes a machine ready to build under tag gpu.
type envCmd struct {
	Dir string `type:"path" placeholder:"DIR" help:"Where to put what a build needs; a directory of the user's cache if not given."`
}

// Help is what --help says below the flags' titles.
func (envCmd) Help() string {
	return `Prints CGO_ENABLED, CGO_CFLAGS and CGO_LDFLAGS as lines for a shell. Needed are a C compiler and ar, and no CUDA toolkit: its headers are used if it is there (CUDA_HOME, CUDA_PATH, or the usual places), and else downloaded with pip, once. Programs built so start on any machine, with or without a driver.

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
