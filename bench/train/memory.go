package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"

	"gorgonia.org/gorgonia"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/vm"
)

// planned is a GPT that fits into memory by its plan.
type planned struct {
	Ranks      int     `json:"ranks"`
	Batch      int     `json:"batch"`
	Shards     int     `json:"shards"`
	Again      bool    `json:"again"` // steps may be rematerialized
	Layers     int     `json:"layers"`
	Parameters int     `json:"parameters"`
	MiB        int64   `json:"mib"`
	Steps      int     `json:"steps_again"`
	Extra      float64 `json:"extra"`
}

// writeLargest writes, for GPTs of width 2048 that fit into --memory, how many layers the largest
// ones have: without rematerialized steps, and with them. Nothing runs.
func (o options) writeLargest(w io.Writer) error {
	ranks, batches := []int{1, 2}, []int{1, 4, 16}
	if o.ranks > 1 {
		ranks = []int{o.ranks}
	}
	if o.batch > 0 {
		batches = []int{o.batch}
	}
	for _, n := range ranks {
		for _, batch := range batches {
			p := planned{Ranks: n, Batch: batch, Shards: o.shards}
			for _, p.Again = range []bool{false, true} {
				if err := p.search(o.memory); err != nil {
					return err
				}
				if err := json.NewEncoder(w).Encode(p); err != nil {
					return err
				}
			}
		}
	}
	return nil
}

// search finds how many layers fit, at least as many as before.
func (p *planned) search(bytes int) error {
	most := -1 // of which so many more do not fit
	for step := 1; step > 0; {
		if most >= 0 && p.Layers+step >= most {
			step /= 2
			continue
		}
		s, err := p.summary(p.Layers+step, bytes)
		if errors.Is(err, backend.ErrArgument) || errors.Is(err, backend.ErrUnsupported) {
			return err
		}
		if err != nil || s.Memory.Total() > int64(bytes) {
			most, step = p.Layers+step, step/2
			continue
		}
		p.Layers += step
		p.Parameters, p.MiB = s.Parameters, s.Memory.Total()>>20
		p.Steps, p.Extra = s.Memory.Rematerialized, s.Memory.Extra
		if most < 0 {
			step *= 2
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
	options := []vm.Option{vm.WithPrecision(vm.BF16), vm.WithSolver(adamw(), b.learnables...),
		vm.WithShards(stages[p.Shards])}
	if p.Again {
		options = append(options, vm.WithMemory(bytes))
	}
	return vm.Summarize(b.graph, p.Ranks, options...)
}
