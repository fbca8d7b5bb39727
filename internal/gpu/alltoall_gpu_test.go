//go:build gpu

package gpu

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/bench"
	"github.com/euryale-ml/euryale/internal/cuda"
	"github.com/euryale-ml/euryale/internal/kernels"
	"github.com/euryale-ml/euryale/internal/testing/fakedevice"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/internal/testing/testranks"
)

// redistribution is an all-to-all of a tensor that is distributed along one axis, and then along
// another one.
type redistribution struct {
	what   backend.Collective
	d      backend.DType
	xs, ys [][]byte // by rank
}

// redistribute returns that of tensors of a shape. cut are the lengths that ranks get of the axis
// scatter, join those that they have of the axis gather.
func redistribute(shape []int, scatter, gather int, cut, join []int) (c backend.Collective) {
	c.Kind, c.Rows = backend.AllToAll, &backend.Rows{}
	before := func(axis, other, n int) int {
		rows := 1
		for a := range axis {
			if a == other {
				rows *= n
			} else {
				rows *= shape[a]
			}
		}
		return max(rows, 1)
	}
	rest := 1
	for a, n := range shape {
		if a != scatter && a != gather {
			rest *= n
		}
	}
	for s := range join {
		c.Rows.Src = append(c.Rows.Src, before(scatter, gather, join[s]))
		c.Rows.Dst = append(c.Rows.Dst, before(gather, scatter, cut[s]))
		for r := range cut {
			c.Splits = append(c.Splits, rest*join[s]*cut[r])
		}
	}
	return c
}

// redistributions are random ones among size ranks: of all pairs of axes of three and four
// dimensions, even and uneven, of runs that are whole units and that are not, of up to about most
// bytes.
func redistributions(size, trials, most int) ([]redistribution, error) {
	random := rand.New(rand.NewPCG(3, 5))
	all := make([]redistribution, trials)
	for i := range all {
		dims := 3 + i%2
		scatter := i / 2 % dims
		gather := (scatter + 1 + i/8%(dims-1)) % dims
		shape := make([]int, dims)
		for a := range shape {
			shape[a] = 1 + random.IntN(6)
		}
		if random.IntN(2) == 0 {
			shape[dims-1] = 8 * (1 + random.IntN(4))
		}
		cut, join := make([]int, size), make([]int, size)
		for r := range size {
			cut[r], join[r] = 1+random.IntN(4), 1+random.IntN(4)
			switch {
			case r > 0 && i%3 == 0:
				cut[r], join[r] = cut[0], join[0]
			case r > 0 && random.IntN(8) == 0:
				cut[r] = 0
			}
		}
		if i%50 == 49 || i == trials-1 { // more than a round of staging
			total := size * slices.Max(cut) * join[0] * 4
			for a, n := range shape {
				if a != scatter && a != gather {
					total *= n
				}
			}
			for r := range size {
				join[r] *= max(1, most/max(total, 1))
			}
		}
		p := redistribution{what: redistribute(shape, scatter, gather, cut, join),
			d: []backend.DType{backend.BF16, backend.F32, backend.F16, backend.I32,
				backend.F64}[i%5]}
		if i%3 == 0 && random.IntN(2) == 0 {
			p.what.Splits = nil // they are even
		}
		if err := p.fill(size, redistribute(shape, scatter, gather, cut, join),
			random); err != nil {
			return nil, err
		}
		all[i] = p
	}
	return all, nil
}

// fill makes the operands, and what must come of them. uneven is the call with its splits.
func (p *redistribution) fill(size int, uneven backend.Collective, random *rand.Rand) error {
	of := func(n int) backend.Buffer { return backend.Of(make([]byte, n*p.d.Size())).As(p.d) }
	packed, joined := make([]backend.Buffer, size), make([]backend.Buffer, size)
	var errs []error
	for s := range size {
		n := 0
		for r := range size {
			n += uneven.Splits[s*size+r]
		}
		x := of(n)
		for i := range x.Bytes() {
			x.Bytes()[i] = byte(random.IntN(256))
		}
		packed[s] = of(n)
		p.xs = append(p.xs, x.Bytes())
		errs = append(errs, fakedevice.Pack(kernels.Host{}, uneven, s, size, 0, packed[s], x))
	}
	for r := range size {
		n := 0
		for s := range size {
			n += uneven.Splits[s*size+r]
		}
		joined[r] = of(n)
		for s := range size {
			n, from, to := uneven.Pair(s, r, size, 0)
			copy(joined[r].As(backend.U8).Slice(to*p.d.Size(), (to+n)*p.d.Size()).Bytes(),
				packed[s].As(backend.U8).Slice(from*p.d.Size(), (from+n)*p.d.Size()).Bytes())
		}
		y := of(n)
		errs = append(errs, fakedevice.Join(kernels.Host{}, uneven, r, size, 0, y, joined[r]))
		p.ys = append(p.ys, y.Bytes())
	}
	return errors.Join(errs...)
}

// permuted compares all-to-alls that permute, and back, with copies on the host: see
// redistributions. Operands have any alignment, in ordinary memory and in that of Alloc; ranks are
// late at random; some calls are in graphs, which are replayed between others.
func permuted(t *testing.T, comms []*Communicator, queues []backend.Queue, trials, most int) {
	all := require.Value(redistributions(len(comms), trials, most))(t)
	each(t, comms, func(c *Communicator) error {
		q, room := queues[c.Rank()], 0
		for r := range comms { // every rank's Alloc is as large
			for _, p := range all {
				room = max(room, len(p.xs[r])+1<<10, len(p.ys[r])+1<<10)
			}
		}
		room = (room + 255) / 256 * 256
		window := testranks.Must(c.Alloc(3 * room))
		plain := testranks.Must(c.Device().Alloc(3 * room))
		late := testranks.Must(newLate(c, q))
		testranks.NoError(assemble(c)) // everyone has its memory
		for trial, p := range all {
			c.plan.Force = byPush
			if trial/4%2 == 1 {
				c.plan.Force = byNCCL // short pieces go in lines then
			}
			own := rand.New(rand.NewPCG(uint64(trial), uint64(c.Rank())))
			part := func(i, nbytes int) backend.Buffer {
				of := []backend.Buffer{plain, window}[own.IntN(2)].Slice(i*room, (i+1)*room).As(p.d)
				lo := own.IntN(3) * own.IntN(17)
				return of.Slice(lo, lo+nbytes/p.d.Size())
			}
			x, y, z := part(0, len(p.xs[c.Rank()])), part(1, len(p.ys[c.Rank()])),
				part(2, len(p.xs[c.Rank()]))
			if err := p.thereAndBack(c, q.(*cuda.Queue), x, y, z, late, own,
				trial%4 == 3); err != nil {
				return fmt.Errorf("trial %d: %v of %v with splits %v in rows %v: %w", trial, p.what,
					p.d, p.what.Splits, *p.what.Rows, err)
			}
		}
		late.free()
		return errors.Join(assemble(c), c.Device().Free(plain), c.Free(window))
	})
	for _, c := range comms {
		if u := c.Usage(); u.Push == 0 {
			t.Errorf("rank %d has not pushed: %+v", c.Rank(), u)
		}
	}
}

// thereAndBack starts a call and its adjoint back to back, or in a graph that is replayed before
// and after them.
func (p *redistribution) thereAndBack(c *Communicator, q *cuda.Queue, x, y, z backend.Buffer,
	late late, own *rand.Rand, graph bool) error {
	back, _, err := p.what.Adjoint(c.Size())
	if err != nil {
		return err
	}
	start := func() error {
		_, err := c.Start(q, p.what, y, x)
		if err == nil {
			_, err = c.Start(q, back, z, y)
		}
		return err
	}
	replay := func() error { return nil }
	if graph {
		g, err := q.Capture(start)
		if err != nil {
			return err
		}
		defer g.Close()
		replay = func() error {
			_, err := g.Launch(q)
			return err
		}
	}
	if err := errors.Join(q.Move(x.As(backend.U8), backend.Of(p.xs[c.Rank()])),
		late.sometimes(own, 4), replay(), q.Zero(z), start(), replay(), replay(),
		drain(context.Background(), q)); err != nil {
		return err
	}
	// Only now: a copy to the host holds pinned memory, which ranks on one device share, while it
	// waits.
	gotY, gotZ := make([]byte, y.NBytes()), make([]byte, z.NBytes())
	if err := errors.Join(q.Move(backend.Of(gotY), y.As(backend.U8)),
		q.Move(backend.Of(gotZ), z.As(backend.U8)), drain(context.Background(), q)); err != nil {
		return err
	}
	if !bytes.Equal(gotY, p.ys[c.Rank()]) {
		return errors.New("the result has other bits than the host's")
	}
	if !bytes.Equal(gotZ, p.xs[c.Rank()]) {
		return errors.New("there and back, the operand has other bits")
	}
	return c.Err()
}

func TestPiecesArePermutedOnGPU(t *testing.T) {
	g := needGPUs(t, 2)
	for _, size := range g.sizes() {
		comms := g.group(t, size, forced(byPush))
		permuted(t, comms, defaults(comms), trials(), 40<<20)
	}
}

// BenchmarkAllToAll compares an all-to-all of attention that permutes on its way, [batch, 16384/W,
// 24, 128] of bf16 from a sequence divided among W ranks to heads divided among them, and back,
// with what ops does without: permute, exchange, permute. The exchange is NCCL's where each rank
// has a GPU. Where two ranks share one it is ours, of pieces that lie together: that compares the
// passes over memory, and nothing of the links.
func BenchmarkAllToAll(b *testing.B) {
	g := needGPUs(b, 1)
	for _, size := range []int{2, 4, 8} {
		if size > max(2, len(g.all)) {
			continue
		}
		var comms []*Communicator
		var queues []backend.Queue
		if size <= len(g.all) {
			comms = g.group(b, size, Options{Force: byPush})
			queues = defaults(comms)
		} else {
			comms, queues = g.onShared(b, size, Options{Force: byPush, Link: FullyConnected,
				Blocks: 60})
		}
		for _, batch := range []int{1, 2} {
			for _, back := range []bool{false, true} {
				b.Run(fmt.Sprintf("ranks=%d/batch=%d/back=%v", size, batch, back),
					func(b *testing.B) {
						raceAllToAll(b, comms, queues, batch, back, size > len(g.all))
					})
			}
		}
	}
}

func raceAllToAll(b *testing.B, comms []*Communicator, queues []backend.Queue, batch int, back,
	shared bool) {
	const sequence, heads, width, calls = 16384, 24, 128, 20
	size := len(comms)
	even := func(n int) []int { return slices.Repeat([]int{n}, size) }
	what := redistribute([]int{batch, sequence, heads, width}, 2, 1, even(heads/size),
		even(sequence/size))
	if back {
		what, _, _ = what.Adjoint(size) // it is linear
	}
	what.Splits = nil
	packed := backend.Collective{Kind: backend.AllToAll}
	if shared {
		packed.Rows = &backend.Rows{Src: even(1), Dst: even(1)}
	}
	n := batch * sequence / size * heads * width
	names := []string{"push", "push-to-window", "permute+exchange+permute"}
	times := make([][]time.Duration, len(names))
	each(b, comms, func(c *Communicator) error {
		window := testranks.Must(c.Alloc(2 * n))
		memory := testranks.Must(c.Device().Alloc(4 * 2 * n))
		part := func(i int) backend.Buffer { return memory.As(backend.BF16).Slice(i*n, (i+1)*n) }
		x, y, sent, received := part(0), part(1), part(2), part(3)
		q := queues[c.Rank()].(*cuda.Queue)
		timer := testranks.Must(bench.NewTimer(q))
		start := func(what backend.Collective, dst, src backend.Buffer) error {
			_, err := c.Start(q, what, dst, src)
			return err
		}
		ways := []func() error{
			func() error { return start(what, y, x) },
			func() error { return start(what, window.As(backend.BF16), x) },
			func() error {
				src, dst := x, y
				if rows := what.Rows.Src[0]; rows > 1 {
					src = sent
					if err := q.CopyStrided(sent, x, []int{size, rows, n / size / rows},
						[]int{n / size / rows, n / rows, 1}); err != nil {
						return err
					}
				}
				if what.Rows.Dst[0] > 1 {
					dst = received
				}
				if err := start(packed, dst, src); err != nil || what.Rows.Dst[0] == 1 {
					return err
				}
				rows := what.Rows.Dst[0]
				return q.CopyStrided(y, received, []int{rows, size, n / size / rows},
					[]int{n / size / rows, n / size, 1})
			},
		}
		testranks.NoError(assemble(c))
		for range b.N {
			for i, way := range ways {
				testranks.NoError(errors.Join(way(), drain(context.Background(), q), assemble(c),
					way(), timer.Start()))
				for range calls {
					testranks.NoError(way())
				}
				testranks.NoError(errors.Join(timer.Stop(), drain(context.Background(), q)))
				took := testranks.Must(timer.Elapsed())
				if c.Rank() == 0 {
					times[i] = append(times[i], took/calls)
				}
			}
		}
		return errors.Join(timer.Close(), assemble(c), c.Device().Free(memory), c.Free(window))
	})
	for i, name := range names {
		slices.Sort(times[i])
		b.ReportMetric(float64(times[i][len(times[i])/2].Nanoseconds())/1e3, name+"-us")
	}
	b.ReportMetric(0, "ns/op")
}
