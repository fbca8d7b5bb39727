package fuse

import (
	"errors"
	"fmt"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/kernels"
	"github.com/euryale-ml/euryale/internal/kernels/simd"
	"github.com/euryale-ml/euryale/internal/workers"
)

// blockSize is how many elements the host computes at a time, or somewhat fewer. A block of float32
// is 4 KiB, so that the few values that an instruction needs stay in the first-level cache.
const blockSize = 1024

// host runs a program on host memory.
type host struct {
	p      *Program
	layout *layout
	rows   *rows // nil if the program folds none
	pool   *workers.Pool
	level  simd.Level

	n      int  // elements of the loop
	inner  int  // extent of the innermost axis
	block  int  // elements computed at a time
	cut    bool // a block does not go beyond the end of the innermost axis
	part   int  // elements that a worker computes at a time
	parts  int
	values []extent

	machines []*evaluator // one for each worker
	folds    []fold       // of each output that is folded, nil of others
	direct   []direct     // of each output

	dst, src []backend.Buffer // of the run under way
}

// fold is a folded output.
type fold interface {
	// beginFold comes before the first part.
	beginFold()
	// add returns the step that folds a value that has an element for each of the block.
	add(m *evaluator, x Value) blockFunc
	// finish stores what was folded.
	finish() error
}

// Host returns the Loop of a program on host memory. A large program runs in parts on the workers
// of a pool, if it is not nil; results do not depend on their number. It needs no scratch, and Run
// allocates nothing.
func Host(p *Program, pool *workers.Pool) (Loop, error) {
	if err := p.Check(); err != nil {
		return nil, err
	}
	h := &host{p: p, layout: layoutOf(p), rows: rowsOf(p), pool: pool, level: simd.Best()}
	h.n, _ = h.layout.size()
	h.inner = h.layout.shape[len(h.layout.shape)-1]
	h.divide()
	h.classify()
	h.folds = make([]fold, len(p.Outputs))
	for k, out := range p.Outputs {
		if h.direct = append(h.direct, h.directOf(k, out)); out.Folded {
			h.folds[k] = h.fold(k, out)
		}
	}
	for worker := range pool.Size() {
		h.machines = append(h.machines, newMachine(h, worker))
	}
	return h, nil
}

// Scratch implements [Loop].
func (h *host) Scratch() int { return 0 }

// Epilogue is a Loop of [Host] that may also run inside of a product, on elements whose operands
// are finished. Its program folds nothing.
type Epilogue interface {
	Loop
	kernels.Epilogue
	// Bind begins a run on these operands, as Loop.Run has them, and Unbind ends it. In between,
	// the elements are computed, each once.
	Bind(dst, src []backend.Buffer) error
	Unbind() error
}

// Run implements [Loop].
func (h *host) Run(dst, src []backend.Buffer, _ backend.Buffer) error {
	if err := h.Bind(dst, src); err != nil {
		return err
	}
	h.All()
	return h.Unbind()
}

// Bind implements [Epilogue].
func (h *host) Bind(dst, src []backend.Buffer) error {
	if err := h.p.CheckBuffers(dst, src, false); err != nil {
		return err
	}
	h.dst, h.src = dst, src
	for k := range h.direct {
		h.direct[k].decide(dst[k], src)
	}
	for _, f := range h.folds {
		if f != nil {
			f.beginFold()
		}
	}
	return nil
}

// All implements [Epilogue].
func (h *host) All() {
	if h.parts == 1 {
		(*task)(h).Run(0, 0)
	} else {
		h.pool.Do(h.parts, (*task)(h))
	}
}

// Divides implements [Epilogue]. A block begins with the innermost axis where it has whole runs of
// it.
func (h *host) Divides(parts, n int) bool {
	return parts >= h.parts && (h.cut || len(h.layout.shape) == 1 || n%h.inner == 0)
}

// Elements implements [Epilogue].
func (h *host) Elements(lo, hi, worker int) {
	m := h.machines[worker]
	if err := m.run(lo, hi); err != nil {
		m.err = fmt.Errorf("elements %d to %d of the loop: %w", lo, hi, err)
	}
}

// Unbind implements [Epilogue].
func (h *host) Unbind() error {
	defer func() { h.dst, h.src = nil, nil }() // the caller's memory
	var err error
	for _, m := range h.machines {
		err, m.err = errors.Join(err, m.err), nil
	}
	for _, f := range h.folds {
		if f != nil && err == nil {
			err = f.finish()
		}
	}
	return err
}

// task is a run of a program in parts.
type task host

// Run implements [workers.Task].
func (t *task) Run(part, worker int) {
	h := (*host)(t)
	h.machines[worker].turn = part
	h.Elements(part*h.part, min((part+1)*h.part, h.n), worker)
}

// evaluator is what one worker needs to run a program: blocks for values, and steps that compute
// them.
type evaluator struct {
	*host
	blocks
	worker int
	turn   int // the part under way

	first                   []blockFunc // when a part begins
	loads, computes, stores []blockFunc // of each block
	err                     error
}

// blockFunc does elements lo to lo+n, with n up to a block.
type blockFunc func(lo, n int) error

func newMachine(h *host, worker int) *evaluator {
	m := &evaluator{host: h, blocks: makeBlocks(len(h.p.Code)), worker: worker}
	m.place()
	for k, c := range h.p.Code {
		switch c.Op {
		case Const:
			m.add(k, &m.first, m.constant(k, c))
		case Load:
			m.add(k, &m.loads, m.toOutput(k, m.load(k, c)))
		case Index:
			m.add(k, &m.loads, m.index(k, c))
		case SumRow, MaxRow, MinRow:
			m.add(k, &m.computes, m.foldRows(k, c.Op.folds(), m.each(c.Args[0])))
		default:
			m.add(k, &m.computes, m.toOutput(k, m.compute(k, c)))
		}
	}
	for k, out := range h.p.Outputs {
		if out.Folded {
			m.stores = append(m.stores, h.folds[k].add(m, m.each(out.Value)))
		} else {
			m.stores = append(m.stores, m.store(k, out))
		}
	}
	m.bind() // so that no run allocates
	return m
}

// add appends the step that computes value k, or copies it.
func (m *evaluator) add(k Value, to *[]blockFunc, do blockFunc) {
	if m.values[k].fixed {
		to = &m.first
	}
	*to = append(*to, do)
}

// run computes the elements from lo to hi.
func (m *evaluator) run(lo, hi int) error {
	m.bind()
	for _, do := range m.first {
		if err := do(0, min(m.block, m.n)); err != nil {
			return err
		}
	}
	for lo < hi {
		n := min(m.block, hi-lo)
		if m.cut {
			n = min(n, m.inner-lo%m.inner)
		}
		for _, steps := range [...][]blockFunc{m.loads, m.computes, m.stores} {
			for _, do := range steps {
				if err := do(lo, n); err != nil {
					return fmt.Errorf("element %d: %w", lo, err)
				}
			}
		}
		lo += n
	}
	return nil
}
