package lowlatency

import (
	"context"
	"errors"
	"fmt"
	"math"
	"os"
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
	left  stage = 1 + iota // its kernels are done with the memory of the others
	freed                  // it has given back its own
)

// farewells are the stages of a group's ranks, in host memory that they share: on the
// devices the news might queue behind work of any length.
type farewells struct {
	rank   int
	share  *shm.Share
	deaths []int // by rank: see death
}

// stageBytes keeps ranks from writing to the same line of a cache.
const stageBytes = 64

// newFarewells makes the farewells of a group. processes are the ranks', see process.
func newFarewells(inner backend.Communicator, processes []string) (*farewells, error) {
	var lost error
	gather := func(note []byte) ([][]byte, error) {
		notes, err := gather(inner, note)
		lost = errors.Join(lost, err)
		return notes, err
	}
	s, err := group.Sharing{Gather: gather, Rank: inner.Rank(), Members: inner.Capabilities().Members, Dir: sharedDir()}.HandOver(0, stageBytes*inner.Size())
	switch {
	case lost != nil:
		return nil, lost
	case err != nil:
		return nil, refusal(err.Error())
	}
	f := &farewells{rank: inner.Rank(), share: s}
	for _, p := range processes {
		f.deaths = append(f.deaths, death(p))
	}
	return f, nil
}

// sharedDir is a tmpfs, the one that package gpu uses.
func sharedDir() string {
	if dir := os.Getenv("EURYALE_SHM_DIR"); dir != "" {
		return dir
	}
	return "/dev/shm"
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

func (f *farewells) of(p int) *atomic.Uint32 {
	return (*atomic.Uint32)(unsafe.Pointer(&f.share.Mem[stageBytes*p]))
}

// say tells the others how far this rank has left.
func (f *farewells) say(s stage) {
	if f != nil {
		f.of(f.rank).Store(uint32(s))
	}
}

// await returns once those ranks that reach this one have come to a stage.
func (f *farewells) await(s stage, reaches func(p int) bool) {
	if f == nil {
		return
	}
	for p := range f.deaths {
		for pause := 50 * time.Microsecond; reaches(p) && !f.has(p, s); pause = min(2*pause, longestPause) {
			time.Sleep(pause)
		}
	}
}

// longestPause is between two looks, which may go on as long as the other rank does.
const longestPause = 10 * time.Millisecond

// has reports whether a rank has come to a stage, or is dead.
func (f *farewells) has(p int, s stage) bool {
	return stage(f.of(p).Load()) >= s || dead(f.deaths[p])
}

func dead(fd int) bool {
	if fd < 0 {
		return fd == gone
	}
	look := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
	n, err := unix.Poll(look, 0)
	return err == nil && n > 0
}

func (f *farewells) close() error {
	if f == nil {
		return nil
	}
	for _, fd := range f.deaths {
		if fd >= 0 {
			unix.Close(fd)
		}
	}
	return f.share.Unmap()
}

// leave ends the part of this rank, whose last kernel is on a queue, if there was one. It
// returns when all ranks have given back their memory. If nobody can tell that the kernels
// have ended, everything stays as it is, here and elsewhere.
func (f *fabric) leave(last backend.Queue) error {
	f.held.Store(int64(f.bytes()))
	if err := settle(last, forever); err != nil {
		return fmt.Errorf("the memory of the kernels stays in use: %w", err)
	}
	errs := []error{f.closeImports()}
	f.farewells.say(left)
	f.farewells.await(left, f.reaches)
	errs = append(errs, f.free())
	f.held.Store(0)
	f.farewells.say(freed)
	f.farewells.await(freed, f.reaches)
	return errors.Join(append(errs, f.farewells.close())...)
}

// settle waits for the kernels on a queue, if there is one. They have been told to stop, but
// what is before them may take its time.
func settle(q backend.Queue, patience time.Duration) error {
	if q == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	err := drain(ctx, q)
	if errors.Is(err, backend.ErrArgument) || errors.Is(err, backend.ErrClosed) { // the queue is, and has waited
		return nil
	}
	return err
}

const forever = time.Duration(math.MaxInt64)

// bytes is how much memory of the device the fabric has.
func (f *fabric) bytes() int {
	n := 0
	for _, b := range f.owned() {
		n += b.Len()
	}
	return n
}

// owned is the memory of the device that is to be given back.
func (f *fabric) owned() []backend.Buffer {
	var all []backend.Buffer
	for _, w := range f.shared() {
		all = append(all, w.own)
	}
	return slices.DeleteFunc(append(all, f.private...), func(b backend.Buffer) bool { return b.Len() == 0 })
}

// shared is what other ranks reach.
func (f *fabric) shared() []*window {
	all := append([]*window{f.pad}, f.windows...)
	return slices.DeleteFunc(all, func(w *window) bool { return w == nil })
}

// closeImports gives back what others have shown.
func (f *fabric) closeImports() error {
	var errs []error
	for _, w := range f.shared() {
		errs = append(errs, f.closeImportsOf(w))
	}
	return errors.Join(errs...)
}

func (f *fabric) closeImportsOf(w *window) error {
	var errs []error
	for _, b := range w.imported {
		errs = append(errs, f.dev.CloseImport(b))
	}
	w.imported = nil
	return errors.Join(errs...)
}

// free gives back all memory of this rank. Nothing may use it any more, here or elsewhere.
// The driver may take its time over the host's, while a kernel of another group waits.
func (f *fabric) free() error {
	f.giving.Lock()
	var errs []error
	for _, b := range f.owned() {
		errs = append(errs, f.dev.Free(b))
	}
	f.pad, f.windows, f.private = nil, nil, nil
	f.giving.Unlock()
	if status := f.forget(); status.Len() > 0 {
		errs = append(errs, f.dev.FreeHost(status))
	}
	return errors.Join(append(errs, f.dev.Close())...)
}

// forget returns the status, which nobody uses afterwards.
func (f *fabric) forget() backend.Buffer {
	f.alive.Lock()
	defer f.alive.Unlock()
	status := f.status
	f.status = backend.Buffer{}
	return status
}

// keep takes what is not given back yet from the device, which may be closed before that
// is: it is this fabric's alone then.
func (f *fabric) keep() error {
	f.giving.Lock()
	defer f.giving.Unlock()
	var errs []error
	for _, b := range f.owned() {
		errs = append(errs, f.dev.Disown(b))
	}
	return errors.Join(errs...)
}

// endings are what goes on after Close, of a group and its parts.
type endings struct {
	mu    sync.Mutex
	under []*ending // errors of which nobody has heard
}

type ending struct {
	done chan struct{}
	err  error // once done is closed
}

// begin runs f in the background.
func (e *endings) begin(f func() error) *ending {
	one := &ending{done: make(chan struct{})}
	e.mu.Lock()
	e.under = append(e.under, one)
	e.mu.Unlock()
	go func() {
		defer close(one.done)
		one.err = f()
	}()
	return one
}

// wait waits for some endings, up to a time, and returns what went wrong in all that have
// come.
func (e *endings) wait(patience time.Duration, some ...*ending) error {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	for _, one := range some {
		select {
		case <-one.done:
		case <-ctx.Done():
		}
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	var errs []error
	e.under = slices.DeleteFunc(e.under, func(one *ending) bool {
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

// all are the endings that nobody has heard of.
func (e *endings) all() []*ending {
	e.mu.Lock()
	defer e.mu.Unlock()
	return slices.Clone(e.under)
}
