package plan

import (
	"slices"
	"testing"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/kernels/fuse"
	"github.com/euryale-ml/euryale/vm/internal/ir"
)

// What the loop behind a later product reads of an earlier product is computed again, if it is made of that
// and small operands; otherwise it is kept.
func TestRecompute(t *testing.T) {
	product := func(p *program, a, b ir.ID) ir.ID { return p.add(ir.MatMul{}, ir.Of(16, 16), a, b) }
	for _, test := range []struct {
		name string
		of   func(p *program, y ir.ID) ir.ID // what is read later, of a product
		want []string
	}{
		{"an activation with a bias", func(p *program, y ir.ID) ir.ID {
			bias := p.add(ir.Broadcast{}, ir.Of(16, 16), p.input(1, 1, 16))
			return p.unary(fuse.Tanh, p.binary(fuse.Add, y, bias))
		}, []string{"matmul NN", "loop add tanh exp", "matmul NN", "loop add tanh mul"}},
		{"two large operands", func(p *program, y ir.ID) ir.ID {
			return p.unary(fuse.Tanh, p.binary(fuse.Add, y, p.input(1, 16, 16)))
		}, []string{"matmul NN", "loop add tanh exp", "matmul NN", "loop mul"}},
		{"an operand of a loop", func(p *program, y ir.ID) ir.ID {
			sum := p.add(ir.Reduce{Op: backend.Sum, Axes: ir.Of(0)}, ir.Of(16), y)
			rows := p.add(ir.Broadcast{}, ir.Of(16, 16), p.add(ir.Reshape{}, ir.Of(1, 16), sum))
			return p.unary(fuse.Tanh, p.binary(fuse.Add, y, rows))
		}, []string{"matmul NN", "loop reduce-sum over (0)", "loop add tanh exp", "matmul NN", "loop mul"}},
	} {
		p := &program{}
		x := p.input(0, 16, 16)
		read := test.of(p, product(p, x, x))
		p.Results = []ir.ID{p.binary(fuse.Mul, product(p, p.unary(fuse.Exp, read), x), read)}
		if planned, got := ops(t, p); !slices.Equal(got, test.want) {
			t.Errorf("%s: the steps are %q, want %q, in\n%v", test.name, got, test.want, planned)
		}
	}
}
