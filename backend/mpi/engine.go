package mpi

import (
	"errors"
	"fmt"
	"math"
	"runtime"
	"time"
	"unsafe"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/backend/internal/hosted"
	"github.com/euryale-ml/euryale/internal/group"
	"github.com/euryale-ml/euryale/internal/kernels"
	"github.com/euryale-ml/euryale/internal/spinwait"
)

// engine moves the data of a group by MPI.
type engine struct {
	*hosted.Comm
	lib     library
	mpi     handle // MPI's communicator
	shared  bool   // the board is in shared memory
	crowded bool   // there are more ranks on this machine than cores

	// of the call under way: separate, because C may hold no memory that has Go pointers
	request *request
	counts  []int32  // what its arrays point to
	numbers []handle // those of MPI's requests
	met     uint64   // number of the last call that all ranks have begun
	scratch [2][]byte
	empty   [2]byte          // where operands without elements are, for MPI
	terms   []backend.Buffer // of a direct all-reduce
	gaveUp  bool             // a call was given up, and MPI's communicator with it
}

var _ hosted.Engine = (*engine)(nil)

// Collect implements [hosted.Engine].
func (e *engine) Collect(k *hosted.Call) error {
	e.Board.Post(&k.Header, e.shared && e.Verify.Load())
	if k.Count == 0 {
		return e.meet(k)
	}
	return e.transfer(k)
}

// meet returns when every rank has begun the same call, if the board tells.
func (e *engine) meet(k *hosted.Call) error {
	if !e.shared || e.met == k.Header.Seq {
		return nil
	}
	var wait spinwait.Wait
	for look := 1; ; look++ {
		begun, differs := e.Board.Compare(k.Header.Seq)
		switch {
		case differs != nil:
			e.Member.Tell(differs.Differs())
		case begun >= k.Header.Seq:
			e.met = k.Header.Seq
			return nil
		case look >= looks:
			_ = e.Member.Check(k.Header.Seq) // Failure returns the same error
			wait.Pause()
		}
		if err := e.Failure(k); err != nil {
			return err
		}
		if e.crowded { // let other processes run, which always succeeds
			spinwait.Yield()
		}
	}
}

// mostElements is how many elements of an operand MPI is given at once, because it counts in ints.
const mostElements = 1 << 30

// transfer runs a call that is not empty.
func (e *engine) transfer(k *hosted.Call) error {
	switch k.Kind {
	case backend.AllReduce, backend.Reduce, backend.Broadcast:
		return e.pieces(k)
	}
	if k.Count > math.MaxInt32 {
		return fmt.Errorf("%w: %s: %v of %d elements: MPI counts those of a chunk, or of all "+
			"uneven chunks, up to %d", backend.ErrUnsupported, backend.RankOf(e.Comm), k.Collective,
			k.Count, math.MaxInt32)
	}
	e.prepare(k)
	if k.Kind == backend.ReduceScatter {
		return e.reduce(k, k.Dst, k.Src)
	}
	return e.run(k, k.Dst, k.Src)
}

// pieces runs a call on a whole operand, of which MPI can take any part by itself.
func (e *engine) pieces(k *hosted.Call) error {
	all := *k
	switch isRoot := e.Rank() == k.Root; { // the buffer that does not matter may have any length
	case k.Kind == backend.Reduce && !isRoot:
		all.Dst = backend.Buffer{}
	case k.Kind == backend.Broadcast && !isRoot:
		all.Src = backend.Buffer{}
	}
	most := mostElements
	direct := e.isDirect(k)
	if direct {
		most = directMost / k.DType().Size()
	}
	for lo := 0; lo < k.Count; lo += most {
		dst, src, hi := all.Dst, all.Src, min(lo+most, k.Count)
		if dst.Len() > 0 {
			dst = dst.Slice(lo, hi)
		}
		if src.Len() > 0 {
			src = src.Slice(lo, hi)
		}
		e.set(k, hi-lo)
		var err error
		switch {
		case k.Kind == backend.Broadcast:
			err = e.broadcast(k, dst, src)
		case direct:
			err = e.direct(k, dst, src)
		default:
			err = e.reduce(k, dst, src)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// broadcast has one buffer on each rank.
func (e *engine) broadcast(k *hosted.Call, dst, src backend.Buffer) error {
	if e.Rank() != k.Root {
		return e.run(k, dst, dst)
	}
	if err := e.run(k, src, src); err != nil || dst.Len() == 0 {
		return err
	}
	return kernels.Host{}.Copy(dst, src)
}

// reduce runs a reduction, and does what MPI does not: it widens 16-bit floats, divides, and lets
// a chunk be reduced to its place in the operand.
func (e *engine) reduce(k *hosted.Call, dst, src backend.Buffer) error {
	receives := k.Kind != backend.Reduce || e.Rank() == k.Root
	target, operand := dst, src
	d := k.DType()
	if narrow := d == backend.F16 || d == backend.BF16; narrow {
		d = backend.F32
		operand = e.room(0, d, src.Len())
		if err := (kernels.Host{}).Cast(operand, src); err != nil {
			return err
		}
		target = operand
	}
	if k.Kind == backend.ReduceScatter {
		target = e.room(1, d, dst.Len()) // MPI's own way to do it in place is another
	}
	e.request.dtype = int32(d)
	e.request.op = operations[k.Op]
	if !receives {
		return e.run(k, backend.Buffer{}, operand)
	}
	if err := e.run(k, target, operand); err != nil {
		return err
	}
	if k.Op == backend.Avg {
		if err := (kernels.Host{}).Divide(target, target, e.Size()); err != nil {
			return err
		}
	}
	switch {
	case d != k.DType():
		return kernels.Host{}.Cast(dst, target)
	case target.Addr() != dst.Addr():
		return kernels.Host{}.Copy(dst, target)
	}
	return nil
}

// How all-reduces among the ranks of one machine are done (2026-11-23-epyc2-mpi.md).
const (
	// directRanks is among how many ranks all of them are direct. Among more, they are if a chunk
	// has directBytes: MPI needs fewer messages for smaller ones.
	directRanks = 8
	directBytes = 2 << 10
	// wholeBytes is how much each of directRanks sends at most in order to have a single step.
	wholeBytes = 32 << 10
	// directMost is how much of an operand is reduced at once, which bounds what else is allocated.
	directMost = 16 << 20
)

// isDirect reports whether a call is a direct all-reduce.
func (e *engine) isDirect(k *hosted.Call) bool {
	P := e.Size()
	return k.Kind == backend.AllReduce && e.shared &&
		(P <= directRanks || k.Src.NBytes() >= directBytes*P)
}

// direct runs an all-reduce by messages. Small operands go to all ranks, each of which adds them up
// in rank order. Larger ones take two steps, as in package tcp: every rank adds up a chunk, and
// gathers those of the others.
func (e *engine) direct(k *hosted.Call, dst, src backend.Buffer) error {
	P, n, size := e.Size(), src.Len(), src.DType().Size()
	whole := P <= directRanks && src.NBytes()*(P-1) <= wholeBytes
	chunk := func(r int) (lo, hi int) {
		if whole {
			return 0, n
		}
		return r * n / P, (r + 1) * n / P
	}
	lo, hi := chunk(e.Rank())
	per := hi - lo
	own, sums, room := src.Slice(lo, hi), dst.Slice(lo, hi), e.room(0, k.DType(), P*per)
	e.exchange(func(r int) (sends, sendAt, receives, receiveAt int) {
		e.terms[r] = room.Slice(r*per, (r+1)*per)
		lo, hi := chunk(r)
		return (hi - lo) * size, lo * size, per * size, r * per * size
	})
	e.terms[e.Rank()] = own
	if err := e.run(k, room, src); err != nil {
		return err
	}
	kernels.Host{}.ReduceChecked(k.Association, k.Op, sums, e.terms, nil)
	if whole {
		return nil
	}
	e.exchange(func(r int) (sends, sendAt, receives, receiveAt int) {
		theirs, end := chunk(r)
		return per * size, lo * size, (end - theirs) * size, theirs * size
	})
	return e.run(k, dst, dst)
}

// exchange makes the request of messages between each two ranks, as uneven does, but with bytes.
func (e *engine) exchange(with func(r int) (sends, sendAt, receives, receiveAt int)) {
	*e.request = request{kind: exchange, dtype: int32(backend.U8), root: int32(e.Rank()),
		comm: e.mpi}
	e.uneven(with)
	e.request.count = int32(e.Size())
}

// operations are the numbers that libmpi.c has for what MPI computes.
var operations = [...]int32{backend.Sum: 0, backend.Avg: 0, backend.Prod: 1, backend.Min: 2,
	backend.Max: 3}

// room returns memory for elements, apart from that of other places.
func (e *engine) room(place int, d backend.DType, n int) backend.Buffer {
	if need := n * d.Size(); cap(e.scratch[place]) < need {
		e.scratch[place] = make([]byte, need)
	}
	return backend.Host(d, unsafe.Pointer(unsafe.SliceData(e.scratch[place])), n)
}

// set begins the request of a call of so many elements.
func (e *engine) set(k *hosted.Call, count int) {
	*e.request = request{kind: int32(k.Kind), dtype: int32(k.DType()), root: int32(k.Root),
		count: int32(count), comm: e.mpi}
}

// prepare makes the request of a call on chunks.
func (e *engine) prepare(k *hosted.Call) {
	e.set(k, k.Count)
	if k.Splits == nil {
		return
	}
	e.uneven(func(r int) (sends, sendAt, receives, receiveAt int) {
		if k.Kind == backend.AllToAll {
			sends, sendAt, _ = k.Pair(e.Rank(), r, e.Size(), k.Count)
			receives, _, receiveAt = k.Pair(r, e.Rank(), e.Size(), k.Count)
			return sends, sendAt, receives, receiveAt
		}
		lo, hi := k.Chunk(r, e.Size(), k.Count)
		return hi - lo, lo, hi - lo, lo
	})
}

// uneven gives the request what this rank sends to each rank and receives from it, and where that
// lies. If chunks are the same on all ranks, what it sends to itself is its chunk.
func (e *engine) uneven(with func(r int) (sends, sendAt, receives, receiveAt int)) {
	P := e.Size()
	if cap(e.counts) < 4*P {
		e.counts = make([]int32, 4*P)
	}
	list := func(i int) []int32 { return e.counts[i*P : (i+1)*P] }
	sends, sendAt, receives, receiveAt := list(0), list(1), list(2), list(3)
	for r := range P {
		n, from, m, to := with(r)
		sends[r], sendAt[r], receives[r], receiveAt[r] = int32(n), int32(from), int32(m), int32(to)
	}
	at := func(list []int32) uintptr { return uintptr(unsafe.Pointer(unsafe.SliceData(list))) }
	q := e.request
	q.count = sends[e.Rank()]
	q.sends, q.sendAt, q.receives, q.receiveAt = at(sends), at(sendAt), at(receives), at(receiveAt)
}

// polls is how often a call is tested before this rank looks after the group, and looks how often
// it looks at shared memory: some microseconds.
const polls, looks = 50, 100

// run runs the request of a call once the ranks have met: meanwhile it was made.
func (e *engine) run(k *hosted.Call, dst, src backend.Buffer) error {
	r := e.request
	r.dst, r.src, r.inPlace = e.address(0, dst), e.address(1, src), inPlace(k, e.Rank(), dst, src)
	r.numbers = uintptr(unsafe.Pointer(unsafe.SliceData(e.numbers)))
	if e.crowded {
		r.crowded = 1
	}
	if err := e.meet(k); err != nil {
		return err
	}
	err := e.lib.start(r, polls)
	if err == nil && r.done() {
		return nil
	}
	// From here on MPI has the memory also while no call of it is under way.
	pins := new(runtime.Pinner)
	for _, memory := range []unsafe.Pointer{pointer(dst), pointer(src),
		unsafe.Pointer(unsafe.SliceData(e.counts)), unsafe.Pointer(&e.numbers[0]),
		unsafe.Pointer(r)} {
		if memory != nil {
			pins.Pin(memory)
		}
	}
	for wait := (spinwait.Wait{}); err == nil && !r.done(); {
		ended := e.Member.Check(k.Header.Seq) != nil
		if err = e.lib.test(r, polls); ended && err == nil && !r.done() {
			break // the others may have been done with this call before the group ended
		}
		wait.Pause()
	}
	if err == nil && r.done() {
		pins.Unpin()
		return nil
	}
	return e.giveUp(k, pins, err)
}

// address returns where an operand is, for one without elements a place apart from the other's:
// Open MPI takes equal addresses for MPI_IN_PLACE, and a rank that has nothing in place then counts
// no call, so that it takes later messages of others for those of other calls.
func (e *engine) address(place int, b backend.Buffer) uintptr {
	if b.Len() == 0 {
		return uintptr(unsafe.Pointer(&e.empty[place]))
	}
	return b.Addr()
}

// giveUp ends the group for a call that MPI keeps, or has failed.
func (e *engine) giveUp(k *hosted.Call, pins *runtime.Pinner, err error) error {
	e.gaveUp = true
	here.fail(pins)
	if err != nil {
		e.broken(k, err)
	}
	return e.Failure(k)
}

// inPlace reports whether MPI is to take this rank's operand, or to put its chunk, where the result
// of the call is.
func inPlace(k *hosted.Call, rank int, dst, src backend.Buffer) int32 {
	isIn := false
	switch k.Kind {
	case backend.AllReduce:
		isIn = dst.Addr() == src.Addr()
	case backend.Reduce:
		isIn = rank == k.Root && dst.Addr() == src.Addr()
	case backend.AllGather:
		isIn = overlap(dst, src)
	case backend.Gather:
		isIn = rank == k.Root && overlap(dst, src)
	case backend.Scatter:
		isIn = rank == k.Root && overlap(src, dst)
	}
	if isIn {
		return 1
	}
	return 0
}

// overlap reports whether the first byte of part is in whole. Of an empty part nothing moves.
func overlap(whole, part backend.Buffer) bool {
	at := part.Addr()
	return part.Len() > 0 && at >= whole.Addr() && at < whole.Addr()+uintptr(whole.NBytes())
}

func pointer(b backend.Buffer) unsafe.Pointer {
	if b.Len() == 0 {
		return nil
	}
	return unsafe.Pointer(unsafe.SliceData(b.Bytes()))
}

// broken ends the group with an error of MPI, unless a better reason is heard of soon: MPI may
// notice the loss of a rank first.
func (e *engine) broken(k *hosted.Call, err error) {
	found := group.Found{Report: group.Report{Reason: group.Aborted, Peer: e.Rank(),
		Text: err.Error()}, Doubt: 2 * group.ReportGrace}
	e.Member.Tell(found)
	for e.Member.Check(k.Header.Seq) == nil {
		time.Sleep(time.Millisecond)
	}
}

// Close implements [hosted.Engine]. To free MPI's communicator takes all ranks.
func (e *engine) Close(well bool) error {
	var err error
	if well && !e.gaveUp && e.Board.Leave(leaveGrace) {
		err = e.lib.free(e.mpi)
	}
	return errors.Join(err, e.Board.Release())
}

// leaveGrace is how long a rank that closes waits for the others to close, too.
const leaveGrace = 50 * time.Millisecond
