//go:build gpu

package cuda

import (
	"bytes"
	"errors"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/euryale-ml/euryale/backend"
)

// TestGPUManyCopiesAreCopies packs buffers of many lengths and unpacks them, on a
// queue of its own, and looks at what is between them.
func TestGPUManyCopiesAreCopies(t *testing.T) {
	d := openDevice(t, 0)
	q := newQueueOf(t, d)
	k := q
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
		ok(t, k.MultiTensorCopy(places, parts))
	}
	if got := read(t, q, flat); !bytes.Equal(got, want) {
		t.Error("packed wrong")
	}
	ok(t, k.MultiTensorCopy(parts, places)) // has its own list
	before := d.MemoryStats().Mallocs
	for _, p := range parts {
		ok(t, k.Zero(p))
	}
	ok(t, k.MultiTensorCopy(parts, places))
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
	ok(t, k.MultiTensorCopy(nil, nil))
}

// TestGPUManyCopiesRound packs buffers of any float as any other, of many lengths: in one
// launch where one kernel does it, with the bits of a Cast for each.
func TestGPUManyCopiesRound(t *testing.T) {
	d := openDevice(t, 0)
	q := newQueueOf(t, d)
	k := q
	floats := []backend.DType{backend.F16, backend.BF16, backend.F32, backend.F64}
	lengths := []int{1, 1000, 0, 7, 1023, 1024, 1025, 2047, 2049, 20001, 3}
	total := 0
	for _, n := range lengths {
		total += n + 1
	}
	data := make([]float64, total)
	rng := rand.New(rand.NewPCG(4, 4))
	for i := range data {
		data[i] = rng.NormFloat64() * 1e3
	}
	numbers := allocate(t, d, 8*total).As(backend.F64)
	ok(t, k.Move(numbers, backend.Of(data)))
	for _, from := range floats {
		for _, to := range floats {
			flat, want := allocate(t, d, to.Size()*total).As(to), allocate(t, d, to.Size()*total).As(to)
			x := allocate(t, d, from.Size()*total).As(from)
			ok(t, errors.Join(k.Cast(x, numbers), k.Cast(want, x)))
			var dsts, srcs []backend.Buffer
			at := 0
			for _, n := range lengths {
				dsts, srcs = append(dsts, flat.Slice(at, at+n)), append(srcs, x.Slice(at, at+n))
				at += n + 1
				ok(t, k.Zero(want.Slice(at-1, at))) // between them
			}
			lists := len(q.arithmetic.lists.all)
			for range 3 {
				ok(t, k.MultiTensorCopy(dsts, srcs))
			}
			if !bytes.Equal(read(t, q, flat), read(t, q, want)) {
				t.Errorf("%v as %v: other bits than those of casts", from, to)
			}
			inOne := from == to || from.Size() > 2 && to.Size() == 2
			if more := len(q.arithmetic.lists.all) - lists; inOne != (more == 1) {
				t.Errorf("%v as %v: %d lists", from, to, more)
			}
		}
	}
	// Several dtypes at once.
	x, y := allocate(t, d, 80), allocate(t, d, 80)
	ok(t, k.Move(x.As(backend.F32).Slice(0, 8), backend.Of([]float32{1, 2, 3, 4, 5, 6, 7, 8})))
	ok(t, k.MultiTensorCopy(
		[]backend.Buffer{y.As(backend.F32).Slice(0, 2), y.As(backend.BF16).Slice(4, 6), y.As(backend.F64).Slice(2, 5)},
		[]backend.Buffer{x.As(backend.F32).Slice(0, 2), x.As(backend.F32).Slice(2, 4), x.As(backend.F32).Slice(5, 8)}))
	got := read(t, q, y)
	want := make([]byte, 80)
	copy(want, backend.Of([]float32{1, 2}).Bytes())
	copy(want[8:], backend.Of([]backend.BFloat16{0x4040, 0x4080}).Bytes())
	copy(want[16:], backend.Of([]float64{6, 7, 8}).Bytes())
	if !bytes.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
}

// TestGPUCopiesAgainDoNotStopTheHost: all staging buffers are taken here, as they are by
// copies that wait behind long work.
func TestGPUCopiesAgainDoNotStopTheHost(t *testing.T) {
	d := openDevice(t, 0)
	q := newQueueOf(t, d)
	k := q
	const buckets, n = 6, 5000
	before := d.MemoryStats().InUse
	grads, err := d.Alloc(4 * buckets * n)
	ok(t, err)
	flats, err := d.Alloc(4 * buckets * n)
	ok(t, err)
	halves, err := d.Alloc(2 * buckets * n)
	ok(t, err)
	step := func() {
		for i := range buckets {
			x := grads.As(backend.F32).Slice(i*n, (i+1)*n)
			y := flats.As(backend.F32).Slice(i*n, (i+1)*n)
			parts, places := [2]backend.Buffer{x.Slice(0, 7), x.Slice(7, n)}, [2]backend.Buffer{y.Slice(n-7, n), y.Slice(0, n-7)}
			ok(t, k.MultiTensorCopy(places[:], parts[:]))
			ok(t, k.MultiTensorCopy(parts[:], places[:]))
			h := halves.As(backend.BF16).Slice(i*n, (i+1)*n)
			rounded := [2]backend.Buffer{h.Slice(n-7, n), h.Slice(0, n-7)}
			ok(t, k.MultiTensorCopy(rounded[:], parts[:]))
		}
	}
	step()
	var taken []*staging
	for range stagingBuffers {
		taken = append(taken, <-d.staging)
	}
	done := make(chan float64)
	go func() { done <- testing.AllocsPerRun(10, step) }()
	select {
	case allocs := <-done:
		if allocs > 0 {
			t.Errorf("%v allocations in a step", allocs)
		}
	case <-time.After(10 * time.Second):
		t.Error("a step waits for a staging buffer")
	}
	for _, s := range taken {
		d.staging <- s
	}
	ok(t, q.drain())
	ok(t, errors.Join(d.Free(grads), d.Free(flats), d.Free(halves)))
	if after := d.MemoryStats().InUse; after != before {
		t.Errorf("%d bytes are in use once all is freed, %d before", after, before)
	}
}

// TestGPUKeepsOnlySoManyLists: buffers that are new each time do not fill the device.
func TestGPUKeepsOnlySoManyLists(t *testing.T) {
	d := openDevice(t, 0)
	q := newQueueOf(t, d)
	k := q
	b := allocate(t, d, 2*(mostLists+50))
	for i := range mostLists + 50 {
		ok(t, k.MultiTensorCopy([]backend.Buffer{b.Slice(2*i, 2*i+1)}, []backend.Buffer{b.Slice(2*i+1, 2*i+2)}))
	}
	l := &q.arithmetic.lists
	nbytes := 0
	for _, one := range l.all {
		nbytes += one.onDevice.Len()
	}
	if len(l.all) != mostLists || nbytes != l.nbytes {
		t.Errorf("%d lists of %d bytes, counted as %d", len(l.all), nbytes, l.nbytes)
	}
}
