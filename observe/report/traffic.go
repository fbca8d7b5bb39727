package report

import (
	"slices"
	"strings"

	"github.com/euryale-ml/euryale/backend"
)

// sent returns the bytes that a call on n ranks sends from one rank to another. bytes is the size
// of the larger buffer of the call. NCCL sends them round a ring, others directly: whole operands
// in one-shot, chunks in two-shot and in anything unknown.
func sent(k backend.Kind, algorithm string, n, root int, bytes int64, from, to int) int64 {
	part := bytes / int64(n)
	oneShot := slices.Contains([]string{"one-shot", "ll", "mesh"}, algorithm)
	ring := strings.Contains(algorithm, "nccl") && !slices.Contains([]backend.Kind{
		backend.AllToAll, backend.Gather, backend.Scatter}, k)
	switch {
	case from == to || ring && to != (from+1)%n ||
		k == backend.Gather && to != root || k == backend.Scatter && from != root:
		return 0
	case ring && (k == backend.Broadcast && to == root || k == backend.Reduce && from == root):
		return 0 // the last rank of the ring
	case ring && (k == backend.Broadcast || k == backend.Reduce):
		return bytes
	case ring && k == backend.AllReduce:
		return 2 * part * int64(n-1)
	case ring:
		return part * int64(n-1)
	case k == backend.AllReduce && oneShot:
		return bytes
	case k == backend.AllReduce:
		return 2 * part
	case k == backend.Reduce && oneShot:
		return at(to == root, bytes)
	case k == backend.Reduce: // chunks to all, and the sum of its chunk to the root
		return part + at(to == root, part)
	case k == backend.Broadcast && algorithm == "in-parts":
		return at(to != root, part)
	case k == backend.Broadcast:
		return at(from == root, bytes)
	}
	return part
}

// at returns n if it is sent, else 0.
func at(sent bool, n int64) int64 {
	if sent {
		return n
	}
	return 0
}

// mostPairs is how many times a call is counted from one rank to another.
const mostPairs = 1 << 28

// matrix returns the bytes that all calls of the traces have sent, by sender and receiver.
func (j *Job) matrix() [][]int64 {
	if len(j.traces) == 0 {
		return nil
	}
	type member struct {
		group string
		rank  int
	}
	ranks, sizes := map[member]int{}, map[string]int{}
	largest := map[callID]*event{}
	for _, t := range j.traces {
		for _, c := range t.calls {
			if c.isCall() {
				ranks[member{c.Args.Group, c.Args.Rank}] = t.rank
				sizes[c.Args.Group] = max(sizes[c.Args.Group], c.Args.Rank+1)
				if known := largest[c.id()]; known == nil || known.Args.Bytes < c.Args.Bytes {
					largest[c.id()] = c
				}
			}
		}
	}
	members := map[string][]int{} // ranks in a group whose traces there are
	for m := range ranks {
		members[m.group] = append(members[m.group], m.rank)
	}
	sums, pairs := make([][]int64, j.size), 0
	for r := range sums {
		sums[r] = make([]int64, len(sums))
	}
	for id, c := range largest {
		n, root, all := sizes[id.group], 0, members[id.group]
		if c.Args.Root != nil {
			root = *c.Args.Root
		}
		if pairs += len(all) * len(all); pairs > mostPairs {
			j.remark("bytes from rank to rank are left out: too many calls of too many ranks")
			return make([][]int64, j.size)
		}
		for _, from := range all {
			for _, to := range all {
				sums[ranks[member{id.group, from}]][ranks[member{id.group, to}]] +=
					sent(c.kind, c.Args.Algorithm, n, root, c.Args.Bytes, from, to)
			}
		}
	}
	return sums
}
