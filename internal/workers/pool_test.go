package workers

import (
	"errors"
	"fmt"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"github.com/euryale-ml/euryale/internal/testing/require"
)

// marks counts how often each part has run. Workers count theirs without a lock.
type marks struct {
	parts   []int32
	workers [][8]int64
}

func newMarks(parts, workers int) *marks {
	return &marks{make([]int32, parts), make([][8]int64, workers)}
}

func (m *marks) Run(part, worker int) {
	m.parts[part]++
	m.workers[worker][0]++
}

// check fails unless each part has run so often.
func (m *marks) check(t *testing.T, times int32) {
	t.Helper()
	var sum int64
	for _, w := range m.workers {
		sum += w[0]
	}
	if slices.ContainsFunc(m.parts, func(n int32) bool { return n != times }) ||
		sum != int64(times)*int64(len(m.parts)) {
		t.Fatalf("%d parts ran %v times, %d in all, want each %d times", len(m.parts), m.parts, sum,
			times)
	}
}

func TestEachPartRunsOnce(t *testing.T) {
	for _, size := range []int{0, 1, 2, 3, 8} {
		p := New(size)
		for _, parts := range []int{0, 1, 2, 7, 100} {
			m := newMarks(parts, p.Size())
			for range 200 {
				p.Do(parts, m)
			}
			m.check(t, 200)
		}
		p.Close()
	}
	m := newMarks(5, 1)
	(*Pool)(nil).Do(5, m)
	m.check(t, 1)
}

// Workers that sleep wake up: with a part that waits for the others, nobody else could run them.
func TestSleepersWake(t *testing.T) {
	const size = 3
	p := New(size)
	defer p.Close()
	for range 5 {
		for deadline := time.Now().Add(10 * time.Second); p.sleeping.Load() < size-1; time.Sleep(
			time.Millisecond) {
			require.That(t, !time.Now().After(deadline), "idle workers do not sleep")
		}
		var together sync.WaitGroup
		together.Add(size)
		p.Do(size, task(func(int, int) { together.Done(); together.Wait() }))
	}
}

// task makes a Task of a function.
type task func(part, worker int)

func (f task) Run(part, worker int) { f(part, worker) }

func TestAPanicReachesTheCaller(t *testing.T) {
	p := New(4)
	defer p.Close()
	wrong := errors.New("wrong")
	for part := range 8 {
		err := panicOf(func() {
			p.Do(8, task(func(at, _ int) {
				if at == part {
					panic(wrong)
				}
			}))
		})
		if failed, ok := err.(*Panic); !ok || !errors.Is(failed, wrong) ||
			!strings.Contains(failed.Error(), "TestAPanicReachesTheCaller") {
			t.Fatalf("part %d panics with %v, Do with %v", part, wrong, err)
		}
	}
	m := newMarks(100, 4)
	p.Do(100, m)
	m.check(t, 1)
}

// panicOf returns what f panics with.
func panicOf(f func()) (value any) {
	defer func() { value = recover() }()
	f()
	return nil
}

func TestADoInATaskPanics(t *testing.T) {
	p := New(2)
	defer p.Close()
	err := panicOf(func() { p.Do(2, task(func(int, int) { p.Do(1, task(func(int, int) {})) })) })
	if text := fmt.Sprint(err); !strings.Contains(text, "Do in a task of the same pool") {
		t.Errorf("it panics with %v", err)
	}
}

// counting adds its numbers to a sum, a part each.
type counting struct {
	numbers []int64
	sum     *atomic.Int64
}

func (c *counting) Run(part, _ int) { c.sum.Add(c.numbers[part]) }

func TestATaskMayBeAValue(t *testing.T) {
	for _, p := range []*Pool{nil, New(1), New(3)} {
		var sum atomic.Int64
		for range 3 {
			Run(p, 4, counting{[]int64{1, 2, 3, 4}, &sum})
		}
		require.Equal(t, fmt.Sprintf("with %d workers the sum", p.Size()), sum.Load(), 30)
		if p != nil {
			for _, kept := range p.kept {
				require.Check(t, kept.(*counting).numbers == nil,
					"the pool still refers to the numbers")
			}
		}
		p.Close()
	}
}

func TestNothingIsAllocated(t *testing.T) {
	for size := 1; size <= 3; size++ {
		p := New(size)
		m, value := newMarks(10, size), counting{make([]int64, 10), new(atomic.Int64)}
		if n := testing.AllocsPerRun(100, func() { p.Do(10, m); Run(p, 10, value) }); n != 0 {
			t.Errorf("%v allocations of %d workers", n, size)
		}
		p.Close()
	}
}

// scribble fills the scratch of its worker, and what all share at its part.
type scribble struct {
	pool   *Pool
	shared []float64
	wrong  *atomic.Int64
}

func (s *scribble) Run(part, worker int) {
	mine := Scratch[float32](s.pool, worker, 100+part)
	if uintptr(unsafe.Pointer(&mine[0]))%64 != 0 {
		s.wrong.Add(1)
	}
	for i := range mine {
		mine[i] = float32(part)
	}
	runtime.Gosched()
	for _, x := range mine {
		s.shared[part] += float64(x)
	}
}

func TestScratchBelongsToAWorker(t *testing.T) {
	const parts = 20
	for _, p := range []*Pool{nil, New(1), New(3)} {
		var wrong atomic.Int64
		round := func() {
			shared := Scratch[float64](p, Shared, parts)
			clear(shared)
			Run(p, parts, scribble{p, shared, &wrong})
			for part, sum := range shared {
				if sum != float64(part*(100+part)) {
					t.Fatalf("with %d workers part %d has %v in its scratch", p.Size(), part, sum)
				}
			}
		}
		round()
		n := testing.AllocsPerRun(5, round)
		require.Check(t, p.Size() != 1 || p == nil || n == 0, "%v allocations", n)
		if wrong.Load() > 0 {
			t.Errorf("scratch of %d parts is not aligned", wrong.Load())
		}
		p.Close()
	}
}

func TestShareDividesTheCores(t *testing.T) {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(6))
	for ranks, want := range map[int]int{0: 6, 1: 6, 2: 3, 4: 1, 6: 1, 7: 1} {
		if got := Share(ranks); got != want {
			t.Errorf("%d workers for each of %d ranks on 6 cores, want %d", got, ranks, want)
		}
	}
}

func BenchmarkDo(b *testing.B) {
	for _, size := range []int{1, 2, 4} {
		b.Run(fmt.Sprint("workers=", size), func(b *testing.B) {
			p := New(size)
			defer p.Close()
			m := newMarks(size, size)
			for b.Loop() {
				p.Do(size, m)
			}
		})
	}
}

// After a pause the workers sleep.
func BenchmarkDoAfterPause(b *testing.B) {
	p := New(2)
	defer p.Close()
	m := newMarks(2, 2)
	for b.Loop() {
		time.Sleep(2 * awake)
		p.Do(2, m)
	}
}
