package lower

import (
	"fmt"
	"slices"
	"strings"

	"github.com/euryale-ml/euryale/internal/vm/ir"
)

// Once is the program of a value that no run changes: it has one result, and leaves that stay as
// they are between runs. Runs find the value as constant number Index.
type Once struct {
	Index   int
	Program *ir.Program
}

// Hoist returns a program without what no run changes, and the programs of that: frozen are the
// leaves that stay. Values that are free, such as views, are not hoisted, nor are the gradients of
// updates, which lie where ranks exchange them.
//
//	f(leaves) = constant k, of the program f that runs when the leaves are set
//
// A value is hoisted if it takes at most as many bytes as its leaves, or twice as many if something
// else than a loop reads it, which needs it in memory in each run anyway. So a weight that is
// rounded or widened for products is hoisted, but no mask that is made of two vectors, nor what
// loops widen as they load it.
func Hoist(p *ir.Program, frozen []ir.Op, updates []Update) (*ir.Program, []Once) {
	h, next := newHoisting(p, frozen), 0
	for _, v := range p.Values {
		if c, ok := v.Op.(ir.Constant); ok {
			next = max(next, c.Index+1)
		}
	}
	to, all := map[ir.ID]ir.Constant{}, []Once(nil)
	for _, id := range h.worthwhile(updates) {
		to[id] = ir.Constant{Index: next + len(all)}
		all = append(all, Once{next + len(all), h.recipe(id)})
	}
	if all == nil {
		return p, nil
	}
	return prune(rewrite(p, func(n *numbering, id ir.ID, v ir.Value) ir.ID {
		if c, hoisted := to[id]; hoisted {
			v.Op, v.Args = c, nil
		}
		return n.add(v)
	})), all
}

// hoisting finds what no run changes.
type hoisting struct {
	program *ir.Program
	leaf    map[ir.Op]bool
	// By value: whether it is, and then how it lies in memory and whether it shares that of its
	// operand.
	fixed   []bool
	strides []ir.Dims
	free    []bool
}

func newHoisting(p *ir.Program, frozen []ir.Op) *hoisting {
	h := &hoisting{program: p, fixed: make([]bool, len(p.Values)), leaf: map[ir.Op]bool{},
		strides: make([]ir.Dims, len(p.Values)), free: make([]bool, len(p.Values))}
	for _, op := range frozen {
		h.leaf[op] = true
	}
	for i, v := range p.Values {
		if h.fixed[i] = h.same(v); h.fixed[i] {
			h.strides[i], h.free[i] = h.view(v)
		}
	}
	return h
}

// view returns how a value lies, and whether it costs nothing.
func (h *hoisting) view(v ir.Value) (strides ir.Dims, free bool) {
	strides = v.Shape.Strides()
	if !ir.View(v.Op) {
		return strides, false
	}
	x, lies := h.program.Values[v.Args[0]].Shape, h.strides[v.Args[0]]
	switch op := v.Op.(type) {
	case ir.Permute:
		for i := range op.Axes.Len() {
			strides = strides.With(i, lies.At(op.Axes.At(i)))
		}
	case ir.Slice:
		strides = lies.With(op.Axis, op.Step*lies.At(op.Axis))
	case ir.Broadcast:
		strides = lies
		for i := range v.Shape.Len() {
			if x.At(i) != v.Shape.At(i) {
				strides = strides.With(i, 0)
			}
		}
	case ir.Reshape:
		if as, ok := ir.Reshaped(x, lies, v.Shape); ok {
			return as, true
		}
		return strides, false // of a copy
	}
	return strides, true
}

// same reports whether a value is the same in each run, given which of those before it are. What an
// operation gives besides its result is part of it, so those that do are computed as a whole.
func (h *hoisting) same(v ir.Value) bool {
	if ir.Leaf(v.Op) {
		_, number := v.Op.(ir.Scalar)
		return number || h.leaf[v.Op]
	}
	switch v.Op.(type) {
	case ir.Opaque, ir.AllReduce, ir.AllGather, ir.Dropout, ir.Result, ir.Attention,
		ir.AttentionGrad, ir.LSTM:
		return false
	}
	return !slices.ContainsFunc(v.Args, func(a ir.ID) bool { return !h.fixed[a] })
}

// worthwhile returns the values that are hoisted.
func (h *hoisting) worthwhile(updates []Update) (hoisted []ir.ID) {
	p, n := h.program, len(h.program.Values)
	wanted, stored, gradient := make([]bool, n), make([]bool, n), make([]bool, n)
	for i, r := range p.Results {
		wanted[r], stored[r] = true, true
		gradient[r] = gradient[r] || i >= tail(p, updates)
	}
	for i := n - 1; i >= 0; i-- {
		v := p.Values[i]
		_, reduces := v.Op.(ir.Reduce)
		view := ir.View(v.Op)
		switch {
		case !wanted[i] && !ir.Effect(v.Op) || ir.Leaf(v.Op):
			continue
		case h.fixed[i] && !h.free[i] && !gradient[i] && h.pays(ir.ID(i), stored[i]):
			hoisted = append(hoisted, ir.ID(i))
			continue
		}
		for _, a := range v.Args {
			wanted[a] = true
			stored[a] = stored[a] || view && stored[i] || !view && !reduces &&
				!ir.Elementwise(v.Op)
			gradient[a] = gradient[a] || view && gradient[i]
		}
	}
	return hoisted
}

// pays reports whether a value is hoisted, given whether it is in memory in each run anyway.
func (h *hoisting) pays(id ir.ID, stored bool) bool {
	v, reads := h.program.Values[id], 0
	h.below(id, func(_ ir.ID, x ir.Value) {
		if _, number := x.Op.(ir.Scalar); ir.Leaf(x.Op) && !number {
			reads += x.Shape.Size() * x.DType.Size()
		}
	})
	if stored {
		reads *= 2
	}
	bytes := v.Shape.Size() * v.DType.Size()
	return bytes > 0 && bytes <= reads
}

// below calls f for a value and all that it depends on, once for each, operands first.
func (h *hoisting) below(id ir.ID, f func(id ir.ID, v ir.Value)) {
	seen := map[ir.ID]bool{}
	var visit func(id ir.ID)
	visit = func(id ir.ID) {
		if seen[id] {
			return
		}
		seen[id] = true
		for _, a := range h.program.Values[id].Args {
			visit(a)
		}
		f(id, h.program.Values[id])
	}
	visit(id)
}

// recipe returns the program of a value.
func (h *hoisting) recipe(id ir.ID) *ir.Program {
	p, to := &ir.Program{}, make(map[ir.ID]ir.ID)
	h.below(id, func(id ir.ID, v ir.Value) {
		args := make([]ir.ID, len(v.Args))
		for i, a := range v.Args {
			args[i] = to[a]
		}
		v.Args = args
		to[id] = p.Add(v)
	})
	p.Results = []ir.ID{to[id]}
	return p
}

// Recipe returns the program with its leaves as inputs 0, 1 and so on, which these are, and a text:
// programs with equal texts compute the same of these.
func (o Once) Recipe() (p *ir.Program, leaves []ir.Op, text string) {
	p = &ir.Program{Results: o.Program.Results}
	var b strings.Builder
	for _, v := range o.Program.Values {
		if _, number := v.Op.(ir.Scalar); ir.Leaf(v.Op) && !number {
			leaves = append(leaves, v.Op)
			v.Op = ir.Input{Index: len(leaves) - 1}
		}
		fmt.Fprintf(&b, "%#v %v %v %v\n", v.Op, v.Args, v.Shape, v.DType)
		p.Add(v)
	}
	return p, leaves, b.String()
}
