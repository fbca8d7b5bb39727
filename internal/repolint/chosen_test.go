package repolint_test

import (
	"go/ast"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/euryale-ml/euryale/internal/testing/require"
)

// chosen are the patterns of -run and -skip, of go test and of test programs.
var chosen = regexp.MustCompile(`-(?:test\.)?(?:run|skip) ('[^']*'|\S+)`)

// begins are the patterns of beginnings of names, and of ends that say where tests run.
var begins = regexp.MustCompile(
	`^\^(Test|Example)|^((UnemulatedOn|On|Off)GPU|On(NCCL|Host)|BetweenNetworks|` +
		`(Unr|R)aced|(Une|E)mulated)\$$`)

// Tests are chosen by the beginning of their names, or by an end that says what they run on: a
// piece of a name could be in another one, too. What is chosen exists.
func TestTestsAreChosenByPrefix(t *testing.T) {
	atRoot(t)
	plan := require.Value(exec.Command(lookMake(t), "-n", "race", "unraced", "arm64", "netns",
		"names", "gpu-emulated", "CLANG_HOST=clang++").Output())(t)
	script := require.Value(os.ReadFile(".ci/gpu"))(t)
	names := declaredTests(t)
	patterns := chosen.FindAllStringSubmatch(string(plan)+string(script), -1)
	for _, found := range patterns {
		for _, pattern := range alternatives(strings.Trim(found[1], "'\"")) {
			name, _, _ := strings.Cut(pattern, "/")
			if name == "" || pattern == "^$" { // parts of any test, no test
				continue
			}
			if !begins.MatchString(name) {
				t.Errorf("%q is a piece of a name", pattern)
			}
			exp, err := regexp.Compile(name)
			require.Check(t, err == nil && slices.ContainsFunc(names, exp.MatchString),
				"%q names no test", pattern)
		}
	}
	require.Check(t, len(patterns) >= 40, "only %d choices were found", len(patterns))
}

// alternatives splits a pattern at each | that is not in parentheses.
func alternatives(pattern string) (all []string) {
	begin, depth := 0, 0
	for i, c := range pattern {
		switch c {
		case '(':
			depth++
		case ')':
			depth--
		case '|':
			if depth == 0 {
				all, begin = append(all, pattern[begin:i]), i+1
			}
		}
	}
	return append(all, pattern[begin:])
}

// declaredTests returns the names of tests and examples, whatever their build tags.
func declaredTests(t *testing.T) (names []string) {
	t.Helper()
	for _, f := range sources(t) {
		for _, d := range f.Decls {
			if d, ok := d.(*ast.FuncDecl); ok && f.test() && d.Recv == nil {
				names = append(names, d.Name.Name)
			}
		}
	}
	return names
}
