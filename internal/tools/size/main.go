// Command size measures the module by a fixed rule, and compares it with numbers.txt beside it, as
// CI does, so that nobody adds to the module without a word:
//
//	go run ./internal/tools/size
//
// A number above its line there is an error, and so is one far below: whoever changes it changes
// the file, and says why in the commit. The numbers:
//
//   - library, tools and tests are lines of the tracked Go, C, CUDA, assembly and Python files that
//     are neither blank nor comments alone, nor written by a program. Tests are *_test.go files,
//     testdata, emulators, and the packages that no command, example or benchmark imports, however
//     far away: only tests and internal/tools use them. Tools are what develops and measures the
//     module, and its examples: bench, internal/bench, examples, internal/tools and the generators
//     of sources. The library is the rest, with cmd/euryale.
//   - exported is the number of exported package-level identifiers of importable packages:
//     constants, variables, functions and types, but not methods or fields.
//   - ptx are the lines of the kernels' PTX.
package main

import (
	"bytes"
	"cmp"
	"compress/gzip"
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
	"bench/", "examples/", "internal/bench/", "internal/tools/", "internal/kernels/simd/gen/",
	"internal/kernels/cuda/gen/", "kernels/fuse/gen/",
}

// comments are the tokens that begin a comment, by the ending of a file.
var comments = map[string]string{
	".go": "//", ".c": "//", ".h": "//", ".cpp": "//", ".cu": "//", ".cuh": "//", ".s": "//",
	".py":  "#",
	".ptx": "//",
}

// expected is the file of the numbers.
const expected = "internal/tools/size/numbers.txt"

func main() {
	if err := run(os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "size:", err)
		os.Exit(1)
	}
}

func run(w io.Writer) error {
	files, err := tracked()
	if err != nil {
		return err
	}
	now, err := measure(files)
	if err != nil {
		return err
	}
	fmt.Fprint(w, now)
	text, err := os.ReadFile(expected)
	if err != nil {
		return err
	}
	return compare(now, string(text))
}

// sizes are the numbers.
type sizes struct{ library, tools, tests, exported, ptx int }

const format = "library %d\ntools %d\ntests %d\nexported %d\nptx %d\n"

func (s sizes) String() string {
	return fmt.Sprintf(format, s.library, s.tools, s.tests, s.exported, s.ptx)
}

// slack is by how much a number may be less than the file says: a commit may take something away
// without a line there, and many may not.
const slack = 100

// compare returns an error for each number that is not as a file says.
func compare(now sizes, text string) (err error) {
	var before sizes
	if _, err := fmt.Sscanf(text, format, &before.library, &before.tools, &before.tests,
		&before.exported, &before.ptx); err != nil {
		return fmt.Errorf("%s: %w: it has to be as this command prints it", expected, err)
	}
	for _, n := range []struct {
		name        string
		now, before int
	}{
		{"library", now.library, before.library},
		{"tools", now.tools, before.tools},
		{"tests", now.tests, before.tests},
		{"exported", now.exported, before.exported},
		{"ptx", now.ptx, before.ptx},
	} {
		switch {
		case n.now > n.before:
			err = errors.Join(err, fmt.Errorf("%s has grown from %d to %d: take something away, "+
				"or change %s and say why in the commit", n.name, n.before, n.now, expected))
		case n.now < n.before-slack:
			err = errors.Join(err, fmt.Errorf("%s has shrunk from %d to %d: write that into %s",
				n.name, n.before, n.now, expected))
		}
	}
	return err
}

// measure counts what files have.
func measure(files []file) (s sizes, err error) {
	reached, err := product(files)
	if err != nil {
		return s, err
	}
	for _, f := range files {
		n := lines(f.text, comments[path.Ext(f.name)])
		switch {
		case path.Ext(f.name) == ".ptx":
			s.ptx += n
			continue
		case f.isTest(reached):
			s.tests += n
			continue
		case isGenerated(f.text): // its generator counts
		case slices.ContainsFunc(tools, func(dir string) bool {
			return strings.HasPrefix(f.name, dir)
		}):
			s.tools += n
		default:
			s.library += n
		}
		if path.Ext(f.name) == ".go" && importable(f.name) {
			more, err := identifiers(f.name, f.text)
			if err != nil {
				return s, err
			}
			s.exported += more
		}
	}
	return s, nil
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
	return strings.HasSuffix(f.name, "_test.go") || path.Base(dir) == "emulator" ||
		strings.Contains(f.name, "/testdata/") || known && !inside
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
