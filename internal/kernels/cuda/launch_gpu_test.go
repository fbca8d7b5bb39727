//go:build gpu

package cuda

import (
	"errors"
	"os"
	"runtime"
	"slices"
	"testing"
	"unsafe"

	"gorgonia.org/cu"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/testing/require"
)

// gpu is the first device of the machine.
type gpu struct {
	Launcher
	stream cu.Stream
	addr   cu.DevicePtr
	nbytes int
}

// openGPU makes a context current on this thread, with an arena and the kernels
// on a stream. Without a device the test is skipped, or fails where
// REQUIRE_GPU=1.
func openGPU(t *testing.T, nbytes int) *gpu {
	t.Helper()
	n, err := cu.NumDevices()
	if err != nil || n == 0 {
		require.That(t, os.Getenv("REQUIRE_GPU") != "1",
			"no GPU, and REQUIRE_GPU=1: %d devices, %v", n, err)
		t.Skipf("no GPU: %d devices, %v", n, err)
	}
	runtime.LockOSThread()
	t.Cleanup(runtime.UnlockOSThread)
	check := func(err error) {
		if err != nil {
			t.Helper()
			t.Fatal(err)
		}
	}
	ctx, err := cu.Device(0).MakeContext(cu.SchedAuto)
	check(err)
	t.Cleanup(func() {
		require.NoError(t, ctx.Destroy())
	})
	loaded, err := Load()
	check(err)
	s, err := cu.MakeStream(cu.NonBlocking)
	check(err)
	addr, err := cu.MemAlloc(int64(nbytes))
	check(err)
	return &gpu{Launcher: loaded.On(s).launcher, stream: s, addr: addr, nbytes: nbytes}
}

func (g *gpu) Arena() (uintptr, int) { return uintptr(g.addr), g.nbytes }

func (g *gpu) Write(data []byte) error {
	if len(data) == 0 {
		return nil
	}
	return errors.Join(g.stream.Synchronize(),
		cu.MemcpyHtoD(g.addr, unsafe.Pointer(unsafe.SliceData(data)), int64(len(data))),
		cu.Synchronize())
}

func (g *gpu) Read(data []byte) error {
	if err := g.stream.Synchronize(); err != nil || len(data) == 0 {
		return err
	}
	return cu.MemcpyDtoH(unsafe.Pointer(unsafe.SliceData(data)), g.addr, int64(len(data)))
}

func TestGPUComputesWhatTheHostDoes(t *testing.T) {
	testEach(t, map[string]func(*testing.T, machine){
		"zero": testZero, "copy": testCopy, "copy2d": testCopy2D, "cast": testCast,
		"divide": testDivide, "widen": testWiden, "notfinite": testNotFinite,
	})
}

// These kernels take long on the emulated driver, and other tests run the same sources on the host.
func TestGPUComputesWhatTheHostDoesUnemulatedOnGPU(t *testing.T) {
	testEach(t, map[string]func(*testing.T, machine){
		"gather": testGather, "reduce": testReduce, "select": testSelect, "combine": testCombine,
	})
}

// testEach runs tests on goroutines of their own, so each opens the device itself.
func testEach(t *testing.T, tests map[string]func(*testing.T, machine)) {
	for name, test := range tests {
		t.Run(name, func(t *testing.T) { test(t, openGPU(t, 64<<20)) })
	}
}

func TestGPUErrorsNameTheKernel(t *testing.T) {
	g := openGPU(t, 1<<10)
	err := g.Launch(Launch{Entry: Entry{Verb: "cosine", Type: "f32"}})
	require.Check(t, err != nil, "an unknown kernel was launched")
	c := Launch{Entry: Entry{Verb: "fill", Type: "b8"}, Grid: Size{1, 1}, Block: Size{4096, 1}}
	c.pass(uint64(g.addr), 1, 0)
	if err := g.Launch(c); err == nil {
		t.Error("a block of 4096 threads was launched")
	}
}

// TestGPUCompilesOnlyWhatHasNoMachineCode: on devices of compute capability 8.x and 9.0 the driver
// compiles no family, and on others, or where it refuses machine code or other texts are asked for,
// every one.
func TestGPUCompilesOnlyWhatHasNoMachineCode(t *testing.T) {
	openGPU(t, 1<<10)
	own := require.Value(capability())(t)
	all := slices.Concat(QueueFamilies(), PeerFamilies(true), AttentionFamilies(),
		[]string{Products, Convolutions, Images, IndexedRows, Recurrences})
	slices.Sort(all)
	check := func(kernels string, want []string) {
		t.Helper()
		for range 3 {
			loaded, err := load(kernels)
			if err == nil {
				err = errors.Join(loaded.Prepare(all...), loaded.Prepare(all...))
			}
			require.NoError(t, err)
			got := loaded.Families()
			require.Check(t, slices.Equal(got, all), "%v are loaded, want %v", got, all)
			if got := slices.Sorted(slices.Values(loaded.compiled)); !slices.Equal(got, want) {
				t.Errorf("EURYALE_KERNELS=%q: the driver has compiled %v, want %v", kernels, got,
					want)
			}
			require.NoError(t, loaded.Unload())
		}
	}
	check("sm_70", all)
	if own < 80 || own > 90 {
		check("", all)
		return
	}
	check("", nil)
	if os.Getenv("EMULATED_DEVICES") != "" {
		t.Setenv("EMULATED_MACHINE_CODE", "refused")
		check("", all)
	}
}

// BenchmarkLaunch measures the host's time for a launch, with programmatic dependent launch and
// without.
func BenchmarkLaunch(b *testing.B) {
	n, err := cu.NumDevices()
	if err != nil || n == 0 {
		b.Skip("no GPU")
	}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	ctx := require.Value(cu.Device(0).MakeContext(cu.SchedAuto))(b)
	defer ctx.Destroy()
	loaded := require.Value(Load())(b)
	s := require.Value(cu.MakeStream(cu.NonBlocking))(b)
	addr := require.Value(cu.MemAlloc(1 << 10))(b)
	x := backend.OnDevice(backend.F32, uintptr(addr), 256)
	require.NoError(b, loaded.Prepare("divide"))
	plain := &Loaded{context: loaded.context, functions: map[Entry]*function{}}
	for e, f := range loaded.functions {
		plain.functions[e] = &function{e, f.handle, traits{}}
	}
	for _, way := range []struct {
		name   string
		loaded *Loaded
	}{{"pdl", loaded}, {"plain", plain}, {"pdl", loaded}, {"plain", plain}} {
		k := way.loaded.On(s)
		b.Run(way.name, func(b *testing.B) {
			runtime.LockOSThread() // this is another goroutine
			defer runtime.UnlockOSThread()
			require.NoError(b, cu.SetCurrentContext(ctx))
			b.ReportAllocs()
			for i := 1; b.Loop(); i++ {
				require.NoError(b, k.Divide(x, x, 1))
				if i%512 == 0 {
					b.StopTimer()
					require.NoError(b, s.Synchronize())
					b.StartTimer()
				}
			}
		})
	}
}
