package main

import (
	"errors"
	"fmt"
	"math"
	"regexp"
	"slices"
	"strings"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/vm"
)

// row is one line of the table.
type row struct {
	call  string  // as a program writes it
	in    []input // x, y, z
	build func(x G.Nodes) G.Nodes
	// want is the plain loop. got are the results of the graph, for loops that depend on random
	// numbers of the operation; nil in a run that has none yet.
	want func(x, got []array) []array
	// flat says that the operation has no useful derivative, so that none is asked for.
	flat bool
	// random says that numbers of the row differ from run to run, so the page shows none.
	random bool
	// distinct says that the results are different nodes, even if their values can be equal.
	distinct bool
	// whole says that the loss is the result, of which Gorgonia takes no product.
	whole bool
	alone bool     // the row has a line of its own
	slope *[]array // what differences has found, of rows whose loops do not depend on got
	use   string   // what to use instead, if anything is wrong
}

// verdict is what a row's graph does: a text for each column.
type verdict [columns]string

const right = "right"

// What can happen to a graph. Gorgonia's messages name nodes and registers, which differ from run
// to run, so the page does not show them.
var (
	errBuild = errors.New("does not build")
	errFails = errors.New("fails")
	errNone  = errors.New("none")
	errGrad  = errors.New("gorgonia.Grad panics")
)

// wrong reports whether anything of the row is not right.
func (v verdict) wrong() bool {
	return slices.ContainsFunc(v[:], func(s string) bool { return s != right && s != "" })
}

// column is one of the things that a row says.
type column int

const (
	value column = iota
	tape
	lisp
	compiled // package vm, value and gradient
	columns
)

// judge returns what the row says in a column, "" if it says nothing there.
func judge(r row, c column) string {
	if r.flat && (c == tape || c == lisp) {
		return ""
	}
	for _, dt := range dtypes {
		if err := try(r, dt, c); err != nil {
			text, _, _ := strings.Cut(dt.says(err), r.cut())
			return text
		}
	}
	return right
}

// cut is what the numbers of a message come after, if the page does not show them.
func (r row) cut() string {
	if r.random {
		return ": "
	}
	return "\n"
}

// try returns what is wrong.
func try(r row, dt dtype, c column) (err error) {
	defer recovered(&err)
	switch c {
	case value:
		return results(r, dt, onTape, 2)
	case compiled:
		if err := results(r, dt, onVM, 3); err != nil || r.flat {
			return err
		}
		err := gradient(r, dt, c)
		if errors.Is(err, errNone) || errors.Is(err, errGrad) || errors.Is(err, errBuild) {
			return nil // the column of the tape machine says that there is no gradient
		}
		return err
	}
	return gradient(r, dt, c)
}

// onTape makes Gorgonia's tape machine.
func onTape(g *G.ExprGraph) (G.VM, error) { return G.NewTapeMachine(g), nil }

// onVM makes a machine of package vm on the host.
func onVM(g *G.ExprGraph) (G.VM, error) {
	return vm.New(g, nil, vm.Notice(func(string) {}))
}

// dtype is an element type and how close its results have to be.
type dtype struct {
	tensor.Dtype
	close, closeGradient float64 // relative to max(1, |want|)
}

// dtypes: of float32 some functions are approximations with 12 bits.
var dtypes = []dtype{{tensor.Float64, 1e-9, 1e-5}, {tensor.Float32, 1e-3, 1e-3}}

// says returns a message for the table.
func (d dtype) says(err error) string {
	if d.Dtype == tensor.Float32 {
		return "float32: " + err.Error()
	}
	return err.Error()
}

func operands(r row) []array {
	xs := make([]array, len(r.in))
	for i, in := range r.in {
		xs[i] = in.values(i)
	}
	return xs
}

// results builds and runs the row's graph forward, several times, and compares what it gives with
// the loop.
func results(r row, dt dtype, make func(*G.ExprGraph) (G.VM, error), runs int) error {
	g := G.NewGraph()
	x := inputs(g, r, dt)
	nodes, err := built(r, x)
	if err != nil {
		return err
	}
	values := slices.Repeat([]G.Value{nil}, len(nodes))
	for i, n := range nodes {
		G.Read(n, &values[i])
	}
	m, err := make(g)
	if err != nil {
		return err
	}
	defer m.Close()
	return repeat(r, x, m, runs, func() error {
		var got []array
		for i, v := range values {
			if v == nil {
				return fmt.Errorf("wrong: result %d has no value", i)
			}
			got = append(got, arrayOf(v))
		}
		want := r.want(operands(r), got)
		if err := unmerged(nodes, want, r.distinct); err != nil {
			return err
		}
		return compare(got, want, dt.close)
	})
}

// repeat runs a machine several times, as training does, and checks what each run leaves.
func repeat(r row, x G.Nodes, m G.VM, runs int, check func() error) error {
	for run := range runs {
		err := errFails
		if m.RunAll() == nil {
			err = errors.Join(check(), unchanged(r, x))
		}
		switch {
		case err != nil && run > 0 && !r.random: // else it is chance which run shows it
			return fmt.Errorf("run %d: %w", run+1, err)
		case err != nil:
			return err
		}
		m.Reset()
	}
	return nil
}

// unchanged returns an error if a run has written over an operand.
func unchanged(r row, x G.Nodes) error {
	for i, want := range operands(r) {
		if compare([]array{arrayOf(x[i].Value())}, []array{want}, 0) != nil {
			return fmt.Errorf("wrong: %s is overwritten", x[i].Name())
		}
	}
	return nil
}

// unmerged returns an error if two results that are not the same are one node.
func unmerged(nodes G.Nodes, want []array, distinct bool) error {
	for i, n := range nodes {
		j := slices.Index(nodes, n)
		if j < i && (distinct || i < len(want) && compare(want[i:i+1], want[j:j+1], 0) != nil) {
			return errors.New("merged with another node")
		}
	}
	return nil
}

// inputs makes the operands' nodes.
func inputs(g *G.ExprGraph, r row, dt dtype) G.Nodes {
	var nodes G.Nodes
	for i, a := range operands(r) {
		of := dt.Dtype
		if r.in[i].kind == integers {
			of = tensor.Int
		}
		nodes = append(nodes, node(g, a, of, string(rune('x'+i))))
	}
	return nodes
}

// node is an input node that holds an array.
func node(g *G.ExprGraph, a array, dt tensor.Dtype, name string) N {
	value := valueOf(a, dt)
	if len(a.shape) == 0 {
		return G.NewScalar(g, dt, G.WithName(name), G.WithValue(value))
	}
	return G.NewTensor(g, dt, len(a.shape), G.WithShape(a.shape...),
		G.WithName(name), G.WithValue(value))
}

// valueOf returns the elements as Gorgonia takes them.
func valueOf(a array, dt tensor.Dtype) any {
	var backing any = slices.Clone(a.data)
	switch dt {
	case tensor.Float32:
		backing = converted[float32](a.data)
	case tensor.Int:
		backing = converted[int](a.data)
	}
	if len(a.shape) > 0 {
		return tensor.New(tensor.WithShape(a.shape...), tensor.WithBacking(backing))
	}
	if dt == tensor.Float32 {
		return float32(a.data[0])
	}
	return a.data[0]
}

func converted[T float32 | int](data []float64) []T {
	to := make([]T, len(data))
	for i, x := range data {
		to[i] = T(x)
	}
	return to
}

// arrayOf copies a value of Gorgonia.
func arrayOf(v G.Value) array {
	if t, ok := v.(*tensor.Dense); ok && t.RequiresIterator() {
		v = t.Materialize().(*tensor.Dense)
	}
	a := array{shape: slices.Clone(v.Shape())}
	switch data := v.Data().(type) {
	case []float64:
		a.data = slices.Clone(data)
	case []float32:
		for _, x := range data {
			a.data = append(a.data, float64(x))
		}
	case []int:
		for _, x := range data {
			a.data = append(a.data, float64(x))
		}
	case []bool:
		for _, x := range data {
			a.data = append(a.data, truth(x))
		}
	case float64:
		a.data = []float64{data}
	case float32:
		a.data = []float64{float64(data)}
	case bool:
		a.data = []float64{truth(data)}
	}
	return a
}

func truth(b bool) float64 {
	if b {
		return 1
	}
	return 0
}

// built calls the row's constructor.
func built(r row, x G.Nodes) (nodes G.Nodes, err error) {
	defer func() {
		if p := recover(); p != nil {
			if _, ok := p.(refusal); ok {
				err = errBuild
				return
			}
			err = fmt.Errorf("panics when built: %s", plain(fmt.Sprint(p)))
		}
	}()
	return r.build(x), nil
}

// refusal is an error of a constructor.
type refusal struct{ error }

// must returns the node, or makes built return the error.
func must(n N, err error) N {
	if err != nil {
		panic(refusal{err})
	}
	return n
}

// recovered turns a panic of a machine into an error.
func recovered(err *error) {
	if p := recover(); p != nil {
		*err = fmt.Errorf("panics: %s", plain(fmt.Sprint(p)))
	}
}

// volatile is what differs from run to run: addresses and names of nodes.
var volatile = regexp.MustCompile(`0x[0-9a-f]{6,}|%[0-9a-f]+|\s+`)

// plain shortens a message of Gorgonia to what fits in a table.
func plain(s string) string {
	const most = 70
	s = strings.TrimSpace(volatile.ReplaceAllString(s, " "))
	s = strings.NewReplacer("|", "/", "<", "(", ">", ")", "`", "'", "*", "").Replace(s)
	if r := []rune(s); len(r) > most {
		s = string(r[:most]) + "..."
	}
	return s
}

// gradient compares the gradients of the row's operands with central differences of its loop. The
// loss is the sum of the results, each multiplied by its own weights.
func gradient(r row, dt dtype, c column) (err error) {
	g := G.NewGraph()
	x := inputs(g, r, dt)
	nodes, err := built(r, x)
	if err != nil {
		return err
	}
	values := make([]G.Value, len(nodes))
	for i, n := range nodes {
		G.Read(n, &values[i])
	}
	loss, err := lossOf(r, nodes, dt)
	if err != nil {
		return err
	}
	return differentiate(g, r, loss, x, c, func(dx []array) error {
		got := make([]array, len(nodes))
		for i, v := range values {
			if v != nil {
				got[i] = arrayOf(v)
			}
		}
		return compare(dx, r.slopes(got), dt.closeGradient)
	})
}

// scale multiplies the loss, so that no gradient is 1 by luck: a product with 1 changes nothing
// where it is written.
const scale = 1.5

// lossOf is the sum of all elements of all nodes, multiplied by weights, and by scale.
func lossOf(r row, nodes G.Nodes, dt dtype) (loss N, err error) {
	if r.whole {
		return nodes[0], nil
	}
	for i, n := range nodes {
		w := node(n.Graph(), weights(i, n.Shape()), dt.Dtype, fmt.Sprint("weights of result ", i))
		term, err := G.HadamardProd(n, w)
		if err == nil && !term.IsScalar() {
			term, err = G.Sum(term)
		}
		if err == nil && loss != nil {
			term, err = G.Add(loss, term)
		}
		if err != nil {
			return nil, errBuild
		}
		loss = term
	}
	if loss, err = G.HadamardProd(loss, constant(loss, scale)); err != nil {
		return nil, errBuild
	}
	return loss, nil
}

func weights(result int, shape []int) array {
	return input{shape: slices.Clone(shape), kind: positive}.values(100 + result)
}

// differentiate computes the gradients of the operands that have one: twice in the tape machine,
// three times in package vm, and once in the lisp machine, which adds to the gradients of the run
// before.
func differentiate(g *G.ExprGraph, r row, loss N, x G.Nodes, c column,
	check func(dx []array) error) error {
	var by G.Nodes
	for i, n := range x {
		if r.in[i].kind != integers {
			by = append(by, n)
		}
	}
	if c == lisp {
		m := G.NewLispMachine(g)
		defer m.Close()
		if err := m.RunAll(); err != nil {
			return errFails
		}
		return checked(by, check, (N).Grad)
	}
	grads, err := differentiated(loss, by, c)
	if err != nil {
		return err
	}
	make, runs := onTape, 2
	if c == compiled {
		make, runs = onVM, 3
	}
	m, err := make(g)
	if err != nil {
		return err
	}
	defer m.Close()
	return repeat(r, x, m, runs, func() error {
		return checked(grads, check, func(n N) (G.Value, error) { return n.Value(), nil })
	})
}

// differentiated is gorgonia.Grad. Its panic is what the column of the tape machine says.
func differentiated(loss N, by G.Nodes, c column) (grads G.Nodes,
	err error) {
	defer func() {
		if c == compiled && recover() != nil {
			err = errGrad
		}
	}()
	if grads, err = G.Grad(loss, by...); err != nil {
		err = errNone
	}
	return grads, err
}

// checked checks the gradients that nodes have.
func checked(nodes G.Nodes, check func(dx []array) error,
	of func(n N) (G.Value, error)) error {
	var dx []array
	for _, n := range nodes {
		v, err := of(n)
		if err != nil || v == nil {
			return errNone
		}
		dx = append(dx, arrayOf(v))
	}
	return check(dx)
}

// anything is what differences has for an element that it left out.
const anything = math.MaxFloat64

// slopes are differences, which are the same for all machines unless the loop depends on got.
func (r row) slopes(got []array) []array {
	if r.slope == nil || r.random {
		return differences(r, got)
	}
	if *r.slope == nil {
		*r.slope = differences(r, got)
	}
	return *r.slope
}

// differences are central differences of the loop's loss, by at most 30 elements of an operand.
func differences(r row, got []array) (dx []array) {
	const h, most = 1e-5, 30
	xs := operands(r)
	loss := func() float64 {
		sum := 0.0
		for i, y := range r.want(xs, got) {
			w := weights(i, y.shape)
			for k, v := range y.data {
				if r.whole {
					sum += v
				} else {
					sum += scale * w.data[k] * v
				}
			}
		}
		return sum
	}
	for i, x := range xs {
		if r.in[i].kind == integers {
			continue
		}
		d := array{x.shape, slices.Repeat([]float64{anything}, len(x.data))}
		for k := 0; k < len(x.data); k += 1 + len(x.data)/most {
			v := x.data[k]
			x.data[k] = v + h
			up := loss()
			x.data[k] = v - h
			d.data[k] = (up - loss()) / (2 * h)
			x.data[k] = v
		}
		dx = append(dx, d)
	}
	return dx
}

// compare returns an error that shows the largest difference.
func compare(got, want []array, tolerance float64) error {
	if len(got) != len(want) {
		return fmt.Errorf("wrong: %d results, want %d", len(got), len(want))
	}
	worst, message := 0.0, ""
	for k := range want {
		if !slices.Equal(got[k].shape, want[k].shape) {
			return fmt.Errorf("wrong: shape %v, want %v", got[k].shape, want[k].shape)
		}
		for i, w := range want[k].data {
			if i >= len(got[k].data) {
				return fmt.Errorf("wrong: %d elements, want %d", len(got[k].data),
					len(want[k].data))
			}
			if w == anything {
				continue
			}
			g := got[k].data[i]
			off := math.Abs(g-w) / max(1, math.Abs(w))
			if g == w || math.IsNaN(g) && math.IsNaN(w) {
				off = 0
			} else if math.IsNaN(off) {
				off = math.Inf(1)
			}
			if off > tolerance && off > worst {
				worst, message = off, fmt.Sprintf("wrong: %.3g, want %.3g", g, w)
			}
		}
	}
	if message != "" {
		return errors.New(message)
	}
	return nil
}
