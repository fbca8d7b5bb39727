package gpu

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/group"
	peers "github.com/euryale-ml/euryale/internal/kernels/cuda"
)

// peerMemory is one rank's view of the memory that all ranks of a group reach, and of what Alloc
// has given out.
type peerMemory struct {
	c   *Communicator
	dev Device // the rank's, which is retained; nil if the ranks share no memory

	peers     peers.Peers
	pad       *window          // and staging
	windows   []*window        // from Alloc: number 1 and on; nil where all ranks have freed one
	remainder backend.Buffer   // what is left of a window that small pieces share
	private   []backend.Buffer // from Alloc, but in no window
	used      atomic.Int64     // windows of Alloc; may be read at any time
	lacking   atomic.Int64     // bytes of private

	end    *group.Teardown
	giving sync.Mutex   // held while memory is freed or disowned
	held   atomic.Int64 // bytes that leave has not given back yet
}

// window is memory of the same size on each rank, which all ranks reach.
type window struct {
	own      backend.Buffer
	at       []uintptr        // the address of each rank's part, for this rank
	imported []backend.Buffer // imports to be closed
	pieces   []uintptr        // from Alloc, not freed by this rank
}

// holds reports whether memory lies in this rank's part of the window.
func (w *window) holds(b backend.Buffer) bool {
	return w != nil && b.Addr() >= w.own.Addr() &&
		b.Addr()+uintptr(b.NBytes()) <= w.own.Addr()+uintptr(w.own.Len())
}

const packets = packetBytes / 8

// lines is the room for lines in each half of a pad: 16 MiB. An operand in LL128 can
// have 15 MiB among all senders, and a round of LL128TwoShot 3.75 MiB.
const lines = 128 << 10

// llBytes is the largest operand that each of size ranks can push to all others.
func llBytes(size int) int { return max(packetBytes, lines/size*120) }

// align is what the parts of an allocation start at multiples of.
const align = 256

// padBytes has room for the flags behind what kernels use.
func padBytes(size int) int {
	return (peers.PadBytes(size, packets, lines)+align-1)/align*align + align
}

// share makes the memory that all ranks of the group reach. If a rank cannot share, c.why says so
// on every rank, and no memory is left behind. order is held.
func (c *Communicator) share() error {
	if c.why != "" {
		return nil
	}
	err := c.memory.build()
	if err == nil {
		return nil
	}
	err = errors.Join(err, c.memory.dismantle())
	c.memory = &peerMemory{c: c}
	if why := (*group.Refusal)(nil); errors.As(err, &why) {
		c.why = why.Error()
		return nil
	}
	return err
}

// dismantle gives everything back after a failed build. All ranks usually do that at the same
// time. Copies of the build may still be under way if they were too slow.
func (m *peerMemory) dismantle() error {
	var copies backend.Queue
	if m.dev != nil {
		copies = m.dev.Default()
	}
	own := m.c.teardowns.beginPart(nil, func() error { return m.giveBack(copies) })
	m.c.dismantled = own.done
	return errors.Join(m.c.teardowns.wait(dismantleTime, own), m.keep())
}

// dismantleTime is how long dismantle waits for the other ranks.
const dismantleTime = 2 * time.Second

// build makes and shares the memory, tries every pair, and clears it.
func (m *peerMemory) build() (err error) {
	c := m.c
	board, ok := c.board.(*group.Memory)
	if !ok {
		return fmt.Errorf("ranks of one machine have a board that is a %T", c.board)
	}
	var processes []string
	for _, r := range c.plan.ranks {
		processes = append(processes, r.Process)
	}
	m.end = board.NewTeardown(processes)
	var status backend.Buffer
	var problem error
	if problem = c.dev.Retain(); problem == nil {
		m.dev = c.dev
		status, problem = m.dev.AllocHost(peers.StatusBytes)
		c.status.set(status)
	}
	if problem == nil {
		problem = m.dev.Prepare(peers.PeerFamilies(c.plan.Partners != nil)...)
	}
	own := backend.Buffer{}
	if problem == nil {
		own, problem = m.dev.Alloc(padBytes(c.size) + 2*c.plan.Staging)
	}
	if m.pad, err = m.share(own, problem); err != nil {
		return err
	}
	m.peers = peers.Peers{
		Rank: c.rank, Size: c.size, Status: status.Addr(), Limit: c.limit,
		Packets: packets, Lines: lines, Staging: c.plan.Staging, Blocks: c.plan.Blocks,
	}
	copy(m.peers.Pads[:], m.pad.at)
	if c.plan.Partners != nil {
		m.peers.Neighbours = c.plan.Partners[c.rank]
	}
	staging := make([]uintptr, c.size)
	for p, at := range m.pad.at {
		if m.reaches(p) {
			staging[p] = at + uintptr(padBytes(c.size))
		}
	}
	if err := m.probe(); err != nil {
		return err
	}
	if err := m.probeFlags(); err != nil {
		return err
	}
	return m.enter(0, staging)
}

// offer names a rank's memory.
type offer struct {
	Name []byte  // for other processes
	Addr uintptr // for ranks of the same process
}

// reaches reports whether this rank uses the memory of rank p. On a cube mesh it uses only its
// neighbours' memory.
func (m *peerMemory) reaches(p int) bool { return m.c.plan.reaches(m.c.rank, p) }

// share makes a window of every rank's own memory, on all ranks or on none. problem is this
// rank's failure to get the memory, which it passes on to the others. The window is returned in
// any case, and owns the memory.
func (m *peerMemory) share(own backend.Buffer, problem error) (*window, error) {
	w := &window{own: own, at: make([]uintptr, m.c.size)}
	mine := offer{Addr: own.Addr()}
	if problem == nil { // it is zeroed before others write to it
		problem = drain(context.Background(), m.dev.Default())
	}
	if problem == nil && m.remote() {
		mine.Name, problem = m.dev.Export(own)
	}
	if err := m.c.gather.Vote(m.c.members, problem); err != nil {
		return w, err
	}
	offers, err := group.Exchange(m.c.gather, m.c.members, mine)
	if err != nil {
		return w, err
	}
	for p, o := range offers {
		if !m.reaches(p) {
			continue
		}
		if w.at[p], problem = m.open(w, p, o); problem != nil {
			problem = fmt.Errorf("memory of rank %d: %w", p, problem)
			break
		}
	}
	return w, m.c.gather.Vote(m.c.members, problem)
}

// remote reports whether a rank is in another process.
func (m *peerMemory) remote() bool {
	all := m.c.plan.ranks
	return slices.ContainsFunc(all, func(r rankInfo) bool {
		return r.Process != all[m.c.rank].Process
	})
}

// open returns where this rank reaches the memory of another.
func (m *peerMemory) open(w *window, p int, o offer) (uintptr, error) {
	theirs := m.c.plan.ranks[p]
	if theirs.Process == m.c.plan.ranks[m.c.rank].Process {
		return o.Addr, m.dev.EnablePeerAccess(theirs.Ordinal)
	}
	b, err := m.dev.Import(o.Name)
	if err != nil {
		return 0, err
	}
	w.imported = append(w.imported, b)
	return b.Addr(), nil
}

// word is the place for rank r in rank p's row of words that kernels leave alone.
func (m *peerMemory) word(p, r int) backend.Buffer {
	offset, _ := peers.HostRow()
	return backend.OnDevice(backend.U8, m.pad.at[p]+uintptr(offset+8*r), 8)
}

// row is this rank's row of such words.
func (m *peerMemory) row() backend.Buffer {
	offset, nbytes := peers.HostRow()
	return backend.OnDevice(backend.U8, m.pad.at[m.c.rank]+uintptr(offset), nbytes)
}

// token is a value that only rank r writes, and only for rank p.
func token(r, p int) uint64 { return 0x6c6f776c6174<<16 | uint64(r)<<8 | uint64(p) }

// probe has each rank write to every other rank and read that back, by kernels: the driver's
// answers about links are not always true.
func (m *peerMemory) probe() error {
	if err := m.c.gather.Vote(m.c.members, m.probeWrite()); err != nil {
		return err
	}
	if err := m.c.gather.Vote(m.c.members, m.probeRead()); err != nil {
		return err
	}
	return m.c.gather.Vote(m.c.members, m.do(func(a backend.Arithmetic) error {
		return a.Zero(m.row())
	}))
}

// do runs kernels on the default queue, to their end.
func (m *peerMemory) do(start func(a backend.Arithmetic) error) error {
	q := m.dev.Default()
	if err := start(q.(exchanger)); err != nil { // introduce has made sure
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), m.c.limit)
	defer cancel()
	return drain(ctx, q)
}

// with runs f with device memory that holds bytes.
func (m *peerMemory) with(bytes []byte, use func(a backend.Arithmetic,
	b backend.Buffer) error) error {
	b, err := m.dev.Alloc(len(bytes))
	if err != nil {
		return err
	}
	err = m.do(func(a backend.Arithmetic) error {
		if err := a.Move(b, backend.Of(bytes)); err != nil {
			return err
		}
		return use(a, b)
	})
	return errors.Join(err, m.dev.Free(b))
}

// probeWrite writes its token to each rank.
func (m *peerMemory) probeWrite() error {
	words := make([]byte, 8*m.c.size)
	for p := range m.c.size {
		binary.LittleEndian.PutUint64(words[8*p:], token(m.c.rank, p))
	}
	return m.with(words, func(a backend.Arithmetic, b backend.Buffer) error {
		var errs []error
		for p := range m.c.size {
			if m.reaches(p) {
				errs = append(errs, a.Copy(m.word(p, m.c.rank), b.Slice(8*p, 8*p+8)))
			}
		}
		return errors.Join(errs...)
	})
}

// received returns the tokens that the ranks have written for this one.
func (m *peerMemory) received() ([]uint64, error) {
	_, nbytes := peers.HostRow()
	bytes := make([]byte, nbytes)
	err := m.do(func(a backend.Arithmetic) error { return a.Move(backend.Of(bytes), m.row()) })
	words := make([]uint64, m.c.size)
	for p := range words {
		words[p] = binary.LittleEndian.Uint64(bytes[8*p:])
	}
	return words, err
}

// probeRead checks the tokens that the others have written here, and those that this rank has
// written there.
func (m *peerMemory) probeRead() error {
	words, err := m.received()
	if err != nil {
		return err
	}
	back := make([]byte, 8*m.c.size)
	err = m.with(back, func(a backend.Arithmetic, b backend.Buffer) error {
		for p := range m.c.size {
			if !m.reaches(p) {
				continue
			}
			if err := a.Copy(b.Slice(8*p, 8*p+8), m.word(p, m.c.rank)); err != nil {
				return err
			}
		}
		return a.Move(backend.Of(back), b)
	})
	if err != nil {
		return err
	}
	for p := range m.c.size {
		if !m.reaches(p) {
			continue
		}
		if words[p] != token(p, m.c.rank) {
			return fmt.Errorf("what rank %d wrote to its memory did not arrive", p)
		}
		if binary.LittleEndian.Uint64(back[8*p:]) != token(m.c.rank, p) {
			return fmt.Errorf("reading the memory of rank %d gives something else than was written",
				p)
		}
	}
	return nil
}

// enter writes the addresses of a window into the kernels' table, on all ranks or on none.
func (m *peerMemory) enter(number int, at []uintptr) error {
	offset, nbytes := peers.WindowRow(number)
	row := make([]byte, nbytes)
	for p, addr := range at {
		binary.LittleEndian.PutUint64(row[8*p:], uint64(addr))
	}
	dst := backend.OnDevice(backend.U8, m.pad.at[m.c.rank]+uintptr(offset), nbytes)
	return m.c.gather.Vote(m.c.members, m.do(func(a backend.Arithmetic) error {
		return a.Move(dst, backend.Of(row))
	}))
}

// alloc returns nbytes of a window, on all ranks or on none.
func (m *peerMemory) alloc(nbytes int) (backend.Buffer, error) {
	unused, err := m.c.member.AgreeOnAlloc(m.c.gather, nbytes, m.unused())
	if err != nil {
		return backend.Buffer{}, err
	}
	if err := m.reclaim(unused); err != nil {
		return backend.Buffer{}, err
	}
	if nbytes == 0 {
		return backend.Of([]byte{}), nil
	}
	b, err := m.takeMemory(nbytes)
	for _, w := range m.windows {
		if err == nil && w.holds(b) {
			w.pieces = append(w.pieces, b.Addr())
		}
	}
	return b, err
}

// takeMemory takes memory by the size.
func (m *peerMemory) takeMemory(nbytes int) (backend.Buffer, error) {
	switch {
	case m.dev == nil:
		own, problem := m.c.dev.Alloc(nbytes)
		return m.allocPrivate(own, problem)
	case nbytes <= smallBytes:
		return m.allocSmall(nbytes)
	default:
		return m.allocWindow(nbytes)
	}
}

// unused returns the indices of the windows of which this rank has freed every piece.
func (m *peerMemory) unused() (windows []byte) {
	for i, w := range m.windows {
		if w != nil && len(w.pieces) == 0 {
			windows = append(windows, byte(i))
		}
	}
	return windows
}

// reclaim gives back the windows that are unused on every rank. All ranks do so at the same point
// in their sequence of calls, so a window has the same number everywhere.
func (m *peerMemory) reclaim(unused [][]byte) error {
	var errs []error
	for _, i := range unused[m.c.rank] {
		if slices.ContainsFunc(unused, func(theirs []byte) bool {
			return !slices.Contains(theirs, i)
		}) {
			continue
		}
		w := m.windows[i]
		if w.holds(m.remainder) {
			m.remainder = backend.Buffer{}
		}
		m.windows[i] = nil
		m.used.Add(-1)
		errs = append(errs, m.discard(w, true))
	}
	return errors.Join(errs...)
}

// release takes back what alloc has given out.
func (m *peerMemory) release(b backend.Buffer) error {
	for _, w := range m.windows {
		if !w.holds(b) {
			continue
		}
		if i := slices.Index(w.pieces, b.Addr()); i >= 0 {
			w.pieces = slices.Delete(w.pieces, i, i+1)
			return nil
		}
	}
	i := slices.IndexFunc(m.private, func(p backend.Buffer) bool { return p.Addr() == b.Addr() })
	if i < 0 {
		return fmt.Errorf(
			"%w: free of memory that Alloc has not returned, or that was freed before",
			backend.ErrArgument)
	}
	p := m.private[i]
	m.private = slices.Delete(m.private, i, i+1)
	m.lacking.Add(-int64(p.Len()))
	return m.free(p)
}

// free gives memory back to the device.
func (m *peerMemory) free(b backend.Buffer) error {
	if m.dev == nil {
		return m.c.dev.Free(b)
	}
	return m.dev.Free(b)
}

// smallBytes is the size of a window that smaller pieces share: 1 MiB is the smallest allocation
// with its own device pages.
const smallBytes = 1 << 20

// allocSmall is alloc of a part of a window: every rank has as much room, since all take
// the same pieces.
func (m *peerMemory) allocSmall(nbytes int) (backend.Buffer, error) {
	if m.remainder.Len() < nbytes {
		size := smallBytes
		if m.vacant()+1 == peers.MaxWindows {
			size = nbytes // there is nothing to share
		}
		room, err := m.allocWindow(size)
		if err != nil || size == nbytes {
			return room, err
		}
		m.remainder = room
	}
	b := m.remainder.Slice(0, nbytes)
	m.remainder = m.remainder.Slice(min((nbytes+align-1)/align*align, m.remainder.Len()),
		m.remainder.Len())
	return b, nil
}

// allocWindow is alloc of all of a window, while there are some.
func (m *peerMemory) allocWindow(nbytes int) (backend.Buffer, error) {
	own, problem := m.dev.Alloc(nbytes)
	i := m.vacant()
	if i+1 == peers.MaxWindows {
		return m.allocPrivate(own, problem)
	}
	w, err := m.share(own, problem)
	if err == nil {
		err = m.enter(i+1, w.at)
	}
	if err != nil {
		return backend.Buffer{}, errors.Join(err, m.discard(w, errors.As(err, new(*group.Refusal))))
	}
	if i == len(m.windows) {
		m.windows = append(m.windows, nil)
	}
	m.windows[i] = w
	m.used.Add(1)
	return own, nil
}

// vacant returns the index of the next window.
func (m *peerMemory) vacant() int {
	if i := slices.Index(m.windows, nil); i >= 0 {
		return i
	}
	return len(m.windows)
}

// allocPrivate is alloc without a window.
func (m *peerMemory) allocPrivate(own backend.Buffer, problem error) (backend.Buffer, error) {
	err := m.c.gather.Vote(m.c.members, problem)
	switch {
	case err == nil:
		m.private = append(m.private, own)
		m.lacking.Add(int64(own.Len()))
		return own, nil
	case problem == nil:
		err = errors.Join(err, m.free(own)) // no other rank has its address
	}
	return backend.Buffer{}, err
}

// discard gives back a window. agreed says that all ranks discard it: then they vote after they
// have closed their imports. Without a vote, or if the group has failed, the memory stays until
// the group is closed, since another rank may have it open.
func (m *peerMemory) discard(w *window, agreed bool) error {
	err := m.closeImportsOf(w)
	if !agreed || m.c.gather.Vote(m.c.members, nil) != nil {
		m.private = append(m.private, w.own)
		return err
	}
	if w.own.Len() > 0 {
		err = errors.Join(err, m.dev.Free(w.own))
	}
	return err
}
