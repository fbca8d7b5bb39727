package cuda

import (
	"github.com/euryale-ml/euryale/backend"
)

// MaxPiece is how many bytes of an [AllToAll], or an [AllGather], one rank can send to another:
// indices have 32 bits.
const MaxPiece = 1 << 31

// mostInPlace is how many bytes a piece has at the most that is written where it belongs: longer
// ones go through staging, as if others did not reach their place. Pieces of 8 MiB take 0.87 of the
// time in place, of 32 and 128 MiB 1.05 and 1.08
// (bench/results/2026-11/2026-11-30-h200x2-exchanges.md).
const mostInPlace = 16 << 20

// collective is the call of an AllGather or AllToAll.
func (x *PeerCall) collective() backend.Collective {
	kind := backend.AllToAll
	if x.Way == AllGather {
		kind = backend.AllGather
	}
	return backend.Collective{Kind: kind, Splits: x.Splits, Rows: x.Rows}
}

// piece returns how many bytes rank s sends to rank r.
func (x *PeerCall) piece(p *Peers, s, r int) int {
	d := x.Src.DType().Size()
	switch {
	case x.Splits == nil && x.Way == AllGather:
		return x.Src.Len() * d
	case x.Splits == nil:
		return x.Src.Len() / p.Size * d
	case x.Way == AllGather:
		return x.Splits[s] * d
	}
	return x.Splits[s*p.Size+r] * d
}

// rows returns how many rows the source of rank s and the destination of rank r have. No rows of
// the source say that all of it goes to every rank.
func (x *PeerCall) rows(s, r int) (src, dst int) {
	switch {
	case x.Way == AllGather:
		return 0, 1
	case x.Rows == nil:
		return 1, 1
	}
	return x.Rows.Src[s], x.Rows.Dst[r]
}

// longest returns the bytes of the longest piece of an AllGather or AllToAll, 0 for other calls.
func (x *PeerCall) longest(p *Peers) (n int) {
	if x.Way != AllGather && x.Way != AllToAll {
		return 0
	}
	for s := range p.Size {
		for r := range p.Size {
			n = max(n, x.piece(p, s, r))
		}
	}
	return n
}

// checkPieces checks an AllGather or AllToAll.
func (x *PeerCall) checkPieces(p *Peers) error {
	what := x.collective()
	if _, err := what.Check(p.Rank, p.Size, x.Dst, x.Src); err != nil {
		return err
	}
	return x.fits(p, x.longest(p))
}

// allToAll makes c the call. The struct Pieces of the kernel comes last.
func (x *PeerCall) allToAll(c *Launch, p *Peers) {
	var src, dst, there [MaxPeers]uint32
	var at, pitch [MaxPeers]uint64
	srcRows, dstRows := x.rows(p.Rank, p.Rank)
	for r := range p.Size {
		_, rows := x.rows(p.Rank, r)
		src[r] = uint32(x.piece(p, p.Rank, r) / max(srcRows, 1))
		dst[r] = uint32(x.piece(p, r, p.Rank) / dstRows)
		there[r] = uint32(x.piece(p, p.Rank, r) / rows)
		for s := range p.Size {
			part := uint64(x.piece(p, s, r) / rows)
			if s < p.Rank {
				at[r] += part
			}
			pitch[r] += part
		}
	}
	longest := over(x.longest(p), vector) * vector
	c.Entry = Entry{Verb: ways[x.Way].verb, Type: unitTypes[1]}
	units := over(longest, vector)
	if x.InLines {
		c.Entry.Verb, units = "ll128alltoall", lineThreads*over(longest, line)
	}
	c.Grid, c.Block = Size{uint32(min(over(units, roundThreads), p.most())), 1},
		Size{roundThreads, 1}
	target := uint64(x.Target)
	if longest > mostInPlace {
		target = 0
	}
	p.pass(c, x.Op)
	c.pass(word(x.Dst), word(x.Src), uint64(longest), target, uint64(srcRows)|uint64(dstRows)<<32)
	for _, widths := range [][MaxPeers]uint32{src, dst, there} {
		for r := 0; r < MaxPeers; r += 2 {
			c.pass(uint64(widths[r]) | uint64(widths[r+1])<<32)
		}
	}
	c.pass(at[:]...)
	c.pass(pitch[:]...)
}
