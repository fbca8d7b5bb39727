package layers

import (
	"errors"
	"fmt"
	"reflect"
	"strings"
	"testing"
	"time"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/autograd"
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/testing/nilargs"
	"github.com/euryale-ml/euryale/internal/testing/reference"
	"github.com/euryale-ml/euryale/ops/nn"
)

// job is embedded where autograd.Job has a method of that name.
type job interface{ autograd.Job }

func TestNilArgumentsAreErrors(t *testing.T) {
	comm := reference.New("test", 1, time.Minute)[0]
	layout, err := NewLayout(comm, 1, 1, 1)
	if err != nil {
		t.Fatal(err)
	}
	defer layout.Close()
	build := func(graph *gorgonia.ExprGraph, layout *Layout, dtype tensor.Dtype,
		seed uint64) error {
		return NewBuilder(graph, layout, dtype, seed).Err()
	}
	g := gorgonia.NewGraph()
	w := gorgonia.NewVector(g, tensor.Float32, gorgonia.WithShape(2), gorgonia.WithName("w"))
	nilargs.Check(t, map[string]nilargs.Use{
		"NewBuilder": {F: build, Args: []any{g, layout, tensor.Float32, uint64(1)}},
		"Initialize": {F: Initialize, Args: []any{uint64(1), Glorot, w}},
		"NewLayout":  {F: NewLayout, Args: []any{comm, 1, 1, 1}},
		"NewElasticLayout": {F: NewElasticLayout, Args: []any{t.Context(),
			struct{ job }{}, 2}},
	}, map[string]string{
		"Place": "the operation that uses the node has the error",
		"Whole": "the operation that uses the node has the error",
	})
}

// TestMethodsRefuseNothing: every exported method of this package that takes nodes, pointers or
// functions gives an error for each of them that is nil, zero, or placed like a zero Node.
func TestMethodsRefuseNothing(t *testing.T) {
	comm := reference.New("test", 1, time.Minute)[0]
	layout, err := NewLayout(comm, 1, 1, 1)
	if err != nil {
		t.Fatal(err)
	}
	defer layout.Close()
	optional := map[string]bool{"Begin": true, "Freeze": true} // nil ends it
	called := 0
	for _, of := range []reflect.Type{reflect.TypeFor[*Builder](), reflect.TypeFor[*Table](),
		reflect.TypeFor[*Tokens](), reflect.TypeFor[Node]()} {
		for i := range of.NumMethod() {
			m := of.Method(i)
			_, promoted := reflect.TypeFor[*gorgonia.Node]().MethodByName(m.Name)
			for p := 1; p < m.Type.NumIn() && !optional[m.Name] && !promoted; p++ {
				for _, nothing := range nothings(m.Type.In(p)) {
					b := NewBuilder(gorgonia.NewGraph(), layout, tensor.Float32, 1)
					args := arguments(b, of, m.Type)
					args[p] = nothing
					err := calling(b, m, args)
					if called++; !errors.Is(err, backend.ErrArgument) ||
						!strings.Contains(err.Error(), "is nil") {
						t.Errorf("%v.%s, without its argument %d: %v", of, m.Name, p, err)
					}
				}
			}
		}
	}
	if called < 60 {
		t.Errorf("%d calls", called)
	}
}

// nothings are the values of a type that stand for nothing.
func nothings(of reflect.Type) (all []reflect.Value) {
	switch of.Kind() {
	case reflect.Pointer, reflect.Func, reflect.Interface:
		return append(all, reflect.Zero(of))
	}
	if of == reflect.TypeFor[Node]() {
		n := gorgonia.NewMatrix(gorgonia.NewGraph(), tensor.Float32, gorgonia.WithShape(2, 2))
		for _, x := range []Node{{}, Whole(nil), Place(n, Node{}), Place(n, Whole(nil), 1, 0)} {
			all = append(all, reflect.ValueOf(x))
		}
	}
	return all
}

// arguments are the receiver and something for each parameter of a method.
func arguments(b *Builder, of reflect.Type, method reflect.Type) []reflect.Value {
	x := Whole(gorgonia.NewTensor(b.graph, tensor.Float32, 3, gorgonia.WithShape(2, 3, 4),
		gorgonia.WithName("x")))
	x.place[Sequence], x.parts[Sequence] = Split(1), []int{3}
	values := map[reflect.Type]any{}
	for _, v := range []any{b, b.Tokens("tokens", 1, 2, 3), b.Table("rows", Constant(0), 3, 2),
		nn.NewRandom(1), Constant(0), x, 0.5, 1, "name", AttentionOptions{Heads: 1}, [2]int{1, 1},
		func() (Node, error) { return x, nil }} {
		values[reflect.TypeOf(v)] = v
	}

	args := make([]reflect.Value, method.NumIn())
	for i := range args {
		if v, ok := values[method.In(i)]; ok {
			args[i] = reflect.ValueOf(v)
		} else {
			args[i] = reflect.Zero(method.In(i))
		}
	}
	return args
}

// calling calls a method. The error is what it returns last, or the builder's; a panic is one.
func calling(b *Builder, m reflect.Method, args []reflect.Value) (err error) {
	defer func() {
		if v := recover(); v != nil {
			err = fmt.Errorf("it panicked: %v", v)
		}
	}()
	call := m.Func.Call
	if m.Type.IsVariadic() {
		call = m.Func.CallSlice
	}
	results := call(args)
	if n := len(results); n > 0 {
		err, _ = results[n-1].Interface().(error)
	}
	return errors.Join(err, b.Err())
}
