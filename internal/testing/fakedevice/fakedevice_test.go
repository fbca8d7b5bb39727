package fakedevice

import (
	"errors"
	"runtime/debug"
	"testing"
	"time"
	"unsafe"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/backend/backendtest"
	"github.com/euryale-ml/euryale/backend/host"
	"github.com/euryale-ml/euryale/internal/testing/require"
)

func newDevice(t *testing.T) *Device {
	t.Helper()
	d := require.Value(New(host.Device{}))(t)
	t.Cleanup(func() { require.NoError(t, d.Close()) })
	return d
}

func alloc(t *testing.T, d *Device, nbytes int) backend.Buffer {
	t.Helper()
	b := require.Value(d.Alloc(nbytes))(t)
	t.Cleanup(func() {
		err := d.Free(b)
		require.Check(t, err == nil || errors.Is(err, backend.ErrArgument), "%v", err)
	})
	return b
}

// view is what a careless program does with a tensor on a device.
func view(b backend.Buffer) []float32 {
	header := struct {
		addr     uintptr
		len, cap int
	}{b.Addr(), b.Len(), b.Len()}
	return *(*[]float32)(unsafe.Pointer(&header))
}

// touched runs f on this goroutine, and returns the address at which it faults, 0 if it does not.
func touched(f func()) (addr uintptr) {
	before := debug.SetPanicOnFault(true)
	defer debug.SetPanicOnFault(before)
	defer func() {
		if cause := recover(); cause != nil {
			addr = cause.(interface{ Addr() uintptr }).Addr()
		}
	}()
	f()
	return 0
}

func TestTheHostFaultsWhereItTouchesADevice(t *testing.T) {
	b := alloc(t, newDevice(t), 64).As(backend.F32)
	var seen float32
	for name, touch := range map[string]func(){
		"read":  func() { seen += view(b)[2] },
		"write": func() { view(b)[2] = 1 },
	} {
		if at := touched(touch); at != b.Addr()+8 {
			t.Errorf("%s: a fault at %#x, want one at %#x", name, at, b.Addr()+8)
		}
	}
}

func TestKernelsComputeBehindTheGuard(t *testing.T) {
	d := newDevice(t)
	x, y := alloc(t, d, 4*6).As(backend.F32), alloc(t, d, 4*6).As(backend.F32)
	k := d.Default()
	in, out := []float32{1, 2, 3, 4, 5, 6}, make([]float32, 6)
	err := errors.Join(
		k.Move(x, backend.Of(in)),
		k.CopyStrided(y, x, []int{3, 2}, []int{1, 3}),
		k.Zero(x),
		k.Move(x, backend.Of([]float32{10, 10, 10, 10, 10, 10})),
		k.Reduce(backend.Sum, y, y, x),
		k.Reduce(backend.Sum, y, y, y, y, y),
		k.Divide(y, y, 2),
		k.Cast(x.As(backend.BF16).Slice(0, 6), y), // exact
		k.Cast(y, x.As(backend.BF16).Slice(0, 6)),
		k.Copy(x, y),
		k.Copy2D(y, 2, x, 2, 2, 3),
		k.Reduce(backend.Sum, x.Slice(0, 2), y.Slice(0, 2), y.Slice(2, 4), y.Slice(4, 6)),
		k.Cast(x.Slice(2, 4), y.Slice(0, 2)),
		k.Move(backend.Of(out), x),
	)
	want := []float32{2 * (33 + 3), 2 * (33 + 12), 22, 28}
	for i := range want {
		if err != nil || out[i] != want[i] {
			t.Fatalf("%v, want %v: %v", out, want, err)
		}
	}
}

func TestQueuesUseTheirMemoryAgain(t *testing.T) {
	d := newDevice(t)
	q := require.Value(d.NewQueue())(t)
	defer q.Close()
	type pool interface {
		Alloc(nbytes int) (backend.Buffer, error)
		Free(backend.Buffer) error
	}
	seen := map[uintptr]bool{}
	for range 10 {
		for _, of := range []backend.Queue{d.Default(), q} {
			b, err := of.(pool).Alloc(100)
			require.NoError(t, err)
			require.That(t, !seen[b.Addr()], "an address was used twice")
			seen[b.Addr()] = true
			out := make([]byte, 100)
			err = errors.Join(of.Move(backend.Of(out), b), of.(pool).Free(b))
			if done, recordErr := of.Record(); errors.Join(err, recordErr) != nil ||
				done.Join(t.Context()) != nil || out[99] != 0xAB {
				t.Fatalf("%v, holds %x", err, out[99])
			}
			require.Fails(t, "freed twice", of.(pool).Free(b), backend.ErrArgument)
		}
	}
	n := d.Allocs()
	require.Check(t, n == 2, "memory was taken %d times for two queues", n)
}

func TestKernelsRefuseWhatIsNotAllocated(t *testing.T) {
	d, other := newDevice(t), newDevice(t)
	b, foreign, freed := alloc(t, d, 64), alloc(t, other, 64), alloc(t, d, 64)
	require.NoError(t, d.Free(freed))
	past := backend.OnDevice(backend.U8, b.Addr()+1, 64)
	k := d.Default()
	for name, err := range map[string]error{
		"of another device": k.Zero(foreign),
		"freed":             k.Zero(freed),
		"past the end":      k.Zero(past),
		"before":            k.Zero(backend.OnDevice(backend.U8, b.Addr()-1, 4)),
		"host memory":       k.Zero(backend.Of(make([]byte, 4))),
		"moved":             k.Move(past, backend.Of(make([]byte, 64))),
		"freed twice":       d.Free(freed),
		"middle freed":      d.Free(b.Slice(1, 3)),
	} {
		require.Fails(t, name, err, backend.ErrArgument)
	}
	again := alloc(t, d, 64)
	require.Check(t, again.Addr() != freed.Addr(), "an address was used twice")
	err := k.Zero(backend.Buffer{})
	require.Check(t, err == nil, "nothing: %v", err)
}

func TestAllocationsAreAlignedZeroedAndCounted(t *testing.T) {
	d := newDevice(t)
	for _, n := range []int{0, 1, 255, 256, 257, 1 << 20} {
		b := alloc(t, d, n)
		out := make([]byte, n)
		require.NoError(t, d.Default().Move(backend.Of(out), b))
		for i, x := range out {
			require.That(t, x == 0, "byte %d of %d is %d", i, n, x)
		}
		if b.Addr()%align != 0 || b.Len() != n || !b.Device() {
			t.Errorf("alloc of %d: %#x, %d bytes", n, b.Addr(), b.Len())
		}
	}
	if n, nbytes := d.Live(); n != 6 || nbytes != 769+1<<20 {
		t.Errorf("%d allocations of %d bytes are live", n, nbytes)
	}
	require.Fails(t, "Alloc", require.Err(d.Alloc(-1)), backend.ErrArgument)
}

func TestCloseReportsLeaks(t *testing.T) {
	d := require.Value(New(host.Device{}))(t)
	require.NoError(t, require.Err(d.Alloc(100)))
	require.Fails(t, "Close", d.Close(), "1 allocations of 100 bytes")
	require.Report(t, d.Close())
	require.Fails(t, "Alloc", require.Err(d.Alloc(1)), backend.ErrClosed)
}

func TestQueuesAreOfOneDevice(t *testing.T) {
	d, other := newDevice(t), newDevice(t)
	for name, q := range map[string]backend.Queue{"another device": other.Default(),
		"the host": host.Device{}.Default()} {
		require.Fails(t, name, require.Err(d.inner(q)), backend.ErrArgument)
	}
}

// TestCommunicator runs the suite of every communicator with operands that the
// host cannot touch.
func TestCommunicator(t *testing.T) {
	d := newDevice(t)
	k := d.Default()
	backendtest.RunWrapper(t, backendtest.Options{
		New: func(size int, timeout time.Duration) (*backendtest.Group, error) {
			wrap := func(c backend.Communicator) backend.Communicator { return Over(c, d) }
			return backendtest.Over(host.Backend{}, wrap)(size, timeout)
		},
		Sizes: []int{1, 3},
		Copy:  k.Move,
	})
}
