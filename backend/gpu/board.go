package gpu

import (
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/group"
	"github.com/euryale-ml/euryale/internal/shm"
)

const (
	// ringSlots is how many calls of a rank have their headers on the board, but for those that
	// are cleared: a rank that is that far ahead of another is not compared with it.
	ringSlots = 1024
	// ahead is how many digests are cleared together, ahead of their use: the other ranks have
	// read them since, so the processor has to ask for them, which it does for several at a time.
	ahead = 16
)

// rankBoard is what one rank writes and the others read.
type rankBoard struct {
	posted atomic.Uint64 // number of the last call begun, whose header is written
	closed atomic.Uint32
	_      [52]byte
	noted  atomic.Uint64 // number of the last note
	_      [56]byte
	notes  [2][shm.NoteBytes]byte // they alternate
	// digests are those of the headers, which other ranks read only where they differ: a rank
	// keeps its headers in its own cache. 0 says that the rank does not compare the call.
	digests [ringSlots]uint64
	headers [ringSlots][backend.HeaderSize]byte
}

// groupBoard is what no rank owns.
type groupBoard struct {
	end group.AbortRecord
	// leaving counts the ranks that have closed a group that was well; it is
	// broken off once one leaves otherwise, or alone.
	leaving atomic.Int32
}

const brokenOff = -1

// leave counts a rank, which waits for the others no longer than patience, and
// reports whether all leave together. All ranks see the same.
func (g *groupBoard) leave(size int, patience time.Duration) bool {
	for {
		n := g.leaving.Load()
		if n == brokenOff {
			return false
		}
		if g.leaving.CompareAndSwap(n, n+1) {
			break
		}
	}
	for deadline := time.Now().Add(patience); ; time.Sleep(100 * time.Microsecond) {
		n := g.leaving.Load()
		switch {
		case int(n) == size:
			return true
		case n == brokenOff, time.Now().After(deadline) && g.leaving.CompareAndSwap(n, brokenOff):
			return false
		}
	}
}

const (
	groupBytes = (int(unsafe.Sizeof(groupBoard{})) + 4095) / 4096 * 4096
	rankBytes  = (int(unsafe.Sizeof(rankBoard{})) + 4095) / 4096 * 4096
)

func boardBytes(size int) int { return groupBytes + size*rankBytes }

// board is memory that the ranks of a group share, for what they tell each other
// beside NCCL.
type board struct{ share *shm.Share }

func (b board) group() *groupBoard { return (*groupBoard)(unsafe.Pointer(&b.share.Mem[0])) }

func (b board) rank(r int) *rankBoard {
	return (*rankBoard)(unsafe.Pointer(&b.share.Mem[groupBytes+r*rankBytes]))
}

// post writes the header of the rank's next call. It leaves a digest of 0 if the rank does not
// compare it.
func (mine *rankBoard) post(h *backend.Header, compared bool) {
	at := h.Seq % ringSlots
	if at%ahead == 0 {
		clear(mine.digests[at : at+ahead])
	}
	if compared {
		h.Put(mine.headers[at][:])
		mine.digests[at] = backend.Digest(&mine.headers[at])
	}
	mine.posted.Store(h.Seq)
}

// digest reads the digest of rank r's call number seq, which is posted. It is lost if
// the rank may have begun to clear it for those that take its place, or is about to:
// not every processor shows the others what it writes in the order in which it does.
func (b board) digest(r int, seq uint64) (d uint64, lost bool) {
	theirs := b.rank(r)
	d = theirs.digests[seq%ringSlots]
	return d, theirs.posted.Load()+2*ahead >= seq+ringSlots
}

// header reads the header of a call whose digest was read: that of no call if the rank does
// not compare it.
func (b board) header(r int, seq uint64) (h [backend.HeaderSize]byte, lost bool) {
	d, _ := b.digest(r, seq)
	if d != 0 {
		h = b.rank(r).headers[seq%ringSlots]
	}
	_, lost = b.digest(r, seq)
	return h, lost
}

// compared is what came of comparing one call.
type compared uint8

const (
	equal   compared = iota
	waiting          // a rank has not posted it
	differs
)

// compare compares rank me's call number seq with that of every other rank, and
// names the first that is in the way, which may be me: a call has its number before it
// is posted.
func (b board) compare(me, size int, seq uint64) (result compared, peer int, mine, theirs [backend.HeaderSize]byte) {
	for p := range size {
		if b.rank(p).posted.Load() < seq {
			return waiting, p, mine, theirs
		}
	}
	own, gone := b.digest(me, seq)
	for p := range size {
		if p == me || gone {
			continue
		}
		d, lost := b.digest(p, seq)
		if lost || d == own {
			continue
		}
		mine, gone = b.header(me, seq)
		if theirs, lost = b.header(p, seq); !lost && !gone {
			return differs, p, mine, theirs
		}
	}
	return equal, -1, mine, theirs
}

// common is the number of the last call that every rank has begun.
func (b board) common(size int) uint64 {
	least := ^uint64(0)
	for p := range size {
		least = min(least, b.rank(p).posted.Load())
	}
	return least
}
