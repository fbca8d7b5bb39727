// Prepare makes a machine ready to build under tag gpu and prints the
// environment the go command needs, for a shell to evaluate:
//
//	eval "$(go run github.com/euryale-ml/euryale/gpu/prepare -download)"
//	go build -tags gpu ./...
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/euryale-ml/euryale/gpu/sdk"
)

func main() {
	dir := flag.String("dir", "", "where to put it; by default a directory of the user's cache")
	download := flag.Bool("download", false, "download the CUDA headers when there is no toolkit")
	flag.Parse()
	if err := prepare(context.Background(), *dir, *download); err != nil {
		fmt.Fprintln(os.Stderr, "prepare:", err)
		os.Exit(1)
	}
}

func prepare(ctx context.Context, dir string, download bool) error {
	if dir == "" {
		cache, err := os.UserCacheDir()
		if err != nil {
			return fmt.Errorf("no place for the SDK: %w: use -dir", err)
		}
		dir = filepath.Join(cache, "euryale", "gpu-sdk")
	}
	include, err := sdk.Headers()
	if err != nil && download {
		var failed error
		include, failed = sdk.Download(ctx, dir)
		if failed != nil {
			return errors.Join(err, failed)
		}
	} else if err != nil {
		return err
	}
	s, err := sdk.Build(ctx, dir, include)
	if err != nil {
		return err
	}
	for _, v := range s.Env() {
		name, value, _ := strings.Cut(v, "=")
		fmt.Printf("export %s='%s'\n", name, strings.ReplaceAll(value, "'", `'\''`))
	}
	return nil
}
