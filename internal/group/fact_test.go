package group

import (
	"bytes"
	"reflect"
	"strings"
	"testing"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/testing/require"
)

// sample is a fact of every kind, as among two ranks.
func sample() []fact {
	report := packReport(Report{Reason: Aborted, Rank: 1, Peer: -1, Lost: 7,
		Text: "no \x1b[31mmore"})
	digests := bytes.Repeat([]byte{1}, 16)
	return []fact{
		{kind: factHello, number: 3}, {kind: factDigests, rank: 1, number: 1, body: digests},
		{kind: factBegun, rank: 1, number: 9},
		{kind: factDigests, number: 1, body: bytes.Repeat([]byte{1}, 8*ringSlots)}, {kind: factNote,
			rank: 1, number: 1, body: []byte("note")},
		{kind: factLeaving, number: counted}, {kind: factLeft, number: together}, {kind: factAgreed,
			number: 1},
		{kind: factDiffers, number: 2, body: digests}, {kind: factHeader, rank: 1, number: 2,
			body: make([]byte, backend.HeaderSize)},
		{kind: factReport, body: report}, {kind: factHeard, rank: 1}, {kind: factSettled},
		{kind: factAsk, number: 1},
		{kind: factAnswer, number: 1}, {kind: factClosed, rank: 1}, {kind: factBye, number: 4},
	}
}

func TestFactsTravelAsTheyAre(t *testing.T) {
	var wire []byte
	for _, f := range sample() {
		wire = f.append(wire)
	}
	r := bytes.NewReader(wire)
	for _, want := range sample() {
		if got, err := readFact(r, 2); err != nil || !reflect.DeepEqual(got, want) {
			t.Errorf("%+v became %+v, %v", want, got, err)
		}
	}
}

func TestMalformedFactsAreRefused(t *testing.T) {
	for name, f := range map[string]fact{
		"no kind":                    {},
		"a kind that does not exist": {kind: factEnd},
		"a rank that does not exist": {kind: factBegun, rank: 2},
		"half a digest":              {kind: factDigests, number: 1, body: make([]byte, 12)},
		"more digests than there are": {kind: factDigests, number: 1,
			body: make([]byte, 8*ringSlots+8)},
		"a note that is too long": {kind: factNote, number: 1,
			body: make([]byte, NoteBytes+1)},
		"a report without a head": {kind: factReport, body: make([]byte, reportHead-1)},
		"a report that is too long": {kind: factReport,
			body: make([]byte, reportHead+reportText+1)},
		"digests of too many ranks":    {kind: factDiffers, body: make([]byte, 24)},
		"half a header":                {kind: factHeader, body: make([]byte, 64)},
		"a body where there is none":   {kind: factClosed, body: make([]byte, 1)},
		"a term that cannot be raised": {kind: factBye, number: maxTerm + 1},
	} {
		require.Fails(t, name, require.Err(readFact(bytes.NewReader(f.append(nil)), 2)))
	}
}

func TestTextOfAReportIsHarmless(t *testing.T) {
	r := unpackReport(packReport(Report{Text: "no \x1b[31mmore" + strings.Repeat("x", 5000)}))
	require.Check(t, strings.HasPrefix(r.Text, `no \x1b[31mmore`) && len(r.Text) <= reportText+10,
		"%d bytes: %.20q", len(r.Text), r.Text)
}

// FuzzFacts has a rank and a server hear what is no group's: they must go on.
func FuzzFacts(f *testing.F) {
	var all []byte
	for _, one := range sample() {
		f.Add(one.append(nil))
		all = one.append(all)
	}
	f.Add(all)
	f.Fuzz(func(t *testing.T, wire []byte) {
		h := newHub(2)
		lines := []*line{{wake: make(chan struct{}, 1)}, {rank: 1, wake: make(chan struct{}, 1)}}
		for _, l := range lines {
			h.lines[l] = true
		}
		b := &Sockets{members: []int{0, 1}, seen: newKnown(2), nudged: make(chan struct{}, 1),
			left: make(chan struct{})}
		r := bytes.NewReader(wire)
		for {
			from := r.Len()
			one, err := readFact(r, 2)
			if err != nil {
				break
			}
			if again := one.append(nil); !bytes.Equal(again,
				wire[len(wire)-from:len(wire)-r.Len()]) {
				t.Fatalf("%+v has two encodings", one)
			}
			h.hear(lines[one.rank], one)
			b.hear(one)
		}
		for _, known := range [][]fact{h.facts(), b.seen.facts()} {
			for _, one := range known {
				_, err := readFact(bytes.NewReader(one.append(nil)), 2)
				require.That(t, err == nil, "%+v cannot be told: %v", one, err)
			}
		}
		h.pending(lines[0], nil)
		b.Noted(1, 1)
		b.Reported()
		if b.seen.differs.kind != 0 {
			b.difference(^uint64(0))
		}
	})
}
