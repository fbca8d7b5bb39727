package backend_test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/testing/reference"
	"github.com/euryale-ml/euryale/internal/testing/require"
)

func TestErrorsNameTheirRankOnce(t *testing.T) {
	comm := reference.New("test", 2, time.Minute)[1]
	name := backend.RankOf(comm)
	inner := backend.Refuse(comm, backend.ErrArgument)
	for _, c := range []struct {
		err  error
		want string
	}{
		{inner, name + ": bad argument"},
		{backend.Refuse(comm, inner), name + ": bad argument"},
		{backend.Refuse(comm, fmt.Errorf("a sparse allreduce: %w", inner)),
			"a sparse allreduce: " + name + ": bad argument"},
		{&backend.Error{Comm: "test", Rank: 1, Peer: -1, Cause: fmt.Errorf("aborted: %w", inner)},
			name + ": aborted: bad argument"},
		{&backend.Error{Comm: "test", Rank: 1, Peer: 0, Call: "allreduce", Cause: inner},
			name + ": allreduce: because of rank 0: bad argument"},
	} {
		require.Check(t, c.err.Error() == c.want && strings.Count(c.err.Error(), name) == 1,
			"%q, want %q", c.err, c.want)
		require.Fails(t, "err", c.err, backend.ErrArgument)
	}
}
