package tcp

import (
	"fmt"
	"time"
	"unsafe"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/backend/internal/hosted"
	"github.com/euryale-ml/euryale/internal/group"
	"github.com/euryale-ml/euryale/internal/kernels"
)

const (
	// oneShotBytes is the largest size, summed over all other ranks, at which a rank sends its
	// whole operand to all at once: for more, the extra bytes cost more than a second step.
	oneShotBytes = 64 << 10
	// pairBytes is that limit for two ranks. They send as many bytes in two steps as in one, and
	// each adds up half, which is worth a second step from 1 MiB on (2026-11-23-epyc2-tcp.md).
	pairBytes = 512 << 10
	// segmentBytes is how much is added up at a time, and sent on, while the next segments arrive:
	// as much as the processor's cache holds for several ranks. Up to ahead segments are received
	// before the slowest rank's are there.
	segmentBytes = 128 << 10
	ahead        = 4
)

// everyone stands for all ranks but this one, nobody for no rank.
const (
	everyone = -1
	nobody   = -2
)

// relay is the part of a call's data that this rank receives segment by segment, and adds up or
// sends on as soon as a segment is complete. A call without such a part has the zero relay.
type relay struct {
	adds   bool // result is the sum of every rank's operand
	op     backend.ReduceOp
	order  backend.Association
	own    backend.Buffer // this rank's operands of result, apart elements apart
	apart  int
	result backend.Buffer
	// everyone gets this rank's operand of the same segments, which the result may overwrite
	shown bool
	from  int // who sends
	to    int // who gets the result
	// behind returns where to put the data that rank p sends after its share of the relay.
	behind func(p int) []byte

	asked, done int  // elements of result
	rest        bool // behind was asked for
}

// Collect implements [hosted.Engine].
func (e *engine) Collect(k *hosted.Call) error {
	e.Board.Post(&k.Header, false) // for the timeout: headers are compared when data comes
	e.sendHeaders(k)
	switch k.Kind {
	case backend.AllReduce:
		e.allReduce(k)
	case backend.Reduce:
		e.reduce(k)
	case backend.ReduceScatter:
		e.reduceScatter(k)
	case backend.Broadcast:
		e.broadcast(k)
	case backend.AllGather:
		e.gatherOn(k, everyone)
	case backend.Gather:
		e.gatherOn(k, k.Root)
	case backend.Scatter:
		e.scatter(k)
	case backend.AllToAll:
		e.allToAll(k)
	default:
		return fmt.Errorf("%w: backend tcp has no %v", backend.ErrUnsupported, k.Kind)
	}
	return e.travel(k)
}

// small reports whether ranks send each other the whole operand of a reduction.
func (e *engine) small(k *hosted.Call) bool {
	return isOneShot(k.Collective, k.Count*k.DType().Size(), e.Size())
}

func (e *engine) allReduce(k *hosted.Call) {
	if k.Splits != nil {
		e.branch(k)
	}
	if e.small(k) {
		e.sendBySegment(k, everyone, 0, k.Count)
		e.add(k, k.Src, k.Dst, nobody)
		e.relay.shown = true
		return
	}
	e.sendParts(k)
	lo, hi := partBounds(k, e.Rank(), e.Size())
	e.add(k, k.Src.Slice(lo, k.Src.Len()), k.Dst.Slice(lo, hi), everyone)
	e.relay.behind = func(p int) []byte { return partOf(k, k.Dst, p, e.Size()) }
}

// branch records how many operands each rank has of a sum of branches.
func (e *engine) branch(k *hosted.Call) {
	for r := range e.Size() {
		e.branches[r] = k.Branches(e.branches[r][:0], r)
		e.sizes = append(e.sizes, e.branches[r]...)
	}
}

// held returns how many operands rank r has of a reduction.
func (e *engine) held(r int) int {
	if len(e.sizes) == 0 {
		return 1
	}
	return len(e.branches[r])
}

// sendBySegment sends a part of this rank's operands, in the order in which the relay of the rank
// that adds them up expects it.
func (e *engine) sendBySegment(k *hosted.Call, to, lo, hi int) {
	if len(e.sizes) == 0 {
		e.sendAll(to, k.Src.Slice(lo, hi))
		return
	}
	per := segment(k.DType(), hi-lo)
	for ; lo < hi; lo += per {
		for i := range e.held(e.Rank()) {
			e.sendAll(to, k.Src.Slice(i*k.Count+lo, i*k.Count+min(lo+per, hi)))
		}
	}
}

func (e *engine) reduce(k *hosted.Call) {
	isRoot := e.Rank() == k.Root
	lo, hi := partBounds(k, e.Rank(), e.Size())
	switch small := e.small(k); {
	case small && isRoot:
		e.add(k, k.Src, k.Dst, nobody)
	case small:
		e.sendAll(k.Root, k.Src)
	case isRoot:
		e.sendParts(k)
		e.add(k, k.Src.Slice(lo, hi), k.Dst.Slice(lo, hi), nobody)
		e.relay.behind = func(p int) []byte { return partOf(k, k.Dst, p, e.Size()) }
	default:
		e.sendParts(k)
		e.add(k, k.Src.Slice(lo, hi), e.sums(k.DType(), hi-lo), k.Root)
	}
}

func (e *engine) reduceScatter(k *hosted.Call) {
	for p := range e.Size() {
		lo, hi := k.Chunk(p, e.Size(), k.Count)
		e.sendAll(p, k.Src.Slice(lo, hi))
	}
	lo, hi := k.Chunk(e.Rank(), e.Size(), k.Count)
	e.add(k, k.Src.Slice(lo, hi), k.Dst, nobody)
}

// gatherOn collects on one rank, or on everyone.
func (e *engine) gatherOn(k *hosted.Call, to int) {
	e.sendAll(to, k.Src)
	if to != everyone && to != e.Rank() {
		return
	}
	for p := range e.Size() {
		lo, hi := k.Chunk(p, e.Size(), k.Count)
		e.receiveInto(p, k.Dst.Slice(lo, hi), k.Src)
	}
}

func (e *engine) scatter(k *hosted.Call) {
	if e.Rank() != k.Root {
		e.receiveInto(k.Root, k.Dst, backend.Buffer{})
		return
	}
	for p := range e.Size() {
		lo, hi := k.Chunk(p, e.Size(), k.Count)
		e.sendAll(p, k.Src.Slice(lo, hi))
		if p == e.Rank() {
			e.receiveInto(p, k.Dst, k.Src.Slice(lo, hi))
		}
	}
}

func (e *engine) allToAll(k *hosted.Call) {
	for p := range e.Size() {
		n, from, _ := k.Pair(e.Rank(), p, e.Size(), k.Count)
		sent := k.Src.Slice(from, from+n)
		e.sendAll(p, sent)
		n, _, to := k.Pair(p, e.Rank(), e.Size(), k.Count)
		e.receiveInto(p, k.Dst.Slice(to, to+n), sent)
	}
}

// broadcast sends everything to every rank, or a part to each, which that rank sends on.
func (e *engine) broadcast(k *hosted.Call) {
	root, isRoot := k.Root, e.Rank() == k.Root
	whole := isWhole(k.Count*k.DType().Size(), e.Size())
	index := func(p int) int { // of a rank among those that are not the root
		if p > root {
			return p - 1
		}
		return p
	}
	switch {
	case isRoot:
		for p := range e.Size() {
			if p == root {
				continue
			}
			if whole {
				e.sendAll(p, k.Src)
			} else {
				lo, hi := partBounds(k, index(p), e.Size()-1)
				e.sendAll(p, k.Src.Slice(lo, hi))
			}
		}
		if k.Dst.Len() > 0 {
			copy(k.Dst.Bytes(), k.Src.Bytes())
		}
	case whole:
		e.receiveInto(root, k.Dst, backend.Buffer{})
	default:
		lo, hi := partBounds(k, index(e.Rank()), e.Size()-1)
		e.relay = relay{result: k.Dst.Slice(lo, hi), from: root, to: everyone,
			behind: func(p int) []byte {
				return partOf(k, k.Dst, index(p), e.Size()-1)
			}}
	}
}

// sendHeaders prepares the lanes: every rank first sends every other rank the call's header.
func (e *engine) sendHeaders(k *hosted.Call) {
	k.Header.Put(&e.heads[e.Rank()])
	e.sizes = e.sizes[:0]
	e.relay = relay{from: nobody, to: nobody}
	nbytes := max(k.Src.NBytes(), k.Dst.NBytes())
	for p, l := range e.links {
		if l == nil {
			continue
		}
		l.out.reset(nbytes)
		l.in.reset(nbytes)
		l.out.add(e.heads[e.Rank()][:])
		l.in.add(e.heads[p][:])
	}
}

// sendAll sends a buffer to a rank, or to everyone; it sends nothing to this rank itself.
func (e *engine) sendAll(to int, b backend.Buffer) {
	for p, l := range e.links {
		if l != nil && (to == everyone || p == to) {
			l.out.add(b.Bytes())
		}
	}
}

// sendParts sends every rank its part of this rank's operand.
func (e *engine) sendParts(k *hosted.Call) {
	for p := range e.Size() {
		lo, hi := partBounds(k, p, e.Size())
		e.sendBySegment(k, p, lo, hi)
	}
}

// receiveInto receives from rank p into a buffer; for this rank itself it copies.
func (e *engine) receiveInto(p int, dst, own backend.Buffer) {
	if p == e.Rank() {
		if dst.Addr() != own.Addr() {
			copy(dst.Bytes(), own.Bytes())
		}
		return
	}
	e.links[p].in.add(dst.Bytes())
}

// add makes the relay for a sum of every rank's data.
func (e *engine) add(k *hosted.Call, own, result backend.Buffer, to int) {
	e.relay = relay{adds: true, op: k.Op, order: k.Association, own: own, apart: k.Count,
		result: result, from: everyone, to: to}
}

// sums returns memory for sums that are for another rank.
func (e *engine) sums(d backend.DType, n int) backend.Buffer {
	if need := n * d.Size(); cap(e.sum) < need {
		e.sum = make([]byte, need)
	}
	return backend.Host(d, unsafe.Pointer(unsafe.SliceData(e.sum)), n)
}

// partBounds returns where the i-th of n parts of the whole operand lies, in elements. Parts are
// whole cache lines.
func partBounds(k *hosted.Call, i, n int) (lo, hi int) {
	perLine := lineBytes / k.DType().Size()
	lines := (k.Count + perLine - 1) / perLine
	per := (lines + n - 1) / n * perLine
	return min(i*per, k.Count), min((i+1)*per, k.Count)
}

func partOf(k *hosted.Call, b backend.Buffer, i, n int) []byte {
	lo, hi := partBounds(k, i, n)
	return b.Slice(lo, hi).Bytes()
}

const lineBytes = 64

// travel moves everything in the lanes, and what the relay adds to them.
func (e *engine) travel(k *hosted.Call) error {
	defer e.wait.goOn()
	e.ask()
	for {
		moved, pending, awaited := false, false, -1
		for i := 1; i < e.Size(); i++ {
			p := (e.Rank() + i) % e.Size()
			l := e.links[p]
			did, err := e.transfer(k, p, l)
			if err != nil {
				return err
			}
			moved = moved || did
			pending = pending || l.out.pending() || l.in.pending()
			if awaited < 0 && l.in.pending() {
				awaited = p
			}
		}
		switch {
		case e.relayOn() || pending && moved:
			e.wait.goOn()
		case !pending:
			return nil
		default:
			if err := e.pauseFor(awaited, k); err != nil {
				return err
			}
		}
	}
}

// pauseFor is pause while waiting for rank p, if p is a rank.
func (e *engine) pauseFor(p int, k *hosted.Call) error {
	if a := e.World.Awaited; a.Counts() && p >= 0 {
		defer a.Since(time.Now(), e.Part.Members[p])
	}
	return e.pause(k)
}

// transfer moves what can be moved between this rank and rank p.
func (e *engine) transfer(k *hosted.Call, p int, l *link) (moved bool, err error) {
	if l.lost != nil {
		return false, nil
	}
	if l.out.pending() {
		moved = l.send() > 0
	}
	if l.in.pending() {
		before := l.in.moved
		moved = l.receive() > 0 || moved
		if before < backend.HeaderSize && l.in.moved >= backend.HeaderSize {
			if err := e.compare(k, p); err != nil {
				return false, err
			}
		}
	}
	return moved, nil
}

// compare fails the group if rank p has begun a different call than k. What most of the ranks call
// shows once the headers of all have come.
func (e *engine) compare(k *hosted.Call, p int) error {
	if !e.Verify.Load() || backend.Digest(&e.heads[e.Rank()]) == backend.Digest(&e.heads[p]) {
		return nil
	}
	for late := e.Member.AwaitsStragglers(); e.exchangesHeads() && !late.Over(); {
		if err := e.pause(k); err != nil {
			return err
		}
	}
	digests := make([]uint64, e.Size())
	for p, l := range e.links {
		digests[p] = group.Unseen
		if l == nil || l.in.moved >= backend.HeaderSize {
			digests[p] = backend.Digest(&e.heads[p])
		}
	}
	d := group.Differ(digests, func(p int) *[backend.HeaderSize]byte { return &e.heads[p] })
	e.Member.Tell(d.Differs())
	return e.Failure(k)
}

// exchangesHeads moves what can be moved, and reports whether another rank still misses this one's
// header, or this rank theirs. The data behind it means nothing, as calls differ.
func (e *engine) exchangesHeads() (some bool) {
	for _, l := range e.links {
		if l == nil {
			continue
		}
		if l.lost == nil && l.out.pending() {
			l.send()
		}
		if l.lost == nil && l.in.pending() {
			l.receive()
		}
		some = some || min(l.in.moved, l.out.moved) < backend.HeaderSize
	}
	return some
}

// ask asks for as much as the relay can take.
func (e *engine) ask() {
	r := &e.relay
	n := r.result.Len()
	per := e.segment()
	for r.asked < n && r.asked-r.done < ahead*per {
		lo, hi := r.asked, min(r.asked+per, n)
		for p, l := range e.links {
			if l == nil || r.from != everyone && r.from != p {
				continue
			}
			if !r.adds {
				l.in.add(r.result.Slice(lo, hi).Bytes())
				continue
			}
			for i := range e.held(p) {
				l.in.add(e.operand(p, i, lo, hi).Bytes())
			}
		}
		r.asked = hi
	}
	if r.asked == n && !r.rest && r.behind != nil {
		r.rest = true
		for p, l := range e.links {
			if l != nil && (r.from == everyone || r.from != p) {
				l.in.add(r.behind(p))
			}
		}
	}
}

// segment returns the elements of a segment of the relay.
func (e *engine) segment() int { return segment(e.relay.result.DType(), e.relay.result.Len()) }

// segment returns the elements of a segment of n elements.
func segment(d backend.DType, n int) int {
	size := max(1, d.Size())
	return max(lineBytes/size, min(segmentBytes/size, n))
}

// operand returns where the elements of rank p's operand number i arrive.
func (e *engine) operand(p, i, lo, hi int) backend.Buffer {
	d := e.relay.result.DType()
	per := e.segment()
	slots := ahead * per * d.Size() // of one operand
	if all := max(e.Size(), len(e.sizes)) * slots; cap(e.room) < all {
		e.room = make([]byte, all)
	}
	for r := range p {
		i += e.held(r)
	}
	at := i*slots + lo/per%ahead*per*d.Size()
	return backend.Host(d, unsafe.Pointer(&e.room[:cap(e.room)][at]), hi-lo)
}

// relayOn adds up, and sends on, the segments that are complete, and asks for the next.
func (e *engine) relayOn() (moved bool) {
	r := &e.relay
	for r.done < r.asked {
		hi := min(r.done+e.segment(), r.result.Len())
		if !e.arrived(hi * r.result.DType().Size()) {
			break
		}
		part := r.result.Slice(r.done, hi)
		if r.adds {
			e.terms = e.terms[:0]
			for p := range e.Size() {
				for i := range e.held(p) {
					x := r.own
					if p == e.Rank() {
						x = x.Slice(i*r.apart+r.done, i*r.apart+hi)
					} else {
						x = e.operand(p, i, r.done, hi)
					}
					e.terms = append(e.terms, x)
				}
			}
			kernels.Host{}.ReduceChecked(r.order, r.op, part, e.terms, e.sizes)
		}
		for p, l := range e.links {
			if l != nil && (r.to == everyone && p != r.from || r.to == p) {
				l.out.add(part.Bytes())
			}
		}
		r.done, moved = hi, true
		e.ask()
	}
	return moved
}

// arrived reports whether nbytes bytes of the relay have come from all senders, and the result may
// overwrite this rank's operand.
func (e *engine) arrived(nbytes int) bool {
	r := &e.relay
	from := func(p int) int { return e.held(p)*nbytes + backend.HeaderSize }
	for p, l := range e.links {
		if l == nil {
			continue
		}
		if (r.from == everyone || r.from == p) && l.in.moved < from(p) || r.shown &&
			l.out.moved < from(e.Rank()) {
			return false
		}
	}
	return true
}
