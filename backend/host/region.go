package host

import (
	"sync/atomic"
	"unsafe"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/group"
	"github.com/euryale-ml/euryale/internal/shm"
)

// The layout of a region: the group's page, a page for each rank, two slots for each rank. A slot
// has a raw part, which holds a rank's contribution to a step, and a result part, which holds its
// chunk of the previous block.
const (
	page = 4096
	// rawBytes and resultBytes are the sizes of a slot's parts. Other sizes were tried: see
	// bench/results/2026-11/2026-11-21-xeon16-host-tuning.md.
	rawBytes    = 256 << 10
	resultBytes = rawBytes/2 + page // a chunk of a block among two ranks or more
	slotBytes   = rawBytes + resultBytes
)

func regionBytes(size int) int { return page + size*(page+2*slotBytes) }

// line is what a rank posts in a step. Steps alternate between two lines. If a call is on few
// bytes, one transfer of a cache line tells a waiting rank all of it: that the rank is there, which
// call it made, and its operand.
type line struct {
	posted atomic.Uint64 // number of the step, from 1
	digest uint64        // of the call's header
	// shown is the operand of a one-shot reduction. The part that does not fit the first cache line
	// is in the lines after it, which a processor fetches together.
	shown [shownBytes]byte
	// src and dst are where operands are in Alloc's windows, 0 if nowhere, in the step that checks
	// this.
	src, dst uint64
}

// shownBytes has room for a one-shot operand of two ranks. Together with the fields beside it, it
// fills whole cache lines.
const shownBytes = oneShotBytes/2 + 32

// rankPage is the control page of one rank.
type rankPage struct {
	lines [2]line
	// futexWord is what the rank sleeps on; it changes when the rank is woken.
	futexWord atomic.Uint32
	_         [60]byte
	// waiting is 1 + the rank that this rank sleeps for, 0 while it is awake.
	waiting atomic.Uint32
	// closed is set when the rank closes its communicator.
	closed atomic.Uint32
	// core is 1 + the core on which the rank last went to sleep.
	core atomic.Uint32
	_    [52]byte
	// Processors of other ranks also fetch the lines that follow those they poll, and the owner
	// would have to take them back in each call. So headers are as far away as the page allows.
	_ [page - 2*lineBytes - 2*unsafe.Sizeof(line{}) - 2*backend.HeaderSize]byte
	// headers belong to the lines. Other ranks read them only if digests differ.
	headers [2][backend.HeaderSize]byte
}

// groupPage is the first page of a region.
type groupPage struct {
	// sleepers counts the ranks whose waiting is set.
	sleepers atomic.Uint32
	_        [60]byte
	end      group.AbortRecord
}

// region is a mapped region.
type region struct {
	share      *shm.Share
	rank, size int
	pages      []*rankPage
	lines      [][2]*line // the ones in the pages
}

func newRegion(s *shm.Share, rank, size int) region {
	g := region{s, rank, size, make([]*rankPage, size), make([][2]*line, size)}
	for r := range g.pages {
		p := (*rankPage)(unsafe.Pointer(&s.Mem[page*(1+r)]))
		g.pages[r], g.lines[r] = p, [2]*line{&p.lines[0], &p.lines[1]}
	}
	return g
}

func (g *region) group() *groupPage { return (*groupPage)(unsafe.Pointer(&g.share.Mem[0])) }

func (g *region) rankPage(r int) *rankPage { return g.pages[r] }

// slot returns the slot of rank r in a step.
func (g *region) slot(r int, step uint64) []byte {
	at := page*(1+g.size) + (2*r+int(step&1))*slotBytes
	return g.share.Mem[at : at+slotBytes : at+slotBytes]
}

// line returns the line of rank r in a step. It touches no memory of the region: finding a line
// through its page would check that the page is there, and that fetches the other line.
func (g *region) line(r int, step uint64) *line { return g.lines[r][step&1] }

func (g *region) header(r int, step uint64) *[backend.HeaderSize]byte {
	return &g.rankPage(r).headers[step&1]
}
