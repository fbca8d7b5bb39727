package program

import (
	"slices"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/kernels"
	"github.com/euryale-ml/euryale/kernels/fuse"
)

// compiler makes the steps of a [Host]. It goes through the values in their order. Those that are
// computed element by element join the loop that is open if they fit, and close it if they do not.
type compiler struct {
	recorder
	host   *Host
	result Value
	users  [][]Value // by value, if it is needed
	at     map[Value]strided
	beside map[Value][]strided // what a call gives besides
	open   *loop
	err    error
}

// Compile returns the steps of a program. build gets a value for each operand, and returns the
// result, which has the elements of out in row-major order.
//
// Errors: backend.ErrArgument if a program is not one, or out does not fit it.
func Compile(in []Tensor, out Tensor, build func(b Builder, x ...Value) Value) (*Host, error) {
	c := &compiler{at: map[Value]strided{}, beside: map[Value][]strided{}}
	var x []Value
	for i, t := range in {
		x = append(x, c.add(node{Tensor: t}))
		c.at[x[i]] = strided{i, 0, t.Shape, rowMajor(t.Shape)}
	}
	c.host = &Host{in: in, out: out, memory: make([]backend.Buffer, len(in)+1)}
	c.result = build(&c.recorder, x...)
	for c.nodes[c.result].renames {
		c.result = c.nodes[c.result].args[0]
	}
	c.findUsers()
	for v := range c.nodes {
		if c.users[v] != nil && c.err == nil {
			c.value(Value(v))
		}
	}
	if c.err == nil {
		c.finish()
	}
	return c.host, c.err
}

// findUsers finds the values that are needed, and by which: the result by itself.
func (c *compiler) findUsers() {
	c.users = make([][]Value, len(c.nodes))
	c.users[c.result] = []Value{c.result}
	for v := c.result; v >= 0; v-- {
		if c.users[v] != nil {
			for _, x := range c.nodes[v].args {
				c.users[x] = append(c.users[x], v)
			}
		}
	}
}

// value makes what computes a value.
func (c *compiler) value(v Value) {
	n := &c.nodes[v]
	switch {
	case n.emit != nil:
		if !c.waits(v) {
			c.element(v)
		}
	case n.axes != nil:
		c.reduce(v)
	case n.view != nil:
		x := c.memory(n.args[0])
		y, ok := n.view(x)
		if !ok {
			y, _ = n.view(c.dense(x, n.DType))
		}
		c.at[v] = y
	case n.into != nil:
		c.scatter(v)
	case n.call != nil:
		c.addKernel(v)
	case n.result > 0:
		c.at[v] = c.beside[n.args[0]][n.result-1]
	}
}

// waits reports whether a value is one number, which the loops that read it compute.
func (c *compiler) waits(v Value) bool {
	n := &c.nodes[v]
	return n.emit != nil && size(n.Shape) == 1 && !n.placed &&
		(c.open == nil || !slices.Equal(c.open.Shape, n.Shape))
}

// ready reports whether the open loop can read a value: unless it is one of its folds.
func (c *compiler) ready(v Value) bool {
	if _, ok := c.open.values[v]; ok {
		return true
	}
	if _, ok := c.at[v]; ok {
		return !slices.ContainsFunc(c.open.dst, func(p strided) bool {
			return p.slot == c.at[v].slot
		})
	}
	for _, x := range c.nodes[v].args {
		if !c.ready(x) {
			return false
		}
	}
	return true
}

// element adds a value to a loop.
func (c *compiler) element(v Value) {
	n := &c.nodes[v]
	if c.open != nil {
		l := c.open
		fits := slices.Equal(n.Shape, l.Shape) || l.rows && !n.placed &&
			oncePerRow(n.Shape, l.Shape)
		if !fits || len(l.Code) > longCode || !c.ready(v) {
			c.close()
		}
	}
	if c.open == nil {
		c.open = newLoop(n.Shape)
	}
	c.read(v)
	c.open.members = append(c.open.members, v)
}

// read returns a value in the open loop.
func (c *compiler) read(v Value) fuse.Value {
	l := c.open
	if x, ok := l.values[v]; ok {
		return x
	}
	n := &c.nodes[v]
	if from, ok := c.at[v]; ok {
		l.values[v] = l.load(n.DType, from)
		return l.values[v]
	}
	var args []fuse.Value
	for _, x := range n.args {
		args = append(args, c.read(x))
	}
	l.values[v] = n.emit(l.Program, args)
	return l.values[v]
}

// reduce adds a fold to a loop: of its rows, or as an output.
func (c *compiler) reduce(v Value) {
	n := &c.nodes[v]
	x := n.args[0]
	of := c.nodes[x].Tensor
	if l := c.open; l != nil && (!l.admits(of.Shape, n.axes) || len(l.Code) > longCode ||
		!c.ready(x)) {
		c.close()
	}
	if c.open == nil {
		c.open = newLoop(of.Shape)
	}
	l := c.open
	if op, ok := fuse.OfRow(n.fold); ok && foldsRows(of.Shape, n.axes) {
		l.rows = true
		l.values[v] = l.Do(op, c.read(x))
		l.members = append(l.members, v)
		return
	}
	folded := c.read(x)
	c.at[v] = c.room(v)
	l.reduce(n.fold, n.axes, folded, n.DType, c.at[v])
}

// close ends the open loop. What others read is stored.
func (c *compiler) close() {
	l := c.open
	c.open = nil
	if l == nil || c.err != nil {
		return
	}
	for _, v := range l.members {
		inside := func(u Value) bool { return u != v && slices.Contains(l.members, u) }
		if slices.ContainsFunc(c.users[v], func(u Value) bool { return !inside(u) }) {
			c.at[v] = c.room(v)
			l.store(l.values[v], c.nodes[v].DType, c.at[v])
		}
	}
	c.run(l)
}

// run adds the step of a loop.
func (c *compiler) run(l *loop) {
	ready, err := fuse.Host(l.Program, nil)
	if err != nil {
		c.err = err
		return
	}
	c.addStep(l.dst, l.src, func(dst, src []backend.Buffer) error {
		return ready.Run(dst, src, backend.Buffer{})
	})
}

func (c *compiler) addStep(dst, src []strided, run kernel) {
	to, from := make([]backend.Buffer, len(dst)), make([]backend.Buffer, len(src))
	c.host.steps = append(c.host.steps, kernelRun{spans(dst), spans(src), run, to, from})
}

// room returns memory for a value in row-major order: that of the result, or new memory.
func (c *compiler) room(v Value) strided {
	n := &c.nodes[v]
	p := strided{len(c.host.in), 0, n.Shape, rowMajor(n.Shape)}
	if v != c.result {
		p.slot = c.slot(n.Tensor)
	}
	return p
}

// slot returns the place of new memory.
func (c *compiler) slot(t Tensor) int {
	bytes := size(t.Shape) * t.DType.Size()
	words := backend.Of(make([]float64, (bytes+7)/8)).As(t.DType)
	c.host.memory = append(c.host.memory, words.Slice(0, size(t.Shape)))
	return len(c.host.memory) - 1
}

// memory returns where a value lies, after steps that compute it.
func (c *compiler) memory(v Value) strided {
	if _, ok := c.at[v]; !ok {
		if c.open == nil || !slices.Contains(c.open.members, v) {
			c.close()
			c.open = newLoop(c.nodes[v].Shape)
			c.element(v)
		}
		c.close()
	} else if c.open != nil && !c.ready(v) {
		c.close()
	}
	return c.at[v]
}

// copy adds a step that copies.
func (c *compiler) copy(d backend.DType, to, from strided) {
	l := newLoop(to.shape)
	l.store(l.load(d, from), d, to)
	c.run(l)
}

// dense returns a copy in row-major order.
func (c *compiler) dense(x strided, d backend.DType) strided {
	y := strided{c.slot(Tensor{x.shape, d}), 0, x.shape, rowMajor(x.shape)}
	c.copy(d, y, x)
	return y
}

// scatter copies operands into a value.
func (c *compiler) scatter(v Value) {
	n := &c.nodes[v]
	y := c.room(v)
	if len(n.args) == 1 {
		zero := func(dst, _ []backend.Buffer) error { return kernels.Host{}.Zero(dst[0]) }
		c.addStep([]strided{y}, nil, zero)
	}
	for i, x := range n.args {
		c.copy(n.DType, n.into(y, i), c.memory(x))
	}
	c.at[v] = y
}

// addKernel adds the step of a kernel.
func (c *compiler) addKernel(v Value) {
	n := &c.nodes[v]
	var src []strided
	for _, x := range n.args {
		p := c.memory(x)
		if !p.dense() {
			p = c.dense(p, c.nodes[x].DType)
		}
		src = append(src, p)
	}
	c.at[v] = c.room(v)
	dst := []strided{c.at[v]}
	for _, t := range n.besides {
		dst = append(dst, strided{c.slot(t), 0, t.Shape, rowMajor(t.Shape)})
	}
	c.beside[v] = dst[1:]
	c.addStep(dst, src, n.call)
}

// finish makes the result.
func (c *compiler) finish() {
	p := c.memory(c.result)
	c.close()
	if slot := len(c.host.in); p.slot != slot && c.err == nil {
		c.copy(c.host.out.DType, strided{slot, 0, p.shape, rowMajor(p.shape)}, p)
	}
}
