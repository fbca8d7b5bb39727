package hierarchy

import (
	"slices"
	"strings"
)

// Identity is what a rank tells of itself, so that every rank can derive the
// [Layout].
type Identity struct {
	// Machine is the same for ranks of one machine: World.Node, say, and what NCCL takes
	// for the machine's name (NCCL_HOSTID).
	Machine string
	// Bus is the address of the rank's GPU on the PCI bus, "" on the host. Places
	// follow it, so that rails connect GPUs with the same position.
	Bus string
}

// Discover returns the layout of ranks that told these identities: machines in
// the order of their first ranks, places by bus and then by rank. Machines may
// turn out to have different numbers of ranks.
func Discover(ids []Identity) Layout {
	names := make([]string, len(ids))
	for r, id := range ids {
		names[r] = id.Machine
	}
	l := grouped(names)
	for _, ranks := range l.machines {
		slices.SortStableFunc(ranks, func(a, b int) int { return strings.Compare(ids[a].Bus, ids[b].Bus) })
	}
	return layoutOf(l.machines)
}
