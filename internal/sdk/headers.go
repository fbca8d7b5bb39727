package sdk

import (
	"archive/zip"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"strings"
)

// errNoToolkit: no toolkit was named, and the usual places have none.
var errNoToolkit = errors.New("no CUDA headers")

// headers returns the include directory of the CUDA toolkit of this machine:
// that of CUDA_HOME or CUDA_PATH, else the usual places.
func headers() (include string, err error) {
	for _, name := range []string{"CUDA_HOME", "CUDA_PATH"} {
		root := os.Getenv(name)
		if root == "" {
			continue
		}
		if include, err := headersIn(root); err == nil {
			return include, nil
		}
		return "", fmt.Errorf("no CUDA headers: %s is %s, which has no include/cuda.h", name, root)
	}
	roots := []string{"/usr/local/cuda", "/opt/cuda", "/usr"}
	for _, root := range roots {
		if include, err := headersIn(root); err == nil {
			return include, nil
		}
	}
	return "", fmt.Errorf("%w in %s: set CUDA_HOME, or let them be downloaded", errNoToolkit,
		strings.Join(roots, ", "))
}

func headersIn(root string) (include string, err error) {
	include = filepath.Join(root, "include")
	_, err = os.Stat(filepath.Join(include, "cuda.h"))
	return include, err
}

// download gets the CUDA headers into dir, with pip, and returns their include directory. It pins
// the version and checks its hash. It does nothing if the headers are there already.
func download(ctx context.Context, dir string) (include string, err error) {
	root := filepath.Join(dir, "cuda")
	if include, err := headersIn(root); err == nil {
		return include, nil
	}
	tmp, err := os.MkdirTemp("", "euryale-sdk-")
	if err != nil {
		return "", fmt.Errorf("download CUDA headers: %w", err)
	}
	defer func() { err = errors.Join(err, os.RemoveAll(tmp)) }()

	requirements := filepath.Join(tmp, "requirements.txt")
	if err := copyEmbedded(requirements, "requirements.txt"); err != nil {
		return "", err
	}
	err = run(ctx, "python3", "-m", "pip", "download", "--quiet", "--disable-pip-version-check",
		"--no-deps",
		"--only-binary=:all:", "--require-hashes", "--requirement", requirements, "--dest", tmp)
	if err != nil {
		return "", fmt.Errorf("download CUDA headers: %w: it takes Python's pip and PyPI; or "+
			"install a CUDA toolkit and name it in CUDA_HOME", err)
	}
	wheels, err := filepath.Glob(filepath.Join(tmp, "*.whl"))
	if err == nil && len(wheels) != 1 {
		err = fmt.Errorf("got %d wheels, want 1", len(wheels))
	}
	if err != nil {
		return "", fmt.Errorf("download CUDA headers: %w", err)
	}
	include = filepath.Join(root, "include")
	if err := unpackHeader(wheels[0], include); err != nil {
		return "", fmt.Errorf("download CUDA headers: %w", err)
	}
	return include, nil
}

// unpackHeader takes cuda.h out of a wheel. The driver API needs no other file.
func unpackHeader(wheel, include string) error {
	r, err := zip.OpenReader(wheel)
	if err != nil {
		return err
	}
	defer r.Close()
	for _, f := range r.File {
		if path.Base(path.Dir(f.Name)) != "include" || path.Base(f.Name) != "cuda.h" {
			continue
		}
		header, err := f.Open()
		if err != nil {
			return err
		}
		defer header.Close()
		text, err := io.ReadAll(header)
		if err != nil {
			return err
		}
		return write(filepath.Join(include, "cuda.h"), text)
	}
	return fmt.Errorf("no include/cuda.h in %s", filepath.Base(wheel))
}

// run runs a command; its error contains the output.
func run(ctx context.Context, name string, args ...string) error {
	_, err := output(ctx, name, args...)
	return err
}

func output(ctx context.Context, name string, args ...string) ([]byte, error) {
	out, err := exec.CommandContext(ctx, name, args...).Output()
	if err == nil {
		return out, nil
	}
	if exit, ok := errors.AsType[*exec.ExitError](err); ok && len(exit.Stderr) > 0 {
		return nil, fmt.Errorf("%s: %w: %s", name, err, strings.TrimSpace(string(exit.Stderr)))
	}
	return nil, fmt.Errorf("%s: %w", name, err)
}

// write writes a file whole or not at all, and makes its directory.
func write(name string, text []byte) error {
	if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
		return err
	}
	tmp, err := os.CreateTemp(filepath.Dir(name), filepath.Base(name)+".new-*")
	if err != nil {
		return err
	}
	_, err = tmp.Write(text)
	err = errors.Join(err, tmp.Chmod(0o644), tmp.Close())
	if err == nil {
		err = os.Rename(tmp.Name(), name)
	}
	if err != nil {
		return errors.Join(err, os.Remove(tmp.Name()))
	}
	return nil
}
