package gpu

import "fmt"

// Algorithm is a way to run a collective.
type Algorithm uint8

// The algorithms. All of them add in rank order, in 32 bits, and so give bitwise
// identical results.
const (
	// byNCCL runs every call.
	byNCCL Algorithm = iota
	// byLL pushes the operand to every rank, and flags with it: one trip, and no
	// barrier. Large operands travel in NCCL's LL128 format, as do chunks and pieces.
	byLL
	// byLL128TwoShot pushes a segment of the operand to each rank, which adds up what
	// it receives and pushes the sum to every rank, and flags with all of it: two
	// trips, and no barrier.
	byLL128TwoShot
	// byOneShot shows the operand; every rank reads all of them.
	byOneShot
	// byTwoShot shows the operand; every rank adds up one segment of all of them and
	// pushes the result to every rank.
	byTwoShot
	// byMesh is byOneShot on a cube mesh: each rank reads its clique and, through its
	// relay, the other one. It is for such machines, and they have no other.
	byMesh
	// byHalved is byLL128TwoShot of f32 that travels as 16 bits. Only calls that ask for
	// that use it: see [backend.Collective].
	byHalved
	// byPush is the all-to-all of any layout, and the all-gather: every rank writes its pieces to
	// where the others want them, permuted on the way; and the reduce-scatter: every rank writes
	// chunks to the staging of those that add them up.
	byPush
	// byCopyEngines has copy engines push operands to the staging of the rank that adds them up,
	// and its sums to every rank: multiprocessors only add. Reduce-scatters and all-gathers are
	// halves of that. Only recorded calls beside which devices compute use it: see
	// [backend.Collective].
	byCopyEngines

	algorithmCount = iota
)

// String returns the name: "two-shot".
func (a Algorithm) String() string {
	if int(a) >= len(algorithms) {
		return fmt.Sprintf("Algorithm(%d)", uint8(a))
	}
	return algorithms[a].name
}

// Algorithms lists those that calls can use on such links.
func (l Link) Algorithms() []Algorithm {
	if l == CubeMesh {
		return []Algorithm{byNCCL, byMesh}
	}
	return []Algorithm{byNCCL, byLL, byLL128TwoShot, byOneShot, byTwoShot, byPush}
}

// parseAlgorithm is the inverse of String, for those that can be asked for by name:
// byHalved needs a call's leave instead.
func parseAlgorithm(name string) (Algorithm, error) {
	all := append(FullyConnected.Algorithms(), byMesh, byCopyEngines)
	switch name { // as older scripts spell them
	case "inner":
		return byNCCL, nil
	case "flagged":
		return byLL, nil
	case "flagged-two-shot":
		return byLL128TwoShot, nil
	}
	for _, a := range all {
		if a.String() == name {
			return a, nil
		}
	}
	return 0, fmt.Errorf("no algorithm is called %q: use one of %v", name, all)
}
