package plan

import (
	"slices"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/vm/ir"
	"github.com/euryale-ml/euryale/internal/vm/lower"
)

// shards are where the shards of a plan lie.
type shards struct {
	memory     []bucketMemory // by bucket
	full       map[int]Ref    // by update: the full gradient
	updated    int            // buckets whose updates are
	allGathers []allGather    // in flight, of variables that were updated
	reads      map[int]int    // by input: after so many groups nothing reads it any more
	parameters parameters
}

// parameters are the variables that ranks have shards of alone, as a plan reads them: a bucket is
// unsharded before the first step that reads one of its variables, and later once more if other
// buckets were read meanwhile (FSDP: Zhao et al., arXiv:2304.11277, and stage 3 of ZeRO).
type parameters struct {
	values     map[int]ir.ID // the variables that steps read, by update
	persistent []bool        // by bucket: it is not resharded
	needs      [][]int       // by group: buckets that it reads
	unsharded  []int         // buckets, the one used last behind the others
	prefetched []allGather   // in flight
}

// allGather is one of the variables of a bucket, and the memory that it takes.
type allGather struct {
	bucket int
	memory bucketMemory
	args   []Ref
}

// bucketMemory is the memory of a bucket, as buffers: of the gradients, of this rank's chunk, and
// of the variables that all ranks get. Placed ones are apart, so that each is in use for a short
// time; others are one.
type bucketMemory struct{ full, chunk, unsharded int }

const (
	// unshardedBuckets is how many buckets of variables stay unsharded: the last that were read.
	unshardedBuckets = 2
	// prefetchedBuckets is how many buckets are gathered before a group reads them. A gather that
	// begins while one is in flight follows it on its queue of a graph. One that begins alone
	// starts a queue, on which each of its copies came 50 us later on two H200: a GPT of 1.3 B then
	// took 1.19 of the time.
	prefetchedBuckets = 2
	// persistentShare is how many times smaller than the largest a bucket is that is persistent:
	// one of biases, say, which all layers read.
	persistentShare = 16
)

// divides reports whether ranks divide the bucket of some updates.
func (l *layouter) divides(bucket []int) bool {
	return len(bucket) > 0 && l.updates[bucket[0]].Shard.Divides()
}

// shareBuckets makes the memory of buckets that ranks divide.
func (l *layouter) shareBuckets() {
	s := &l.shards
	s.full = map[int]Ref{}
	s.memory = make([]bucketMemory, len(l.buckets))
	for i, bucket := range l.buckets {
		if !l.divides(bucket) {
			continue
		}
		of := l.updates[bucket[0]].Shard
		if of.Placed {
			d := l.bucketDType(i + 1)
			s.memory[i] = bucketMemory{l.chunks(i+1, Arena, of.Ranks, "gradients of a bucket", d),
				l.chunks(i+1, Arena, 1, "the shard of a bucket", d),
				l.chunks(i+1, Arena, of.Ranks, "variables of a bucket", d)}
			continue
		}
		full := l.chunks(i+1, FullBucket, of.Ranks, "bucket", l.bucketDType(i+1))
		s.memory[i] = bucketMemory{full, full, full}
	}
}

// bucketDType returns the dtype of the gradients of a bucket.
func (l *layouter) bucketDType(bucket int) backend.DType {
	return l.program.Values[l.gradients[l.buckets[bucket-1][0]]].DType
}

// chunks makes memory of so many chunks of a bucket.
func (l *layouter) chunks(bucket int, kind Kind, chunks int, what string, d backend.DType) int {
	first := l.buckets[bucket-1][0]
	return l.buffer(Buffer{Kind: kind, Index: bucket, Name: what},
		ir.Of(chunks*l.updates[first].Shard.Chunk), d, -1).Buffer
}

// place gives a part its place in the memory of a bucket.
func (in bucketMemory) place(b *Buffer, s *lower.Shard) {
	at := s.First
	switch b.Kind {
	case Gradient:
		b.Within = 1 + in.full
	case OwnShard:
		b.Within = 1 + in.chunk
		if at += s.From; in.chunk != in.unsharded {
			at -= s.Rank * s.Chunk
		}
	case Unsharded:
		b.Within = 1 + in.unsharded
	}
	b.At = at * b.DType.Size()
}

// placeParts gives parts of buffers their places, and those that are not in the arena.
func (p *Plan) placeParts() {
	end := (p.ArenaBytes + Alignment - 1) / Alignment * Alignment
	for i := range p.Buffers {
		switch b := &p.Buffers[i]; {
		case b.Kind == FullBucket:
			b.Offset = end
			end += (b.Bytes + Alignment - 1) / Alignment * Alignment
		case b.Within > 0: // which comes before it
			b.Offset = p.Buffers[b.Within-1].Offset + b.At
		}
	}
}

// bucketOf returns the memory of an exchange: the full bucket, and this rank's chunk unless that is
// a part of it.
func (l *layouter) bucketOf(full, chunk int) (all []Ref) {
	for _, buffer := range slices.Compact([]int{full, chunk}) {
		b := l.plan.Buffers[buffer]
		n := ir.Of(b.Bytes / b.DType.Size())
		all = append(all, Ref{Buffer: buffer, Shape: n, Strides: n.Strides(), DType: b.DType})
	}
	return all
}

// part returns a part of the memory of a bucket that the next step writes.
func (l *layouter) part(in bucketMemory, b Buffer, shape ir.Dims, d backend.DType) Ref {
	b.DType = d
	in.place(&b, l.updates[b.Index].Shard)
	return l.buffer(b, shape, d, len(l.plan.Steps))
}

// findReads finds until when variables are read.
func (l *layouter) findReads(all []*group) {
	s := &l.shards
	if s.reads = map[int]int{}; len(l.buckets) == 0 {
		return
	}
	read := func(id ir.ID, until int) {
		if update, ok := l.sharded(id); ok {
			s.reads[l.updates[update].Input] = max(s.reads[l.updates[update].Input], until)
			return
		}
		for ir.View(l.program.Values[id].Op) {
			id = l.program.Values[id].Args[0]
		}
		if in, ok := l.program.Values[id].Op.(ir.Input); ok {
			s.reads[in.Index] = max(s.reads[in.Index], until)
		}
	}
	for i, g := range all {
		s.parameters.needs = append(s.parameters.needs, nil)
		for _, m := range g.members {
			for _, a := range l.program.Values[m].Args {
				read(a, i+1)
				if update, ok := l.sharded(a); ok {
					s.parameters.needs[i] = append(s.parameters.needs[i], l.updates[update].Bucket)
				}
			}
		}
	}
	for _, r := range l.run.Results {
		read(r, len(all)+1)
	}
}

// updateShards appends the updates of buckets behind which another one has left, and the begin of
// their all-gathers, so that these run beside what comes next. Variables get their values in the
// end, unless the memory of the bucket is to be free: then once nothing reads them. Clipping waits
// for all gradients.
func (l *layouter) updateShards(done int) {
	defer l.inRuns(l.training.Accumulation.LastRun())()
	s := &l.shards
	for bucket := s.updated + 1; bucket < len(l.sent); bucket++ {
		of := l.buckets[bucket-1]
		if !l.divides(of) || l.training.Norm != nil {
			return
		}
		placed, alone := l.updates[of[0]].Shard.Placed, l.updates[of[0]].Shard.FullyShard
		if !placed && l.defers(bucket) {
			return
		}
		if (placed || alone) && slices.ContainsFunc(of, func(update int) bool {
			return s.reads[l.updates[update].Input] > done
		}) {
			return
		}
		l.receive(bucket)
		s.updated = bucket
		l.updateBucket(bucket)
		if l.allGatherUpdated(bucket) && placed {
			l.endAllGathers(bucket)
		}
	}
}

// defers reports whether the update of a bucket waits until the last bucket has left: nothing
// else is left to run beside that one's reduce-scatter. An element takes an update about as long as
// a link, so as many elements wait as the last bucket has, such as an embedding's.
func (l *layouter) defers(bucket int) bool {
	buckets := l.buckets
	size := func(bucket int) (n int) {
		for _, update := range buckets[bucket-1] {
			n += l.program.Values[l.gradients[update]].Shape.Size()
		}
		return n
	}
	waiting := 0
	for later := bucket; later < len(buckets); later++ {
		waiting += size(later)
	}
	return len(l.sent) < len(buckets) && waiting <= size(len(buckets))
}

// allGatherUpdated appends the begin of the all-gather of the variables of a bucket, if ranks
// divide it and have all of each.
func (l *layouter) allGatherUpdated(bucket int) bool {
	s, buckets := &l.shards, l.buckets
	if bucket == 0 || !l.divides(buckets[bucket-1]) ||
		l.updates[buckets[bucket-1][0]].Shard.FullyShard {
		return false
	}
	var args []Ref
	for _, update := range buckets[bucket-1] {
		if !l.updates[update].Shard.Empty() {
			args = append(args, l.ref(l.training.Gradients[update]))
		}
	}
	s.allGathers = append(s.allGathers, l.startAllGather(bucket, s.memory[bucket-1], false, args))
	return true
}

// startAllGather appends the begin of an all-gather of the shards of variables.
func (l *layouter) startAllGather(bucket int, in bucketMemory, half bool, args []Ref) allGather {
	op := Send{Bucket: bucket, Kind: backend.AllGather, Half: half}
	return allGather{bucket, in, l.exchange(op, l.bucketOf(in.unsharded, in.chunk), args)}
}

// endAllGather appends the end of an all-gather, given what is to be known of each variable.
func (l *layouter) endAllGather(g allGather,
	of func(update int) (string, ir.Dims, backend.DType)) []Ref {
	var dsts []Ref
	for _, update := range l.buckets[g.bucket-1] {
		name, shape, d := of(update)
		dsts = append(dsts, l.part(g.memory, Buffer{Kind: Unsharded, Index: update, Name: name},
			shape, d))
	}
	defer l.inRuns(l.training.Accumulation.Gathers())()
	return l.exchange(Receive{g.bucket, backend.AllGather}, dsts, g.args)
}

// endAllGathers appends the ends of all-gathers but that of one bucket, and gives variables their
// values.
func (l *layouter) endAllGathers(but int) {
	s := &l.shards
	for len(s.allGathers) > 0 && s.allGathers[0].bucket != but {
		of := s.allGathers[0]
		s.allGathers = s.allGathers[1:]
		unsharded := l.endAllGather(of, func(update int) (string, ir.Dims, backend.DType) {
			full := s.full[update]
			return l.plan.Buffers[full.Buffer].Name, ir.Of(full.Shape.Size()), full.DType
		})
		for k, update := range l.buckets[of.bucket-1] {
			x := unsharded[k]
			l.assign(l.ref(l.training.ByUpdate[update][0].To), x,
				l.program.Values[l.gradients[update]].Name)
		}
	}
}

// sharded returns the update of the variable that a value is, or a view or a cast of, if ranks
// gather it before it is read.
func (l *layouter) sharded(id ir.ID) (update int, ok bool) {
	for ir.View(l.program.Values[id].Op) || l.program.Values[id].Op == (ir.Cast{}) {
		id = l.program.Values[id].Args[0]
	}
	of, ok := l.program.Values[id].Op.(ir.AllGather)
	return of.Index, ok
}

// findParameters finds the variables. One that no step reads is unsharded with its bucket, too.
func (l *layouter) findParameters() {
	p := &l.shards.parameters
	p.values = map[int]ir.ID{}
	for id, v := range l.run.Values {
		if of, ok := v.Op.(ir.AllGather); ok {
			p.values[of.Index] = ir.ID(id)
		}
	}
	if len(p.values) == 0 {
		return
	}
	bytes := make([]int, len(l.buckets))
	for i, bucket := range l.buckets {
		if of := l.updates[bucket[0]].Shard; of.FullySharded() {
			bytes[i] = of.Chunk * of.Ranks * of.Unsharded(l.bucketDType(i+1)).Size()
		}
	}
	for i, n := range bytes {
		p.persistent = append(p.persistent, n*persistentShare <= slices.Max(bytes) ||
			l.updates[l.buckets[i][0]].Shard.Persistent)
	}
}

// unshardGroup unshards what a group reads, and prefetches what comes next, so that this runs
// beside the group. It reshards buckets that were not read lately.
func (l *layouter) unshardGroup(group int) {
	p := &l.shards.parameters
	if len(p.values) == 0 {
		return
	}
	if len(p.prefetched) == 0 {
		l.prefetch(group)
	}
	for _, bucket := range p.needs[group] {
		l.unshard(bucket)
		at := slices.Index(p.unsharded, bucket)
		p.unsharded = append(slices.Delete(p.unsharded, at, at+1), bucket)
	}
	passing := slices.DeleteFunc(slices.Clone(p.unsharded), func(bucket int) bool {
		return p.persistent[bucket-1]
	})
	for len(passing) > unshardedBuckets && !slices.Contains(p.needs[group], passing[0]) {
		l.reshard(passing[0])
		passing = passing[1:]
	}
	l.prefetch(group + 1)
}

// prefetch begins to gather what groups from one on read.
func (l *layouter) prefetch(group int) {
	p := &l.shards.parameters
	for _, needs := range p.needs[group:] {
		for _, bucket := range needs {
			if len(p.prefetched) >= prefetchedBuckets {
				return
			}
			if !slices.Contains(p.unsharded, bucket) {
				l.allGatherParameters(bucket)
			}
		}
	}
}

// unshardValue makes sure that a variable of which ranks have shards is unsharded, or its cast is
// computed.
func (l *layouter) unshardValue(id ir.ID, update int) {
	if l.program.Values[id].Op == (ir.Cast{}) {
		l.cast(id)
		return
	}
	l.unshard(l.updates[update].Bucket)
}

// unshard makes sure that the variables of a bucket are there.
func (l *layouter) unshard(bucket int) {
	p := &l.shards.parameters
	if slices.Contains(p.unsharded, bucket) {
		return
	}
	l.allGatherParameters(bucket)
	i := p.inFlight(bucket)
	of := p.prefetched[i]
	p.prefetched = slices.Delete(p.prefetched, i, i+1)
	unsharded := l.endAllGather(of, func(update int) (name string, shape ir.Dims, d backend.DType) {
		v := l.program.Values[l.gradients[update]] // is like the variable
		d = l.updates[update].Shard.Unsharded(v.DType)
		if id, read := p.values[update]; read {
			v = l.program.Values[id]
			name = v.Name
		}
		return name, v.Shape, d
	})
	for k, update := range l.buckets[bucket-1] {
		if id, read := p.values[update]; read {
			l.setRef(id, unsharded[k])
		}
	}
	p.unsharded = append(p.unsharded, bucket)
}

// reshard makes the next step that reads a bucket of variables unshard it once more.
func (l *layouter) reshard(bucket int) {
	p := &l.shards.parameters
	for id := range l.run.Values {
		update, ok := l.sharded(ir.ID(id))
		if ok && l.updates[update].Bucket == bucket {
			l.placed[id] = false
		}
	}
	p.unsharded = slices.DeleteFunc(p.unsharded, func(b int) bool { return b == bucket })
}

// inFlight returns the place of a bucket among the gathers in flight, -1 if it is not there.
func (p *parameters) inFlight(bucket int) int {
	return slices.IndexFunc(p.prefetched, func(g allGather) bool { return g.bucket == bucket })
}

// allGatherParameters appends the begin of the all-gather of a bucket of variables, unless it is in
// flight.
func (l *layouter) allGatherParameters(bucket int) {
	s := &l.shards
	if s.parameters.inFlight(bucket) >= 0 {
		return
	}
	of := l.buckets[bucket-1]
	first := l.updates[of[0]].Shard
	dtype := first.Unsharded(l.bucketDType(bucket))
	in := bucketMemory{unsharded: l.chunks(bucket, Arena, first.Ranks, "variables of a bucket",
		dtype), chunk: l.chunks(bucket, Arena, 1, "the shard of a bucket", dtype)}
	var args []Ref
	defer l.inRuns(l.training.Accumulation.Gathers())()
	for _, update := range of {
		u := l.updates[update]
		if u.Shard.Empty() {
			continue
		}
		to := l.part(in, Buffer{Kind: OwnShard, Index: update}, ir.Of(u.Shard.To-u.Shard.From),
			dtype)
		w := l.ref(l.training.ByUpdate[update][0].To)
		b := newLoop(to.Shape, ir.Dims{})
		b.store(b.load(l.plan, w), to)
		l.join(l.plan.Buffers[w.Buffer].Name, "pack", b)
		args = append(args, b.dsts[0])
	}
	s.parameters.prefetched = append(s.parameters.prefetched,
		l.startAllGather(bucket, in, first.Half, args))
}
