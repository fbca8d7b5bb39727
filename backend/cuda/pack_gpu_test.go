//go:build gpu

package cuda

import (
	"bytes"
	"math/rand/v2"
	"testing"

	"github.com/euryale-ml/euryale/backend"
)

// TestGPUManyCopiesAreCopies packs buffers of many lengths and unpacks them, on a
// queue of its own, and looks at what is between them.
func TestGPUManyCopiesAreCopies(t *testing.T) {
	d := openDevice(t, 0)
	q := newQueueOf(t, d)
	k := q.Kernels().(backend.Arithmetic)
	rng := rand.New(rand.NewPCG(1, 1))
	lengths := []int{1, 1000, 0, 7, 4095, 4096, 4097, 70001, 3}
	for len(lengths) < 300 {
		lengths = append(lengths, rng.IntN(500))
	}
	const gap = 3
	size := 0
	for _, n := range lengths {
		size += n + gap
	}
	flat := allocate(t, d, 4*size).As(backend.F32)
	want := bytes.Repeat([]byte{0xAB}, flat.NBytes())
	var places, parts []backend.Buffer
	at := 0
	for _, n := range lengths {
		data := make([]byte, 4*n)
		for i := range data {
			data[i] = byte(rng.Uint32())
		}
		copy(want[4*at:], data)
		lo := n % 2 // not always where vectors begin
		part := allocate(t, d, 4*n+4).As(backend.F32).Slice(lo, lo+n)
		ok(t, k.Move(part.As(backend.U8), backend.Of(data)))
		places, parts = append(places, flat.Slice(at, at+n)), append(parts, part)
		at += n + gap
	}
	ok(t, k.Fill(flat.As(backend.U8), 0xAB))
	for range 3 { // again, as in every step
		ok(t, k.CopyMany(places, parts))
	}
	if got := read(t, q, flat); !bytes.Equal(got, want) {
		t.Error("packed wrong")
	}
	before := d.MemoryStats().Mallocs
	for _, p := range parts {
		ok(t, k.Zero(p))
	}
	ok(t, k.CopyMany(parts, places))
	for i, p := range parts {
		lo := 0
		for _, n := range lengths[:i] {
			lo += 4 * (n + gap)
		}
		if !bytes.Equal(read(t, q, p), want[lo:lo+p.NBytes()]) {
			t.Fatalf("buffer %d is unpacked wrong", i)
		}
	}
	if after := d.MemoryStats().Mallocs; after != before {
		t.Errorf("the driver was asked for memory %d times", after-before)
	}
	ok(t, k.CopyMany(nil, nil))
}
