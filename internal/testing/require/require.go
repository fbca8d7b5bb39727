// Package require ends tests whose preparations fail.
package require

import "testing"

// NoError ends a test with an error, unless it is nil.
func NoError(t testing.TB, err error) {
	if err != nil {
		t.Helper()
		t.Fatal(err)
	}
}
