//go:build gpu

package cuda

import (
	"bytes"
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/kernels"
	gpukernels "github.com/euryale-ml/euryale/internal/kernels/cuda"
	"github.com/euryale-ml/euryale/internal/testing/require"
)

// needGPU skips the test without a GPU, or fails it where REQUIRE_GPU=1.
func needGPU(t testing.TB) {
	t.Helper()
	err := Available()
	switch {
	case err != nil && os.Getenv("REQUIRE_GPU") == "1":
		t.Fatalf("REQUIRE_GPU=1: %v", err)
	case err != nil:
		t.Skip(err)
	}
}

// openDevice opens a device for one test, which must free all that it allocates.
func openDevice(t testing.TB, ordinal int) *Device {
	t.Helper()
	needGPU(t)
	d := must[*Device](t)(Open(ordinal))
	t.Cleanup(func() {
		require.NoError(t, d.Close())
	})
	return d
}

// openTwo opens two devices, or skips the test where there is one.
func openTwo(t *testing.T) (d, e *Device) {
	t.Helper()
	d = openDevice(t, 0)
	e, err := Open(1)
	if err != nil {
		t.Skipf("one device: %v", err)
	}
	t.Cleanup(func() {
		require.NoError(t, e.Close())
	})
	return d, e
}

func allocate(t testing.TB, d *Device, nbytes int) backend.Buffer {
	t.Helper()
	b := must[backend.Buffer](t)(d.Alloc(nbytes))
	t.Cleanup(func() { ok(t, d.Free(b)) })
	return b
}

func newQueueOf(t testing.TB, d *Device) *Queue {
	t.Helper()
	q := must[backend.Queue](t)(d.NewQueue()).(*Queue)
	t.Cleanup(func() { ok(t, q.Close()) })
	return q
}

// read returns the bytes of a buffer, in the order of a queue.
func read(t testing.TB, q *Queue, b backend.Buffer) []byte {
	t.Helper()
	out := make([]byte, b.NBytes())
	ok(t, q.arithmetic.Move(backend.Of(out), b.As(backend.U8)))
	return out
}

func TestGPUIsAvailable(t *testing.T) {
	needGPU(t)
	d := openDevice(t, 0)
	if d.Name() != "cuda:0" || d.Ordinal() != 0 || !strings.Contains(d.PCIBusID(), ":") ||
		d.Model() == "" {
		t.Errorf("%s, ordinal %d, bus %q, model %q", d.Name(), d.Ordinal(), d.PCIBusID(), d.Model())
	}
	t.Logf("%s is %s at %s", d.Name(), d.Model(), d.PCIBusID())
	for _, wrong := range []int{-1, 99} {
		if _, err := Open(wrong); !errors.Is(err, backend.ErrArgument) ||
			!strings.Contains(err.Error(), "sees") {
			t.Errorf("device %d: %v", wrong, err)
		}
	}
	all := must[[]*Device](t)(Devices())
	for _, d := range all {
		var closers sync.WaitGroup
		for range 8 {
			closers.Go(func() {
				require.Report(t, d.Close())
			})
		}
		closers.Wait()
		ok(t, d.Close())
		if _, err := d.Bind(); !errors.Is(err, backend.ErrClosed) {
			t.Error(err)
		}
	}
}

func TestGPUMissingIsAClearError(t *testing.T) {
	if err := Available(); err == nil {
		t.Skip("there is a GPU")
	}
	for what, f := range map[string]func() error{
		"open":    func() error { _, err := Open(0); return err },
		"devices": func() error { _, err := Devices(); return err },
	} {
		if err := f(); err == nil || !strings.Contains(err.Error(), "CUDA 11.0") {
			t.Errorf("%s: %v", what, err)
		}
	}
}

func TestGPUMemoryIsZeroedAndAligned(t *testing.T) {
	d := openDevice(t, 0)
	for range 3 { // the second and third time, of memory that was written to
		for _, n := range []int{0, 1, 511, 512, 513, 1 << 20, 3<<20 + 5} {
			b := must[backend.Buffer](t)(d.Alloc(n))
			if b.Addr()%256 != 0 || b.Len() != n || !b.Device() || b.DType() != backend.U8 {
				t.Errorf("alloc of %d: %#x, %d bytes", n, b.Addr(), b.Len())
			}
			if got := read(t, d.main, b); !bytes.Equal(got, make([]byte, n)) {
				t.Errorf("memory of %d bytes is not zeroed", n)
			}
			ok(t, d.main.arithmetic.Fill(b, 7))
			ok(t, d.Free(b))
		}
	}
	if _, err := d.Alloc(-1); !errors.Is(err, backend.ErrArgument) {
		t.Error(err)
	}
	other := newQueueOf(t, d)
	b := must[backend.Buffer](t)(d.Alloc(3<<20 + 5))
	if got := read(t, other, b); !bytes.Equal(got, make([]byte, b.Len())) {
		t.Error("memory is not zeroed for another queue")
	}
	for name, wrong := range map[string]backend.Buffer{"a part": b.Slice(1, 2), "nothing": {},
		"unknown": backend.OnDevice(backend.U8, 4096, 1)} {
		err := d.Free(wrong)
		require.Check(t, errors.Is(err, backend.ErrArgument), "%s: %v", name, err)
	}
	ok(t, d.Free(b))
	err := d.Free(b)
	require.Check(t, errors.Is(err, backend.ErrArgument), "twice: %v", err)
}

func TestGPUDriverIsNotAskedInTheSteadyState(t *testing.T) {
	d := openDevice(t, 0)
	q := newQueueOf(t, d)
	round := func() {
		a, b := must[backend.Buffer](t)(d.Alloc(5<<20)), must[backend.Buffer](t)(q.Alloc(1000))
		ok(t, q.arithmetic.Fill(a, 1))
		ok(t, q.Free(b))
		ok(t, d.Free(a))
	}
	round()
	before := d.MemoryStats()
	for range 200 {
		round()
	}
	after := d.MemoryStats()
	require.Check(t, after == before, "%+v, then %+v", before, after)
}

func TestGPUMemoryEndsWithAClearError(t *testing.T) {
	d := openDevice(t, 0)
	_, total, err := d.FreeMemory()
	ok(t, err)
	if _, err := d.Alloc(2 * total); !errors.Is(err, ErrOutOfMemory) ||
		!strings.Contains(err.Error(), "are free") {
		t.Error(err)
	}
	free, _, err := d.FreeMemory()
	ok(t, err)
	// What is cached makes room for another size.
	big := must[backend.Buffer](t)(d.Alloc(free / 2))
	ok(t, d.Free(big))
	ok(t, d.main.drain())
	bigger := must[backend.Buffer](t)(d.Alloc(free / 4 * 3))
	s := d.MemoryStats()
	require.Check(t, s.Cached < free/2, "%+v", s)
	ok(t, d.Free(bigger))
	ok(t, d.main.drain())
	ok(t, d.ReleaseMemory())
	if s := d.MemoryStats(); s.Cached != 0 {
		t.Errorf("%+v after a release", s)
	}
}

func TestGPUKnowsItsMemory(t *testing.T) {
	d := openDevice(t, 0)
	b := must[backend.Buffer](t)(d.Alloc(1000))
	host := must[backend.Buffer](t)(d.AllocHost(1000))
	heap := make([]byte, 10)
	for what, c := range map[string]struct {
		addr uintptr
		want bool
	}{
		"first": {b.Addr(), true}, "last": {b.Addr() + 999, true},
		"heap": {backend.Of(heap).Addr(), false}, "null": {0, false},
	} {
		got := d.Holds(c.addr)
		require.Check(t, got == c.want, "%s: %v", what, got)
	}
	ok(t, d.Free(b))
	require.Check(t, d.Holds(b.Addr()), "cached memory is not the device's")
	ok(t, d.FreeHost(host))
	if err := d.FreeHost(b); !errors.Is(err, backend.ErrArgument) {
		t.Error(err)
	}
}

func TestGPUQueuesAreOrderedByEvents(t *testing.T) {
	d := openDevice(t, 0)
	a, b := newQueueOf(t, d), newQueueOf(t, d)
	const n = 1 << 20
	x, y := allocate(t, d, 4*n).As(backend.F32), allocate(t, d, 4*n).As(backend.F32)
	for round := range 20 {
		for i := range 5 {
			ok(t, a.arithmetic.Fill(x, f32(float32(100*round+i))))
		}
		ok(t, b.Wait(must[backend.Event](t)(a.Record())))
		ok(t, b.arithmetic.Copy(y, x))
		ok(t, a.Wait(must[backend.Event](t)(b.Record())))
	}
	got := backend.View[float32](backend.Of(read(t, b, y)).As(backend.F32))
	for i, v := range got {
		if v != 1904 {
			t.Fatalf("element %d is %v", i, v)
		}
	}
	ok(t, a.Wait(Event{}))
	ok(t, a.Wait(pastEvent{}))
}

// pastEvent is an event of another kind.
type pastEvent struct{}

func (pastEvent) Done() bool { return false }

func (pastEvent) Join(context.Context) error { return nil }

func TestGPUJoinEndsWithItsContext(t *testing.T) {
	d := openDevice(t, 0)
	q := newQueueOf(t, d)
	over, cancel := context.WithCancel(t.Context())
	cancel()
	e := must[backend.Event](t)(q.Record())
	ok(t, e.Join(t.Context()))
	ok(t, e.Join(over)) // it has happened
	x := allocate(t, d, 64<<20)
	for range 100 {
		ok(t, q.arithmetic.Fill(x, 1))
	}
	e = must[backend.Event](t)(q.Record())
	if err := e.Join(over); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	ok(t, e.Join(t.Context()))
	ok(t, e.Join(over))
}

func TestGPUEventsAreUsedAgain(t *testing.T) {
	d := openDevice(t, 0)
	q := newQueueOf(t, d)
	first := must[Event](t)(q.Mark())
	for i := range 10000 {
		e := must[Event](t)(q.Mark())
		if i%100 == 0 {
			ok(t, e.Join(t.Context()))
		}
	}
	ok(t, q.drain())
	ok(t, first.Join(t.Context()))
	n := len(q.idle) + len(q.marks)
	require.Check(t, n <= 200, "%d events of the driver", n)
}

func TestGPUClosedQueueSaysSo(t *testing.T) {
	d := openDevice(t, 0)
	x := allocate(t, d, 1000)
	q := must[backend.Queue](t)(d.NewQueue()).(*Queue)
	e := must[backend.Event](t)(q.Record())
	ok(t, q.Close())
	ok(t, q.Close())
	ok(t, e.Join(t.Context()))
	ok(t, d.Default().Wait(e))
	_, err := q.Record()
	for what, err := range map[string]error{
		"record": err, "wait": q.Wait(must[backend.Event](t)(d.Default().Record())),
		"launch": q.Zero(x),
		"move":   q.arithmetic.Move(x, backend.Of(make([]byte, 1000))),
	} {
		require.Check(t, errors.Is(err, backend.ErrClosed) && errors.Is(err, backend.ErrArgument),
			"%s: %v", what, err)
	}
	ok(t, d.Default().Close())
	ok(t, d.Default().Zero(x))
	require.Check(t, d.main.Stream() != 0, "a stream without a handle")
}

func TestGPUMovesAnyHostMemory(t *testing.T) {
	d := openDevice(t, 0)
	q := newQueueOf(t, d)
	for _, n := range []int{0, 1, 1000, stagingBytes, 2*stagingBytes + 3} {
		x := allocate(t, d, n+5).Slice(5, n+5)
		want := make([]byte, n)
		for i := range want {
			want[i] = byte(rand.Uint32())
		}
		source := bytes.Clone(want)
		ok(t, q.arithmetic.Move(x, backend.Of(source)))
		clear(source) // the memory is the caller's again
		require.Check(t, bytes.Equal(read(t, q, x), want), "%d bytes came back as others", n)
		if n == 0 {
			continue
		}
		pinned, again := must[backend.Buffer](t)(d.AllocHost(n)), must[backend.Buffer](t)(
			d.AllocHost(n))
		copy(pinned.Bytes(), want)
		ok(t, errors.Join(q.arithmetic.Zero(x), q.arithmetic.Move(x, pinned),
			q.arithmetic.Move(again, x), q.drain()))
		require.Check(t, bytes.Equal(again.Bytes(), want), "%d pinned bytes came back as others", n)
		ok(t, errors.Join(d.FreeHost(pinned), d.FreeHost(again)))
	}
	a, b := []int32{1, 2}, make([]int32, 2)
	ok(t, q.arithmetic.Move(backend.Of(b), backend.Of(a)))
	require.Check(t, b[1] == 2, "host to host")
	if err := q.arithmetic.Move(backend.Of(b), backend.Of(a[:1])); !errors.Is(
		err, backend.ErrArgument) {
		t.Error(err)
	}
	err := q.Zero(backend.Of(b))
	require.Check(t, errors.Is(err, backend.ErrArgument), "host memory: %v", err)
}

// trial is three operands on the device and on the host, with guard cells.
type trial struct {
	q      *Queue
	device backend.Buffer
	host   backend.Buffer
}

const guardCells = 64

func (tr *trial) operand(d backend.DType, i, n, offset int) (device, host backend.Buffer) {
	lo := i*(1<<16) + guardCells + offset*d.Size()
	hi := lo + n*d.Size()
	return tr.device.Slice(lo, hi).As(d), tr.host.Slice(lo, hi).As(d)
}

// compare runs f on both sides and compares all memory.
func (tr *trial) compare(t *testing.T, what string, f func(a backend.Arithmetic,
	device bool) error) {
	t.Helper()
	for i := range tr.host.Bytes() { // small positive numbers in every type, without NaNs
		tr.host.Bytes()[i] = byte(rand.Uint32()) & 0x3f
	}
	ok(t, tr.q.arithmetic.Move(tr.device, tr.host))
	if err := errors.Join(f(tr.q.arithmetic, true), f(kernels.Host{}, false)); err != nil {
		t.Errorf("%s: %v", what, err)
		return
	}
	if got := read(t, tr.q, tr.device); !bytes.Equal(got, tr.host.Bytes()) {
		t.Errorf("%s: the results differ, or the guard cells", what)
	}
}

func TestGPUKernelsAreThoseOfTheHost(t *testing.T) {
	d := openDevice(t, 0)
	tr := &trial{newQueueOf(t, d), allocate(t, d, 3<<16), backend.Of(make([]byte, 3<<16))}
	pick := func(device bool, a, b backend.Buffer) backend.Buffer {
		if device {
			return a
		}
		return b
	}
	for _, dt := range backend.DTypes() {
		for _, n := range []int{0, 1, 31, 32, 33, 4099} {
			for offset := range 2 {
				xd, xh := tr.operand(dt, 0, n, offset)
				yd, yh := tr.operand(dt, 1, n, 0)
				zd, zh := tr.operand(dt, 2, n, 0)
				at := fmt.Sprintf("of %d %v + %d", n, dt, offset)
				tr.compare(t, "divide "+at, func(a backend.Arithmetic, dev bool) error {
					return a.Divide(pick(dev, zd, zh), pick(dev, xd, xh), 3)
				})
				for _, op := range backend.ReduceOps() {
					tr.compare(t, fmt.Sprint("reduce by ", op, " ", at),
						func(a backend.Arithmetic, dev bool) error {
							return a.Reduce(op, pick(dev, zd, zh), pick(dev, xd, xh),
								pick(dev, yd, yh),
								pick(dev, zd, zh))
						})
				}
			}
		}
	}
}

func TestGPUDevicesReachEachOther(t *testing.T) {
	d, e := openTwo(t)
	require.Check(t, d.PCIBusID() != e.PCIBusID(), "two devices are in one place")
	x, y := allocate(t, d, 1<<20), allocate(t, e, 1<<20)
	ok(t, d.main.arithmetic.Fill(x, 9))
	ok(t, e.main.Wait(must[backend.Event](t)(d.main.Record())))
	ok(t, e.main.CopyFrom(y, d, x))
	got := read(t, e.main, y)
	require.Check(t, got[0] == 9 && got[1<<20-1] == 9, "a copy between devices is wrong")
	can := must[bool](t)(e.CanReach(d.Ordinal()))
	if reach := e.Reachable(); slices.Contains(reach, d.PCIBusID()) != can {
		t.Errorf("%s reaches %v, and %s: %v", e.Name(), reach, d.PCIBusID(), can)
	}
	err := e.EnablePeerAccess(d.Ordinal())
	if !can {
		if !errors.Is(err, backend.ErrUnsupported) {
			t.Error(err)
		}
		t.Skip("the devices do not reach each other")
	}
	ok(t, err)
	ok(t, e.EnablePeerAccess(d.Ordinal())) // again
	ok(t, e.EnablePeerAccess(e.Ordinal()))
	ok(t, d.main.arithmetic.Fill(x, 5))
	ok(t, e.main.Wait(must[backend.Event](t)(d.main.Record())))
	ok(t, e.main.Copy(y, x)) // by a kernel of e
	if got := read(t, e.main, y); got[0] != 5 || got[1<<20-1] != 5 {
		t.Error("a kernel read another device's memory wrongly")
	}
	require.Check(t, !e.Holds(x.Addr()) && d.Holds(x.Addr()), "a device takes another one's "+
		"memory for its own")
}

func TestGPUBindNests(t *testing.T) {
	d, e := openTwo(t)
	x, y := allocate(t, d, 100), allocate(t, e, 100)
	outer := must[func()](t)(d.Bind())
	inner := must[func()](t)(e.Bind())
	ok(t, d.main.arithmetic.Fill(x, 1))
	ok(t, e.main.arithmetic.Fill(y, 2))
	inner()
	ok(t, d.main.arithmetic.Fill(x, 3))
	outer()
	require.Check(t, read(t, d.main, x)[0] == 3 && read(t, e.main, y)[0] == 2,
		"kernels ran in the wrong context")
}

func TestGPUGoroutinesShareDevices(t *testing.T) {
	needGPU(t)
	devices := must[[]*Device](t)(Devices())
	var all sync.WaitGroup
	errs := make([]error, 4*len(devices))
	for i := range errs {
		all.Go(func() { errs[i] = churn(devices[i%len(devices)], i) })
	}
	all.Wait()
	ok(t, errors.Join(errs...))
	for _, d := range devices {
		ok(t, d.Close())
	}
}

// f32 returns the bits of an element.
func f32(x float32) uint64 { return uint64(math.Float32bits(x)) }

// churn allocates, computes and frees on its own queue.
func churn(d *Device, seed int) error {
	q, err := d.NewQueue()
	if err != nil {
		return err
	}
	a := q.(*Queue).arithmetic
	out := make([]float32, 5000)
	for i := range 100 {
		n := 1000 + 40*((i*7+seed)%100)
		x, err := d.Alloc(4 * n)
		if err != nil {
			return err
		}
		y, err := q.(*Queue).Alloc(4 * n)
		if err != nil {
			return err
		}
		value := float32(seed*1000 + i)
		err = errors.Join(a.Fill(y.As(backend.F32), f32(value)), a.Reduce(backend.Sum,
			x.As(backend.F32), x.As(backend.F32), y.As(backend.F32)),
			a.Move(backend.Of(out[:n]), x.As(backend.F32)), q.(*Queue).Free(y), d.Free(x))
		if err != nil {
			return err
		}
		for j, v := range out[:n] {
			if v != value {
				return fmt.Errorf("%s, goroutine %d, round %d: element %d of %d is %v, want %v",
					d.Name(), seed, i, j, n, v, value)
			}
		}
	}
	return q.Close()
}

// TestGPUFamiliesAreLoadedWhenTheyAreNeeded: a device begins with what its queues may launch at any
// time.
func TestGPUFamiliesAreLoadedWhenTheyAreNeeded(t *testing.T) {
	d := openDevice(t, 0)
	want := gpukernels.QueueFamilies()
	got := d.Families()
	require.That(t, slices.Equal(got, want), "Open has loaded %v, want %v", got, want)
	x := allocate(t, d, 4*4*4).As(backend.F32)
	m := kernels.Matrix{Buffer: x, Pitch: 4}
	for range 2 { // the second product loads nothing
		ok(t, d.main.arithmetic.Multiply(
			kernels.Product{A: m, B: m, C: kernels.Matrix{Buffer: allocate(t, d, 4*4*4).As(
				backend.F32), Pitch: 4}, M: 4, N: 4, K: 4, Alpha: 1}))
		want = append(gpukernels.QueueFamilies(), gpukernels.Products)
		slices.Sort(want)
		got := d.Families()
		require.That(t, slices.Equal(got, want), "a product has loaded %v, want %v", got, want)
	}
	ok(t, errors.Join(d.Prepare(gpukernels.PeerFamilies(false)...), d.main.drain()))
	if got, n := d.Families(), len(want)+2; len(got) != n {
		t.Errorf("%v are loaded, want %d families", got, n)
	}
	if err := d.Prepare("poetry"); err == nil || !strings.Contains(err.Error(), "poetry") {
		t.Errorf("a family that is not there: %v", err)
	}
}

// TestGPUProcessesShareMemory starts itself again, as the process that imports.
func TestGPUProcessesShareMemory(t *testing.T) {
	const variable = "EURYALE_TEST_IMPORT"
	d := openDevice(t, 0)
	if text := os.Getenv(variable); text != "" {
		importAndAdd(t, d, text)
		return
	}
	if d.Model() == "the host" {
		t.Skip("the emulated driver has no IPC")
	}
	whole := allocate(t, d, 4096)
	b := whole.Slice(256, 1256)
	ok(t, errors.Join(d.main.arithmetic.Fill(b, 40), d.main.drain()))
	h := must[[]byte](t)(d.Export(b))
	child := exec.Command(os.Args[0], "-test.run", "^TestGPUProcessesShareMemory$")
	child.Env = append(os.Environ(), fmt.Sprintf("%s=%x", variable, h))
	out, err := child.CombinedOutput()
	require.That(t, err == nil, "%v\n%s", err, out)
	if got := read(t, d.main, whole); got[255] != 0 || got[256] != 42 || got[1255] != 42 ||
		got[1256] != 0 {
		t.Errorf("%v %v %v %v after the other process wrote", got[255], got[256], got[1255],
			got[1256])
	}
	if _, err := d.Export(backend.OnDevice(backend.U8, 4096, 1)); !errors.Is(
		err, backend.ErrArgument) {
		t.Error(err)
	}
	if err := d.CloseImport(b); !errors.Is(err, backend.ErrArgument) {
		t.Error(err)
	}
}

func importAndAdd(t *testing.T, d *Device, text string) {
	b := must[backend.Buffer](t)(d.Import(must[[]byte](t)(hex.DecodeString(text))))
	if b.Len() != 1000 {
		t.Errorf("imported %d bytes", b.Len())
	}
	got := read(t, d.main, b)
	require.That(t, got[0] == 40 && got[999] == 40, "imported %v", got[0])
	require.Check(t, d.Holds(b.Addr()), "imported memory is not the device's")
	ok(t, errors.Join(d.main.arithmetic.Fill(b, 42), d.main.drain(), d.CloseImport(b)))
}
