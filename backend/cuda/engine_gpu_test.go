//go:build gpu

package cuda

import (
	"errors"
	"fmt"
	"sync"
	"testing"

	"gorgonia.org/gorgonia"
)

// gpuEngine returns an engine on its own queue.
func gpuEngine(t testing.TB, d *Device) *Engine {
	t.Helper()
	e, err := NewEngine(d, newQueueOf(t, d))
	ok(t, err)
	t.Cleanup(func() { ok(t, e.Close()) })
	return e
}

func TestGPUGraphsGiveTheGradientsOfTheHost(t *testing.T) {
	d := openDevice(t, 0)
	for _, p := range programs {
		t.Run(p.name, func(t *testing.T) {
			want := p.onHost(t)
			e := gpuEngine(t, d)
			g := p.onDevice(t, e)
			m := must[*Machine](t)(e.NewMachine(g.ExprGraph))
			defer m.Close()
			for range 3 {
				before := e.Stats()
				ok(t, m.RunAll())
				after := e.Stats()
				if copies := after.Uploads + after.Downloads - before.Uploads - before.Downloads; copies != 0 {
					t.Errorf("%d copies of tensors between host and device", copies)
				}
				p.compare(t, g.results(t, e), want)
				m.Reset()
			}
		})
	}
}

func TestGPUStockMachineRuns(t *testing.T) {
	p := programs[1]
	want := p.onHost(t)
	e := gpuEngine(t, openDevice(t, 0))
	g := p.onDevice(t, e)
	m := gorgonia.NewTapeMachine(g.ExprGraph, gorgonia.WithEngine(e))
	defer m.Close()
	for range 2 {
		e.Reset()
		ok(t, m.RunAll())
		p.compare(t, g.results(t, e), want)
		m.Reset()
	}
}

func TestGPUMemoryIsFlatOverAThousandRuns(t *testing.T) {
	d := openDevice(t, 0)
	e := gpuEngine(t, d)
	p := layerNorm(t)
	g := p.onDevice(t, e)
	m := must[*Machine](t)(e.NewMachine(g.ExprGraph))
	defer m.Close()
	ok(t, m.RunAll())
	m.Reset()
	ok(t, e.drain())
	before := d.MemoryStats()
	free, _, err := d.FreeMemory()
	ok(t, err)
	for range 1000 {
		ok(t, m.RunAll())
		m.Reset()
	}
	if after := d.MemoryStats(); after != before {
		t.Errorf("%+v, then %+v", before, after)
	}
	if left, _, err := d.FreeMemory(); err != nil || left < free-1<<20 {
		t.Errorf("%d bytes were free, then %d (%v)", free, left, err)
	}
	if s := e.Stats(); s.Downloads != 0 || s.Uploads != int64(len(p.inputs)) {
		t.Errorf("%+v after 1,000 runs", s)
	}
}

func layerNorm(t *testing.T) program {
	t.Helper()
	for _, p := range programs {
		if p.name == "LayerNorm" {
			return p
		}
	}
	t.Fatal("no such program")
	return program{}
}

func TestGPUGraphsRunOnAllDevicesAtOnce(t *testing.T) {
	needGPU(t)
	p := layerNorm(t)
	want := p.onHost(t)
	devices := must[[]*Device](t)(Devices())
	t.Cleanup(func() {
		for _, d := range devices {
			ok(t, d.Close())
		}
	})
	machines, graphs, engines := make([]*Machine, len(devices)), make([]graph, len(devices)), make([]*Engine, len(devices))
	for i, d := range devices { // Gorgonia builds one graph at a time
		engines[i] = gpuEngine(t, d)
		graphs[i] = p.onDevice(t, engines[i])
		machines[i] = must[*Machine](t)(engines[i].NewMachine(graphs[i].ExprGraph))
	}
	errs := make([]error, len(devices))
	var all sync.WaitGroup
	for i, m := range machines {
		all.Go(func() {
			for range 50 {
				if err := m.RunAll(); err != nil {
					errs[i] = fmt.Errorf("%s: %w", devices[i].Name(), err)
					return
				}
				m.Reset()
			}
		})
	}
	all.Wait()
	ok(t, errors.Join(errs...))
	for i := range devices {
		p.compare(t, graphs[i].results(t, engines[i]), want)
		ok(t, machines[i].Close())
	}
}
