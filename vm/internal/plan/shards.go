package plan

import (
	"slices"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/vm/internal/ir"
)

// Shard is what one rank of several updates of a variable, and keeps vectors for: the elements in
// row-major order from number From up to To, which may be none. The ranks divide each bucket. Its
// gradients are reduce-scattered, each rank updates its shard where its gradients come back, and an
// all-gather gives all ranks the whole variables: ZeRO (Rajbhandari et al., arXiv:1910.02054).
//
// So every element has one rank that updates it, from the gradient which an all-reduce would give
// all: the variables have the bits of training without shards.
type Shard struct {
	From, To int
	// The bucket has Ranks chunks of Chunk elements, of which this rank has number Rank. The
	// variable's are those from number First on.
	Chunk, Rank, Ranks, First int
	// Placed says that the bucket is in the arena while it is in use, and not in memory of its own:
	// gradients until they are scattered, variables while they are gathered. Not with several runs.
	Placed bool
	// Alone says that the rank has these elements of the variable alone. The ranks gather a bucket
	// of variables before they are read, in the arena, and updates write the shards.
	Alone bool
	// Half says that a bucket of variables that ranks have alone is gathered in BF16, which each
	// rank makes of its shard: nothing else reads these variables ([lower.Halved]).
	Half bool
	// Stays says that such a bucket is gathered once in a run, and not again when others were read.
	Stays bool
}

// gathers returns the dtype in which a bucket of variables of a dtype is gathered.
func (s *Shard) gathers(d backend.DType) backend.DType {
	if s != nil && s.Half {
		return backend.BF16
	}
	return d
}

// alone reports whether a rank has a part of a variable, and gathers it.
func (s *Shard) alone() bool { return s != nil && s.Alone }

// empty reports whether other ranks update all of a variable.
func (s *Shard) empty() bool { return s != nil && s.From == s.To }

// of returns the elements of a variable of n that a rank updates.
func (s *Shard) of(n int) (from, to int) {
	at := func(rank int) int { return min(max(rank*s.Chunk-s.First, 0), n) }
	return at(s.Rank), at(s.Rank + 1)
}

// shards are where the shards of a plan lie.
type shards struct {
	updates  []Update
	memory   []room      // by bucket
	slots    map[int]Ref // by update: the whole gradient
	mine     map[int]Ref // by update: this rank's shard of the gradient, then of the variable
	received int         // buckets whose shards are there
	updated  int         // buckets whose updates are
	leaving  []leaving   // buckets that are gathered
	reads    map[int]int // by input: the number of groups after which nothing reads it any more
	lent     lent
}

// leaving is a bucket that is gathered, and the memory that this takes.
type leaving struct {
	bucket int
	taken  []Ref
}

// room is the memory of a bucket, as buffers: of the gradients, of this rank's chunk, and of
// the variables that all ranks get. Placed ones are apart, so that each is in use for a short time;
// others are one.
type room struct{ scattered, chunk, gathered int }

// divides reports whether ranks divide the bucket of some updates.
func (s *shards) divides(bucket []int) bool {
	return len(bucket) > 0 && s.updates[bucket[0]].Shard != nil
}

// whole returns where all of the gradient of an update is, of which dw is what the update reads.
func (s *shards) whole(update int, dw Ref) Ref {
	if r, ok := s.slots[update]; ok {
		return r
	}
	return dw
}

// shareBuckets makes the memory of buckets that ranks divide.
func (l *layouter) shareBuckets() {
	s := &l.bucketing.shards
	s.slots, s.mine = map[int]Ref{}, map[int]Ref{}
	s.memory = make([]room, len(l.bucketing.buckets))
	for i, bucket := range l.bucketing.buckets {
		if !s.divides(bucket) {
			continue
		}
		of := s.updates[bucket[0]].Shard
		if of.Placed {
			d := l.bucketDType(i + 1)
			s.memory[i] = room{l.roomOf(i+1, Arena, of.Ranks, "gradients of a bucket", d),
				l.roomOf(i+1, Arena, 1, "the shard of a bucket", d),
				l.roomOf(i+1, Arena, of.Ranks, "variables of a bucket", d)}
			continue
		}
		whole := l.roomOf(i+1, Whole, of.Ranks, "bucket", l.bucketDType(i+1))
		s.memory[i] = room{whole, whole, whole}
	}
}

// bucketDType returns the dtype of the gradients of a bucket.
func (l *layouter) bucketDType(bucket int) backend.DType {
	return l.program.Values[l.bucketing.gradients[l.bucketing.buckets[bucket-1][0]]].DType
}

// roomOf makes memory of so many chunks of a bucket.
func (l *layouter) roomOf(bucket int, kind Kind, chunks int, what string, d backend.DType) int {
	first := l.bucketing.buckets[bucket-1][0]
	return l.buffer(Buffer{Kind: kind, Index: bucket, Name: what},
		ir.Of(chunks*l.bucketing.shards.updates[first].Shard.Chunk), d, -1).Buffer
}

// within gives what belongs to an update its part of the memory of the bucket, if ranks divide it.
func (l *layouter) within(b *Buffer) {
	u := l.bucketing.shards.updates[b.Index]
	if u.Shard == nil || b.Within > 0 {
		return
	}
	l.bucketing.shards.memory[u.Bucket-1].place(b, u.Shard)
}

// place gives a part its place in the memory of a bucket.
func (in room) place(b *Buffer, s *Shard) {
	at := s.First
	switch b.Kind {
	case Slot:
		b.Within = 1 + in.scattered
	case Scattered:
		b.Within = 1 + in.chunk
		if at += s.From; in.chunk != in.gathered {
			at -= s.Rank * s.Chunk
		}
	case Gathered:
		b.Within = 1 + in.gathered
	}
	b.At = at * b.DType.Size()
}

// placeParts gives parts of buffers their places, and those that are not in the arena.
func (p *Plan) placeParts() {
	end := (p.ArenaBytes + Alignment - 1) / Alignment * Alignment
	for i := range p.Buffers {
		switch b := &p.Buffers[i]; {
		case b.Kind == Whole:
			b.Offset = end
			end += (b.Bytes + Alignment - 1) / Alignment * Alignment
		case b.Within > 0: // which comes before it
			b.Offset = p.Buffers[b.Within-1].Offset + b.At
		}
	}
}

// scatter appends the begin of a reduce-scatter. From then on the memory of the gradients is the
// exchange's, which the step writes.
func (l *layouter) scatter(bucket int, slots []Ref) []Ref {
	s := &l.bucketing.shards
	for k, update := range l.bucketing.buckets[bucket-1] {
		s.slots[update] = slots[k]
	}
	if s.updates[l.bucketing.buckets[bucket-1][0]].Shard.Placed && bucket > 1 {
		defer l.receiveShard(bucket - 1) // so that its memory is free
	}
	in := s.memory[bucket-1]
	return l.exchange(Send{Bucket: bucket, Kind: backend.ReduceScatter}, slots, in.scattered,
		in.chunk)
}

// exchange appends the begin of an exchange, and returns the memory that it takes: the whole, and
// this rank's chunk unless that is a part of it.
func (l *layouter) exchange(send Send, args []Ref, whole, chunk int) (taken []Ref) {
	memory := []int{whole, chunk}
	if whole == chunk {
		memory = memory[:1]
	}
	for _, buffer := range memory {
		b := l.plan.Buffers[buffer]
		n := ir.Of(b.Bytes / b.DType.Size())
		taken = append(taken, Ref{Buffer: buffer, Shape: n, Strides: n.Strides(), DType: b.DType,
			Step: len(l.plan.Steps)})
	}
	l.plan.Steps = append(l.plan.Steps, Step{Op: send, Dsts: taken, Args: args, Name: "exchange",
		Runs: l.bucketing.accumulation.lastRun()})
	return taken
}

// receiveShard appends the end of the reduce-scatter of a bucket, unless that is there: this rank's
// shards of its gradients.
func (l *layouter) receiveShard(bucket int) {
	s := &l.bucketing.shards
	if bucket <= s.received {
		return
	}
	s.received = bucket
	step := Step{Op: Receive{bucket, backend.ReduceScatter}, Args: l.bucketing.sent[bucket-1],
		Name: "exchange", Runs: l.bucketing.accumulation.lastRun()}
	for _, update := range l.bucketing.buckets[bucket-1] {
		if of := s.updates[update].Shard; !of.empty() {
			s.mine[update] = l.part(Scattered, update, ir.Of(of.To-of.From))
			step.Dsts = append(step.Dsts, s.mine[update])
		}
	}
	l.plan.Steps = append(l.plan.Steps, step)
}

// part returns a part of the memory of a bucket that the next step writes.
func (l *layouter) part(kind Kind, update int, shape ir.Dims) Ref {
	slot := l.bucketing.shards.slots[update]
	b := Buffer{Kind: kind, Index: update, Name: l.plan.Buffers[slot.Buffer].Name}
	return l.buffer(b, shape, slot.DType, len(l.plan.Steps))
}

// findReads finds until when variables are read.
func (l *layouter) findReads(all []*group) {
	s := &l.bucketing.shards
	if s.reads = map[int]int{}; len(l.bucketing.buckets) == 0 {
		return
	}
	read := func(id ir.ID, until int) {
		_, lent := l.lends(id)
		for ir.View(l.program.Values[id].Op) || lent && !ir.Leaf(l.program.Values[id].Op) {
			id = l.program.Values[id].Args[0]
		}
		if in, ok := l.program.Values[id].Op.(ir.Input); ok {
			s.reads[in.Index] = max(s.reads[in.Index], until)
		}
	}
	for i, g := range all {
		s.lent.needs = append(s.lent.needs, nil)
		for _, m := range g.members {
			for _, a := range l.program.Values[m].Args {
				read(a, i+1)
				if update, ok := l.lends(a); ok {
					s.lent.needs[i] = append(s.lent.needs[i], s.updates[update].Bucket)
				}
			}
		}
	}
	for _, r := range l.program.Results {
		read(r, len(all)+1)
	}
}

// updateShards appends the updates of buckets behind which another one has left, and the begin of
// their all-gathers, so that these run beside what comes next. Variables get their values in the
// end, unless the memory of the bucket is to be free: then once nothing reads them. Clipping waits
// for all gradients.
func (l *layouter) updateShards(done int) error {
	defer l.inLastRun()()
	s := &l.bucketing.shards
	for bucket := s.updated + 1; bucket < len(l.bucketing.sent); bucket++ {
		of := l.bucketing.buckets[bucket-1]
		if !s.divides(of) || s.updates[of[0]].Limit > 0 {
			return nil
		}
		placed, alone := s.updates[of[0]].Shard.Placed, s.updates[of[0]].Shard.Alone
		if !placed && l.holdsBack(bucket) {
			return nil
		}
		if (placed || alone) && slices.ContainsFunc(of, func(update int) bool {
			return s.reads[s.updates[update].Input] > done
		}) {
			return nil
		}
		l.receiveShard(bucket)
		s.updated = bucket
		refs := make([]Ref, len(s.updates))
		for _, update := range of {
			refs[update] = s.mine[update]
		}
		if err := l.updateBucket(bucket, refs, nil); err != nil {
			return err
		}
		if l.gather(bucket) && placed {
			if err := l.endGathers(bucket); err != nil {
				return err
			}
		}
	}
	return nil
}

// holdsBack reports whether the update of a bucket waits until the last bucket has left: nothing
// else is left to run beside that one's reduce-scatter. An element takes an update about as long as
// a link, so as many elements wait as the last bucket has, such as an embedding's.
func (l *layouter) holdsBack(bucket int) bool {
	buckets := l.bucketing.buckets
	size := func(bucket int) (n int) {
		for _, update := range buckets[bucket-1] {
			n += l.program.Values[l.bucketing.gradients[update]].Shape.Size()
		}
		return n
	}
	waiting := 0
	for later := bucket; later < len(buckets); later++ {
		waiting += size(later)
	}
	return len(l.bucketing.sent) < len(buckets) && waiting <= size(len(buckets))
}

// gather appends the begin of the all-gather of the variables of a bucket, if ranks divide it.
func (l *layouter) gather(bucket int) bool {
	s, buckets := &l.bucketing.shards, l.bucketing.buckets
	if bucket == 0 || !s.divides(buckets[bucket-1]) || s.updates[buckets[bucket-1][0]].Shard.Alone {
		return false
	}
	var args []Ref
	for _, update := range buckets[bucket-1] {
		if !s.updates[update].Shard.empty() {
			args = append(args, s.mine[update])
		}
	}
	in := s.memory[bucket-1]
	s.leaving = append(s.leaving, leaving{bucket, l.exchange(Send{Bucket: bucket,
		Kind: backend.AllGather}, args, in.gathered, in.chunk)})
	return true
}

// endGathers appends the ends of all-gathers but that of one bucket, and gives variables their
// values.
func (l *layouter) endGathers(but int) error {
	s := &l.bucketing.shards
	for len(s.leaving) > 0 && s.leaving[0].bucket != but {
		of := s.leaving[0]
		s.leaving = s.leaving[1:]
		step := Step{Op: Receive{of.bucket, backend.AllGather}, Args: of.taken, Name: "exchange"}
		for _, update := range l.bucketing.buckets[of.bucket-1] {
			step.Dsts = append(step.Dsts,
				l.part(Gathered, update, ir.Of(s.slots[update].Shape.Size())))
		}
		l.plan.Steps = append(l.plan.Steps, step)
		for k, update := range l.bucketing.buckets[of.bucket-1] {
			w, err := l.variable(s.updates[update].Input, step.Dsts[k])
			if err != nil {
				return err
			}
			name := l.program.Values[l.bucketing.gradients[update]].Name
			if err := l.assign(w, step.Dsts[k], name); err != nil {
				return err
			}
		}
	}
	return nil
}
