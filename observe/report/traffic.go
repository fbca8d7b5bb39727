package report

import (
	"slices"
	"strings"

	"github.com/euryale-ml/euryale/backend"
)

// traffic calls add with the bytes that a call on n ranks sends from one to another. bytes are
// those of the larger buffer of the call. By NCCL they go round a ring, otherwise directly: whole
// operands in one shot, chunks in two-shot and all that is not known better.
func traffic(k backend.Kind, algorithm string, n, root int, bytes int64,
	add func(from, to int, bytes int64)) {
	if strings.Contains(algorithm, "nccl") && round(k, n, root, bytes, add) {
		return
	}
	oneShot := slices.Contains([]string{"one-shot", "ll", "mesh"}, algorithm)
	part := bytes / int64(n)
	sends, receives := func(int) bool { return true }, func(int) bool { return true }
	isRoot := func(r int) bool { return r == root }
	switch {
	case oneShot && k == backend.AllReduce:
		part = bytes
	case oneShot && k == backend.Reduce:
		part, receives = bytes, isRoot
	case k == backend.AllReduce:
		part *= 2
	case k == backend.Broadcast && algorithm == "in-parts":
		receives = func(r int) bool { return r != root }
	case k == backend.Broadcast:
		part, sends = bytes, isRoot
	case k == backend.Gather:
		receives = isRoot
	case k == backend.Scatter:
		sends = isRoot
	}
	for a := range n {
		for b := range n {
			if a != b && sends(a) && receives(b) {
				add(a, b, part)
			}
		}
		if k == backend.Reduce && !oneShot && a != root { // the sum of its chunk
			add(a, root, part)
		}
	}
}

// round is traffic round a ring; it reports false for kinds that do not go round.
func round(k backend.Kind, n, root int, bytes int64, add func(from, to int, bytes int64)) bool {
	part := bytes / int64(n) * int64(n-1)
	switch k {
	case backend.AllReduce:
		part *= 2
	case backend.Broadcast, backend.Reduce:
		part = bytes
	case backend.AllToAll, backend.Gather, backend.Scatter:
		return false
	}
	for r := range n {
		next := (r + 1) % n
		if !(k == backend.Broadcast && next == root || k == backend.Reduce && r == root) {
			add(r, next, part)
		}
	}
	return true
}

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
			if c.whole() {
				ranks[member{c.Args.Group, c.Args.Rank}] = t.rank
				sizes[c.Args.Group] = max(sizes[c.Args.Group], c.Args.Rank+1)
				if known := largest[c.id()]; known == nil || known.Args.Bytes < c.Args.Bytes {
					largest[c.id()] = c
				}
			}
		}
	}
	sums := make([][]int64, j.size())
	for r := range sums {
		sums[r] = make([]int64, len(sums))
	}
	for id, c := range largest {
		traffic(c.kind, c.Args.Algorithm, sizes[id.group], c.Args.Root, c.Args.Bytes,
			func(from, to int, bytes int64) {
				a, known := ranks[member{id.group, from}]
				b, there := ranks[member{id.group, to}]
				if known && there {
					sums[a][b] += bytes
				}
			})
	}
	return sums
}
