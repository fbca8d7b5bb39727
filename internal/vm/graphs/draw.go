package graphs

import (
	"reflect"
	"slices"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/backend"
)

// drawing is a graph that is being drawn. It is built meanwhile, which tells the shapes of results.
type drawing struct {
	*Graph
	Needs
	next    Next
	scratch *Built
	sizes   []int // of axes
	list    []operation
	last    int // what the last operation has read first, -1 for none
}

// most elements of a value
const most = 300

// Draw draws a graph of about n operations.
func Draw(p Needs, n int, next Next) *Graph {
	d := &drawing{
		Graph: &Graph{DType: []tensor.Dtype{tensor.Float32, tensor.Float64}[next(2)]},
		Needs: p, next: next, last: -1, list: table,
	}
	if next(2) == 0 {
		d.Whole = true
		d.list = slices.DeleteFunc(slices.Clone(table), func(o operation) bool { return o.rough })
	}
	d.scratch = newBuilt(d.Graph)
	for range 2 {
		d.sizes = append(d.sizes, []int{1, 2, 3, 4, 4, 5, 6, 8}[next(8)])
	}
	favoured := d.favoured()
	d.variable(d.size(), d.size())
	if next(3) == 0 {
		d.variable([]int{1, 2}[next(2)], []int{1, 2, 4}[next(3)], 2+next(4), 2+next(4))
	}
	for range n {
		d.grow(favoured)
	}
	for range next(3) {
		d.weave()
	}
	for range next(2) {
		d.norm()
	}
	if p.Comm != nil {
		d.lookUp()
	}
	d.losses()
	for range next(3) {
		d.Kept = append(d.Kept, next(len(d.Values)))
	}
	return d.Graph
}

// favoured returns some operations: a graph of a few kinds has more of their patterns than one
// of all.
func (d *drawing) favoured() (list []operation) {
	for range 3 + d.next(8) {
		list = append(list, d.list[d.next(len(d.list))])
	}
	return list
}

func (d *drawing) size() int { return d.sizes[d.next(len(d.sizes))] }

// variable adds a variable of numbers, of 16 bits now and then, which nothing trains.
func (d *drawing) variable(shape ...int) int {
	v := Value{Shape: shape}
	if len(shape) > 0 && d.next(8) == 0 {
		v.Half.Type = []reflect.Type{reflect.TypeFor[backend.BFloat16](),
			reflect.TypeFor[backend.Float16]()}[d.next(2)]
	}
	return d.append(v)
}

// append adds a value, or returns -1 if Gorgonia does not, or it is too large.
func (d *drawing) append(v Value) int {
	i := len(d.Values)
	v.when = d.next(1 << 16)
	d.Values, d.scratch.Nodes = append(d.Values, v), append(d.scratch.Nodes, nil)
	err := d.add(construction{d.Needs, d.scratch.Graph, i, d.scratch}, d.scratch.Nodes)
	if err != nil || d.scratch.Nodes[i].Shape().TotalSize() > most {
		d.Values, d.scratch.Nodes = d.Values[:i], d.scratch.Nodes[:i]
		return -1
	}
	if v.Op != "" {
		d.Values[i].Shape = d.scratch.Nodes[i].Shape().Clone()
	}
	return i
}

// grow adds an operation, unless it does not fit the operand that is drawn.
func (d *drawing) grow(favoured []operation) {
	o := d.list[d.next(len(d.list))]
	if d.next(3) > 0 {
		o = favoured[d.next(len(favoured))]
	}
	first, ok := d.operand(o)
	if !ok {
		return
	}
	d.last = first
	d.apply(o, first)
}

// apply adds an operation on a value, or returns -1 if it does not fit.
func (d *drawing) apply(o operation, first int) int {
	needs, build := o.fit(d, d.Values[first].Shape)
	if build == nil {
		return -1
	}
	before := len(d.Values)
	args := []int{first}
	for _, n := range needs {
		args = append(args, d.takeValue(n))
	}
	y, v := -1, Value{Op: o.name, Args: args, build: build, flat: o.flat, writes: o.writes}
	if !slices.Contains(args, -1) {
		y = d.append(v)
	}
	if y < 0 { // nor are there the variables that it would have read
		d.Values, d.scratch.Nodes = d.Values[:before], d.scratch.Nodes[:before]
	}
	return y
}

// operand returns a value that an operation may read first: what the last one has read, a late
// one, or any.
func (d *drawing) operand(o operation) (int, bool) {
	var fit []int
	for i, v := range d.Values {
		if v.Limit == 0 && (o.axes == nil || slices.Contains(o.axes, len(v.Shape))) {
			fit = append(fit, i)
		}
	}
	if len(fit) == 0 {
		if o.axes == nil {
			return 0, false
		}
		shape := make([]int, o.axes[d.next(len(o.axes))])
		for i := range shape {
			shape[i] = min(d.size(), 5)
		}
		i := d.variable(shape...)
		return i, i >= 0
	}
	if d.next(3) == 0 && slices.Contains(fit, d.last) {
		return d.last, true
	}
	if n := len(fit); n > 4 && d.next(2) == 0 {
		fit = fit[n-4:]
	}
	return fit[d.next(len(fit))], true
}

// need is an operand besides the first.
type need struct {
	shape tensor.Shape
	limit int // of integers
}

// takeValue returns a value for a need: one that is there, or a new variable.
func (d *drawing) takeValue(n need) int {
	var fit []int
	for i, v := range d.Values {
		if slices.Equal(v.Shape, n.shape) && (v.Limit > 0) == (n.limit > 0) && v.Limit <= n.limit {
			fit = append(fit, i)
		}
	}
	if len(n.shape) == 0 && d.next(2) == 0 {
		return d.append(Value{Op: "Mean of all", Args: []int{d.some()}, build: plain(meanOf)})
	}
	if len(fit) == 0 || d.next(4) == 0 {
		if n.limit == 0 {
			return d.variable(n.shape...)
		}
		return d.append(Value{Shape: n.shape, Limit: n.limit})
	}
	return fit[d.next(len(fit))]
}

// some returns a value of numbers that has axes.
func (d *drawing) some() int {
	var fit []int
	for i, v := range d.Values {
		if v.Limit == 0 && len(v.Shape) > 0 {
			fit = append(fit, i)
		}
	}
	return fit[d.next(len(fit))]
}

// losses adds up losses of what nobody reads, and of some other values.
func (d *drawing) losses() {
	read := make([]bool, len(d.Values))
	for _, v := range d.Values {
		for _, a := range v.Args {
			read[a] = true
		}
	}
	loss := -1
	for i, v := range slices.Clone(d.Values) {
		if v.Limit > 0 || v.Op == "" && loss >= 0 || read[i] && d.next(6) > 0 {
			continue
		}
		term := i
		if len(v.Shape) > 0 {
			term = d.append(Value{Op: "Sum", Args: []int{i}, build: plain(sumOf)})
			if d.next(2) == 0 {
				term = d.append(Value{Op: "Mean", Args: []int{i}, build: plain(meanOf)})
			}
		}
		if loss >= 0 && term >= 0 {
			term = d.append(Value{Op: "Add", Args: []int{loss, term}, build: plain2(gorgonia.Add)})
		}
		if term >= 0 {
			loss = term
		}
	}
	if loss != len(d.Values)-1 { // the loss is the last
		if loss < 0 {
			loss = 0
		}
		d.append(Value{Op: "Neg of Sum", Args: []int{loss}, build: plain(negOfSum)})
	}
}

func negOfSum(x *gorgonia.Node) (*gorgonia.Node, error) {
	if !x.IsScalar() {
		x = must(gorgonia.Sum(x))
	}
	return gorgonia.Neg(x)
}

func sumOf(x *gorgonia.Node) (*gorgonia.Node, error)  { return gorgonia.Sum(x) }
func meanOf(x *gorgonia.Node) (*gorgonia.Node, error) { return gorgonia.Mean(x) }

// lookUp adds rows of a table to a matrix: ranks may exchange them in place of its gradient.
func (d *drawing) lookUp() {
	x, ok := d.operand(operation{axes: matrix})
	if !ok {
		return
	}
	of, n := d.Values[x].Shape, d.size()
	args := []int{d.takeValue(need{shape: shape{n, of[1]}}), d.takeValue(need{shape{of[0]}, n})}
	if slices.Contains(args, -1) {
		return
	}
	rows := d.append(Value{Op: "Embedding", Args: args, build: plain2(embedding)})
	if rows >= 0 {
		d.append(Value{Op: "Add", Args: []int{x, rows}, build: plain2(gorgonia.Add)})
	}
}

// weave adds a value that an operation reads which is no loop, and again an element-wise one
// that needs a reduction.
func (d *drawing) weave() {
	var fit []int
	for i, v := range d.Values {
		if v.Limit == 0 && len(v.Shape) == 2 && v.Op != "" {
			fit = append(fit, i)
		}
	}
	if len(fit) == 0 {
		return
	}
	x := fit[d.next(len(fit))]
	readers := []operation{}
	for _, o := range d.list {
		if o.name == "Mul" || o.name == "Concat" || o.name == "Mul of a transposed" {
			readers = append(readers, o)
		}
	}
	for _, o := range []operation{readers[d.next(len(readers))], times} {
		d.apply(o, x)
	}
}

// norm adds a norm of a function of a value times one that repeats along axes, as layers have it.
// What the function gives is often kept, too: its sum is read besides.
func (d *drawing) norm() {
	x, ok := d.operand(operation{axes: []int{2, 3, 4}})
	if !ok {
		return
	}
	of := func(names ...string) operation {
		fit := slices.DeleteFunc(slices.Clone(d.list), func(o operation) bool {
			return !slices.Contains(names, o.name) ||
				o.axes != nil && !slices.Contains(o.axes, len(d.Values[x].Shape))
		})
		return fit[d.next(len(fit))]
	}
	if y := d.apply(of("Tanh", "Sigmoid", "Square", "Abs", "Rectify"), x); y >= 0 {
		if x = y; d.next(3) > 0 {
			d.Kept = append(d.Kept, d.append(Value{Op: "Sum of all", Args: []int{y},
				build: plain(sumOf)}))
		}
	}
	if y := d.apply(of("BroadcastHadamardProd", "BroadcastAdd", "BroadcastSub"), x); y >= 0 {
		x = y
	}
	d.apply(of("LayerNorm", "RMSNorm", "SoftMax", "less the mean of rows",
		"times the sum of rows"), x)
}
