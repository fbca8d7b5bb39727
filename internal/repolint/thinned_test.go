package repolint_test

import (
	"go/ast"
	"go/build"
	"os/exec"
	"path"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/euryale-ml/euryale/internal/testing/require"
)

// TestWhatRaceLeavesOutIsRunUnraced: a test that asks for -short, or for the race detector, itself
// or in what it calls, leaves a part out in make race. THINNED in the Makefile names it, so that
// make unraced runs it whole; elsewhere that part would run nowhere in CI.
func TestWhatRaceLeavesOutIsRunUnraced(t *testing.T) {
	atRoot(t)
	plan, err := exec.Command(lookMake(t), "-n", "unraced").Output()
	require.NoError(t, err)
	whole := regexp.MustCompile(`grep -E '([^']+)'`).FindSubmatch(plan)
	thinned := regexp.MustCompile(`-run '([^']+)' -skip '[^']+' \\\n(.*)`).FindSubmatch(plan)
	require.That(t, whole != nil && thinned != nil, "make unraced has other commands:\n%s", plan)
	unraced := regexp.MustCompile(string(whole[1]))
	var names []*regexp.Regexp
	for _, pattern := range alternatives(string(thinned[1])) {
		name, _, _ := strings.Cut(pattern, "/")
		names = append(names, regexp.MustCompile(name))
	}
	found := 0
	for _, test := range thins(t) {
		dir, name := path.Dir(test), path.Base(test)
		if unraced.MatchString("/euryale/" + dir + "/") {
			continue
		}
		found++
		require.Check(t,
			slices.ContainsFunc(names, func(n *regexp.Regexp) bool { return n.MatchString(name) }),
			"%s: %s leaves a part out in make race, and THINNED does not name it", dir, name)
		if !slices.ContainsFunc(strings.Fields(string(thinned[2])), func(p string) bool {
			under, all := strings.CutSuffix(p, "/...")
			p = path.Clean(under)
			return dir == p || all && strings.HasPrefix(dir, p+"/")
		}) {
			t.Errorf("make unraced does not run the tests of %s that THINNED names: %s", dir, name)
		}
	}
	require.Check(t, found >= 10, "only %d tests were found", found)
}

// thinning are the functions for tests that ask for the race detector.
var thinning = []string{"backend/backendtest/Run", "backend/backendtest/RunWrapper"}

// thins returns the tests, as dir/name, that ask by themselves, by functions beside them, or by
// thinning.
func thins(t *testing.T) (tests []string) {
	t.Helper()
	asks := map[string]bool{"testing/Short": true, "internal/testing/proctest/Race": true}
	uses := map[string][]string{}
	for _, f := range sources(t) {
		dir := path.Dir(f.name)
		if ok, err := build.Default.MatchFile(dir, path.Base(f.name)); err != nil || !ok {
			continue // of builds with tags, which make race has not
		}
		for _, d := range f.Decls {
			d, ok := d.(*ast.FuncDecl)
			if !ok {
				continue
			}
			used, name := usedBy(d, f), path.Join(dir, d.Name.Name)
			switch {
			case !f.test() && dir != "backend/backendtest" &&
				slices.ContainsFunc(used, func(u string) bool { return asks[u] }):
				t.Errorf("%s: %s asks for -short or the race detector: tests do, whose names "+
					"THINNED has", f.name, d.Name.Name)
			case f.test() && d.Recv == nil:
				uses[name] = append(uses[name], used...)
				if strings.HasPrefix(d.Name.Name, "Test") && d.Name.Name != "TestMain" {
					tests = append(tests, name)
				}
			}
		}
	}
	for _, name := range thinning {
		asks[name] = true
	}
	for before := 0; before < len(asks); {
		before = len(asks)
		for name, used := range uses {
			if slices.ContainsFunc(used, func(u string) bool { return asks[u] }) {
				asks[name] = true
			}
		}
	}
	return slices.DeleteFunc(tests, func(test string) bool { return !asks[test] })
}

// usedBy returns, as dir/name, what a function mentions of packages that its file imports, and the
// functions of its package that it calls.
func usedBy(d *ast.FuncDecl, f source) (names []string) {
	packages := map[string]string{}
	for _, spec := range f.Imports {
		imported, _ := strconv.Unquote(spec.Path.Value)
		name := path.Base(imported)
		if spec.Name != nil {
			name = spec.Name.Name
		}
		packages[name] = path.Clean(strings.TrimPrefix(strings.TrimPrefix(imported, module), "/"))
	}
	ast.Inspect(d, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.SelectorExpr:
			if x, ok := n.X.(*ast.Ident); ok && packages[x.Name] != "" {
				names = append(names, path.Join(packages[x.Name], n.Sel.Name))
			}
		case *ast.CallExpr:
			if called, ok := n.Fun.(*ast.Ident); ok {
				names = append(names, path.Join(path.Dir(f.name), called.Name))
			}
		}
		return true
	})
	return names
}
