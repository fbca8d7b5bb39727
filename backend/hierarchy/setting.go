package hierarchy

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/euryale-ml/euryale/backend"
)

// Setting is where ranks are, as far as the options of their job follow from it.
type Setting struct {
	Layout Layout
	Model  string // of the devices
	// Declared says that EURYALE_TOPOLOGY declares the layout, and not what the ranks
	// have found out.
	Declared bool
	// Together says that the ranks are on one machine, whatever is declared.
	Together bool
}

// Options returns the options that a program has whose EURYALE_HIERARCHY is text, and
// where the numbers of its links come from: they were measured, or are round ones. Where
// all ranks are together there is one kind of link.
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
const grammar = "use auto, always or never, and after a comma each exchange=bf16 or exchange=f16, slice=BYTES, slots=N, spans=N"

// ParseOptions reads what EURYALE_HIERARCHY says, such as
//
//	always
//	never,spans=4096
//	exchange=bf16,slice=1048576,slots=8
//
// with the fields of [Options]: a mode, exchange, slice (SliceBytes), slots and spans, in
// any order. What is not said is left to the defaults; but without a mode, who has declared
// a topology means it: Always.
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
			return o, fmt.Errorf("EURYALE_HIERARCHY=%q: %w: %s", text, err, grammar)
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
			return "", fmt.Errorf("%w: %s is %q, which is no number from 0", backend.ErrArgument, about, value)
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
