package gpu

import (
	"fmt"
	"slices"
	"time"

	"github.com/euryale-ml/euryale/backend"
	peers "github.com/euryale-ml/euryale/internal/kernels/cuda"
	"github.com/euryale-ml/euryale/internal/spinwait"
)

// launch starts a call by its algorithm, and records event behind it.
func (c *Communicator) launch(q stream, k *call, event uintptr) error {
	switch k.use {
	case byNCCL:
		return c.launchNCCL(q, k, event)
	case byCopyEngines:
		return c.launchCopies(q, k)
	}
	return c.launchKernel(q, k, event)
}

// launchKernel starts a call by one of our kernels, and records event behind it.
func (c *Communicator) launchKernel(q stream, k *call, event uintptr) error {
	x := &c.exchange
	*x = peers.PeerCall{Op: k.what.Op, Tree: inTree(&k.what, c.size), Dst: k.dst, Src: k.src,
		Event: event}
	c.memory.placeOperands(x, k)
	return c.exchanges(q, x)
}

// exchanges launches x. order is held.
func (c *Communicator) exchanges(q stream, x *peers.PeerCall) error {
	if q != c.kernelsOf {
		k, ok := q.(exchanger)
		if !ok {
			return fmt.Errorf("%w: the kernels of a %T cannot exchange data",
				backend.ErrUnsupported, q)
		}
		c.kernelsOf, c.kernels = q, k
	}
	return c.kernels.Exchange(&c.memory.peers, x)
}

// placeOperands says how the kernel of a call is launched: which one it is, and where in the
// windows its operands are.
func (m *peerMemory) placeOperands(x *peers.PeerCall, k *call) {
	x.InLines = k.use == byLL && k.what.Kind != backend.AllReduce
	switch k.what.Kind {
	case backend.ReduceScatter:
		x.Way = peers.ReduceScatter
	case backend.AllGather:
		x.Way, x.Target, x.Splits = peers.AllGather, m.inWindow(k.dst), k.what.Splits
	case backend.AllToAll:
		x.Way, x.Target, x.Splits, x.Rows = peers.AllToAll, m.inWindow(k.dst), k.what.Splits,
			k.what.Rows
	default:
		algorithms[k.use].place(m, x, k)
	}
}

func (m *peerMemory) placeLL(x *peers.PeerCall, k *call) {
	if x.Way = peers.LL128; k.src.NBytes() <= packetBytes {
		x.Way = peers.LL
	}
}

func (m *peerMemory) placeLL128TwoShot(x *peers.PeerCall, _ *call) { x.Way = peers.LL128TwoShot }

func (m *peerMemory) placeMesh(x *peers.PeerCall, _ *call) { x.Way = peers.Mesh }

func (m *peerMemory) placeHalved(x *peers.PeerCall, k *call) {
	x.Way, x.Half = peers.Halved, k.what.AllowHalf
}

func (m *peerMemory) placeTwoShot(x *peers.PeerCall, k *call) {
	x.Way, x.Target = peers.TwoShot, m.placeOf(k.dst, k.dst.NBytes())
}

func (m *peerMemory) placeOneShot(x *peers.PeerCall, k *call) {
	if x.Way = peers.OneShot; k.dst.Addr() != k.src.Addr() {
		x.Source = m.placeOf(k.src, k.src.NBytes())
	}
}

// placeOf returns where memory lies in the windows, 0 if nowhere. unit is the size of
// what must be whole units.
func (m *peerMemory) placeOf(b backend.Buffer, unit int) peers.InWindow {
	if !peers.Placeable(b.Addr(), unit) {
		return 0
	}
	return m.inWindow(b)
}

// inWindow is placeOf without regard to units.
func (m *peerMemory) inWindow(b backend.Buffer) peers.InWindow {
	if i := m.windowOf(b); i >= 0 {
		return peers.PlaceIn(i+1, int(b.Addr()-m.windows[i].own.Addr()))
	}
	return 0
}

// windowOf returns the index of the window that memory lies in, -1 if there is none.
func (m *peerMemory) windowOf(b backend.Buffer) int {
	return slices.IndexFunc(m.windows, func(w *window) bool { return w.holds(b) })
}

// chooseAgain chooses once more where copy engines would run a call that they cannot: one that is
// not recorded, an all-reduce to where others do not reach, or one for which there is no staging.
// A copy to another device waits, in the driver, for what it does for that device's rank, which may
// be to take memory once the kernels that wait for the copy have ended: ranks of a graph have all
// that before they launch it. order is held.
func (c *Communicator) chooseAgain(k *call, recorded bool) {
	if k.use != byCopyEngines || recorded && c.plan.Staging >= align*c.size &&
		(k.what.Kind != backend.AllReduce || c.spreads(k)) {
		return
	}
	if k.use = byNCCL; eligible(&k.what, k.dtype) {
		k.use = c.fastest(&k.what, k.dtype, k.count*k.dtype.Size())
	}
}

// gaveUp returns the error of a call, and ends the group, if a kernel has given up waiting
// for a rank. Such a kernel has ended like any other.
func (c *Communicator) gaveUp(call string) error {
	peer := c.status.straggler()
	if peer < 0 {
		return nil
	}
	cause := fmt.Errorf("%w: %s did not join within %v, as the device has seen",
		backend.ErrTimeout, c.members.Rank(peer), c.limit)
	c.member.Abort(cause)
	c.destroy()
	return &backend.Error{Comm: c.name, Members: c.members, Rank: c.rank, Peer: peer, Call: call,
		Cause: cause}
}

// kernelsEnd waits for our kernels, which have been told to stop, unless they are behind other
// work: the end of NCCL's engine says nothing about them.
func (c *Communicator) kernelsEnd() {
	var started int64
	for i := range c.used[1:] {
		started += c.used[1+i].Load()
	}
	deadline := time.Now().Add(closeTime)
	for wait := (spinwait.Wait{}); started > 0 && !c.idle() &&
		time.Now().Before(deadline); wait.Pause() {
	}
}
