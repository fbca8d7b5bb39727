package launch

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"time"
)

// resolve returns the executable that name means. If resolve has built it, remove
// deletes it.
func resolve(ctx context.Context, name string, stop <-chan os.Signal) (path string, remove func(),
	err error) {
	if info, err := os.Stat(name); err != nil || !info.IsDir() {
		path, err = find(name)
		return path, func() {}, err
	}
	s, err := newScratch()
	if err != nil {
		return "", nil, err
	}
	if path, err = build(ctx, name, ".", s.path, nil, stop); err != nil {
		s.remove()
	}
	return path, s.remove, err
}

// find returns the path of an executable.
func find(name string) (string, error) {
	info, err := os.Stat(name)
	if !strings.Contains(filepath.ToSlash(name), "/") {
		return lookPath(name, err == nil)
	}
	if path, found := exec.LookPath(name); runtime.GOOS == "windows" && found == nil {
		return filepath.Abs(path) // with an end such as .exe
	}
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return "", fmt.Errorf("program %s does not exist: give the path of an executable or the "+
			"directory of a Go package", name)
	case err != nil:
		return "", fmt.Errorf("program %s: %w", name, err)
	case filepath.Ext(name) == ".go":
		return "", fmt.Errorf("program %s is a Go file: give its directory, %s", name,
			directory(name))
	case info.Mode().Perm()&0o111 == 0:
		return "", fmt.Errorf("program %s is not executable: run chmod +x on it, or give the "+
			"directory of a Go package", name)
	}
	return filepath.Abs(name)
}

// directory returns the path of the directory that a file is in, so that it
// cannot be taken for the name of a program.
func directory(file string) string {
	dir := filepath.Dir(file)
	if filepath.IsAbs(dir) || dir == "." || dir == ".." || strings.HasPrefix(dir, "../") {
		return dir
	}
	return "./" + dir
}

// lookPath finds a program without a path, as a shell does.
func lookPath(name string, here bool) (string, error) {
	path, err := exec.LookPath(name)
	switch {
	case err == nil:
		return filepath.Abs(path)
	case here:
		return "", fmt.Errorf("program %s is not in PATH: for the one in this directory write ./%s",
			name, name)
	}
	return "", fmt.Errorf("program %s was not found in PATH: give the path of an executable or "+
		"the directory of a Go package", name)
}

// build builds a package into dir, with more variables. It is named as from the directory pkg: "."
// is the one in it.
func build(ctx context.Context, pkg, name, dir string, more []string, stop <-chan os.Signal) (
	string, error) {
	if files, _ := filepath.Glob(filepath.Join(pkg, "*.go")); len(files) == 0 && name == "." {
		return "", fmt.Errorf("directory %s has no Go files: give the directory of a Go package "+
			"with a main function, or an executable", pkg)
	}
	goTool, err := exec.LookPath("go")
	if err != nil {
		return "", fmt.Errorf("building %s needs the go command: put it in PATH, or give an "+
			"executable", pkg)
	}
	bin, temp := filepath.Join(dir, "bin"), filepath.Join(dir, "tmp")
	if err := errors.Join(os.MkdirAll(bin, 0o700), os.MkdirAll(temp, 0o700)); err != nil {
		return "", fmt.Errorf("make the directories to build in: %w", err)
	}
	// With a directory as its output, go build writes executables only. As go run does, it notes no
	// commit: git refuses to read a checkout that is another user's, as in a container.
	cmd := exec.Command(goTool, "build", "-buildvcs=false", "-o", bin+string(filepath.Separator),
		name)
	cmd.Dir = pkg
	// a build that is killed leaves its files there
	cmd.Env = append(append(cmd.Environ(), "TMPDIR="+temp, "GOTMPDIR="+temp), more...)
	var output bytes.Buffer
	cmd.Stdout, cmd.Stderr = &output, &output
	err, stopped := runUntil(ctx, cmd, stop)
	if stopped {
		return "", err
	}
	notMain := fmt.Errorf("%s is not a program: its package must be named main", pkg)
	if bytes.Contains(output.Bytes(), []byte("no main packages")) {
		return "", notMain
	}
	if err != nil {
		return "", fmt.Errorf("%s does not build (%w): correct this and run again:\n%s", pkg, err,
			bytes.TrimRight(output.Bytes(), "\n"))
	}
	built, err := os.ReadDir(bin)
	if err != nil || len(built) != 1 {
		return "", notMain
	}
	return filepath.Join(bin, built[0].Name()), nil
}

// runUntil runs a command. When a signal comes or ctx ends it is stopped: its family is killed, and
// the error says why.
func runUntil(ctx context.Context, cmd *exec.Cmd, stop <-chan os.Signal) (err error, stopped bool) {
	f, err := start(cmd)
	if err != nil {
		return err, false
	}
	defer f.release()
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	select {
	case err := <-ended:
		return err, false
	case s := <-stop:
		err = &Interrupted{s}
	case <-ctx.Done():
		err = context.Cause(ctx)
	}
	f.send(syscall.SIGKILL)
	select {
	case <-ended:
	case <-time.After(defaultTimes().kill): // the kernel holds it, as a hung file system does
	}
	return err, true
}
