package backendtest

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"runtime"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/testing/testranks"
)

// vector is integers on the communicator's device, with their values at hand.
type vector struct {
	s      *suite
	dev    backend.Device
	bytes  backend.Buffer
	values []int64
}

func (s *suite) vector(c backend.Communicator, n int) (*vector, error) {
	b, err := c.Device().Alloc(s.Integers.Size() * n)
	return &vector{s, c.Device(), b, make([]int64, n)}, err
}

func (v *vector) buffer() backend.Buffer { return v.bytes.As(v.s.Integers) }

func (v *vector) copyAndWait(dst, src backend.Buffer) error {
	if v.s.Copy != nil {
		return v.s.Copy(dst, src)
	}
	copy(dst.Bytes(), src.Bytes())
	return nil
}

// set gives element i the value f(i).
func (v *vector) set(f func(i int) int64) error {
	for i := range v.values {
		v.values[i] = f(i)
	}
	if v.s.Integers == backend.I64 {
		return v.copyAndWait(v.buffer(), backend.Of(v.values))
	}
	floats := make([]float32, len(v.values))
	for i, x := range v.values {
		floats[i] = float32(x)
	}
	return v.copyAndWait(v.buffer(), backend.Of(floats))
}

// get reads the values.
func (v *vector) get() error {
	if v.s.Integers == backend.I64 {
		return v.copyAndWait(backend.Of(v.values), v.buffer())
	}
	floats := make([]float32, len(v.values))
	if err := v.copyAndWait(backend.Of(floats), v.buffer()); err != nil {
		return err
	}
	for i, x := range floats {
		v.values[i] = int64(x)
		if float32(v.values[i]) != x {
			return fmt.Errorf("element %d of %d is %v, no integer", i, len(floats), x)
		}
	}
	return nil
}

// want checks that element i has the value f(i).
func (v *vector) want(f func(i int) int64) error {
	if err := v.get(); err != nil {
		return err
	}
	for i, got := range v.values {
		if got != f(i) {
			return fmt.Errorf("element %d of %d is %d, want %d", i, len(v.values), got, f(i))
		}
	}
	return nil
}

func (v *vector) free() error { return v.dev.Free(v.bytes) }

// vectors makes several of n elements, runs f and frees them.
func (s *suite) vectors(c backend.Communicator, count, n int,
	f func(vs []*vector) error) (err error) {
	vs := make([]*vector, count)
	for i := range vs {
		if vs[i], err = s.vector(c, n); err != nil {
			return err
		}
		defer func() { err = errors.Join(err, vs[i].free()) }()
	}
	return f(vs)
}

// sumOf returns the sum over s < P of f(s).
func sumOf(P int, f func(s int) int64) (sum int64) {
	for s := range P {
		sum += f(s)
	}
	return sum
}

var allReduce = backend.Collective{Kind: backend.AllReduce}

// backToBack makes calls without a pause on the same buffers, whose values
// change, while one rank of each call is late.
func (s *suite) backToBack(P int) error {
	times := s.times(10000)
	kinds := []backend.Collective{
		allReduce, {Kind: backend.AllReduce, Algorithm: backend.TwoShot},
		{Kind: backend.ReduceScatter}, {Kind: backend.AllGather}, {Kind: backend.AllToAll},
	}
	return s.ranks(P, func(c backend.Communicator) error {
		return s.vectors(c, 2, 33*P, func(vs []*vector) error {
			late := rand.New(rand.NewPCG(9, 9)) // the same on every rank
			for i := range times {
				what := kinds[i/20%len(kinds)]
				who, pause := late.IntN(P), time.Duration(late.IntN(200))*time.Microsecond
				if who == c.Rank() {
					spin(pause)
				}
				if err := oneOf(c, what, vs[0], vs[1], i); err != nil {
					return fmt.Errorf("call %d, %v: %w", i, what, err)
				}
			}
			return nil
		})
	})
}

// spin passes time more exactly than Sleep.
func spin(d time.Duration) {
	for end := time.Now().Add(d); time.Now().Before(end); {
		runtime.Gosched()
	}
}

// oneOf runs one call on chunks of 33 elements and checks what came of it. The
// value of an element depends on the rank, the place, and the last 1000 calls.
func oneOf(c backend.Communicator, what backend.Collective, x, y *vector, call int) error {
	P, r := c.Size(), c.Rank()
	value := func(s, i int) int64 { return int64(1000*(call%1000) + 100*s + i) }
	if err := x.set(func(i int) int64 { return value(r, i) }); err != nil {
		return err
	}
	src, dst := x.buffer(), y.buffer()
	want := func(i int) int64 { return sumOf(P, func(s int) int64 { return value(s, i) }) }
	switch what.Kind {
	case backend.ReduceScatter:
		dst = dst.Slice(33*r, 33*(r+1))
		if err := y.set(want); err != nil { // the other chunks stay
			return err
		}
	case backend.AllGather:
		src = src.Slice(0, 33)
		want = func(i int) int64 { return value(i/33, i%33) }
	case backend.AllToAll:
		want = func(i int) int64 { return value(i/33, 33*r+i%33) }
	}
	if err := backend.Run(c, what, dst, src); err != nil {
		return err
	}
	return y.want(want)
}

// reuse overwrites and drops operands as soon as the Work is done, with the
// garbage collector at work.
func (s *suite) reuse(P int) error {
	times := s.times(1000)
	return s.ranks(P, func(c backend.Communicator) error {
		q := testranks.Must(c.Device().NewQueue())
		defer q.Close()
		for i := range times {
			err := s.vectors(c, 2, 100+i%100, func(vs []*vector) error {
				if err := vs[0].set(func(j int) int64 {
					return int64(c.Rank() + i*j)
				}); err != nil {
					return err
				}
				var at backend.Queue
				if i%2 == 0 {
					at = q
				}
				if err := start(c, at, allReduce, vs[1].buffer(), vs[0].buffer()); err != nil {
					return err
				}
				if err := vs[0].set(func(int) int64 { return -1 }); err != nil {
					return err
				}
				return vs[1].want(func(j int) int64 {
					return sumOf(P, func(s int) int64 { return int64(s + i*j) })
				})
			})
			if err != nil {
				return fmt.Errorf("call %d: %w", i, err)
			}
			if i%50 == 0 && c.Rank() == 0 {
				runtime.GC()
			}
		}
		return nil
	})
}

// growth compares the heap and the goroutines before and after many calls.
func (s *suite) growth(P int) error {
	times := s.times(10000)
	return s.with(P, patient, func(g *Group) error {
		calls := func() error {
			return s.each(g.Comms, func(c backend.Communicator) error {
				return s.vectors(c, 2, 257, func(vs []*vector) error {
					for range times {
						if err := backend.Run(c, allReduce, vs[1].buffer(),
							vs[0].buffer()); err != nil {
							return err
						}
					}
					return nil
				})
			})
		}
		if err := calls(); err != nil { // whatever is made once
			return err
		}
		heap, goroutines := footprint()
		if err := calls(); err != nil {
			return err
		}
		most := heap + max(int64(times)*16, 64<<10)
		heapAfter, after := footprint()
		for begin := time.Now(); (heapAfter > most || after > goroutines) &&
			time.Since(begin) < soon; {
			heapAfter, after = footprint() // what has sent its result may not be gone yet
		}
		if heapAfter > most {
			return fmt.Errorf("the heap grew from %d to %d bytes over %d calls", heap, heapAfter,
				times)
		}
		if after > goroutines {
			return fmt.Errorf("goroutines grew from %d to %d over %d calls", goroutines, after,
				times)
		}
		return nil
	})
}

func footprint() (heap int64, goroutines int) {
	time.Sleep(10 * time.Millisecond)
	runtime.GC()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc), runtime.NumGoroutine()
}

// alloc checks Alloc's memory, and that ranks which disagree all get an error.
func (s *suite) alloc(P int) error {
	return s.ranks(P, func(c backend.Communicator) error {
		for _, n := range []int{0, 1, 4096, 100000} {
			b := testranks.Must(c.Alloc(n))
			if b.Len() != n || b.DType() != backend.U8 {
				return fmt.Errorf("Alloc(%d) gave %d %v, want %d u8", n, b.Len(), b.DType(), n)
			}
			v := &vector{s: s, values: make([]int64, n/8)}
			testranks.NoError(v.copyAndWait(backend.Of(v.values), b.As(backend.I64)))
			for i, got := range v.values {
				if got != 0 {
					return fmt.Errorf("Alloc(%d) gave memory that is not zero at byte %d", n, 8*i)
				}
			}
		}
		if _, err := c.Alloc(-1); !errors.Is(err, backend.ErrArgument) {
			return fmt.Errorf("Alloc(-1): the error is %v, want ErrArgument", orNone(err))
		}
		if P > 1 && !s.Unverified {
			if _, err := c.Alloc(64 + c.Rank()); err == nil {
				return errors.New("an Alloc of another size on every rank gave no error")
			}
		}
		return nil
	})
}

// freed allocates and frees memory many times, in another order on every rank, while
// one piece stays in use.
func (s *suite) freed(P int) error {
	times := s.times(1000)
	return s.with(P, patient, func(g *Group) error {
		rounds := func() error {
			return s.each(g.Comms, func(c backend.Communicator) error {
				return s.allocAndFree(c, times)
			})
		}
		if err := rounds(); err != nil { // whatever is made once
			return err
		}
		before := sharedMappings()
		if err := rounds(); err != nil {
			return err
		}
		if after := sharedMappings(); after >= before+times {
			return fmt.Errorf("%d pieces of shared memory were mapped before %d times Alloc and "+
				"Free, %d after", before, times, after)
		}
		return nil
	})
}

func (s *suite) allocAndFree(c backend.Communicator, times int) error {
	const n = 1000
	kept := testranks.Must(c.Alloc(8 * n))
	for i := range times {
		x, err := c.Alloc(8 * n)
		if err != nil {
			return fmt.Errorf("time %d: %w", i, err)
		}
		v := &vector{s: s, values: make([]int64, n)}
		testranks.NoError(v.copyAndWait(backend.Of(v.values), x.As(backend.I64)))
		if at := slices.IndexFunc(v.values, func(e int64) bool { return e != 0 }); at >= 0 {
			return fmt.Errorf("time %d: Alloc gave memory that is not zero at byte %d", i, 8*at)
		}
		bytes := backend.Of([]byte{1, 2, 3, 4, 5, 6, 7, 8})
		testranks.NoError(v.copyAndWait(x.Slice(0, 8), bytes))
		if (c.Rank()+i)%2 == 0 { // the others free this one later than the next, or earlier
			x, kept = kept, x
		}
		if err := c.Free(x); err != nil {
			return fmt.Errorf("time %d: %w", i, err)
		}
		if err := c.Free(x); !errors.Is(err, backend.ErrArgument) {
			return fmt.Errorf("a second Free gave the error %v, want ErrArgument", orNone(err))
		}
	}
	return c.Free(kept)
}

// sharedMappings counts the mappings of files without a name, which is what memory that
// processes share is.
func sharedMappings() int {
	maps, err := os.ReadFile("/proc/self/maps")
	if err != nil {
		return 0 // not on Linux
	}
	return strings.Count(string(maps), "(deleted)")
}

// barrier compares when ranks come to barriers and leave them.
func (s *suite) barrier(P int) error {
	return s.ranks(P, func(c backend.Communicator) error {
		var came, left [100]int64
		for i := range came {
			came[i] = time.Now().UnixNano()
			testranks.NoError(backend.Barrier(c))
			left[i] = time.Now().UnixNano()
		}
		testranks.NoError(s.tell("barriers", c.Rank(), came[:]...))
		for p := range P {
			theirs := testranks.Must(s.hear("barriers", p))
			for i, t := range theirs {
				if left[i] < t {
					return fmt.Errorf("left barrier %d %d ns before rank %d came", i, t-left[i], p)
				}
			}
		}
		return nil
	})
}

// goroutines starts calls from several goroutines that take turns.
func (s *suite) goroutines(P int) error {
	const workers, rounds = 4, 50
	return s.ranks(P, func(c backend.Communicator) error {
		turns := make([]chan struct{}, workers)
		for i := range turns {
			turns[i] = make(chan struct{}, 1)
		}
		turns[0] <- struct{}{}
		var all sync.WaitGroup
		errs := make(chan error, workers)
		for i := range workers {
			all.Go(func() {
				errs <- s.vectors(c, 2, 33*P, func(vs []*vector) error {
					var first error
					for round := range rounds {
						<-turns[i]
						if first == nil {
							first = oneOf(c, allReduce, vs[0], vs[1], workers*round+i)
						}
						turns[(i+1)%workers] <- struct{}{}
					}
					return first
				})
			})
		}
		all.Wait()
		close(errs)
		for err := range errs {
			if err != nil {
				return err
			}
		}
		return nil
	})
}
