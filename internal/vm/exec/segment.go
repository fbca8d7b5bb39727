package exec

import (
	"errors"
	"fmt"
	"slices"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/vm/ir"
	"github.com/euryale-ml/euryale/internal/vm/plan"
)

// segment is steps that run one after the other without the host: where the device has graphs,
// the second run records them, and each later one is one launch. Steps that wait for the device
// are segments of their own.
type segment struct {
	steps []*step
	ran   bool           // once: kernels may have been compiled for it
	eager bool           // the device does not record it
	graph *backend.Graph // nil until it is recorded
}

// String says which steps they are.
func (s *segment) String() string {
	return fmt.Sprintf("steps %d to %d", s.steps[0].number, s.steps[len(s.steps)-1].number)
}

// segmented divides steps into segments. A recording
// must end an exchange that it begins: where a segment would not, or where exchanges are
// apart because they cannot be recorded, each step of an exchange is a segment of its own. They
// cannot in the runs beside which other ranks have idle ones, since all record the same.
func segmented(steps []*step, apart bool) []*segment {
	var all []*segment
	for _, s := range steps {
		alone := s.waits || apart && s.exchanges()
		if n := len(all); n == 0 || alone || all[n-1].eager {
			all = append(all, &segment{eager: alone})
		}
		last := all[len(all)-1]
		last.steps = append(last.steps, s)
	}
	if !apart && slices.ContainsFunc(all, func(s *segment) bool { return !s.closed() }) {
		return segmented(steps, true)
	}
	return all
}

// exchanges reports whether a step begins or ends an exchange between ranks, or may be one.
func (s *step) exchanges() bool {
	switch s.Op.(type) {
	case plan.Send, plan.Receive, ir.Opaque:
		return true
	}
	return false
}

// exchanges reports whether there are such steps in a segment.
func (s *segment) exchanges() bool { return slices.ContainsFunc(s.steps, (*step).exchanges) }

// sends reports whether a segment exchanges gradients. Ranks of a tree may do different numbers of
// the other runs: what is exchanged there is not among them.
func (s *segment) sends() bool {
	return slices.ContainsFunc(s.steps, func(s *step) bool {
		switch s.Op.(type) {
		case plan.Send, plan.Receive:
			return true
		}
		return false
	})
}

// closed reports whether a segment ends each exchange that it begins.
func (s *segment) closed() bool {
	open := 0
	for _, step := range s.steps {
		switch step.Op.(type) {
		case plan.Send:
			open++
		case plan.Receive:
			open--
		}
	}
	return open == 0
}

// record records one of some segments where that is due. What cannot be recorded runs step by step,
// bitwise identically; where it is the exchanges that cannot, all but these is recorded. Ranks
// record the same exchanges, or none.
func (e *Executor) record(segments *[]*segment, i int) error {
	s := (*segments)[i]
	if s.graph != nil || !s.ran || s.eager || len(s.steps) < 2 || e.device.Host() {
		return nil
	}
	if e.exchanges.Buckets != nil {
		if err := e.exchanges.besides(s); err != nil {
			return fmt.Errorf("vm: record %v: %w", s, err)
		}
	}
	before := e.exchanges.started
	e.exchanges.started = started{}
	graph, err := e.device.Capture(func() error { return s.start(e.exchanges.layer(e.device)) })
	e.exchanges.started = before // nobody can join what was recorded
	if errors.Is(err, backend.ErrUnsupported) {
		graph, err = nil, nil
	}
	if e.exchanges.Buckets != nil && s.exchanges() && (!e.plan.Accumulation.Tree || s.sends()) {
		all, failed := e.exchanges.All(graph != nil)
		if err = errors.Join(err, failed); graph != nil && !all {
			err = errors.Join(err, graph.Close())
			graph = nil
		}
	}
	if err != nil {
		return fmt.Errorf("vm: record %v: %w", s, err)
	}
	switch {
	case graph != nil:
		s.graph = graph
	case s.exchanges():
		parts := segmented(s.steps, true)
		for _, part := range parts {
			part.ran = true
		}
		*segments = slices.Replace(*segments, i, i+1, parts...)
		return e.record(segments, i)
	default:
		s.eager = true
	}
	return nil
}

// run starts the steps.
func (s *segment) run(x *exchanges) error {
	s.ran = true
	if s.graph == nil {
		return s.start(func(string) {})
	}
	w, err := s.graph.Launch(nil)
	if err != nil {
		return fmt.Errorf("vm: launch %v: %w", s, err)
	}
	if s.exchanges() {
		x.others = append(x.others, w)
	}
	return nil
}

// start starts the steps one by one, and says where the layer changes.
func (s *segment) start(layer func(name string)) error {
	last, now := s.steps[len(s.steps)-1].number, ""
	for _, step := range s.steps {
		if step.layer != now {
			now = step.layer
			layer(now)
		}
		step.beside = step.Until > 0 && step.Until < last
		if err := step.run(); err != nil {
			return fmt.Errorf("vm: step %d, %v of %s: %w", step.number, step.Op, step.Name, err)
		}
	}
	layer("")
	return nil
}

// freeGraph frees the graph. The next run records another one.
func (s *segment) freeGraph() error {
	if s.graph == nil {
		return nil
	}
	graph := s.graph
	s.graph = nil
	return graph.Close()
}
