package models

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/files"
)

// object is an object of JSON that another program has written. It notes which keys somebody has
// read: in the end, rest refuses the others.
type object struct {
	values map[string]json.RawMessage
	known  map[string]bool
}

func (o *object) UnmarshalJSON(text []byte) error {
	o.known = map[string]bool{}
	return json.Unmarshal(text, &o.values)
}

// rename gives keys their other names, under which they replace what is there.
func (o *object) rename(names map[string]string) {
	for _, from := range slices.Sorted(maps.Keys(names)) {
		if text, ok := o.values[from]; ok {
			o.values[names[from]] = text
			delete(o.values, from)
		}
	}
}

// into stores the values of the object's keys where fields point. A key that is missing changes
// nothing, and neither does null, except that it sets a pointer, or slice, to nil.
func (o *object) into(fields map[string]any) (err error) {
	for _, key := range slices.Sorted(maps.Keys(fields)) {
		o.known[key] = true
		if text, ok := o.values[key]; ok {
			wrong := json.Unmarshal(text, fields[key])
			var list []json.RawMessage
			if wrong == nil && json.Unmarshal(text, &list) == nil && slices.ContainsFunc(list,
				func(x json.RawMessage) bool { return string(x) == "null" }) {
				wrong = fmt.Errorf("%w: an element is null", backend.ErrArgument) // and not 0
			}
			if wrong != nil {
				err = errors.Join(err, fmt.Errorf("%s: %w", key, wrong))
			}
		}
	}
	return err
}

// only returns an error for a key whose value is none of those that are supported. nil is a key
// that is missing or null.
func (o *object) only(values map[string][]any) (err error) {
	for _, key := range slices.Sorted(maps.Keys(values)) {
		o.known[key] = true
		var is any
		_ = json.Unmarshal(o.values[key], &is) // nil without the key: all has been parsed
		if !slices.ContainsFunc(values[key], func(v any) bool { return reflect.DeepEqual(v, is) }) {
			err = errors.Join(err, fmt.Errorf("%w: %s is %s: use one of %s", backend.ErrUnsupported,
				key, o.shown(key), list(values[key])))
		}
	}
	return err
}

// names checks a list of names, all of which must be among those that are known.
func (o *object) names(key string, known ...string) error {
	var has []string
	if err := o.into(map[string]any{key: &has}); err != nil {
		return err
	}
	for _, name := range has {
		if !slices.Contains(known, name) {
			return fmt.Errorf("%w: %s has %.80q: use some of %s", backend.ErrUnsupported, key, name,
				strings.Join(known, ", "))
		}
	}
	return nil
}

// rest refuses the keys that nobody has read, unless they are null, false or empty, or among those
// that change nothing.
func (o *object) rest(harmless ...string) (err error) {
	for _, key := range slices.Sorted(maps.Keys(o.values)) {
		if !o.known[key] && !files.Empty(o.values[key]) && !slices.Contains(harmless, key) {
			err = errors.Join(err, fmt.Errorf("%w: %s is %s, and what it changes is not known "+
				"here: remove the key if it changes nothing", backend.ErrUnsupported, key,
				o.shown(key)))
		}
	}
	return err
}

// compact returns the text of a value without spaces.
func (o *object) compact(key string) string {
	var b bytes.Buffer
	_ = json.Compact(&b, o.values[key]) // all has been parsed
	return b.String()
}

// shown is the beginning of a value, for an error.
func (o *object) shown(key string) string {
	if _, ok := o.values[key]; !ok {
		return "missing"
	}
	return fmt.Sprintf("%.80s", o.compact(key))
}

// list returns values as a list of JSON, without nil.
func list(values []any) string {
	text, _ := json.Marshal(slices.DeleteFunc(slices.Clone(values), func(v any) bool {
		return v == nil
	}))
	return string(text)
}

// ordered is an object of JSON whose order counts.
type ordered[T any] []entry[T]

type entry[T any] struct {
	key   string
	value T
}

func (o *ordered[T]) UnmarshalJSON(text []byte) error {
	d := json.NewDecoder(bytes.NewReader(text))
	if start, err := d.Token(); err != nil || start == nil {
		return err
	} else if start != json.Delim('{') {
		return fmt.Errorf("%w: it is no object", backend.ErrArgument)
	}
	for *o = nil; d.More(); {
		key, err := d.Token() // a string
		if err != nil {
			return err
		}
		e := entry[T]{key: key.(string)}
		if err := d.Decode(&e.value); err != nil {
			return fmt.Errorf("%s: %w", e.key, err)
		}
		*o = append(*o, e)
	}
	return nil
}
