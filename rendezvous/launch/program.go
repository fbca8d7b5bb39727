package launch

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
)

// resolve returns the executable that name means, building it in dir if name is
// the directory of a Go package.
func resolve(name, dir string, stop <-chan os.Signal) (string, error) {
	info, err := os.Stat(name)
	if err == nil && info.IsDir() {
		return build(name, dir, stop)
	}
	if !strings.ContainsRune(name, filepath.Separator) {
		return lookPath(name, err == nil)
	}
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return "", fmt.Errorf("program %s does not exist: give the path of an executable or the directory of a Go package", name)
	case err != nil:
		return "", fmt.Errorf("program %s: %w", name, err)
	case filepath.Ext(name) == ".go":
		return "", fmt.Errorf("program %s is a Go file: give its directory, %s", name, "./"+filepath.Dir(name))
	case info.Mode().Perm()&0o111 == 0:
		return "", fmt.Errorf("program %s is not executable: run chmod +x on it, or give the directory of a Go package", name)
	}
	return filepath.Abs(name)
}

// lookPath finds a program without a path, as a shell does.
func lookPath(name string, here bool) (string, error) {
	path, err := exec.LookPath(name)
	switch {
	case err == nil:
		return filepath.Abs(path)
	case here:
		return "", fmt.Errorf("program %s is not in PATH: for the one in this directory write ./%s", name, name)
	}
	return "", fmt.Errorf("program %s was not found in PATH: give the path of an executable or the directory of a Go package", name)
}

// build builds the package in the directory pkg into dir.
func build(pkg, dir string, stop <-chan os.Signal) (string, error) {
	if files, _ := filepath.Glob(filepath.Join(pkg, "*.go")); len(files) == 0 {
		return "", fmt.Errorf("directory %s has no Go files: give the directory of a Go package with a main function, or an executable", pkg)
	}
	goTool, err := exec.LookPath("go")
	if err != nil {
		return "", fmt.Errorf("building %s needs the go command: put it in PATH, or give an executable", pkg)
	}
	// With a directory as its output, go build writes executables only.
	cmd := exec.Command(goTool, "build", "-o", dir+string(filepath.Separator), ".")
	cmd.Dir = pkg
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	var output bytes.Buffer
	cmd.Stdout, cmd.Stderr = &output, &output
	if err := runUntil(cmd, stop); err != nil {
		if _, interrupted := err.(*Interrupted); interrupted {
			return "", err
		}
		return "", fmt.Errorf("%s does not build (%w): correct this and run again:\n%s", pkg, err, bytes.TrimRight(output.Bytes(), "\n"))
	}
	built, err := os.ReadDir(dir)
	if err != nil || len(built) != 1 {
		return "", fmt.Errorf("%s is not a program: its package must be named main", pkg)
	}
	return filepath.Join(dir, built[0].Name()), nil
}

// runUntil runs a command that leads a process group, and kills the group when
// a signal comes.
func runUntil(cmd *exec.Cmd, stop <-chan os.Signal) error {
	if err := cmd.Start(); err != nil {
		return err
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	select {
	case err := <-ended:
		return err
	case s := <-stop:
		syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL)
		<-ended
		return &Interrupted{s}
	}
}
