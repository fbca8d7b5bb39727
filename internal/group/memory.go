package group

import (
	"slices"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/euryale-ml/euryale/backend"
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

// rankPage is what one rank writes and the others read.
type rankPage struct {
	posted atomic.Uint64 // number of the last call begun, whose header is written
	closed atomic.Uint32
	stage  atomic.Uint32 // of the teardown
	_      [48]byte
	noted  atomic.Uint64 // number of the last round
	_      [56]byte
	notes  [2][NoteBytes]byte // they alternate
	// digests has what headers hash to, which other ranks read only where they differ: a rank
	// keeps its headers in its own cache. 0 says that the rank does not compare the call.
	digests [ringSlots]uint64
	headers [ringSlots][backend.HeaderSize]byte
}

// groupPage is what no rank owns.
type groupPage struct {
	end AbortRecord
	// leaving counts the ranks that have closed a group that was well; it is
	// brokenOff once one leaves otherwise, or alone.
	leaving atomic.Int32
}

const brokenOff = -1

const (
	groupBytes = (int(unsafe.Sizeof(groupPage{})) + 4095) / 4096 * 4096
	rankBytes  = (int(unsafe.Sizeof(rankPage{})) + 4095) / 4096 * 4096
)

// MemoryBytes is how much memory the ranks of a group share for a Memory.
func MemoryBytes(size int) int { return groupBytes + size*rankBytes }

// Memory is a Board in memory that the ranks share.
type Memory struct {
	share      *shm.Share
	rank, size int
	mine       *rankPage

	mu       sync.Mutex
	compared uint64   // calls up to this one were compared
	digests  []uint64 // of the call that is being compared, by rank

	released atomic.Bool
}

var _ Board = (*Memory)(nil)

// NewMemory returns the board of a rank in MemoryBytes of zeroed memory, which it owns.
func NewMemory(share *shm.Share, rank, size int) *Memory {
	m := &Memory{share: share, rank: rank, size: size, digests: make([]uint64, size)}
	m.mine = m.page(rank)
	return m
}

// emptied reports whether Release should have left zeros, where Retire leaves memory as it is.
func (m *Memory) emptied() bool { return !shm.BetweenProcesses && m.released.Load() }

func (m *Memory) group() *groupPage {
	if m.emptied() {
		return new(groupPage)
	}
	return (*groupPage)(unsafe.Pointer(&m.share.Mem[0]))
}

func (m *Memory) page(r int) *rankPage {
	if m.emptied() {
		return new(rankPage)
	}
	return (*rankPage)(unsafe.Pointer(&m.share.Mem[groupBytes+r*rankBytes]))
}

// Begun implements [Health].
func (m *Memory) Begun(r int) uint64 { return m.page(r).posted.Load() }

// Closed implements [Health].
func (m *Memory) Closed(r int) bool { return m.page(r).closed.Load() != 0 }

// Close implements [Health].
func (m *Memory) Close() { m.mine.closed.Store(1) }

// Publish implements [Health].
func (m *Memory) Publish(r Report) { m.group().end.Publish(r) }

// Reported implements [Health].
func (m *Memory) Reported() (Report, bool) { return m.group().end.Read() }

// Heard implements [Health].
func (m *Memory) Heard() (Report, bool) { return m.Reported() }

// Post implements [Board]. It leaves a digest of 0 if the rank does not compare the call.
func (m *Memory) Post(h *backend.Header, compared bool) {
	mine := m.mine
	at := h.Seq % ringSlots
	if at%ahead == 0 {
		clear(mine.digests[at : at+ahead])
	}
	if compared {
		mine.digests[at] = h.Put(&mine.headers[at])
	}
	mine.posted.Store(h.Seq)
}

// Compare implements [Board].
func (m *Memory) Compare(upTo uint64) (uint64, *Difference) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.compared >= upTo {
		return m.compared, nil
	}
	for p := range m.size { // this rank, too: a call has its number before it is posted
		upTo = min(upTo, m.Begun(p))
	}
	for m.compared < upTo {
		if d := m.differs(m.compared + 1); d != nil {
			return m.compared, d
		}
		m.compared++
	}
	return m.compared, nil
}

// differs compares call number seq, which all have posted.
func (m *Memory) differs(seq uint64) *Difference {
	for p := range m.digests {
		d, lost := m.digest(p, seq)
		if lost {
			d = Unseen
		}
		m.digests[p] = d
	}
	return Differ(m.digests, func(r int) *[backend.HeaderSize]byte {
		if h, lost := m.header(r, seq); !lost {
			return &h
		}
		return nil
	})
}

// digest reads the digest of rank r's call number seq, which is posted. It is lost if
// the rank may have begun to clear it for those that take its place, or is about to:
// not every processor shows the others what it writes in the order in which it does.
func (m *Memory) digest(r int, seq uint64) (d uint64, lost bool) {
	theirs := m.page(r)
	d = theirs.digests[seq%ringSlots]
	return d, theirs.posted.Load()+2*ahead >= seq+ringSlots
}

// header reads the header of a call whose digest was read: that of no call if the rank does
// not compare it.
func (m *Memory) header(r int, seq uint64) (h [backend.HeaderSize]byte, lost bool) {
	d, _ := m.digest(r, seq)
	if d != 0 {
		h = m.page(r).headers[seq%ringSlots]
	}
	_, lost = m.digest(r, seq)
	return h, lost
}

// Note implements [Board].
func (m *Memory) Note(round uint64, note []byte) {
	slot := &m.mine.notes[round%2]
	clear(slot[copy(slot[:], note):])
	m.mine.noted.Store(round)
}

// Noted implements [Board].
func (m *Memory) Noted(r int, round uint64) ([]byte, bool) {
	theirs := m.page(r)
	if theirs.noted.Load() < round {
		return nil, false
	}
	return slices.Clone(theirs.notes[round%2][:]), true
}

// Leave implements [Board].
func (m *Memory) Leave(limit time.Duration) bool {
	leaving := &m.group().leaving
	for {
		n := leaving.Load()
		if n == brokenOff {
			return false
		}
		if leaving.CompareAndSwap(n, n+1) {
			break
		}
	}
	for deadline := time.Now().Add(limit); ; time.Sleep(100 * time.Microsecond) {
		n := leaving.Load()
		switch {
		case int(n) == m.size:
			return true
		case n == brokenOff, time.Now().After(deadline) && leaving.CompareAndSwap(n, brokenOff):
			return false
		}
	}
}

// Release implements [Board]. A goroutine that still looks sees zeros.
func (m *Memory) Release() error {
	m.released.Store(true)
	return m.share.Retire()
}
