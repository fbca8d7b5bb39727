package repolint_test

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"reflect"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/euryale-ml/euryale/internal/env"
	"github.com/euryale-ml/euryale/internal/launchers"
	"github.com/euryale-ml/euryale/internal/testing/require"
)

// ourVariable is the name of a variable of Euryale, but of one that only its tests read.
var ourVariable = regexp.MustCompile(`^EURYALE_[A-Z_]+$`)

func isOurs(name string) bool {
	return ourVariable.MatchString(name) && !strings.HasPrefix(name, "EURYALE_TEST_")
}

// Variables are read by internal/env alone, so that a value means the same everywhere.
func TestOnlyPackageEnvReadsVariablesOfOurs(t *testing.T) {
	atRoot(t)
	for _, f := range sources(t) {
		if f.test() || strings.HasPrefix(f.name, "internal/env/") {
			continue
		}
		for _, name := range variablesRead(f.File) {
			t.Errorf("%s names %s to read it: use package internal/env", f.name, name)
		}
	}
}

func TestReadersOfVariablesAreFound(t *testing.T) {
	for text, want := range map[string]int{
		`func f() string { return os.Getenv("EURYALE_CHECK") }`:                1,
		`func f() error { return os.Setenv("EURYALE_CHECK", "off") }`:          0,
		`const name = "EURYALE_CHECK"`:                                         1,
		`type flags struct { Check string ` + "`env:\"EURYALE_CHECK\"`" + ` }`: 1,
		`func f() string { return os.Getenv("EURYALE_TEST_X") }`:               0,
		`var advice = "set EURYALE_CHECK"`:                                     0,
		`var all = []string{"EURYALE_CHECK", "EURYALE_CHECK=off"}`:             1,
	} {
		f := require.Value(parser.ParseFile(token.NewFileSet(), "x.go", "package x\n"+text, 0))(t)
		require.Equal(t, text, len(variablesRead(f)), want)
	}
}

// A variable in the table that no code reads is an option that means nothing.
func TestEveryVariableOfTheTableIsRead(t *testing.T) {
	atRoot(t)
	used := map[string]bool{}
	var table []string
	for _, f := range sources(t) {
		if f.test() {
			continue
		}
		ast.Inspect(f.File, func(n ast.Node) bool {
			switch x := n.(type) {
			case *ast.Ident:
				if f.name == "internal/env/credential.go" {
					used[x.Name] = true
				}
			case *ast.SelectorExpr:
				if of, ok := x.X.(*ast.Ident); ok && of.Name == "env" {
					used[x.Sel.Name] = true
				}
			case *ast.ValueSpec:
				if f.name == "internal/env/table.go" && len(x.Values) == 1 &&
					isOurs(stringOf(x.Values[0])) {
					table = append(table, x.Names[0].Name)
				}
			}
			return true
		})
	}
	require.That(t, len(table) != 0, "internal/env/table.go declares no variable")
	for _, name := range table {
		require.Check(t, used[name], "nothing reads env.%s", name)
	}
}

// variablesRead returns the variables that a file names to read them: in a call, unless it sets
// them, in a constant, in a composite literal, or in a tag of a flag.
func variablesRead(f *ast.File) (names []string) {
	literal := func(e ast.Expr) {
		if name := stringOf(e); isOurs(name) {
			names = append(names, name)
		}
	}
	ast.Inspect(f, func(n ast.Node) bool {
		switch x := n.(type) {
		case *ast.CallExpr:
			if name := last(x.Fun); name == "Setenv" || name == "Unsetenv" {
				return false
			}
			for _, arg := range x.Args {
				literal(arg)
			}
		case *ast.ValueSpec:
			for _, value := range x.Values {
				literal(value)
			}
		case *ast.CompositeLit:
			for _, element := range x.Elts {
				literal(element)
			}
		case *ast.Field:
			if x.Tag != nil {
				tag := reflect.StructTag(stringOf(x.Tag)).Get("env")
				literal(&ast.BasicLit{Kind: token.STRING, Value: strconv.Quote(tag)})
			}
		}
		return true
	})
	return names
}

// stringOf returns the value of a string literal, "" for other expressions.
func stringOf(e ast.Expr) string {
	literal, ok := e.(*ast.BasicLit)
	if !ok || literal.Kind != token.STRING {
		return ""
	}
	text, err := strconv.Unquote(literal.Value)
	if err != nil {
		return ""
	}
	return text
}

func TestDocumentationListsEveryVariable(t *testing.T) {
	atRoot(t)
	for want, file := range map[string]string{godoc(): "doc.go", markdown(): "docs/running.md",
		contracts(): "docs/running.md"} {
		text := require.Value(os.ReadFile(file))(t)
		require.Check(t, strings.Contains(string(text), want),
			"%s does not have what internal/env and internal/launchers say of the variables:\n%s",
			file, want)
	}
}

// described is the help of a variable with what holds if it is not set.
func described(v env.Variable) string {
	if v.Default == "" {
		return v.Help
	}
	return fmt.Sprintf("%s (default: %s)", v.Help, v.Default)
}

// godoc is the list of the variables in the documentation of package euryale.
func godoc() string {
	const column, width = 20, 92
	var b strings.Builder
	for _, v := range env.All() {
		if v.Foreign {
			continue
		}
		line := fmt.Sprintf("//\t%-*s", column, v.Name())
		for _, word := range strings.Fields(described(v)) {
			if len(line)+len(word) > width {
				b.WriteString(strings.TrimRight(line, " ") + "\n")
				line = "//\t" + strings.Repeat(" ", column)
			}
			line += word + " "
		}
		b.WriteString(strings.TrimRight(line, " ") + "\n")
	}
	return b.String()
}

// markdown is their table, with those of launchers.
func markdown() string {
	b := strings.Builder{}
	b.WriteString("| variable | meaning |\n|---|---|\n")
	for _, v := range env.All() {
		fmt.Fprintf(&b, "| `%s` | %s |\n", v.Name(), described(v))
	}
	return b.String()
}

// contracts is the table of launchers, with the variables that tell that one has started a program.
func contracts() string {
	b := strings.Builder{}
	b.WriteString("| launcher | starts | variables |\n|---|---|---|\n")
	for _, c := range launchers.All() {
		starts := "ranks"
		if c.Machines {
			starts = "a command on each machine"
		}
		fmt.Fprintf(&b, "| %s | %s | `%s` |\n", c.Name, starts, strings.Join(c.SignNames(), "`, `"))
	}
	return b.String()
}
