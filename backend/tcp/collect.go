package tcp

import (
	"fmt"
	"unsafe"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/group"
	"github.com/euryale-ml/euryale/kernels"
)

const (
	// oneShotBytes is up to how many bytes, for all other ranks together, a rank sends all it has to
	// all at once: beyond, what that costs more in bytes is more than it saves in a second step.
	oneShotBytes = 64 << 10
	// pairBytes is that of two ranks. They send as much in two steps as in one, and each adds up
	// half, which is worth a second step from 1 MiB on (bench/results/2026-11-23-epyc2-tcp.md).
	pairBytes = 512 << 10
	// segmentBytes is what is added up at a time, and sent on, while the next arrive: what
	// the processor's cache holds for several ranks. Up to ahead segments are received before
	// the slowest rank's are there.
	segmentBytes = 128 << 10
	ahead        = 4
)

// everyone, in place of a rank, is all ranks but this one; nobody is none.
const (
	everyone = -1
	nobody   = -2
)

// relay is the part of a call's data that this rank receives segment by segment, and that it
// adds up or sends on as soon as a segment is complete. A call without one has the zero relay.
type relay struct {
	adds   bool // result is the sum of every rank's operand
	op     backend.ReduceOp
	own    backend.Buffer // this rank's operand
	result backend.Buffer
	shown  bool // everyone gets this rank's operand of the same segments, in whose place the result may be
	from   int  // who sends
	to     int  // who gets the result
	// behind is where what rank p sends behind its share of the relay belongs.
	behind func(p int) []byte

	asked, done int  // elements of result
	rest        bool // behind is asked for
}

// collect runs a call among two ranks or more. busy is held.
func (c *comm) collect(k *call) error {
	c.begin(k)
	switch k.c.Kind {
	case backend.AllReduce:
		c.allReduce(k)
	case backend.Reduce:
		c.reduce(k)
	case backend.ReduceScatter:
		c.reduceScatter(k)
	case backend.Broadcast:
		c.broadcast(k)
	case backend.AllGather:
		c.gather(k, everyone)
	case backend.Gather:
		c.gather(k, k.c.Root)
	case backend.Scatter:
		c.scatter(k)
	default:
		c.allToAll(k)
	}
	return c.travel(k)
}

// small reports whether ranks send each other the whole operand of a reduction.
func (c *comm) small(k *call) bool {
	if k.c.Algorithm != backend.Auto {
		return k.c.Algorithm == backend.OneShot
	}
	if c.size == 2 {
		return k.src.NBytes() <= pairBytes
	}
	return k.src.NBytes()*(c.size-1) <= oneShotBytes
}

func (c *comm) allReduce(k *call) {
	if c.small(k) {
		c.sendAll(everyone, k.src)
		c.add(k, k.src, k.dst, nobody)
		c.relay.shown = true
		return
	}
	c.sendParts(k)
	lo, hi := k.part(c.rank, c.size)
	c.add(k, k.src.Slice(lo, hi), k.dst.Slice(lo, hi), everyone)
	c.relay.behind = func(p int) []byte { return k.partOf(k.dst, p, c.size) }
}

func (c *comm) reduce(k *call) {
	isRoot := c.rank == k.c.Root
	lo, hi := k.part(c.rank, c.size)
	switch small := c.small(k); {
	case small && isRoot:
		c.add(k, k.src, k.dst, nobody)
	case small:
		c.sendAll(k.c.Root, k.src)
	case isRoot:
		c.sendParts(k)
		c.add(k, k.src.Slice(lo, hi), k.dst.Slice(lo, hi), nobody)
		c.relay.behind = func(p int) []byte { return k.partOf(k.dst, p, c.size) }
	default:
		c.sendParts(k)
		c.add(k, k.src.Slice(lo, hi), c.sums(k.dtype(), hi-lo), k.c.Root)
	}
}

func (c *comm) reduceScatter(k *call) {
	for p := range c.size {
		lo, hi := k.c.Chunk(p, c.size, k.count)
		c.sendAll(p, k.src.Slice(lo, hi))
	}
	lo, hi := k.c.Chunk(c.rank, c.size, k.count)
	c.add(k, k.src.Slice(lo, hi), k.dst, nobody)
}

// gather collects on one rank, or on everyone.
func (c *comm) gather(k *call, to int) {
	c.sendAll(to, k.src)
	if to != everyone && to != c.rank {
		return
	}
	for p := range c.size {
		lo, hi := k.c.Chunk(p, c.size, k.count)
		c.take(p, k.dst.Slice(lo, hi), k.src)
	}
}

func (c *comm) scatter(k *call) {
	if c.rank != k.c.Root {
		c.take(k.c.Root, k.dst, backend.Buffer{})
		return
	}
	for p := range c.size {
		lo, hi := k.c.Chunk(p, c.size, k.count)
		c.sendAll(p, k.src.Slice(lo, hi))
		if p == c.rank {
			c.take(p, k.dst, k.src.Slice(lo, hi))
		}
	}
}

func (c *comm) allToAll(k *call) {
	for p := range c.size {
		n, from, _ := k.c.Pair(c.rank, p, c.size, k.count)
		sent := k.src.Slice(from, from+n)
		c.sendAll(p, sent)
		n, _, to := k.c.Pair(p, c.rank, c.size, k.count)
		c.take(p, k.dst.Slice(to, to+n), sent)
	}
}

// broadcast sends everything to every rank, or a part to each, which sends it on.
func (c *comm) broadcast(k *call) {
	root, isRoot := k.c.Root, c.rank == k.c.Root
	whole := c.size == 2 || k.count*k.dtype().Size() <= oneShotBytes
	index := func(p int) int { // of a rank among those that are not the root
		if p > root {
			return p - 1
		}
		return p
	}
	switch {
	case isRoot:
		for p := range c.size {
			if p == root {
				continue
			}
			if whole {
				c.sendAll(p, k.src)
			} else {
				lo, hi := k.part(index(p), c.size-1)
				c.sendAll(p, k.src.Slice(lo, hi))
			}
		}
		if k.dst.Len() > 0 {
			copy(k.dst.Bytes(), k.src.Bytes())
		}
	case whole:
		c.take(root, k.dst, backend.Buffer{})
	default:
		lo, hi := k.part(index(c.rank), c.size-1)
		c.relay = relay{result: k.dst.Slice(lo, hi), from: root, to: everyone, behind: func(p int) []byte {
			return k.partOf(k.dst, index(p), c.size-1)
		}}
	}
}

// begin prepares the lanes: every rank sends every other one the call's header first.
func (c *comm) begin(k *call) {
	k.header.Put(&c.heads[c.rank])
	c.relay = relay{from: nobody, to: nobody}
	nbytes := max(k.src.NBytes(), k.dst.NBytes())
	for p, l := range c.links {
		if l == nil {
			continue
		}
		l.out.reset(nbytes)
		l.in.reset(nbytes)
		l.out.add(c.heads[c.rank][:])
		l.in.add(c.heads[p][:])
	}
}

// sendAll sends a buffer to a rank, or to everyone; to this rank itself nothing.
func (c *comm) sendAll(to int, b backend.Buffer) {
	for p, l := range c.links {
		if l != nil && (to == everyone || p == to) {
			l.out.add(b.Bytes())
		}
	}
}

// sendParts sends every rank its part of this one's operand.
func (c *comm) sendParts(k *call) {
	for p := range c.size {
		lo, hi := k.part(p, c.size)
		c.sendAll(p, k.src.Slice(lo, hi))
	}
}

// take receives from rank p into a buffer; from this rank itself it copies.
func (c *comm) take(p int, dst, own backend.Buffer) {
	if p == c.rank {
		if dst.Addr() != own.Addr() {
			copy(dst.Bytes(), own.Bytes())
		}
		return
	}
	c.links[p].in.add(dst.Bytes())
}

// add makes the relay of a sum of what every rank sends.
func (c *comm) add(k *call, own, result backend.Buffer, to int) {
	c.relay = relay{adds: true, op: k.c.Op, own: own, result: result, from: everyone, to: to}
}

// sums returns memory for sums that another rank wants.
func (c *comm) sums(d backend.DType, n int) backend.Buffer {
	if need := n * d.Size(); cap(c.sum) < need {
		c.sum = make([]byte, need)
	}
	return backend.Host(d, unsafe.Pointer(unsafe.SliceData(c.sum)), n)
}

// part returns where the i-th of n parts of the whole operand lies, in elements. Parts are whole
// cache lines.
func (k *call) part(i, n int) (lo, hi int) {
	perLine := lineBytes / k.dtype().Size()
	lines := (k.count + perLine - 1) / perLine
	per := (lines + n - 1) / n * perLine
	return min(i*per, k.count), min((i+1)*per, k.count)
}

func (k *call) partOf(b backend.Buffer, i, n int) []byte {
	lo, hi := k.part(i, n)
	return b.Slice(lo, hi).Bytes()
}

const lineBytes = 64

// travel moves everything that is in the lanes, and what the relay adds to them.
func (c *comm) travel(k *call) error {
	defer c.wait.goOn()
	c.ask()
	for {
		moved, pending := false, false
		for i := 1; i < c.size; i++ {
			p := (c.rank + i) % c.size
			l := c.links[p]
			did, err := c.move(k, p, l)
			if err != nil {
				return err
			}
			moved = moved || did
			pending = pending || l.out.pending() || l.in.pending()
		}
		did, err := c.relayOn()
		switch {
		case err != nil:
			return fmt.Errorf("%s: %v: %w", backend.RankOf(c), k.c, err)
		case did:
			c.wait.goOn()
		case !pending:
			return nil
		case moved:
			c.wait.goOn()
		default:
			if err := c.pause(k); err != nil {
				return err
			}
		}
	}
}

// move moves what can be moved between this rank and rank p.
func (c *comm) move(k *call, p int, l *link) (moved bool, err error) {
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
			if err := c.compare(k, p); err != nil {
				return false, err
			}
		}
	}
	return moved, nil
}

// compare fails the group if rank p has begun another call than k.
func (c *comm) compare(k *call, p int) error {
	mine, theirs := &c.heads[c.rank], &c.heads[p]
	if !c.verify.Load() || backend.Digest(mine) == backend.Digest(theirs) {
		return nil
	}
	d := group.Difference{Peer: p, Mine: *mine, Theirs: *theirs}
	c.member.Tell(d.Differs())
	return c.failure(k)
}

// ask asks for what the relay can take.
func (c *comm) ask() {
	r := &c.relay
	n := r.result.Len()
	per := c.segment()
	for r.asked < n && r.asked-r.done < ahead*per {
		lo, hi := r.asked, min(r.asked+per, n)
		for p, l := range c.links {
			if l == nil || r.from != everyone && r.from != p {
				continue
			}
			if r.adds {
				l.in.add(c.operand(p, lo, hi).Bytes())
			} else {
				l.in.add(r.result.Slice(lo, hi).Bytes())
			}
		}
		r.asked = hi
	}
	if r.asked == n && !r.rest && r.behind != nil {
		r.rest = true
		for p, l := range c.links {
			if l != nil && (r.from == everyone || r.from != p) {
				l.in.add(r.behind(p))
			}
		}
	}
}

// segment returns the elements of a segment of the relay.
func (c *comm) segment() int {
	size := max(1, c.relay.result.DType().Size())
	return max(lineBytes/size, min(segmentBytes/size, c.relay.result.Len()))
}

// operand returns where the elements of rank p's operand arrive.
func (c *comm) operand(p, lo, hi int) backend.Buffer {
	d := c.relay.result.DType()
	per := c.segment()
	slots := ahead * per * d.Size() // of one rank
	if cap(c.room) < c.size*slots {
		c.room = make([]byte, c.size*slots)
	}
	at := p*slots + lo/per%ahead*per*d.Size()
	return backend.Host(d, unsafe.Pointer(&c.room[:c.size*slots][at]), hi-lo)
}

// relayOn adds up, and sends on, the segments that are complete, and asks for the next.
func (c *comm) relayOn() (moved bool, err error) {
	r := &c.relay
	for r.done < r.asked {
		hi := min(r.done+c.segment(), r.result.Len())
		if !c.arrived(hi * r.result.DType().Size()) {
			break
		}
		part := r.result.Slice(r.done, hi)
		if r.adds {
			for p := range c.terms {
				if p == c.rank {
					c.terms[p] = r.own.Slice(r.done, hi)
				} else {
					c.terms[p] = c.operand(p, r.done, hi)
				}
			}
			if err := (kernels.Host{}).Reduce(r.op, part, c.terms...); err != nil {
				return false, err
			}
		}
		for p, l := range c.links {
			if l != nil && (r.to == everyone && p != r.from || r.to == p) {
				l.out.add(part.Bytes())
			}
		}
		r.done, moved = hi, true
		c.ask()
	}
	return moved, nil
}

// arrived reports whether so many bytes of the relay have come from all who send, and the result
// may take the place of this rank's operand.
func (c *comm) arrived(nbytes int) bool {
	r, nbytes := &c.relay, nbytes+backend.HeaderSize
	for p, l := range c.links {
		if l == nil {
			continue
		}
		if (r.from == everyone || r.from == p) && l.in.moved < nbytes || r.shown && l.out.moved < nbytes {
			return false
		}
	}
	return true
}
