package observe

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/testing/reference"
	"github.com/euryale-ml/euryale/internal/testing/require"
)

// later is a communicator whose calls end when they are joined.
type later struct{ backend.Communicator }

func (later) Start(backend.Queue, backend.Collective, backend.Buffer, backend.Buffer) (backend.Work,
	error) {
	return joined{}, nil
}

type joined struct{}

func (joined) Wait(backend.Queue) error   { return nil }
func (joined) Done() bool                 { return false }
func (joined) Join(context.Context) error { return nil }

func BenchmarkRecording(b *testing.B) {
	for _, counts := range []bool{false, true} {
		recording(b, counts)
	}
}

// recording measures a recorder, which may count calls.
func recording(b *testing.B, counts bool) {
	x := backend.Of(make([]float32, 8))
	for name, comm := range map[string]backend.Communicator{"caller": silent{reference.New("test",
		1, time.Minute)[0]}, "queued": later{reference.New("test", 1, time.Minute)[0]}} {
		b.Run(fmt.Sprintf("%s/counts=%v", name, counts), func(b *testing.B) {
			r := New(0, 1000)
			if counts {
				r.Count()
			}
			c := backend.WithHooks(comm, r)
			b.ReportAllocs()
			for b.Loop() {
				w, err := c.Start(nil, allReduce, x, x)
				if err == nil {
					err = w.Join(context.Background())
				}
				require.NoError(b, err)
			}
		})
	}
}
