package env

import (
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/euryale-ml/euryale/internal/exit"
)

// kind is a variable of any kind.
type kind interface {
	name() string
	check(getenv func(string) string) error
}

func (t Text) name() string    { return string(t) }
func (f Flag) name() string    { return string(f) }
func (s Switch) name() string  { return string(s) }
func (c Count) name() string   { return string(c) }
func (t Time) name() string    { return string(t) }
func (g Grammar) name() string { return string(g) }
func (l Library) name() string { return string(l) }

func (t Text) check(func(string) string) error          { return nil }
func (f Flag) check(getenv func(string) string) error   { return second(f.Read(getenv)) }
func (s Switch) check(getenv func(string) string) error { return second(s.Read(getenv)) }
func (c Count) check(getenv func(string) string) error  { return second(c.Read(getenv, 0)) }
func (t Time) check(getenv func(string) string) error   { return second(t.Read(getenv, 0)) }
func (g Grammar) check(func(string) string) error       { return nil }
func (l Library) check(func(string) string) error       { return nil }

// second returns the error of a call that returns a value, too.
func second[T any](_ T, err error) error { return err }

// wrong is the error of a value that cannot be read.
func wrong(k kind, text, use string) error {
	return wrongValue{fmt.Errorf("%s=%q: use %s", k.name(), text, use)}
}

// wrongValue is the error of a value: the program was started the wrong way.
type wrongValue struct{ error }

func (w wrongValue) Unwrap() error { return w.error }

// ExitCode is the code of wrong usage.
func (wrongValue) ExitCode() int { return exit.Usage }

// Text is a variable that may have any value.
type Text string

// Read returns the value, "" if the variable is not set.
func (t Text) Read(getenv func(string) string) string { return getenv(string(t)) }

// Flag is a variable that is 1 or 0. It is 0 if it is not set.
type Flag string

// Read reports whether the variable is 1.
func (f Flag) Read(getenv func(string) string) (bool, error) {
	switch text := getenv(string(f)); text {
	case "", "0":
		return false, nil
	case "1":
		return true, nil
	default:
		return false, wrong(f, text, "1 or 0")
	}
}

// Set reports whether the variable is 1. Another value counts as 0.
func (f Flag) Set(getenv func(string) string) bool { return getenv(string(f)) == "1" }

// Switch is a variable that is on or off. It is on if it is not set.
type Switch string

// Read reports whether the variable is on.
func (s Switch) Read(getenv func(string) string) (bool, error) {
	switch text := getenv(string(s)); text {
	case "", "on":
		return true, nil
	case "off":
		return false, nil
	default:
		return false, wrong(s, text, "on or off")
	}
}

// Count is a variable with a number of at least 0.
type Count string

// Read returns the number, or otherwise if the variable is not set.
func (c Count) Read(getenv func(string) string, otherwise int) (int, error) {
	text := getenv(string(c))
	if text == "" {
		return otherwise, nil
	}
	n, err := strconv.Atoi(text)
	if err != nil || n < 0 {
		return otherwise, wrong(c, text, "a number of 0 or more")
	}
	return n, nil
}

// Time is a variable with a time above 0.
type Time string

// Read returns the time, or otherwise if the variable is not set.
func (t Time) Read(getenv func(string) string, otherwise time.Duration) (time.Duration, error) {
	text := getenv(string(t))
	if text == "" {
		return otherwise, nil
	}
	d, err := time.ParseDuration(text)
	if seconds, secondsErr := strconv.ParseFloat(text, 64); secondsErr == nil {
		d, err = time.Duration(seconds*float64(time.Second)), nil
	}
	if err != nil || d <= 0 {
		return 0, wrong(t, text, "a time above 0, such as 90s, 5m or a number of seconds")
	}
	return d, nil
}

// Grammar is a variable whose values only the package that uses it can read.
type Grammar string

// Text returns the value as it is, "" if the variable is not set.
func (g Grammar) Text(getenv func(string) string) string { return getenv(string(g)) }

// Wrong names the variable and its value in err, the error of the package that reads it. It is nil
// if err is.
func (g Grammar) Wrong(text string, err error) error {
	if err == nil {
		return nil
	}
	return wrongValue{fmt.Errorf("%s=%q: %w", string(g), text, err)}
}

// Library is a variable that names a shared library: a file, or the directory of one.
type Library string

// Off reports whether the variable is "off": the library is not to be used.
func (l Library) Off(getenv func(string) string) bool { return getenv(string(l)) == "off" }

// Read returns the files that the variable names: the file itself, or those with these names in
// the directory. There are none if the variable is not set.
func (l Library) Read(getenv func(string) string, names ...string) (files []string) {
	named := getenv(string(l))
	if named == "" {
		return nil
	}
	if info, err := os.Stat(named); err != nil || !info.IsDir() {
		return []string{named}
	}
	for _, name := range names {
		files = append(files, filepath.Join(named, name))
	}
	return files
}

// Lookup returns a getenv of a list of NAME=VALUE, of which later entries count. It also knows
// names with one *, for all variables that match: their values as lines, in the order of the names.
func Lookup(environ []string) func(name string) string {
	all := map[string]string{}
	for _, entry := range environ {
		name, value, _ := strings.Cut(entry, "=")
		all[name] = value
	}
	return func(pattern string) string {
		before, after, some := strings.Cut(pattern, "*")
		if !some {
			return all[pattern]
		}
		var values []string
		for _, name := range slices.Sorted(maps.Keys(all)) {
			if rest, ok := strings.CutPrefix(name, before); ok && strings.HasSuffix(rest, after) {
				values = append(values, all[name])
			}
		}
		return strings.Join(values, "\n")
	}
}
