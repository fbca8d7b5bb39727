package gpu

import (
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/kernels"
	"github.com/euryale-ml/euryale/internal/testing/fakedevice"
)

// The fake is NCCL among goroutines, on guarded memory: it runs steps as NCCL
// runs calls, waits for peers on the stream, and ends by abort. With it, and with a rig of
// devices, the whole communicator is tested on machines without a GPU.

// fake is a library.
type fake struct {
	machine *fakedevice.Host

	mu      sync.Mutex
	changed *sync.Cond // anything below has
	rings   map[string]*ring
	ids     int
	old     error // that it can neither split nor encrypt
	keys    []string
	refusal error // of them
	// refuse is what run returns, to test that.
	refuse atomic.Pointer[error]
	// hold is what abort waits for before it frees anything, to test that.
	hold atomic.Pointer[chan struct{}]
	// slow is called by the next run, to test that.
	slow atomic.Pointer[func()]
	late int // calls of run after abort
}

// ring is a communicator of all its ranks.
type ring struct {
	size   int
	joined int
	closed int
	mail   map[[2]int][][]byte // by source and destination
}

func newFake(m *fakedevice.Host) *fake {
	f := &fake{machine: m, rings: map[string]*ring{}}
	f.changed = sync.NewCond(&f.mu)
	return f
}

func (f *fake) version() int          { return 22803 }
func (f *fake) splits() error         { return f.old }
func (f *fake) encrypts() error       { return f.old }
func (f *fake) path() string          { return "libnccl.so.2" }
func (f *fake) devices() (int, error) { return 16, nil }

func (f *fake) encrypt(key string) error {
	f.with(func() { f.keys = append(f.keys, key) })
	return f.refusal
}

// with changes something.
func (f *fake) with(do func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	do()
	f.changed.Broadcast()
}

// look changes nothing, and wakes nobody.
func (f *fake) look(do func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	do()
}

func (f *fake) newID() (id []byte, err error) {
	f.with(func() { f.ids++; id = fmt.Append(nil, "id", f.ids) })
	return id, nil
}

// until waits for a condition.
func (f *fake) until(ok func() bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for !ok() {
		f.changed.Wait()
	}
}

func (f *fake) join(dev Device, id []byte, size, rank int) (ncclComm, error) {
	return f.enter(f.machine.Move, string(id), size, rank), nil
}

func (f *fake) enter(move mover, key string, size, rank int) *fakeEngine {
	e := &fakeEngine{fake: f, move: move, key: key, rank: rank}
	f.with(func() {
		if f.rings[key] == nil {
			f.rings[key] = &ring{size: size, mail: map[[2]int][][]byte{}}
		}
		e.ring = f.rings[key]
		e.ring.joined++
	})
	return e
}

// mover copies between the host and devices.
type mover func(dst, src backend.Buffer) error

// fakeEngine is one rank of a ring.
type fakeEngine struct {
	fake    *fake
	move    mover
	ring    *ring // nil for a rank that takes no part
	key     string
	rank    int
	forks   int
	running int
	graphs  int // that hold calls
	aborted bool
	parent  *fakeEngine
	color   int
	through bool
	stopped func() bool // of a kernel of ours: whether it is told to stop; nil for NCCL
}

func (e *fakeEngine) ready() (ok bool, err error) {
	e.fake.with(func() {
		if ok = e.through; ok {
			return
		}
		if p := e.parent; p != nil {
			// Every rank of the parent must have come, and then those of the color are known.
			colors := p.ring.mail[[2]int{-1, p.forks}]
			if ok = len(colors) == p.ring.size; !ok {
				return
			}
			size := 0
			for _, c := range colors {
				if int(int8(c[0])) == e.color {
					size++
				}
			}
			if e.ring != nil && e.ring.size != size { // others may be using it
				e.ring.size = size
			}
		}
		ok = e.ring == nil || e.ring.joined == e.ring.size
		e.through = ok
		if e.aborted {
			err = errors.New("aborted during ready")
		}
	})
	return ok, err
}

func (e *fakeEngine) fork(color, key int) (ncclComm, error) {
	e.forks++
	part := &fakeEngine{fake: e.fake}
	if color >= 0 {
		part = e.fake.enter(e.move, fmt.Sprintf("%s/%d.%d", e.key, e.forks, color), 0, key)
	}
	part.parent, part.color = e, color
	e.fake.with(func() {
		at := [2]int{-1, e.forks}
		e.ring.mail[at] = append(e.ring.mail[at], []byte{byte(int8(color))})
	})
	return part, nil
}

func (e *fakeEngine) failed() error { return nil }

func (e *fakeEngine) close() error {
	e.fake.with(func() { e.ring.closed++ })
	e.fake.until(func() bool { return e.ring.closed == e.ring.size })
	return e.abort()
}

func (e *fakeEngine) abort() error {
	var twice bool
	e.fake.with(func() { twice, e.aborted = e.aborted, true })
	e.fake.until(func() bool { return e.running == 0 && e.graphs == 0 })
	if hold := e.fake.hold.Load(); hold != nil {
		<-*hold
	}
	if twice {
		return errors.New("aborted twice")
	}
	return nil
}

func (e *fakeEngine) run(stream uintptr, steps []ncclStep, event uintptr) error {
	if err := e.fake.refuse.Load(); err != nil {
		return *err
	}
	e.fake.with(func() {
		if e.aborted {
			e.fake.late++
		}
	})
	if wait := e.fake.slow.Swap(nil); wait != nil {
		(*wait)()
	}
	steps = slices.Clone(steps)
	if e.fake.machine.OnFree(stream, func() { e.fake.with(func() { e.graphs-- }) }) {
		e.fake.with(func() { e.graphs++ })
	}
	err := e.fake.machine.Submit(stream, func() {
		var dead bool
		e.fake.with(func() { dead = e.aborted; e.running++ })
		if !dead {
			e.group(steps)
		}
		e.fake.with(func() { e.running-- })
	})
	if err != nil || event == 0 {
		return err
	}
	return e.fake.machine.RecordEvent(stream, event)
}

func (e *fakeEngine) read(addr uintptr, n int) []byte {
	x := make([]byte, n)
	if err := e.move(backend.Of(x), backend.OnDevice(backend.U8, addr, n)); err != nil {
		panic(err)
	}
	return x
}

func (e *fakeEngine) write(addr uintptr, x []byte) {
	if err := e.move(backend.OnDevice(backend.U8, addr, len(x)), backend.Of(x)); err != nil {
		panic(err)
	}
}

// group runs steps: first all that give, then all that take.
func (e *fakeEngine) group(steps []ncclStep) {
	for i := range steps {
		e.give(&steps[i])
	}
	for i := range steps {
		if !e.take(&steps[i]) {
			return
		}
	}
}

var fakeTypes = map[int32]backend.DType{0: backend.U8, 6: backend.F16, 9: backend.BF16,
	7: backend.F32, 8: backend.F64, 2: backend.I32, 4: backend.I64, 1: backend.U8}

var fakeOps = [...]backend.ReduceOp{ncclSum: backend.Sum, ncclProd: backend.Prod,
	ncclMax: backend.Max, ncclMin: backend.Min, ncclAvg: backend.Avg}

func (s *ncclStep) nbytes() int { return int(s.count) * fakeTypes[s.dtype].Size() }

func (e *fakeEngine) give(s *ncclStep) {
	n, P := s.nbytes(), e.ring.size
	switch s.what {
	case stepCopy:
		e.write(s.dst, e.read(s.src, n))
	case stepSend:
		e.post(int(s.peer), e.read(s.src, n))
	case stepReduce:
		e.post(int(s.peer), e.read(s.src, n))
	case stepAllReduce, stepAllGather:
		x := e.read(s.src, n)
		for p := range P {
			e.post(p, x)
		}
	case stepReduceScatter:
		for p := range P {
			e.post(p, e.read(s.src+uintptr(p*n), n))
		}
	case stepBroadcast:
		if e.rank == int(s.peer) {
			x := e.read(s.src, n)
			for p := range P {
				e.post(p, x)
			}
		}
	}
}

func (e *fakeEngine) take(s *ncclStep) bool {
	n := s.nbytes()
	switch s.what {
	case stepRecv, stepBroadcast:
		x, ok := e.receive(int(s.peer))
		if ok {
			e.write(s.dst, fit(x, n))
		}
		return ok
	case stepReduce:
		return e.rank != int(s.peer) || e.combine(s, n)
	case stepAllReduce, stepReduceScatter:
		return e.combine(s, n)
	case stepAllGather:
		for p := range e.ring.size {
			x, ok := e.receive(p)
			if !ok {
				return false
			}
			e.write(s.dst+uintptr(p*n), fit(x, n))
		}
	}
	return true
}

// fit is what comes of ranks that disagree on a length.
func fit(x []byte, n int) []byte { return append(slices.Clone(x), make([]byte, n)...)[:n] }

func (e *fakeEngine) combine(s *ncclStep, n int) bool {
	var xs []backend.Buffer
	for p := range e.ring.size {
		x, ok := e.receive(p)
		if !ok {
			return false
		}
		xs = append(xs, backend.Of(fit(x, n)).As(fakeTypes[s.dtype]))
	}
	y := make([]byte, n)
	if err := (kernels.Host{}).Reduce(fakeOps[s.op], backend.Of(y).As(fakeTypes[s.dtype]),
		xs...); err != nil {
		panic(err)
	}
	e.write(s.dst, y)
	return true
}

func (e *fakeEngine) post(p int, x []byte) {
	e.fake.with(func() {
		at := [2]int{e.rank, p}
		e.ring.mail[at] = append(e.ring.mail[at], x)
	})
}

func (e *fakeEngine) receive(p int) (x []byte, ok bool) {
	at := [2]int{p, e.rank}
	if e.stopped != nil {
		return e.poll(at)
	}
	e.fake.until(func() bool { return e.aborted || len(e.ring.mail[at]) > 0 })
	e.fake.with(func() {
		if ok = !e.aborted; ok {
			x, e.ring.mail[at] = e.ring.mail[at][0], e.ring.mail[at][1:]
		}
	})
	return x, ok
}

// poll is receive of a kernel, which looks at memory.
func (e *fakeEngine) poll(at [2]int) (x []byte, ok bool) {
	for ; !ok && !e.stopped(); time.Sleep(20 * time.Microsecond) {
		e.fake.with(func() {
			if ok = len(e.ring.mail[at]) > 0; ok {
				x, e.ring.mail[at] = e.ring.mail[at][0], e.ring.mail[at][1:]
			}
		})
	}
	return x, ok
}
