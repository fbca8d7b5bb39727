package conventions

import (
	_ "embed"
	"encoding/json"
	"fmt"
	"math"
	"strconv"
	"strings"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

//go:embed pytorch.json
var recorded []byte

// Case is an operation on operands, as PyTorch computed it.
type Case struct {
	Op     string // "MaxPool2D 2 0 2"
	DType  string // "f32" or "f64"
	Shapes [][]int
	X      []Numbers
	Labels []int // labels or indices
	// LabelShape is the shape of Labels, nil for a vector.
	LabelShape []int
	Shape      []int   // of the result
	Y          Numbers // the result
	DY         Numbers // its gradient; nil if gradients are left out
	Grads      []Numbers
}

// Numbers are elements of a tensor in row-major order.
type Numbers []float64

// UnmarshalText reads numbers with spaces between them.
func (n *Numbers) UnmarshalText(text []byte) error {
	*n = nil
	for field := range strings.FieldsSeq(string(text)) {
		x, err := strconv.ParseFloat(field, 64)
		if err != nil {
			return err
		}
		*n = append(*n, x)
	}
	return nil
}

// Cases returns all cases, and the version of PyTorch that computed them.
func Cases() (cases []Case, version string, err error) {
	var all struct {
		Torch string
		Cases []Case
	}
	if err := json.Unmarshal(recorded, &all); err != nil {
		return nil, "", fmt.Errorf("conventions: pytorch.json: %w", err)
	}
	return all.Cases, all.Torch, nil
}

// Results are what an engine makes of a case.
type Results struct {
	Y     Numbers
	Grads []Numbers
}

// Machine makes a machine for a graph.
type Maker func(*gorgonia.ExprGraph) (gorgonia.VM, error)

// Compute runs the case a number of times in a machine, and returns the results of each time. It
// fails if the machine does, also by a panic.
func (c Case) Compute(times int, machine Maker) (all []Results, err error) {
	defer func() {
		if r := recover(); r != nil {
			err = fmt.Errorf("conventions: %s of %s: panic: %v", c.Op, c.DType, r)
		}
	}()
	g := gorgonia.NewGraph()
	var x gorgonia.Nodes
	for i, shape := range c.Shapes {
		x = append(x, c.variable(g, fmt.Sprint("x", i), shape, c.X[i]))
	}
	y, err := c.build(x)
	if err != nil {
		return nil, err
	}
	var value gorgonia.Value
	gorgonia.Read(y, &value)
	if err := c.differentiate(y, x); err != nil {
		return nil, err
	}
	m, err := machine(g)
	if err != nil {
		return nil, err
	}
	defer func() {
		if closing := m.Close(); err == nil {
			err = closing
		}
	}()
	for range times {
		if err := m.RunAll(); err != nil {
			return nil, err
		}
		r, err := c.results(value, x)
		if err != nil {
			return nil, err
		}
		all = append(all, r)
		m.Reset()
	}
	return all, nil
}

// differentiate asks for the gradients of sum(y * dy).
func (c Case) differentiate(y *gorgonia.Node, x gorgonia.Nodes) error {
	if c.DY == nil {
		return nil
	}
	loss := y
	if !y.IsScalar() {
		product, err := gorgonia.HadamardProd(y, c.variable(y.Graph(), "dy", y.Shape(), c.DY))
		if err == nil {
			loss, err = gorgonia.Sum(product)
		}
		if err != nil {
			return err
		}
	}
	_, err := gorgonia.Grad(loss, x[:len(c.Grads)]...)
	return err
}

func (c Case) variable(g *gorgonia.ExprGraph, name string, shape tensor.Shape,
	of Numbers) *gorgonia.Node {
	var backing any = append([]float64{}, of...)
	dt := tensor.Float64
	if c.DType == "f32" {
		single := make([]float32, len(of))
		for i, e := range of {
			single[i] = float32(e)
		}
		backing, dt = single, tensor.Float32
	}
	value := tensor.New(tensor.WithShape(shape...), tensor.WithBacking(backing))
	return gorgonia.NewTensor(g, dt, len(shape), gorgonia.WithShape(shape...),
		gorgonia.WithName(name), gorgonia.WithValue(value))
}

// results copies what a run has left.
func (c Case) results(y gorgonia.Value, x gorgonia.Nodes) (Results, error) {
	r := Results{Y: numbers(y)}
	for i := range c.Grads {
		dx, err := x[i].Grad()
		if err != nil {
			return r, err
		}
		r.Grads = append(r.Grads, numbers(dx))
	}
	return r, nil
}

func numbers(v gorgonia.Value) Numbers {
	switch data := v.Data().(type) {
	case []bool:
		var n Numbers
		for _, e := range data {
			n = append(n, map[bool]float64{true: 1}[e])
		}
		return n
	case []int:
		var n Numbers
		for _, e := range data {
			n = append(n, float64(e))
		}
		return n
	case float64:
		return Numbers{data}
	case float32:
		return Numbers{float64(data)}
	case []float64:
		return append(Numbers{}, data...)
	case []float32:
		var n Numbers
		for _, e := range data {
			n = append(n, float64(e))
		}
		return n
	}
	return nil
}

// Difference is an element that an engine computes otherwise than PyTorch.
type Difference struct {
	Of        string    // "y", or "dx0" for the gradient of the first operand
	I         int       // the element
	X         []float64 // the elements of operands of the same shape
	Got, Want float64
}

// Differences compares results with PyTorch's: NaN is NaN, infinities have their signs, and others
// agree to within the rounding of sums and of elementary functions.
func (c Case) Differences(got Results) []Difference {
	var all []Difference
	compare := func(of string, got, want Numbers) {
		for i, e := range want {
			d := Difference{Of: of, I: i, Want: e, Got: math.NaN()}
			if len(got) != len(want) {
				d.Of += " of another length"
			} else if d.Got = got[i]; c.same(d.Got, e) {
				continue
			}
			for _, x := range c.X {
				if len(x) == len(want) {
					d.X = append(d.X, x[i])
				}
			}
			all = append(all, d)
		}
	}
	compare("y", got.Y, c.Y)
	for i, want := range c.Grads {
		compare(fmt.Sprint("dx", i), got.Grads[i], want)
	}
	return all
}

// same reports whether two results are the same number within rounding.
func (c Case) same(got, want float64) bool {
	if got == want || got != got && want != want {
		return true
	}
	relative, least := 1e-9, math.SmallestNonzeroFloat64
	if c.DType == "f32" {
		relative, least = 2e-5, math.SmallestNonzeroFloat32
	}
	off, size := math.Abs(got-want), math.Abs(want)
	// The digits of what is small by itself count; what is left of larger numbers is rounding.
	cancelled := size == 0 || size > 1e-9 || c.name() == "nn.LayerNorm"
	return off <= 2*least || off <= relative*size || cancelled && off <= relative/20
}
