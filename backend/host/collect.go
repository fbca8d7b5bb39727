package host

import (
	"fmt"
	"slices"
	"unsafe"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/kernels"
)

// An all-reduce is one-shot up to oneShotBytes for all ranks together, that is up to
// oneShotBytes/P: for more, reading everyone's data costs more than a second step. If ranks
// outnumber cores, a step needs switches between them, and the limit is crowdedOneShotBytes. From
// directBytes on, ranks check whether all operands are in memory from Alloc, which takes a step.
// Measured on 16 cores and on 2: see bench/results/2026-11/2026-11-21-xeon16-host-tuning.md and
// 2026-11-23-epyc2-host.md.
const (
	oneShotBytes        = 2 << 10
	crowdedOneShotBytes = 64 << 10
	directBytes         = 256 << 10
)

// collect runs a call among two ranks or more. order or busy is held.
//
// The number of steps and the algorithm follow only from values that are the same on every rank:
// the header and, in the direct case, the places in every rank's line.
func (c *comm) collect(k *call) error {
	P := c.size
	if k.count*k.dtype.Size() > shownBytes {
		k.tell() // now: the copies before post are part of the call
	}
	switch k.c.Kind {
	case backend.AllReduce:
		return c.allReduce(k, true)
	case backend.Reduce:
		return c.allReduce(k, c.rank == k.c.Root)
	case backend.ReduceScatter:
		return c.reduceScatter(k)
	case backend.AllGather:
		return c.showAll(k, true)
	case backend.Gather:
		return c.showAll(k, c.rank == k.c.Root)
	case backend.Broadcast:
		return c.showAll(k, c.rank != k.c.Root)
	case backend.Scatter:
		return c.exchange(k, func(s, r int) (n, from, to int) {
			if s != k.c.Root {
				return 0, 0, 0
			}
			lo, hi := k.c.Chunk(r, P, k.count)
			return hi - lo, lo, 0
		})
	case backend.AllToAll:
		return c.exchange(k, func(s, r int) (n, from, to int) { return k.c.Pair(s, r, P, k.count) })
	}
	return fmt.Errorf("%w: backend host has no %v", backend.ErrUnsupported, k.c.Kind)
}

// allReduce serves AllReduce, and Reduce, where only the root wants the result.
func (c *comm) allReduce(k *call, want bool) error {
	if k.c.Kind == backend.AllReduce && k.c.Splits != nil {
		defer c.branch(k)()
	}
	switch algorithmOf(&k.c, k.count*k.dtype.Size(), c.size, c.spin.crowded) {
	case oneShot:
		return c.oneShot(k, want)
	case twoShotOrDirect:
		if direct, err := c.allDirect(k); direct || err != nil {
			return err
		}
	}
	return c.twoShot(k, want)
}

// branch records, until the end of the call, how many operands each rank has of a sum of branches.
func (c *comm) branch(k *call) (end func()) {
	for r := range c.size {
		c.branches[r] = k.c.Branches(c.branches[r][:0], r)
		c.terms = append(c.terms, c.branches[r]...)
	}
	c.operands = slices.Grow(c.operands[:0], len(c.terms))[:len(c.terms)]
	return func() { c.terms, c.operands = c.terms[:0], c.operands[:c.size] }
}

// held returns how many operands rank r has of a reduction.
func (c *comm) held(r int) int {
	if len(c.terms) == 0 {
		return 1
	}
	return len(c.branches[r])
}

// most returns the largest number of operands that a rank has.
func (c *comm) most() int {
	n := 1
	for r := range c.size {
		n = max(n, c.held(r))
	}
	return n
}

// oneShot: every rank shows its data and combines everyone's, one slotful per step. Data that fits
// goes beside the line itself.
func (c *comm) oneShot(k *call, want bool) error {
	if len(c.terms) == 0 && k.src.NBytes() <= shownBytes {
		return c.oneLine(k, want)
	}
	per := k.fit(rawBytes / c.most())
	stride := per * k.dtype.Size()
	for lo := 0; ; lo += per {
		hi := min(lo+per, k.count)
		for i := range c.held(c.rank) {
			copy(c.raw(c.step + 1)[i*stride:], k.operand(i, lo, hi).Bytes())
		}
		if err := c.turn(k); err != nil {
			return err
		}
		if want {
			c.combine(k, k.dst.Slice(lo, hi), lo, 0, stride)
		}
		if hi == k.count {
			return nil
		}
	}
}

// oneLine is oneShot of data that fits beside the line.
func (c *comm) oneLine(k *call, want bool) error {
	copy(c.region.line(c.rank, c.step+1).shown[:], k.src.Bytes())
	c.post(k)
	for p := range c.operands { // while lines are on their way: 9 of 290 ns
		c.operands[p] = k.view(c.region.line(p, c.step).shown[:], k.count)
	}
	c.operands[c.rank] = k.src
	if err := c.await(k); err != nil {
		return err
	}
	// Nobody reads the line of the next step any more. Taking it back from the readers of its last
	// step takes as long as everything else, and here it overlaps with the rest of this call.
	next := c.region.line(c.rank, c.step+1)
	fetchToWrite(unsafe.Pointer(next), int(unsafe.Offsetof(next.shown))+k.src.NBytes())
	if want {
		c.reduce(k, k.dst)
	}
	return nil
}

// reduce combines the operands in the call's association.
func (c *comm) reduce(k *call, dst backend.Buffer) {
	kernels.Host{}.ReduceChecked(k.c.Association, k.c.Op, dst, c.operands, c.terms)
}

// twoShot: reduce-scatter and all-gather of one slotful after the other. In
// step b the ranks show block b, and the results of block b-1: each rank
// combines its chunk of b while the others collect its chunk of b-1.
func (c *comm) twoShot(k *call, want bool) error {
	es := k.dtype.Size()
	per := k.fit(rawBytes / c.most())
	blocks := (k.count + per - 1) / per
	for b := 0; b <= blocks; b++ {
		block := k.block(b, per)
		lo, hi := k.chunk(block, c.rank, c.size)
		if b < blocks {
			for i := range c.held(c.rank) {
				// All but this rank's chunk, at its place in the block.
				raw := c.raw(c.step + 1)[i*per*es:]
				src := k.operand(i, block.lo, block.hi).Bytes()
				copy(raw[:lo*es], src)
				copy(raw[hi*es:], src[hi*es:])
			}
		}
		if err := c.turn(k); err != nil {
			return err
		}
		if b < blocks {
			// The slot of the next step is free: everyone has posted this one.
			result := k.view(c.result(c.step+1), hi-lo)
			c.combine(k, result, block.lo+lo, lo*es, per*es)
			if want {
				copy(k.dst.Slice(block.lo+lo, block.lo+hi).Bytes(), result.Bytes())
			}
		}
		if b > 0 && want {
			c.collectChunks(k, k.block(b-1, per))
		}
	}
	return nil
}

// collectChunks copies every other rank's result for its chunk of a block.
func (c *comm) collectChunks(k *call, block span) {
	for i := 1; i < c.size; i++ {
		p := (c.rank + i) % c.size
		lo, hi := k.chunk(block, p, c.size)
		copy(k.dst.Slice(block.lo+lo, block.lo+hi).Bytes(), c.region.slot(p, c.step)[rawBytes:])
	}
}

// allDirect is twoShot without slots, for operands that every rank can reach: ranks combine from
// and collect from each other's operands. A step is needed to find out whether it applies; direct
// is false if some operand is elsewhere.
func (c *comm) allDirect(k *call) (direct bool, err error) {
	mine := c.region.line(c.rank, c.step+1)
	mine.src, mine.dst = c.locate(k.src), c.locate(k.dst)
	if err := c.turn(k); err != nil {
		return false, err
	}
	ps := c.shown[:0] // read now: lines are valid for this step only
	for p := range c.size {
		shown := c.region.line(p, c.step)
		if shown.src == 0 || shown.dst == 0 {
			return false, nil
		}
		ps = append(ps, operand{shown.src, shown.dst})
	}
	return true, c.direct(k, ps)
}

// operand is where a rank's operands are in the windows.
type operand struct{ src, dst uint64 }

func (c *comm) direct(k *call, ps []operand) error {
	all := span{0, k.count}
	es := k.dtype.Size()
	lo, hi := k.chunk(all, c.rank, c.size)
	operands := c.operands[:0]
	for p, o := range ps {
		n := c.held(p)
		for src := range slices.Chunk(c.at(p, o.src, n*k.count*es), k.count*es) {
			operands = append(operands, k.view(src[lo*es:], hi-lo))
		}
	}
	c.reduce(k, k.dst.Slice(lo, hi))
	if err := c.turn(k); err != nil {
		return err
	}
	for i := 1; i < c.size; i++ {
		p := (c.rank + i) % c.size
		lo, hi := k.chunk(all, p, c.size)
		copy(k.dst.Slice(lo, hi).Bytes(), c.at(p, ps[p].dst, k.count*es)[lo*es:hi*es])
	}
	return c.turn(k) // nobody may change its operands while others read them
}

// reduceScatter: every rank shows the others their chunks and combines its own chunk, a part of
// each chunk per step.
func (c *comm) reduceScatter(k *call) error {
	area := k.fit(rawBytes / c.size)
	es := k.dtype.Size()
	own, end := k.c.Chunk(c.rank, c.size, k.count)
	for lo := 0; ; lo += area {
		last := true
		for r := range c.size {
			from, to := k.c.Chunk(r, c.size, k.count)
			last = last && lo+area >= to-from
			if r != c.rank {
				part := k.src.Slice(min(from+lo, to), min(from+lo+area, to))
				copy(c.raw(c.step + 1)[r*area*es:], part.Bytes())
			}
		}
		if err := c.turn(k); err != nil {
			return err
		}
		from, to := min(own+lo, end), min(own+lo+area, end)
		c.combine(k, k.dst.Slice(from-own, to-own), from, c.rank*area*es, 0)
		if last {
			return nil
		}
	}
}

// combine reduces, in the call's association, this rank's operands from element from on and those
// that the other ranks show at offset bytes in their slots, stride bytes apart for each further
// operand.
func (c *comm) combine(k *call, dst backend.Buffer, from, offset, stride int) {
	operands := c.operands[:0]
	for p := range c.size {
		for i := range c.held(p) {
			x := k.view(c.region.slot(p, c.step)[offset+i*stride:], dst.Len())
			if p == c.rank {
				x = k.operand(i, from, from+dst.Len())
			}
			operands = append(operands, x)
		}
	}
	c.reduce(k, dst)
}

// showAll handles the kinds in which a rank shows the same data to everyone: AllGather, Gather and
// Broadcast. want says whether this rank collects.
func (c *comm) showAll(k *call, want bool) error {
	per := k.fit(rawBytes)
	longest := 0
	for p := range c.size {
		longest = max(longest, k.shown(p, c.size).len())
	}
	mine := k.shown(c.rank, c.size)
	if want && k.c.Kind != backend.Broadcast {
		copy(k.dst.Slice(mine.lo, mine.hi).Bytes(), k.src.Bytes())
	}
	for lo := 0; ; lo += per {
		if lo < mine.len() {
			copy(c.raw(c.step+1), k.src.Slice(lo, min(lo+per, mine.len())).Bytes())
		}
		if err := c.turn(k); err != nil {
			return err
		}
		for i := 1; want && i < c.size; i++ {
			p := (c.rank + i) % c.size
			if theirs := k.shown(p, c.size); lo < theirs.len() {
				to := k.dst.Slice(theirs.lo+lo, min(theirs.lo+lo+per, theirs.hi))
				copy(to.Bytes(), c.region.slot(p, c.step))
			}
		}
		if lo+per >= longest {
			break
		}
	}
	if k.c.Kind == backend.Broadcast && !want {
		copy(k.dst.Bytes(), k.src.Bytes()) // the root's own data
	}
	return nil
}

// exchange handles the kinds in which a rank shows each rank different data: AllToAll and Scatter.
// piece says what s sends to r: n elements at from in the source of s, to be put at to in the
// destination of r.
func (c *comm) exchange(k *call, piece func(s, r int) (n, from, to int)) error {
	area := k.fit(rawBytes / c.size)
	es := k.dtype.Size()
	longest := k.count // of all pieces
	if k.c.Splits != nil {
		longest = slices.Max(k.c.Splits)
	}
	if n, from, to := piece(c.rank, c.rank); n > 0 {
		copy(k.dst.Slice(to, to+n).Bytes(), k.src.Slice(from, from+n).Bytes())
	}
	for lo := 0; ; lo += area {
		for r := range c.size {
			if n, from, _ := piece(c.rank, r); r != c.rank && lo < n {
				copy(c.raw(c.step + 1)[r*area*es:], k.src.Slice(from+lo, from+min(lo+area, n)).
					Bytes())
			}
		}
		if err := c.turn(k); err != nil {
			return err
		}
		for i := 1; i < c.size; i++ {
			s := (c.rank + i) % c.size
			if n, _, to := piece(s, c.rank); lo < n {
				copy(k.dst.Slice(to+lo, to+min(lo+area, n)).Bytes(),
					c.region.slot(s, c.step)[c.rank*area*es:])
			}
		}
		if lo+area >= longest {
			return nil
		}
	}
}

// raw and result are the parts of this rank's slot in a step.
func (c *comm) raw(step uint64) []byte    { return c.region.slot(c.rank, step)[:rawBytes] }
func (c *comm) result(step uint64) []byte { return c.region.slot(c.rank, step)[rawBytes:] }

// span is a run of elements.
type span struct{ lo, hi int }

func (s span) len() int { return s.hi - s.lo }

// fit returns how many elements fit into nbytes, in whole cache lines.
func (k *call) fit(nbytes int) int { return nbytes / lineBytes * lineBytes / k.dtype.Size() }

const lineBytes = 64

// view returns n elements at the start of shared memory.
func (k *call) view(mem []byte, n int) backend.Buffer {
	return backend.Host(k.dtype, unsafe.Pointer(unsafe.SliceData(mem)), n)
}

// operand returns elements of this rank's operand number i: most calls have one.
func (k *call) operand(i, lo, hi int) backend.Buffer {
	return k.src.Slice(i*k.count+lo, i*k.count+hi)
}

// block returns the b-th run of per elements of the operand.
func (k *call) block(b, per int) span {
	return span{min(b*per, k.count), min((b+1)*per, k.count)}
}

// chunk returns which elements of a block, counted from its start, rank r combines. Chunks are
// whole cache lines, so that no two ranks write the same line.
func (k *call) chunk(block span, r, P int) (lo, hi int) {
	perLine := lineBytes / k.dtype.Size()
	lines := (block.len() + perLine - 1) / perLine
	per := (lines + P - 1) / P * perLine
	return min(r*per, block.len()), min((r+1)*per, block.len())
}

// shown returns where the data that rank p shows in a spread belongs in the destination.
func (k *call) shown(p, P int) span {
	if k.c.Kind == backend.Broadcast {
		if p == k.c.Root {
			return span{0, k.count}
		}
		return span{}
	}
	lo, hi := k.c.Chunk(p, P, k.count)
	return span{lo, hi}
}
