package main

import (
	"bytes"
	"fmt"
	"go/parser"
	"go/token"
	"io/fs"
	"maps"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

const module = "github.com/euryale-ml/euryale"

// room is a box of the picture of packages: one package, or several that are drawn as one.
type room struct {
	title    string
	packages []string // patterns of path.Match, relative to the module
	kind     string   // its colour, a class of the picture
	others   string   // what it has besides the package of its title
}

// rooms are the boxes, from the top. An arrow may only point to a later one.
var rooms = []room{
	{"bench/train", []string{"bench/ab", "bench/blas", "bench/train"},
		"program", "bench/{ab,blas}"},
	{"cmd/euryale", []string{"cmd/euryale"}, "program", ""},
	{"examples", []string{"examples/*"}, "program", ""},
	{"fit", []string{"fit", "fit/curves", "fit/data", "fit/progress"},
		"training", "curves, data, progress"},
	{"models", []string{"models", "models/texts", "models/tokenizer"}, "training",
		"texts, tokenizer"},
	{"layers", []string{"layers"}, "training", ""},
	{"euryale", []string{".", "internal/session", "internal/buildlock"},
		"program", "internal/{session,buildlock}"},
	{"vm", []string{"vm"}, "training", ""},
	{"bucket", []string{"bucket"}, "training", ""},
	{"internal/vm/read", []string{"internal/vm/read", "internal/vm/samples"},
		"training", "samples"},
	{"ops/nn", []string{"ops/nn", "internal/defects"}, "training",
		"internal/defects"},
	{"internal/program", []string{"internal/program"}, "training", ""},
	{"backend/tcp", []string{"backend/tcp"}, "leaf", ""},
	{"backend/mpi", []string{"backend/mpi"}, "leaf", ""},
	{"internal/gpu", []string{"internal/gpu"}, "leaf", ""},
	{"internal/vm/exec", []string{"internal/vm/exec"}, "training", ""},
	{"backend/internal/hosted", []string{"backend/internal/hosted"}, "leaf", ""},
	{"internal/cuda", []string{"internal/cuda", "backend/cuda"}, "leaf", ""},
	{"internal/vm/plan", []string{"internal/vm/plan", "internal/vm/lower", "internal/vm/proof"},
		"training", "lower, proof"},
	{"backend/host", []string{"backend/host"}, "leaf", ""},
	{"internal/kernels/cuda", []string{"internal/kernels/cuda"}, "kernel", ""},
	{"internal/vm/ir", []string{"internal/vm/ir"}, "training", ""},
	{"autograd", []string{"autograd", "autograd/solver", "autograd/internal/checkpoint"},
		"training", "solver, internal/checkpoint"},
	{"ops", []string{"ops"}, "training", ""},
	{"internal/hierarchy", []string{"internal/hierarchy"}, "leaf", ""},
	{"backend/compress", []string{"backend/compress/*"}, "leaf", "half, sparse"},
	{"kernels/fuse", []string{"kernels/fuse"}, "kernel", ""},
	{"internal/bench", []string{"internal/bench", "internal/bench/chart", "bench/peers"},
		"program", "chart, peers"},
	{"internal/fault", []string{"internal/fault"}, "leaf", ""},
	{"observe", []string{"observe", "observe/*", "observe/internal/*"},
		"program", "metrics, report, straggler"},
	{"internal/group", []string{"internal/group"}, "leaf", ""},
	{"internal/kernels", []string{"internal/kernels", "internal/kernels/simd"}, "kernel", "simd"},
	{"internal/residence", []string{"internal/residence", "internal/safetensors", "internal/terms"},
		"training", "internal/{safetensors,terms}"},
	{"internal/launch", []string{"internal/launch"}, "program", ""},
	{"internal/files", []string{"internal/files", "internal/tuning"}, "leaf", "internal/tuning"},
	{"backend", []string{"backend"}, "contract", ""},
	{"rendezvous", []string{"rendezvous"}, "contract", ""},
}

// everywhere are packages that many import, and that import only each other: the picture names
// them, and has no arrows to them.
var everywhere = []string{
	"internal/awaited", "internal/elastic", "internal/env", "internal/exit", "internal/filelock",
	"internal/launchers", "internal/scale", "internal/sdk", "internal/serial", "internal/shm",
	"internal/spinwait", "internal/stock", "internal/sumtree", "internal/workers", "internal/gpu/*",
}

// aside are packages of tests and tools, which the picture leaves out.
var aside = []string{
	"internal/jobs", "internal/repolint", "internal/testing/*", "internal/tools/*",
	"backend/backendtest", "internal/vm/graphs", "internal/vm/interpret",
	"internal/kernels/cuda/gen", "kernels/fuse/gen",
}

// imports returns what each package of the module at root imports of the module, under whatever
// build tags, without its tests.
func imports(root string) (map[string][]string, error) {
	found := map[string][]string{}
	err := filepath.WalkDir(root, func(name string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case d.IsDir() && name != root && otherModule(name, d.Name()):
			return fs.SkipDir
		case d.IsDir() || !strings.HasSuffix(name, ".go") || strings.HasSuffix(name, "_test.go"):
			return nil
		}
		pkg, err := filepath.Rel(root, filepath.Dir(name))
		if err != nil {
			return err
		}
		imported, err := ofFile(name)
		pkg = filepath.ToSlash(pkg)
		found[pkg] = append(found[pkg], imported...)
		return err
	})
	return found, err
}

// otherModule reports whether the files of a directory are no packages of this module.
func otherModule(name, base string) bool {
	_, err := os.Stat(filepath.Join(name, "go.mod"))
	return err == nil || base == "testdata" || base == "vendor" || base == "out" ||
		base[0] == '.' || base[0] == '_'
}

// ofFile returns what a file imports of the module.
func ofFile(name string) (packages []string, err error) {
	f, err := parser.ParseFile(token.NewFileSet(), name, nil, parser.ImportsOnly)
	if err != nil {
		return nil, err
	}
	for _, spec := range f.Imports {
		imported, err := strconv.Unquote(spec.Path.Value)
		if err != nil {
			return nil, err
		}
		if imported == module {
			packages = append(packages, ".")
		} else if inside, ok := strings.CutPrefix(imported, module+"/"); ok {
			packages = append(packages, inside)
		}
	}
	return packages, nil
}

func matches(pkg string, patterns []string) bool {
	return slices.ContainsFunc(patterns, func(p string) bool {
		ok, _ := path.Match(p, pkg)
		return ok
	})
}

// roomOf returns the number of the room of a package, -1 if the picture has none.
func roomOf(pkg string) int {
	return slices.IndexFunc(rooms, func(r room) bool { return matches(pkg, r.packages) })
}

// arrows returns which rooms import which, without the arrows that follow from others. It is an
// error if a package has no room, or if an arrow does not point down.
func arrows(imports map[string][]string) (map[int][]int, error) {
	direct := map[int]map[int]bool{}
	for _, pkg := range slices.Sorted(maps.Keys(imports)) {
		from := roomOf(pkg)
		if from < 0 && !matches(pkg, everywhere) && !matches(pkg, aside) {
			return nil, fmt.Errorf("package %s has no room in the figure: give it one", pkg)
		}
		for _, imported := range imports[pkg] {
			to := roomOf(imported)
			switch {
			case matches(pkg, everywhere) && !matches(imported, everywhere):
				return nil, fmt.Errorf("%s imports %s, so it needs a room of its own", pkg,
					imported)
			case from < 0 || to < 0 || from == to:
				continue
			case from > to:
				return nil, fmt.Errorf("%s imports %s, which the figure has not below it", pkg,
					imported)
			case direct[from] == nil:
				direct[from] = map[int]bool{}
			}
			direct[from][to] = true
		}
	}
	reduced := map[int][]int{}
	for from, targets := range direct {
		for to := range targets {
			if !slices.ContainsFunc(slices.Collect(maps.Keys(targets)), func(via int) bool {
				return via != to && reaches(direct, via, to)
			}) {
				reduced[from] = append(reduced[from], to)
			}
		}
		slices.Sort(reduced[from])
	}
	return reduced, nil
}

func reaches(direct map[int]map[int]bool, from, to int) bool {
	for next := range direct[from] {
		if next == to || reaches(direct, next, to) {
			return true
		}
	}
	return false
}

// drawPackages writes the picture of the module at root, as text that GitHub draws.
func drawPackages(output, root string) error {
	found, err := imports(root)
	if err != nil {
		return err
	}
	from, err := arrows(found)
	if err != nil {
		return err
	}
	var text bytes.Buffer
	text.WriteString(head)
	for i, r := range rooms {
		if r.others != "" {
			r.title += "<br/><small>" + r.others + "</small>"
		}
		fmt.Fprintf(&text, "p%d[\"%s\"]:::%s\n", i, r.title, r.kind)
	}
	for i := range rooms {
		for _, to := range from[i] {
			fmt.Fprintf(&text, "p%d --> p%d\n", i, to)
		}
	}
	text.WriteString(colours)
	return os.WriteFile(output, text.Bytes(), 0o666)
}

// What is before and after the packages and the arrows.
const (
	head = `# What imports what

An arrow points from a package to one that it imports. Arrows that follow from others are left out,
as are tests, tools, and small packages that many import: see [packages](architecture.md#packages).
` + "`go run ./internal/tools/figure` writes this page.\n\n```mermaid\ngraph TD\n"
	colours = `classDef program fill:#8882,stroke:#888
classDef training fill:#58f3,stroke:#888
classDef leaf fill:#3c63,stroke:#888
classDef kernel fill:#f833,stroke:#888
classDef contract fill:#fc03,stroke:#888
` + "```\n"
)
