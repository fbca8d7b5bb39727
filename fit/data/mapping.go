package data

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"

	"github.com/euryale-ml/euryale/backend"
)

// Mapping says what the numbers of samples stand for. Who reads the samples of a training learns it
// from their files; the next reader, of a validation or a prediction, must be given it, since
// another file may lack a class or have its columns in another order. [fit.Run] saves it in its
// checkpoints.
//
// [fit.Run]: https://pkg.go.dev/github.com/euryale-ml/euryale/fit#Run
type Mapping struct {
	Columns []string `json:",omitempty"` // of a table, in the order of a sample's numbers: see CSV
	// Classes are labels or characters, by number: in the order of numbers if all are, otherwise
	// of text.
	Classes []string `json:",omitempty"`
	// Means and Deviations are by column, of [Standardize]; empty for columns as they are.
	Means, Deviations []float64 `json:",omitempty"`

	selects bool `json:"-"` // of Columns: columns that a training has not learned from yet
}

// Columns returns a mapping that has [CSV] read these columns, and the label's, for a training.
func Columns(names ...string) Mapping { return Mapping{Columns: names, selects: true} }

// MappingOf returns the mapping of a set that this package has read, or of a part by [Split]. It is
// empty for other sets.
func MappingOf(s Set) Mapping {
	if m, ok := s.(interface{ Mapping() Mapping }); ok {
		return m.Mapping()
	}
	return Mapping{}
}

// Check returns an ErrArgument if the numbers of another mapping stand for other things.
func (m Mapping) Check(other Mapping) error {
	differ := ""
	switch {
	case !slices.Equal(m.Columns, other.Columns):
		differ = fmt.Sprintf("the columns are %s, and not %s", few(other.Columns), few(m.Columns))
	case !slices.Equal(m.Classes, other.Classes):
		differ = fmt.Sprintf("the classes are %s, and not %s", few(other.Classes), few(m.Classes))
	case len(other.Means) == 0 && len(m.Means) > 0:
		differ = "data.Standardize has scaled the columns of the training, and not these"
	case len(m.Means) == 0 && len(other.Means) > 0:
		differ = "data.Standardize has scaled these columns, and not those of the training"
	case !slices.Equal(m.Means, other.Means) || !slices.Equal(m.Deviations, other.Deviations):
		differ = "data.Standardize has scaled the columns by other means or deviations"
	default:
		return nil
	}
	return fmt.Errorf("%w: %s: give the reader the Mapping of the training", backend.ErrArgument,
		differ)
}

// few prints the first of many names.
func few(names []string) string {
	if len(names) > 20 {
		return fmt.Sprintf("%q... (%d)", names[:20], len(names))
	}
	return fmt.Sprintf("%q", names)
}

// given returns the mapping that a reader is given, nil for none.
func given(known []Mapping) (*Mapping, error) {
	switch {
	case len(known) == 0:
		return nil, nil
	case len(known) > 1 || len(known[0].Columns)+len(known[0].Classes) == 0:
		return nil, fmt.Errorf("%w: data: %d mappings, the first with %d columns and %d classes: "+
			"give one, of the samples of the training", backend.ErrArgument, len(known),
			len(known[0].Columns), len(known[0].Classes))
	}
	m := known[0]
	if n := len(m.Means); n != len(m.Deviations) || n > 0 && n != len(m.Columns) {
		return nil, fmt.Errorf("%w: data: a mapping of %d columns with %d means and %d deviations",
			backend.ErrArgument, len(m.Columns), n, len(m.Deviations))
	}
	for c, mean := range m.Means {
		d := m.Deviations[c]
		if !(math.Abs(mean) <= math.MaxFloat64 && d > 0 && d <= math.MaxFloat64) {
			return nil, fmt.Errorf("%w: data: a mapping whose column %q has the mean %v and the "+
				"deviation %v: give that of the training, as it was", backend.ErrArgument,
				m.Columns[c], mean, d)
		}
	}
	return &m, nil
}

// labels numbers the classes of labels.
type labels struct {
	classes []string
	numbers bool // the classes are numbers
	class   map[string]int
}

// learn returns the classes that labels have. Labels that are one number, such as 1 and 1.0, are
// one class, named by the first of them.
func learn(all []string) labels {
	l := labels{numbers: true}
	for _, label := range all {
		_, _, ok := canonical(label)
		l.numbers = l.numbers && (ok || missing(label))
	}
	known := map[string]bool{}
	for _, label := range all {
		if key, ok := l.key(label); ok && !known[key] {
			known[key], l.classes = true, append(l.classes, label)
		}
	}
	slices.SortFunc(l.classes, func(a, b string) int {
		_, x, _ := canonical(a)
		_, y, _ := canonical(b)
		if l.numbers {
			return cmp.Or(cmp.Compare(x, y), cmp.Compare(len(a), len(b)), cmp.Compare(a, b))
		}
		return cmp.Compare(a, b)
	})
	return l.index()
}

// of returns the classes of a mapping.
func of(m *Mapping) labels {
	l := labels{classes: m.Classes, numbers: true}
	for _, c := range m.Classes {
		_, _, ok := canonical(c)
		l.numbers = l.numbers && ok
	}
	return l.index()
}

func (l labels) index() labels {
	l.class = map[string]int{}
	for i, c := range l.classes {
		if key, ok := l.key(c); ok {
			l.class[key] = i
		}
	}
	return l
}

// key returns by what a label is known, false if it says nothing.
func (l labels) key(label string) (string, bool) {
	if !l.numbers {
		return label, label != ""
	}
	key, _, ok := canonical(label)
	return key, ok
}

// of returns the class of a label, -1 if it has none.
func (l labels) of(label string) int {
	if key, ok := l.key(label); ok {
		if class, known := l.class[key]; known {
			return class
		}
	}
	return -1
}

// wrong returns why a label has no class.
func (l labels) wrong(label string) error {
	if missing(label) {
		return errors.New("there is no label: give it one, or leave it out")
	}
	return fmt.Errorf("the label %q is none of the classes %s", label, few(l.classes))
}

// missing reports whether a label among numbers is none.
func missing(label string) bool {
	x, err := parse(label)
	return label == "" || err == nil && (math.IsNaN(x) || math.IsInf(x, 0))
}

// canonical returns a finite number as it is known, whether it is written 1, 01 or 1.0. Integers
// that int64 does not hold are text, so that different ones stay so.
func canonical(label string) (key string, number float64, ok bool) {
	if i, err := strconv.ParseInt(label, 10, 64); err == nil {
		return strconv.FormatInt(i, 10), float64(i), true
	}
	x, err := parse(label)
	if err != nil || math.IsNaN(x) || math.IsInf(x, 0) || integer(label) {
		return label, 0, false
	}
	if x == math.Trunc(x) && math.Abs(x) < 1<<53 {
		return strconv.FormatInt(int64(x), 10), x, true
	}
	return strconv.FormatFloat(x, 'g', -1, 64), x, true
}

// parse is strconv.ParseFloat without what only Go takes for numbers, such as the name 18_24.
func parse(text string) (float64, error) {
	if strings.ContainsAny(text, "_xXpP") {
		return 0, strconv.ErrSyntax
	}
	return strconv.ParseFloat(text, 64)
}

// integer reports whether a number is written as an integer.
func integer(text string) bool {
	for i, c := range text {
		if (c < '0' || c > '9') && (i > 0 || c != '-' && c != '+') {
			return false
		}
	}
	return true
}
