package repolint_test

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/euryale-ml/euryale/internal/testing/require"
)

// This file keeps the shape of the module: what may import what, and that
// everything exported is explained.
//
//	examples -> fit -> vm; cmd -> vm -> autograd, ops -> backend -> rendezvous
//	ops, autograd, leaves, wrappers -> backend, kernels; kernels -> backend
//	euryale -> internal/session -> backend/*, internal/group, observe, rendezvous
//	internal/testing -> what it tests; nothing but tests and tools imports it

const module = "github.com/euryale-ml/euryale"

// arrow says what the packages of one layer may import of this module. The
// first whose packages match is the one that counts.
type arrow struct {
	packages string   // a pattern, see within
	imports  []string // patterns
}

// arrows is the design. A layer may import those below it, not only the next.
var arrows = []arrow{
	{"rendezvous/...", []string{"rendezvous/...", "internal/..."}},
	{"backend", []string{"rendezvous", "internal/sumtree"}},
	{"kernels/...", []string{"backend", "kernels/...", "internal/..."}},
	{"backend/backendtest/...", []string{"backend", "backend/backendtest/...", "rendezvous",
		"internal/..."}},
	{"internal/gpu", []string{"backend", "kernels/...", "rendezvous", "internal/..."}},
	{"internal/hierarchy", []string{"backend", "rendezvous", "internal/..."}},
	{"internal/fault", []string{"backend", "internal/..."}},
	{"backend/internal/hosted", []string{"backend", "backend/host", "rendezvous", "internal/..."}},
	{"backend/mpi", []string{"backend", "backend/host", "backend/internal/hosted",
		"rendezvous", "internal/..."}},
	{"backend/tcp", []string{"backend", "backend/host", "backend/internal/hosted",
		"rendezvous", "internal/..."}},
	{"backend/...", []string{"backend", "kernels/fuse", "rendezvous", "internal/..."}},
	{"observe/report", []string{"backend", "internal/files", "observe/internal/chrome",
		"rendezvous"}},
	{"observe/internal/...", nil},
	{"observe/...", []string{"backend", "rendezvous", "observe/...", "internal/..."}},
	{"ops/nn", []string{"backend", "kernels/...", "ops/...", "internal/..."}},
	{"ops/...", []string{"backend", "kernels/fuse", "rendezvous", "ops/...", "internal/..."}},
	{"autograd/solver", []string{"backend", "internal/kernels", "kernels/fuse",
		"internal/residence", "internal/stock"}},
	{"autograd/...", []string{
		"backend", "kernels/fuse", "rendezvous", "autograd/...", "internal/...",
	}},
	{"layers", []string{"autograd/...", "backend", "ops/...", "vm", "internal/group",
		"internal/kernels", "internal/residence", "internal/terms"}},
	{"models/tokenizer", []string{"internal/files"}},
	{"models/...", []string{"autograd/...", "backend", "internal/kernels", "layers", "models/...",
		"ops/...", "vm", "internal/files", "internal/residence", "internal/safetensors"}},
	{"internal/vm/ir", []string{"backend", "kernels/fuse", "internal/kernels"}},
	{"internal/vm/read", []string{"backend", "kernels/fuse", "ops/...", "internal/program",
		"internal/residence", "internal/stock", "internal/terms", "internal/vm/ir"}},
	{"internal/vm/samples", []string{"backend", "kernels/fuse", "internal/vm/ir"}},
	{"internal/vm/lower", []string{"backend", "internal/kernels", "internal/sumtree",
		"kernels/fuse", "internal/vm/ir"}},
	{"internal/vm/plan", []string{"backend", "kernels/fuse", "internal/kernels", "internal/vm/ir",
		"internal/vm/lower"}},
	{"internal/vm/proof", []string{"backend", "internal/kernels", "kernels/fuse",
		"internal/vm/ir", "internal/vm/lower", "internal/vm/plan"}},
	{"internal/vm/interpret", []string{"backend", "kernels/fuse", "internal/kernels",
		"internal/vm/ir"}},
	{"internal/vm/graphs", []string{"backend", "layers", "ops/..."}},
	{"internal/vm/exec", []string{"backend", "kernels/fuse", "internal/kernels", "internal/cuda",
		"internal/kernels/cuda", "internal/residence", "internal/workers", "internal/vm/ir",
		"internal/vm/plan"}},
	{"vm/...", []string{"backend/...", "kernels/...", "rendezvous", "ops/...", "autograd/...",
		"vm/...", "internal/..."}},
	{"fit/data", []string{"backend", "internal/files"}},
	{"fit/curves", []string{"backend", "fit", "internal/bench/chart"}},
	{"fit/progress", []string{"fit", "rendezvous"}},
	{"fit", []string{".", "autograd/...", "backend", "fit/data", "internal/exit", "internal/files",
		"internal/safetensors", "internal/stock", "observe", "vm"}},
	{"internal/bench/...", []string{"backend"}},
	{"bench/train", []string{"..."}}, // a program that trains
	{"bench/blas", []string{"backend", "internal/bench", "internal/workers", "internal/kernels",
		"kernels/fuse"}},
	{"bench/...", []string{"bench/...", "internal/bench"}},
	{".", []string{"backend/...", "internal/buildlock", "internal/env", "internal/exit",
		"internal/gpu", "internal/session", "rendezvous"}},
	{"internal/env", []string{"internal/exit"}}, // the status for a wrong value
	{"cmd/...", []string{"..."}},
	{"examples/...", []string{ // what a user's module may import, too
		".", "autograd/...", "backend/...", "examples/handwritten", "examples/usage", "fit/...",
		"layers", "bucket", "models/...", "observe/...", "ops/...", "rendezvous/...", "vm",
	}},
	{"internal/cuda", []string{"backend", "kernels/...", "internal/..."}},
	{"internal/kernels/...", []string{"backend", "kernels/...", "internal/..."}},
	{"internal/tools/soak", []string{"..."}}, // a command, for tests
	{"internal/tools/immortal", []string{"..."}},
	{"internal/tools/optable", []string{"internal/testing/conventions", "ops/nn", "vm"}},
	{"internal/tools/...", []string{"bench/...", "internal/bench/..."}},
	{"internal/group", []string{"backend", "rendezvous", "internal/..."}},
	{"internal/launch", []string{"rendezvous", "internal/..."}},
	{"internal/session", []string{
		"backend", "backend/host", "internal/awaited", "internal/elastic", "internal/env",
		"internal/fault", "internal/gpu", "internal/group", "internal/hierarchy", "observe",
		"rendezvous",
	}},
	{"internal/buildlock", []string{"backend"}},
	{"internal/program", []string{"backend", "kernels/fuse", "internal/kernels", "internal/vm/ir",
		"internal/vm/lower", "internal/vm/plan", "internal/vm/proof", "internal/vm/exec"}},
	{"internal/residence", []string{"backend"}},
	{"internal/terms", []string{"backend"}},
	{"bucket", []string{"backend", "internal/files"}},
	{"internal/files", []string{"backend", "internal/filelock"}},
	{"internal/safetensors", []string{"backend", "internal/files"}},
	{"internal/testing/testranks", []string{"internal/shm", "internal/testing/require",
		"rendezvous"}},
	{"internal/testing/nilargs", []string{"backend", "internal/testing/require"}},
	{"internal/testing/fakedevice", []string{"backend", "kernels/...", "internal/..."}},
	{"internal/testing/reference", []string{"backend", "rendezvous", "internal/..."}},
	{"internal/testing/testenv", []string{"backend/...", "internal/...", "rendezvous"}},
	{"internal/testing/conventions", []string{"ops/nn"}},
	{"internal/testing/fusetest", []string{"backend", "internal/kernels", "kernels/fuse"}},
	{"internal/testing/proctest", []string{"internal/env", "internal/testing/require"}},
	{"internal/testing/objectstore", []string{"internal/testing/require"}},
	{"internal/testing/exampletest", []string{"internal/exit", "internal/testing/proctest",
		"internal/testing/require", "internal/launch"}},
	{"internal/testing/sim", []string{"internal/env", "internal/testing/require"}},
	{"internal/testing/mlflow", []string{"internal/testing/require",
		"internal/testing/tensorboard"}},
	{"internal/testing/tensorboard", []string{"internal/testing/require"}},
	{"internal/testing/...", nil},
	{"internal/...", []string{"internal/..."}},
}

// reserved are packages that only some import, whatever the arrows say.
var reserved = []struct{ packages, importers []string }{
	{[]string{"internal/session", "internal/buildlock"}, []string{"."}},
	{[]string{"internal/cuda", "internal/kernels/cuda"}, []string{"backend/cuda", "bench/train",
		"cmd/...", "internal/cuda", "internal/gpu", "internal/kernels/cuda/...",
		"internal/testing/...", "internal/vm/exec"}},
	{[]string{"internal/fault", "internal/gpu", "internal/hierarchy"}, []string{".", "cmd/...",
		"internal/session", "internal/testing/testenv"}},
	{[]string{"internal/kernels/simd"}, []string{"internal/kernels", "kernels/fuse"}},
	{[]string{"internal/vm/..."}, []string{"vm", "internal/program", "internal/vm/..."}},
	{[]string{"fit/..."}, []string{"examples/...", "fit/..."}},
	{forTests, append([]string{"internal/tools/..."}, forTests...)},
}

// forTests are the packages that tests share.
var forTests = []string{
	"internal/testing/...", "backend/backendtest/...", "internal/vm/graphs",
	"internal/vm/interpret",
}

// fence says which packages may import something from outside the module, and
// with which file names.
type fence struct {
	path     string // an import path and everything below it
	packages []string
	suffix   string // of the file names, "" for any
}

// fences: the first whose path matches is the one that counts.
var fences = []fence{
	{"github.com/minio", []string{"bucket"}, ""},
	{"golang.org/x/oauth2", []string{"bucket"}, ""},
	{"gorgonia.org/cu", []string{"internal/cuda", "internal/kernels/cuda"}, "_gpu.go"},
	{"gorgonia.org", []string{
		"ops/...", "layers", "models", "autograd/...", "fit", "fit/data", "vm",
		"internal/vm/read", "internal/defects",
		"internal/vm/graphs", "bench/train", "bench/blas", "examples/...", "internal/residence",
		"internal/stock", "internal/terms", "internal/testing/conventions",
		"internal/tools/immortal", "internal/tools/optable", "internal/tools/soak",
	}, ""},
	{"github.com/alecthomas/kong", []string{"cmd/..."}, ""},
	{"charm.land", []string{"cmd/..."}, ""},
	{"github.com/prometheus/common", []string{"cmd/..."}, ""},
}

// within reports whether the pattern names the package: "backend" is one
// package, "backend/..." also all below it, "..." every one.
func within(pkg, pattern string) bool {
	parent, tree := strings.CutSuffix(pattern, "...")
	parent = strings.TrimSuffix(parent, "/")
	return pkg == parent || tree && (parent == "" || strings.HasPrefix(pkg, parent+"/"))
}

func withinAny(pkg string, patterns []string) bool {
	return slices.ContainsFunc(patterns, func(p string) bool { return within(pkg, p) })
}

// violation returns what is wrong with one import of a file, "" if nothing.
// The file's path is relative to the module.
func violation(file, imported string) string {
	pkg := path.Dir(file)
	if imported == module || strings.HasPrefix(imported, module+"/") {
		return wrongArrow(pkg, file, imported)
	}
	for _, f := range fences {
		if !within(imported, f.path+"/...") {
			continue
		}
		if !withinAny(pkg, f.packages) {
			return fmt.Sprintf("%s imports %s, which is for %s only", file, imported,
				strings.Join(f.packages, ", "))
		}
		if !strings.HasSuffix(file, f.suffix) {
			return fmt.Sprintf("%s imports %s, which is for files named *%s only", file, imported,
				f.suffix)
		}
		return ""
	}
	return ""
}

func wrongArrow(pkg, file, imported string) string {
	target := strings.TrimPrefix(strings.TrimPrefix(imported, module), "/")
	if target == "" {
		target = "."
	}
	for _, r := range reserved {
		if withinAny(target, r.packages) && !withinAny(pkg, r.importers) {
			return fmt.Sprintf("%s imports %s, which is for %s only", file, imported,
				strings.Join(r.importers, ", "))
		}
	}
	for _, a := range arrows {
		if !within(pkg, a.packages) {
			continue
		}
		if target == "." && slices.Contains(a.imports, "...") || withinAny(target, a.imports) {
			return ""
		}
		return fmt.Sprintf("%s imports %s, but %s may import %s only", file, imported, a.packages,
			strings.Join(a.imports, ", "))
	}
	return fmt.Sprintf("%s imports %s, but package %s has no place in the arrows of this test: "+
		"give it one", file, imported, pkg)
}

// source is one parsed file; its name is relative to the module, with slashes.
type source struct {
	name string
	*ast.File
}

func (s source) test() bool { return strings.HasSuffix(s.name, "_test.go") }

// sources returns every Go file of the module, whatever its build tags. Nobody changes them.
func sources(t *testing.T) []source {
	t.Helper()
	return require.Value(allSources())(t)
}

// allSources parses them once for all tests, at the root.
var allSources = sync.OnceValues(func() (all []source, err error) {
	fset := token.NewFileSet()
	err = filepath.WalkDir(".", func(name string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case d.IsDir() && skipped(name, d.Name()):
			return fs.SkipDir
		case d.IsDir() || !strings.HasSuffix(name, ".go"):
			return nil
		}
		f, err := parser.ParseFile(fset, name, nil,
			parser.ParseComments|parser.SkipObjectResolution)
		if err != nil {
			return err
		}
		all = append(all, source{filepath.ToSlash(name), f})
		return nil
	})
	return all, err
})

// skipped reports whether the go command does not look into a directory, or
// finds another module there, or git ignores it.
func skipped(name, base string) bool {
	if name == "." {
		return false
	}
	_, err := os.Stat(filepath.Join(name, "go.mod"))
	return err == nil || filepath.ToSlash(name) == "bench/out" || base == "testdata" ||
		base == "vendor" || base[0] == '.' || base[0] == '_'
}

func TestImportsFollowTheArrows(t *testing.T) {
	atRoot(t)
	files := sources(t)
	for _, f := range files {
		if f.test() {
			continue // tests may look at anything
		}
		for _, spec := range f.Imports {
			imported := require.Value(strconv.Unquote(spec.Path.Value))(t)
			require.Equal(t, "violation", violation(f.name, imported), "")
		}
	}
	require.Check(t, len(files) >= 20, "only %d files were looked at", len(files))
}

func TestWrongImportsAreFound(t *testing.T) {
	const gorgonia = "gorgonia.org/gorgonia"
	for _, test := range []struct {
		file, imported string
		ok             bool
	}{
		{"internal/fault/fault.go", module + "/backend", true},
		{"backend/tcp/comm.go", module + "/internal/kernels", true},
		{"internal/fault/fault.go", module + "/backend/host", false},
		{"backend/compress/half/wire.go", module + "/internal/kernels", true},
		{"backend/compress/half/wire.go", module + "/backend/host", false},
		{"backend/compress/sparse/call.go", module + "/internal/kernels", true},
		{"backend/compress/sparse/call.go", module + "/backend/compress/half", false},
		{"autograd/reducer.go", module + "/backend/compress/sparse", false},
		{"backend/buffer.go", module + "/rendezvous", true},
		{"backend/buffer.go", module + "/internal/launch", false},
		{"backend/buffer.go", module + "/backend/host", false},
		{"backend/buffer.go", module + "/internal/kernels", false},
		{"backend/buffer.go", gorgonia, false},
		{"backend/host/comm.go", "gorgonia.org/tensor", false},
		{"backend/host/comm.go", module + "/backend/backendtest", false},
		{"backend/backendtest/oracle.go", module + "/backend/host", false},
		{"internal/residence/memory.go", "gorgonia.org/tensor/internal/storage", true},
		{"internal/cuda/open.go", "gorgonia.org/tensor", false},
		{"internal/cuda/open.go", "gorgonia.org/cu", false},
		{"internal/cuda/device_gpu.go", "gorgonia.org/cu/dnn", true},
		{"internal/kernels/host.go", module + "/backend", true},
		{"internal/kernels/host.go", module + "/backend/host", false},
		{"internal/kernels/cuda/ptx.go", module + "/internal/kernels", true},
		{"rendezvous/world.go", module + "/backend", false},
		{"internal/launch/launch.go", module + "/rendezvous", true},
		{"ops/op.go", module + "/backend", true},
		{"ops/op.go", gorgonia, true},
		{"ops/op.go", module + "/backend/host", false},
		{"ops/op.go", module + "/autograd", false},
		{"ops/op.go", module, false},
		{"autograd/bucket.go", module + "/ops", false},
		{"autograd/bucket.go", module + "/backend", true},
		{"autograd/bucket.go", module + "/examples/digits", false},
		{"euryale.go", module + "/internal/session", true},
		{"euryale.go", module + "/observe", false},
		{"internal/session/session.go", module + "/observe", true},
		{"internal/session/session.go", module + "/backend/tcp", false},
		{"internal/buildlock/buildlock.go", module + "/backend", true},
		{"internal/buildlock/buildlock.go", module + "/internal/session", false},
		{"cmd/euryale/run.go", module + "/internal/session", false},
		{"euryale.go", module + "/rendezvous", true},
		{"euryale.go", module + "/ops", false},
		{"euryale.go", gorgonia, false},
		{"cmd/euryale/run.go", module, true},
		{"cmd/euryale/run.go", module + "/internal/launch", true},
		{"cmd/euryale/run.go", "github.com/alecthomas/kong", true},
		{"cmd/euryale/run.go", gorgonia, false},
		{"internal/tools/optable/main.go", gorgonia, true},
		{"internal/group/hub.go", module + "/internal/shm", true},
		{"internal/group/hub.go", module + "/internal/testing/testranks", false},
		{"backend/host/comm.go", module + "/internal/testing/proctest", false},
		{"backend/backendtest/suite.go", module + "/internal/testing/testranks", true},
		{"cmd/euryale/run.go", module + "/internal/testing/fakedevice", false},
		{"internal/tools/soak/main.go", module + "/internal/testing/proctest", true},
		{"bench/ab/main.go", module + "/internal/bench", true},
		{"bench/ab/main.go", module + "/backend", false},
		{"ops/nn/softmax.go", module + "/vm", false},
		{"ops/nn/softmax.go", module + "/ops", true},
		{"examples/digits/main.go", module, true},
		{"examples/digits/main.go", module + "/examples/handwritten", true},
		{"examples/digits/main.go", module + "/examples/convnet", false},
		{"examples/digits/main.go", module + "/internal/buildlock", false},
		{"examples/digits/main.go", module + "/internal/vm/plan", false},
		{"examples/digits/main.go", gorgonia, true},
		{"examples/digits/main.go", module + "/fit/data", true},
		{"cmd/euryale/run.go", module + "/fit", false},
		{"fit/loop.go", module + "/vm", true},
		{"fit/loop.go", module + "/ops/nn", false},
		{"fit/data/set.go", module + "/fit", false},
		{"internal/bench/measure.go", module + "/backend", true},
		{"internal/bench/measure.go", module + "/backend/host", false},
		{"internal/bench/measure.go", "github.com/alecthomas/kongress", true},
		{"internal/bench/measure.go", "github.com/alecthomas/kong", false},
		{"surprise/new.go", module + "/backend", false},
		{"backend/buffer.go", "golang.org/x/sys/unix", true},
	} {
		if wrong := violation(test.file, test.imported); (wrong == "") != test.ok {
			t.Errorf("%s importing %s: allowed should be %v; the test says %q", test.file,
				test.imported, test.ok, wrong)
		}
	}
}

func TestEverythingExportedIsExplained(t *testing.T) {
	atRoot(t)
	explained := map[string]bool{}
	for _, f := range sources(t) {
		if f.test() {
			continue
		}
		pkg := path.Dir(f.name)
		explained[pkg] = explained[pkg] || f.Doc != nil
		for _, name := range silent(f.File) {
			t.Errorf("%s: %s has no doc comment", f.name, name)
		}
	}
	for pkg, ok := range explained {
		require.Check(t, ok, "package %s has no package comment: give it a doc.go", pkg)
	}
}

// silent returns the exported declarations of a file that have no comment. The
// comment of a group of constants or variables serves all of it.
func silent(f *ast.File) []string {
	var names []string
	for _, decl := range f.Decls {
		switch d := decl.(type) {
		case *ast.FuncDecl:
			if d.Name.IsExported() && d.Doc == nil && reachable(d) {
				names = append(names, d.Name.Name)
			}
		case *ast.GenDecl:
			for _, spec := range d.Specs {
				names = append(names, silentIn(d, spec)...)
			}
		}
	}
	return names
}

// reachable reports whether a function, or a method's type, can be named from
// outside.
func reachable(d *ast.FuncDecl) bool {
	if d.Recv == nil {
		return true
	}
	receiver := d.Recv.List[0].Type
	for {
		switch x := receiver.(type) {
		case *ast.StarExpr:
			receiver = x.X
		case *ast.IndexExpr:
			receiver = x.X
		case *ast.IndexListExpr:
			receiver = x.X
		case *ast.Ident:
			return x.IsExported()
		default:
			return true
		}
	}
}

func silentIn(d *ast.GenDecl, spec ast.Spec) (names []string) {
	switch s := spec.(type) {
	case *ast.TypeSpec:
		if s.Name.IsExported() && s.Doc == nil && d.Doc == nil {
			names = append(names, s.Name.Name)
		}
	case *ast.ValueSpec:
		if d.Doc != nil || s.Doc != nil || s.Comment != nil {
			return nil
		}
		for _, n := range s.Names {
			if n.IsExported() {
				names = append(names, n.Name)
			}
		}
	}
	return names
}

func TestSilentDeclarationsAreFound(t *testing.T) {
	const text = `package p
type A struct{}
// B is explained.
type B struct{}
func (A) M() {}
func (*B) N() {}
func (c[T]) O() {}
func (*D[T]) P() {}
func F() {}
// G is explained.
func G() {}
const H = 1
// All are explained.
const ( I = 1; J = 2 )
var ( K = 1 // explained
	L = 2 )
func f() {}
`
	f := require.Value(parser.ParseFile(token.NewFileSet(), "p.go", text, parser.ParseComments))(t)
	want := []string{"A", "M", "N", "P", "F", "H", "L"}
	require.Slices(t, "silent", silent(f), want)
}
