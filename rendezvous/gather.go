package rendezvous

import (
	"context"
	"errors"
	"fmt"
)

// gathering is a request for an all-gather: it asks a store for a value from each of some ranks.
type gathering struct {
	key     string
	size    int   // of the job
	members []int // the ranks; nil for all of the job
	rank    int   // the rank whose value is set
	value   []byte
}

// count returns how many ranks there are.
func (g *gathering) count() int {
	if g.members == nil {
		return g.size
	}
	return len(g.members)
}

// member returns one of the ranks.
func (g *gathering) member(i int) int {
	if g.members == nil {
		return i
	}
	return g.members[i]
}

// errUsed is the error of a rank that gives a value for the second time.
var errUsed = errors.New("the key was used before: every call needs its own key")

// gatherer is a [Store] that gives a rank the values of all ranks in one round trip.
type gatherer interface {
	// allGather sets this rank's value, waits until all are set, and returns them.
	allGather(ctx context.Context, g gathering) ([][]byte, error)
	// peek returns the values that are set, and nil for the others. It does not wait.
	peek(ctx context.Context, g gathering) ([][]byte, error)
}

// peekEntries implements [Log.Peek].
func peekEntries(ctx context.Context, g gatherer, key string, entries []int) ([][]byte, error) {
	if len(entries) == 0 {
		return nil, nil
	}
	return g.peek(ctx, gathering{key: key, size: maxRanks, members: entries})
}

// oneByOne is the gatherer over any store, by a call for each value.
type oneByOne struct{ Store }

func (e oneByOne) allGather(ctx context.Context, g gathering) ([][]byte, error) {
	_, first, err := e.CompareAndSwap(ctx, rankKey(g.key, g.rank), nil, copied(g.value))
	if err == nil && !first {
		err = errUsed
	}
	if err != nil {
		return nil, err
	}
	values := make([][]byte, g.count())
	for i := range values {
		if values[i], err = e.Get(ctx, rankKey(g.key, g.member(i))); err != nil {
			return nil, err
		}
	}
	return values, nil
}

func (e oneByOne) peek(ctx context.Context, g gathering) ([][]byte, error) {
	values := make([][]byte, g.count())
	for i := range values {
		var err error
		if values[i], err = look(ctx, e, rankKey(g.key, g.member(i))); err != nil {
			return nil, err
		}
	}
	return values, nil
}

// look reads a value without waiting. It returns nil if the key is not set.
func look(ctx context.Context, s Store, key string) ([]byte, error) {
	v, _, err := s.CompareAndSwap(ctx, key, []byte{0}, []byte{0}) // swapped for itself
	return v, err
}

// pack packs a request to a server for the values from index from on. If from is 0, the request
// also sets the rank's own value first.
func (g *gathering) pack(from int) []byte {
	b := packInt(packInt(packInt(packString(nil, g.key), int64(g.size)), int64(from)),
		int64(g.rank))
	var value []byte
	if from == 0 {
		value = copied(g.value)
	}
	b = packBytes(b, value)
	for _, r := range g.members {
		b = packInt(b, int64(r))
	}
	return b
}

// unpackGathering is the inverse of pack. It leaves the value nil if there is none to set.
func unpackGathering(b []byte) (g gathering, from int, err error) {
	u := unpacker{rest: b}
	g.key, g.size, from, g.rank = u.string(), int(u.int()), int(u.int()), int(u.int())
	g.value = u.bytes()
	for len(u.rest) > 0 && !u.bad && len(g.members) <= maxRanks {
		g.members = append(g.members, int(u.int()))
	}
	err = errors.Join(u.done(), checkPair(rankKey(g.key, maxRanks), g.value))
	if err == nil && (g.size < 1 || g.size > maxRanks || from < 0 || from >= g.count()) {
		err = fmt.Errorf("received a malformed all-gather of %d ranks from %d on", g.size, from)
	}
	return g, from, err
}

func (c *client) allGather(ctx context.Context, g gathering) ([][]byte, error) {
	return c.values(ctx, kindGather, g)
}

func (c *client) peek(ctx context.Context, g gathering) ([][]byte, error) {
	return c.values(ctx, kindPeek, g)
}

// values asks the server, repeatedly if the values do not fit into one answer.
func (c *client) values(ctx context.Context, k kind, g gathering) (values [][]byte, err error) {
	if err := checkPair(rankKey(g.key, maxRanks), g.value); err != nil {
		return nil, err
	}
	for len(values) < g.count() {
		u, _, err := c.request(ctx, k, "", g.pack(len(values)))
		if err != nil {
			return nil, err
		}
		for before := len(values); len(u.rest) > 0 && !u.bad || len(values) == before; {
			values = append(values, u.bytes())
		}
		if err := u.done(); err != nil {
			return nil, err
		}
	}
	return values[:g.count()], nil
}
