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
	"time"
)

// builder builds programs.
type builder struct {
	stop    <-chan os.Signal // ends a build
	guard   *guard           // of builds
	scratch *scratch         // nil before something is built
	notice  func(text string)
}

// slow is how long a build takes that says when it is done.
const slow = 5 * time.Second

// remove deletes what was built.
func (b *builder) remove() {
	if b.scratch != nil {
		b.scratch.remove()
	}
}

// resolve returns the executable for name. If name is a directory, resolve builds it, with more
// variables.
func (b *builder) resolve(ctx context.Context, name string, more ...string) (string, error) {
	if !isDir(name) {
		return find(name)
	}
	if path, err := exec.LookPath(name); err == nil && !strings.ContainsAny(name, `/\`) {
		return "", fmt.Errorf("program %[1]s is a directory here, and %[2]s in PATH: write "+
			"./%[1]s for the Go package in the directory, or %[2]s", name, path)
	}
	began := time.Now()
	b.notice("building the Go package in " + name)
	path, err := b.build(ctx, name, ".", more)
	if took := time.Since(began); err == nil && took > slow {
		b.notice(fmt.Sprintf("built it in %.0f s", took.Seconds()))
	}
	return path, err
}

func isDir(path string) bool {
	info, err := os.Stat(path)
	return err == nil && info.IsDir()
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

// directory returns the path of a file's directory, in a form that cannot be taken for the name of
// a program.
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

// build builds a package, with more variables. name is relative to the directory pkg: "." is the
// package in it.
func (b *builder) build(ctx context.Context, pkg, name string, more []string) (string, error) {
	if files, _ := filepath.Glob(filepath.Join(pkg, "*.go")); len(files) == 0 && name == "." {
		return "", fmt.Errorf("directory %s has no Go files: give the directory of a Go package "+
			"with a main function, or an executable", pkg)
	}
	goTool, err := exec.LookPath("go")
	if err != nil {
		return "", fmt.Errorf("building %s needs the go command: put it in PATH, or give an "+
			"executable", pkg)
	}
	if b.scratch == nil {
		if b.scratch, err = newScratch(); err != nil {
			return "", err
		}
		b.guard.tell("d", b.scratch.path)
	}
	bin, err := os.MkdirTemp(b.scratch.path, "bin")
	if err != nil {
		return "", fmt.Errorf("make a directory to build in: %w", err)
	}
	// With a directory as its output, go build writes executables only. Like go run, it records no
	// commit: git refuses to read a checkout that belongs to another user, as in a container.
	cmd := exec.Command(goTool, "build", "-buildvcs=false", "-o", bin+string(filepath.Separator),
		name)
	cmd.Dir = pkg
	temp := b.scratch.path // a killed build leaves its files there
	cmd.Env = append(append(cmd.Environ(), "TMPDIR="+temp, "GOTMPDIR="+temp), more...)
	var output bytes.Buffer
	cmd.Stdout, cmd.Stderr = &output, &output
	p := process{cmd: cmd, guard: b.guard}
	if err := p.start(); err != nil {
		return "", fmt.Errorf("start %s: %w", goTool, err)
	}
	e, err := p.end(ctx, b.stop)
	notMain := fmt.Errorf("%s is not a program: its package must be named main", pkg)
	switch {
	case err != nil:
		return "", err
	case bytes.Contains(output.Bytes(), []byte("no main packages")):
		return "", notMain
	case !e.well():
		return "", fmt.Errorf("%s does not build (%s): correct this and run again:\n%s", pkg,
			e.how(), bytes.TrimRight(output.Bytes(), "\n"))
	}
	built, err := os.ReadDir(bin)
	if err != nil || len(built) != 1 {
		return "", notMain
	}
	return filepath.Join(bin, built[0].Name()), nil
}
