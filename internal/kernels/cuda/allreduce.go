package cuda

import (
	"fmt"
	"math"
	"time"

	"github.com/euryale-ml/euryale/backend"
)

// What peers.cuh has room for.
const (
	MaxPeers      = 8   // ranks of a group
	MaxPeerBlocks = 128 // in a grid
	MaxWindows    = 64  // runs of memory that every rank reaches, staging among them
)

// The layout of a pad, in bytes: see the struct in peers.cuh.
const (
	windowsAt = MaxPeerBlocks * 32
	placesAt  = windowsAt + MaxWindows*MaxPeers*8
	hostsAt   = placesAt + 2*MaxPeerBlocks*MaxPeers*16 + 2*MaxPeerBlocks*MaxPeers*8
	padBytes  = hostsAt + 2*MaxPeers*8
)

// PadBytes returns the size of the zeroed memory that a rank gives to a group of
// size ranks: see [Peers] for packets and lines. It begins at a multiple of 128.
func PadBytes(size, packets, lines int) int {
	return padBytes + 2*size*packets*2*packet + 2*lines*lineSpace
}

// WindowRow returns where in a pad the addresses of a window are, as its rank
// reaches that of each rank: MaxPeers words. The host writes them before the first
// call that uses the window.
func WindowRow(window int) (offset, nbytes int) {
	return windowsAt + window*MaxPeers*8, MaxPeers * 8
}

// HostRow returns where in a pad there is a word for each rank that kernels leave
// alone.
func HostRow() (offset, nbytes int) { return hostsAt, MaxPeers * 8 }

// StatusBytes is the size of a group's status in host memory that the device
// reaches: a word of 32 bits that the host sets to end all waits, and one that the
// device sets to 1 + the rank that did not come within the limit.
const StatusBytes = 8

// InWindow says where an operand lies in a window. The zero Place means memory
// which the other ranks do not reach, or cannot use as it is.
type InWindow uint64

// PlaceIn returns the place at an offset in bytes in a window, from 1 on; window 0
// is staging.
func PlaceIn(window, offset int) InWindow { return InWindow(window)<<48 | InWindow(offset) }

// Placeable reports whether memory of nbytes at addr can be used where it is: ranks
// move whole units between them.
func Placeable(addr uintptr, nbytes int) bool { return addr%vector == 0 && nbytes%vector == 0 }

// Peers are the ranks of a group whose devices reach each other's memory, as one
// of them sees it.
type Peers struct {
	Rank, Size int
	Pads       [MaxPeers]uintptr // where this rank reaches that of each rank
	Status     uintptr           // where the device reaches it
	Limit      time.Duration     // of a wait for another rank
	Packets    int               // of 8 bytes, that a rank sends to another in an LL call
	Lines      int               // of 120 bytes, that all ranks together send to one in a round
	Staging    int               // bytes of each half of window 0
	Blocks     int               // the most in a grid, 0 for MaxPeerBlocks
	// Neighbours are, of a rank of a Mesh, the others of its clique and last its relay: pads and
	// windows of the others are not used.
	Neighbours [4]int
}

// Way is a way to exchange, one kernel each.
type Way uint8

// The ways. All of them add in rank order, or in a tree, in 32 bits, and round once.
const (
	LL Way = iota + 1 // all-reduce in packets of data and flags, of what fits Packets
	// all-reduce in lines of 128 bytes with a flag each, of what fits Lines
	LL128
	LL128TwoShot  // all-reduce: reduce-scatter and all-gather, in such lines
	OneShot       // all-reduce: everyone reads everything
	TwoShot       // all-reduce: reduce-scatter and all-gather
	ReduceScatter // of chunks of the length of dst
	AllGather     // of any type: see alltoall.go
	AllToAll      // of any type and layout
	Mesh          // all-reduce on a cube mesh: everyone reads its neighbours
	Halved        // all-reduce of f32 that travels as 16 bits: see ll128.go
)

var ways = [...]struct{ name, verb string }{
	LL: {"ll", "ll"}, LL128: {"ll128", "ll128"}, LL128TwoShot: {"ll128-two-shot", "ll128twoshot"},
	OneShot: {"one-shot", "oneshot"}, TwoShot: {"two-shot", "twoshot"},
	ReduceScatter: {"reduce-scatter", "scatter"}, AllGather: {"all-gather", "alltoall"},
	AllToAll: {"all-to-all", "alltoall"}, Mesh: {"mesh", "mesh"},
	Halved: {"halved", "halved"},
}

// String returns the name: "two-shot".
func (w Way) String() string {
	if w == 0 || int(w) >= len(ways) {
		return fmt.Sprintf("Way(%d)", uint8(w))
	}
	return ways[w].name
}

// PeerCall is a call of all peers. All but the buffers and their places is the same
// on every rank.
type PeerCall struct {
	Way Way
	Op  backend.ReduceOp // Sum or Avg
	// adds in the association backend.Tree: OneShot, TwoShot and ReduceScatter of F32
	Tree bool
	// ReduceScatter, AllGather and AllToAll: in one trip, in lines, of what fits Lines
	InLines  bool
	Dst, Src backend.Buffer // may be in place
	// Source and Target are the places of Src and Dst, where they have one: Source for a OneShot
	// that is not in place; Target for TwoShot, AllGather and AllToAll.
	Source, Target InWindow
	Splits         []int         // of AllGather and AllToAll, as in [backend.Collective]
	Rows           *backend.Rows // of AllToAll, nil for pieces that lie one after the other
	Half           backend.DType // F16 or BF16: what travels of a Halved call
	Event          uintptr       // of the driver, to be recorded behind the kernel; 0 for none
}

// Exchange starts a call: with y, x for dst and src, N for the number of ranks,
//
//	all-reduces:    for i { y[i] = op over r of x of rank r [i] }
//	ReduceScatter:  for i { y[i] = op over r of x of rank r [rank*len(y) + i] }
//	AllGather:      for r, i { y[r*len(x) + i] = x of rank r [i] }
//	AllToAll:       piece r of y = piece rank of x of rank r
//	Halved:         for i { y[i] = half(avg over r of half(x of rank r [i])) }, times N for Sum
//
// Every rank starts the same calls in the same order, each on one queue at a time.
func (k Kernels) Exchange(p *Peers, x *PeerCall) error {
	if err := x.check(p); err != nil {
		return err
	}
	// there is no kernel, and no end of one
	if x.longest(p) == 0 && (x.Src.Len() == 0 || x.Dst.Len() == 0) {
		if x.Event != 0 {
			return fmt.Errorf("%w: %v of no elements", backend.ErrArgument, x.Way)
		}
		return nil
	}
	var c Launch
	x.fill(&c, p)
	return k.launcher.Launch(c)
}

func (x *PeerCall) check(p *Peers) error {
	if p.Size < 2 || p.Size > MaxPeers || p.Rank < 0 || p.Rank >= p.Size {
		return fmt.Errorf("%w: %v of rank %d of %d: there are 2 to %d ranks", backend.ErrArgument,
			x.Way, p.Rank, p.Size, MaxPeers)
	}
	for _, b := range []backend.Buffer{x.Dst, x.Src} {
		if err := check.Zero(b); b.Len() > 0 && err != nil {
			return err
		}
	}
	src, dst := x.Src.Len(), x.Dst.Len()
	switch x.Way {
	case LL, LL128, LL128TwoShot, OneShot, TwoShot, Halved:
	case Mesh:
		if err := neighbours(p.Neighbours).check(p); err != nil {
			return err
		}
	case ReduceScatter:
		dst *= p.Size
	case AllGather, AllToAll:
		return x.checkPieces(p)
	default:
		return fmt.Errorf("%w: unknown %v", backend.ErrArgument, x.Way)
	}
	d := x.Src.DType()
	if src != dst || d != x.Dst.DType() {
		return fmt.Errorf("%w: %v among %d ranks from %d %v to %d %v", backend.ErrArgument, x.Way,
			p.Size, x.Src.Len(), d, x.Dst.Len(), x.Dst.DType())
	}
	if x.Way == Halved && !x.halves() {
		return fmt.Errorf("%w: no kernel %v(%v) of %v as %v", backend.ErrUnsupported, x.Way, x.Op,
			d, x.Half)
	}
	if x.InLines && (x.Way != ReduceScatter || x.Tree) {
		return fmt.Errorf("%w: no kernel %v in lines", backend.ErrUnsupported, x.Way)
	}
	if x.Tree && !(d == backend.F32 && (x.Way == OneShot || x.Way == TwoShot ||
		x.Way == ReduceScatter)) {
		return fmt.Errorf("%w: no kernel %v(%v) of %v that adds in a tree", backend.ErrUnsupported,
			x.Way, x.Op, d)
	}
	if !Adds(d, x.Op) {
		return fmt.Errorf("%w: no kernel %v(%v) of %v", backend.ErrUnsupported, x.Way, x.Op, d)
	}
	return x.fits(p, min(x.Src.NBytes(), x.Dst.NBytes()))
}

// fits checks that there is room for so many bytes from one rank to another.
func (x *PeerCall) fits(p *Peers, n int) error {
	room := p.room(x.Way)
	if x.InLines {
		room = p.room(LL128)
	}
	if n > room {
		return fmt.Errorf("%w: %v of %d bytes: there is room for %d", backend.ErrArgument, x.Way, n,
			room)
	}
	return nil
}

// room returns how many bytes a call may have.
func (p *Peers) room(w Way) int {
	switch {
	case w == LL:
		return p.Packets * packet
	case w == LL128:
		return p.Lines / p.Size * line
	case (w == LL128TwoShot || w == Halved) && p.Lines < 2*p.Size:
		return 0
	case w == AllGather || w == AllToAll:
		return MaxPiece
	}
	return math.MaxInt
}

// WholeLines reports whether the 128 bytes of a line, which a warp writes at once, arrive at once
// over NVLink on devices of a compute capability: what LL128, LL128TwoShot and Halved rely on.
// Those are the devices for which NCCL uses its protocol LL128: V100, A100, and Hopper and newer.
func WholeLines(capability int) bool {
	return capability == volta || capability == 80 || capability >= hopper
}

// Adds reports whether there are kernels that combine a type by an operation.
func Adds(d backend.DType, op backend.ReduceOp) bool {
	return (d == backend.F32 || d == backend.F16 || d == backend.BF16) &&
		(op == backend.Sum || op == backend.Avg)
}

const (
	packet       = 8   // bytes of data in one
	line         = 120 // bytes of data in one
	lineSpace    = 128 // bytes that it takes
	lineThreads  = 8   // that deal with one
	llThreads    = 256 // in a block: more blocks reach the links sooner
	roundThreads = 512 // in a block, where blocks meet: fewer blocks meet more cheaply
)

// fill makes c this call: the geometry and the parameters. There are as many blocks as there is
// work for, up to MaxPeerBlocks: fewer were slower, or no faster
// (2026-11-21-h200x4-lowlatency.txt). Other numbers of threads in a block were not measured.
func (x *PeerCall) fill(c *Launch, p *Peers) {
	c.Event = x.Event
	if x.Way == LL128TwoShot || x.Way == Halved {
		x.ll128TwoShot(c, p)
		return
	}
	if x.Way == AllGather || x.Way == AllToAll {
		x.allToAll(c, p)
		return
	}
	n, elements := x.Src.NBytes(), x.Src.Len()
	if x.Way == ReduceScatter {
		n, elements = x.Dst.NBytes(), x.Dst.Len()
	}
	c.Entry = Entry{Verb: ways[x.Way].verb, Type: x.Src.DType().String()}
	if x.Tree {
		c.Entry.Verb = "tree" + c.Entry.Verb
	}
	way := x.Way
	if x.InLines {
		c.Entry.Verb, way = "ll128scatter", LL128
	}
	// A thread begins with one unit; with more when the grid is full.
	units, perBlock := over(n, vector), roundThreads
	switch way {
	case LL:
		units, perBlock = over(n, packet), llThreads
	case LL128:
		units = lineThreads * over(n, line)
	case TwoShot:
		units = over(units, p.Size)
	}
	c.Grid, c.Block = Size{uint32(min(over(units, perBlock), p.most())), 1},
		Size{uint32(perBlock), 1}
	p.pass(c, x.Op)
	c.pass(word(x.Dst), word(x.Src), uint64(elements))
	switch way {
	case OneShot:
		c.pass(p.piece(1), uint64(x.Source))
	case TwoShot: // operands and results are staged
		c.pass(p.piece(2*p.Size), uint64(x.Target))
	case ReduceScatter: // in quarters of staging
		c.pass(p.piece(2 * (p.Size + 1)))
	case Mesh:
		c.pass(p.piece(p.Size), neighbours(p.Neighbours).word())
	}
}

func (p *Peers) most() int {
	if p.Blocks > 0 {
		return min(p.Blocks, MaxPeerBlocks)
	}
	return MaxPeerBlocks
}

// rounds cuts a segment of so many lines into rounds, all equal, that have room in so
// many lines of all ranks.
func (p *Peers) rounds(lines, room int) (some, rounds int) {
	rounds = over(lines, room/(2*p.Size))
	return over(lines, rounds), rounds
}

// piece returns the units that a round does of each of several shares.
func (p *Peers) piece(shares int) uint64 { return uint64(p.Staging / vector / shares) }

// pass passes the struct Group, which comes first.
func (p *Peers) pass(c *Launch, op backend.ReduceOp) {
	divisor := 1
	if op == backend.Avg {
		divisor = p.Size
	}
	words := (*[1 + MaxPeers + 6]uint64)(c.few[:])
	words[0] = uint64(p.Rank) | uint64(p.Size)<<32
	for i, pad := range p.Pads {
		words[1+i] = uint64(pad)
	}
	rest := (*[6]uint64)(words[1+MaxPeers:])
	rest[0], rest[1], rest[2] = uint64(p.Status), uint64(p.Limit.Nanoseconds()), uint64(p.Packets)
	rest[3], rest[4], rest[5] = uint64(p.Lines), uint64(p.Staging), uint64(divisor)
	c.n = len(words)
}
