package launch

import (
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
	p := platform{strings.ToLower(system), machine}
	switch machine {
	case "x86_64":
		p.arch = "amd64"
	case "aarch64":
		p.arch = "arm64"
	}
	return p
}

// variables have go build make an executable that needs no library of the host, unless cgo was
// asked for.
func (p platform) variables() []string {
	env := []string{"GOOS=" + p.os, "GOARCH=" + p.arch}
	asked := os.Getenv("CGO_ENABLED") == "1" || strings.Contains(os.Getenv("GOFLAGS"), "-tags")
	if p != here() || !asked { // a C compiler for another platform is rarely there
		env = append(env, "CGO_ENABLED=0")
	}
	return env
}

// file is what hosts get a copy of.
type file struct {
	path, name string
	hash       string // of its content
	size       int64
}

// newFile reads a file.
func newFile(path, name string) (file, error) {
	f, err := os.Open(path)
	if err != nil {
		return file{}, err
	}
	defer f.Close()
	h := sha256.New()
	size, err := io.Copy(h, f)
	return file{path, name, fmt.Sprintf("%.16x", h.Sum(nil)), size}, err
}

// kit is what hosts of a platform get: this program, and the job's unless it is the host's own.
type kit struct {
	launcher file
	program  *file
}

// launcherPackage is this program's.
const launcherPackage = "github.com/euryale-ml/euryale/cmd/euryale"

// newKit finds or builds the files for a platform. What is built is in the directory that scratch
// makes.
func (j Job) newKit(ctx context.Context, p platform, scratch func() (string, error)) (k kit,
	err error) {
	if k.program, err = j.programFile(ctx, p, scratch); err != nil {
		return kit{}, err
	}
	path, err := os.Executable()
	if err != nil {
		return kit{}, fmt.Errorf("find this program: %w", err)
	}
	if p != here() {
		from := "."
		if isDir(j.Program) {
			from = j.Program
		}
		path, err = j.buildFor(ctx, p, from, launcherPackage, scratch)
		if err != nil {
			return kit{}, fmt.Errorf("this program is for %v, and the module at %s does not build "+
				"it for %v: run from a module that requires Euryale: %w", here(), from, p, err)
		}
	}
	k.launcher, err = newFile(path, "euryale")
	return k, err
}

// programFile returns the job's program for a platform, nil if it is the host's own.
func (j Job) programFile(ctx context.Context, p platform, scratch func() (string, error)) (*file,
	error) {
	path, err := j.Program, error(nil)
	switch {
	case isDir(path):
		path, err = j.buildFor(ctx, p, path, ".", scratch)
	case !strings.Contains(filepath.ToSlash(path), "/"):
		return nil, nil
	default:
		if path, err = find(path); err != nil {
			return nil, err
		}
		if of := builtFor(path); of != p && of != (platform{}) {
			return nil, fmt.Errorf("program %s is for %v, not for %v: give the directory of its "+
				"Go package, which is built for each host", j.Program, of, p)
		}
	}
	if err != nil {
		return nil, err
	}
	f, err := newFile(path, plainName(path))
	return &f, err
}

// buildFor builds a package for a platform.
func (j Job) buildFor(ctx context.Context, p platform, pkg, name string,
	scratch func() (string, error)) (string, error) {
	dir, err := scratch()
	if err != nil {
		return "", err
	}
	dir = filepath.Join(dir, fmt.Sprintf("%s-%s-%t", p.os, p.arch, name == "."))
	return build(ctx, pkg, name, dir, p.variables(), j.Signals)
}

func isDir(path string) bool {
	info, err := os.Stat(path)
	return err == nil && info.IsDir()
}

// builtFor returns the platform of a Go program, none if it is not one.
func builtFor(path string) (p platform) {
	info, err := buildinfo.ReadFile(path)
	if err != nil {
		return p
	}
	return platform{setting(info, "GOOS"), setting(info, "GOARCH")}
}

// setting returns how a Go program was built, "" if it does not say.
func setting(info *buildinfo.BuildInfo, key string) string {
	for _, s := range info.Settings {
		if s.Key == key {
			return s.Value
		}
	}
	return ""
}

// usesGPU reports whether a program is a Go program that was built with GPU support.
func usesGPU(path string) bool {
	info, err := buildinfo.ReadFile(path)
	return err == nil && strings.Contains(","+setting(info, "-tags")+",", ",gpu,")
}

// plainName is the name of a file as far as every shell takes it without quotes.
func plainName(path string) string {
	return strings.Map(func(c rune) rune {
		switch {
		case c >= 'a' && c <= 'z', c >= 'A' && c <= 'Z', c >= '0' && c <= '9', c == '.', c == '_',
			c == '-':
			return c
		}
		return '_'
	}, filepath.Base(path))
}
