// Package require ends tests whose preparations fail.
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
