package layers

import (
	"errors"
	"strings"
	"testing"
	"time"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/testing/nilargs"
	"github.com/euryale-ml/euryale/internal/testing/reference"
)

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
	nilargs.Check(t, map[string]nilargs.Use{
		"NewBuilder": {F: build, Args: []any{g, layout, tensor.Float32, uint64(1)}},
		"NewLayout":  {F: NewLayout, Args: []any{comm, 1, 1, 1}},
	}, map[string]string{
		"Place": "the operation that uses the node has the error",
		"Whole": "the operation that uses the node has the error",
	})
	x := Whole(gorgonia.NewMatrix(g, tensor.Float32, gorgonia.WithShape(2, 2),
		gorgonia.WithName("x")))
	for name, use := range map[string]func(b *Builder){
		"x":       func(b *Builder) { b.GELU(Whole(nil)) },
		"init":    func(b *Builder) { b.Learn("w", nil, -1, 2) },
		"tokens":  func(b *Builder) { b.Embedding(x, nil) },
		"targets": func(b *Builder) { b.CrossEntropy(x, nil) },
		"random":  func(b *Builder) { b.Dropout(0.5, nil, x) },
	} {
		b := NewBuilder(g, layout, tensor.Float32, 1)
		if use(b); !errors.Is(b.Err(), backend.ErrArgument) || !strings.Contains(b.Err().Error(),
			name+" is nil") {
			t.Errorf("%s is nil: %v", name, b.Err())
		}
	}
}
