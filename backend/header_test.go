package backend_test

import (
	"bytes"
	"strings"
	"testing"
	"testing/quick"

	"github.com/euryale-ml/euryale/backend"
)

func TestHeaderRoundTrip(t *testing.T) {
	trip := func(h backend.Header) bool {
		var b [backend.HeaderSize]byte
		h.Put(b[:])
		return backend.GetHeader(b[:]) == h
	}
	if err := quick.Check(trip, nil); err != nil {
		t.Error(err)
	}
}

func TestHeaderOfARankThatDoesNotCompareSaysSo(t *testing.T) {
	err := &backend.MismatchError{Mine: backend.Header{Seq: 1, Kind: backend.AllReduce}, Peer: 1}
	if s := err.Error(); !strings.Contains(s, "rank 1 called something that it does not compare (the check is off there)") {
		t.Error(s)
	}
}

// FuzzGetHeader decodes any bytes: there is no wrong header, and none that is
// encoded in two ways.
func FuzzGetHeader(f *testing.F) {
	f.Add(make([]byte, backend.HeaderSize))
	f.Add(bytes.Repeat([]byte{0xff}, backend.HeaderSize))
	f.Fuzz(func(t *testing.T, b []byte) {
		if len(b) < backend.HeaderSize {
			return
		}
		h := backend.GetHeader(b)
		var again [backend.HeaderSize]byte
		h.Put(again[:])
		if !bytes.Equal(again[:], b[:backend.HeaderSize]) {
			t.Errorf("%x became %x", b, again)
		}
		if h.String() == "" {
			t.Error("a header prints as nothing")
		}
	})
}

func TestHeaderLeavesOutWhatDoesNotMatter(t *testing.T) {
	for _, k := range backend.Kinds() {
		plain := backend.Collective{Kind: k}.Header(1, 8, backend.F32)
		op := backend.Collective{Kind: k, Op: backend.Max}.Header(1, 8, backend.F32)
		root := backend.Collective{Kind: k, Root: 1}.Header(1, 8, backend.F32)
		if (op != plain) != k.Reduces() {
			t.Errorf("%v: op in the header: %v", k, op != plain)
		}
		if (root != plain) != k.Rooted() {
			t.Errorf("%v: root in the header: %v", k, root != plain)
		}
	}
}

func TestHeadersOfDifferentCallsDiffer(t *testing.T) {
	base := backend.Collective{Kind: backend.AllGather, Splits: []int{1, 2, 3}}
	with := func(change func(*backend.Collective)) backend.Header {
		c := base
		change(&c)
		return c.Header(1, 6, backend.F32)
	}
	headers := map[string]backend.Header{
		"base":         with(func(*backend.Collective) {}),
		"seq":          base.Header(2, 6, backend.F32),
		"count":        base.Header(1, 7, backend.F32),
		"dtype":        base.Header(1, 6, backend.I32),
		"kind":         with(func(c *backend.Collective) { c.Kind = backend.ReduceScatter }),
		"order":        with(func(c *backend.Collective) { c.Splits = []int{2, 1, 3} }),
		"no splits":    with(func(c *backend.Collective) { c.Splits = nil }),
		"empty splits": with(func(c *backend.Collective) { c.Splits = []int{} }),
		"zero split":   with(func(c *backend.Collective) { c.Splits = []int{0} }),
		"algorithm":    with(func(c *backend.Collective) { c.Algorithm = backend.OneShot }),
		"slot":         with(func(c *backend.Collective) { c.Slot = 1 }),
	}
	seen := map[backend.Header]string{}
	for name, h := range headers {
		if other, ok := seen[h]; ok {
			t.Errorf("%q and %q have the same header", name, other)
		}
		seen[h] = name
	}
}

func TestHeaderPrintsTheCall(t *testing.T) {
	c := backend.Collective{Kind: backend.Reduce, Op: backend.Max, Root: 2, Slot: 5, Algorithm: backend.TwoShot}
	got := c.Header(17, 1024, backend.BF16).String()
	if want := "reduce(max, root 2) of 1024 bf16 by two-shot in slot 5 (call 17)"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
}
