package gpu

import (
	"context"
	"errors"
	"fmt"
	"math"
	"path"
	"slices"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/group"
	"github.com/euryale-ml/euryale/internal/shm"
)

// How a rank leaves a group. Kernels of the others write into its memory, and one of them
// may still be behind other work on its queue when this rank closes. So the memory is kept
// until every rank whose kernels reach it has left, too, or its process is dead: nobody
// else is to get it before. Close waits for that only so long; the rest goes on behind it.

// stage is how far a rank has left.
type stage uint32

const (
	hasLeft  stage = 1 + iota // its kernels are done with the memory of the others
	hasFreed                  // it has given back its own
)

// stages are those of a group's ranks, in host memory that they share: on the devices the
// news might queue behind work of any length.
type stages struct {
	rank   int
	share  *shm.Share
	deaths []int // by rank: see death
}

// stageBytes keeps ranks from writing to the same line of a cache.
const stageBytes = 64

// newStages makes the stages of a group. order is held.
func (c *Communicator) newStages() (*stages, error) {
	share, err := group.Sharing{Gather: c.gather, Rank: c.rank, Members: c.members, Dir: c.dir}.HandOver(0, stageBytes*c.size)
	if err != nil {
		return nil, err
	}
	s := &stages{rank: c.rank, share: share}
	for _, r := range c.plan.ranks {
		s.deaths = append(s.deaths, death(r.Process))
	}
	return s, nil
}

// In place of descriptors of processes.
const (
	living = -1 - iota // as far as anybody can tell
	gone
)

// death returns a descriptor that can be read once a process is dead, gone if it is already,
// living for this process. Where the system gives none (before Linux 5.3), and in another pid
// namespace, the process passes for alive.
func death(of string) int {
	self := process()
	var pid int
	namespace, number := path.Split(of)
	here, _ := path.Split(self)
	if _, err := fmt.Sscan(number, &pid); err != nil || of == self || namespace != here {
		return living
	}
	fd, err := unix.PidfdOpen(pid, 0)
	switch {
	case errors.Is(err, unix.ESRCH):
		return gone
	case err != nil:
		return living
	}
	return fd
}

func (s *stages) of(p int) *atomic.Uint32 {
	return (*atomic.Uint32)(unsafe.Pointer(&s.share.Mem[stageBytes*p]))
}

// say tells the others how far this rank has left.
func (s *stages) say(at stage) {
	if s != nil {
		s.of(s.rank).Store(uint32(at))
	}
}

// await returns once those ranks that reach this one have come to a stage.
func (s *stages) await(at stage, reaches func(p int) bool) {
	if s == nil {
		return
	}
	for p := range s.deaths {
		for pause := 50 * time.Microsecond; reaches(p) && !s.has(p, at); pause = min(2*pause, longestPause) {
			time.Sleep(pause)
		}
	}
}

// longestPause is between two looks, which may go on as long as the other rank does.
const longestPause = 10 * time.Millisecond

// has reports whether a rank has come to a stage, or is dead.
func (s *stages) has(p int, at stage) bool {
	return stage(s.of(p).Load()) >= at || dead(s.deaths[p])
}

func dead(fd int) bool {
	if fd < 0 {
		return fd == gone
	}
	look := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
	n, err := unix.Poll(look, 0)
	return err == nil && n > 0
}

func (s *stages) close() error {
	if s == nil {
		return nil
	}
	for _, fd := range s.deaths {
		if fd >= 0 {
			unix.Close(fd)
		}
	}
	return s.share.Unmap()
}

// leave ends the part of this rank, whose last kernel is on a queue, if there was one. It
// returns when all ranks have given back their memory. If nobody can tell that the kernels
// have ended, everything stays as it is, here and elsewhere.
func (m *peerMemory) leave(last backend.Queue) error {
	m.held.Store(int64(m.bytes()))
	if err := settle(last, forever); err != nil {
		return fmt.Errorf("the memory of the kernels stays in use: %w", err)
	}
	errs := []error{m.closeImports()}
	m.stages.say(hasLeft)
	m.stages.await(hasLeft, m.reaches)
	errs = append(errs, m.freeAll())
	m.held.Store(0)
	m.stages.say(hasFreed)
	m.stages.await(hasFreed, m.reaches)
	return errors.Join(append(errs, m.stages.close())...)
}

// settle waits for the kernels on a queue, if there is one. They have been told to stop, but
// what is before them may take its time.
func settle(q backend.Queue, limit time.Duration) error {
	if q == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	err := drain(ctx, q)
	if errors.Is(err, backend.ErrArgument) || errors.Is(err, backend.ErrClosed) { // the queue is, and has waited
		return nil
	}
	return err
}

const forever = time.Duration(math.MaxInt64)

// bytes is how much memory of the device is not given back.
func (m *peerMemory) bytes() int {
	n := 0
	for _, b := range m.owned() {
		n += b.Len()
	}
	return n
}

// owned is the memory of the device that is to be given back.
func (m *peerMemory) owned() []backend.Buffer {
	var all []backend.Buffer
	for _, w := range m.shared() {
		all = append(all, w.own)
	}
	return slices.DeleteFunc(append(all, m.private...), func(b backend.Buffer) bool { return b.Len() == 0 })
}

// shared is what other ranks reach.
func (m *peerMemory) shared() []*window {
	all := append([]*window{m.pad}, m.windows...)
	return slices.DeleteFunc(all, func(w *window) bool { return w == nil })
}

// closeImports gives back what others have shown.
func (m *peerMemory) closeImports() error {
	var errs []error
	for _, w := range m.shared() {
		errs = append(errs, m.closeImportsOf(w))
	}
	return errors.Join(errs...)
}

func (m *peerMemory) closeImportsOf(w *window) error {
	var errs []error
	for _, b := range w.imported {
		errs = append(errs, m.dev.CloseImport(b))
	}
	w.imported = nil
	return errors.Join(errs...)
}

// freeAll gives back all memory of this rank. Nothing may use it any more, here or elsewhere.
// The driver may take its time over the host's, while a kernel of another group waits.
func (m *peerMemory) freeAll() error {
	m.giving.Lock()
	var errs []error
	for _, b := range m.owned() {
		errs = append(errs, m.free(b))
	}
	m.pad, m.windows, m.private = nil, nil, nil
	m.giving.Unlock()
	if m.dev == nil {
		return errors.Join(errs...)
	}
	if words := m.c.status.take(); words.Len() > 0 {
		errs = append(errs, m.dev.FreeHost(words))
	}
	return errors.Join(append(errs, m.dev.Release())...)
}

// keep takes what is not given back yet from the device, which may be closed before that
// is: it is this memory's alone then.
func (m *peerMemory) keep() error {
	m.giving.Lock()
	defer m.giving.Unlock()
	if m.dev == nil {
		return nil
	}
	var errs []error
	for _, b := range m.owned() {
		errs = append(errs, m.dev.Disown(b))
	}
	return errors.Join(errs...)
}

// teardowns are the ends of a rank's groups, a group and its parts, which go on in the
// background and may take longer than Close.
type teardowns struct {
	mu    sync.Mutex
	under []*teardown // errors of which nobody has heard
}

type teardown struct {
	engine <-chan struct{} // closed when NCCL is done with, nil if that is not waited for
	done   chan struct{}
	err    error // once done is closed
}

// begin runs f, which is part of an end, in the background.
func (t *teardowns) begin(engine <-chan struct{}, f func() error) *teardown {
	one := &teardown{engine: engine, done: make(chan struct{})}
	t.mu.Lock()
	t.under = append(t.under, one)
	t.mu.Unlock()
	go func() {
		defer close(one.done)
		one.err = f()
	}()
	return one
}

// engines waits until NCCL is done with.
func (t *teardowns) engines() {
	for _, one := range t.all() {
		if one.engine != nil {
			<-one.engine
		}
	}
}

// wait waits for some teardowns, up to a time, and returns what went wrong in all that have
// come to their end.
func (t *teardowns) wait(limit time.Duration, some ...*teardown) error {
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	for _, one := range some {
		select {
		case <-one.done:
		case <-ctx.Done():
		}
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	var errs []error
	t.under = slices.DeleteFunc(t.under, func(one *teardown) bool {
		select {
		case <-one.done:
			errs = append(errs, one.err)
			return true
		default:
			return false
		}
	})
	return errors.Join(errs...)
}

// all are the teardowns that nobody has heard of.
func (t *teardowns) all() []*teardown {
	t.mu.Lock()
	defer t.mu.Unlock()
	return slices.Clone(t.under)
}
