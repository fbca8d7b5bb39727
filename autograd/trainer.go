package autograd

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"maps"
	"slices"

	"gorgonia.org/gorgonia"

	"github.com/euryale-ml/euryale/autograd/internal/checkpoint"
	"github.com/euryale-ml/euryale/autograd/solver"
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/group"
	"github.com/euryale-ml/euryale/internal/residence"
	"github.com/euryale-ml/euryale/internal/stock"
)

// trainer is what a DataParallel knows of the machine that trains by its Buckets: how to bring and
// to copy what the machine has on its device. Methods may be called on nil: there is none.
type trainer struct {
	// brings the model, or some parameters of it, or what this rank has of these, to where values
	// are; nil if it always is
	pull func(whole bool, of ...*gorgonia.Node) error
	copy copying        // nil where copies are made on the host
	by   *solver.Fusion // of the solver whose state copy copies
}

type copying = func(memory []backend.Buffer) (fetch func() ([]backend.Buffer, error), err error)

// bring brings the parameters, or those of some nodes, to where their values are.
func (t *trainer) bring(whole bool, of ...*gorgonia.Node) error {
	if t == nil || t.pull == nil {
		return nil
	}
	return t.pull(whole, of...)
}

// has reports whether the machine has copies of all that is to be saved, on its device.
func (t *trainer) has(of *contents, solver gorgonia.Solver) bool {
	return t != nil && t.copy != nil && (of.parts == nil || of.sharded) && t.by.Has(solver)
}

// copies starts copies of parameters and the solver's vectors where the machine has them, only of
// shards if this rank writes shards, and lists them. fetch brings them to the host.
func (t *trainer) copies(of *contents, by gorgonia.Solver, first bool) (list []checkpoint.Tensor,
	fetch func([]checkpoint.Tensor) error, err error) {
	state := map[string]stored{}
	if first {
		if err := of.model.store(state); err != nil {
			return nil, nil, err
		}
	}
	for key, of := range state {
		state[key] = stored{Shape: of.Shape, Data: residence.Clone(of.Data)}
	}
	counts, moving := t.by.State() // memory of which the device has newer elements
	for _, p := range of.params {
		memory, err := p.value()
		if err != nil {
			return nil, nil, err
		}
		moving[p.key()] = memory
		state[p.key()] = stored{Shape: p.dims(), Data: memory}
	}
	add(state, counts)
	for key, memory := range moving {
		if _, param := state[key]; !param {
			add(state, map[string]backend.Buffer{key: memory})
		}
	}
	list = of.listed(state, by)
	var at []int
	var memory []backend.Buffer
	for i, key := range slices.Sorted(maps.Keys(state)) {
		if _, moves := moving[key]; moves {
			at, memory = append(at, i), append(memory, list[i].Data)
		}
	}
	started, err := t.copy(memory)
	return list, func(list []checkpoint.Tensor) error {
		all, err := started()
		for k, memory := range all {
			list[at[k]].Data = memory
		}
		return err
	}, err
}

// undeclared are variables whose values differ between ranks, and that are neither parameters nor
// frozen: data of each rank, or parameters that nobody has declared.
type undeclared struct {
	nodes gorgonia.Nodes
	sums  []string // of their values when they were compared
	runs  int      // since then
}

// sumOf returns a hash of a variable's value, "" if it has none that can be read.
func sumOf(n *gorgonia.Node) string {
	if n.Value() == nil {
		return ""
	}
	d, ok := residence.DType(n.Value().Dtype())
	memory, err := residence.Elements(n.Value(), d)
	if !ok || err != nil {
		return ""
	}
	sum := sha256.Sum256(memory.Bytes())
	return hex.EncodeToString(sum[:])
}

// compare finds the variables among those given whose values differ between ranks, by an exchange
// of notes.
func (u *undeclared) compare(variables gorgonia.Nodes, by group.Gatherer,
	members backend.Members) error {
	name := func(n *gorgonia.Node) string {
		return fmt.Sprintf("%s %v%v", stock.Label(n), n.Dtype(), n.Shape())
	}
	mine, differ := map[string]string{}, map[string]bool{}
	for _, n := range variables {
		if sum := sumOf(n); sum != "" {
			mine[name(n)] = sum
		}
	}
	all, err := group.Exchange(by, members, mine)
	for _, theirs := range all {
		for name, sum := range theirs {
			own, ok := mine[name]
			differ[name] = differ[name] || ok && own != sum
		}
	}
	for _, n := range variables {
		if differ[name(n)] {
			u.nodes, u.sums = append(u.nodes, n), append(u.sums, mine[name(n)])
		}
	}
	return err
}

// run counts a run. Before the second it returns the names of those that no run has changed.
func (u *undeclared) run() (names []string) {
	if u.nodes == nil {
		return nil
	}
	var nodes gorgonia.Nodes // that are what they were, so far
	var sums []string
	for i, n := range u.nodes {
		if sumOf(n) == u.sums[i] {
			nodes, sums, names = append(nodes, n), append(sums, u.sums[i]),
				append(names, stock.Label(n))
		}
	}
	u.nodes, u.sums = nodes, sums
	if u.runs++; u.runs < 2 || names == nil {
		return nil
	}
	u.nodes = nil
	return names
}
