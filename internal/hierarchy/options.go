package hierarchy

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/env"
)

// Options say how to run; the zero value is a good choice. The options of rank 0 count for every
// rank.
type Options struct {
	// Mode says when to be hierarchical; Auto chooses by Links.
	Mode Mode
	// Links are the basis of the choice; nil means DefaultLinks. The links of this kind of machines
	// may have been measured: see [Measured].
	Links *Links
	// SliceBytes is the most of an operand that goes through the phases together. 0 means that
	// operands are cut into as many slices as Links predict to be the fastest, and, if slices need
	// scratch memory, into slices of 8 MiB at most.
	SliceBytes int
	// Slots is how many slices that need scratch memory may be under way; 0 means 4: some keep
	// links busy while another is filled.
	Slots int
	// Exchange, F16 or BF16, is what sums and averages of f32 are rounded to between machines,
	// which halves the traffic there. Each machine's sum, or for averages as F16 its average, is
	// rounded once. These are added in f32, and the result of an all-reduce is rounded once more.
	// Sums beyond 65504, of a machine or of all machines, are infinite as F16: BF16 has the range
	// of f32. 0 exchanges values unrounded.
	Exchange backend.DType
	// Hooks belong to this rank. They are told about each phase of each slice, as a part of its
	// call (see [backend.Call]), on the queue of the phase. An observe.Recorder keeps the phases,
	// with their times. nil costs nothing.
	Hooks backend.Hooks `json:"-"`
	// Spans is how many phase records the Hooks keep; 0 disables them.
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
		return o, fmt.Errorf("%w: %d slots for slices of %d bytes, %d spans: none may be negative",
			backend.ErrArgument, o.Slots, o.SliceBytes, o.Spans)
	case o.Slots > maxSlots || o.Spans > maxSpans:
		return o,
			fmt.Errorf("%w: %d slots and %d spans: there may be %d slots and %d spans at most",
				backend.ErrArgument, o.Slots, o.Spans, maxSlots, maxSpans)
	case cmp.Or(o.SliceBytes, defaultSlotBytes) > maxScratch/o.Slots:
		return o, fmt.Errorf("%w: %d slots for slices of %d bytes are more than any device has",
			backend.ErrArgument, o.Slots, o.SliceBytes)
	case o.Exchange != 0 && o.Exchange != backend.F16 && o.Exchange != backend.BF16:
		return o, fmt.Errorf("%w: an exchange in %v: use f16 or bf16", backend.ErrArgument,
			o.Exchange)
	}
	return o, o.Links.check()
}

// Setting is where ranks are, as far as the options of their job depend on it.
type Setting struct {
	Layout Layout
	Model  string // of the devices
	// Declared says that the layout comes from EURYALE_TOPOLOGY, and not from what the ranks have
	// found out.
	Declared bool
	// Together says that the ranks are on one machine, whatever is declared.
	Together bool
}

// Options returns the options of a program whose EURYALE_HIERARCHY is text, and the source of its
// links' numbers: measured, or round ones. If all ranks are together, there is one kind of link.
func (s Setting) Options(text string) (o Options, source string, err error) {
	if o, err = ParseOptions(text, s.Declared); err != nil {
		return o, "", err
	}
	links, source := DefaultLinks(), "round numbers: euryale bench --tune measures"
	if s.Layout.Machines() > 1 { // else nothing is chosen by them
		m, found, err := Measured(s.Model, s.Layout, s.Declared)
		if err != nil {
			return o, "", err
		}
		if found {
			links, source = m.Links, "measured: "+m.Source
		}
	}
	if s.Together {
		links.Between = links.Inside
		source += "; between declared machines as inside the one that they are"
	}
	o.Links = &links
	return o, source, nil
}

// grammar is what EURYALE_HIERARCHY may say.
const grammar = "use auto, always or never, and after a comma each exchange=bf16 or " +
	"exchange=f16, slice=BYTES, slots=N, spans=N"

// ParseOptions reads what EURYALE_HIERARCHY says, such as
//
//	always
//	never,spans=4096
//	exchange=bf16,slice=1048576,slots=8
//
// with the fields of [Options]: a mode, exchange, slice (SliceBytes), slots and spans, in any
// order. What is missing keeps its default, except that without a mode a declared topology means
// Always.
func ParseOptions(text string, declared bool) (Options, error) {
	var o Options
	if declared {
		o.Mode = Always
	}
	if text == "" {
		return o, nil
	}
	var said []string
	for word := range strings.SplitSeq(text, ",") {
		about, err := o.set(strings.TrimSpace(word))
		if err == nil && slices.Contains(said, about) {
			err = fmt.Errorf("%w: the %s is there twice", backend.ErrArgument, about)
		}
		if err != nil {
			return o, env.Hierarchy.Wrong(text, fmt.Errorf("%w: %s", err, grammar))
		}
		said = append(said, about)
	}
	return o, nil
}

// set sets what a word is about.
func (o *Options) set(word string) (about string, err error) {
	about, value, _ := strings.Cut(word, "=")
	numbers := map[string]*int{"slice": &o.SliceBytes, "slots": &o.Slots, "spans": &o.Spans}
	switch number := numbers[about]; {
	case number != nil:
		if *number, err = strconv.Atoi(value); err != nil || *number < 0 {
			return "", fmt.Errorf("%w: %s is %q, which is no number from 0", backend.ErrArgument,
				about, value)
		}
		return about, nil
	case about == "exchange":
		o.Exchange, err = backend.ParseDType(value)
		if err != nil || o.Exchange != backend.F16 && o.Exchange != backend.BF16 {
			return "", fmt.Errorf("%w: an exchange in %q", backend.ErrArgument, value)
		}
		return about, nil
	}
	i := slices.Index(modes[:], word)
	if i < 0 {
		return "", fmt.Errorf("%w: no mode or option is called %q", backend.ErrArgument, word)
	}
	o.Mode = Mode(i)
	return "mode", nil
}
