package main

import (
	"fmt"
	"io"
	"strings"

	"github.com/euryale-ml/euryale/autograd"
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/backend/sparse"
	"github.com/euryale-ml/euryale/backend/wire"
)

// exchange returns how ranks exchange what they learn, as the command line says.
func (cfg config) exchange() ([]autograd.Option, error) {
	var opts []autograd.Option
	if cfg.partial {
		opts = append(opts, autograd.WithPartial())
	}
	sparsely := []sparse.Option{sparse.WithFewestBytes()} // which is what this example is to show
	if cfg.noFeedback {
		sparsely = append(sparsely, sparse.WithoutFeedback())
	}
	name, number, _ := strings.Cut(cfg.compress, "=")
	switch name {
	case "none", "f16", "bf16":
		if number != "" || cfg.noFeedback {
			return nil, fmt.Errorf("--compress %s takes no number and no --no-feedback", name)
		}
		if name == "none" {
			return opts, nil
		}
		half, err := backend.ParseDType(name)
		return append(opts, autograd.WithCompression(wire.Wrap(half))), err
	case "topk", "threshold":
		how, err := sparse.ParseSelection(cfg.compress)
		if err != nil {
			return nil, fmt.Errorf("--compress %s: %w", cfg.compress, err)
		}
		return append(opts, autograd.WithCompression(sparse.Wrap(how, sparsely...))), nil
	}
	return nil, fmt.Errorf("--compress %s: use none, f16, bf16, topk=0.05 or threshold=0.001", cfg.compress)
}

// traffic prints what the compression has saved on this rank.
func (t *trainer) traffic(out io.Writer) (err error) {
	if sent, dense := t.sent(); dense > 0 {
		_, err = fmt.Fprintf(out, "gradients took %d bytes instead of %d, %.1f %%\n", sent, dense, 100*float64(sent)/float64(dense))
	}
	return err
}

// sent returns the bytes that compressed gradients took so far on this rank, and what
// they would have taken; zeros without compression.
func (t *trainer) sent() (sent, dense int64) {
	if c, ok := backend.As[*wire.Communicator](t.parallel.Comm()); ok {
		return c.Counters().Bytes, c.Counters().Dense
	}
	if c, ok := backend.As[*sparse.Communicator](t.parallel.Comm()); ok {
		return c.Counters().Bytes, c.Counters().DenseBytes
	}
	return 0, 0
}
