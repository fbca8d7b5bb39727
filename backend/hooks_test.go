package backend_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/testing/require"
)

// written are hooks that write down what they are told.
type written struct {
	mu   sync.Mutex
	told []string
}

func (h *written) Start(c *backend.Call) (id uint64) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.told = append(h.told, fmt.Sprintf("start %d of %d bytes", c.Header.Seq, c.Bytes))
	return 100 + c.Header.Seq
}

func (h *written) End(id uint64, err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.told = append(h.told, fmt.Sprintf("end %d: %v", id, err))
}

// answering starts calls as a test wants it.
type answering struct {
	backend.Communicator
	start func() (backend.Work, error)
}

func (answering) Capabilities() (none backend.Capabilities) { return none }

func (answering) Name() string { return "answering" }

func (answering) Rank() int { return 0 }
func (answering) Size() int { return 2 }

func (a answering) Start(backend.Queue, backend.Collective, backend.Buffer,
	backend.Buffer) (backend.Work, error) {
	return a.start()
}

// pending is a Work that ends when its channel is closed.
type pending struct{ end chan struct{} }

func (p pending) Wait(backend.Queue) error { return nil }

func (p pending) Done() bool {
	select {
	case <-p.end:
		return true
	default:
		return false
	}
}

func (p pending) Join(ctx context.Context) error {
	select {
	case <-p.end:
		return errBroken
	case <-ctx.Done():
		return ctx.Err()
	}
}

var errBroken = errors.New("broken")

func TestHooksAreToldOfEachCallOnce(t *testing.T) {
	h, end := new(written), make(chan struct{})
	comm := &answering{}
	c := backend.WithHooks(comm, h)
	x := backend.Of(make([]float32, 4))
	start := func(w backend.Work, err error) backend.Work {
		comm.start = func() (backend.Work, error) { return w, err }
		w, _ = c.Start(nil, backend.Collective{Kind: backend.AllReduce}, x, x)
		return w
	}
	start(backend.Finished(nil), nil)
	start(backend.Finished(errBroken), nil)
	start(nil, errBroken)
	w := start(pending{end}, nil)
	brief, cancel := context.WithTimeout(context.Background(), time.Millisecond)
	defer cancel()
	if err := w.Join(brief); !errors.Is(err, context.DeadlineExceeded) || w.Done() {
		t.Errorf("a Join with a context that ended gave %v, Done %v", err, w.Done())
	}
	start(backend.Finished(nil), nil)
	close(end)
	for range 2 {
		if err := w.Join(context.Background()); err != errBroken || !w.Done() {
			t.Errorf("Join gave %v, Done %v", err, w.Done())
		}
	}
	require.Fails(t, "the error of a wrong call",
		require.Err(c.Start(nil, backend.Collective{Kind: backend.AllReduce}, x, x.Slice(0, 1))),
		backend.ErrArgument)
	want := []string{
		"start 1 of 16 bytes", "end 101: <nil>", "start 2 of 16 bytes", "end 102: broken",
		"start 3 of 16 bytes", "end 103: broken",
		"start 4 of 16 bytes", "start 5 of 16 bytes", "end 105: <nil>", "end 104: broken",
	}
	require.Slices(t, "told", h.told, want)
}
