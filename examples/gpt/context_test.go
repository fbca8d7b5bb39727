package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime/debug"
	"slices"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/backend/fakedevice"
	"github.com/euryale-ml/euryale/backend/host"
	"github.com/euryale-ml/euryale/internal/testing/testranks"
	"github.com/euryale-ml/euryale/rendezvous"
)

// lazy is the host with memory that takes none until it is written: arenas of plans that nobody runs.
type lazy struct{ host.Device }

func (lazy) Alloc(nbytes int) (backend.Buffer, error) {
	m, err := unix.Mmap(-1, 0, max(nbytes, 1), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE|unix.MAP_NORESERVE)
	return backend.Of(m[:min(len(m), nbytes)]), err
}

func (lazy) Free(b backend.Buffer) error {
	m := b.Bytes()
	return unix.Munmap(m[:max(len(m), 1)])
}

// measured is a rank on a device that counts its memory.
type measured struct {
	backend.Communicator
	device *fakedevice.Device
}

func (m *measured) Close() error { return errors.Join(m.Communicator.Close(), m.device.Close()) }

// peak returns the most bytes that a rank's device has held at a time: those of arenas, learnables, the solver, gradients,
// inputs, and what operations need besides.
func peak(ranks int, do func(comm backend.Communicator, build sync.Locker) error) (int, error) {
	var build sync.Mutex
	peaks := make([]int, ranks)
	errs := testranks.Run(ranks, func(w *rendezvous.World) (*measured, error) {
		comm, err := host.New().Connect(context.Background(), w)
		if err != nil {
			return nil, err
		}
		d, err := fakedevice.New(lazy{})
		if err != nil {
			return nil, errors.Join(err, comm.Close())
		}
		return &measured{fakedevice.Over(comm, d), d}, nil
	}, func(m *measured) error {
		err := do(m.Communicator, &build)
		peaks[m.Rank()] = m.device.Peak()
		return err
	})
	return slices.Max(peaks), testranks.Join(errs)
}

// trained returns the bytes that a training takes until it has done some steps: with none, those that are planned.
func trained(cfg config, steps int) (int, error) {
	return peak(cfg.sizes.SP, func(comm backend.Communicator, build sync.Locker) error {
		t, err := newTrainer(comm, build, cfg, io.Discard)
		if err != nil {
			return err
		}
		for step := range steps {
			err = errors.Join(err, t.step(step))
		}
		return errors.Join(err, t.close())
	})
}

// longest returns the longest context that fits memory, to one part in 500, and its bytes. Bytes grow by nearly as much for each
// position, so a secant finds it.
func longest(memory int, cfg config) (context, needed int, err error) {
	context = cfg.context
	last, lastNeeded := 0, 0
	for range 10 {
		cfg.context = context
		if needed, err = trained(cfg, 0); err != nil || needed <= memory && needed > memory-memory/500 {
			return context, needed, err
		}
		if last == 0 {
			last, lastNeeded, context = context, needed, context/2
			continue
		}
		slope := float64(needed-lastNeeded) / float64(context-last)
		last, lastNeeded = context, needed
		context += int((float64(memory-needed) - float64(memory)/1000) / slope)
	}
	return 0, 0, fmt.Errorf("no context has nearly %d bytes: %d has %d", memory, context, needed)
}

// TestLongestContext: W ranks that divide the positions fit contexts of 0.95 W times one rank's at least, and training
// needs no more memory than was planned. Learned positions, which every rank has, fit less.
func TestLongestContext(t *testing.T) {
	model, memory, first := "--layers 1 --width 64 --heads 4", 8<<20, 1<<10
	full := os.Getenv("EURYALE_FULL") == "1"
	kinds := []string{"sinusoidal"}
	if full {
		model, memory, first = "--layers 8 --width 512 --heads 4", 4<<30, 20<<10
		kinds = append(kinds, learned)
		// Trainers that have closed would wait for the collector in as much memory as those at work: 8 GiB instead of 4.
		defer debug.SetMemoryLimit(debug.SetMemoryLimit(3 << 30))
	}
	text := filepath.Join(t.TempDir(), "text")
	if err := os.WriteFile(text, bytes.Repeat([]byte("There is no time like the present.\n"), 2*first), 0o666); err != nil {
		t.Fatal(err)
	}
	for _, positions := range kinds {
		var one config
		for _, W := range []int{1, 2, 4} {
			cfg, err := parseFlags(strings.Fields(fmt.Sprintf("--device gpu --precision bf16 --batch 1 --data %s --sp %d --positions %s --context %d %s", text, W, positions, W*first, model)))
			if err != nil {
				t.Fatal(err)
			}
			var needed int
			if cfg.context, needed, err = longest(memory, cfg); err != nil {
				t.Fatal(err)
			}
			if W == 1 {
				one = cfg
			}
			growth := float64(cfg.context) / float64(one.context*W)
			t.Logf("%-10s W=%d context=%d MiB=%d growth=%.3f W", positions, W, cfg.context, needed>>20, growth)
			if growth < 0.95 && positions != learned {
				t.Errorf("%d ranks fit a context of %d, one rank %d", W, cfg.context, one.context)
			}
			if full || W != 2 {
				continue
			}
			taken, err := trained(cfg, 2)
			if err != nil || taken != needed {
				t.Errorf("training takes %d bytes, %d were planned: %v", taken, needed, err)
			}
		}
	}
}
