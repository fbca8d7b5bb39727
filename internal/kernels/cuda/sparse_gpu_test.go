//go:build gpu

package cuda

import (
	"fmt"
	"math"
	"math/rand/v2"
	"runtime"
	"slices"
	"testing"
	"unsafe"

	"gorgonia.org/cu"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/kernels"
)

// sparseBench has the memory of a selection on a stream.
type sparseBench struct {
	b             *testing.B
	context       cu.CUContext
	stream        cu.Stream
	k             Kernels
	n             int
	xs            [2]backend.Buffer // of which one or the other is added
	residual, dst backend.Buffer
}

func (s *sparseBench) ok(err error) {
	if err != nil {
		s.b.Helper()
		s.b.Fatal(err)
	}
}

func (s *sparseBench) alloc(d backend.DType, n int) backend.Buffer {
	addr, err := cu.MemAlloc(int64(n * d.Size()))
	s.ok(err)
	return backend.OnDevice(d, uintptr(addr), n)
}

// upload fills a buffer with numbers of a normal distribution, or the same with the
// other sign.
func (s *sparseBench) upload(to backend.Buffer, seed uint64, sign float32) {
	rnd := rand.New(rand.NewPCG(seed, 3))
	host := make([]float32, to.Len())
	for i := range host {
		host[i] = sign * float32(rnd.NormFloat64())
	}
	s.ok(cu.MemcpyHtoD(cu.DevicePtr(to.Addr()), unsafe.Pointer(unsafe.SliceData(host)),
		int64(to.NBytes())))
}

// BenchmarkGPUSparse reports the bytes read and written per second, for the driver's
// own copy first: operand, residual twice, and the entries. Numbers are normally
// distributed. On an emulated device, only the small ones end soon.
func BenchmarkGPUSparse(b *testing.B) {
	for _, n := range []int{1 << 20, 1 << 25} {
		b.Run(fmt.Sprintf("%dMi", n>>20), func(b *testing.B) { benchmarkSparse(b, n) })
	}
}

func benchmarkSparse(b *testing.B, n int) {
	count, err := cu.NumDevices()
	if err != nil || count == 0 {
		b.Skip("no GPU")
	}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	s := &sparseBench{b: b, n: n}
	ctx, err := cu.Device(0).MakeContext(cu.SchedAuto)
	s.ok(err)
	defer ctx.Destroy()
	s.context = ctx
	loaded, err := Load()
	s.ok(err)
	s.stream, err = cu.MakeStream(cu.NonBlocking)
	s.ok(err)
	s.k = loaded.On(s.stream)
	for i := range s.xs {
		s.xs[i] = s.alloc(backend.F32, n)
	}
	s.residual, s.dst = s.alloc(backend.F32, n), s.alloc(backend.F32, n)
	s.upload(s.xs[0], 1, 1)

	s.measure("driver", 8*n, func(int) error {
		return cu.MemcpyDtoDAsync(cu.DevicePtr(s.dst.Addr()), cu.DevicePtr(s.xs[0].Addr()),
			int64(4*n), s.stream)
	})
	note := s.alloc(backend.I64, 1)
	s.measure("notfinite", 4*n, func(int) error { return s.k.NotFinite(note, s.xs[0]) })
	// A residual that is added to what it was taken from is zero, so every second
	// call finds the same elements large.
	s.upload(s.xs[1], 1, -1)
	for _, limit := range []float32{3.2905, 2.5758, 1.96} { // 0.1 %, 1 % and 5 %
		for _, d := range []backend.DType{backend.F32, backend.BF16} {
			s.selects(fmt.Sprintf("threshold%v%v", limit, d), d, n/10, func(q *kernels.Selection) {
				q.Above = math.Float32bits(limit) - 1
			})
		}
	}
	s.upload(s.xs[1], 2, 1)
	for _, share := range []int{1000, 100, 20} {
		for _, d := range []backend.DType{backend.F32, backend.BF16} {
			s.selects(fmt.Sprintf("top1of%d%v", share, d), d, n/share, func(q *kernels.Selection) {
				q.K = n / share
			})
		}
	}
	for _, share := range []int{100, 20} {
		s.combines(share, 4)
	}
}

func (s *sparseBench) measure(name string, moved int, f func(i int) error) {
	s.b.Run(name, func(b *testing.B) {
		outer := s.b
		s.b = b
		defer func() { s.b = outer }()
		runtime.LockOSThread() // b runs on its own goroutine
		defer runtime.UnlockOSThread()
		s.ok(cu.SetCurrentContext(s.context))
		s.ok(f(0))
		s.ok(f(1))
		s.ok(s.stream.Synchronize())
		b.ResetTimer()
		for i := range b.N {
			s.ok(f(i))
		}
		s.ok(s.stream.Synchronize())
		b.ReportMetric(float64(moved)*float64(b.N)/b.Elapsed().Seconds()/1e9, "GB/s")
	})
}

func (s *sparseBench) selects(name string, d backend.DType, room int,
	set func(*kernels.Selection)) {
	q := &kernels.Selection{
		Out: kernels.Message{Head: s.alloc(backend.I64, kernels.HeadWords),
			Values: s.alloc(d, room), Index: s.alloc(backend.I32, room)},
		X: s.xs[0], Residual: s.residual, Saturate: true,
	}
	set(q)
	q.Scratch = s.alloc(backend.U8, s.k.SelectScratch(q))
	s.ok(s.k.Zero(s.residual))
	s.ok(s.stream.Synchronize())
	moved := 12*s.n + room*(4+d.Size())
	if q.K == 0 {
		moved = 12*s.n + s.n/100*(4+d.Size()) // about
	}
	s.measure(name, moved, func(i int) error {
		q.X = s.xs[i%2]
		return s.k.Select(q)
	})
	s.steps(name+"/steps", q)
	for _, m := range []backend.Buffer{q.Out.Head, q.Out.Values, q.Out.Index, q.Scratch} {
		s.ok(cu.MemFree(cu.DevicePtr(m.Addr())))
	}
}

// steps reports the time of each kernel, in microseconds, of which about two are the
// events'.
func (s *sparseBench) steps(name string, q *kernels.Selection) {
	s.b.Run(name, func(b *testing.B) {
		outer := s.b
		s.b = b
		defer func() { s.b = outer }()
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		s.ok(cu.SetCurrentContext(s.context))
		w := &stopwatch{launcher: s.k.launcher, stream: s.stream}
		timed := New(w)
		for i := range b.N {
			q.X = s.xs[i%2]
			s.ok(w.mark())
			s.ok(timed.Select(q))
		}
		s.ok(s.stream.Synchronize())
		each := len(w.names) / b.N
		for i := range each {
			total := 0.0
			for call := range b.N {
				at := call*(each+1) + i
				ms, err := w.marks[at].Elapsed(w.marks[at+1])
				s.ok(err)
				total += ms
			}
			b.ReportMetric(1000*total/float64(b.N), fmt.Sprintf("us/%d%s", i, w.names[i]))
		}
		for i := range w.marks {
			s.ok(cu.DestroyEvent(&w.marks[i]))
		}
	})
}

// stopwatch marks the time after each launch.
type stopwatch struct {
	launcher Launcher
	stream   cu.Stream
	marks    []cu.Event
	names    []string
}

func (w *stopwatch) mark() error {
	e, err := cu.MakeEvent(cu.DefaultEvent)
	if err != nil {
		return err
	}
	w.marks = append(w.marks, e)
	return e.Record(w.stream)
}

func (w *stopwatch) Launch(c Launch) error {
	w.names = append(w.names, c.Entry.Verb)
	if err := w.launcher.Launch(c); err != nil {
		return err
	}
	return w.mark()
}

// combines measures the sum of messages that each have one of so many elements.
func (s *sparseBench) combines(share, ranks int) {
	c := s.n / share / 2 * 2
	m := kernels.Messages{Ranks: ranks, NBytes: 32 + 8*c, DType: backend.F32, Values: 32,
		Index: 32 + 4*c, Capacity: c}
	m.All = s.alloc(backend.U8, ranks*m.NBytes)
	rnd := rand.New(rand.NewPCG(5, 3))
	message := make([]int32, m.NBytes/4)
	for r := range ranks {
		message[2], message[4] = int32(c), int32(c)
		index := message[m.Index/4:]
		for i := range index {
			index[i] = int32(rnd.IntN(s.n))
		}
		slices.Sort(index)
		s.ok(cu.MemcpyHtoD(cu.DevicePtr(m.All.Addr()+uintptr(r*m.NBytes)),
			unsafe.Pointer(unsafe.SliceData(message)), int64(m.NBytes)))
	}
	s.measure(fmt.Sprintf("combine%dx1of%d", ranks, share), 4*s.n+ranks*m.NBytes, func(int) error {
		return s.k.Combine(s.dst, m, ranks)
	})
	s.ok(cu.MemFree(cu.DevicePtr(m.All.Addr())))
}
