package autograd

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"strings"

	"gorgonia.org/gorgonia"

	"github.com/euryale-ml/euryale/internal/group"
	"github.com/euryale-ml/euryale/internal/residence"
	"github.com/euryale-ml/euryale/internal/stock"
)

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

// Compare finds the variables whose values differ between ranks, for [Buckets.Begin]. It is
// collective. Cost: a hash of each variable, and an all-gather of the hashes.
func (x *Buckets) Compare(variables gorgonia.Nodes) error {
	if x.d.comm.Size() == 1 {
		return nil
	}
	name := func(n *gorgonia.Node) string {
		return fmt.Sprintf("%s %v%v", stock.Label(n), n.Dtype(), n.Shape())
	}
	mine, differ := map[string]string{}, map[string]bool{}
	for _, n := range variables {
		if sum := sumOf(n); sum != "" && !x.d.model.declares(n) {
			mine[name(n)] = sum
		}
	}
	all, err := group.Exchange(x.Gather, x.d.comm.Capabilities().Members, mine)
	for _, theirs := range all {
		for name, sum := range theirs {
			own, ok := mine[name]
			differ[name] = differ[name] || ok && own != sum
		}
	}
	for _, n := range variables {
		if differ[name(n)] {
			x.nodes, x.sums = append(x.nodes, n), append(x.sums, mine[name(n)])
		}
	}
	return err
}

// Begin is called before each run. Before the second run it reports the variables that differ
// between ranks and that the program has not changed: data that it set once, or parameters that it
// has not declared.
func (x *Buckets) Begin() {
	if x.nodes == nil {
		return
	}
	var nodes gorgonia.Nodes // that are what they were, so far
	var names, sums []string
	for i, n := range x.nodes {
		if sumOf(n) == x.sums[i] {
			nodes, sums, names = append(nodes, n), append(sums, x.sums[i]),
				append(names, stock.Label(n))
		}
	}
	x.nodes, x.sums = nodes, sums
	if x.runs++; x.runs < 2 || names == nil {
		return
	}
	x.nodes = nil
	x.d.mu.Lock()
	defer x.d.mu.Unlock()
	x.d.say(
		fmt.Sprintf("ranks have different values of %s, which no run has changed: if these are "+
			"parameters that nothing trains, declare them by autograd.WithFrozen, and all ranks "+
			"and checkpoints have those of rank 0", strings.Join(names, ", ")))
}
