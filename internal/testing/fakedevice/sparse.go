package fakedevice

import (
	"context"
	"fmt"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/kernels"
	"github.com/euryale-ml/euryale/internal/testing/reference"
)

var _ kernels.Sparse = (*queue)(nil)

// turn is an event that happens by being waited for: a queue of the host waits by joining it.
type turn func() error

// Done implements [backend.Event]: it happens in Join.
func (turn) Done() bool { return false }

// Join implements [backend.Event].
func (t turn) Join(context.Context) error { return t() }

// selectScratch is what a selection is asked for, so that tests see whether it is
// there: the host needs none.
const selectScratch = 64

func (q *queue) SelectScratch(*kernels.Selection) int { return selectScratch }

func (q *queue) Select(s *kernels.Selection) error {
	wrong := check.Select(s)
	if wrong == nil && s.Scratch.NBytes() < selectScratch {
		wrong = fmt.Errorf("fakedevice: %w: select with %d bytes of scratch, want %d",
			backend.ErrArgument, s.Scratch.NBytes(), selectScratch)
	}
	own := *s // which the caller may use again
	return q.on(wrong, func(on backend.Queue, b []backend.Buffer) error {
		own.X, own.Residual, own.Dense, own.Notes, own.Scratch = b[0], b[1], b[2], b[3], b[4]
		own.Out = kernels.Message{Head: b[5], Values: b[6], Index: b[7]}
		return on.Wait(turn(func() error { return reference.Select(&own) }))
	}, s.X, s.Residual, s.Dense, s.Notes, s.Scratch, s.Out.Head, s.Out.Values, s.Out.Index)
}

func (q *queue) Combine(dst backend.Buffer, m kernels.Messages, divisor int) error {
	return q.on(check.Combine(dst, m, divisor), func(on backend.Queue, b []backend.Buffer) error {
		m.All = b[1]
		return on.Wait(turn(func() error { return reference.Combine(b[0], m, divisor) }))
	}, dst, m.All)
}

func (q *queue) NotFinite(note, x backend.Buffer) error {
	return q.on(check.NotFinite(note, x), func(on backend.Queue, b []backend.Buffer) error {
		return on.Wait(turn(func() error { return kernels.Host{}.NotFinite(b[0], b[1]) }))
	}, note, x)
}
