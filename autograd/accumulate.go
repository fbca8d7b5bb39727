package autograd

import (
	"fmt"
	"strings"

	"gorgonia.org/gorgonia"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/residence"
	"github.com/euryale-ml/euryale/kernels"
)

// Accumulate makes one step of n micro-batches, for batches whose activations do not fit
// into memory. It calls run n times; each call runs the graph once:
//
//	err := dp.Accumulate(4, func(i int) error {
//		m.feed(micro[i])
//		defer vm.Reset()
//		return vm.RunAll()
//	})
//	grads, err := dp.Sync()
//	err = solver.Step(grads)
//
// Sync then returns the mean over the ranks (with [WithSum] the sum) of the sum over the
// micro-batches, like PyTorch's no_sync. For the mean over all samples, divide the loss by n in the
// graph. Nothing is sent before the last micro-batch; with hooks, its buckets leave during its
// backward pass. Gradients are added in the dtype of the parameters. If they are sent rounded, they
// are rounded once.
//
// Accumulate works with and without hooks, BindDualValues, the lisp machine and
// [DataParallel.UseGradients]. Without it, several RunAll before a Sync do not accumulate:
// with hooks they are an error, with BindDualValues Gorgonia adds the gradients, and otherwise
// each RunAll overwrites the gradients of the one before.
//
// From Accumulate until Sync a step is in progress: Save, Load, Average and another Accumulate
// return ErrArgument. So does Close, but it still closes d. The step uses the rate that the solver
// has when it gets the gradients.
//
// Cost: one addition of all gradients for each micro-batch except the last, in the memory of
// the buckets.
//
// Errors: ErrArgument if n is not positive, if a step is in progress, or if hooks have caught
// nothing in a micro-batch; the first error of run, or of [DataParallel.Err] if a hook caused
// it. After an error the accumulated gradients are discarded.
func (d *DataParallel) Accumulate(n int, run func(i int) error) error {
	d.mu.Lock()
	err := d.usable()
	if err == nil {
		if err = d.betweenSteps(); err == nil && n < 1 {
			err = fmt.Errorf("%w: %d micro-batches: there must be at least 1",
				backend.ErrArgument, n)
		}
		if t := d.tree; err == nil && t != nil && n != t.share {
			err = fmt.Errorf("%w: %d micro-batches: a step has %d, of which this rank runs %d "+
				"(WithTree)", backend.ErrArgument, n, t.all, t.share)
		}
		if err == nil && d.tree == nil {
			use := d.use
			use.Option, use.Runs = "Accumulate", n
			err = checkTerms(d.params, use)
		}
		if err != nil {
			err = d.named(fmt.Errorf("accumulate: %w", err))
		}
	}
	d.mu.Unlock()
	for i := 0; i < n && err == nil; i++ {
		err = d.microBatch(i, n, run)
	}
	return err
}

// StepInProgress returns the error of a call in the middle of a step whose gradients several runs
// accumulate: an ErrArgument that says what to do first, or nil if of is 0. synced says that Sync
// ends the step, rather than the last run.
func StepInProgress(done, of int, synced bool) error {
	if of == 0 {
		return nil
	}
	var first []string
	if done < of {
		first = append(first, fmt.Sprintf("run the other %d", of-done))
	}
	if synced {
		first = append(first, "call Sync")
	}
	return fmt.Errorf("%w: a step is in progress, with %d of %d micro-batches accumulated: %s "+
		"first", backend.ErrArgument, done, of, strings.Join(first, " and "))
}

// microBatch runs one micro-batch. It holds the gradients of all but the last.
func (d *DataParallel) microBatch(i, n int, run func(i int) error) error {
	last := i == n-1
	d.mu.Lock()
	d.holding = !last
	d.initial = false
	d.done, d.of = i, n
	if d.tree != nil {
		d.tree.run, d.tree.begun = i, i+1
	}
	d.mu.Unlock()
	err := run(i)
	d.mu.Lock()
	defer d.mu.Unlock()
	d.holding = false
	if d.err != nil {
		return d.err
	}
	if err == nil && !last {
		err = residence.Bound(d.comm.Device(), d.holdAll)
	}
	if err != nil {
		if d.leaving == 0 { // otherwise other ranks have received a part of this step
			d.empty()
		}
		return d.named(fmt.Errorf("micro-batch %d: %w", i, err))
	}
	d.done = i + 1
	return nil
}

// holdAll ends a micro-batch: it adds the gradients that hooks have not caught.
func (d *DataParallel) holdAll() error {
	if err := d.prepare(); err != nil {
		return err
	}
	if err := d.computed(); err != nil {
		return err
	}
	hooks, caught := false, false
	for _, p := range d.params {
		var g gorgonia.Value
		has := p.full
		if p.hooked != nil {
			hooks, caught = true, caught || p.full
			p.full = false // for the next micro-batch
		} else {
			g = p.gradient()
		}
		if g != nil || !has && d.tree.adds() { // which counts zeros
			if err := p.hold(g); err != nil {
				return err
			}
		}
	}
	d.clear()
	if hooks && !caught {
		return fmt.Errorf("%w: the hooks have caught no gradient: run the graph once in each "+
			"micro-batch, and Reset the machine after it", backend.ErrArgument)
	}
	return nil
}

// hold adds a gradient to those in the slot.
func (p *param) hold(g gorgonia.Value) error {
	if p.tree.adds() {
		return p.add(p.tree, g)
	}
	room := p.slot
	if p.held {
		room = backend.Buffer{}
	}
	src, err := p.contiguous(g, room)
	if err != nil {
		return fmt.Errorf("%w: gradient of %v %w", backend.ErrArgument, p, err)
	}
	if !p.held {
		p.held = true
		copy(p.slot.Bytes(), src.Bytes())
		return nil
	}
	return kernels.Host{}.Reduce(backend.Sum, p.slot, p.slot, src)
}
