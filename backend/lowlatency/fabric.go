package lowlatency

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/euryale-ml/euryale/backend"
	peers "github.com/euryale-ml/euryale/kernels/cuda"
)

// fabric is a group's memory, as one rank reaches it.
type fabric struct {
	inner      backend.Communicator // to exchange notes over
	dev        Device
	plan       plan
	rank, size int

	peers   peers.Peers
	pad     *window          // and staging
	windows []*window        // from Alloc: number 1 and on; nil where all ranks have freed one
	room    backend.Buffer   // what is left of a window that small pieces share
	private []backend.Buffer // from Alloc, but kernels do not know it
	used    atomic.Int64     // windows of Alloc, for those who ask meanwhile, or after the end
	lacking atomic.Int64     // bytes of private

	farewells *farewells
	giving    sync.Mutex   // held while memory is given back
	held      atomic.Int64 // bytes that leave has yet to give back

	// alive guards status against use after it is freed.
	alive  sync.RWMutex
	status backend.Buffer // of the host: stop, reason
}

// window is a run of memory of each rank, reached by all.
type window struct {
	own      backend.Buffer
	at       []uintptr        // where this rank reaches that of each rank
	imported []backend.Buffer // to be closed
	pieces   []uintptr        // addresses that Alloc has given out and this rank has not freed
}

// holds reports whether memory lies in this rank's part of the window.
func (w *window) holds(b backend.Buffer) bool {
	return w != nil && b.Addr() >= w.own.Addr() && b.Addr()+uintptr(b.NBytes()) <= w.own.Addr()+uintptr(w.own.Len())
}

// packetBytes is the largest operand that travels in packets, of which half is flags.
// Larger ones travel in lines, of which a sixteenth is. Among four H200, packets were 0.6
// to 0.8 us faster up to 32 KiB, the same at 64, and 0.5 slower at 128; among two, lines
// were as fast (bench/results/2026-11-21-h200x4-lowlatency.txt, h200x2-lowlatency.txt).
const packetBytes = 128 << 10

const packets = packetBytes / 8

// lines is the room for lines in each half of a pad: 16 MiB. An operand in LL128 can
// have 15 MiB among all senders, and a round of LL128TwoShot 3.75 MiB.
const lines = 128 << 10

// llBytes is the largest operand that each of size ranks can push to all others.
func llBytes(size int) int { return max(packetBytes, lines/size*120) }

// align is what the parts of an allocation start at multiples of.
const align = 256

func padBytes(size int) int {
	return (peers.PadBytes(size, packets, lines) + align - 1) / align * align
}

// join makes the fabric of a group. A refusal says, on every rank, why there is
// none; nothing is left behind then.
func (o Options) join(inner backend.Communicator) (*fabric, plan, error) {
	dev, mine := o.introduce(inner)
	cards, err := gatherAll(inner, mine)
	if err != nil {
		return nil, plan{}, errors.Join(err, closeDevice(dev))
	}
	p, why := decide(cards)
	if why != "" {
		return nil, p, errors.Join(refusal(why), closeDevice(dev))
	}
	f := &fabric{inner: inner, dev: dev, plan: p, rank: inner.Rank(), size: inner.Size()}
	if err := f.build(o.limit()); err != nil {
		return nil, p, errors.Join(err, f.dismantle(o.endings))
	}
	return f, p, nil
}

// dismantle gives back everything after an attempt to build, which usually all ranks do at
// a time. Copies of the attempt may still be under way, if they have taken too long.
func (f *fabric) dismantle(e *endings) error {
	own := e.begin(func() error { return f.leave(f.dev.Default()) })
	return errors.Join(e.wait(dismantleTime, own), f.keep())
}

// dismantleTime is how long the others may take to find that an attempt has failed.
const dismantleTime = 2 * time.Second

func closeDevice(dev Device) error {
	if dev == nil {
		return nil
	}
	return dev.Close()
}

// build makes and shares the memory, tries every pair, and clears it.
func (f *fabric) build(limit time.Duration) (err error) {
	processes := make([]string, f.size)
	for r, c := range f.plan.cards {
		processes[r] = c.Process
	}
	if f.farewells, err = newFarewells(f.inner, processes); err != nil {
		return err
	}
	status, problem := f.dev.AllocHost(peers.StatusBytes)
	f.status = status
	own := backend.Buffer{}
	if problem == nil {
		own, problem = f.dev.Alloc(padBytes(f.size) + 2*f.plan.Staging)
	}
	if f.pad, err = f.share(own, problem); err != nil {
		return err
	}
	f.peers = peers.Peers{
		Rank: f.rank, Size: f.size, Status: f.status.Addr(), Limit: limit,
		Packets: packets, Lines: lines, Staging: f.plan.Staging, Blocks: f.plan.Blocks,
	}
	copy(f.peers.Pads[:], f.pad.at)
	if f.plan.Partners != nil {
		f.peers.Neighbours = f.plan.Partners[f.rank]
	}
	staging := make([]uintptr, f.size)
	for p, at := range f.pad.at {
		if f.reaches(p) {
			staging[p] = at + uintptr(padBytes(f.size))
		}
	}
	if err := f.probe(); err != nil {
		return err
	}
	return f.enter(0, staging)
}

// offer is what a rank tells of its memory.
type offer struct {
	Problem string
	Name    []byte  // for other processes
	Addr    uintptr // in its own
}

// reaches reports whether this rank uses the memory of another: not of all on a cube
// mesh.
func (f *fabric) reaches(p int) bool { return f.plan.reaches(f.rank, p) }

// share lets every rank reach own of those it uses, or none does. A problem of getting the
// memory is passed on. Whatever the outcome, the memory belongs to the window, which
// is always returned, to be given back.
func (f *fabric) share(own backend.Buffer, problem error) (*window, error) {
	w := &window{own: own, at: make([]uintptr, f.size)}
	mine := offer{Addr: own.Addr()}
	if problem == nil && f.abroad() {
		mine.Name, problem = f.dev.Export(own)
	}
	if problem != nil {
		mine.Problem = problem.Error()
	}
	offers, err := gatherAll(f.inner, mine)
	if err != nil {
		return w, err
	}
	for r, o := range offers {
		if o.Problem != "" {
			return w, refusal(fmt.Sprintf("rank %d: %s", r, o.Problem))
		}
	}
	for p, o := range offers {
		if !f.reaches(p) {
			continue
		}
		if w.at[p], problem = f.open(w, p, o); problem != nil {
			problem = fmt.Errorf("memory of rank %d: %w", p, problem)
			break
		}
	}
	return w, vote(f.inner, problem)
}

// abroad reports whether a rank is in another process.
func (f *fabric) abroad() bool {
	for _, c := range f.plan.cards {
		if c.Process != f.plan.cards[f.rank].Process {
			return true
		}
	}
	return false
}

// open returns where this rank reaches the memory of another.
func (f *fabric) open(w *window, p int, o offer) (uintptr, error) {
	theirs := f.plan.cards[p]
	if theirs.Process == f.plan.cards[f.rank].Process {
		return o.Addr, f.dev.Befriend(theirs.Ordinal)
	}
	b, err := f.dev.Import(o.Name)
	if err != nil {
		return 0, err
	}
	w.imported = append(w.imported, b)
	return b.Addr(), nil
}

// word is the place for rank r in rank p's row of words that kernels leave alone.
func (f *fabric) word(p, r int) backend.Buffer {
	offset, _ := peers.HostRow()
	return backend.OnDevice(backend.U8, f.pad.at[p]+uintptr(offset+8*r), 8)
}

// row is this rank's row of such words.
func (f *fabric) row() backend.Buffer {
	offset, nbytes := peers.HostRow()
	return backend.OnDevice(backend.U8, f.pad.at[f.rank]+uintptr(offset), nbytes)
}

// token is what rank r writes for rank p, and nobody else does.
func token(r, p int) uint64 { return 0x6c6f776c6174<<16 | uint64(r)<<8 | uint64(p) }

// probe lets each rank write to each other one and read it back, by kernels: what
// the driver says of links is not always so.
func (f *fabric) probe() error {
	if err := vote(f.inner, f.tell()); err != nil {
		return err
	}
	if err := vote(f.inner, f.verify()); err != nil {
		return err
	}
	return vote(f.inner, f.do(func(a backend.Arithmetic) error { return a.Zero(f.row()) }))
}

// do runs kernels on the default queue, to their end.
func (f *fabric) do(start func(a backend.Arithmetic) error) error {
	q := f.dev.Default()
	if err := start(q.(exchanger)); err != nil { // introduce has made sure
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), f.peers.Limit)
	defer cancel()
	return drain(ctx, q)
}

// with runs f with device memory that holds bytes.
func (f *fabric) with(bytes []byte, use func(a backend.Arithmetic, b backend.Buffer) error) error {
	b, err := f.dev.Alloc(len(bytes))
	if err != nil {
		return err
	}
	err = f.do(func(a backend.Arithmetic) error {
		if err := a.Move(b, backend.Of(bytes)); err != nil {
			return err
		}
		return use(a, b)
	})
	return errors.Join(err, f.dev.Free(b))
}

// tell writes its token to each rank.
func (f *fabric) tell() error {
	words := make([]byte, 8*f.size)
	for p := range f.size {
		binary.LittleEndian.PutUint64(words[8*p:], token(f.rank, p))
	}
	return f.with(words, func(a backend.Arithmetic, b backend.Buffer) error {
		var errs []error
		for p := range f.size {
			if f.reaches(p) {
				errs = append(errs, a.Copy(f.word(p, f.rank), b.Slice(8*p, 8*p+8)))
			}
		}
		return errors.Join(errs...)
	})
}

// heard returns what the ranks have told this one.
func (f *fabric) heard() ([]uint64, error) {
	_, nbytes := peers.HostRow()
	bytes := make([]byte, nbytes)
	err := f.do(func(a backend.Arithmetic) error { return a.Move(backend.Of(bytes), f.row()) })
	words := make([]uint64, f.size)
	for p := range words {
		words[p] = binary.LittleEndian.Uint64(bytes[8*p:])
	}
	return words, err
}

// verify looks for what the others have written here, and for what this rank has
// written there.
func (f *fabric) verify() error {
	words, err := f.heard()
	if err != nil {
		return err
	}
	back := make([]byte, 8*f.size)
	err = f.with(back, func(a backend.Arithmetic, b backend.Buffer) error {
		for p := range f.size {
			if !f.reaches(p) {
				continue
			}
			if err := a.Copy(b.Slice(8*p, 8*p+8), f.word(p, f.rank)); err != nil {
				return err
			}
		}
		return a.Move(backend.Of(back), b)
	})
	if err != nil {
		return err
	}
	for p := range f.size {
		if !f.reaches(p) {
			continue
		}
		if words[p] != token(p, f.rank) {
			return fmt.Errorf("what rank %d wrote to its memory did not arrive", p)
		}
		if binary.LittleEndian.Uint64(back[8*p:]) != token(f.rank, p) {
			return fmt.Errorf("reading the memory of rank %d gives something else than was written", p)
		}
	}
	return nil
}

// enter tells the kernels where a window is, on every rank or on none.
func (f *fabric) enter(number int, at []uintptr) error {
	offset, nbytes := peers.WindowRow(number)
	row := make([]byte, nbytes)
	for p, addr := range at {
		binary.LittleEndian.PutUint64(row[8*p:], uint64(addr))
	}
	dst := backend.OnDevice(backend.U8, f.pad.at[f.rank]+uintptr(offset), nbytes)
	return vote(f.inner, f.do(func(a backend.Arithmetic) error { return a.Move(dst, backend.Of(row)) }))
}

// place returns where memory lies in the windows, 0 if nowhere. unit is the size of
// what must be whole units.
func (f *fabric) place(b backend.Buffer, unit int) peers.Place {
	if !peers.Placeable(b.Addr(), unit) {
		return 0
	}
	for i, w := range f.windows {
		if w.holds(b) {
			return peers.PlaceIn(i+1, int(b.Addr()-w.own.Addr()))
		}
	}
	return 0
}

// alloc makes a window of nbytes on every rank, or on none.
func (f *fabric) alloc(nbytes int) (backend.Buffer, error) {
	all, err := gatherAll(f.inner, request{nbytes, f.unused()})
	if err != nil {
		return backend.Buffer{}, err
	}
	if err := f.reclaim(all); err != nil {
		return backend.Buffer{}, err
	}
	for p, theirs := range all {
		if theirs.Bytes != nbytes {
			return backend.Buffer{}, fmt.Errorf("%w: %d bytes here, %d on %s: every rank must pass the same", backend.ErrArgument, nbytes, theirs.Bytes, f.inner.Capabilities().Members.Rank(p))
		}
	}
	if nbytes == 0 {
		return backend.Of([]byte{}), nil
	}
	take := f.allocWindow
	if nbytes <= smallBytes {
		take = f.allocSmall
	}
	b, err := take(nbytes)
	for _, w := range f.windows {
		if err == nil && w.holds(b) {
			w.pieces = append(w.pieces, b.Addr())
		}
	}
	return b, err
}

// request is what a rank tells of its Alloc.
type request struct {
	Bytes  int
	Unused []int // windows that this rank has freed
}

// unused returns the indices of the windows of which this rank has freed every piece.
func (f *fabric) unused() (windows []int) {
	for i, w := range f.windows {
		if w != nil && len(w.pieces) == 0 {
			windows = append(windows, i)
		}
	}
	return windows
}

// errFreed is why a window goes that no rank uses any more.
const errFreed = refusal("every rank has freed it")

// reclaim gives back the windows that no rank uses any more. All ranks do so at the
// same place of their calls, so that windows keep their numbers everywhere.
func (f *fabric) reclaim(all []request) error {
	var errs []error
	for _, i := range all[f.rank].Unused {
		if slices.ContainsFunc(all, func(r request) bool { return !slices.Contains(r.Unused, i) }) {
			continue
		}
		w := f.windows[i]
		if w.holds(f.room) {
			f.room = backend.Buffer{}
		}
		f.windows[i] = nil
		f.used.Add(-1)
		errs = append(errs, f.discard(w, errFreed))
	}
	return errors.Join(errs...)
}

// release takes back what alloc has given out.
func (f *fabric) release(b backend.Buffer) error {
	for _, w := range f.windows {
		if !w.holds(b) {
			continue
		}
		if i := slices.Index(w.pieces, b.Addr()); i >= 0 {
			w.pieces = slices.Delete(w.pieces, i, i+1)
			return nil
		}
	}
	i := slices.IndexFunc(f.private, func(p backend.Buffer) bool { return p.Addr() == b.Addr() })
	if i < 0 {
		return fmt.Errorf("%w: memory that Alloc has not returned, or that was freed before", backend.ErrArgument)
	}
	p := f.private[i]
	f.private = slices.Delete(f.private, i, i+1)
	f.lacking.Add(-int64(p.Len()))
	return f.dev.Free(p)
}

// smallBytes is a window that pieces of up to that size share: memory of 1 MiB is the least
// that lies on a page of the device by itself.
const smallBytes = 1 << 20

// allocSmall is alloc of a part of a window: every rank has as much room, since all take
// the same pieces.
func (f *fabric) allocSmall(nbytes int) (backend.Buffer, error) {
	if f.room.Len() < nbytes {
		size := smallBytes
		if f.vacant()+1 == peers.MaxWindows {
			size = nbytes // there is nothing to share
		}
		room, err := f.allocWindow(size)
		if err != nil || size == nbytes {
			return room, err
		}
		f.room = room
	}
	b := f.room.Slice(0, nbytes)
	f.room = f.room.Slice(min((nbytes+align-1)/align*align, f.room.Len()), f.room.Len())
	return b, nil
}

// allocWindow is alloc of all of a window, while there are some.
func (f *fabric) allocWindow(nbytes int) (backend.Buffer, error) {
	own, problem := f.dev.Alloc(nbytes)
	i := f.vacant()
	if i+1 == peers.MaxWindows {
		return f.allocPrivate(own, problem)
	}
	w, err := f.share(own, problem)
	if err == nil {
		err = f.enter(i+1, w.at)
	}
	if err != nil {
		return backend.Buffer{}, errors.Join(err, f.discard(w, err))
	}
	if i == len(f.windows) {
		f.windows = append(f.windows, nil)
	}
	f.windows[i] = w
	f.used.Add(1)
	return own, nil
}

// vacant returns the index of the next window.
func (f *fabric) vacant() int {
	if i := slices.Index(f.windows, nil); i >= 0 {
		return i
	}
	return len(f.windows)
}

// allocPrivate is alloc without a window.
func (f *fabric) allocPrivate(own backend.Buffer, problem error) (backend.Buffer, error) {
	err := vote(f.inner, problem)
	switch {
	case err == nil:
		f.private = append(f.private, own)
		f.lacking.Add(int64(own.Len()))
		return own, nil
	case problem == nil:
		err = errors.Join(err, f.dev.Free(own)) // nobody else knows of it
	}
	return backend.Buffer{}, err
}

// discard gives back a window that some rank has refused, once nobody has it open any more.
// If inner has failed, nobody can say so, and it stays until the group ends.
func (f *fabric) discard(w *window, why error) error {
	err := f.closeImportsOf(w)
	var r refusal
	if !errors.As(why, &r) || vote(f.inner, nil) != nil {
		f.private = append(f.private, w.own)
		return err
	}
	if w.own.Len() > 0 {
		err = errors.Join(err, f.dev.Free(w.own))
	}
	return err
}

// flag is a word of the status, which the device uses too. alive is held.
func (f *fabric) flag(i int) *atomic.Uint32 {
	return (*atomic.Uint32)(unsafe.Pointer(&f.status.Bytes()[4*i]))
}

// stop ends all waits of kernels; later kernels end as they begin to wait.
func (f *fabric) stop() {
	f.alive.RLock()
	defer f.alive.RUnlock()
	if f.status.Len() > 0 {
		f.flag(0).Store(1)
	}
}

// late returns the rank that a kernel has given up waiting for, -1 if there is none.
func (f *fabric) late() int {
	f.alive.RLock()
	defer f.alive.RUnlock()
	if f.status.Len() == 0 {
		return -1
	}
	return f.overdue()
}

// overdue is late where the status cannot go away: alive is held, or the communicator's mu,
// and it is not closing.
func (f *fabric) overdue() int { return int(f.flag(1).Load()) - 1 }
