package gpu

import "github.com/euryale-ml/euryale/backend"

// route is how a reduction is done.
type route uint8

const (
	native   route = iota // by NCCL alone
	divided               // by NCCL's sum and a division
	composed              // by moving chunks and combining them here
)

// routeOf chooses, by what all ranks know.
func routeOf(what backend.Collective, d backend.DType, P int) route {
	switch {
	case !what.Kind.Reduces():
		return native
	case inTree(&what, P):
		return composed
	case d.Float() && (what.Op == backend.Min || what.Op == backend.Max):
		return composed
	case what.Op != backend.Avg:
		return native
	case d.Float() && P&(P-1) == 0:
		return native
	case d == backend.F16:
		return composed
	default:
		return divided
	}
}

// call is a collective as one rank runs it.
type call struct {
	what     backend.Collective
	count    int // see backend.Collective.Check
	dtype    backend.DType
	rank, P  int
	dst, src backend.Buffer
	use      Algorithm
}

func (k *call) route() route {
	if k.P == 1 {
		return native
	}
	return routeOf(k.what, k.dtype, k.P)
}

// steps appends what NCCL does for a call that needs no arithmetic but its own.
func (k *call) steps(to []ncclStep) []ncclStep {
	if k.P == 1 {
		return k.copyAll(to)
	}
	even := k.what.Splits == nil
	switch k.what.Kind {
	case backend.AllReduce:
		return k.reduction(to, stepAllReduce, 0, k.src, k.dst)
	case backend.Reduce:
		return k.reduction(to, stepReduce, k.what.Root, k.src, k.ifRoot(k.dst))
	case backend.ReduceScatter:
		if even {
			return k.scattered(to)
		}
		return k.reduceChunks(to)
	case backend.AllGather:
		if even {
			return moved(to, stepAllGather, 0, k.src, k.dst)
		}
	case backend.Broadcast:
		src := k.src
		if k.rank != k.what.Root {
			src = k.dst
		}
		return moved(to, stepBroadcast, k.what.Root, src, k.dst)
	}
	return k.exchange(to)
}

func (k *call) ifRoot(b backend.Buffer) backend.Buffer {
	if k.rank != k.what.Root {
		return backend.Buffer{}
	}
	return b
}

// copyAll is any call of one rank alone.
func (k *call) copyAll(to []ncclStep) []ncclStep { return copied(to, k.src, k.dst) }

// reduction appends a reduction of all of src.
func (k *call) reduction(to []ncclStep, what int32, root int, src, dst backend.Buffer) []ncclStep {
	if src.Len() == 0 {
		return to
	}
	return append(to, ncclStep{what: what, peer: int32(root), dtype: ncclType(k.dtype),
		op:  ncclOp(k.what.Op),
		src: src.Addr(), dst: dst.Addr(), count: uint64(src.Len())})
}

// scattered appends an even reduce-scatter. Its count is the elements of a chunk.
func (k *call) scattered(to []ncclStep) []ncclStep {
	if k.count == 0 {
		return to
	}
	return append(to, ncclStep{what: stepReduceScatter, dtype: ncclType(k.dtype),
		op:  ncclOp(k.what.Op),
		src: k.src.Addr(), dst: k.dst.Addr(), count: uint64(k.count)})
}

// reduceChunks appends a reduction to each owner of a chunk.
func (k *call) reduceChunks(to []ncclStep) []ncclStep {
	for r := range k.P {
		lo, hi := k.what.Chunk(r, k.P, k.count)
		dst := backend.Buffer{}
		if r == k.rank {
			dst = k.dst
		}
		to = k.reduction(to, stepReduce, r, k.src.Slice(lo, hi), dst)
	}
	return to
}

// exchange appends a call in which each pair of ranks moves at most one piece
// each way. A rank's own piece goes the same way, since a copy would wait for
// NCCL's kernel, or make it wait.
func (k *call) exchange(to []ncclStep) []ncclStep {
	for i := range k.P {
		p := (k.rank + i) % k.P
		out, in := k.pieces(p)
		if p == k.rank && out.Addr() == in.Addr() {
			continue
		}
		to = moved(to, stepSend, p, out, backend.Buffer{})
		to = moved(to, stepRecv, p, backend.Buffer{}, in)
	}
	return to
}

// pieces returns what this rank sends to rank p and where it puts what p sends.
func (k *call) pieces(p int) (out, in backend.Buffer) {
	me, P := k.rank, k.P
	switch k.what.Kind {
	case backend.AllToAll:
		n, from, _ := k.what.Pair(me, p, P, k.count)
		out = k.src.Slice(from, from+n)
		n, _, at := k.what.Pair(p, me, P, k.count)
		in = k.dst.Slice(at, at+n)
	case backend.AllGather:
		out, in = k.src, k.chunk(k.dst, p)
	case backend.Gather:
		if p == k.what.Root {
			out = k.src
		}
		if me == k.what.Root {
			in = k.chunk(k.dst, p)
		}
	case backend.Scatter:
		if me == k.what.Root {
			out = k.chunk(k.src, p)
		}
		if p == k.what.Root {
			in = k.dst
		}
	}
	return out, in
}

// chunk returns rank p's part of the buffer that holds every chunk.
func (k *call) chunk(b backend.Buffer, p int) backend.Buffer {
	lo, hi := k.what.Chunk(p, k.P, k.count)
	return b.Slice(lo, hi)
}

// moved appends a step that moves bytes; for an all-gather, src's.
func moved(to []ncclStep, what int32, peer int, src, dst backend.Buffer) []ncclStep {
	nbytes := src.NBytes()
	if what == stepRecv {
		nbytes = dst.NBytes()
	}
	if nbytes == 0 {
		return to
	}
	return append(to, ncclStep{what: what, peer: int32(peer), dtype: ncclUint8, src: src.Addr(),
		dst: dst.Addr(), count: uint64(nbytes)})
}

// copied appends a copy on the device, unless it is one to the same place.
func copied(to []ncclStep, src, dst backend.Buffer) []ncclStep {
	if src.NBytes() == 0 || src.Addr() == dst.Addr() {
		return to
	}
	return append(to, ncclStep{what: stepCopy, src: src.Addr(), dst: dst.Addr(),
		count: uint64(src.NBytes())})
}

// block is a part of a composed reduction: elements off up to off+n of each
// rank's chunk, as far as the chunk reaches.
type block struct {
	k       *call
	off, n  int
	scratch backend.Buffer // a piece of n elements for each operand
	held    [][]int        // in a tree: the terms of each rank's operands; nil where it has one
}

// chunkOf returns where the chunk lies that rank r combines.
func (k *call) chunkOf(r int) (lo, hi int) {
	if k.what.Kind == backend.ReduceScatter {
		return k.what.Chunk(r, k.P, k.count)
	}
	return r * k.count / k.P, (r + 1) * k.count / k.P
}

// longest is the length of the longest chunk.
func (k *call) longest() int {
	n := 0
	for r := range k.P {
		lo, hi := k.chunkOf(r)
		n = max(n, hi-lo)
	}
	return n
}

// span returns the block's part of rank r's chunk.
func (b *block) span(r int) (lo, hi int) {
	lo, hi = b.k.chunkOf(r)
	return min(lo+b.off, hi), min(lo+b.off+b.n, hi)
}

// branches returns how many terms each operand of each rank has, nil where a rank has one operand.
func (k *call) branches() (held [][]int) {
	if k.what.Kind == backend.AllReduce && k.what.Splits != nil {
		for r := range k.P {
			held = append(held, k.what.Branches(nil, r))
		}
	}
	return held
}

// operandsOf returns how many operands rank p has, and the number of the first one.
func (b *block) operandsOf(p int) (n, first int) {
	if b.held == nil {
		return 1, p
	}
	for _, before := range b.held[:p] {
		first += len(before)
	}
	return len(b.held[p]), first
}

// own returns elements of this rank's operand number i: most calls have one.
func (b *block) own(i, lo, hi int) backend.Buffer {
	return b.k.src.Slice(i*b.k.count+lo, i*b.k.count+hi)
}

// slot returns the piece of the scratch buffer for an operand, of the length of this rank's span.
func (b *block) slot(operand int) backend.Buffer {
	lo, hi := b.span(b.k.rank)
	return b.scratch.Slice(operand*b.n, operand*b.n+hi-lo)
}

// collect appends the steps that bring every rank's piece of a span to its
// owner.
func (b *block) collect(to []ncclStep) []ncclStep {
	k := b.k
	for i := 1; i < k.P; i++ {
		p := (k.rank + i) % k.P
		lo, hi := b.span(p)
		sent, _ := b.operandsOf(k.rank)
		for i := range sent {
			to = moved(to, stepSend, p, b.own(i, lo, hi), backend.Buffer{})
		}
		received, first := b.operandsOf(p)
		for i := range received {
			to = moved(to, stepRecv, p, backend.Buffer{}, b.slot(first+i))
		}
	}
	return to
}

// operands appends every rank's piece of this rank's span, in rank order.
func (b *block) operands(to []backend.Buffer) []backend.Buffer {
	for p := range b.k.P {
		lo, hi := b.span(p)
		n, first := b.operandsOf(p)
		for i := range n {
			if p == b.k.rank {
				to = append(to, b.own(i, lo, hi))
			} else {
				to = append(to, b.slot(first+i))
			}
		}
	}
	return to
}

// result is where this rank's span goes once it is combined.
func (b *block) result() backend.Buffer {
	k := b.k
	lo, hi := b.span(k.rank)
	switch {
	case k.what.Kind == backend.ReduceScatter:
		mine, _ := k.chunkOf(k.rank)
		return k.dst.Slice(lo-mine, hi-mine)
	case k.what.Kind == backend.Reduce && k.rank != k.what.Root:
		return b.slot(k.rank)
	default:
		return k.dst.Slice(lo, hi)
	}
}

// deliver appends the steps that bring the results where they belong.
func (b *block) deliver(to []ncclStep) []ncclStep {
	k := b.k
	if k.what.Kind == backend.ReduceScatter {
		return to
	}
	for i := 1; i < k.P; i++ {
		p := (k.rank + i) % k.P
		if k.what.Kind == backend.AllReduce || p == k.what.Root {
			to = moved(to, stepSend, p, b.result(), backend.Buffer{})
		}
		if k.what.Kind == backend.AllReduce || k.rank == k.what.Root {
			lo, hi := b.span(p)
			to = moved(to, stepRecv, p, backend.Buffer{}, k.dst.Slice(lo, hi))
		}
	}
	return to
}
