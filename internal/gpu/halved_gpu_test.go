//go:build gpu

package gpu

import (
	"fmt"
	"testing"

	"github.com/euryale-ml/euryale/backend"
	peers "github.com/euryale-ml/euryale/internal/kernels/cuda"
)

// BenchmarkHalved times all-reduces of f32 that travel as 16 bits by one kernel, with
// grids of so many blocks and inboxes of so many lines, which are a round: "halved-bf16-
// 128x131072". "nccl" is the same of f32 as it is, "nccl-bf16" that of as many bf16, with
// no casts, and "chosen" that of f32 by what the table chooses.
func BenchmarkHalved(b *testing.B) {
	g := needGPUs(b, 2)
	for _, size := range g.sizes() {
		comms := g.group(b, size, forced(byTwoShot))
		for _, c := range comms {
			c.plan.Force = byNCCL
		}
		for _, nbytes := range []int{1 << 16, 1 << 18, 1 << 20, 4 << 20, 16 << 20, 64 << 20,
			128 << 20, 256 << 20} {
			b.Run(fmt.Sprintf("ranks=%d/bytes=%d", size, nbytes), func(b *testing.B) {
				race(b, comms, halvedContests(), backend.F32, nbytes, false)
			})
		}
	}
}

func halvedContests() []comparison {
	list := []comparison{
		{"nccl", false, func(c *Communicator, q backend.Queue, x backend.Buffer) error {
			_, err := c.startBy(q, byNCCL, sum, x, x)
			return err
		}},
		{"nccl-bf16", false, func(c *Communicator, q backend.Queue, x backend.Buffer) error {
			x = x.As(backend.BF16).Slice(0, x.Len())
			_, err := c.startBy(q, byNCCL, sum, x, x)
			return err
		}},
		{"chosen", false, func(c *Communicator, q backend.Queue, x backend.Buffer) error {
			_, err := c.Start(q, sum, x, x)
			return err
		}},
	}
	add := func(half backend.DType, blocks, lines int) {
		list = append(list, comparison{fmt.Sprintf("halved-%v-%dx%d", half, blocks, lines), false,
			func(c *Communicator, q backend.Queue, x backend.Buffer) error {
				return c.halveBy(q, half, blocks, lines, x)
			}})
	}
	add(backend.F16, peers.MaxPeerBlocks, lines)
	for l := lines; l >= 8<<10; l /= 2 {
		add(backend.BF16, peers.MaxPeerBlocks, l)
	}
	for _, blocks := range []int{64, 96, 112} {
		add(backend.BF16, blocks, lines)
		add(backend.BF16, blocks, lines/4)
	}
	return list
}

// halveBy starts a Halved call with a grid and inboxes of a size, the same on every rank.
func (c *Communicator) halveBy(q backend.Queue, half backend.DType, blocks, lines int,
	x backend.Buffer) error {
	whole := c.memory.peers
	defer func() { c.memory.peers = whole }()
	c.memory.peers.Blocks, c.memory.peers.Lines = blocks, lines
	return c.startWay(q, peers.PeerCall{Way: peers.Halved, Half: half, Dst: x, Src: x})
}
