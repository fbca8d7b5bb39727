// Package require says in one line what a test requires. [NoError], [That] and [Soon] end a test
// that does not have it, as Fatal does; the others fail the test and go on, as Error does.
package require

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"
)

// T is what a test has, and whatever takes the place of one.
type T interface {
	Helper()
	Fatal(args ...any)
}

// R is what a test has that reports and goes on.
type R interface {
	Helper()
	Error(args ...any)
}

// NoError ends a test with an error, unless it is nil.
func NoError(t T, err error) {
	if err != nil {
		t.Helper()
		t.Fatal(err)
	}
}

// Report fails a test with an error, unless it is nil, and goes on.
func Report(t R, err error) {
	if err != nil {
		t.Helper()
		t.Error(err)
	}
}

// That ends a test where something is not so.
func That(t T, so bool, format string, args ...any) {
	if !so {
		t.Helper()
		t.Fatal(fmt.Sprintf(format, args...))
	}
}

// Check fails a test where something is not so, and goes on.
func Check(t R, so bool, format string, args ...any) {
	if !so {
		t.Helper()
		t.Error(fmt.Sprintf(format, args...))
	}
}

// Equal fails a test where what it got is not what it wants, and goes on.
func Equal[V comparable](t R, what any, got, want V) {
	if got != want {
		t.Helper()
		differ(t, what, got, want)
	}
}

// Slices is Equal of slices; one without elements is equal to nil.
func Slices[V comparable](t R, what any, got, want []V) {
	if !slices.Equal(got, want) {
		t.Helper()
		differ(t, what, got, want)
	}
}

func differ[V any](t R, what any, got, want V) {
	t.Helper()
	format := "%v: %+v, want %+v"
	switch any(got).(type) {
	case string, []string:
		format = "%v: %q, want %q"
	}
	t.Error(fmt.Sprintf(format, what, got, want))
}

// Fails fails a test where there is no error, or one that is not as wanted, and goes on: it has to
// be each of the wanted errors, and to contain each of the wanted texts.
func Fails(t R, what any, err error, wants ...any) {
	is := func(want any) bool {
		if target, ok := want.(error); ok {
			return errors.Is(err, target)
		}
		return strings.Contains(err.Error(), want.(string))
	}
	if err == nil || slices.ContainsFunc(wants, func(want any) bool { return !is(want) }) {
		t.Helper()
		t.Error(fmt.Sprintf("%v: the error is %v, want %q", what, err, wants))
	}
}

// Soon waits until something is so, by asking again and again, and ends a test where that takes
// longer than 20 s, since other tests may have the cores for seconds.
func Soon(t T, what any, so func() bool) {
	t.Helper()
	for end := time.Now().Add(20 * time.Second); !so(); time.Sleep(100 * time.Microsecond) {
		That(t, time.Now().Before(end), "%v: not within 20 s", what)
	}
}

// Err returns the error of a call that returns something else too.
func Err[V any](_ V, err error) error { return err }

// Value returns the value of a call, and ends the test where the call has an error:
//
//	text := require.Value(os.ReadFile(path))(t)
func Value[V any](v V, err error) func(t T) V {
	return func(t T) V {
		t.Helper()
		NoError(t, err)
		return v
	}
}

// Got is Value where a test goes on: it fails the test with the error of a call, for tables of
// which each line is to tell.
func Got[V any](v V, err error) func(t R) V {
	return func(t R) V {
		t.Helper()
		Report(t, err)
		return v
	}
}
