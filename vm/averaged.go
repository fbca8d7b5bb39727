package vm

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"slices"

	"github.com/euryale-ml/euryale/autograd/solver"
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/residence"
	"github.com/euryale-ml/euryale/internal/stock"
)

// Averaged calls f while learnables whose solver is a solver.EMA have their moving averages as
// values: to evaluate on another machine, or to save them with autograd.SaveWeights. Afterwards
// learnables have their former values, bit for bit. In f the machine refuses to run, to save and to
// load. Without such a solver Averaged only calls f, which must call Pull itself to read learnables
// on the host; before the first step there are no averages, and learnables stay as they are.
//
// Cost: a copy of the learnables and the averages from the device, two copies to it, and a
// comparison on the host.
//
// With [WithShards] it is collective, and first pulls the learnables that the ranks shard.
//
// Errors: those of f; those of the device; ErrArgument in the middle of a step, and for a learnable
// that f has changed, by autograd.LoadWeights for instance: it has its former value again.
func (m *Machine) Averaged(f func() error) (err error) {
	if err := backend.Given("vm: Averaged", "f", f); err != nil {
		return err
	}
	if m.solver == nil {
		return f()
	}
	if err := m.micro.between(); err != nil {
		return fmt.Errorf("vm: Averaged: %w", err)
	}
	groups := []solver.Group{{Solver: m.solver.solver, Params: m.solver.learnables}}
	if several, ok := m.solver.solver.(*solver.Groups); ok {
		groups = several.List()
	}
	groups = slices.DeleteFunc(groups, func(g solver.Group) bool {
		_, ok := g.Solver.(*solver.EMA)
		return !ok
	})
	if m.averaged {
		return fmt.Errorf("vm: Averaged: %w: learnables are averages already", backend.ErrArgument)
	}
	if m.DataParallel() != nil && len(groups) > 0 {
		exchange := cmp.Or(m.parallel, m.alone).exchange
		m.averaged = true
		exchange.Averaged(true)
		defer func() {
			m.averaged = false
			exchange.Averaged(false)
		}()
	}
	if len(groups) > 0 || m.solver.shards() && slices.Contains(m.solver.fullySharded, true) {
		if err := m.Pull(m.solver.learnables...); err != nil { // f may read all of them on the host
			return err
		}
	}
	var restore []func()
	var changed []func() error
	defer func() {
		for _, c := range changed {
			err = errors.Join(err, c())
		}
		for _, g := range groups { // what f has uploaded belongs to the host again
			err = errors.Join(err, m.Pull(g.Params...))
		}
		for _, r := range restore {
			r()
		}
	}()
	for _, g := range groups {
		averages, err := g.Solver.(*solver.EMA).Averages()
		if err != nil {
			return err
		}
		for i, a := range averages {
			if a, err = m.solver.allElements(m.parallel, g.Params[i], a); err != nil {
				return err
			}
			w, err := dense(g.Params[i].Value())
			if err != nil {
				return err
			}
			kept := residence.Clone(w)
			restore = append(restore, func() { residence.Write(w, kept) })
			residence.Write(w, a)
			changed = append(changed, func() error {
				if bytes.Equal(w.Bytes(), a.Bytes()) {
					return nil
				}
				return fmt.Errorf("vm: Averaged: %w: %s was changed inside it, and has its former "+
					"value again: load weights before or after Averaged", backend.ErrArgument,
					stock.Label(g.Params[i]))
			})
		}
	}
	return f()
}
