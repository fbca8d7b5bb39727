package autograd

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"

	"gorgonia.org/gorgonia"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/residence"
	"github.com/euryale-ml/euryale/internal/stock"
	"github.com/euryale-ml/euryale/internal/terms"
)

// tape makes the steps of Gorgonia's machines. A step is one run: the machine leaves gradients at
// nodes, or hooks catch them, and Sync exchanges them. Machines of package vm have [Buckets].
type tape struct {
	*contents
	*notices
	fresh    *fresh
	unused   bool                    // parameters without a gradient count as zeros
	grads    []gorgonia.ValueGrad    // what Sync returns
	use      terms.Use               // of graphs of package layers
	leaving  int                     // the first bucket that has not left in this step
	prepared bool                    // the graphs have been looked at, and are in order
	shared   map[gorgonia.Value]bool // values that clear must not touch
}

// finishStep starts the buckets that have not left, and waits for all.
func (d *tape) finishStep() error {
	if err := d.prepare(); err != nil {
		return err
	}
	if err := d.complete(); err != nil {
		return err
	}
	if err := d.depart(); err != nil {
		return err
	}
	if err := d.arrive(); err != nil {
		return err
	}
	return d.mergeAverages(backend.ForSync)
}

// prepare examines the finished graphs, until they are in order.
func (d *tape) prepare() error {
	if d.prepared {
		return nil
	}
	if d.tree != nil {
		return fmt.Errorf("WithTree: %w: Sync makes a step of one run: use vm.WithTree, with "+
			"vm.WithSolver and vm.WithDataParallel", backend.ErrUnsupported)
	}
	if err := checkTerms(d.params, d.use); err != nil {
		return err
	}
	d.shared = map[gorgonia.Value]bool{}
	seen := map[*gorgonia.ExprGraph]bool{}
	for _, p := range d.params {
		if err := p.bypassed(); err != nil {
			return err
		}
		if g := p.node.Graph(); !seen[g] {
			seen[g] = true
			d.keepConstants(g)
			d.tellUntrained(g)
		}
	}
	err := d.model.find()
	d.prepared = err == nil
	return err
}

// bypassed returns an error if the graph uses a parameter beside its hook: that part of the
// gradient would be lost.
func (p *param) bypassed() error {
	if p.hooked == nil {
		return nil
	}
	users := p.node.Graph().To(p.node.ID())
	for users.Next() {
		user := users.Node().(*gorgonia.Node)
		if op, ok := user.Op().(gorgonia.SDOp); ok && user != p.hooked &&
			slices.Contains(op.DiffWRT(op.Arity()), true) {
			return fmt.Errorf("%w: %v has a hook, but %v uses it directly: use what Hook "+
				"returned everywhere", backend.ErrArgument, p, user.Op())
		}
	}
	return nil
}

// tellUntrained reports variables with a gradient that are neither parameters nor frozen, and whose
// gradient nothing reads: ranks do not exchange it.
func (d *tape) tellUntrained(g *gorgonia.ExprGraph) {
	var left []string
	for _, n := range g.AllNodes() {
		if n.Op() == nil && n.Deriv() != nil && g.To(n.Deriv().ID()).Len() == 0 &&
			!d.model.declares(n) {
			left = append(left, stock.Label(n))
		}
	}
	if len(left) > 0 {
		d.say(fmt.Sprintf("the graph has gradients of %s, which autograd.New was not given: "+
			"Sync does not return them; if that is meant, leave them out of gorgonia.Grad",
			strings.Join(left, ", ")))
	}
}

// keepConstants records the constants of a graph. A constant can be a gradient (d(x+c)/dc is 1),
// and all graphs of the process share it, so clear must not zero it.
func (d *tape) keepConstants(g *gorgonia.ExprGraph) {
	for _, n := range g.AllNodes() {
		if c, ok := n.Op().(interface{ Value() gorgonia.Value }); ok {
			d.shared[c.Value()] = true
		}
	}
}

// complete fills the slots that hooks have not filled.
func (d *tape) complete() error {
	left, err := d.reached()
	if err != nil {
		return err
	}
	for _, p := range d.params {
		if p.full {
			continue
		}
		if g := left[p]; g == nil {
			clear(p.slot.Bytes())
			p.arrived()
		} else if err := d.takeGradient(p, g); err != nil {
			return err
		}
	}
	d.clear()
	return nil
}

// reached returns the gradients that hooks have not caught, or an error for parameters
// that no gradient has reached.
func (d *tape) reached() (map[*param]gorgonia.Value, error) {
	if err := d.computed(); err != nil {
		return nil, err
	}
	left := map[*param]gorgonia.Value{}
	var unused []string
	for _, p := range d.params {
		if p.full {
			continue
		}
		if p.hooked == nil {
			if g := p.left(); g != nil {
				left[p] = g
			}
		}
		if left[p] == nil {
			unused = append(unused, p.String())
		}
	}
	switch {
	case len(unused) == len(d.params):
		return nil, fmt.Errorf("%w: no parameter has a gradient: call gorgonia.Grad when the "+
			"graph is built, RunAll before Sync, and Reset before the next RunAll",
			backend.ErrArgument)
	case len(unused) > 0 && !d.unused:
		return nil, fmt.Errorf("%w: no gradient has reached %s: the loss does not depend on it, "+
			"or gorgonia.Grad was not asked for it: do not give it to New, or pass WithUnused, "+
			"which counts it as zeros",
			backend.ErrArgument, strings.Join(unused, " and "))
	}
	return left, nil
}

// takeGradient takes the gradient of a step.
func (d *tape) takeGradient(p *param, g gorgonia.Value) error {
	d.fresh.over()
	if err := p.load(g); err != nil {
		return fmt.Errorf("%w: %w", backend.ErrArgument, err)
	}
	p.arrived()
	return nil
}

// depart starts the all-reduces of full buckets. Buckets leave in layout order, whatever the
// order in which they fill, so the order is the same on all ranks.
func (d *tape) depart() error {
	for ; d.leaving < len(d.buckets) && d.buckets[d.leaving].missing == 0; d.leaving++ {
		if len(d.queues) == 0 || d.partial.on {
			continue
		}
		b := d.buckets[d.leaving]
		work, err := b.start(d.gradComm, d.reduction(b))
		if err != nil {
			return fmt.Errorf("%v: %w", b, err)
		}
		b.work = work
	}
	return nil
}

// arrive waits for all buckets, also after an error, so that none is in use afterwards. If all
// failed buckets were refused because of a NaN, which every rank finds, the step is skipped.
func (d *tape) arrive() error {
	var failed, refused error
	for _, b := range d.buckets {
		if b.work == nil {
			continue
		}
		err := b.finish(b.work)
		var n notFinite
		switch {
		case err == nil:
		case errors.As(err, &n):
			refused = cmp.Or(refused, b.blame(n))
		default:
			failed = cmp.Or(failed, fmt.Errorf("%v: %w", b, err))
		}
	}
	if failed != nil || refused == nil {
		return failed
	}
	return d.skipStep(refused)
}

// notFinite is the error of a compression that has refused an operand, the same on all
// ranks: the compression has delivered nothing and can still be used. Package sparse has
// such an error.
type notFinite interface {
	error
	// NotFinite returns the state key, the rank and the index of the first element that is
	// NaN or infinite.
	NotFinite() (state, rank, index int)
}

// undoer is a communicator that can undo how the last call with a state key has changed its state.
type undoer interface{ Undo(state int) error }

// skippedStep is the error of a step that all ranks skip.
type skippedStep struct{ error }

// Unwrap returns why.
func (l skippedStep) Unwrap() error { return l.error }

// skipStep undoes a step whose buckets have all arrived. The buckets without a NaN have
// changed the state of the compression, as if their gradients were applied.
func (d *tape) skipStep(why error) error {
	u, ok := backend.As[undoer](d.gradComm)
	if !ok {
		return why
	}
	for _, b := range d.buckets {
		if err := u.Undo(b.slot()); err != nil {
			return errors.Join(why, err)
		}
	}
	return skippedStep{fmt.Errorf("the step is skipped on all ranks: %w", why)}
}

// blame names the parameter of an element that is not finite.
func (b *bucket) blame(n notFinite) error {
	_, rank, index := n.NotFinite()
	for _, p := range b.params {
		if index < p.size {
			return fmt.Errorf("the gradient of %v on rank %d, element %d: %v: %w", p, rank, index,
				b, n)
		}
		index -= p.size
	}
	return fmt.Errorf("%v: %w", b, n)
}

// empty begins a step.
func (d *tape) empty() {
	d.leaving = 0
	for _, b := range d.buckets {
		b.missing, b.work = len(b.params), nil
		for _, p := range b.params {
			p.full = false
		}
	}
}

// clear zeroes the gradients to which Gorgonia adds those of the next run. All gradients must have
// been copied, because two parameters can share a gradient. The zeros are negative: adding one
// changes no bit of a gradient, and computed can tell them from the zeros of a run, unless all
// gradients of that run are negative zeros.
func (d *tape) clear() {
	for _, p := range d.params {
		p.cleared = nil
		if g, err := p.node.Grad(); err == nil && g != nil && !d.shared[g] {
			p.zero(g)
		}
		if s := p.source; s != nil && s.Op() != nil && s.Value() != nil && !d.shared[s.Value()] {
			p.zero(s.Value()) // which each run writes
		}
	}
}

// zero fills a gradient with negative zeros.
func (p *param) zero(g gorgonia.Value) {
	memory, dense, err := residence.Floats(g)
	if err != nil || !dense {
		gorgonia.ZeroValue(g)
		return
	}
	if p.cleared = g; memory.DType() == backend.F32 {
		negate(backend.View[float32](memory))
	} else {
		negate(backend.View[float64](memory))
	}
}

// computed returns an error if all gradients are as clear has left them.
func (d *tape) computed() error {
	for _, p := range d.params {
		if p.hooked != nil || p.cleared == nil || p.left() != p.cleared {
			return nil
		}
		memory, _, err := residence.Floats(p.cleared)
		if err != nil {
			return err
		}
		left := memory.DType() == backend.F32 && negativeZeros(backend.View[float32](memory)) ||
			memory.DType() == backend.F64 && negativeZeros(backend.View[float64](memory))
		if !left {
			return nil
		}
	}
	return fmt.Errorf("%w: no run has computed gradients since the last Sync: call RunAll before "+
		"it, and Reset after it, without which the next RunAll of a Gorgonia machine does nothing",
		backend.ErrArgument)
}

// negate fills memory with negative zeros.
func negate[T float32 | float64](all []T) {
	for i := range all {
		all[i] = T(math.Copysign(0, -1))
	}
}

func negativeZeros[T float32 | float64](all []T) bool {
	return !slices.ContainsFunc(all, func(x T) bool { return x != 0 || !math.Signbit(float64(x)) })
}

// gradient is a parameter with the gradient of all ranks.
type gradient struct {
	node *gorgonia.Node
	view gorgonia.Value
}

// Value returns the parameter's value.
func (g gradient) Value() gorgonia.Value { return g.node.Value() }

// Grad returns the gradient.
func (g gradient) Grad() (gorgonia.Value, error) { return g.view, nil }

// Name returns the parameter's name, for the messages of solvers.
func (g gradient) Name() string { return stock.Label(g.node) }
