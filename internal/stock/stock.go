// Package stock reads what Gorgonia v0.9.18 does not export of its nodes and operations.
package stock

import (
	"fmt"
	"reflect"
	"slices"
	"strings"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// Path is the path of Gorgonia's module and package.
const Path = "gorgonia.org/gorgonia"

// Unnamed is what Gorgonia calls a variable without a name.
const Unnamed = "%!s(<nil>)()"

// The groups of nodes that gorgonia.Grad makes. Where it differentiates an operation by all
// operands, it leaves some in the second one that nobody has asked for.
const (
	Gradients        = "gradients"
	Undifferentiated = "undifferentiated nodes"
)

// Averaging is an operation that keeps running statistics: a batch norm, and its gradient, which
// shares those of the batch norm.
type Averaging interface {
	Stats() (mean, variance tensor.Tensor)
	SetStats(mean, variance tensor.Tensor) error
}

// Begin sets averages that no run has changed, which are zeros, to the mean 0 and the variance 1.
// With Gorgonia's variance of 0, an evaluation would multiply by 1/sqrt(epsilon).
func Begin(a Averaging) error {
	mean, variance := a.Stats()
	for _, t := range []tensor.Tensor{mean, variance} {
		switch x := t.Data().(type) {
		case []float32:
			if slices.ContainsFunc(x, func(e float32) bool { return e != 0 }) {
				return nil
			}
		case []float64:
			if slices.ContainsFunc(x, func(e float64) bool { return e != 0 }) {
				return nil
			}
		}
	}
	ones := tensor.Ones(variance.Dtype(), variance.Shape()...)
	return a.SetStats(mean.Clone().(tensor.Tensor), ones)
}

// Trains reports whether one of Gorgonia's operations that keep running statistics trains; false
// for those of other packages, in which a field of that name may mean something else.
func Trains(op gorgonia.Op) bool {
	if Name(op) == "" {
		return false
	}
	f := Struct(op).FieldByName("training")
	return f.IsValid() && f.Kind() == reflect.Bool && f.Bool()
}

// Struct returns the struct of an operation, which may be a pointer to it; the zero Value for none.
func Struct(op gorgonia.Op) reflect.Value {
	v := reflect.ValueOf(op)
	for v.Kind() == reflect.Pointer {
		v = v.Elem()
	}
	if v.Kind() != reflect.Struct {
		return reflect.Value{}
	}
	return v
}

// Name returns the name of the type of one of Gorgonia's operations, "" for nil and for those of
// other packages.
func Name(op gorgonia.Op) string {
	v := Struct(op)
	if !v.IsValid() || v.Type().PkgPath() != Path {
		return ""
	}
	return v.Type().Name()
}

// Operands returns the operands of a node, in order, with duplicates; nil for another version of
// Gorgonia. ExprGraph.From gives those of another node after gorgonia.Log has replaced
// log(1 - sigmoid) by something more stable: it looks for the node where it was in the graph's list
// before the replaced ones were removed.
func Operands(n *gorgonia.Node) gorgonia.Nodes {
	f := reflect.ValueOf(n).Elem().FieldByName("children")
	if !f.IsValid() || f.Type() != reflect.TypeFor[gorgonia.Nodes]() {
		return nil
	}
	return *(*gorgonia.Nodes)(f.Addr().UnsafePointer())
}

// Label returns the name of a node for messages: "unnamed(2, 3)" for a variable without one.
func Label(n *gorgonia.Node) string {
	switch {
	case n == nil:
		return "nil"
	case n.Op() == nil && n.Name() == Unnamed:
		return fmt.Sprintf("unnamed%v", n.Shape())
	}
	return n.Name()
}

// Operation describes an operation of a node for messages: "A × B of x int(2, 3), y int(3, 4)".
func Operation(n *gorgonia.Node) string {
	var operands []string
	for _, x := range Operands(n) {
		operands = append(operands, fmt.Sprintf("%s %v%v", Label(x), x.Dtype(), x.Shape()))
	}
	return fmt.Sprintf("%v of %s", n.Op(), strings.Join(operands, ", "))
}

// Group returns the group that Gorgonia has put a node in, "" for another version of Gorgonia.
func Group(n *gorgonia.Node) string {
	group := reflect.ValueOf(n).Elem().FieldByName("group")
	if !group.IsValid() {
		return ""
	}
	return group.String()
}
