//go:build gpu

package cuda

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"gorgonia.org/cu"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/kernels"
	"github.com/euryale-ml/euryale/internal/testing/require"
)

// pairing is two ranks on one device, each with a stream, whose kernels add by a variant.
type pairing struct {
	*gpu
	k [2]Kernels
}

const (
	pairedBytes   = 128 << 10 // of an operand: all numbers of 16 bits
	pairedPackets = pairedBytes / packet
	pairedLines   = 4 * pairedBytes / line
)

// pair loads the kernels that EURYALE_KERNELS=kernels asks for.
func (g *gpu) pair(t *testing.T, kernels string) pairing {
	t.Helper()
	loaded := require.Value(load(kernels))(t)
	t.Cleanup(func() {
		require.NoError(t, loaded.Unload())
	})
	p := pairing{gpu: g}
	for rank := range p.k {
		s := require.Value(cu.MakeStream(cu.NonBlocking))(t)
		p.k[rank] = loaded.On(s)
	}
	return p
}

// sum returns what both ranks have as the sum of two operands.
func (p pairing) sum(t *testing.T, way Way, d backend.DType, xs [2][]byte) [2][]byte {
	t.Helper()
	pad := (PadBytes(2, pairedPackets, pairedLines) + 255) / 256 * 256
	ys, status := 2*pad, 2*pad+2*pairedBytes
	memory := make([]byte, status+StatusBytes)
	at := func(offset int) uintptr { return uintptr(p.addr) + uintptr(offset) }
	for rank, x := range xs {
		copy(memory[ys+rank*pairedBytes:], x)
	}
	require.NoError(t, p.Write(memory))
	for rank := range xs {
		y := backend.OnDevice(d, at(ys+rank*pairedBytes), pairedBytes/d.Size())
		group := Peers{Rank: rank, Size: 2, Pads: [MaxPeers]uintptr{at(0), at(pad)},
			Status: at(status), Limit: 10 * time.Second,
			Packets: pairedPackets, Lines: pairedLines, Blocks: 16}
		require.NoError(t, p.k[rank].Exchange(&group, &PeerCall{Way: way, Dst: y, Src: y}))
	}
	require.NoError(t, errors.Join(cu.Synchronize(), p.Read(memory)))
	return [2][]byte{memory[ys : ys+pairedBytes], memory[ys+pairedBytes : ys+2*pairedBytes]}
}

// Variants of the kernels that add among ranks give bitwise identical results, those of the host:
// for all 16-bit floats, NaNs among them, which Volta rounds without the instruction for bf16.
func TestGPUVariantsAddToTheSameBits(t *testing.T) {
	g := openGPU(t, 8<<20)
	own := g.pair(t, "")
	volta := g.pair(t, "sm_70")
	rnd := rand.New(rand.NewPCG(1, 2))
	for _, d := range []backend.DType{backend.F32, backend.F16, backend.BF16} {
		var xs [2][]byte
		for i := range pairedBytes / 2 {
			xs[0] = binary.LittleEndian.AppendUint16(xs[0], uint16(i))
			xs[1] = binary.LittleEndian.AppendUint16(xs[1], uint16(rnd.Uint32()))
		}
		want := backend.Of(make([]byte, pairedBytes)).As(d)
		require.NoError(t, (kernels.Host{}).Reduce(backend.Sum, want, backend.Of(xs[0]).As(d),
			backend.Of(xs[1]).As(d)))
		for _, way := range []Way{LL, LL128, LL128TwoShot} {
			name := fmt.Sprintf("%v of %v", way, d)
			new, old := own.sum(t, way, d, xs), volta.sum(t, way, d, xs)
			require.Check(t, bytes.Equal(new[0], new[1]) && bytes.Equal(new[0], old[0]) &&
				bytes.Equal(new[0], old[1]), "%s: ranks or variants give different bits", name)
			got := backend.Of(new[0]).As(d)
			for i := range want.Len() {
				x, y := got.Slice(i, i+1), want.Slice(i, i+1)
				if !bytes.Equal(x.Bytes(), y.Bytes()) && !(isNaN(x) && isNaN(y)) {
					t.Fatalf("%s: element %d is %x, want %x", name, i, x.Bytes(), y.Bytes())
				}
			}
		}
	}
}
