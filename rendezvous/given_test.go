package rendezvous

import (
	"errors"
	"testing"
)

// A value that a rank gave before it failed can still be had, so that the
// outcome of an all-gather does not depend on who reads it first.
func TestValueGivenBeforeAFailureCanBeHad(t *testing.T) {
	worlds, err := Local(2, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		for _, w := range worlds {
			w.Close()
		}
	}()
	if err := worlds[1].inner.Set(t.Context(), rankKey("vote", 1), []byte("b")); err != nil {
		t.Fatal(err)
	}
	if v := worlds[0].given(rankKey("vote", 1)); v != nil {
		t.Errorf("without a failure there is no hurry: %q", v)
	}
	if err := worlds[1].Fail(errors.New("gone")); err != nil {
		t.Fatal(err)
	}
	<-worlds[0].Down()
	if v := worlds[0].given(rankKey("vote", 1)); string(v) != "b" {
		t.Errorf("got %q", v)
	}
	var f *Failure
	if _, err := worlds[0].AllGather(t.Context(), "later", []byte("a")); !errors.As(err, &f) || f.Rank != 1 {
		t.Errorf("a later call: %v", err)
	}
}
