package autograd

import (
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"

	"gorgonia.org/gorgonia"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/safetensors"
	"github.com/euryale-ml/euryale/kernels"
)

// CheckFinite returns an error on every rank if the model has a NaN or an infinity on one of them:
// in parameters, moving averages of batch norms, the residuals of a compression, and what a solver
// keeps, which nil leaves out. The error names the tensor, the element and the step. Variables of
// [WithFrozen] may be infinite, as masks are, but not NaN. It is collective. Call it before a model
// is called good: the loss of a step may be finite while its gradient is not.
//
// Save, SaveAsync and [SaveWeights] refuse such a model by the same rule.
//
// Cost: a pass over the model, after copying what is on a device to the host, and an all-gather of
// 32 bytes.
//
// Errors, on all ranks: an element that is not finite; those of Save that occur before files are
// written.
func (d *DataParallel) CheckFinite(solver gorgonia.Solver) error {
	return d.collectively(backend.ForCheck, "check for NaN", func() error {
		return d.agree("", errors.Join(d.pull(!d.sharded), d.checkFinite(solver)))
	})
}

func (d *DataParallel) checkFinite(solver gorgonia.Solver) error {
	all := map[string]stored{}
	if c, ok := d.compression(); ok {
		state, err := c.State()
		if err != nil {
			return err
		}
		add(all, state)
	}
	d.keepTables(all)
	if solver == nil {
		solver = &gorgonia.VanillaSolver{} // which keeps nothing
	}
	model, err := d.modelState(solver)
	if err != nil {
		return err
	}
	regions, err := d.regionsIn(model, solver)
	if err != nil {
		return err
	}
	rule, name := finiteness{d.model.constant, map[string]region{}}, d.naming(model, solver)
	for key, t := range model {
		if r, ok := regions[key]; ok {
			t = vector(r.shard(t.Data))
			rule.shards[name(key)] = r
		}
		all[name(key)] = t
	}
	for _, name := range slices.Sorted(maps.Keys(all)) {
		if err := rule.check(name, all[name]); err != nil {
			return remarks{step: fmt.Sprint(d.saves.steps)}.diverged(err)
		}
	}
	return nil
}

// regionsIn returns, by key, which elements of a model this rank has, where ranks divide them: the
// others are not of this step.
func (d *DataParallel) regionsIn(model map[string]stored, solver gorgonia.Solver) (
	map[string]region, error) {
	if !d.sharded {
		return nil, nil
	}
	of := map[string]region{}
	for _, p := range d.params {
		of[p.key()] = d.regionOf(p)
	}
	owners, err := d.owners(solver)
	for key := range model {
		if p := owners[key]; p != nil {
			of[key] = d.regionOf(p)
		}
	}
	return of, err
}

// finiteness is the rule of what may be written and loaded: all that trains, and all that is kept
// for it, is finite. What nothing trains may be infinite.
type finiteness struct {
	constants func(name string) bool // of a tensor in a file that nothing trains; nil for none
	shards    map[string]region      // where the elements of shards belong
}

// constant reports whether nothing trains a tensor of a file.
func (v *inventory) constant(name string) bool {
	return slices.ContainsFunc(v.frozen, func(p piece) bool { return p.file == name })
}

func (f finiteness) infinities(name string) bool {
	return f.constants != nil && f.constants(name)
}

// check returns an error that names the first element that is not finite.
func (f finiteness) check(name string, t stored) error {
	return f.refuse(name, t, safetensors.NotFinite(t.Data, f.infinities(name)))
}

// sum is check, and adds the bytes to a checksum in the same pass.
func (f finiteness) sum(to io.Writer, name string, t stored) error {
	const chunk = 1 << 16 // elements, which stay in the cache
	infinities := f.infinities(name)
	for at := 0; at < t.Data.Len(); at += chunk {
		part := t.Data.Slice(at, min(at+chunk, t.Data.Len()))
		if i := safetensors.NotFinite(part, infinities); i >= 0 {
			return f.refuse(name, t, at+i)
		}
		to.Write(part.Bytes())
	}
	return nil
}

// refuse returns an error unless i, the place of an element that is not finite, is negative.
func (f finiteness) refuse(name string, t stored, i int) error {
	if i < 0 {
		return nil
	}
	value := make([]float64, 1)
	if err := (kernels.Host{}).Cast(backend.Of(value), t.Data.Slice(i, i+1)); err != nil {
		return err
	}
	shape, at := t.Shape, i
	if r, ok := f.shards[name]; ok {
		shape = r.Shape
		r.meet(whole(shape), func(from, to, n int) {
			if from <= i && i < from+n {
				at = to + i - from
			}
		})
	}
	what := fmt.Sprintf("%q", name)
	if of, is := strings.CutPrefix(name, solverPrefix); is {
		what = fmt.Sprintf("the solver's %q", of)
	}
	return fmt.Errorf("element %v of %s is %v", safetensors.Indices(at, shape), what, value[0])
}
