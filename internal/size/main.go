// Command size measures the module by a fixed rule, so that two states of it can be compared:
//
//	go test -json ./... | go run ./internal/size
//
// It prints one line, code=… test=… generated=… exported=… scenarios=…:
//
//   - code and test are lines of the tracked Go, C, CUDA, assembly and Python files that are
//     neither blank nor comments alone. Test are *_test.go files and the packages that only
//     tests use; code is the rest.
//   - generated are the lines of such files that a program has written, and that are in neither: their
//     generator is. Kernels as PTX are in none of the three.
//   - exported is the number of exported package-level identifiers of importable packages:
//     constants, variables, functions and types, but not methods or fields.
//   - scenarios is the number of tests and subtests without subtests of their own that the
//     run on standard input has passed.
package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
)

// testOnly are the directories whose code serves tests alone.
var testOnly = []string{
	"backend/backendtest", "backend/guard", "backend/fakedevice", "backend/gpu/emulator",
	"kernels/cuda/emulator", "internal/jobtest", "internal/proctest", "internal/testranks", "internal/testenv", "internal/places",
	"vm/internal/graphs", "vm/internal/interpret",
}

// comments are the tokens that begin a comment, by the ending of a file.
var comments = map[string]string{
	".go": "//", ".c": "//", ".h": "//", ".cpp": "//", ".cu": "//", ".cuh": "//", ".s": "//", ".py": "#",
}

func main() {
	if err := run(os.Stdout, os.Stdin); err != nil {
		fmt.Fprintln(os.Stderr, "size:", err)
		os.Exit(1)
	}
}

func run(w io.Writer, tests io.Reader) error {
	listed, err := exec.Command("git", "ls-files").Output()
	if err != nil {
		return fmt.Errorf("git ls-files: %w", err)
	}
	var code, test, generated, exported int
	for name := range strings.Lines(string(listed)) {
		name = strings.TrimSpace(name)
		comment, ok := comments[filepath.Ext(name)]
		if !ok {
			continue
		}
		text, err := os.ReadFile(name)
		if errors.Is(err, os.ErrNotExist) {
			continue // deleted, and not yet committed
		}
		if err != nil {
			return err
		}
		n := lines(text, comment)
		switch {
		case isTest(name):
			test += n
			continue
		case isGenerated(text):
			generated += n
		default:
			code += n
		}
		if filepath.Ext(name) == ".go" && importable(name) {
			more, err := identifiers(name, text)
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
	_, err = fmt.Fprintf(w, "code=%d test=%d generated=%d exported=%d scenarios=%d\n", code, test, generated, exported, scenarios)
	return err
}

func isTest(name string) bool {
	return strings.HasSuffix(name, "_test.go") ||
		slices.ContainsFunc(testOnly, func(dir string) bool { return strings.HasPrefix(name, dir+"/") })
}

// isGenerated reports whether a file says, as Go's tools want it, that a program has written it.
func isGenerated(text []byte) bool { return bytes.HasPrefix(text, []byte("// Code generated ")) }

// importable reports whether a user's program can import the package of a file.
func importable(name string) bool {
	return !strings.Contains("/"+name, "/internal/") && !strings.HasPrefix(name, "cmd/") && !strings.HasPrefix(name, "examples/")
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
