// Command systems checks that the module compiles for other systems:
//
//	go run ./internal/tools/systems darwin/arm64 windows/amd64
//
// It checks types, those of tests, too, and that functions without a body are in assembly, which it
// assembles. No machine code is made of Go: to compile all that is imported for one system takes as
// long as to check five. Bodies of other modules' functions are not looked at.
package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"go/ast"
	"go/build"
	"go/parser"
	"go/token"
	"go/types"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

func main() {
	if err := check(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "systems:", err)
		os.Exit(1)
	}
}

// check checks the systems side by side, each named as go tool dist list does.
func check(names []string) error {
	all := make(chan error)
	for _, name := range names {
		go func() {
			err := checkSystem(name)
			if err != nil {
				err = fmt.Errorf("%s: %w", name, err)
			}
			all <- err
		}()
	}
	var errs []error
	for range names {
		errs = append(errs, <-all)
	}
	return errors.Join(errs...)
}

// listed is what go list says of a package.
type listed struct {
	ImportPath, Dir string
	GoFiles, SFiles []string
	ImportMap       map[string]string // of vendored packages
	Module          *struct {
		Main      bool
		GoVersion string
	}
}

// checkSystem checks the packages of the module, and of what they import the declarations.
func checkSystem(name string) error {
	goos, goarch, ok := strings.Cut(name, "/")
	sizes := types.SizesFor("gc", goarch)
	if !ok || sizes == nil {
		return errors.New("unknown: want GOOS/GOARCH")
	}
	list := exec.Command("go", "list", "-deps", "-test",
		"-json=ImportPath,Dir,GoFiles,SFiles,ImportMap,Module", "./...")
	list.Env = append(list.Environ(), "GOOS="+goos, "GOARCH="+goarch, "CGO_ENABLED=0")
	list.Stderr = os.Stderr
	out, err := list.Output()
	if err != nil {
		return fmt.Errorf("go list: %w", err)
	}
	s := system{goos, goarch, sizes, token.NewFileSet(),
		map[string]*types.Package{"unsafe": types.Unsafe}}
	for d := json.NewDecoder(bytes.NewReader(out)); ; { // imported ones come first
		var p listed
		if err := d.Decode(&p); errors.Is(err, io.EOF) {
			return nil
		} else if err != nil {
			return err
		}
		if err := s.add(p); err != nil {
			return err
		}
	}
}

// system is one for which packages are checked.
type system struct {
	goos, goarch string
	sizes        types.Sizes
	files        *token.FileSet
	packages     map[string]*types.Package
}

// add checks a package and keeps it for those that import it.
func (s *system) add(p listed) error {
	if p.ImportPath == "unsafe" || strings.HasSuffix(p.ImportPath, ".test") { // has no sources
		return nil
	}
	ours := p.Module != nil && p.Module.Main
	var errs []error
	config := types.Config{Sizes: s.sizes, IgnoreFuncBodies: !ours, Importer: importer{s, p},
		Error: func(err error) { errs = append(errs, err) }}
	if p.Module != nil && p.Module.GoVersion != "" {
		config.GoVersion = "go" + p.Module.GoVersion
	}
	var files []*ast.File
	for _, name := range p.GoFiles {
		file, err := parser.ParseFile(s.files, filepath.Join(p.Dir, name), nil,
			parser.SkipObjectResolution)
		if err != nil {
			return err
		}
		if ours && len(p.SFiles) == 0 {
			errs = append(errs, s.bodiless(file)...)
		}
		files = append(files, file)
	}
	s.packages[p.ImportPath], _ = config.Check(p.ImportPath, s.files, files, nil) // errs has it
	if ours {
		errs = append(errs, s.assemble(p))
	}
	return errors.Join(errs...)
}

// bodiless returns an error for each function that only assembly could have.
func (s *system) bodiless(file *ast.File) (errs []error) {
	for _, d := range file.Decls {
		if f, ok := d.(*ast.FuncDecl); ok && f.Body == nil {
			errs = append(errs, fmt.Errorf("%s: %s has no body, and its package no assembly",
				s.files.Position(f.Pos()), f.Name.Name))
		}
	}
	return errs
}

// assemble assembles the assembly of a package.
func (s *system) assemble(p listed) error {
	if len(p.SFiles) == 0 {
		return nil
	}
	dir, err := os.MkdirTemp("", "euryale-systems-") // asm removes what it could not write
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	cmd := exec.Command("go", append([]string{"tool", "asm", "-p", p.ImportPath,
		"-o", filepath.Join(dir, "out.o"),
		"-I", filepath.Join(build.Default.GOROOT, "pkg", "include"),
		"-D", "GOOS_" + s.goos, "-D", "GOARCH_" + s.goarch}, p.SFiles...)...)
	cmd.Dir = p.Dir
	cmd.Env = append(cmd.Environ(), "GOOS="+s.goos, "GOARCH="+s.goarch)
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("assembly of %s: %w\n%s", p.ImportPath, err, out)
	}
	return nil
}

// importer finds what one package imports.
type importer struct {
	*system
	p listed
}

func (i importer) Import(path string) (*types.Package, error) {
	if vendored, ok := i.p.ImportMap[path]; ok {
		path = vendored
	}
	if p := i.packages[path]; p != nil {
		return p, nil
	}
	return nil, fmt.Errorf("%s is not listed", path)
}
