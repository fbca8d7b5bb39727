package reference

import (
	"unsafe"

	"github.com/euryale-ml/euryale/backend"
)

// result computes what a call leaves in a rank's destination.
func (m *meeting) result(rank int, k *call) error {
	P, root, count := len(m.calls), k.what.Root, int(k.header.Count)
	lo, hi := k.what.Chunk(rank, P, count)
	switch k.what.Kind {
	case backend.AllReduce:
		return m.reduce(k, 0, count)
	case backend.ReduceScatter:
		return m.reduce(k, lo, hi)
	case backend.Reduce:
		if rank != root {
			return nil
		}
		return m.reduce(k, 0, count)
	case backend.AllToAll:
		m.receive(rank, k)
	case backend.Broadcast:
		copy(k.dst.Bytes(), m.piece(k, root, 0, count).Bytes())
	case backend.Scatter:
		copy(k.dst.Bytes(), m.piece(k, root, lo, hi).Bytes())
	default: // AllGather, Gather
		if k.what.Kind == backend.AllGather || rank == root {
			m.gatherChunks(k)
		}
	}
	return nil
}

// piece returns elements lo to hi of what rank s passed. It is padded with
// zeros if s, unverified, passed less.
func (m *meeting) piece(k *call, s, lo, hi int) backend.Buffer {
	size := k.header.DType.Size()
	mem := make([]byte, (hi-lo)*size)
	if lo*size < len(m.srcs[s]) {
		copy(mem, m.srcs[s][lo*size:])
	}
	return backend.Host(k.header.DType, unsafe.Pointer(unsafe.SliceData(mem)), hi-lo)
}

func (m *meeting) reduce(k *call, lo, hi int) error {
	pieces := make([]backend.Buffer, len(m.srcs))
	for s := range pieces {
		pieces[s] = m.piece(k, s, lo, hi)
	}
	if k.what.Kind == backend.AllReduce && k.what.Splits != nil {
		return m.sumBranches(k)
	}
	return ReduceIn(k.what.Association, k.what.Op, k.dst, pieces...)
}

// sumBranches is reduce of what a rank may pass several of.
func (m *meeting) sumBranches(k *call) error {
	var pieces []backend.Buffer
	var terms []int
	n := int(k.header.Count)
	for s := range m.srcs {
		for i := range k.what.Branches(nil, s) {
			pieces = append(pieces, m.piece(k, s, i*n, (i+1)*n))
		}
		terms = k.what.Branches(terms, s)
	}
	return SumBranches(k.dst, pieces, terms)
}

func (m *meeting) gatherChunks(k *call) {
	for s := range m.srcs {
		lo, hi := k.what.Chunk(s, len(m.srcs), int(k.header.Count))
		copy(k.dst.Slice(lo, hi).Bytes(), m.piece(k, s, 0, hi-lo).Bytes())
	}
}

func (m *meeting) receive(rank int, k *call) {
	for s := range m.srcs {
		n, from, to := k.what.Pair(s, rank, len(m.srcs), int(k.header.Count))
		copy(k.dst.Slice(to, to+n).Bytes(), m.piece(k, s, from, from+n).Bytes())
	}
}
