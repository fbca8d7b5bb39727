package vm

import (
	"fmt"
	"os"
	"slices"
	"strings"

	"gorgonia.org/gorgonia"

	"github.com/euryale-ml/euryale/internal/env"
	"github.com/euryale-ml/euryale/ops/nn"
	"github.com/euryale-ml/euryale/rendezvous"
)

// Notice sets where New reports what a user should know about the graph, such as operations that
// Gorgonia computes wrongly. The default is standard error. With [WithDataParallel], rank 0 reports
// for all ranks.
func Notice(say func(text string)) Option {
	return func(m *Machine) { m.notice = say; m.refuseNil("Notice", "say", say) }
}

// toStandardError is the default of Notice.
func toStandardError(text string) { fmt.Fprintln(os.Stderr, "euryale:", text) }

// warn reports each defect of the graph once, with its first node, a training in which ranks share
// nothing, and variables that may have been forgotten.
func (m *Machine) warn() {
	if rank, _ := m.parallel.among(); rank > 0 {
		return
	}
	job, _ := rendezvous.ReadEnv(env.Lookup(os.Environ())) // Init says where these are wrong
	if job.Size > 1 && m.solver != nil && m.parallel == nil && len(m.plan.Common()) == 0 {
		m.notice(fmt.Sprintf("rank %d of %d trains on its own: give vm.New the option "+
			"WithDataParallel, unless that is meant", job.Rank, job.Size))
	}
	if m.plan.Doubt != nil {
		m.notice(fmt.Sprintf("package vm has a fault, so the machine computes one value at a "+
			"time, slower and with more memory than it could: please report it: %v", m.plan.Doubt))
	}
	if left := m.untrained(); len(left) > 0 {
		m.notice(fmt.Sprintf("the graph has gradients of %s, which no WithSolver has: they are "+
			"not trained; if that is meant, leave them out of gorgonia.Grad, or give their "+
			"gradients to vm.Keep", strings.Join(labels(left), ", ")))
	}
	warnOf(nn.Defects(m.graph), m.notice)
}

// Runs that compare muchCompared bytes are reported, after runsCompared of them. On a host of 64
// cores 5 GB took 100 ms of each step of LoRA (bench/results/2026-11/2026-11-27-h100x4.md).
const (
	muchCompared = 256 << 20
	runsCompared = 3
)

// compared counts the runs that compare much with what the device has.
type compared struct {
	much int // bytes from which a run counts
	runs int
}

// warn counts a run, and reports them once.
func (c *compared) warn(bytes int, say func(text string)) {
	if bytes < c.much {
		return
	}
	if c.runs++; c.runs != runsCompared {
		return
	}
	say(fmt.Sprintf("each run compares %d MiB of variables with their copies on the device, "+
		"and nothing has changed them: pass the weights that stay as they are to vm.WithFrozen",
		bytes>>20))
}

// warnOf reports each defect of the graph itself once, and the first one of those that only
// Gorgonia's own machines have, with their number.
func warnOf(defects []nn.Defect, say func(text string)) {
	seen := map[string]bool{}
	var tape []nn.Defect
	for _, d := range defects {
		switch kind := d.What + d.Instead; {
		case seen[kind]:
			continue
		case d.Tape:
			tape = append(tape, d)
		default:
			say("the graph has an operation of Gorgonia that is wrong on every machine: " +
				d.String() + " (docs/ops.md)")
		}
		seen[d.What+d.Instead] = true
	}
	if len(tape) == 0 {
		return
	}
	which := "an operation of the graph wrongly: "
	if n := len(tape); n > 1 {
		which = fmt.Sprintf("%d kinds of operations of the graph wrongly, which nn.Defects "+
			"lists. The first: ", n)
	}
	say("package vm is right, but Gorgonia's own machines compute " + which +
		tape[0].String() + " (docs/ops.md)")
}

// untrained returns the variables with a gradient that no solver has and that nothing reads.
func (m *Machine) untrained() (left gorgonia.Nodes) {
	if m.solver == nil {
		return nil
	}
	for _, n := range m.read.Inputs {
		g := n.Deriv()
		wanted := func(r target) bool { return r.Node == g }
		if g == nil || slices.Contains(m.solver.learnables, n) || slices.Contains(m.keep, g) ||
			slices.ContainsFunc(m.outputs.reads, wanted) || m.graph.To(g.ID()).Len() > 0 {
			continue
		}
		left = append(left, n)
	}
	return left
}
