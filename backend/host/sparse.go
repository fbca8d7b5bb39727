package host

import (
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/kernels"
)

var _ kernels.Sparse = queued{}

func (k queued) SelectScratch(s *kernels.Selection) int { return kernels.Host{}.SelectScratch(s) }

func (k queued) Select(s *kernels.Selection) error {
	own := *s
	return k.start(kernels.Check{}.Select(s), func(h kernels.Host) error { return h.Select(&own) })
}

func (k queued) Combine(dst backend.Buffer, m kernels.Messages, divisor int) error {
	return k.start(kernels.Check{}.Combine(dst, m, divisor), func(h kernels.Host) error { return h.Combine(dst, m, divisor) })
}

func (k queued) NotFinite(note, x backend.Buffer) error {
	return k.start(kernels.Check{}.NotFinite(note, x), func(h kernels.Host) error { return h.NotFinite(note, x) })
}
