package launch

import (
	"cmp"
	"context"
	"crypto/sha256"
	"debug/buildinfo"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"strings"
)

// platform is a system and an architecture, as Go names them.
type platform struct{ os, arch string }

func (p platform) String() string { return p.os + "/" + p.arch }

// here is the platform of this program.
func here() platform { return platform{runtime.GOOS, runtime.GOARCH} }

// platformOf reads what uname -s and uname -m print.
func platformOf(system, machine string) platform {
	switch machine {
	case "x86_64":
		machine = "amd64"
	case "aarch64":
		machine = "arm64"
	}
	return platform{strings.ToLower(system), machine}
}

// file is a file that is copied to hosts.
type file struct {
	path, name string
	hash       string // of its content; the name of the copy's directory
	size       int64
}

// newFile reads a file.
func newFile(path string) (file, error) {
	f, err := os.Open(path)
	if err != nil {
		return file{}, err
	}
	defer f.Close()
	h := sha256.New()
	size, err := io.Copy(h, f)
	// the script splits its input into words
	name := strings.Join(strings.Fields(filepath.Base(path)), " ")
	return file{path, cmp.Or(name, "program"), fmt.Sprintf("sha256-%x", h.Sum(nil)), size}, err
}

// newKit finds or builds the files that hosts of a platform get: this program and, unless it is the
// host's own, the job's.
func (c *cluster) newKit(ctx context.Context, p platform) ([]file, error) {
	program, err := c.programFor(ctx, p)
	if err != nil {
		return nil, err
	}
	path, err := os.Executable()
	if err != nil {
		return nil, fmt.Errorf("find this program: %w", err)
	}
	if p != here() {
		from := "."
		if isDir(c.job.Program) {
			from = c.job.Program
		}
		const command = "github.com/euryale-ml/euryale/cmd/euryale"
		path, err = c.builder.build(ctx, from, command, building(p))
		if err != nil {
			return nil, fmt.Errorf("this program is for %v, and the module at %s does not build "+
				"it for %v: run from a module that requires Euryale: %w", here(), from, p, err)
		}
	}
	launcher, err := newFile(path)
	launcher.name = "euryale"
	if err != nil || program == "" {
		return []file{launcher}, err
	}
	f, err := newFile(program)
	return []file{launcher, f}, err
}

// programFor returns the path of the job's program for a platform, "" if it is the host's own.
func (c *cluster) programFor(ctx context.Context, p platform) (string, error) {
	name := c.job.Program
	if !isDir(name) && !strings.Contains(filepath.ToSlash(name), "/") {
		return "", nil
	}
	path, err := c.builder.resolve(ctx, name, building(p)...)
	if of := builtFor(path); err == nil && of != p && of != (platform{}) {
		return "", fmt.Errorf("program %s is for %v, not for %v: give the directory of its Go "+
			"package, which is built for each host", name, of, p)
	}
	return path, err
}

// building returns the variables for a build for a platform. Unless cgo was asked for, the
// executable needs no library of the host.
func building(p platform) []string {
	env := []string{"GOOS=" + p.os, "GOARCH=" + p.arch}
	asked := os.Getenv("CGO_ENABLED") == "1" || strings.Contains(os.Getenv("GOFLAGS"), "-tags")
	if p != here() || !asked { // a C compiler for another platform is rarely there
		env = append(env, "CGO_ENABLED=0")
	}
	return env
}

// builtFor returns the platform of a Go program; the zero value for any other file.
func builtFor(path string) platform {
	return platform{setting(path, "GOOS"), setting(path, "GOARCH")}
}

// usesGPU reports whether a program is a Go program that was built with GPU support.
func usesGPU(path string) bool {
	return strings.Contains(","+setting(path, "-tags")+",", ",gpu,")
}

// setting returns a build setting of a Go program, "" if it is not recorded, or for any other file.
func setting(path, key string) string {
	info, err := buildinfo.ReadFile(path)
	if err != nil {
		return ""
	}
	for _, s := range info.Settings {
		if s.Key == key {
			return s.Value
		}
	}
	return ""
}
