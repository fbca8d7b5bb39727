package exec_test

import (
	"errors"
	"testing"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/internal/vm/exec"
	"github.com/euryale-ml/euryale/internal/vm/ir"
	"github.com/euryale-ml/euryale/internal/vm/lower"
	"github.com/euryale-ml/euryale/internal/vm/plan"
	"github.com/euryale-ml/euryale/kernels/fuse"
)

// slotted has one gradient, of which the memory begins anywhere, and an operation that notes where
// its result lies.
type slotted struct {
	exec.Buckets
	slot, y backend.Buffer
}

func (s *slotted) Slot(int, int) backend.Buffer { return s.slot }

func (s *slotted) Start(int, backend.Kind, backend.Buffer, backend.Buffer, backend.Queue,
	bool) (backend.Work, error) {
	return struct{ backend.Work }{}, nil
}

func (s *slotted) Finish(int, backend.Work) error { return nil }

func (s *slotted) Opaque(int) exec.Opaque { return nil }

func (s *slotted) Placed(int) exec.Placed { return s }

func (s *slotted) Scratch() int { return 0 }

func (s *slotted) StartOn(_ backend.Queue, y, _ backend.Buffer, x ...backend.Buffer) (backend.Work,
	error) {
	s.y = y
	copy(y.Bytes(), x[0].Bytes())
	return nil, nil
}

// TestValuesInSlotsLieAsInTheArena: a value in the memory of a gradient begins at a multiple of
// plan.Alignment, as kernels that load vectors expect. It is not there if it may not fit then.
func TestValuesInSlotsLieAsInTheArena(t *testing.T) {
	const n, size = 16, 4
	memory := make([]float32, n*n+plan.Alignment)
	for rows, fits := range map[int]bool{12: true, 13: false} {
		planned := gradientOf(t, rows, n)
		for at := range plan.Alignment / size {
			s := &slotted{slot: backend.Of(memory[at : at+n*n])}
			s.run(t, planned)
			from := int(s.y.Addr()) - int(s.slot.Addr())
			there := from >= 0 && from+s.y.NBytes() <= s.slot.NBytes()
			if there != fits || s.y.Addr()%plan.Alignment != 0 && there {
				t.Errorf("%d bytes lie %d behind the begin of a slot that is at %d:\n%v",
					s.y.NBytes(), from, at*size, planned)
			}
		}
	}
}

// gradientOf plans the gradient of a weight of n rows and columns, of the result of an operation
// with so many rows.
func gradientOf(t *testing.T, rows, n int) *plan.Plan {
	t.Helper()
	p := &ir.Program{}
	add := func(op ir.Op, shape ir.Dims, args ...ir.ID) ir.ID {
		p.Values = append(p.Values, ir.Value{Op: op, Args: args, Shape: shape, DType: backend.F32})
		return ir.ID(len(p.Values) - 1)
	}
	x, w := add(ir.Input{}, ir.Of(rows, n)), add(ir.Input{Index: 1}, ir.Of(n, n))
	y := add(ir.Opaque{Placed: true}, ir.Of(rows, n), x)
	z := add(ir.MatMul{}, ir.Of(rows, n), y, w)
	dw := add(ir.MatMul{TransA: true}, ir.Of(n, n), z, z)
	planned, err := within(plan.Standard())(p, lower.Update{Input: 1, Gradient: dw, Bucket: 1,
		Rule: func(p *fuse.Program, w, dw fuse.Value, kept []fuse.Value,
			_ func(int) fuse.Value) (fuse.Value, []fuse.Value, error) {
			return p.Do(fuse.Sub, w, dw), kept, nil
		}})
	require.NoError(t, err)
	return planned
}

// run runs a plan once.
func (s *slotted) run(t *testing.T, planned *plan.Plan) {
	t.Helper()
	e := require.Value(exec.New(planned, exec.Host{}, s, s))(t)
	for i, b := range planned.Buffers {
		if b.Kind == plan.Input {
			e.Bind(i, backend.Of(make([]float32, b.Bytes/b.DType.Size())))
		}
	}
	require.NoError(t, errors.Join(e.Run(0), e.Close()))
}
