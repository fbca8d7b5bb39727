package main

import (
	"cmp"
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
	x        int      // of its centre
	kind     string   // its colour, a class of the style
	others   string   // what it has besides the package of its title
}

// rooms are the rows of the picture, from the top. An arrow may only point down.
var rooms = [][]room{
	{
		{"bench/train", []string{"bench/ab", "bench/blas", "bench/train"}, 64, "program",
			"bench/{ab,blas}"},
		{"cmd/euryale", []string{"cmd/euryale"}, 200, "program", ""},
		{"examples", []string{"examples/*"}, 620, "program", ""},
	}, {
		{"fit", []string{"fit", "fit/curves", "fit/data", "fit/progress"}, 760, "graph",
			"curves, data, progress"},
		{"models", []string{"models", "models/tokenizer"}, 910, "graph", "tokenizer"},
	}, {
		{"layers", []string{"layers"}, 910, "graph", ""},
	}, {
		{"euryale", []string{".", "internal/session", "internal/buildlock"}, 335, "program",
			"internal/{session,buildlock}"},
		{"vm", []string{"vm"}, 690, "graph", ""},
	}, {
		{"internal/vm/read", []string{"internal/vm/read", "internal/vm/samples"}, 790, "graph",
			"samples"},
	}, {
		{"ops/nn", []string{"ops/nn"}, 910, "graph", ""},
	}, {
		{"internal/program", []string{"internal/program"}, 876, "graph", ""},
	}, {
		{"backend/tcp", []string{"backend/tcp"}, 275, "leaf", ""},
		{"backend/mpi", []string{"backend/mpi"}, 385, "leaf", ""},
		{"internal/gpu", []string{"internal/gpu"}, 512, "leaf", ""},
		{"internal/vm/exec", []string{"internal/vm/exec"}, 640, "graph", ""},
	}, {
		{"backend/internal/hosted", []string{"backend/internal/hosted"}, 330, "leaf", ""},
		{"internal/cuda", []string{"internal/cuda", "backend/cuda"}, 525, "leaf", ""},
		{"internal/vm/plan", []string{"internal/vm/plan", "internal/vm/lower",
			"internal/vm/proof"}, 660, "graph", "lower, proof"},
	}, {
		{"backend/host", []string{"backend/host"}, 345, "leaf", ""},
		{"internal/kernels/cuda", []string{"internal/kernels/cuda"}, 495, "kernel", ""},
		{"internal/vm/ir", []string{"internal/vm/ir"}, 605, "graph", ""},
		{"autograd", []string{"autograd", "autograd/solver", "autograd/internal/checkpoint"}, 738,
			"graph", "solver, internal/checkpoint"},
		{"ops", []string{"ops"}, 965, "graph", ""},
	}, {
		{"internal/hierarchy", []string{"internal/hierarchy"}, 215, "leaf", ""},
		{"backend/compress", []string{"backend/compress/*"}, 370, "leaf", "half, sparse"},
		{"kernels/fuse", []string{"kernels/fuse"}, 560, "kernel", ""},
	}, {
		{"internal/bench", []string{"internal/bench", "internal/bench/chart", "bench/peers"}, 62,
			"program", "chart, peers"},
		{"internal/fault", []string{"internal/fault"}, 200, "leaf", ""},
		{"observe", []string{"observe", "observe/*", "observe/internal/*"}, 296, "program",
			"metrics, report, straggler"},
		{"internal/group", []string{"internal/group"}, 394, "leaf", ""},
		{"internal/kernels", []string{"internal/kernels", "internal/kernels/simd"}, 560, "kernel",
			"simd"},
		{"internal/residence", []string{"internal/residence", "internal/safetensors",
			"internal/terms"}, 830, "graph", "internal/{safetensors,terms}"},
	}, {
		{"rendezvous/launch", []string{"rendezvous/launch"}, 122, "program", ""},
		{"backend", []string{"backend"}, 500, "contract", ""},
	}, {
		{"rendezvous", []string{"rendezvous"}, 500, "contract", ""},
	},
}

// everywhere are packages that many import, and that import only each other: the picture names
// them, and has no arrows to them.
var everywhere = []string{
	"internal/elastic", "internal/env", "internal/exit", "internal/filelock", "internal/files",
	"internal/launchers", "internal/serial", "internal/shm", "internal/spinwait", "internal/stock",
	"internal/sumtree", "internal/tuning", "internal/workers", "gpu/*", "internal/gpu/*",
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

// cell is a room's row and place in it.
type cell struct{ row, column int }

// roomOf returns the room of a package, and whether the picture has one.
func roomOf(pkg string) (cell, bool) {
	for row, rooms := range rooms {
		for column, r := range rooms {
			if matches(pkg, r.packages) {
				return cell{row, column}, true
			}
		}
	}
	return cell{}, false
}

// arrows returns which rooms import which, without the arrows that follow from others. It is an
// error if a package has no room, or if an arrow does not point down.
func arrows(imports map[string][]string) (map[cell][]cell, error) {
	direct := map[cell]map[cell]bool{}
	for _, pkg := range slices.Sorted(maps.Keys(imports)) {
		from, drawn := roomOf(pkg)
		if !drawn && !matches(pkg, everywhere) && !matches(pkg, aside) {
			return nil, fmt.Errorf("package %s has no room in the figure: give it one", pkg)
		}
		for _, imported := range imports[pkg] {
			to, ok := roomOf(imported)
			switch {
			case matches(pkg, everywhere) && !matches(imported, everywhere):
				return nil, fmt.Errorf("%s imports %s, so it needs a room of its own", pkg,
					imported)
			case !drawn || !ok || from == to:
				continue
			case from.row >= to.row:
				return nil, fmt.Errorf("%s imports %s, which the figure has not below it", pkg,
					imported)
			case direct[from] == nil:
				direct[from] = map[cell]bool{}
			}
			direct[from][to] = true
		}
	}
	return reduced(direct), nil
}

// reduced returns the arrows of a graph without circles that do not follow from its others.
func reduced(direct map[cell]map[cell]bool) map[cell][]cell {
	reduced := map[cell][]cell{}
	for from, targets := range direct {
		for to := range targets {
			if !slices.ContainsFunc(slices.Collect(maps.Keys(targets)), func(via cell) bool {
				return via != to && reaches(direct, via, to)
			}) {
				reduced[from] = append(reduced[from], to)
			}
		}
		slices.SortFunc(reduced[from], compareCells)
	}
	return reduced
}

func reaches(direct map[cell]map[cell]bool, from, to cell) bool {
	for next := range direct[from] {
		if next == to || reaches(direct, next, to) {
			return true
		}
	}
	return false
}

func compareCells(a, b cell) int {
	return cmp.Or(cmp.Compare(a.row, b.row), cmp.Compare(a.column, b.column))
}
