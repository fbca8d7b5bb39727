package fakedevice

import (
	"fmt"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/kernels"
)

var _ kernels.Sparse = (*queue)(nil)

// sparse returns the host's.
func (q *queue) sparse() (kernels.Sparse, error) {
	s, ok := q.Queue.(kernels.Sparse)
	if !ok {
		return nil, fmt.Errorf("fakedevice: %w: %T is no kernels.Sparse", backend.ErrUnsupported, q.Queue)
	}
	return s, nil
}

// selectScratch is what a selection is asked for, so that tests see whether it is
// there: the host needs none.
const selectScratch = 64

func (q *queue) SelectScratch(*kernels.Selection) int { return selectScratch }

func (q *queue) Select(s *kernels.Selection) error {
	host, err := q.sparse()
	if err != nil {
		return err
	}
	wrong := check.Select(s)
	if wrong == nil && s.Scratch.NBytes() < selectScratch {
		wrong = fmt.Errorf("fakedevice: %w: select with %d bytes of scratch, want %d", backend.ErrArgument, s.Scratch.NBytes(), selectScratch)
	}
	return q.device.on(wrong, func(b []backend.Buffer) error {
		own := *s
		own.X, own.Residual, own.Dense, own.Notes, own.Scratch = b[0], b[1], b[2], b[3], b[4]
		own.Out = kernels.Message{Head: b[5], Values: b[6], Index: b[7]}
		return host.Select(&own)
	}, s.X, s.Residual, s.Dense, s.Notes, s.Scratch, s.Out.Head, s.Out.Values, s.Out.Index)
}

func (q *queue) Combine(dst backend.Buffer, m kernels.Messages, divisor int) error {
	host, err := q.sparse()
	if err != nil {
		return err
	}
	return q.device.on(check.Combine(dst, m, divisor), func(b []backend.Buffer) error {
		m.All = b[1]
		return host.Combine(b[0], m, divisor)
	}, dst, m.All)
}

func (q *queue) NotFinite(note, x backend.Buffer) error {
	host, err := q.sparse()
	if err != nil {
		return err
	}
	return q.device.on(check.NotFinite(note, x), func(b []backend.Buffer) error { return host.NotFinite(b[0], b[1]) }, note, x)
}
