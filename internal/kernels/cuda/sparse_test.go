package cuda

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"testing"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/kernels"
	"github.com/euryale-ml/euryale/internal/testing/reference"
	"github.com/euryale-ml/euryale/internal/testing/require"
)

// selection is a case of a Select, on both sides.
type selection struct {
	n, k, room int
	limit      float32
	values     backend.DType
	residual   bool
	dense      bool // in place of the operand
	stopped    bool
	offset     int // of operand and residual, in elements
	fill       func(rnd *rand.Rand, i int) float32
}

func (c selection) String() string {
	what := fmt.Sprintf("threshold %v", c.limit)
	if c.k > 0 {
		what = fmt.Sprintf("top %d", c.k)
	}
	return fmt.Sprintf("%s of %d + %d as %v, room for %d, residual %v, dense %v, stopped %v", what,
		c.n, c.offset, c.values, c.room, c.residual, c.dense, c.stopped)
}

func normal(rnd *rand.Rand, _ int) float32 { return float32(rnd.NormFloat64()) }

// odd has all that is special: NaN, infinities, zeros of both signs, subnormals,
// what 16 bits do not hold, and many that are equal.
func odd(rnd *rand.Rand, i int) float32 {
	specials := []float32{float32(math.NaN()), float32(math.Inf(1)), float32(math.Inf(-1)), 0,
		float32(math.Copysign(0, -1)), 1e-42, 65519, 65520, 1e38, 3.4e38}
	if i%97 == 0 {
		return specials[rnd.IntN(len(specials))]
	}
	return float32(rnd.IntN(9) - 4)
}

func tail(_ *rand.Rand, i int) float32 { return float32(max(0, i-2)) }

func zeros(*rand.Rand, int) float32 { return 0 }

// ones makes all of them candidates, for which there is no room.
func ones(*rand.Rand, int) float32 { return -1 }

// spiked hides what is large from a sample.
func spiked(rnd *rand.Rand, i int) float32 {
	if i%1000 == 7 {
		return float32(1 + rnd.Float64())
	}
	return 0
}

// far has tiles that are out of sight of each other, twice.
const far = 2*threads*selectTile + 5

func selections(full bool) []selection {
	all := []selection{
		{n: 6, limit: 4, room: 6, fill: func(_ *rand.Rand, i int) float32 {
			return []float32{0, 0, 0, 4, 5, 6}[i]
		}},
		{n: 6, k: 2, room: 2, fill: tail},
		{n: 1, k: 1, room: 1, fill: normal},
		{n: 1, limit: 0, room: 1, fill: zeros},
		{n: 5000, k: 100, room: 100, fill: zeros},
		{n: 5000, k: 4999, room: 4999, fill: odd},
		{n: 40000, k: 400, room: 400, fill: spiked},
		{n: 40000, k: 100, room: 100, fill: ones},
		{n: 40000, k: 20, room: 20, fill: normal},
	}
	if full {
		all = append(all, selection{n: far, k: 10001, room: 10001, fill: normal},
			selection{n: far, limit: 2, room: 50000, fill: odd})
	}
	for i, n := range []int{1, 33, 1000, selectTile, selectTile + 1, 3*selectTile - 5} {
		for j, fill := range []func(*rand.Rand, int) float32{normal, odd} {
			c := selection{n: n, fill: fill, offset: (i + j) % 3}
			few := max(n/50, 1)
			c.limit, c.room = 2, few
			all = append(all, c)
			c.limit, c.room = 0, n
			all = append(all, c)
			c.limit, c.k, c.room = 0, few, few
			all = append(all, c)
			c.k, c.room = max(n/10, 1), max(n/20, 1)
			all = append(all, c)
		}
	}
	var cases []selection
	for i, c := range all {
		for _, d := range []backend.DType{backend.F32, backend.F16, backend.BF16} {
			c.values, c.residual, c.stopped = d, (i+int(d))%4 > 0, false
			cases = append(cases, c)
			c.dense = true
			cases = append(cases, c)
			c.dense = false
			if i%5 == 0 {
				c.stopped = true
				cases = append(cases, c)
			}
		}
	}
	return cases
}

func testSelect(t *testing.T, m machine) {
	b := newBench(t, m, 20)
	_, slow := m.(*emulator)
	for _, c := range selections(!slow) {
		b.reset(uint64(c.n))
		b.selects(c)
	}
}

// selects runs one case, and compares what is written, NaNs with NaNs.
func (b *bench) selects(c selection) {
	b.t.Helper()
	x := b.alloc(backend.F32, c.n, c.offset)
	residual, notes, dense := operand{}, b.alloc(backend.I64, 3, 0), operand{}
	if c.residual {
		residual = b.alloc(backend.F32, c.n, c.offset)
		for i := range c.n {
			backend.View[float32](residual.host)[i] = float32(b.rnd.IntN(3)-1) / 8
		}
	}
	for i := range c.n {
		backend.View[float32](x.host)[i] = c.fill(b.rnd, i)
	}
	room := c.room
	if c.dense {
		dense, room = x, 0
	}
	clear(backend.View[int64](notes.host))
	if c.stopped {
		backend.View[int64](notes.host)[1] = 5
	}
	head, values, index := b.alloc(backend.I64, kernels.HeadWords, 0), b.alloc(c.values, room, 0),
		b.alloc(backend.I32, room, 0)
	call := func(side func(operand) backend.Buffer) *kernels.Selection {
		return &kernels.Selection{
			Out:   kernels.Message{Head: side(head), Values: side(values), Index: side(index)},
			Dense: side(dense), X: side(x), Residual: side(residual),
			K: c.k, Above: max(math.Float32bits(c.limit), 1) - 1, Saturate: c.residual,
			Fingerprint: 77, Notes: side(notes),
		}
	}
	onDevice, onHost := call(func(o operand) backend.Buffer { return o.device }),
		call(func(o operand) backend.Buffer { return o.host })
	guarded := b.used
	onDevice.Scratch = b.alloc(backend.U8, b.device.SelectScratch(onDevice), 0).device
	b.used = guarded
	if err := errors.Join(b.m.Write(b.shadow[:b.used]), b.device.Select(onDevice),
		reference.Select(onHost)); err != nil {
		b.t.Fatalf("%v: %v", c, err)
	}
	b.compare(c, residual, x, values)
}

// compare compares the memory, in which NaNs of some operands are alike.
func (b *bench) compare(what fmt.Stringer, floats ...operand) {
	b.t.Helper()
	got := make([]byte, b.used)
	if err := b.m.Read(got); err != nil {
		b.t.Fatalf("%v: %v", what, err)
	}
	base, _ := b.m.Arena()
	for _, o := range floats {
		for i := range o.host.Len() {
			at := int(o.device.Addr()-base) + i*o.host.DType().Size()
			g, w := backend.Of(got[at:at+o.host.DType().Size()]).As(o.host.DType()),
				o.host.Slice(i, i+1)
			if isNaN(g) && isNaN(w) {
				copy(g.Bytes(), w.Bytes())
			}
		}
	}
	for i := range got {
		if got[i] != b.shadow[i] {
			lo := i / 8 * 8
			b.t.Fatalf("%v: bytes %d of %d are %x, want %x", what, lo, b.used,
				got[lo:min(lo+16, b.used)], b.shadow[lo:min(lo+16, b.used)])
		}
	}
}

// combination is a case of a Combine.
type combination struct {
	n, ranks, capacity, divisor int
	values, dtype               backend.DType
	offset                      int
}

func (c combination) String() string {
	return fmt.Sprintf("combine %d x %d of %v to %d %v + %d by %d", c.ranks, c.capacity, c.values,
		c.n, c.dtype, c.offset, c.divisor)
}

func testCombine(t *testing.T, m machine) {
	b := newBench(t, m, 21)
	ns := []int{1, 5, 1000, combineTile, combineTile + 1, 3*combineTile + 17}
	if _, slow := m.(*emulator); !slow {
		ns = append(ns, large)
	}
	for i, n := range ns {
		for j, ranks := range []int{1, 2, 4, 33} {
			for _, values := range []backend.DType{backend.F32, backend.F16, backend.BF16} {
				for _, dtype := range []backend.DType{backend.F32, backend.F64} {
					b.reset(uint64(n))
					b.combines(combination{n: n, ranks: ranks, capacity: n/(7+i+j) + 1, divisor: 1 +
						j*ranks/2, values: values, dtype: dtype, offset: i % 2})
				}
			}
		}
	}
}

func (b *bench) combines(c combination) {
	b.t.Helper()
	valuesAt := 8 * kernels.HeadWords
	indexAt := valuesAt + (c.capacity*c.values.Size()+7)/8*8
	nbytes := indexAt + (4*c.capacity+7)/8*8
	dst, all := b.alloc(c.dtype, c.n, c.offset), b.alloc(backend.U8, c.ranks*nbytes, 0)
	for r := range c.ranks {
		message := all.host.Slice(r*nbytes, (r+1)*nbytes)
		b.message(c, message, valuesAt, indexAt)
	}
	m := kernels.Messages{Ranks: c.ranks, NBytes: nbytes, DType: c.values, Values: valuesAt,
		Index: indexAt, Capacity: c.capacity}
	onHost, onDevice := m, m
	onHost.All, onDevice.All = all.host, all.device
	if err := errors.Join(b.m.Write(b.shadow[:b.used]), b.device.Combine(dst.device, onDevice,
		c.divisor), reference.Combine(dst.host, onHost, c.divisor)); err != nil {
		b.t.Fatalf("%v: %v", c, err)
	}
	b.compare(c, dst)
}

// message fills a message with entries at random places, in order.
func (b *bench) message(c combination, m backend.Buffer, valuesAt, indexAt int) {
	index := backend.View[int32](m.Slice(indexAt, indexAt+4*c.capacity).As(backend.I32))
	sent := 0
	for i := 0; i < c.n && sent < b.rnd.IntN(c.capacity+1)+c.capacity/2 &&
		sent < c.capacity; i += 1 + b.rnd.IntN(2*c.n/c.capacity+1) {
		index[sent] = int32(i)
		sent++
	}
	values := make([]float32, c.capacity)
	for i := range values {
		values[i] = float32(b.rnd.NormFloat64())
	}
	to := m.Slice(valuesAt, valuesAt+c.capacity*c.values.Size()).As(c.values)
	if err := b.host.Cast(to, backend.Of(values)); err != nil {
		b.t.Fatal(err)
	}
	head := backend.View[int64](m.Slice(0, valuesAt).As(backend.I64))
	head[1], head[2] = int64(sent), int64(sent)
}

func testNotFinite(t *testing.T, m machine) {
	b := newBench(t, m, 22)
	for _, n := range []int{0, 1, 5, 1000, 5000} {
		for _, d := range []backend.DType{backend.F32, backend.F64} {
			for _, at := range []int{-1, 0, n / 2, n - 1} {
				b.reset(uint64(n))
				x, note := b.alloc(d, n, n%2), b.alloc(backend.I64, 1, 0)
				for i := range n {
					v := b.rnd.NormFloat64()
					if i >= at && at >= 0 && (i == at || b.rnd.IntN(3) == 0) {
						v = []float64{math.NaN(), math.Inf(1), math.Inf(-1)}[b.rnd.IntN(3)]
					}
					if d == backend.F32 {
						backend.View[float32](x.host)[i] = float32(v)
					} else {
						backend.View[float64](x.host)[i] = v
					}
				}
				b.run(fmt.Sprintf("not finite of %d %v from %d", n, d, at), note,
					func() error { return b.device.NotFinite(note.device, x.device) },
					func() error { return b.host.NotFinite(note.host, x.host) })
			}
		}
	}
}

// sparses makes every call of package sparse for n elements.
func sparses(k Kernels, n int) error {
	if n == 0 {
		return nil
	}
	var errs []error
	x, residual, head := device(backend.F32, 1<<40, n), device(backend.F32, 1<<41, n),
		device(backend.I64, 1<<42, kernels.HeadWords)
	for _, d := range []backend.DType{backend.F32, backend.F16, backend.BF16} {
		out := kernels.Message{Head: head, Values: device(d, 1<<43, n),
			Index: device(backend.I32, 1<<44, n)}
		for _, top := range []int{0, max(n/100, 1)} {
			s := &kernels.Selection{Out: out, X: x, Residual: residual, K: top}
			s.Scratch = device(backend.U8, 1<<45, k.SelectScratch(s))
			errs = append(errs, k.Select(s))
		}
		m := kernels.Messages{Ranks: 2, NBytes: 24 + 8*n, DType: d, Values: 24, Index: 24 +
			8*((n+1)/2), Capacity: n / 2}
		m.All = device(backend.U8, 1<<43, 2*m.NBytes)
		errs = append(errs, k.Combine(x, m, 2), k.Combine(device(backend.F64, 1<<41, n), m, 1))
	}
	errs = append(errs, k.NotFinite(head.Slice(0, 1), x), k.NotFinite(head.Slice(0, 1),
		device(backend.F64, 1<<41, n)))
	return errors.Join(errs...)
}

func TestSelectionsAreChecked(t *testing.T) {
	k := New(newValidator(t))
	x, short, host := device(backend.F32, 1<<40, 100), device(backend.F32, 1<<41, 99),
		backend.Of(make([]float32, 100))
	out := kernels.Message{Head: device(backend.I64, 1<<42, kernels.HeadWords),
		Values: device(backend.F16, 1<<43, 10), Index: device(backend.I32, 1<<44, 10)}
	room := device(backend.U8, 1<<45, 1<<20)
	for name, s := range map[string]kernels.Selection{
		"residual":      {Out: out, X: x, Residual: short, Scratch: room},
		"overlap":       {Out: out, X: x, Residual: x, Scratch: room},
		"host":          {Out: out, X: host, Scratch: room},
		"too many":      {Out: out, X: x, K: 101, Scratch: room},
		"short scratch": {Out: out, X: x, K: 10, Scratch: room.Slice(0, 64)},
		"odd scratch":   {Out: out, X: x, Scratch: room.Slice(8, room.Len())},
		"head": {Out: kernels.Message{Head: out.Head.Slice(0, 2), Values: out.Values,
			Index: out.Index}, X: x, Scratch: room},
		"index": {Out: kernels.Message{Head: out.Head, Values: out.Values,
			Index: out.Index.Slice(0, 9)}, X: x, Scratch: room},
	} {
		require.Fails(t, name, k.Select(&s), backend.ErrArgument)
	}
	m := kernels.Messages{All: device(backend.U8, 1<<43, 64), Ranks: 2, NBytes: 64,
		DType: backend.F32, Values: 24, Index: 40, Capacity: 3}
	require.Fails(t, "messages that do not fit", k.Combine(x, m, 1), backend.ErrArgument)
}

// Candidates are enough with any sample, but hardly ever more than there is room for.
func TestSamplesAreLargeEnough(t *testing.T) {
	for _, c := range []struct{ n, k int }{{1 << 25, 1 << 25 / 100}, {1 << 25, 1 << 25 / 20},
		{1 << 25, 3000}, {1 << 20, 1 << 20 / 100}} {
		rank, room := sampled(c.n, c.k, min(samples, c.n/fewest))
		require.Check(t, rank != 0 && room >= c.k && room <= 2*c.k+c.n/100,
			"top %d of %d: rank %d of the sample, room for %d candidates", c.k, c.n, rank, room)
	}
	if rank, room := sampled(1<<20, 1<<19, samples); rank != 0 || room != 0 {
		t.Errorf("half of the elements: rank %d, room %d, want no candidates", rank, room)
	}
}
