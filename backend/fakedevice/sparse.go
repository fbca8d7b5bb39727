package fakedevice

import (
	"fmt"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/kernels"
)

var _ kernels.Sparse = basic{}

// sparse returns the host's.
func (k basic) sparse() (kernels.Sparse, error) {
	s, ok := k.host.(kernels.Sparse)
	if !ok {
		return nil, fmt.Errorf("fakedevice: %w: %T is no kernels.Sparse", backend.ErrUnsupported, k.host)
	}
	return s, nil
}

// selectScratch is what a selection is asked for, so that tests see whether it is
// there: the host needs none.
const selectScratch = 64

func (k basic) SelectScratch(*kernels.Selection) int { return selectScratch }

func (k basic) Select(s *kernels.Selection) error {
	host, err := k.sparse()
	if err != nil {
		return err
	}
	wrong := check.Select(s)
	if wrong == nil && s.Scratch.NBytes() < selectScratch {
		wrong = fmt.Errorf("fakedevice: %w: select with %d bytes of scratch, want %d", backend.ErrArgument, s.Scratch.NBytes(), selectScratch)
	}
	return k.device.on(wrong, func(b []backend.Buffer) error {
		own := *s
		own.X, own.Residual, own.Dense, own.Notes, own.Scratch = b[0], b[1], b[2], b[3], b[4]
		own.Out = kernels.Message{Head: b[5], Values: b[6], Index: b[7]}
		return host.Select(&own)
	}, s.X, s.Residual, s.Dense, s.Notes, s.Scratch, s.Out.Head, s.Out.Values, s.Out.Index)
}

func (k basic) Combine(dst backend.Buffer, m kernels.Messages, divisor int) error {
	host, err := k.sparse()
	if err != nil {
		return err
	}
	return k.device.on(check.Combine(dst, m, divisor), func(b []backend.Buffer) error {
		m.All = b[1]
		return host.Combine(b[0], m, divisor)
	}, dst, m.All)
}

func (k basic) NotFinite(note, x backend.Buffer) error {
	host, err := k.sparse()
	if err != nil {
		return err
	}
	return k.device.on(check.NotFinite(note, x), func(b []backend.Buffer) error { return host.NotFinite(b[0], b[1]) }, note, x)
}
