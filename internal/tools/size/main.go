// Command size measures the module by a fixed rule, so that two states of it can be compared:
//
//	go test -json ./... | go run ./internal/tools/size
//
// It prints one line, library=… tools=… test=… generated=… ptx=… exported=… scenarios=…:
//
//   - library, tools and test are lines of the tracked Go, C, CUDA, assembly and Python files that
//     are neither blank nor comments alone. Test are *_test.go files, emulators, and the packages
//     that no command, example or benchmark imports, however far away: only tests and
//     internal/tools use them. Tools are what develops and measures the module, and its examples:
//     bench, internal/bench, examples, internal/tools and the generators of sources. The library
//     is the rest, with cmd/euryale.
//   - generated are the lines of such files that a program has written, and that are in none of
//     them: their generator is.
//   - ptx are the lines of the kernels' PTX.
//   - exported is the number of exported package-level identifiers of importable packages:
//     constants, variables, functions and types, but not methods or fields.
//   - scenarios is the number of tests and subtests without subtests of their own that the
//     run on standard input has passed.
package main

import (
	"bufio"
	"bytes"
	"cmp"
	"compress/gzip"
	"encoding/json"
	"errors"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io"
	"os"
	"os/exec"
	"path"
	"slices"
	"strings"
)

const module = "github.com/euryale-ml/euryale"

// tools are the directories of what develops and measures the module, and of its examples.
var tools = []string{
	"bench/", "examples/", "internal/bench/", "internal/tools/", "kernels/internal/simd/gen/",
	"kernels/cuda/gen/", "kernels/fuse/gen/",
}

// comments are the tokens that begin a comment, by the ending of a file.
var comments = map[string]string{
	".go": "//", ".c": "//", ".h": "//", ".cpp": "//", ".cu": "//", ".cuh": "//", ".s": "//",
	".py":  "#",
	".ptx": "//",
}

func main() {
	if err := run(os.Stdout, os.Stdin); err != nil {
		fmt.Fprintln(os.Stderr, "size:", err)
		os.Exit(1)
	}
}

func run(w io.Writer, tests io.Reader) error {
	files, err := tracked()
	if err != nil {
		return err
	}
	reached, err := product(files)
	if err != nil {
		return err
	}
	var library, tool, test, generated, ptx, exported int
	for _, f := range files {
		n := lines(f.text, comments[path.Ext(f.name)])
		switch {
		case path.Ext(f.name) == ".ptx":
			ptx += n
			continue
		case f.isTest(reached):
			test += n
			continue
		case isGenerated(f.text):
			generated += n
		case slices.ContainsFunc(tools, func(dir string) bool {
			return strings.HasPrefix(f.name, dir)
		}):
			tool += n
		default:
			library += n
		}
		if path.Ext(f.name) == ".go" && importable(f.name) {
			more, err := identifiers(f.name, f.text)
			if err != nil {
				return err
			}
			exported += more
		}
	}
	scenarios, err := leaves(tests)
	if err != nil {
		return err
	}
	_, err = fmt.Fprintf(w, "library=%d tools=%d test=%d generated=%d ptx=%d exported=%d "+
		"scenarios=%d\n",
		library, tool, test, generated, ptx, exported, scenarios)
	return err
}

// file is a file that counts; its name is relative to the module.
type file struct {
	name string
	text []byte
}

// tracked returns the files that count.
func tracked() (files []file, err error) {
	listed, err := exec.Command("git", "ls-files").Output()
	if err != nil {
		return nil, fmt.Errorf("git ls-files: %w", err)
	}
	for name := range strings.Lines(string(listed)) {
		name = strings.TrimSpace(name)
		plain, zipped := strings.CutSuffix(name, ".gz")
		if comments[path.Ext(plain)] == "" {
			continue
		}
		text, err := os.ReadFile(name)
		if errors.Is(err, os.ErrNotExist) {
			continue // deleted, and not yet committed
		}
		if err == nil && zipped {
			text, err = unzip(text)
		}
		if err != nil {
			return nil, err
		}
		files = append(files, file{plain, text})
	}
	return files, nil
}

func unzip(text []byte) ([]byte, error) {
	r, err := gzip.NewReader(bytes.NewReader(text))
	if err != nil {
		return nil, err
	}
	return io.ReadAll(r)
}

// isTest reports whether only tests use a file. reached is what product returns.
func (f file) isTest(reached map[string]bool) bool {
	dir := path.Dir(f.name)
	inside, known := reached[dir]
	return strings.HasSuffix(f.name, "_test.go") || path.Base(dir) == "emulator" || known && !inside
}

// product says of each directory of Go files whether a command, an example or a benchmark imports
// its package, however far away, or is it. Those of internal/tools do not count.
func product(files []file) (reached map[string]bool, err error) {
	reached = map[string]bool{}
	imports := map[string][]string{}
	var next []string
	for _, f := range files {
		if path.Ext(f.name) != ".go" || strings.HasSuffix(f.name, "_test.go") {
			continue
		}
		parsed, err := parser.ParseFile(token.NewFileSet(), f.name, f.text, parser.ImportsOnly)
		if err != nil {
			return nil, err
		}
		dir := path.Dir(f.name)
		tool := strings.HasPrefix(dir, "internal/tools/")
		reached[dir] = reached[dir] || tool
		for _, spec := range parsed.Imports {
			if imported, ok := strings.CutPrefix(strings.Trim(spec.Path.Value, `"`), module); ok {
				imports[dir] = append(imports[dir], cmp.Or(strings.TrimPrefix(imported, "/"), "."))
			}
		}
		if parsed.Name.Name == "main" && !tool {
			next = append(next, dir)
		}
	}
	for len(next) > 0 {
		dir := next[0]
		next = next[1:]
		if !reached[dir] {
			reached[dir] = true
			next = append(next, imports[dir]...)
		}
	}
	return reached, nil
}

// isGenerated reports whether a file says, as Go's tools want it, that a program has written it.
func isGenerated(text []byte) bool { return bytes.HasPrefix(text, []byte("// Code generated ")) }

// importable reports whether a user's program can import the package of a file.
func importable(name string) bool {
	return !strings.Contains("/"+name, "/internal/") && !strings.HasPrefix(name, "cmd/") &&
		!strings.HasPrefix(name, "examples/")
}

// lines counts those that are neither blank nor a comment alone.
func lines(text []byte, comment string) (n int) {
	for line := range bytes.Lines(text) {
		line = bytes.TrimSpace(line)
		if len(line) > 0 && !bytes.HasPrefix(line, []byte(comment)) {
			n++
		}
	}
	return n
}

// identifiers counts what a Go file exports at package level.
func identifiers(name string, text []byte) (n int, err error) {
	file, err := parser.ParseFile(token.NewFileSet(), name, text, parser.SkipObjectResolution)
	if err != nil {
		return 0, err
	}
	if file.Name.Name == "main" {
		return 0, nil
	}
	count := func(ids ...*ast.Ident) {
		for _, id := range ids {
			if id.IsExported() {
				n++
			}
		}
	}
	for _, d := range file.Decls {
		switch d := d.(type) {
		case *ast.FuncDecl:
			if d.Recv == nil {
				count(d.Name)
			}
		case *ast.GenDecl:
			for _, s := range d.Specs {
				switch s := s.(type) {
				case *ast.TypeSpec:
					count(s.Name)
				case *ast.ValueSpec:
					count(s.Names...)
				}
			}
		}
	}
	return n, nil
}

// event is a line of go test -json.
type event struct{ Action, Package, Test string }

// leaves counts the tests that have passed and that no other test is a part of.
func leaves(tests io.Reader) (int, error) {
	passed, parents := map[event]bool{}, map[event]bool{}
	in := bufio.NewReader(tests)
	for {
		line, err := in.ReadBytes('\n')
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return 0, fmt.Errorf("read the tests: %w", err)
		}
		var e event
		if err := json.Unmarshal(line, &e); err != nil {
			return 0, fmt.Errorf("read the tests: %w: pipe go test -json into this command", err)
		}
		if e.Test == "" || e.Action != "pass" {
			continue
		}
		passed[event{"", e.Package, e.Test}] = true
		if i := strings.LastIndexByte(e.Test, '/'); i > 0 {
			parents[event{"", e.Package, e.Test[:i]}] = true
		}
	}
	n := 0
	for e := range passed {
		if !parents[e] {
			n++
		}
	}
	return n, nil
}
