package hierarchy

import (
	"cmp"
	"fmt"

	"github.com/euryale-ml/euryale/backend"
)

// Options are how to run; the zero value is good. Those of rank 0 count for
// every rank.
type Options struct {
	// Mode says when to be hierarchical; Auto chooses by Links.
	Mode Mode
	// Links are what the choice is made by; nil means DefaultLinks. Those of this
	// kind of machines may have been measured, see [Measured].
	Links *Links
	// SliceBytes is how much of an operand goes through the phases together, at most.
	// 0 means that operands are cut into as many slices as Links predict to be the
	// fastest, and where slices need scratch memory, into slices of 8 MiB at most.
	SliceBytes int
	// Slots is how many slices that need scratch memory may be under way; 0
	// means 4, as there are links to keep busy and a slice that is filled.
	Slots int
	// Exchange, F16 or BF16, is what sums and averages of f32 are rounded to
	// between machines, which halves the traffic there. Each machine's sum, or for
	// averages as F16 its average, is rounded once, they are added in f32, and the
	// result of an all-reduce is rounded once more. Sums beyond 65504, of a machine or
	// of all, are infinite as F16: BF16 has the range of f32. 0 exchanges what there is.
	Exchange backend.DType
	// Hooks are this rank's own, and told of each phase of each slice, as a part of its call
	// (see [backend.Call]), on the queue of the phase. An observe.Recorder keeps them, with
	// their times. nil costs nothing.
	Hooks backend.Hooks `json:"-"`
	// Spans is how many phases of slices who makes the Hooks is to keep; 0 means that there
	// are no Hooks.
	Spans int
}

// The defaults of Options.
const (
	defaultSlotBytes = 8 << 20 // of an operand
	defaultSlots     = 4
)

// The limits of Options.
const (
	maxScratch = 1 << 44 // bytes: more than any device has; beyond it sizes could overflow
	maxSlots   = 1 << 10 // more slices under way than there are links to keep busy
	maxSpans   = 1 << 20 // of some ten bytes each
)

// filled returns o with its defaults, for ranks with a layout.
func (o Options) filled() (Options, error) {
	if o.Links == nil {
		links := DefaultLinks()
		o.Links = &links
	}
	if o.Slots == 0 {
		o.Slots = defaultSlots
	}
	switch {
	case o.Mode > Never:
		return o, fmt.Errorf("%w: there is no mode %d", backend.ErrArgument, o.Mode)
	case o.SliceBytes < 0 || o.Slots < 0 || o.Spans < 0:
		return o, fmt.Errorf("%w: %d slots for slices of %d bytes, %d spans: none may be negative", backend.ErrArgument, o.Slots, o.SliceBytes, o.Spans)
	case o.Slots > maxSlots || o.Spans > maxSpans:
		return o, fmt.Errorf("%w: %d slots and %d spans: there may be %d slots and %d spans at most", backend.ErrArgument, o.Slots, o.Spans, maxSlots, maxSpans)
	case cmp.Or(o.SliceBytes, defaultSlotBytes) > maxScratch/o.Slots:
		return o, fmt.Errorf("%w: %d slots for slices of %d bytes are more than any device has", backend.ErrArgument, o.Slots, o.SliceBytes)
	case o.Exchange != 0 && o.Exchange != backend.F16 && o.Exchange != backend.BF16:
		return o, fmt.Errorf("%w: an exchange in %v: use f16 or bf16", backend.ErrArgument, o.Exchange)
	}
	return o, o.Links.check()
}
