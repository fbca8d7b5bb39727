package group_test

import (
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/group"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/rendezvous"
)

// Who waits in vain tells the job which rank did not come, and is not taken for it.
func TestRankThatDoesNotTellIsTheOneThatIsDown(t *testing.T) {
	worlds, err := rendezvous.Local(4, 100*time.Millisecond)
	require.NoError(t, err)
	for _, w := range worlds {
		defer w.Close()
	}
	tell := group.OverStore(t.Context(), worlds[1], "test", 1, 3)
	_, err = tell([]byte("here"))
	var of interface{ Blames() int }
	require.That(t, errors.As(err, &of) && of.Blames() == 3, "%v does not blame rank 3", err)
	worlds[1].Fail(err)
	<-worlds[0].Down()
	require.Equal(t, "the job", worlds[0].Failure().Rank, 3)
}

// part is a communicator of two ranks, whose peer may leave.
type part struct {
	backend.Communicator
	left chan struct{} // closed when it has
}

var errLeft = errors.New("rank 1 has left")

func (part) Rank() int { return 0 }
func (part) Size() int { return 2 }

func (part) Capabilities() backend.Capabilities {
	return backend.Capabilities{Members: backend.Members{1, 3}}
}

func (p part) Gone(r int) error {
	select {
	case <-p.left:
		return errLeft
	default:
		return nil
	}
}

// Who waits in the store for a rank that closes the group hears of that, however far the timeout
// is.
func TestRankThatLeavesLetsNobodyWaitInTheStore(t *testing.T) {
	worlds := require.Value(rendezvous.Local(4, time.Hour))(t)
	for _, w := range worlds {
		defer w.Close()
	}
	comm := part{left: make(chan struct{})}
	tell, members, err := group.Among(t.Context(), worlds[1], "test", comm)
	require.That(t, err == nil && slices.Equal(members, backend.Members{1, 3}), "%v, %v", members,
		err)
	peer := group.OverStore(t.Context(), worlds[3], "test", members...)
	go peer([]byte("b"))
	require.Equal(t, "with rank 3", string(slices.Concat(require.Got(tell([]byte("a")))(t)...)),
		"ab")
	ended := make(chan error)
	go func() {
		_, err := tell([]byte("again"))
		ended <- err
	}()
	close(comm.left)
	require.Fails(t, "without it", <-ended, errLeft)
}
