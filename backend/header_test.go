package backend_test

import (
	"bytes"
	"encoding/hex"
	"fmt"
	"reflect"
	"strings"
	"testing"
	"testing/quick"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/testing/require"
)

func TestHeaderRoundTrip(t *testing.T) {
	trip := func(any [backend.HeaderSize]byte) bool {
		h := backend.GetHeader(&any)
		var b [backend.HeaderSize]byte
		digest := h.Put(&b)
		return reflect.DeepEqual(backend.GetHeader(&b), h) && digest == backend.Digest(&b)
	}
	require.NoError(t, quick.Check(trip, nil))
}

func TestHeaderOfARankThatDoesNotCompareSaysSo(t *testing.T) {
	err := &backend.MismatchError{Mine: backend.Header{Seq: 1, Kind: backend.AllReduce}, Peer: 1}
	if s := err.Error(); !strings.Contains(s, "rank 1 called something that it does not compare "+
		"(the check is off there)") {
		t.Error(s)
	}
}

// FuzzGetHeader decodes any bytes: there is no wrong header, none that is encoded in two
// ways, and none that cannot be printed.
func FuzzGetHeader(f *testing.F) {
	f.Add(make([]byte, backend.HeaderSize))
	f.Add(bytes.Repeat([]byte{0xff}, backend.HeaderSize))
	for kind := range byte(12) { // of shapes, from unknown to more axes than there is room for
		b := bytes.Repeat([]byte{1}, backend.HeaderSize)
		b[54] = kind
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		if len(b) < backend.HeaderSize {
			return
		}
		h := backend.GetHeader((*[backend.HeaderSize]byte)(b))
		var again, twice [backend.HeaderSize]byte
		h.Put(&again)
		h = backend.GetHeader(&again)
		h.Put(&twice)
		require.Check(t, again == twice, "%x became %x, which became %x", b, again, twice)
		require.Check(t, h.String() != "" && h.Asked().String() != "", "a header prints as nothing")
	})
}

func TestHeaderLeavesOutWhatDoesNotMatter(t *testing.T) {
	for _, k := range backend.Kinds() {
		plain := backend.Collective{Kind: k}.Header(1, 8, backend.F32)
		op := backend.Collective{Kind: k, Op: backend.Max}.Header(1, 8, backend.F32)
		root := backend.Collective{Kind: k, Root: 1}.Header(1, 8, backend.F32)
		require.Equal(t, fmt.Sprintf("%v: op in the header", k), op != plain, k.Reduces())
		require.Equal(t, fmt.Sprintf("%v: root in the header", k), root != plain, k.Rooted())
	}
}

// TestHeaderBytesAreFixed: ranks that were built from different versions compare bytes.
func TestHeaderBytesAreFixed(t *testing.T) {
	c := backend.Collective{
		Kind: backend.Reduce, Op: backend.Max, Association: backend.Tree, Root: 0x11121314,
		Algorithm: backend.TwoShot, Exact: true, State: 0x21222324,
		Splits: []int{1, 2},
		Origin: &backend.Origin{Purpose: backend.ForSave, Ordinal: 0x31323334,
			Shape: backend.ShapeOf(4, 5, 6, 7, 8, 9), Cut: 0x41, Join: 0x42, Name: backend.MakeName(
				"w1")},
		Original: backend.Original{Op: backend.Prod, DType: backend.F64, Transport: backend.BF16,
			Hash: 0x5152535455565758},
	}
	h := c.Header(0x6162636465666768, 0x7172737475767778, backend.F16)
	var b, direct [backend.HeaderSize]byte
	digest := h.Put(&b)
	require.Check(t, c.PutHeader(&direct, h.Seq, int(h.Count), h.DType) == digest && direct == b,
		"the bytes of a header are\n%x, and as PutHeader writes them\n%x", b, direct)
	h.Generation = 0x81828384
	h.Put(&b)
	want := "6867666564636261" + "7877767574737271" + "67e0c86303981777" + "5857565554535251" +
		"84838281" + "14131211" + "24232221" + "34333231" +
		"06" + "04" + "01" + "02" + "01" + "0b" + "07" + "41" + "42" + "02" + "04" + "02" + "01" +
		"0000" + "01" +
		"04000000" + "05000000" + "06000000" + "07000000" + "08000000" + "09000000" + "7731" +
		strings.Repeat("00", 30+8)
	require.Equal(t, "the bytes of a header", hex.EncodeToString(b[:]), want)
}

// TestHeadersWithoutNamesAreOneCacheLine: what the second half holds does not matter then, and
// stays what it was.
func TestHeadersWithoutNamesAreOneCacheLine(t *testing.T) {
	for _, origin := range []*backend.Origin{nil, {}, {Purpose: backend.ForSync, Ordinal: 3, Cut: 1,
		Shape: backend.ShapeOf()}} {
		h := backend.Collective{Kind: backend.AllReduce, Origin: origin}.Header(7, 8, backend.F32)
		var clean [backend.HeaderSize]byte
		used := [backend.HeaderSize]byte(bytes.Repeat([]byte{0xa5}, backend.HeaderSize))
		if h.Put(&clean) != h.Put(&used) || backend.Digest(&clean) != backend.Digest(&used) {
			t.Errorf("%+v: the digest depends on bytes that mean nothing", origin)
		}
		if rest := used[64:]; !bytes.Equal(rest, bytes.Repeat([]byte{0xa5}, len(rest))) {
			t.Errorf("%+v: the second half became %x", origin, rest)
		}
		got, want := backend.GetHeader(&used), backend.GetHeader(&clean)
		require.Check(t, reflect.DeepEqual(got, want), "%+v: read as %v, want %v", origin, got,
			want)
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
		"rows": with(func(c *backend.Collective) {
			c.Kind, c.Rows = backend.AllToAll, &backend.Rows{Src: []int{2}, Dst: []int{1}}
		}),
		"other rows": with(func(c *backend.Collective) {
			c.Kind, c.Rows = backend.AllToAll, &backend.Rows{Src: []int{1}, Dst: []int{2}}
		}),
		"no rows":     with(func(c *backend.Collective) { c.Kind = backend.AllToAll }),
		"algorithm":   with(func(c *backend.Collective) { c.Algorithm = backend.OneShot }),
		"state":       with(func(c *backend.Collective) { c.State = 1 }),
		"association": with(func(c *backend.Collective) { c.Association = backend.Tree }),
		"exact":       with(func(c *backend.Collective) { c.Exact = true }),
		"purpose": with(func(c *backend.Collective) {
			c.Origin = &backend.Origin{Purpose: backend.ForSave}
		}),
		"ordinal": with(func(c *backend.Collective) { c.Origin = &backend.Origin{Ordinal: 1} }),
		"scalar": with(func(c *backend.Collective) {
			c.Origin = &backend.Origin{Shape: backend.ShapeOf()}
		}),
		"shape": with(func(c *backend.Collective) {
			c.Origin = &backend.Origin{Shape: backend.ShapeOf(2, 3)}
		}),
		"other shape": with(func(c *backend.Collective) {
			c.Origin = &backend.Origin{Shape: backend.ShapeOf(3, 2)}
		}),
		"many axes": with(func(c *backend.Collective) {
			c.Origin = &backend.Origin{Shape: backend.ShapeOf(1, 1, 1, 1, 1, 1, 6)}
		}),
		"other axes": with(func(c *backend.Collective) {
			c.Origin = &backend.Origin{Shape: backend.ShapeOf(1, 1, 1, 1, 1, 6, 1)}
		}),
		"long axis": with(func(c *backend.Collective) {
			c.Origin = &backend.Origin{Shape: backend.ShapeOf(1 << 32)}
		}),
		"layout": with(func(c *backend.Collective) {
			c.Origin = &backend.Origin{Shape: backend.LayoutOf("w, b")}
		}),
		"other layout": with(func(c *backend.Collective) {
			c.Origin = &backend.Origin{Shape: backend.LayoutOf("b, w")}
		}),
		"name": with(func(c *backend.Collective) {
			c.Origin = &backend.Origin{Name: backend.MakeName("x")}
		}),
		"long name": with(func(c *backend.Collective) {
			c.Origin = &backend.Origin{Name: backend.MakeName(strings.Repeat("x", 33))}
		}),
		"longer name": with(func(c *backend.Collective) {
			c.Origin = &backend.Origin{Name: backend.MakeName(strings.Repeat("x", 34))}
		}),
		"cut":  with(func(c *backend.Collective) { c.Origin = &backend.Origin{Cut: 1} }),
		"join": with(func(c *backend.Collective) { c.Origin = &backend.Origin{Join: 1} }),
		"asked op": with(func(c *backend.Collective) {
			c.Original = backend.Original{Op: backend.Avg}
		}),
		"asked dtype": with(func(c *backend.Collective) {
			c.Original = backend.Original{DType: backend.F64}
		}),
		"asked wire": with(func(c *backend.Collective) {
			c.Original = backend.Original{Transport: backend.BF16}
		}),
		"asked call": with(func(c *backend.Collective) { c.Original = backend.Original{Hash: 1} }),
	}
	bytes, digests := map[[backend.HeaderSize]byte]string{}, map[uint64]string{}
	for name, h := range headers {
		var b [backend.HeaderSize]byte
		digest := h.Put(&b)
		for _, other := range []string{bytes[b], digests[digest]} {
			require.Check(t, other == "", "%q and %q have the same header", name, other)
		}
		bytes[b], digests[digest] = name, name
	}
}

func TestHeaderPrintsTheCall(t *testing.T) {
	c := backend.Collective{Kind: backend.Reduce, Op: backend.Max, Root: 2, State: 5,
		Algorithm: backend.TwoShot}
	got := c.Header(17, 1024, backend.BF16).String()
	require.Equal(t, "c.Header", got,
		"reduce(max, root 2) of 1024 bf16 by two-shot with state 5 (call 17)")
}

// TestFoundNegativeStateIsRefused: what was a negative slot, which communicators kept for calls
// of their own, has its own fields.
func TestFoundNegativeStateIsRefused(t *testing.T) {
	x := backend.Of(make([]float32, 8))
	y := backend.Of(make([]float32, 8))
	for _, state := range []int{-1, -4, -1 << 24, 1 << 32} {
		for _, dst := range []backend.Buffer{x, y} {
			_, err := backend.Collective{Kind: backend.AllReduce, State: state}.Check(0, 2, dst, x)
			require.Fails(t, fmt.Sprint("state ", state), err, backend.ErrArgument,
				fmt.Sprint(state))
		}
	}
}

// TestFoundHashesOfWrappersDoNotMix: a header carries what package half was asked for and the
// hash of package hierarchy beside each other, whatever the hash is.
func TestFoundHashesOfWrappersDoNotMix(t *testing.T) {
	for _, hash := range []uint64{0, 1, 1 << 24, 1<<32 + 7, 1<<64 - 1} {
		c := backend.Collective{Kind: backend.AllReduce, Op: backend.Avg, State: 5,
			Original: backend.Original{Op: backend.Sum, DType: backend.F64, Hash: hash}}
		h := c.Header(1, 8, backend.BF16)
		want := backend.Collective{Kind: backend.AllReduce, State: 5,
			Original: backend.Original{Hash: hash}}.Header(1, 8, backend.F64)
		if h.Asked() != want {
			t.Errorf("hash %d: %v was asked for, want %v", hash, h.Asked(), want)
		}
		c.Original = backend.Original{Hash: hash}
		if h := c.Header(1, 8, backend.BF16); h.Asked() != h {
			t.Errorf("hash %d: what was asked for is %v, want %v", hash, h.Asked(), h)
		}
	}
}

func TestMismatchSaysWhatToDo(t *testing.T) {
	of := func(p backend.Purpose) backend.Header {
		return backend.Collective{Kind: backend.AllGather,
			Origin: &backend.Origin{Purpose: p}}.Header(7, 40, backend.U8)
	}
	for _, test := range []struct {
		mine, theirs backend.Purpose
		want         string
	}{
		{backend.ForSave, backend.ForSync, ": call DataParallel.Save on every rank, not on some " +
			"of them"},
		{backend.ForGraph, backend.ForCheck, ": call DataParallel.Check on every rank, not on " +
			"some of them"},
		{backend.ForLoad, backend.ForSave, ": call both DataParallel.Load and DataParallel.Save " +
			"on every rank, in the same order"},
		{backend.ForSave, backend.ForSave, ": every rank must start the same collectives in the " +
			"same order"},
		{backend.ForSync, backend.ForGraph, ": every rank must start the same collectives in the " +
			"same order"},
		{backend.Purpose(0), backend.Purpose(200), ": every rank must start the same collectives " +
			"in the same order"},
	} {
		m := &backend.MismatchError{Rank: 1, Mine: of(test.mine), Theirs: of(test.theirs)}
		require.Check(t, strings.HasSuffix(m.Error(), test.want),
			"%v against %v: %q does not end with %q", test.mine, test.theirs, m, test.want)
		e := &backend.Error{Comm: "world", Rank: 1, Call: m.Mine.String(), Cause: m}
		require.Equal(t, fmt.Sprintf("the error is %q", e), e.Error(),
			"rank 1 of world: because of rank 0: "+m.Error())
	}
}

// TestNamesOfOthersArePrintable: they may come from another rank.
func TestNamesOfOthersArePrintable(t *testing.T) {
	for name, want := range map[string]string{
		"w1": "w1", "": "", "a\x1b[2Jb": "a?[2Jb", "a\nb": "a?b", "a\x00b": "a?b", "größe": "größe",
		strings.Repeat("x", 32): strings.Repeat("x", 32),
	} {
		require.Equal(t, fmt.Sprintf("%q prints as", name), backend.MakeName(name).String(), want)
	}
	long := backend.MakeName(strings.Repeat("x", 40)).String()
	require.Check(t, strings.HasPrefix(long, strings.Repeat("x", 23)+"#") && len(long) == 32,
		"a long name prints as %q", long)
}

// TestDigestsOfHeadersDiffer: in every bit of a header whose second half counts. The digest of one
// header is fixed, because other processes compute it too.
func TestDigestsOfHeadersDiffer(t *testing.T) {
	header := [backend.HeaderSize]byte{63: 0x80}
	seen := map[uint64]int{backend.Digest(&header): -1}
	for bit := range 8 * backend.HeaderSize {
		header[bit/8] ^= 1 << (bit % 8)
		d := backend.Digest(&header)
		other, ok := seen[d]
		require.Check(t, !ok && d != 0, "bits %d and %d: digest %#x", bit, other, d)
		seen[d] = bit
		header[bit/8] ^= 1 << (bit % 8)
	}
	require.Equal(t, "the digest", backend.Digest(&header), 0x85dc40d926584f4b)
}
