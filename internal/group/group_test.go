package group_test

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/group"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/rendezvous"
)

func TestAbortRecordKeepsTheFirstReport(t *testing.T) {
	var record group.AbortRecord
	r, ok := record.Read()
	require.Check(t, !ok, "an empty record gave %+v", r)
	first := group.Report{Reason: group.Lost, Rank: 2, Peer: 1, Lost: 7,
		Sides: [2]int{3, 4}, Mine: [backend.HeaderSize]byte{1},
		Theirs: [backend.HeaderSize]byte{2}, Text: "first"}
	require.Check(t, record.Publish(first) && !record.Publish(group.Report{Reason: group.TimedOut,
		Text: "second"}), "not the first report was taken")
	if r, ok := record.Read(); !ok || r != first {
		t.Errorf("got %+v", r)
	}
}

func TestAbortRecordCutsALongText(t *testing.T) {
	var record group.AbortRecord
	long := strings.Repeat("x", 5000)
	record.Publish(group.Report{Reason: group.Aborted, Text: long})
	r, _ := record.Read()
	require.Check(t, r.Text != "" && strings.HasPrefix(long, r.Text), "got %d bytes", len(r.Text))
}

func TestReportsAreTheErrorsOfTheContract(t *testing.T) {
	of := backend.Members{0, 3, 5}
	down := &rendezvous.Failure{Rank: 5, Cause: errors.New("killed")}
	for _, c := range []struct {
		report group.Report
		is     error
		want   string
	}{
		{group.Absent(nil, of, []int{1}, time.Second), backend.ErrTimeout,
			"no sign of rank 3 (1 of the group) for 1s"},
		{group.Absent(nil, of, []int{1, 2}, time.Second), backend.ErrTimeout,
			"no sign of ranks 3, 5 (1, 2 of the group) for 1s"},
		{group.ClosedWithout(of, 2), backend.ErrClosed, "rank 5 (2 of the group) has closed"},
		{group.LostRank(of, down), backend.ErrAborted, "rank 5 is down: killed"},
		{group.Report{Reason: group.Mismatch, Sides: [2]int{1, 2}}, backend.ErrMismatch,
			"rank 3 (1 of the group) called"},
		{group.Report{Reason: group.Aborted, Text: "no more data"}, backend.ErrAborted,
			"no more data"},
	} {
		err := c.report.Cause(of)
		require.Check(t, errors.Is(err, c.is) && strings.Contains(err.Error(), c.want), "%+v is %v",
			c.report, err)
	}
	require.Equal(t, "the peer", group.LostRank(of, down).Peer, 2)
	r := group.LostRank(of, &rendezvous.Failure{Rank: 1, Cause: errors.New("killed")})
	require.Check(t, r.Peer == -1, "the peer is %d, of a rank outside the group", r.Peer)
}

// A rank that aborts a group because of what it saw in another one passes the blame on.
func TestAbortPassesTheBlameOn(t *testing.T) {
	of := backend.Members{0, 3, 5}
	inner := &backend.Error{Comm: "run-1/2.0", Members: backend.Members{5, 3}, Rank: 1, Peer: 0,
		Cause: backend.ErrClosed}
	if r := group.AbortedBy(of, 1, inner); r.Reason != group.Aborted || r.Peer != 2 {
		t.Errorf("the peer is %d of reason %d, want rank 5 of the job", r.Peer, r.Reason)
	}
	first := &backend.Error{Comm: "run-1/2.0", Members: backend.Members{0, 3}, Rank: 1, Peer: 0,
		Cause: backend.ErrClosed}
	if r := group.AbortedBy(of, 1, first); r.Peer != 0 {
		t.Errorf("the peer is %d, want rank 0 of the job", r.Peer)
	}
	outside := &backend.Error{Comm: "run-1/2.0", Members: backend.Members{4, 3}, Rank: 1, Peer: 0,
		Cause: backend.ErrClosed}
	r := group.AbortedBy(of, 1, outside)
	err := &backend.Error{Comm: "run-1/3.0", Members: of, Rank: 0, Peer: r.Peer, Cause: r.Cause(of)}
	if r.Peer != -1 || err.Blames() != 4 {
		t.Errorf("the peer is %d, and rank %d is blamed, want rank 4 of the job: %v", r.Peer,
			err.Blames(), err)
	}
}
