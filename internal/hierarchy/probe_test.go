package hierarchy

import (
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/serial"
)

// probe is a communicator that counts what a rank sends, and that can be told to
// fail, to stall or to be slow in one of the parts that New makes of it.
type probe struct {
	backend.Base
	rank   int   // of the flat communicator
	phase  phase // remainderPhase is the flat communicator
	hook   func(p *probe, q backend.Queue) (backend.Work, error)
	lag    time.Duration // of Abort and Close
	splits []phase       // of the next ones; none are left once New has them

	mu    sync.Mutex
	parts map[phase]*probe
	calls int
	sent  int64

	aborted chan struct{} // closed when the communicator has ended, or begins to close
	once    sync.Once
}

// probes returns a wrapper for group whose parts call hook before each call: one
// that returns a work or an error answers it.
func probes(l Layout, hook func(p *probe, q backend.Queue) (backend.Work, error)) func(
	backend.Communicator) backend.Communicator {
	splits := []phase{reducePhase, exchangePhase, broadcastPhase, gatherPhase}
	if l.Devices() == 1 {
		splits = []phase{exchangePhase, broadcastPhase}
	}
	return func(c backend.Communicator) backend.Communicator {
		return &probe{Base: backend.Wrap(c), rank: c.Rank(), phase: remainderPhase, hook: hook,
			splits: splits, parts: map[phase]*probe{}, aborted: make(chan struct{})}
	}
}

// probeOf returns what is around the flat communicator.
func probeOf(c backend.Communicator) *probe { return c.(*Communicator).Communicator.(*probe) }

func (p *probe) Split(color, key int) (backend.Communicator, error) {
	part, err := p.Communicator.Split(color, key)
	if err != nil || part == nil || len(p.splits) == 0 {
		return part, err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	inner := &probe{Base: backend.Wrap(part), rank: p.rank, phase: p.splits[0], hook: p.hook,
		lag: p.lag, aborted: make(chan struct{})}
	p.parts[inner.phase], p.splits = inner, p.splits[1:]
	return inner, nil
}

func (p *probe) Start(q backend.Queue, what backend.Collective, dst,
	src backend.Buffer) (backend.Work, error) {
	if t, ok := q.(tapped); ok {
		q = t.Queue
	}
	p.mu.Lock()
	p.calls++
	P := int64(p.Size())
	switch what.Kind {
	case backend.AllGather:
		p.sent += int64(src.NBytes()) * (P - 1)
	case backend.AllToAll, backend.ReduceScatter:
		p.sent += int64(src.NBytes()) / P * (P - 1)
	}
	p.mu.Unlock()
	if q == nil {
		q = p.Device().Default()
	}
	if p.hook != nil {
		if w, err := p.hook(p, q); w != nil || err != nil {
			return w, err
		}
	}
	return p.Communicator.Start(q, what, dst, src)
}

func (p *probe) Abort(cause error) {
	time.Sleep(p.lag)
	p.Communicator.Abort(cause)
	p.once.Do(func() { close(p.aborted) })
}

func (p *probe) Close() error {
	time.Sleep(p.lag)
	p.once.Do(func() { close(p.aborted) })
	return p.Communicator.Close()
}

func (p *probe) number() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.calls
}

// between returns the bytes that this rank has sent on its rail.
func (p *probe) between() int64 {
	return p.parts[exchangePhase].sent + p.parts[broadcastPhase].sent
}

// tapped is a stream's queue that calls hook before kernels which phases without a communicator
// begin with. Collectives of probes run on the queue below.
type tapped struct {
	backend.Queue
	hook func(q backend.Queue) error
}

func (t tapped) Copy2D(dst backend.Buffer, dstPitch int, src backend.Buffer, srcPitch, width,
	rows int) error {
	if err := t.hook(t.Queue); err != nil {
		return err
	}
	return t.Queue.Copy2D(dst, dstPitch, src, srcPitch, width, rows)
}

func (t tapped) Reduce(op backend.ReduceOp, dst backend.Buffer, srcs ...backend.Buffer) error {
	if err := t.hook(t.Queue); err != nil {
		return err
	}
	return t.Queue.Reduce(op, dst, srcs...)
}

// tap makes the kernels of a phase call hook.
func tap(c *Communicator, p phase, hook func(q backend.Queue) error) {
	c.queues[p] = tapped{c.queues[p], hook}
}

// errInjected is the failure of a probe.
var errInjected = errors.New("a cable was pulled")

// failed is a work that fails when its queue gets to it.
type failed struct {
	reached backend.Event
	err     error
}

func (f failed) Wait(q backend.Queue) error { return q.Wait(f.reached) }

func (f failed) Done() bool { return f.reached.Done() }

func (f failed) Join(ctx context.Context) error {
	if err := f.reached.Join(ctx); err != nil {
		return err
	}
	return f.err
}

// stalled is a work that ends with its communicator, once its queue has got to it.
type stalled struct {
	p       *probe
	reached backend.Event
}

// stalledOn is one that is started on q.
func stalledOn(p *probe, q backend.Queue) (backend.Work, error) {
	reached, err := q.Record()
	return stalled{p, reached}, err
}

func (s stalled) Wait(backend.Queue) error { return nil }

func (s stalled) Done() bool { return serial.Event(s.p.aborted).Done() && s.reached.Done() }

func (s stalled) Join(ctx context.Context) error {
	select {
	case <-s.p.aborted:
		if err := s.reached.Join(ctx); err != nil {
			return err
		}
		return &backend.Error{Comm: s.p.Name(), Rank: s.p.Rank(), Peer: -1,
			Cause: backend.ErrAborted}
	case <-ctx.Done():
		return ctx.Err()
	}
}

// endOf is an event that happens when every communicator of a rank has ended. What a
// stalled queue lets go earlier does its work, and the call may end well.
type endOf struct{ *Communicator }

func (e endOf) Done() bool {
	return !slices.ContainsFunc(e.Unwrap(), func(inner backend.Communicator) bool {
		return !serial.Event(inner.(*probe).aborted).Done()
	})
}

func (e endOf) Join(ctx context.Context) error {
	for _, inner := range e.Unwrap() {
		select {
		case <-inner.(*probe).aborted:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return nil
}

// delay is an event that takes its time.
type delay time.Duration

func (delay) Done() bool { return false }

func (d delay) Join(context.Context) error {
	time.Sleep(time.Duration(d))
	return nil
}
