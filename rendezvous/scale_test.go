package rendezvous

import (
	"fmt"
	"os"
	"testing"
	"time"

	"github.com/euryale-ml/euryale/internal/env"
	"github.com/euryale-ml/euryale/internal/scale"
	"github.com/euryale-ml/euryale/internal/testing/require"
)

// started is what the start of a job takes: rank 0's core hears what the calls of the others send,
// and sends its answers, one message after the other.
func started(t *testing.T, machines, devices int, net scale.Network) (cost scale.Cost) {
	ranks := machines * devices
	c := newCore(testIdentity(0, ranks), false)
	count := func(f frame) {
		cost.Messages++
		cost.Bytes += headerSize + len(f.body)
	}
	members := make([]*member, ranks)
	ask := func(r int, f frame) {
		count(f)
		require.NoError(t, c.hear(members[r], f))
	}
	for r := 1; r < ranks; r++ {
		me := testIdentity(r, ranks)
		me.build, me.job, me.host = fmt.Sprintf("%064d", 0), "run-0123456789abcdef", "machine0123"
		for range 2 {
			count(frame{body: append([]byte(magic), make([]byte, nonceSize)...)})
			count(proven(kindProof, testToken, nil, me.pack()))
		}
		m := &member{identity: me, waits: map[uint64]*wait{}}
		members[r], c.members[r] = m, m
		ask(r, frame{kind: kindGet, id: 1, body: packString(nil, downKey)})
	}
	got := make([]int, ranks)
	for round, bytes := range scale.Rounds(machines, devices) {
		g := gathering{key: fmt.Sprintf("euryale/connect/%d", round), size: ranks,
			value: make([]byte, bytes)}
		c.swap(rankKey(g.key, 0), nil, g.value)
		for r := 1; r < ranks; r++ {
			g.rank, got[r] = r, 0
			ask(r, frame{kind: kindGather, id: 2, body: g.pack(0)})
		}
		for len(c.todo) > 0 {
			answer := c.todo[0].(send)
			c.todo = c.todo[1:]
			count(answer.frame)
			r := answer.to.rank
			values := require.Value((&unpacker{rest: answer.frame.body}).list())(t)
			if got[r] += len(values); got[r] < ranks {
				g.rank = r
				ask(r, frame{kind: kindGather, id: 2, body: g.pack(got[r])})
			}
		}
		for r := 1; r < ranks; r++ {
			require.That(t, got[r] == ranks, "rank %d has got %d values", r, got[r])
		}
		cost.Time += 2 * net.Latency
	}
	cost.Time += time.Duration(cost.Messages)*scale.PerMessage + net.Takes(cost.Bytes)
	return cost
}

// TestAStartTakesWhatIsPredicted: of one machine and of many, up to 4,096 ranks.
func TestAStartTakesWhatIsPredicted(t *testing.T) {
	net := scale.Network{Latency: 50 * time.Microsecond, Bandwidth: 1.25e9}
	sizes := [][2]int{{1, 8}, {1, 200}, {64, 1}, {2, 8}, {16, 4}}
	if env.Full.Set(os.Getenv) {
		sizes = append(sizes, [2]int{4096, 1})
	}
	for _, s := range sizes {
		began := time.Now()
		got, want := started(t, s[0], s[1], net), scale.Start(s[0], s[1], net)
		t.Log(s, got, want, time.Since(began))
		require.Check(t, got.Messages == want.Messages && near(got.Bytes, want.Bytes),
			"%d machines of %d: %+v, predicted %+v", s[0], s[1], got, want)
	}
}

// near reports whether a prediction is within 3 %.
func near(got, want int) bool { return 100*max(got-want, want-got) < 3*got }
