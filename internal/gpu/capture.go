package gpu

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"

	"github.com/euryale-ml/euryale/backend"
)

// Calls that are recorded in graphs, and their replays.

// captured are the calls of a communicator in a graph. All of them are one call in each replay.
type captured struct {
	c     *Communicator
	calls []backend.Header // without numbers
	used  [algorithmCount]int64
	hash  uint64 // of all that ranks must agree on

	last stream        // where the last call was recorded
	end  backend.Event // of that call

	graph   *backend.Graph // nil before it is made
	replays uint32         // order guards it from the first replay on
	origin  backend.Origin // of the replays
}

var _ backend.Participant = (*captured)(nil)

// capture records a call that was checked. Nothing is posted, and no error ends the group: nothing
// runs.
func (c *Communicator) capture(s stream, into *backend.Recording, k *call) (backend.Work, error) {
	if k.onHost() {
		return nil, fmt.Errorf("%w: %s: %v of host memory cannot be recorded in a graph, since "+
			"the host copies it: copy it to the device before, or allocate it there",
			backend.ErrArgument, backend.RankOf(c), k.what)
	}
	c.order.Lock()
	defer c.order.Unlock()
	p := into.Participant(c, func() backend.Participant {
		return &captured{c: c, origin: backend.Origin{Purpose: backend.ForReplay}}
	}).(*captured)
	c.recording = into
	e, err := p.record(s, k)
	if err != nil {
		return nil, fmt.Errorf("%s: record %v in a graph: %w", backend.RankOf(c), k.what, err)
	}
	return backend.RecordedWork(e), nil
}

// record records a call behind those before it. order is held.
func (p *captured) record(s stream, k *call) (backend.Event, error) {
	c := p.c
	of, kernels := c.kernelsOf, c.kernels
	defer func() { c.kernelsOf, c.kernels = of, kernels }() // this is not where kernels run
	if p.last != nil && p.last != s {
		if err := s.Wait(p.end); err != nil {
			return nil, err
		}
	}
	if err := p.reach(s, len(p.calls)); err != nil {
		return nil, err
	}
	c.chooseAgain(k, true)
	c.call = *k
	if err := c.launch(s, &c.call, 0); err != nil {
		return nil, err
	}
	p.add(k)
	var err error
	p.last = s
	p.end, err = s.Record()
	return p.end, err
}

// add adds a call to what all ranks must have recorded alike.
func (p *captured) add(k *call) {
	h := k.what.Header(0, k.count, k.dtype)
	if h.Origin != nil {
		own := *h.Origin // which the caller may use again
		h.Origin = &own
	}
	p.calls = append(p.calls, h)
	p.used[k.use]++
	h.Seq, h.Generation = p.hash, uint32(k.use)   // a digest of all calls so far
	if k.use == byCopyEngines && p.c.spreads(k) { // they write to one place on all ranks
		h.Seq += uint64(p.c.memory.inWindow(k.dst))
	}
	p.hash = h.Put(new([backend.HeaderSize]byte))
}

// reach makes the device tell the host that the first n calls of the graph are done. There is no
// need for it before the first one, and so none in a graph of one call.
func (p *captured) reach(s stream, n int) error {
	if n == 0 {
		return nil
	}
	return s.Fill(p.c.progress.onDevice(), uint64(n))
}

// Of implements [backend.Participant].
func (p *captured) Of() backend.Communicator { return p.c }

// Err implements [backend.Participant].
func (p *captured) Err() error {
	if p.c.member.Err() == nil {
		return nil
	}
	return p.c.member.Failure(p.String())
}

// Complete implements [backend.Participant]: the next replay begins at the first call again.
func (p *captured) Complete(q backend.Queue) error {
	p.c.order.Lock()
	defer p.c.order.Unlock()
	end := p.end
	p.last, p.end, p.c.recording = nil, nil, nil
	// CUDA finds queues that are not joined, but not behind a call of NCCL, which sets what
	// its nodes depend on itself.
	s, err := p.c.stream(q)
	if err != nil || end != nil && !s.Joined(end) {
		return errors.Join(err, p.unjoined())
	}
	if len(p.calls) < 2 {
		return nil
	}
	return s.Fill(p.c.progress.onDevice(), 0)
}

// unjoined is the error of a capture that ends beside a call.
func (p *captured) unjoined() error {
	last := p.calls[len(p.calls)-1]
	text, _, _ := strings.Cut(last.String(), " (call")
	return fmt.Errorf("%w: %s: the capture ends while the queue of %s is not joined: let the "+
		"queue that is recorded wait for the call before the end", backend.ErrArgument,
		backend.RankOf(p.c), text)
}

// Made implements [backend.Participant].
func (p *captured) Made(g *backend.Graph) (forget func()) {
	p.graph = g
	return p.c.graphs.add(g, p.Err)
}

// String describes the graph: "a graph of 12 collectives".
func (p *captured) String() string {
	h := p.header(0)
	text, _, _ := strings.Cut(h.String(), " (call")
	return text
}

// header returns the header of replay number p.replays as call seq.
func (p *captured) header(seq uint64) backend.Header {
	h := backend.Collective{Kind: replayKind, Origin: &p.origin}.Header(seq, len(p.calls),
		backend.U8)
	h.State, h.Original.Hash = p.replays, p.hash
	return h
}

// Replay implements [backend.Participant].
func (p *captured) Replay(q backend.Queue, launch func() error) (backend.Work, error) {
	s, err := p.c.stream(q)
	if err != nil {
		return nil, err
	}
	w, err := p.replay(s, launch)
	if err != nil {
		if p.c.member.Ends(err) { // NCCL's end, for which ended waits, waits for the graph
			_ = p.graph.DestroyInReplay(p.c.member.Failure(p.String()))
		}
		return nil, p.c.ended(err, p.String())
	}
	return replayed{w, p}, nil
}

// replay posts a replay and starts it by launch, like start. Errors are sticky ones or reports.
func (p *captured) replay(s stream, launch func() error) (*work, error) {
	c := p.c
	c.order.Lock()
	defer c.order.Unlock()
	if c.member.Err() != nil {
		return nil, c.member.Failure(p.String())
	}
	p.replays++
	w := c.newWork()
	w.header = p.header(c.seq.Add(1))
	w.kernel = p.kernels() > 0
	event, err := c.posted(w, s)
	if err != nil {
		return nil, err
	}
	if err := c.follow(s); err != nil {
		return nil, c.member.Broken(err)
	}
	if err := launch(); err != nil {
		return nil, c.member.Broken(err)
	}
	if err := c.bound(func() error { return c.dev.RecordEvent(s.Stream(), event) }); err != nil {
		return nil, c.member.Broken(err)
	}
	c.started.Store(w.header.Seq)
	p.count(s)
	return w, nil
}

// kernels is how many calls are run by our kernels.
func (p *captured) kernels() (n int64) {
	for _, used := range p.used[1:] {
		n += used
	}
	return n
}

// count counts the calls of a replay on s. order is held.
func (p *captured) count(s stream) {
	for a, n := range p.used {
		p.c.used[a].Add(n)
	}
	if k, ok := s.(exchanger); ok && p.kernels() > 0 {
		p.c.kernelsOf, p.c.kernels = s, k
	}
	if len(p.calls) > 1 {
		p.c.progress.on = s
	}
}

// replayed is a replay: a work that says how far it has come if it fails.
type replayed struct {
	*work
	p *captured
}

// Join implements [backend.Work].
func (w replayed) Join(ctx context.Context) error {
	err := w.work.Join(ctx)
	var e *backend.Error
	if !errors.As(err, &e) || e.Call == "" {
		return err
	}
	named := *e
	named.Call += w.reached()
	return &named
}

// reached says which of its calls the replay had come to when the group ended, if it was that
// replay which ran.
func (w replayed) reached() string {
	n, ok := w.c.reached(w.header.Seq)
	if !ok || n >= len(w.p.calls) {
		return ""
	}
	h := w.p.calls[n]
	text, _, _ := strings.Cut(h.String(), " (call")
	return fmt.Sprintf(", at collective %d: %s", n+1, text)
}

// progress is how many calls of a replay are done, as the device tells the host.
type progress struct {
	status
	on   stream // where it was told last
	seen uint32 // when the watchdog looked last; state guards it
	at   uint32 // when the group ended; state guards it
}

// onDevice is the word as the device uses it.
func (p *progress) onDevice() backend.Buffer {
	p.mu.RLock()
	defer p.mu.RUnlock()
	return backend.OnDevice(backend.I32, p.words.Addr(), 1)
}

// read returns the word, 0 if there is none.
func (p *progress) read() uint32 {
	p.mu.RLock()
	defer p.mu.RUnlock()
	if p.words.Len() == 0 {
		return 0
	}
	return p.flag(0).Load()
}

// look keeps how far a replay has come, as long as its kernels wait for each other: those behind
// one that gives up end at once.
func (c *Communicator) look() {
	at := c.progress.read()
	if c.status.straggler() >= 0 {
		return
	}
	c.state.Lock()
	defer c.state.Unlock()
	c.progress.seen = at
}

// reached returns how many calls of replay number seq were done when the group ended, if that
// is the call which had not ended.
func (c *Communicator) reached(seq uint64) (n int, ok bool) {
	c.state.Lock()
	defer c.state.Unlock()
	return int(c.progress.at), c.fixed && seq == c.done+1
}

// graphs are those that hold calls of a communicator, and so NCCL's.
type graphs struct {
	mu   sync.Mutex
	all  []*backend.Graph
	over bool // there are none any more
}

// add adds a graph, unless the communicator has ended: then nobody keeps NCCL from its end.
func (s *graphs) add(g *backend.Graph, why func() error) (forget func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.over {
		go g.Destroy(why()) // which waits until the graph is made
		return func() {}
	}
	s.all = append(s.all, g)
	return func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.all = slices.DeleteFunc(s.all, func(one *backend.Graph) bool { return one == g })
	}
}

// destroy frees all graphs, for cause.
func (s *graphs) destroy(cause error) error {
	s.mu.Lock()
	all := s.all
	s.all, s.over = nil, true
	s.mu.Unlock()
	var errs []error
	for _, g := range all {
		errs = append(errs, g.Destroy(cause))
	}
	return errors.Join(errs...)
}

// freeProgress gives the word back once no replay writes to it, however long that takes. It may
// come after the end of the device, which takes the word with it.
func (c *Communicator) freeProgress() error {
	c.order.Lock()
	var on backend.Queue
	if c.progress.on != nil {
		on = c.progress.on
	}
	c.order.Unlock()
	word := c.progress.takeMemory()
	if word.Len() == 0 {
		return nil
	}
	err := settle(on, forever)
	if err == nil {
		err = c.dev.FreeHost(word)
	}
	if errors.Is(err, backend.ErrClosed) {
		return nil
	}
	return err
}

// unrecorded refuses, in the middle of a capture, what is no part of a graph. order is held.
func (c *Communicator) unrecorded(doing string) error {
	main, ok := c.dev.Default().(stream)
	if c.recording != nil && !c.recording.Ended() || ok && main.Recording() != nil {
		return fmt.Errorf("%w: %s: %s during a capture, which cannot record it: call it before "+
			"Capture", backend.ErrArgument, backend.RankOf(c), doing)
	}
	return nil
}
