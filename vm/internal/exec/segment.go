package exec

import (
	"errors"
	"fmt"

	"github.com/euryale-ml/euryale/backend"
)

// segment is steps that run one after the other without the host: where the device has graphs,
// the second run records them, and each later one is one launch. Steps that wait for the device
// are segments of their own.
type segment struct {
	first int // the number of the first step
	steps []*step
	ran   bool           // once: kernels may have been compiled for it
	eager bool           // the device does not record it
	graph *backend.Graph // nil until it is recorded
}

// segmented divides steps into segments.
func segmented(steps []*step) []*segment {
	var all []*segment
	for i, s := range steps {
		if n := len(all); n == 0 || s.waits || all[n-1].eager {
			all = append(all, &segment{first: i, eager: s.waits})
		}
		last := all[len(all)-1]
		last.steps = append(last.steps, s)
	}
	return all
}

// run starts the steps. What cannot be recorded runs step by step, with the same bits.
func (s *segment) run(d Device) error {
	if s.graph == nil && s.ran && !s.eager && len(s.steps) > 1 && !d.Host() {
		graph, err := d.Capture(s.start)
		if err != nil && !errors.Is(err, backend.ErrUnsupported) {
			return fmt.Errorf("vm: record steps %d to %d: %w", s.first, s.first+len(s.steps)-1, err)
		}
		s.graph, s.eager = graph, err != nil
	}
	s.ran = true
	if s.graph == nil {
		return s.start()
	}
	if _, err := s.graph.Launch(nil); err != nil {
		return fmt.Errorf("vm: launch steps %d to %d: %w", s.first, s.first+len(s.steps)-1, err)
	}
	return nil
}

// start starts the steps one by one.
func (s *segment) start() error {
	for i, step := range s.steps {
		if err := step.run(); err != nil {
			return fmt.Errorf("vm: step %d, %v of %s: %w", s.first+i, step.Op, step.Name, err)
		}
	}
	return nil
}

// forget frees the graph. The next run records another one.
func (s *segment) forget() error {
	if s.graph == nil {
		return nil
	}
	graph := s.graph
	s.graph = nil
	return graph.Close()
}
