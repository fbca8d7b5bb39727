package cuda

import (
	"fmt"

	"gorgonia.org/gorgonia"

	"github.com/euryale-ml/euryale/backend"
)

// Machine is Gorgonia's tape machine on an engine. It adds two things: the graph
// is checked before the first run, and every run recycles the results of the one
// before.
type Machine struct {
	gorgonia.VM
	engine *Engine
}

// NewMachine checks g and returns a machine for it. Of Gorgonia's options, those
// that look into values (loggers, WatchNaN, WatchInf) and those that add up
// gradients on the host (BindDualValues) are not for device memory: read
// gradients from the nodes that gorgonia.Grad returned.
func (e *Engine) NewMachine(g *gorgonia.ExprGraph, opts ...gorgonia.VMOpt) (*Machine, error) {
	if err := e.Check(g); err != nil {
		return nil, err
	}
	all := append([]gorgonia.VMOpt{gorgonia.WithEngine(e)}, opts...)
	return &Machine{gorgonia.NewTapeMachine(g, all...), e}, nil
}

// RunAll recycles the values of the last run, and runs the graph. When it
// returns, everything is started on the engine's queue; ToHost waits for it, and
// returns the error of a collective that has failed by then.
func (m *Machine) RunAll() error {
	m.engine.Reset()
	return m.VM.RunAll()
}

// Check returns an error for the first operation in g that the engine cannot
// run, with what to do. Some of them would touch device memory from the host, or
// give zeros without an error, so check before the first run.
//
// Operations from outside Gorgonia look after themselves, and those on scalars
// alone run on the host, whatever they are.
func (e *Engine) Check(g *gorgonia.ExprGraph) error {
	for _, n := range g.AllNodes() {
		if advice := refusal(g, n); advice != "" {
			return fmt.Errorf("cuda: %w: node %v of the graph (%T, shape %v): %s", backend.ErrUnsupported, n, n.Op(), n.Shape(), advice)
		}
	}
	return nil
}
