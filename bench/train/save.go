package main

import (
	"slices"
	"time"

	"github.com/euryale-ml/euryale/internal/bench"
	"github.com/euryale-ml/euryale/vm"
)

// saves is how many checkpoints --save-async writes.
const saves = 5

// saved is what checkpoints cost.
type saved struct {
	// the training waits for SaveAsync, the median
	AsyncMS    float64 `json:"save_async_ms,omitempty"`
	AsyncMaxMS float64 `json:"save_async_max_ms,omitempty"` // the first one makes room for copies
	// a step while files may be written, the median
	AsyncUS float64 `json:"save_step_us,omitempty"`
	SaveMS  float64 `json:"save_ms,omitempty"` // a Save
}

// save measures SaveAsync, with steps in between, and then Save.
func (o options) save(m *vm.Machine, on rank) (s saved, err error) {
	if o.saveDir == "" {
		return s, nil
	}
	dp := m.DataParallel()
	var waits, steps []float64
	for range saves {
		if err := on.meet(); err != nil {
			return s, err
		}
		begin := time.Now()
		if err := dp.SaveAsync(o.saveDir, m.Solver(), nil); err != nil {
			return s, err
		}
		waits = append(waits, micros(time.Since(begin))/1e3)
		for range o.saveEvery {
			begin := time.Now()
			if err := m.RunAll(); err != nil {
				return s, err
			}
			steps = append(steps, micros(time.Since(begin)))
		}
	}
	// which waits for the last SaveAsync
	if err := dp.Save(o.saveDir, m.Solver(), nil); err != nil {
		return s, err
	}
	begin := time.Now()
	err = dp.Save(o.saveDir, m.Solver(), nil)
	s = saved{AsyncMaxMS: slices.Max(waits), AsyncMS: bench.Median(waits), AsyncUS: bench.Median(
		steps),
		SaveMS: micros(time.Since(begin)) / 1e3}
	return s, err
}
