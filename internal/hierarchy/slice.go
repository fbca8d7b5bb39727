package hierarchy

import (
	"slices"

	"github.com/euryale-ml/euryale/backend"
)

// An operand is cut into slices. A slice is a run of D shards, one for each device, and a shard is
// M pieces, one for each machine: rank (m, d) adds piece m of shard d. With s the slice of a rank's
// operand and P its partial sums, rank (m, d) does
//
//	Reduce    P     = sum over d' of shard d of s of rank (m, d')   M pieces
//	Exchange  C[m'] = piece m of P of rank (m', d)                  M pieces
//	Add       y     = C[0] + C[1] + ... + C[M-1]                    1 piece
//	Broadcast shard = y of (0, d), y of (1, d), ...                 M pieces
//	Gather    slice = shard of (m, 0), shard of (m, 1), ...
//
// All-reduce does all of it, in its destination; reduce-scatter ends with y; all-gather begins with
// Broadcast. In a broadcast, root's machine begins with Gather, which there brings the whole slice
// to every device, and then Broadcast sends the shards to the other machines. If C needs memory,
// there is room in the next device's shard, which Reduce was the last to read.

// launch starts the phases of every slice. c.mu is held.
func (k *call) launch(ready backend.Event) error {
	k.ready = ready
	share := max(k.dst.Len(), k.src.Len()) / k.c.plan.Layout.shares()
	// First, so that ranks which call something else are found before the phases
	// wait for them.
	if err := k.remainder(); err != nil {
		return err
	}
	for i := range k.cut.Slices {
		k.at, k.work = slicePhase{phase: phases, slice: i, slices: k.cut.Slices}, nil
		if err := k.slice(i*k.cut.piece, min((i+1)*k.cut.piece, share)); err != nil {
			return err
		}
		if err := k.finish(); err != nil {
			return err
		}
	}
	var err error
	k.end, err = k.c.queues[unpackPhase].Record()
	return err
}

// finish ends a slice, on the stream where the call ends. The last slice stands for the
// others, which went through its last stream before it; but queues of the host look at each
// for its error, see admission.
func (k *call) finish() error {
	if k.at.slice+1 < k.at.slices && !k.c.onHost {
		return nil
	}
	return k.goOn(unpackPhase)
}

// slice starts the phases of the elements lo to hi of the ranks' shares.
func (k *call) slice(lo, hi int) error {
	switch k.what.Kind {
	case backend.AllReduce:
		return k.allReduce(lo, hi)
	case backend.ReduceScatter:
		return k.reduceScatter(lo, hi)
	case backend.Broadcast:
		return k.fromRoot(lo, hi)
	case backend.AllToAll:
		return k.allToAll(lo, hi)
	default:
		return k.allGather(lo, hi)
	}
}

// allReduce does all phases in the destination. Shares are not chunks of a caller here, so a slice
// is a run of the operand.
func (k *call) allReduce(lo, hi int) error {
	n := k.c.plan.Layout.shares()
	a, err := k.takeScratch(k.dst.Slice(lo*n, hi*n), reducePhase)
	if err != nil {
		return err
	}
	src := k.src.Slice(lo*n, hi*n)
	if !a.railed() {
		return k.script(
			func() error { return k.reduceTo(a, src) },
			func() error { return k.gatherShards(a) },
		)
	}
	own := a.own()
	return k.script(
		func() error { return k.reduceTo(a, src) },
		func() error { return k.exchangeAdd(a, own) },
		func() error { return k.broadcast(a, own) },
		func() error { return k.gatherShards(a) },
		func() error { return k.give(a) },
	)
}

// fromRoot brings root's operand to everyone.
func (k *call) fromRoot(lo, hi int) error {
	n := k.c.plan.Layout.shares()
	a := k.in(k.dst.Slice(lo*n, hi*n))
	root := k.c.plan.Layout.at[k.what.Root]
	src := backend.Buffer{} // of root
	if k.c.Rank() == k.what.Root {
		src = k.src.Slice(lo*n, hi*n)
	}
	inside := func() error {
		if a.locals == 1 {
			return nil
		}
		return k.collective(gatherPhase, backend.Collective{Kind: backend.Broadcast,
			Root: root.device}, a.whole, src)
	}
	rail := func() error {
		if !a.railed() {
			return nil
		}
		from := backend.Buffer{}
		switch {
		case a.machine == root.machine && a.locals == 1:
			from = src
		case a.machine == root.machine:
			from = a.mine()
		}
		return k.collective(broadcastPhase, backend.Collective{Kind: backend.Broadcast,
			Root: root.machine}, a.mine(), from)
	}
	if a.machine == root.machine {
		return k.script(inside, rail)
	}
	return k.script(rail, func() error { return k.gatherShards(a) })
}

// reduceScatter ends with the sum of the chunk.
func (k *call) reduceScatter(lo, hi int) error {
	a, err := k.takeScratch(backend.Buffer{}, packPhase) // of a slot
	if err != nil {
		return err
	}
	a.resize(k.dtype, (hi-lo)*k.c.Size())
	return k.script(
		func() error { return k.pack(a, lo, hi) },
		func() error { return k.reduceTo(a, a.whole) },
		func() error { return k.exchangeAdd(a, k.dst.Slice(lo, hi)) },
		func() error { return k.give(a) },
	)
}

// allToAll hands the chunks for each place to the device there, which sends each machine its own in
// one message.
func (k *call) allToAll(lo, hi int) error {
	a, err := k.takeScratch(backend.Buffer{}, packPhase) // of a slot
	if err != nil {
		return err
	}
	n, l := hi-lo, k.c.plan.Layout
	a.resize(k.dtype, n*k.c.Size())
	other := a.second()
	what := backend.Collective{Kind: backend.AllToAll}
	return k.script(
		func() error { return k.pack(a, lo, hi) },
		func() error { return k.collective(reducePhase, what, other, a.whole) },
		func() error { // from the order of devices to that of machines
			return k.kernels(addPhase, func(q backend.Arithmetic) error {
				for m := range a.M {
					if err := q.Copy2D(a.whole.Slice(m*a.D*n, (m+1)*a.D*n), n,
						other.Slice(m*n, other.Len()), a.M*n, n, a.D); err != nil {
						return err
					}
				}
				return nil
			})
		},
		func() error { return k.collective(exchangePhase, what, other, a.whole) },
		func() error {
			return k.rows(unpackPhase, l.grouped, func(q backend.Arithmetic, r run, c int) error {
				return q.Copy2D(k.dst.Slice(r.first*c+lo, k.dst.Len()), r.stride*c,
					a.rowsOf(other, r), n, n, r.rows)
			})
		},
		func() error { return k.give(a) },
	)
}

// pack puts the source's chunks in the order of devices.
func (k *call) pack(a *scratch, lo, hi int) error {
	return k.rows(packPhase, k.c.plan.Layout.runs, func(q backend.Arithmetic, r run, c int) error {
		return q.Copy2D(a.rowsOf(a.whole, r), hi-lo, k.src.Slice(r.first*c+lo, k.src.Len()),
			r.stride*c, hi-lo, r.rows)
	})
}

// allGather begins with the source on the rail.
func (k *call) allGather(lo, hi int) error {
	inPlace := k.c.plan.Layout.minor() && hi-lo == k.src.Len()
	whole := backend.Buffer{}
	if inPlace {
		whole = k.dst
	}
	a, err := k.takeScratch(whole, broadcastPhase)
	if err != nil {
		return err
	}
	if !inPlace {
		a.resize(k.dtype, (hi-lo)*k.c.Size())
	}
	return k.script(
		func() error {
			return k.collective(broadcastPhase, backend.Collective{Kind: backend.AllGather},
				a.shard(a.device), k.src.Slice(lo, hi))
		},
		func() error { return k.gatherShards(a) },
		func() error {
			if inPlace {
				return nil
			}
			return k.rows(unpackPhase, k.c.plan.Layout.runs, func(q backend.Arithmetic, r run,
				c int) error {
				return q.Copy2D(k.dst.Slice(r.first*c+lo, k.dst.Len()), r.stride*c,
					a.rowsOf(a.whole, r), hi-lo, hi-lo, r.rows)
			})
		},
		func() error { return k.give(a) },
	)
}

// script runs the steps of a slice up to the first that fails.
func (k *call) script(steps ...func() error) error {
	for _, do := range steps {
		if err := do(); err != nil {
			return err
		}
	}
	return nil
}

// reduceTo leaves the partial sums of src in this device's shard. If a rank has its machine for
// itself, they are src itself.
func (k *call) reduceTo(a *scratch, src backend.Buffer) error {
	a.partial = src
	if a.locals == 1 {
		return nil
	}
	op := k.what.Op
	if op == backend.Avg && !k.c.plan.averages(k.what, k.dtype) {
		op = backend.Sum
	}
	a.partial = a.mine()
	return k.collective(reducePhase, backend.Collective{Kind: backend.ReduceScatter, Op: op,
		Splits: a.splits()}, a.partial, src)
}

// exchangeAdd leaves the sum of this rank's piece in own.
func (k *call) exchangeAdd(a *scratch, own backend.Buffer) error {
	came := a.staging()
	if err := k.exchange(a, came); err != nil {
		return err
	}
	return k.kernels(addPhase, func(q backend.Arithmetic) error {
		if half, ok := a.half(k.exchangeType()); ok {
			if err := q.Cast(came, half.came); err != nil {
				return err
			}
		}
		op := k.what.Op
		divide := op == backend.Avg && !k.c.plan.averages(k.what, k.dtype)
		if divide {
			op = backend.Sum
		}
		if err := reduceAll(q, op, own, a.pieces(came)); err != nil || !divide {
			return err
		}
		return q.Divide(own, own, k.c.Size())
	})
}

// maxTerms is how many operands the kernels of every device can add at once.
const maxTerms = 256 // cuda.MaxSources

// reduceAll combines any number of operands, in their order. Averages are of maxTerms at most.
func reduceAll(q backend.Arithmetic, op backend.ReduceOp, dst backend.Buffer,
	all []backend.Buffer) error {
	n := min(len(all), maxTerms)
	if err := q.Reduce(op, dst, all[:n]...); err != nil {
		return err
	}
	for more := range slices.Chunk(all[n:], maxTerms-1) {
		if err := q.Reduce(op, dst, append([]backend.Buffer{dst}, more...)...); err != nil {
			return err
		}
	}
	return nil
}

// exchange sends each machine its piece of the partial sums.
func (k *call) exchange(a *scratch, came backend.Buffer) error {
	what := backend.Collective{Kind: backend.AllToAll}
	half, ok := a.half(k.exchangeType())
	if !ok {
		return k.collective(exchangePhase, what, came, a.partial)
	}
	err := k.kernels(exchangePhase, func(q backend.Arithmetic) error {
		return q.Cast(half.goes, a.partial)
	})
	if err != nil {
		return err
	}
	return k.collective(exchangePhase, what, half.came, half.goes)
}

// broadcast brings the sums of the rail's pieces together in this device's shard.
func (k *call) broadcast(a *scratch, own backend.Buffer) error {
	what := backend.Collective{Kind: backend.AllGather}
	half, ok := a.half(k.exchangeType())
	if !ok {
		return k.collective(broadcastPhase, what, a.shard(a.device), own)
	}
	mine := a.pieces(half.goes)[a.machine]
	err := k.kernels(broadcastPhase, func(q backend.Arithmetic) error { return q.Cast(mine, own) })
	if err != nil {
		return err
	}
	if err := k.collective(broadcastPhase, what, half.goes, mine); err != nil {
		return err
	}
	// The own piece too: every rank gets what was rounded.
	return k.kernels(gatherPhase, func(q backend.Arithmetic) error {
		return q.Cast(a.shard(a.device), half.goes)
	})
}

// gatherShards brings the machine's shards together.
func (k *call) gatherShards(a *scratch) error {
	if a.locals == 1 {
		return nil
	}
	return k.collective(gatherPhase, backend.Collective{Kind: backend.AllGather,
		Splits: a.splits()}, a.whole, a.mine())
}

// exchangeType is what values are rounded to between machines, 0 for nothing.
func (k *call) exchangeType() backend.DType { return k.c.plan.exchangeType(k.what, k.dtype) }

// remainder runs flat what the ranks cannot divide evenly. While calls are compared, an empty call
// runs flat if nothing is left, to compare the call.
func (k *call) remainder() error {
	n := 0
	what := backend.Collective{Kind: backend.AllReduce}
	dst, src := backend.Host(k.dtype, nil, 0), backend.Host(k.dtype, nil, 0)
	if k.what.Kind == backend.AllReduce || k.what.Kind == backend.Broadcast {
		n = k.dst.Len() % k.c.plan.Layout.shares()
	}
	if n > 0 {
		what.Kind, what.Op, what.Root = k.what.Kind, k.what.Op, k.what.Root
		dst = k.dst.Slice(k.dst.Len()-n, k.dst.Len())
		if k.src.Len() > 0 {
			src = k.src.Slice(k.src.Len()-n, k.src.Len())
		}
	}
	if n == 0 && !k.c.verify.Load() {
		return nil
	}
	what.Origin, what.Exact, what.Original.Hash = k.what.Origin, k.what.Exact, fingerprint(k.header)
	k.at, k.work = slicePhase{phase: phases}, nil
	if err := k.collective(remainderPhase, what, dst, src); err != nil {
		return err
	}
	return k.goOn(unpackPhase)
}

// collective starts a collective of a phase.
func (k *call) collective(p phase, what backend.Collective, dst, src backend.Buffer) error {
	if err := k.goOn(p); err != nil {
		return err
	}
	c := k.c
	err := k.observed(max(dst.NBytes(), src.NBytes()), func() (err error) {
		k.work, err = c.parts[p].Start(c.queues[p], what, dst, src)
		return err
	})
	if err != nil {
		return err
	}
	k.works = append(k.works, begun{k.at, k.work})
	c.count(p, src)
	return nil
}

// kernels starts kernels of a phase.
func (k *call) kernels(p phase, f func(backend.Arithmetic) error) error {
	if err := k.goOn(p); err != nil {
		return err
	}
	q := k.c.queues[p]
	return k.observed(0, func() error { return f(q) })
}

// observed tells the hooks about what start starts on the stream of the slice's phase.
func (k *call) observed(nbytes int, start func() error) error {
	hooks := k.c.hooks
	if hooks == nil {
		return start()
	}
	id := hooks.Start(&backend.Call{Comm: k.c, Queue: k.c.queues[k.at.phase], Header: k.header,
		Bytes: nbytes, Part: k.at.String()})
	err := start()
	hooks.End(id, err)
	return err
}

// goOn continues the slice on the stream of a phase.
func (k *call) goOn(p phase) error {
	before, q := k.at.phase, k.c.queues[p]
	if before == p {
		return nil
	}
	at, work := k.at, k.work
	k.at.phase, k.work = p, nil
	switch {
	case work != nil:
		return k.c.after(q, k, at, work)
	case before == phases && at.slice > 0: // it comes behind the first slice on the same stream
		return nil
	case before == phases:
		return q.Wait(k.ready)
	case k.c.queues[before] == q:
		return nil
	}
	done, err := k.c.queues[before].Record()
	if err != nil {
		return err
	}
	return q.Wait(done)
}

// rows copies between an operand of one chunk of c elements for each rank and an
// scratch, run by run.
func (k *call) rows(p phase, runs []run, copyRun func(q backend.Arithmetic, r run,
	c int) error) error {
	c := max(k.dst.Len(), k.src.Len()) / k.c.Size()
	return k.kernels(p, func(q backend.Arithmetic) error {
		for _, r := range runs {
			if err := copyRun(q, r, c); err != nil {
				return err
			}
		}
		return nil
	})
}
