package repolint_test

import (
	"go/ast"
	"go/parser"
	"go/token"
	"maps"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/euryale-ml/euryale/internal/testing/require"
)

var (
	// citation is code that a page names: `directory/file.go:Name`.
	citation = regexp.MustCompile("`([\\w./-]+\\.go):(\\w+)`")
	// sourceFile is a file that a page names: `directory/file.ext`.
	sourceFile = regexp.MustCompile(
		"`((?:autograd|backend|bench|cmd|docs|examples|gpu|internal|kernels|observe|ops|" +
			"rendezvous)/[\\w./-]+\\.\\w+)`")
	// link is a relative link of a page.
	link = regexp.MustCompile(`\]\(([\w./-]+)\)`)
	// code is what stands in a page as code.
	code = regexp.MustCompile("`([^`\n]+)`")
)

// What a new maintainer reads first names each package, or a folder of packages, and stays short.
func TestArchitectureIsShortAndNamesEveryPackage(t *testing.T) {
	atRoot(t)
	text := require.Value(os.ReadFile("docs/architecture.md"))(t)
	n := len(strings.Fields(string(text)))
	require.Check(t, n <= 4000, "docs/architecture.md has %d words: at most 4000", n)
	named := map[string]bool{".": true} // the root is named by its name
	for _, found := range code.FindAllStringSubmatch(string(text), -1) {
		named[found[1]] = true
	}
	patterns := slices.Collect(maps.Keys(named))
	for _, f := range sources(t) {
		if pkg := path.Dir(f.name); !f.test() && !withinAny(pkg, patterns) {
			t.Errorf("docs/architecture.md does not name %s, the package of %s", pkg, f.name)
		}
	}
}

// declared returns the names that a Go file declares: functions and methods, types, their fields
// and methods, constants and variables.
func declared(t *testing.T, file string) map[string]bool {
	t.Helper()
	parsed, err := parser.ParseFile(token.NewFileSet(), file, nil, parser.SkipObjectResolution)
	if err != nil {
		t.Error(err)
		return nil
	}
	names := map[string]bool{}
	ast.Inspect(parsed, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.FuncDecl:
			names[n.Name.Name] = true
			return false
		case *ast.TypeSpec:
			names[n.Name.Name] = true
		case *ast.ValueSpec:
			for _, name := range n.Names {
				names[name.Name] = true
			}
		case *ast.Field:
			for _, name := range n.Names {
				names[name.Name] = true
			}
		}
		return true
	})
	return names
}

// What the pages cite and link to exists.
func TestLinksOfTheDocsLeadSomewhere(t *testing.T) {
	atRoot(t)
	pages := require.Value(filepath.Glob("docs/*.md"))(t)
	cited := 0
	for _, page := range append(pages, "README.md", "CHANGELOG.md", "CONTRIBUTING.md") {
		text := require.Value(os.ReadFile(page))(t)
		for _, found := range citation.FindAllStringSubmatch(string(text), -1) {
			cited++
			if file, name := found[1], found[2]; !declared(t, file)[name] {
				t.Errorf("%s cites %s, which is not declared in %s", page, name, file)
			}
		}
		for _, found := range sourceFile.FindAllStringSubmatch(string(text), -1) {
			if file := found[1]; !strings.Contains(file, "...") {
				_, err := os.Stat(file)
				require.Check(t, err == nil, "%s names a file that does not exist: %v", page, err)
			}
		}
		for _, found := range link.FindAllStringSubmatch(string(text), -1) {
			_, err := os.Stat(filepath.Join(filepath.Dir(page), found[1]))
			require.Check(t, err == nil, "%s links to a file that does not exist: %v", page, err)
		}
	}
	require.Check(t, cited >= 50, "only %d citations were found", cited)
}
