package read

import (
	"strings"

	"gorgonia.org/gorgonia"

	"github.com/euryale-ml/euryale/internal/stock"
	"github.com/euryale-ml/euryale/internal/vm/ir"
	"github.com/euryale-ml/euryale/kernels/fuse"
)

// Gorgonia multiplies x by (x >= 0) to rectify it, and in LeakyRelu by (x < 0), too: -Inf times 0
// is NaN. What is meant is a choice, as in PyTorch: of x, and in the backward pass of the gradient.

// rectifiers returns the comparisons of nodes that are multiplied by what they compare.
func rectifiers(nodes gorgonia.Nodes) map[*gorgonia.Node]bool {
	found := map[*gorgonia.Node]bool{}
	for _, n := range nodes {
		if functionOf(n) != fuse.Mul {
			continue
		}
		x := stock.Operands(n)
		for i, mask := range x {
			if f := functionOf(mask); f != fuse.GreaterEqual && f != fuse.Less {
				continue
			}
			if stock.Operands(mask)[0] == x[1-i] {
				found[mask] = true
			}
		}
	}
	return found
}

// functionOf returns the function of a node of two operands, 0 if it has none.
func functionOf(n *gorgonia.Node) fuse.Op {
	if stock.Name(n.Op()) != "elemBinOp" {
		return 0
	}
	name, _, _ := strings.Cut(n.Op().String(), " ")
	return binaryFuncs[name]
}

// rectified adds the choice that a product with the comparison of a rectifier is, none if it is
// another product.
func (b *builder) rectified(f fuse.Op) ir.ID {
	if f != fuse.Mul || !b.float() {
		return none
	}
	for i, mask := range b.nodes {
		if !b.rectifiers[mask] {
			continue
		}
		compared, other := b.of(b.args[i]), b.args[1-i]
		if len(compared.Args) != 2 || compared.Shape != b.of(other).Shape ||
			!b.Program.Zero(compared.Args[1]) {
			continue
		}
		x, negative := compared.Args[0], compared.Op == ir.Binary{Op: fuse.Less}
		switch {
		case other == x && !negative:
			return b.Do(fuse.Relu, x)
		case other == x || stock.Group(b.node) == stock.Gradients:
			return b.below(x, other, negative)
		}
	}
	return none
}

// below adds y where x < 0 and 0 elsewhere, or the other way round.
func (b *builder) below(x, y ir.ID, inside bool) ir.ID {
	zero := b.scalar(0)
	less := b.Do(fuse.Less, x, zero)
	if inside {
		return b.Do(fuse.Where, less, y, zero)
	}
	return b.Do(fuse.Where, less, zero, y)
}
