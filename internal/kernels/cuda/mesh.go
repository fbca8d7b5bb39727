package cuda

import (
	"fmt"

	"github.com/euryale-ml/euryale/backend"
)

// meshRanks is the size of a cube mesh.
const meshRanks = 8

// neighbours are the ranks that one of a hybrid cube mesh reaches: the others of its
// clique, and last its relay, through which it hears of the other clique. Whoever is i-th
// neighbour of x has x as its i-th.
type neighbours [4]int

// check refuses neighbours that no rank of a mesh can have.
func (n neighbours) check(p *Peers) error {
	if p.Size != meshRanks {
		return fmt.Errorf("%w: %v among %d ranks: a cube mesh has %d", backend.ErrArgument, Mesh,
			p.Size, meshRanks)
	}
	seen := 1 << p.Rank
	for _, r := range n {
		if r < 0 || r >= p.Size || seen&(1<<r) != 0 {
			return fmt.Errorf("%w: %v with the neighbours %v of rank %d: they must be four others",
				backend.ErrArgument, Mesh, n, p.Rank)
		}
		seen |= 1 << r
	}
	return nil
}

// word is the parameter of the kernel: a byte for each neighbour.
func (n neighbours) word() (word uint64) {
	for i, r := range n {
		word |= uint64(r) << (8 * i)
	}
	return word
}
