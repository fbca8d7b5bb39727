package straggler

import (
	"runtime"
	"syscall"
	"testing"
	"time"

	"github.com/euryale-ml/euryale/internal/testing/require"
)

func noGPU() time.Duration { return 0 }

// sampleOf returns what a process notes of f.
func sampleOf(t *testing.T, f func()) Sample {
	t.Helper()
	p := Open(noGPU)
	defer p.Close()
	began := time.Now()
	f()
	s := Sample{Time: time.Since(began)}
	p.Sample(&s)
	return s
}

func TestCollectionsOfGarbageAreNoted(t *testing.T) {
	pointers := make([]*[]byte, 1<<19)
	for i := range pointers {
		pointers[i] = new([]byte)
	}
	s := sampleOf(t, func() {
		for range 3 {
			runtime.GC()
		}
	})
	runtime.KeepAlive(pointers)
	require.Check(t, s.Noted[GarbageCollection] >= s.Time/20 && s.Heap >= 12<<20 && s.CPU != 0,
		"of %v of collections it notes %+v", s.Time, s)
}

func TestPageFaultsAreNoted(t *testing.T) {
	const size = 32 << 20
	s := sampleOf(t, func() {
		memory := require.Value(syscall.Mmap(-1, 0, size, syscall.PROT_READ|syscall.PROT_WRITE,
			syscall.MAP_ANON|syscall.MAP_PRIVATE))(t)
		defer syscall.Munmap(memory)
		if err := syscall.Madvise(memory, syscall.MADV_NOHUGEPAGE); err != nil {
			t.Skip(err)
		}
		for i := 0; i < size; i += 4096 {
			memory[i] = 1
		}
	})
	require.Check(t, s.Noted[PageFaults] != 0 && s.Noted[PageFaults] <= s.CPU,
		"of %v, %v of the processor, it notes %+v", s.Time, s.CPU, s)
}

// A process that was stopped gets SIGCONT, by which it goes on.
func TestStopsAreNoted(t *testing.T) {
	p := Open(noGPU)
	defer p.Close()
	require.NoError(t, syscall.Kill(syscall.Getpid(), syscall.SIGCONT))
	for began := time.Now(); time.Since(began) < 10*time.Second; {
		time.Sleep(time.Millisecond) // the runtime passes signals on by a goroutine
		s := Sample{Time: 5 * ms, Exposed: 2 * ms}
		if p.Sample(&s); s.Noted[Stopped] > 0 {
			return
		}
	}
	t.Error("it notes no stop")
}
