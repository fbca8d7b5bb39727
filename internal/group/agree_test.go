package group_test

import (
	"errors"
	"testing"
	"time"

	"github.com/euryale-ml/euryale/internal/group"
	"github.com/euryale-ml/euryale/rendezvous"
)

// Who waits in vain tells the job which rank did not come, and is not taken for it.
func TestRankThatDoesNotTellIsTheOneThatIsDown(t *testing.T) {
	worlds, err := rendezvous.Local(4, 100*time.Millisecond)
	if err != nil {
		t.Fatal(err)
	}
	for _, w := range worlds {
		defer w.Close()
	}
	tell := group.OverStore(t.Context(), worlds[1], "test", 1, 3)
	_, err = tell([]byte("here"))
	var of interface{ Blames() int }
	if !errors.As(err, &of) || of.Blames() != 3 {
		t.Fatalf("%v does not blame rank 3", err)
	}
	worlds[1].Fail(err)
	<-worlds[0].Down()
	if f := worlds[0].Failure(); f.Rank != 3 {
		t.Errorf("the job says %v", f)
	}
}
