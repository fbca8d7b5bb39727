package autograd

import (
	"fmt"

	"github.com/euryale-ml/euryale/backend"
)

// Buckets are small first, so that communication begins early in the backward
// pass, then large, so that its cost is spread. The sizes are those of
// PyTorch's DDP (VLDB 2020, section 4.2).
const (
	firstBucket = 1 << 20
	restBuckets = 25 << 20
)

type options struct {
	op          backend.ReduceOp
	first, rest int // bytes
}

func (o options) check() error {
	if o.first < 1 || o.rest < 1 {
		return fmt.Errorf("buckets of %d and %d bytes: they must hold at least 1", o.first, o.rest)
	}
	return nil
}

// Option changes what [New] makes. Options must be the same on every rank.
type Option func(*options)

// WithSum makes gradients the sum of the ranks' gradients. The default is
// their mean.
func WithSum() Option { return func(o *options) { o.op = backend.Sum } }

// WithBuckets sets the size of the first bucket of each dtype, and that of the
// others, in bytes. A parameter that is larger gets a bucket of its own. The
// defaults are 1 MiB and 25 MiB. Small buckets leave earlier in the backward
// pass; each costs one all-reduce.
func WithBuckets(first, rest int) Option {
	return func(o *options) { o.first, o.rest = first, rest }
}
