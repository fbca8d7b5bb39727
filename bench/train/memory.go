package main

import (
	"encoding/json"
	"fmt"
	"io"

	"gorgonia.org/gorgonia"

	"github.com/euryale-ml/euryale/vm"
)

// planned is a GPT that fits into memory by its plan.
type planned struct {
	Ranks      int     `json:"ranks"`
	Batch      int     `json:"batch"`
	Again      bool    `json:"again"` // steps may run again
	Layers     int     `json:"layers"`
	Parameters int     `json:"parameters"`
	MiB        int64   `json:"mib"`
	Steps      int     `json:"steps_again"`
	Extra      float64 `json:"extra"`
}

// largest writes, for GPTs of width 2048 whose layers all fit into so many bytes, how many layers
// the largest ones have: without steps that run again, and with them. Nothing runs.
func largest(w io.Writer, bytes int) error {
	for _, p := range []planned{{Ranks: 1, Batch: 1}, {Ranks: 1, Batch: 4}, {Ranks: 1, Batch: 16},
		{Ranks: 2, Batch: 1}, {Ranks: 2, Batch: 4}, {Ranks: 2, Batch: 16}} {
		for _, p.Again = range []bool{false, true} {
			var best vm.Summary
			for layers := 1; ; layers++ {
				s, err := p.summary(layers, bytes)
				if err != nil || s.Memory.Total() > int64(bytes) {
					break
				}
				best, p.Layers = s, layers
			}
			p.Parameters, p.MiB = best.Parameters, best.Memory.Total()>>20
			p.Steps, p.Extra = best.Memory.Again, best.Memory.Extra
			if err := json.NewEncoder(w).Encode(p); err != nil {
				return err
			}
			p.Layers = 0
		}
	}
	return nil
}

// summary plans a GPT.
func (p planned) summary(layers, bytes int) (vm.Summary, error) {
	b := newBuilder(0)
	b.unset = true
	loss := transformer{vocabulary: 50304, batch: p.Batch, context: 1024, width: 2048, heads: 16,
		layers: layers}.loss(b)
	if b.err != nil {
		return vm.Summary{}, b.err
	}
	if _, err := gorgonia.Grad(loss, b.learnables...); err != nil {
		return vm.Summary{}, fmt.Errorf("%d layers: %w", layers, err)
	}
	options := []vm.Option{vm.WithPrecision(vm.BF16), vm.WithSolver(adamw(), b.learnables...)}
	if p.Again {
		options = append(options, vm.WithMemory(bytes))
	}
	return vm.Summarize(b.graph, p.Ranks, options...)
}
