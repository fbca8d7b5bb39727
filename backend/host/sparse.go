package host

import (
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/kernels"
)

var _ kernels.Sparse = queued{}

func (q queued) SelectScratch(s *kernels.Selection) int { return kernels.Host{}.SelectScratch(s) }

func (q queued) Select(s *kernels.Selection) error {
	own := *s
	return q.kernel(kernels.Check{}.Select(s), func(h kernels.Host) error { return h.Select(&own) })
}

func (q queued) Combine(dst backend.Buffer, m kernels.Messages, divisor int) error {
	return q.kernel(kernels.Check{}.Combine(dst, m, divisor), func(h kernels.Host) error {
		return h.Combine(dst, m, divisor)
	})
}

func (q queued) NotFinite(note, x backend.Buffer) error {
	return q.kernel(kernels.Check{}.NotFinite(note, x), func(h kernels.Host) error {
		return h.NotFinite(note, x)
	})
}
