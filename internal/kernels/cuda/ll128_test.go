package cuda

import (
	"errors"
	"testing"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/testing/require"
)

// halvings makes every Halved call among peers of n elements.
func halvings(k Kernels, n int) error {
	var errs []error
	for size := 2; size <= MaxPeers; size++ {
		x, y := device(backend.F32, 1<<40, n), device(backend.F32, 1<<41, n)
		for _, half := range halves {
			for _, op := range []backend.ReduceOp{backend.Sum, backend.Avg} {
				errs = append(errs, k.Exchange(peersOf(size), &PeerCall{Way: Halved, Op: op,
					Half: half, Dst: y, Src: x}))
			}
		}
	}
	return errors.Join(errs...)
}

func TestOnlyFloatsAreHalved(t *testing.T) {
	x, y := device(backend.F32, 1<<40, 8), device(backend.F32, 1<<41, 8)
	small := peersOf(4)
	small.Lines = 7
	for name, test := range map[string]struct {
		p    *Peers
		x    PeerCall
		want error
	}{
		"no half": {peersOf(2), PeerCall{Way: Halved, Dst: y, Src: x}, backend.ErrUnsupported},
		"wide": {peersOf(2), PeerCall{Way: Halved, Half: backend.F32, Dst: y, Src: x},
			backend.ErrUnsupported},
		"of halves": {peersOf(2), PeerCall{Way: Halved, Half: backend.F16, Dst: y.As(backend.F16),
			Src: x.As(backend.F16)}, backend.ErrUnsupported},
		"of doubles": {peersOf(2), PeerCall{Way: Halved, Half: backend.F16, Dst: y.As(backend.F64),
			Src: x.As(backend.F64)}, backend.ErrUnsupported},
		"wrong op": {peersOf(2), PeerCall{Way: Halved, Half: backend.F16, Op: backend.Max, Dst: y,
			Src: x}, backend.ErrUnsupported},
		"lengths": {peersOf(2), PeerCall{Way: Halved, Half: backend.F16, Dst: y,
			Src: x.Slice(0, 4)}, backend.ErrArgument},
		"no room": {small, PeerCall{Way: Halved, Half: backend.F16, Dst: y, Src: x},
			backend.ErrArgument},
	} {
		require.Fails(t, name, New(newValidator(t)).Exchange(test.p, &test.x), test.want)
	}
}

// A round has no more lines than there is room for, and all rounds together have those of
// a segment.
func TestHalvedRoundsHaveRoom(t *testing.T) {
	v := newValidator(t)
	for _, size := range []int{2, 3, 8} {
		for _, n := range []int{1, 59, 60, 61, 1 << 20, 1<<25 + 7} {
			p := peersOf(size)
			x := device(backend.F32, 1<<40, n)
			require.NoError(t, New(v).Exchange(p, &PeerCall{Way: Halved, Half: backend.BF16, Dst: x,
				Src: x}))
			words := v.last.Params()
			some, rounds := int(words[len(words)-3]), int(words[len(words)-2])
			require.Check(t, some*2*size <= p.Lines && some*rounds*size*60 >= n &&
				(some-1)*rounds*size*60 < n, "%d elements among %d: %d rounds of %d lines, with "+
				"room for %d", n, size, rounds, some, p.Lines)
		}
	}
}
