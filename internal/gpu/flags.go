package gpu

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/group"
	peers "github.com/euryale-ml/euryale/internal/kernels/cuda"
	"github.com/euryale-ml/euryale/internal/spinwait"
)

// How ranks meet in graphs without a kernel, which would take a multiprocessor from the products
// beside it. In each meeting a rank copies a word that is 1, its signal, to a flag on each other
// rank, waits until its own flags are 1, and sets them to 0. A graph runs again with the same
// parameters, so that values cannot count meetings.
//
// Nobody's flag is set again before it is cleared as long as a meeting uses other flags than the
// one before it: whoever sets a flag of meeting k+2 has passed k+1, which takes the signals of all,
// and a rank sends that of k+1 once it has cleared the flags of k.
//
// Such waits have no limit. The host ends them when the group ends, by setting this rank's flags
// over and over. It takes the rank's signal away before: a rank that runs on without having waited
// copies 0 to the others, and none takes what it has made for a result.

// waiter is a stream that waits for memory without a kernel.
type waiter interface {
	// Await waits until words of 32 bits are 1, and sets them to 0.
	Await(words ...backend.Buffer) error
}

// setter is a queue that sets words of 32 bits, whatever other queues wait for.
type setter interface {
	Set(words backend.Buffer, value uint32) error
}

const (
	flagSets    = 3 // the flags of a call's first meeting, and those of the two of each round
	flagBytes   = 4 * flagSets * peers.MaxPeers
	signalBytes = 4
)

// flag is what rank r sets on rank p in meetings that use a set.
func (m *peerMemory) flag(p, set, r int) backend.Buffer {
	return backend.OnDevice(backend.I32, m.flags(p)+uintptr(4*(set*peers.MaxPeers+r)), 1)
}

// flags is where those of rank p are: behind what the kernels have there. Its signal follows.
func (m *peerMemory) flags(p int) uintptr {
	return m.pad.at[p] + uintptr(padBytes(m.c.size)-flagBytes-signalBytes)
}

// signal returns this rank's.
func (m *peerMemory) signal() backend.Buffer {
	return backend.OnDevice(backend.I32, m.flags(m.c.rank)+flagBytes, 1)
}

// meetByFlags waits, in a graph, until all ranks have come so far. The meetings before and after
// it, also in other graphs, use other sets.
func (m *peerMemory) meetByFlags(q stream, set int) error {
	w, ok := q.(waiter)
	if !ok {
		return fmt.Errorf("%w: a %T does not wait for memory", backend.ErrUnsupported, q)
	}
	var own []backend.Buffer
	for step := 1; step < m.c.size; step++ {
		p := (m.c.rank + step) % m.c.size
		if err := q.Push(m.flag(p, set, m.c.rank), m.signal()); err != nil {
			return err
		}
		own = append(own, m.flag(m.c.rank, set, p))
	}
	return w.Await(own...)
}

// probeTime is how long ranks try to meet by flags.
const probeTime = 5 * time.Second

// probeFlags has ranks meet by flags in a graph that runs twice. If that does not work on all of
// them, kernels meet.
func (m *peerMemory) probeFlags() error {
	if m.c.plan.topology.Link != FullyConnected {
		return nil
	}
	w, err := m.newWaits()
	var q backend.Queue
	var graph *backend.Graph
	if err == nil {
		q, graph, err = m.recordMeetings(w)
	}
	if err = m.c.gather.Vote(m.c.members, err); err == nil {
		m.c.waits.Store(w)
		err = m.c.gather.Vote(m.c.members, m.runMeetings(w, graph))
	}
	if graph != nil {
		err = errors.Join(err, graph.Close())
	}
	if q != nil {
		err = errors.Join(err, q.Close())
	}
	if err != nil {
		m.c.waits.Store(nil)
		err = errors.Join(err, w.close())
	}
	if refusal := (*group.Refusal)(nil); errors.As(err, &refusal) {
		m.c.flagless = err.Error() // also what could not be closed
		return nil
	}
	return err
}

// recordMeetings records a meeting by each set, on a queue that nobody else uses meanwhile.
func (m *peerMemory) recordMeetings(w *waits) (q backend.Queue, graph *backend.Graph, err error) {
	ctx, cancel := context.WithTimeout(context.Background(), probeTime)
	defer cancel()
	// other queues do not wait for that one, and would send what the signal was before
	if err := errors.Join(w.set(w.signal, 1), drain(ctx, w.queue)); err != nil {
		return nil, nil, err
	}
	if q, err = m.dev.NewQueue(); err != nil {
		return nil, nil, err
	}
	s, ok := q.(interface {
		stream
		backend.GraphQueue
	})
	if !ok {
		return q, nil, fmt.Errorf("%w: a %T records no graphs", backend.ErrUnsupported, q)
	}
	graph, err = s.Capture(func() error {
		var errs []error
		for set := range flagSets {
			errs = append(errs, m.meetByFlags(s, set))
		}
		return errors.Join(errs...)
	})
	return q, graph, err
}

// runMeetings runs them twice.
func (m *peerMemory) runMeetings(w *waits, graph *backend.Graph) error {
	var last backend.Work
	for range 2 {
		var err error
		if last, err = graph.Launch(nil); err != nil {
			return err
		}
	}
	ctx, cancel := context.WithTimeout(context.Background(), probeTime)
	defer cancel()
	err := m.c.await(ctx, func() (bool, error) { return last.Done(), nil })
	if err != nil {
		w.endWaits(last.Done)
	}
	return err
}

// waits is how the host ends what a rank's graphs wait for: by a queue on which nothing else is.
type waits struct {
	queue         backend.Queue
	flags, signal backend.Buffer

	mu   sync.Mutex
	over bool // the memory may be given back
}

func (m *peerMemory) newWaits() (*waits, error) {
	q, err := m.dev.NewQueue()
	if err != nil {
		return nil, err
	}
	if _, ok := q.(setter); !ok {
		return nil, errors.Join(fmt.Errorf("%w: a %T does not set memory", backend.ErrUnsupported,
			q), q.Close())
	}
	return &waits{queue: q, signal: m.signal(),
		flags: backend.OnDevice(backend.I32, m.flags(m.c.rank), flagBytes/4)}, nil
}

// endWaits ends all waits until the device is idle: each one that is ended clears its flags. What
// fails is a device on which nothing waits any more.
func (w *waits) endWaits(idle func() bool) {
	if w.set(w.signal, 0) != nil {
		return
	}
	for wait := (spinwait.Wait{}); w.set(w.flags, 1) == nil && !idle(); wait.Pause() {
	}
}

func (w *waits) set(words backend.Buffer, value uint32) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.over {
		return backend.ErrClosed
	}
	return w.queue.(setter).Set(words, value)
}

// close says that nothing waits any more. A nil waits has nothing to close.
func (w *waits) close() error {
	if w == nil {
		return nil
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.over = true
	return w.queue.Close()
}
