package cuda

import (
	"errors"
	"fmt"
	"math/bits"
	"slices"
	"sort"
	"sync"
	"sync/atomic"

	"github.com/euryale-ml/euryale/backend"
)

// ErrOutOfMemory: a device has no room. The error that wraps it says how many bytes are in use,
// cached and free.
var ErrOutOfMemory = errors.New("out of device memory")

// MemoryStats describe the memory that a device's allocator holds, in bytes.
// Sizes are rounded up as they are allocated.
type MemoryStats struct {
	InUse   int // given out
	Cached  int // freed, and kept to be given out again
	Peak    int // the most that was ever in use
	Mallocs int // calls of the driver's allocation; constant in the steady state
}

// source is where a cache gets memory.
type source interface {
	malloc(nbytes int) (addr uintptr, err error)
	free(addr uintptr) error
}

// line is a queue, as a cache sees it.
type line interface {
	// point is the place after everything started so far.
	point() (point, error)
	// after orders everything started later after p.
	after(p point) error
}

// point is a place in a line.
type point interface {
	over() (bool, error)
}

// cache allocates device memory and keeps freed memory, since calls of the driver
// synchronize the device. Work that was started before memory is freed may still use it:
// a span records the points after which it is free, and is given at once to a line if
// all of them are in that line.
//
// The cache knows the address of all memory that it holds.
type cache struct {
	source source

	mu    sync.Mutex
	spans []*span         // all, by address
	idle  map[int][]*span // by size, those that were freed last at the end
	stats MemoryStats

	// recent are those that owns was asked for lately: it finds them without mu, by bits of the
	// address. They are written while mu is held.
	recent [8]atomic.Pointer[span]
}

// span is one allocation of the driver.
type span struct {
	addr     uintptr
	nbytes   int
	used     bool
	disowned bool   // neither counted nor freed by close: freeDisowned does that
	users    []user // of the last life
}

// user is a line that may use a span up to a point.
type user struct {
	line line
	to   point
}

func newCache(s source) *cache { return &cache{source: s, idle: map[int][]*span{}} }

// leastSize is the size of the smallest span.
const leastSize = 512

// sizeOf rounds a size up to one that is used again: to a power of two up to
// 1 MiB, and by at most an eighth, in pages of the device, from there on.
func sizeOf(nbytes int) int {
	const pages, page = 1 << 20, 2 << 20
	if nbytes <= pages {
		return max(leastSize, 1<<bits.Len(uint(max(nbytes, 1)-1)))
	}
	step := max(page, 1<<(bits.Len(uint(nbytes-1))-4))
	return (nbytes + step - 1) / step * step
}

// takeMemory returns memory that l may use from now on. It is not zeroed.
func (c *cache) takeMemory(l line, nbytes int) (uintptr, error) {
	size := sizeOf(nbytes)
	c.mu.Lock()
	defer c.mu.Unlock()
	s, err := c.reuse(l, size)
	if err == nil && s == nil {
		s, err = c.grow(size)
	}
	if err != nil {
		return 0, err
	}
	s.used, s.users = true, s.users[:0]
	c.stats.InUse += size
	c.stats.Peak = max(c.stats.Peak, c.stats.InUse)
	return s.addr, nil
}

// reuse returns an idle span, nil if there is none: one that is free for l
// already if possible, else l waits for it, which costs the host nothing.
func (c *cache) reuse(l line, size int) (*span, error) {
	list := c.idle[size]
	if len(list) == 0 {
		return nil, nil
	}
	best := len(list) - 1
	for i, s := range slices.Backward(list) {
		free, err := s.free(l)
		if err != nil {
			return nil, err
		}
		if free {
			best = i
			break
		}
	}
	s := list[best]
	for _, u := range s.users {
		if u.line == l {
			continue
		}
		if err := l.after(u.to); err != nil {
			return nil, err
		}
	}
	c.idle[size] = slices.Delete(list, best, best+1)
	c.stats.Cached -= size
	return s, nil
}

// free reports whether l may use s without waiting for another line (nil:
// whether anybody may).
func (s *span) free(l line) (bool, error) {
	for _, u := range s.users {
		if l != nil && u.line == l {
			continue
		}
		if over, err := u.to.over(); err != nil || !over {
			return false, err
		}
	}
	return true, nil
}

// grow allocates from the driver. If there is no room it frees idle spans first.
func (c *cache) grow(size int) (*span, error) {
	addr, err := c.malloc(size)
	if errors.Is(err, ErrOutOfMemory) && c.stats.Cached > 0 {
		if err := c.releaseIdle(); err != nil {
			return nil, err
		}
		addr, err = c.malloc(size)
	}
	if err != nil {
		return nil, fmt.Errorf("no room for %d bytes beside %d in use and %d cached: %w", size,
			c.stats.InUse, c.stats.Cached, err)
	}
	s := &span{addr: addr, nbytes: size}
	c.spans = slices.Insert(c.spans, c.search(addr)+1, s)
	return s, nil
}

func (c *cache) malloc(size int) (uintptr, error) {
	addr, err := c.source.malloc(size)
	if err == nil {
		c.stats.Mallocs++
	}
	return addr, err
}

// give takes memory back. Each of the lines may use it for what was started on
// it so far.
func (c *cache) give(addr uintptr, lines ...line) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	i, err := c.inUse("free", addr)
	if err != nil {
		return err
	}
	s := c.spans[i]
	for _, l := range lines {
		p, err := l.point()
		if errors.Is(err, backend.ErrClosed) {
			continue // by another goroutine: its work is done
		}
		if err != nil {
			return err // the memory stays in use: nobody knows for how long
		}
		s.users = append(s.users, user{l, p})
	}
	s.used = false
	c.stats.InUse -= s.nbytes
	c.stats.Cached += s.nbytes
	c.idle[s.nbytes] = append(c.idle[s.nbytes], s)
	return nil
}

// disown keeps memory that is in use out of the books and out of close.
func (c *cache) disown(addr uintptr) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	i, err := c.inUse("disown", addr)
	if err == nil {
		c.spans[i].disowned = true
		c.stats.InUse -= c.spans[i].nbytes
	}
	return err
}

// freeDisowned returns disowned memory to the source; ok is false for other memory. mu is
// not held meanwhile: the driver waits for kernels, which may wait for calls of this rank.
func (c *cache) freeDisowned(addr uintptr) (ok bool, err error) {
	c.mu.Lock()
	i := c.search(addr)
	ok = i >= 0 && c.spans[i].addr == addr && c.spans[i].disowned
	if ok {
		c.removeSpan(i)
	}
	c.mu.Unlock()
	if !ok {
		return false, nil
	}
	return true, c.source.free(addr)
}

// inUse returns the index of the span that begins at addr and is in use. mu is held.
func (c *cache) inUse(doing string, addr uintptr) (int, error) {
	i := c.search(addr)
	if i < 0 || c.spans[i].addr != addr || !c.spans[i].used || c.spans[i].disowned {
		return -1, fmt.Errorf("%w: %s of %#x, which was not allocated here or was freed before",
			backend.ErrArgument, doing, addr)
	}
	return i, nil
}

// release returns to the driver the spans that are idle and not in use by work.
func (c *cache) release() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.releaseIdle()
}

func (c *cache) releaseIdle() error {
	var errs []error
	for size, list := range c.idle {
		c.idle[size] = slices.DeleteFunc(list, func(s *span) bool {
			free, err := s.free(nil)
			if err == nil && free {
				err = c.drop(s)
			}
			errs = append(errs, err)
			return err == nil && free
		})
	}
	return errors.Join(errs...)
}

// drop returns an idle span to the driver.
func (c *cache) drop(s *span) error {
	if err := c.source.free(s.addr); err != nil {
		return err
	}
	c.removeSpan(c.search(s.addr))
	c.stats.Cached -= s.nbytes
	return nil
}

// removeSpan removes a span from the cache. mu is held.
func (c *cache) removeSpan(i int) {
	c.spans = slices.Delete(c.spans, i, i+1)
	c.forgetRecent()
}

func (c *cache) forgetRecent() {
	for i := range c.recent {
		c.recent[i].Store(nil)
	}
}

// close returns everything to the driver, and reports memory that was in use. No work may use it
// any more.
func (c *cache) close() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	var errs []error
	used := 0
	var disowned []*span
	for _, s := range c.spans {
		switch {
		case s.disowned:
			disowned = append(disowned, s)
			continue
		case s.used:
			used++
		}
		errs = append(errs, c.source.free(s.addr))
	}
	if used > 0 {
		errs = append(errs, fmt.Errorf("%d allocations of %d bytes together were not freed: "+
			"close what has them first, such as machines", used, c.stats.InUse))
	}
	c.spans, c.idle, c.stats.InUse, c.stats.Cached = disowned, nil, 0, 0
	c.forgetRecent()
	return errors.Join(errs...)
}

// snapshot returns the statistics.
func (c *cache) snapshot() MemoryStats {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.stats
}

// owns reports whether an address is in memory that the cache holds. Every collective calls it
// for its buffers.
func (c *cache) owns(addr uintptr) bool {
	const large = 2 << 20 // which the addresses of large ones are multiples of
	recent := &c.recent[(addr/leastSize^addr/large)%uintptr(len(c.recent))]
	if s := recent.Load(); s != nil && s.has(addr) {
		return true
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	s := c.around(addr)
	if s != nil {
		recent.Store(s)
	}
	return s != nil
}

// around returns the span that an address is in, nil if there is none. mu is held.
func (c *cache) around(addr uintptr) *span {
	if i := c.search(addr); i >= 0 && c.spans[i].has(addr) {
		return c.spans[i]
	}
	return nil
}

// has reports whether an address is in the span.
func (s *span) has(addr uintptr) bool { return addr-s.addr < uintptr(s.nbytes) }

// search returns the index of the last span that starts at addr or before, -1
// if there is none.
func (c *cache) search(addr uintptr) int {
	return sort.Search(len(c.spans), func(i int) bool { return c.spans[i].addr > addr }) - 1
}
