package main

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// variable is a literal that names one, or sets it.
var variable = regexp.MustCompile(`^(EURYALE_[A-Z_]+)(=\S*)?$`)

// readVariables returns the variables that the source of a module names by literals and
// by tags of flags, except those of tests and of the table itself.
func readVariables(t *testing.T, root string) []string {
	t.Helper()
	found := map[string]bool{}
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case d.IsDir() && strings.HasPrefix(d.Name(), ".") && d.Name() != "..":
			return filepath.SkipDir
		case filepath.Ext(path) != ".go" || strings.HasSuffix(path, "_test.go") || d.Name() == "doctor.go":
			return nil
		}
		file, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.SkipObjectResolution)
		if err != nil {
			return err
		}
		ast.Inspect(file, func(n ast.Node) bool {
			literal, ok := n.(*ast.BasicLit)
			if !ok || literal.Kind != token.STRING {
				return true
			}
			text, err := strconv.Unquote(literal.Value)
			if err != nil {
				return true
			}
			for _, name := range []string{text, reflect.StructTag(text).Get("env")} {
				if match := variable.FindStringSubmatch(name); match != nil && !strings.HasPrefix(name, "EURYALE_TEST_") {
					found[match[1]] = true
				}
			}
			return true
		})
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return slices.Sorted(maps.Keys(found))
}

func TestFoundDoctorDoesNotKnowEveryVariable(t *testing.T) {
	read := readVariables(t, filepath.Join("..", ".."))
	if !slices.Equal(read, variables) {
		t.Errorf("the source reads\n%q, doctor knows\n%q", read, variables)
	}
	manual, err := os.ReadFile(filepath.Join("..", "..", "doc.go"))
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range variables {
		if !strings.Contains(string(manual), "//\t"+name+" ") {
			t.Errorf("the documentation of package euryale does not describe %s", name)
		}
	}
	if report, _ := examine(t, nil, nil, "EURYALE_TERMINAL=1"); strings.Contains(report, "misspelt") {
		t.Errorf("what the launcher sets is unknown to doctor:\n%s", report)
	}
}
