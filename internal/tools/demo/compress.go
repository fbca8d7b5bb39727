package main

import (
	"fmt"

	"github.com/euryale-ml/euryale/autograd"
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/backend/compress/half"
	"github.com/euryale-ml/euryale/backend/compress/sparse"
)

// exchange returns how ranks exchange gradients or weights, as the command line says.
func (cfg config) exchange() ([]autograd.Option, error) {
	var opts []autograd.Option
	if cfg.partial {
		// A bucket is averaged in each step: of the default size, one holds the whole model.
		opts = append(opts, autograd.WithPartial(), autograd.WithBuckets(partialBucket,
			partialBucket))
	}
	compressed, err := compression(cfg.compress, !cfg.noFeedback)
	return append(opts, compressed...), err
}

// partialBucket is about how many bytes of weights are averaged in each step.
const partialBucket = 4 << 10

// traffic prints what this rank has sent, unless that is every gradient uncompressed.
func (t *trainer) traffic() (err error) {
	what := "gradients"
	if t.averaged != nil {
		what = "weights"
	}
	if sent, dense := t.sent(); dense > 0 {
		_, err = fmt.Fprintf(t.out, "%s took %d bytes instead of %d, %.1f %%%s\n", what, sent,
			dense, 100*float64(sent)/float64(dense), t.unsparse())
	}
	return err
}

// sent returns the bytes of weights or compressed gradients that this rank has sent so far, and
// those of all gradients uncompressed. It returns zeros if gradients are not compressed.
func (t *trainer) sent() (sent, dense int64) {
	if t.averaged != nil {
		return t.averaged.bytes, t.gradientBytes()
	}
	if c, ok := backend.As[*half.Communicator](t.parallel.Comm()); ok {
		return c.Counters().Bytes, c.Counters().Dense
	}
	if c, ok := backend.As[*sparse.Communicator](t.parallel.Comm()); ok {
		return c.Counters().Bytes, c.Counters().DenseBytes
	}
	return 0, 0
}

// unsparse reports how often a compression fell back to a dense all-reduce.
func (t *trainer) unsparse() string {
	if c, ok := backend.As[*sparse.Communicator](t.parallel.Comm()); ok && c.Counters().Dense > 0 {
		return fmt.Sprintf("; %d of %d calls were dense: their messages would have been more bytes",
			c.Counters().Dense, c.Counters().Calls)
	}
	return ""
}

// gradientBytes returns the bytes of the gradients of all steps on a rank's link.
func (t *trainer) gradientBytes() int64 {
	n := 0
	for _, p := range t.net.params {
		n += p.Shape().TotalSize()
	}
	const size = 4 // of a float32
	return int64(backend.AllReduce.BusFactor(t.comm.Size())*float64(size*n)) * int64(t.steps)
}

// counted counts the bytes of all-reduces on a rank's link.
type counted struct {
	backend.Base
	bytes int64
}

var _ backend.Wrapper = (*counted)(nil)

// Start implements [backend.Communicator].
func (c *counted) Start(q backend.Queue, what backend.Collective, dst,
	src backend.Buffer) (backend.Work, error) {
	if what.Kind == backend.AllReduce {
		c.bytes += int64(what.Kind.BusFactor(c.Size()) * float64(src.NBytes()))
	}
	return c.Communicator.Start(q, what, dst, src)
}
