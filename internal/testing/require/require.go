// Package require ends tests whose preparations fail, and reports what is wrong in one line.
package require

// T is what a test has, and whatever takes the place of one.
type T interface {
	Helper()
	Fatal(args ...any)
}

// NoError ends a test with an error, unless it is nil.
func NoError(t T, err error) {
	if err != nil {
		t.Helper()
		t.Fatal(err)
	}
}

// Report fails a test with an error, unless it is nil, and goes on.
func Report(t interface {
	Helper()
	Error(args ...any)
}, err error) {
	if err != nil {
		t.Helper()
		t.Error(err)
	}
}
