// Package nilargs tests that the functions of a package refuse nil arguments with an error that
// names them.
package nilargs

import (
	"errors"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"path/filepath"
	"reflect"
	"regexp"
	"strings"
	"testing"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/testing/require"
)

// Use is a call that succeeds or fails for another reason than nil: F is the function, or one with
// the same parameters that uses what the function returns; its last result is an error.
type Use struct {
	F    any
	Args []any
}

// Check calls functions of the package in the current directory with nil for each parameter that
// can be nil, and each element that can be, one at a time: each gives an ErrArgument that names the
// parameter. Each exported function is in the table or, with the reason, in except, unless its
// parameters are numbers, strings and the like. Parameters for which nil has a meaning are in
// except as "Function.parameter".
func Check(t *testing.T, table map[string]Use, except map[string]string) {
	t.Helper()
	declared := functions(t)
	for name := range table {
		if declared[name] == nil {
			t.Errorf("the package has no exported function %s", name)
		}
	}
	for name, d := range declared {
		call, listed := table[name]
		switch {
		case except[name] != "" || plain(d.Type):
		case !listed:
			t.Errorf("%s: add a call that shows what it does with nil", name)
		default:
			call.check(t, name, names(d.Type), except)
		}
	}
}

// functions returns the exported functions of the package in the current directory.
func functions(t *testing.T) map[string]*ast.FuncDecl {
	t.Helper()
	paths := require.Value(filepath.Glob("*.go"))(t)
	all := map[string]*ast.FuncDecl{}
	for _, path := range paths {
		if strings.HasSuffix(path, "_test.go") {
			continue
		}
		file := require.Value(parser.ParseFile(token.NewFileSet(), path, nil, 0))(t)
		for _, d := range file.Decls {
			if f, ok := d.(*ast.FuncDecl); ok && f.Recv == nil && f.Name.IsExported() {
				all[f.Name.Name] = f
			}
		}
	}
	return all
}

// plain reports whether the parameters of a function have predeclared types, or are lists of them.
func plain(f *ast.FuncType) bool {
	for _, p := range f.Params.List {
		of := p.Type
		switch list := of.(type) {
		case *ast.ArrayType:
			of = list.Elt
		case *ast.Ellipsis:
			of = list.Elt
		}
		if id, ok := of.(*ast.Ident); !ok || ast.IsExported(id.Name) || id.Name == "error" ||
			id.Name == "any" {
			return false
		}
	}
	return true
}

func names(f *ast.FuncType) (all []string) {
	for _, p := range f.Params.List {
		for _, n := range p.Names {
			all = append(all, n.Name)
		}
	}
	return all
}

func (c Use) check(t *testing.T, name string, parameters []string, except map[string]string) {
	t.Helper()
	f := reflect.TypeOf(c.F)
	for i, parameter := range parameters {
		if except[name+"."+parameter] != "" || i >= len(c.Args) {
			continue
		}
		in := f.In(i)
		var nothing reflect.Value
		switch {
		case f.IsVariadic() && i == f.NumIn()-1 && nilable(in.Elem()):
			nothing = reflect.Zero(in.Elem())
		case in.Kind() == reflect.Slice && nilable(in.Elem()):
			nothing = reflect.Append(reflect.Zero(in), reflect.Zero(in.Elem()))
		case nilable(in):
			nothing = reflect.Zero(in)
		default:
			continue
		}
		err := c.with(i, nothing)
		says := regexp.MustCompile(`\b` + parameter + `\b[^:]* is nil`)
		require.Check(t, errors.Is(err, backend.ErrArgument) && says.MatchString(err.Error()),
			"%s with nil for %s: %v, want an ErrArgument that says that %s is nil", name, parameter,
			err, parameter)
	}
}

func nilable(t reflect.Type) bool {
	switch t.Kind() {
	case reflect.Pointer, reflect.Interface, reflect.Func:
		return true
	}
	return false
}

// with calls the function with another argument. A panic is an error.
func (c Use) with(i int, nothing reflect.Value) (err error) {
	defer func() {
		if v := recover(); v != nil {
			err = fmt.Errorf("it panicked: %v", v)
		}
	}()
	f := reflect.ValueOf(c.F)
	args := make([]reflect.Value, len(c.Args))
	for k, a := range c.Args {
		of := f.Type().In(min(k, f.Type().NumIn()-1))
		if f.Type().IsVariadic() && k >= f.Type().NumIn()-1 {
			of = of.Elem()
		}
		if args[k] = reflect.ValueOf(a); !args[k].IsValid() {
			args[k] = reflect.Zero(of)
		}
	}
	args[i] = nothing
	results := f.Call(args)
	err, _ = results[len(results)-1].Interface().(error)
	return err
}
