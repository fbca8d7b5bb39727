package sdk

import (
	"bytes"
	"context"
	"crypto/sha256"
	"embed"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
)

//go:embed include libcuda requirements.txt
var files embed.FS

// SDK lists the directories that a build under tag gpu needs.
type SDK struct {
	Include []string // for the C compiler, in this order
	Lib     string   // for the linker, before any other
}

// Prepare makes the SDK in dir, with the headers of this machine's CUDA toolkit or, if there is
// none, with headers that it downloads into dir. If dir is empty, the SDK is in the user's cache.
func Prepare(ctx context.Context, dir string) (SDK, error) {
	if dir == "" {
		var err error
		if dir, err = cacheDir(); err != nil {
			return SDK{}, fmt.Errorf("%w: name a directory (euryale env --dir)", err)
		}
	}
	include, err := headers()
	if err != nil && !errors.Is(err, errNoToolkit) {
		return SDK{}, err
	}
	if err != nil {
		if include, err = download(ctx, dir); err != nil {
			return SDK{}, err
		}
	}
	return build(ctx, dir, include)
}

// cacheDir returns the directory of the user's cache for SDKs of this version. Each version has
// another one, because the go command rebuilds after changes of flags, but not of headers.
func cacheDir() (string, error) {
	cache, err := os.UserCacheDir()
	if err != nil {
		return "", fmt.Errorf("find the cache of the user: %w", err)
	}
	sum := sha256.New()
	err = fs.WalkDir(files, ".", func(name string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		text, err := files.ReadFile(name)
		fmt.Fprintf(sum, "%s %d\n%s", name, len(text), text)
		return err
	})
	if err != nil {
		return "", err
	}
	return filepath.Join(cache, "euryale", fmt.Sprintf("gpu-sdk-%x", sum.Sum(nil)[:6])), nil
}

// build makes the SDK in dir from the CUDA headers in include. It needs a C
// compiler (CC, else cc) and ar, as cgo does anyway.
func build(ctx context.Context, dir, include string) (SDK, error) {
	dir, err := filepath.Abs(dir)
	if err != nil {
		return SDK{}, fmt.Errorf("build libcuda.a: %w", err)
	}
	include, err = filepath.Abs(include)
	if err != nil {
		return SDK{}, fmt.Errorf("build libcuda.a: %w", err)
	}
	s := SDK{Include: []string{filepath.Join(dir, "include"), include},
		Lib: filepath.Join(dir, "lib")}
	if err := copyEmbedded(filepath.Join(s.Include[0], "cuda.h"), "include/cuda.h"); err != nil {
		return SDK{}, err
	}
	names, err := s.functions(ctx)
	if err != nil {
		return SDK{}, fmt.Errorf("build libcuda.a: %w", err)
	}
	if err := s.library(ctx, names); err != nil {
		return SDK{}, fmt.Errorf("build libcuda.a: %w", err)
	}
	return s, nil
}

// Env returns the environment variables of the go command, as NAME=value. The optimisation
// flags are the go command's defaults. The library path comes first, before a libcuda stub of a
// toolkit; libdl is part of libc on current systems and separate on older ones.
func (s SDK) Env() []string {
	flags := []string{"-g", "-O2"}
	for _, dir := range s.Include {
		flags = append(flags, quote("-I"+dir))
	}
	return []string{
		"CGO_ENABLED=1",
		"CGO_CFLAGS=" + strings.Join(flags, " "),
		"CGO_LDFLAGS=" + quote("-L"+s.Lib) + " -lcuda -ldl",
	}
}

// Script returns the environment as lines for a shell to evaluate.
func (s SDK) Script() string {
	var b strings.Builder
	for _, v := range s.Env() {
		name, value, _ := strings.Cut(v, "=")
		fmt.Fprintf(&b, "export %s='%s'\n", name, strings.ReplaceAll(value, "'", `'\''`))
	}
	return b.String()
}

// quote quotes a flag for the go command.
func quote(flag string) string {
	if !strings.ContainsAny(flag, " \t\"'") {
		return flag
	}
	if strings.Contains(flag, "'") {
		return `"` + flag + `"`
	}
	return "'" + flag + "'"
}

// declaration is a function of the driver API after the preprocessor has replaced each name by the
// versioned one.
var declaration = regexp.MustCompile(`\bCUresult\s+(cu[A-Z]\w*)\s*\(`)

// functions lists what the headers declare. Any version of gorgonia.org/cu calls a subset of it.
func (s SDK) functions(ctx context.Context) ([]string, error) {
	args := []string{"-E", "-P", "-x", "c"}
	for _, dir := range s.Include {
		args = append(args, "-I", dir)
	}
	text, err := output(ctx, compiler(), append(args, filepath.Join(s.Include[0], "cuda.h"))...)
	if err != nil {
		return nil, err
	}
	return parseFunctions(text)
}

func parseFunctions(text []byte) ([]string, error) {
	var names []string
	for _, m := range declaration.FindAllSubmatch(text, -1) {
		if name := string(m[1]); name != "cuInit" { // not a trampoline: see driver.c
			names = append(names, name)
		}
	}
	slices.Sort(names)
	names = slices.Compact(names)
	if len(names) == 0 {
		return nil, errors.New("cuda.h declares no functions: not a header of the CUDA driver API")
	}
	return names, nil
}

// library compiles libcuda.a.
func (s SDK) library(ctx context.Context, names []string) (err error) {
	tmp, err := os.MkdirTemp("", "euryale-sdk-")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(tmp)) }()

	var symbols bytes.Buffer
	for _, name := range names {
		fmt.Fprintln(&symbols, "FUNCTION", name)
	}
	if err := write(filepath.Join(tmp, "symbols.inc"), symbols.Bytes()); err != nil {
		return err
	}
	archive := filepath.Join(tmp, "libcuda.a")
	args := []string{"rcsD", archive}
	for _, source := range []string{"driver.c", "trampolines_" + runtime.GOARCH + ".S"} {
		object, err := s.compile(ctx, tmp, source)
		if err != nil {
			return err
		}
		args = append(args, object)
	}
	if err := run(ctx, "ar", args...); err != nil {
		return err
	}
	text, err := os.ReadFile(archive)
	if err != nil {
		return err
	}
	return write(filepath.Join(s.Lib, "libcuda.a"), text)
}

func (s SDK) compile(ctx context.Context, tmp, source string) (object string, err error) {
	name := filepath.Join(tmp, source)
	if err := copyEmbedded(name, "libcuda/"+source); err != nil {
		return "", err
	}
	object = name + ".o"
	return object, run(ctx, compiler(), "-O2", "-Wall", "-fPIC", "-I", tmp, "-c", "-o", object,
		name)
}

func compiler() string {
	if cc := os.Getenv("CC"); cc != "" {
		return cc
	}
	return "cc"
}

func copyEmbedded(to, name string) error {
	text, err := files.ReadFile(name)
	if err != nil {
		return fmt.Errorf("%s is not a part of this package: no CUDA on %s/%s? %w", name,
			runtime.GOOS, runtime.GOARCH, err)
	}
	return write(to, text)
}
