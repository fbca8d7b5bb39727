package vm

import (
	"bytes"
	"crypto/sha256"
	"fmt"
	"strings"

	"gorgonia.org/gorgonia"
)

// unlike is a variable that had other values on other ranks when the machine was made.
type unlike struct {
	node *gorgonia.Node
	sum  []byte // of its value then
}

// sumOf returns a hash of a variable's value, nil without one.
func sumOf(n *gorgonia.Node) []byte {
	if n.Value() == nil {
		return nil
	}
	memory, err := dense(n.Value())
	if err != nil {
		return nil
	}
	sum := sha256.Sum256(memory.Bytes())
	return sum[:]
}

// noteData finds the variables that have other values on other ranks.
func (m *Machine) noteData() error {
	p := m.parallel
	if p == nil || p.comm.Size() == 1 {
		return nil
	}
	nodes, err := p.exchange.Unlike(m.read.Inputs)
	if err != nil {
		return fmt.Errorf("vm: WithDataParallel: %w", err)
	}
	for _, n := range nodes {
		p.unlike = append(p.unlike, unlike{n, sumOf(n)})
	}
	return nil
}

// sayUndeclared reports, before the second run, variables that differ between ranks and that the
// program has not changed: data that it gave once, or parameters that it has not declared.
func (m *Machine) sayUndeclared() {
	p := m.parallel
	if p == nil || p.unlike == nil {
		return
	}
	if p.runs++; p.runs < 2 {
		return
	}
	var names []string
	for _, u := range p.unlike {
		if bytes.Equal(sumOf(u.node), u.sum) {
			names = append(names, u.node.Name())
		}
	}
	p.unlike = nil
	if len(names) > 0 && p.comm.Rank() == 0 {
		m.notice(fmt.Sprintf("ranks have different values of %s, which no run has changed: if these are "+
			"parameters that nothing trains, declare them by autograd.WithFrozen, and all ranks and "+
			"checkpoints have those of rank 0",
			strings.Join(names, ", ")))
	}
}
