package cuda

import (
	"errors"
	"strings"
	"testing"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/testing/require"
)

// tight is a source with little memory.
type tight struct {
	left, next int
	sizes      map[uintptr]int
}

func (r *tight) malloc(nbytes int) (uintptr, error) {
	if nbytes > r.left {
		return 0, ErrOutOfMemory
	}
	r.left -= nbytes
	r.next += 1 << 30
	r.sizes[uintptr(r.next)] = nbytes
	return uintptr(r.next), nil
}

func (r *tight) free(addr uintptr) error {
	r.left += r.sizes[addr]
	delete(r.sizes, addr)
	return nil
}

// steps is a line whose work is done up to `done`.
type steps struct {
	now, done int
	waits     []step
	err       error
}

type step struct {
	line *steps
	at   int
}

func (s *steps) point() (point, error) { s.now++; return step{s, s.now}, s.err }
func (s *steps) after(p point) error   { s.waits = append(s.waits, p.(step)); return nil }
func (s step) over() (bool, error)     { return s.line.done >= s.at, nil }

func newTight(nbytes int) (*cache, *tight) {
	r := &tight{left: nbytes, sizes: map[uintptr]int{}}
	return newCache(r), r
}

func TestSizesAreOfAFewKinds(t *testing.T) {
	for nbytes, want := range map[int]int{
		0: 512, 1: 512, 512: 512, 513: 1024, 1 << 20: 1 << 20, 1<<20 + 1: 2 << 20, 3 << 20: 4 << 20,
		16<<20 + 1: 18 << 20, 1 << 30: 1 << 30, 1<<30 + 1: 1<<30 + 128<<20,
	} {
		got := sizeOf(nbytes)
		require.Check(t, got == want, "%d bytes become %d, want %d", nbytes, got, want)
	}
	for nbytes := 1; nbytes < 1<<40; nbytes += nbytes/3 + 1 {
		if size := sizeOf(nbytes); size < nbytes || nbytes > 16<<20 && size > nbytes+nbytes/8 {
			t.Errorf("%d bytes become %d", nbytes, size)
		}
	}
}

func TestFreedMemoryIsUsedAgainInTheOrderOfAQueue(t *testing.T) {
	c, _ := newTight(1 << 20)
	q, other := &steps{}, &steps{}
	a := must[uintptr](t)(c.takeMemory(q, 1000))
	ok(t, c.give(a, q))
	b := must[uintptr](t)(c.takeMemory(q, 900))
	require.Check(t, b == a && len(q.waits) == 0, "%#x then %#x, waiting for %v", a, b, q.waits)
	ok(t, c.give(a, q))
	if b := must[uintptr](t)(c.takeMemory(other, 900)); b != a || len(other.waits) != 1 ||
		other.waits[0] != (step{q, 2}) {
		t.Errorf("another queue got %#x and waits for %v", b, other.waits)
	}
	ok(t, c.give(a, q, other))
	q.done, other.done, other.waits = q.now, other.now, nil
	if b := must[uintptr](t)(c.takeMemory(&steps{}, 900)); b != a {
		t.Errorf("%#x then %#x", a, b)
	}
	s := c.snapshot()
	require.Check(t, s == (MemoryStats{InUse: 1024, Peak: 1024, Mallocs: 1}), "%+v", s)
}

func TestMemoryThatNobodyUsesIsPreferred(t *testing.T) {
	c, _ := newTight(1 << 20)
	q, busy := &steps{}, &steps{}
	a, b := must[uintptr](t)(c.takeMemory(q, 100)), must[uintptr](t)(c.takeMemory(q, 100))
	ok(t, c.give(a, q))
	ok(t, c.give(b, busy))
	got := must[uintptr](t)(c.takeMemory(q, 100))
	require.Check(t, got == a && len(q.waits) == 0, "%#x, waiting for %v", got, q.waits)
}

func TestCachedMemoryMakesRoom(t *testing.T) {
	c, r := newTight(4 << 20)
	q := &steps{}
	small := must[uintptr](t)(c.takeMemory(q, 2<<20))
	kept := must[uintptr](t)(c.takeMemory(q, 512))
	ok(t, c.give(small, q))
	if _, err := c.takeMemory(q, 4<<20-512); !errors.Is(err, ErrOutOfMemory) ||
		!strings.Contains(err.Error(), "512 in use and 2097152 cached") {
		t.Errorf("memory that is still used was given away: %v", err)
	}
	q.done = q.now
	if _, err := c.takeMemory(q, 3<<20); !errors.Is(err, ErrOutOfMemory) ||
		!strings.Contains(err.Error(), "512 in use and 0 cached") {
		t.Errorf("%v", err)
	}
	ok(t, c.give(kept, q))
	q.done = q.now
	must[uintptr](t)(c.takeMemory(q, 3<<20))
	s := c.snapshot()
	require.Check(t, s.InUse == 4<<20 && s.Cached == 0 && r.left == 0, "%+v, %d left", s, r.left)
}

func TestOnlyWhatWasAllocatedIsFreed(t *testing.T) {
	c, r := newTight(1 << 20)
	q := &steps{}
	a := must[uintptr](t)(c.takeMemory(q, 100))
	for name, addr := range map[string]uintptr{"unknown": 77, "a part": a + 16} {
		err := c.give(addr, q)
		require.Check(t, errors.Is(err, backend.ErrArgument), "%s: %v", name, err)
	}
	broken := &steps{err: errors.New("broken")}
	if err := c.give(a, broken); !errors.Is(err, broken.err) {
		t.Error(err)
	}
	ok(t, c.give(a, q, &steps{err: backend.ErrClosed}))
	err := c.give(a, q)
	require.Check(t, errors.Is(err, backend.ErrArgument), "twice: %v", err)
	require.Check(t, c.owns(a) && c.owns(a+511) && !c.owns(a+512) && !c.owns(a-1),
		"the registry is wrong")
	must[uintptr](t)(c.takeMemory(q, 1<<16))
	if err := c.close(); err == nil ||
		!strings.Contains(err.Error(), "1 allocations of 65536 bytes") || len(r.sizes) != 0 {
		t.Errorf("close: %v, %v left", err, r.sizes)
	}
}

func TestReleaseKeepsWhatIsInUse(t *testing.T) {
	c, r := newTight(1 << 20)
	q := &steps{}
	a, b := must[uintptr](t)(c.takeMemory(q, 512)), must[uintptr](t)(c.takeMemory(q, 512))
	ok(t, c.give(a, q))
	q.done = q.now
	ok(t, c.give(b, q))
	if !c.owns(a) || !c.owns(a+511) { // which it finds sooner the next time
		t.Error("what is idle is not its own")
	}
	ok(t, c.release())
	s := c.snapshot()
	require.Check(t, s.Cached == 512 && len(r.sizes) == 1 && !c.owns(a) && c.owns(b), "%+v", s)
}

func TestDisownedMemoryOutlivesTheCache(t *testing.T) {
	c, source := newTight(1 << 20)
	q := &steps{}
	a, b := must[uintptr](t)(c.takeMemory(q, 1000)), must[uintptr](t)(c.takeMemory(q, 1000))
	ok(t, c.disown(a))
	for what, err := range map[string]error{
		"disown again": c.disown(a), "give": c.give(a, q), "disown the middle": c.disown(b + 8),
		"disown what is nobody's": c.disown(8),
	} {
		require.Check(t, errors.Is(err, backend.ErrArgument), "%s: %v", what, err)
	}
	s := c.snapshot()
	require.Check(t, s.InUse == 1024 && c.owns(a) && c.owns(b), "%+v", s)
	freed, err := c.freeDisowned(b)
	require.Check(t, !freed && err == nil, "memory that is not disowned: %v, %v", freed, err)
	ok(t, c.give(b, q))
	if err := c.disown(b); !errors.Is(err, backend.ErrArgument) {
		t.Errorf("disown freed memory: %v", err)
	}
	ok(t, c.close())
	require.Check(t, len(source.sizes) == 1 && source.sizes[a] == 1024,
		"after close the source has given out %v", source.sizes)
	for _, want := range []bool{true, false} {
		freed, err := c.freeDisowned(a)
		require.Check(t, freed == want && err == nil, "after close: %v, %v", freed, err)
	}
	require.Check(t, len(source.sizes) == 0 && !c.owns(a), "in the end the source has given out %v",
		source.sizes)
}
