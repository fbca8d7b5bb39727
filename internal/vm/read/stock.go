package read

import (
	"fmt"
	"reflect"
	"runtime/debug"
	"strings"

	"gorgonia.org/gorgonia"

	"github.com/euryale-ml/euryale/internal/stock"
	"github.com/euryale-ml/euryale/internal/vm/ir"
)

const stockVersion = "v0.9.18"

// Type is what this package knows of one of Gorgonia's types of operations.
type Type struct {
	// Fields are its fields in order, as "name type".
	Fields []string
	// floats says that Gorgonia implements the operation for Float32 and Float64 only: the Do of
	// other dtypes fails, or returns zeros.
	floats bool
	// build adds the value of the operation to the program and returns its place.
	build func(b *builder) ir.ID
}

// checkVersion returns an error if the program was built with a Gorgonia whose types this
// package does not know. Programs built without modules say nothing, and the fields decide.
func checkVersion() error {
	if f, ok := reflect.TypeFor[gorgonia.Node]().FieldByName("children"); !ok ||
		f.Type != reflect.TypeFor[gorgonia.Nodes]() {
		return fmt.Errorf("vm: %s.Node has no field children of type Nodes: package vm cannot "+
			"read this version of Gorgonia", stock.Path)
	}
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return nil
	}
	for _, m := range info.Deps {
		if m.Replace != nil {
			continue // a fork is judged by its fields
		}
		if err := checkModule(m.Path, m.Version); err != nil {
			return err
		}
	}
	return nil
}

// checkModule checks one module that the program is built with.
func checkModule(path, version string) error {
	if path != stock.Path || version == stockVersion || version == "" {
		return nil
	}
	return fmt.Errorf("vm: this program is built with %s %s, and package vm reads the graphs of "+
		"%s: run go get %s@%s",
		path, version, stockVersion, path, stockVersion)
}

// fields remembers the types whose fields are as expected.
type fields map[reflect.Type]bool

// check returns an error if the type of an operation has not the fields that Types says.
func (f fields) check(op gorgonia.Op) error {
	t := stock.Struct(op).Type()
	if f[t] {
		return nil
	}
	var got []string
	for i := range t.NumField() {
		got = append(got, t.Field(i).Name+" "+t.Field(i).Type.String())
	}
	if want := Types[t.Name()].Fields; strings.Join(got, "; ") != strings.Join(want, "; ") {
		return fmt.Errorf("%s.%s has the fields {%s}, and %s has {%s}: package vm cannot read "+
			"this version of Gorgonia",
			stock.Path, t.Name(), strings.Join(got, "; "), stockVersion, strings.Join(want, "; "))
	}
	f[t] = true
	return nil
}
