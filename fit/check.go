package fit

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/fit/data"
	"github.com/euryale-ml/euryale/internal/stock"
	"github.com/euryale-ml/euryale/vm"
)

// refused is an ErrArgument.
func refused(format string, args ...any) error {
	return fmt.Errorf("%w: %w", backend.ErrArgument, fmt.Errorf(format, args...))
}

// check returns an error for each option of a training that cannot be.
func (t *trainer) check(of vm.Summary) error {
	errs := []error{t.missing}
	if t.data.Loss == nil {
		errs = append(errs, refused("fit.Data: Loss is nil: give the cost of gorgonia.Grad"))
	}
	if t.epochs < 1 {
		errs = append(errs, refused("fit.Epochs(%d): there must be an epoch", t.epochs))
	}
	for name, n := range map[string]int{"Prefetch": t.readers, "Checkpoint: every": t.every,
		"EarlyStop": t.patience} {
		if n < 0 {
			errs = append(errs, refused("fit.%s: %d is below 0", name, n))
		}
	}
	if t.restored && t.dir == "" {
		errs = append(errs, refused("fit.RestoreBest: fit.Checkpoint keeps the best epoch: give "+
			"it a directory"))
	}
	errs = append(errs, t.checkPlateau(), t.checkHistograms(of))
	v := t.validation
	if v != nil {
		err := v.ready(t.comm, t.parts().all)
		if err == nil {
			err = v.shares(of)
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("fit.Validate: %w", err))
		}
	}
	if t.watched == "val_loss" { // as Progress and Log name it
		t.watched = "loss"
		if v == nil || v.data.Loss == nil {
			errs = append(errs, refused("fit.Watch: val_loss is the Loss of fit.Validate, which "+
				"has none"))
		}
	} else if t.watched != "" && t.watched != "loss" && v.metric(t.watched) == nil {
		names := []string{"loss"}
		for i := 0; v != nil && i < len(v.metrics); i++ {
			names = append(names, v.metrics[i].Name)
		}
		errs = append(errs, refused("fit.Watch: no metric of fit.Validate has the name %q: there "+
			"is %s", t.watched, strings.Join(names, ", ")))
	}
	return errors.Join(errs...)
}

// checkPlateau returns an error for a ReduceOnPlateau that cannot be, or would change nothing.
func (t *trainer) checkPlateau() error {
	p := t.plateau
	switch {
	case p == plateau{} && !slices.Contains(t.given, "ReduceOnPlateau"):
		return nil
	case !(p.factor > 0 && p.factor < 1) || p.patience < 1:
		return refused("fit.ReduceOnPlateau(%v, %d): the factor must be between 0 and 1, and the "+
			"patience 1 or more", p.factor, p.patience)
	case t.rate == nil:
		return refused("fit.ReduceOnPlateau changes the rate of fit.Schedule, and there is none: " +
			"give it, such as solver.Constant")
	case t.patience > 0 && t.patience <= p.patience:
		return refused("fit.EarlyStop(%d) ends the training before fit.ReduceOnPlateau(%v, %d) "+
			"has an effect: give EarlyStop more patience", t.patience, p.factor, p.patience)
	}
	return nil
}

// check returns the length of the first axis, which all inputs share. The machine runs the graph.
func (d Data) check(of vm.Summary) (local int, err error) {
	if err := backend.Given("fit.Data", "Set", d.Set, "Inputs", d.Inputs); err != nil {
		return 0, err
	}
	nodes := slices.Clone(d.Inputs)
	if d.Weights != nil {
		nodes = append(nodes, d.Weights)
	}
	for i, n := range nodes {
		if local == 0 && n.Dims() > 0 {
			local = n.Shape()[0]
		}
		if !n.IsVar() || i < len(d.Inputs) && (n.Dims() == 0 || n.Shape()[0] != local) {
			return 0, refused("the input %s has the shape %v: inputs are variables, whose first "+
				"axis is the batch", n.Name(), n.Shape())
		}
		if err := d.own(n, of); err != nil {
			return 0, err
		}
		if slices.Index(nodes, n) < i {
			return 0, refused("fit.Data: %s is given twice", n.Name())
		}
	}
	if local == 0 {
		return 0, refused("fit.Data: there are no Inputs: name the variables that batches go to")
	}
	columns := data.MappingOf(d.Set).Columns
	if n := d.Inputs[0].Shape()[1:].TotalSize(); len(columns) > 0 && n != len(columns) {
		return 0, refused("fit.Data: the input %s takes %d numbers of a sample, and the table has "+
			"%d columns: %q", d.Inputs[0].Name(), n, len(columns), columns)
	}
	if w := d.Weights; w != nil && (!w.IsScalar() && !slices.Equal(w.Shape(),
		tensor.Shape{local}) || w.Dtype() != tensor.Float32 && w.Dtype() != tensor.Float64) {
		return 0, refused("fit.Data: the Weights %s are %v of shape %v: give floats of shape "+
			"[%d], one for each sample of a run, or []", w.Name(), w.Dtype(), w.Shape(), local)
	}
	if l := d.Loss; l != nil && (l.Graph() != of.Graph || l.Shape().TotalSize() != 1) {
		return 0, refused("fit.Data: the Loss %s, of the shape %v, is no single number of the "+
			"machine's graph", l.Name(), l.Shape())
	}
	if d.Set.Len() < 1 {
		return local, refused("fit.Data: there are no samples")
	}
	if d.Loss != nil {
		if err := d.labelled(); err != nil {
			return local, err
		}
	}
	return local, d.weigh(local)
}

// given returns an error for labels that are a variable and no input: all samples would have the
// same ones.
func (d Data) given(labels *gorgonia.Node) error {
	if labels.IsVar() && !slices.Contains(d.Inputs, labels) {
		return refused("fit.Data: the labels %s are not among the Inputs, so no sample would set "+
			"them: add them there, or make them a constant if all batches have the same",
			labels.Name())
	}
	return nil
}

// labelled returns an error if the loss has labels that no sample sets.
func (d Data) labelled() error {
	seen := map[*gorgonia.Node]bool{}
	var look func(n *gorgonia.Node) error
	look = func(n *gorgonia.Node) error {
		if seen[n] {
			return nil
		}
		seen[n] = true
		operands := stock.Operands(n)
		op, ok := n.Op().(interface{ Labels() int })
		if ok && strings.HasPrefix(fmt.Sprint(op), "CrossEntropy") {
			if err := d.given(operands[op.Labels()]); err != nil {
				return err
			}
		}
		for _, x := range operands {
			if err := look(x); err != nil {
				return err
			}
		}
		return nil
	}
	return look(d.Loss)
}

// own returns an error for a node that batches must not be written to.
func (d Data) own(n *gorgonia.Node, of vm.Summary) error {
	if n.Graph() != of.Graph {
		return refused("fit.Data: %s is of another graph than the machine's: the machine would "+
			"not see its batches", n.Name())
	}
	for _, l := range of.Learnables {
		if l.Node == n {
			return refused("fit.Data: %s is a learnable of the machine's solver: batches would "+
				"replace what it has learnt", n.Name())
		}
	}
	return nil
}

// fills returns an error if the samples leave rows of a batch of all ranks without one, and nothing
// says what these have. Weights of rows are 0 there; one weight of all leaves it to Pad.
func (d Data) fills(whole int) error {
	n := d.Set.Len()
	if d.Weights == nil || !d.Weights.IsScalar() || d.Pad != nil || n%whole == 0 {
		return nil
	}
	return refused("fit.Data: %d samples do not fill batches of %d, and Weights of shape [] weigh "+
		"the rows without a sample, too: set Pad, which writes labels there that the loss "+
		"ignores, or use Weights of each row", n, whole)
}

// check returns an error for metrics and data that cannot be, and for a machine that is not for
// evaluation.
func (e *evaluation) check() error {
	of := e.machine.Summary()
	if len(of.Learnables) > 0 || of.Trains {
		how := "batch norms and dropouts work as in training"
		if len(of.Learnables) > 0 {
			how = "each run is a step of its solver"
		}
		return refused("this machine is for training: %s: evaluate on a machine of vm.Eval", how)
	}
	_, err := e.data.check(of)
	errs := []error{err}
	names := map[string]bool{"loss": true, "val_loss": true}
	for _, m := range e.metrics {
		if m.Value == nil || m.Name == "" {
			errs = append(errs, refused("fit.Metric %q: it needs a Name and a Value", m.Name))
		}
		if names[m.Name] {
			errs = append(errs, refused("two metrics have the name %q: give one of them another "+
				"Name", m.Name))
		}
		names[m.Name] = true
		if err == nil && m.Sums != nil && m.Sums(e.data.Set.Len()) < 0 {
			errs = append(errs, refused("fit.Metric %q: Sums is below 0", m.Name))
		}
		if m.check != nil {
			err := m.check(of.Graph)
			if err == nil && m.reads != nil {
				err = e.data.given(m.reads)
			}
			if err != nil {
				errs = append(errs, fmt.Errorf("fit.Metric %q: %w", m.Name, err))
			}
		}
	}
	return errors.Join(errs...)
}

// shares returns an error unless the graph of an evaluation has the tensors that a training
// changes: those of another graph have the names, or the shapes, but not the values.
func (e *evaluation) shares(training vm.Summary) error {
	of := e.machine.Summary()
	if of.Graph == training.Graph {
		return nil
	}
	has := func(l vm.Learnable) func(n *gorgonia.Node) bool {
		return func(n *gorgonia.Node) bool {
			return n.IsVar() && n.Value() != nil && l.Node.Value() != nil &&
				n.Value().Uintptr() == l.Node.Value().Uintptr()
		}
	}
	own := slices.DeleteFunc(slices.Clone(of.Graph.AllNodes()), func(n *gorgonia.Node) bool {
		return !n.IsVar() || slices.Contains(e.data.Inputs, n) || n == e.data.Weights
	})
	var lacks []vm.Learnable
	for _, l := range training.Learnables {
		n := len(own)
		if own = slices.DeleteFunc(own, has(l)); len(own) == n {
			lacks = append(lacks, l)
		}
	}
	if len(lacks) == len(training.Learnables) {
		return refused("its graph has none of the learnables that the training " +
			"changes: build it with their tensors (gorgonia.WithValue), or use one graph")
	}
	for _, l := range lacks {
		for _, n := range own {
			if n.Name() == l.Name || n.Dtype() == l.Node.Dtype() && len(l.Shape) > 0 &&
				n.Shape().Eq(l.Shape) {
				return refused("%s of its graph is not the tensor of the learnable "+
					"%s that the training changes: give it that (gorgonia.WithValue), or use "+
					"one graph", n.Name(), l.Name)
			}
		}
	}
	return nil
}
