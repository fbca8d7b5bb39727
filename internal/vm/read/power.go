package read

import (
	"gorgonia.org/gorgonia"

	"github.com/euryale-ml/euryale/internal/stock"
	"github.com/euryale-ml/euryale/internal/vm/ir"
	"github.com/euryale-ml/euryale/kernels/fuse"
)

// The gradients of a power z = x^y are dz*y*x^(y-1) and dz*z*log(x). At a base of 0 Gorgonia
// multiplies 0 by an infinity, which is NaN. As in PyTorch, the first one is 0 where y is 0, and
// the second one where x is 0 and y is not negative.

// ofPower adds what a product is that gorgonia.Grad has made as a gradient of a power, none if it
// is another product.
func (b *builder) ofPower(f fuse.Op) ir.ID {
	if f != fuse.Mul || !b.float() || stock.Group(b.node) != stock.Gradients {
		return none
	}
	scaled, factor := b.nodes[0], b.nodes[1]
	if functionOf(scaled) != fuse.Mul {
		return none
	}
	of := stock.Operands(scaled)[1] // y, or z
	switch {
	case functionOf(factor) == fuse.Pow && oneLess(stock.Operands(factor)[1], of):
		return b.unless(of, nil)
	case isLog(factor) && functionOf(of) == fuse.Pow &&
		stock.Operands(of)[0] == stock.Operands(factor)[0]:
		return b.unless(stock.Operands(of)[1], stock.Operands(of)[0])
	}
	return none
}

// unless adds the product of the node, but 0 where the exponent y is 0; or, given a base x, dz*0
// where that is 0 and y is not negative.
func (b *builder) unless(y, x *gorgonia.Node) ir.ID {
	product := b.pointwise(fuse.Mul, b.dtype)
	id, ok := b.values[y]
	if product < 0 || !ok {
		return none
	}
	zero, exponent := b.scalar(0), b.expand(id, b.shape)
	if exponent < 0 {
		return none
	}
	if x == nil {
		return b.Do(fuse.Where, b.Do(fuse.Equal, exponent, zero), zero, product)
	}
	base := b.expand(b.values[x], b.shape)
	dz := b.expand(b.values[stock.Operands(b.nodes[0])[0]], b.shape)
	if base < 0 || dz < 0 {
		return none
	}
	at := b.Do(fuse.Mul, b.Do(fuse.Equal, base, zero), b.Do(fuse.GreaterEqual, exponent, zero))
	return b.Do(fuse.Where, at, b.Do(fuse.Mul, dz, zero), product)
}

// isLog reports whether a node is the natural logarithm of another one.
func isLog(n *gorgonia.Node) bool {
	return stock.Name(n.Op()) == "elemUnaryOp" && unaryFuncs[n.Op().String()] == fuse.Log
}

// oneLess reports whether a node is y - 1, as Gorgonia writes that.
func oneLess(n, y *gorgonia.Node) bool {
	if functionOf(n) != fuse.Sub || stock.Operands(n)[0] != y {
		return false
	}
	one := stock.Operands(n)[1]
	if one.Value() == nil {
		return false
	}
	x, ok := number(one.Value())
	return ok && x == 1
}
