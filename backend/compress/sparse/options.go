package sparse

import (
	"fmt"
	"math"
	"strconv"
	"strings"

	"github.com/euryale-ml/euryale/backend"
)

// Selection says which elements are sent.
type Selection struct {
	limit   float64 // of a threshold
	density float64 // of a top-k, 0 for a threshold
}

// Threshold sends the elements whose magnitude is at least limit, rounded to f32,
// but never zeros: Threshold(0) sends all that is not zero.
func Threshold(limit float64) Selection { return Selection{limit: limit} }

// TopK sends the elements with the largest magnitudes, a share of density, above 0 and at most 1: k
// = ceil(density*n) of n elements, at least one. Of equal magnitudes those with the lowest index go
// first.
func TopK(density float64) Selection { return Selection{density: density} }

// String returns what a command line would say: "topk=0.05".
func (s Selection) String() string {
	if s.density != 0 {
		return fmt.Sprintf("topk=%v", s.density)
	}
	return fmt.Sprintf("threshold=%v", s.limit)
}

// ParseSelection is the inverse of String: it reads "topk=0.05", or "threshold=0.001".
func ParseSelection(text string) (Selection, error) {
	name, number, _ := strings.Cut(text, "=")
	if name != "topk" && name != "threshold" {
		return Selection{}, fmt.Errorf("%w: sparse: %q: use topk=0.05 or threshold=0.001",
			backend.ErrArgument, text)
	}
	x, err := strconv.ParseFloat(number, 64)
	if err != nil {
		return Selection{}, fmt.Errorf("%w: sparse: %q: a number is needed, as in %s=0.05",
			backend.ErrArgument, text, name)
	}
	if name == "threshold" {
		return Threshold(x), Threshold(x).check()
	}
	if x == 0 {
		return Selection{}, errDensity(x)
	}
	return TopK(x), TopK(x).check()
}

func (s Selection) check() error {
	switch {
	case s.density != 0 && !(s.density > 0 && s.density <= 1):
		return errDensity(s.density)
	case s.density == 0 && !(s.limit >= 0 && s.limit <= math.MaxFloat32):
		return fmt.Errorf("%w: sparse: a threshold of %v: it must be a number of f32, and not "+
			"negative", backend.ErrArgument, s.limit)
	}
	return nil
}

func errDensity(density float64) error {
	return fmt.Errorf("%w: sparse: a top-k of density %v: it must be above 0 and at most 1",
		backend.ErrArgument, density)
}

type options struct {
	how      Selection
	values   backend.DType
	feedback bool
	strict   bool
	always   bool // messages even where a dense reduction is cheaper: for tests
}

// Option changes what [New] makes. Options must be the same on every rank.
type Option func(*options)

// WithoutFeedback forgets what is not sent. It exists to show what feedback is good for: models
// train worse without it. A threshold then has no bound on what must be sent at once, so the
// selected elements are always reduced densely.
func WithoutFeedback() Option { return func(o *options) { o.feedback = false } }

// WithValues sends values as d: F32, the default, F16 or BF16. What rounding takes off, and what
// F16 cannot hold, stays in the residual. This is exact, except with F16 for numbers from 2^29 on,
// whose rest is rounded to f32. See the package comment.
func WithValues(d backend.DType) Option { return func(o *options) { o.values = d } }

// WithStrict makes a NaN or infinity in an operand a [*NotFiniteError] on every rank, before
// anything is added to a residual. It costs one more pass over the operand, an all-gather of 8
// bytes, and a copy of the residual, for Undo. Without WithStrict, NaN and infinities are sent as
// they are.
func WithStrict() Option { return func(o *options) { o.strict = true } }

func (o options) check() error {
	if err := o.how.check(); err != nil {
		return err
	}
	if o.values != backend.F32 && o.values != backend.F16 && o.values != backend.BF16 {
		return fmt.Errorf("%w: sparse: values as %v: use f32, f16 or bf16", backend.ErrArgument,
			o.values)
	}
	return nil
}

// topK returns how many of n elements a density stands for. By two rounding errors of 2^-53, the
// product of a decimal density and n may exceed the whole number that is meant: 0.07*100 is
// 7.000000000000001, and means 7.
func topK(density float64, n int) int {
	const slack = 1 - 0x1p-50
	return min(max(int(math.Ceil(density*float64(n)*slack)), 1), n)
}
