package plan

import (
	"slices"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/vm/internal/ir"
)

// lent are the variables of which a rank has a shard alone, as a plan reads them: a bucket of
// variables is gathered before the first step that reads one of them, and again later if other
// buckets were read meanwhile (FSDP: Zhao et al., arXiv:2304.11277, and stage 3 of ZeRO).
type lent struct {
	of      map[int]int // the updates of these variables, by input
	values  [][]ir.ID   // the variables, or what is made of them in BF16, by update
	small   []bool      // by bucket: it stays gathered, since others are far larger
	needs   [][]int     // by group: buckets that it reads
	present []int       // buckets that are gathered, the one used last behind the others
	coming  []coming    // buckets that are under way
}

// coming is a bucket of variables that is under way.
type coming struct {
	bucket int
	room   room
	taken  []Ref // the memory that the exchange takes
}

// lentBuckets is how many buckets of variables stay gathered: the last ones that were read.
const lentBuckets = 2

// lentAhead is how many buckets of variables are under way before a group reads them. A gather that
// begins while one is under way follows it on its queue of a graph. One that begins alone starts a
// queue, on which each of its copies came 50 us later on two H200: a GPT of 1.3 B then took 1.19 of
// the time.
const lentAhead = 2

// lends returns the update of the variable that a value is a view or a cast of, if ranks have parts
// of it.
func (l *layouter) lends(id ir.ID) (update int, ok bool) {
	s := &l.bucketing.shards.lent
	if len(s.of) == 0 {
		return 0, false
	}
	for ir.View(l.program.Values[id].Op) || l.program.Values[id].Op == (ir.Cast{}) {
		id = l.program.Values[id].Args[0]
	}
	if in, input := l.program.Values[id].Op.(ir.Input); input {
		update, ok = s.of[in.Index]
	}
	return update, ok
}

// smallLent is how many times smaller than the largest a bucket is that stays gathered: one of
// biases, say, which all layers read.
const smallLent = 16

// find finds the variables. One that no step reads is lent, too, with its bucket: values has none.
func (s *lent) find(p *ir.Program, updates []Update, gradients []ir.ID) {
	s.of, s.values = map[int]int{}, make([][]ir.ID, len(updates))
	var bytes []int // by bucket
	for i, u := range updates {
		if u.Shard.alone() {
			s.of[u.Input] = i
			for len(bytes) < u.Bucket {
				bytes = append(bytes, 0)
			}
			d := u.Shard.gathers(p.Values[gradients[i]].DType)
			bytes[u.Bucket-1] = u.Shard.Chunk * u.Shard.Ranks * d.Size()
		}
	}
	for _, n := range bytes {
		s.small = append(s.small, n*smallLent <= slices.Max(bytes))
	}
	for id, v := range p.Values {
		x := ir.ID(id)
		if v.Op == (ir.Cast{}) {
			x = v.Args[0]
		}
		in, ok := p.Values[x].Op.(ir.Input)
		if update, lent := s.of[in.Index]; ok && lent &&
			(v.Op != ir.Cast{} || updates[update].Shard.Half) {
			s.values[update] = append(s.values[update], ir.ID(id))
		}
	}
}

// borrow makes sure that a variable of which ranks have parts is gathered, or its cast is computed.
func (l *layouter) borrow(id ir.ID, update int) {
	if s := l.bucketing.shards.updates[update].Shard; l.program.Values[id].Op == (ir.Cast{}) &&
		!s.Half {
		l.cast(id)
		return
	}
	l.hold(l.bucketing.shards.updates[update].Bucket)
}

// hold makes sure that a bucket of variables is gathered.
func (l *layouter) hold(bucket int) {
	if !slices.Contains(l.bucketing.shards.lent.present, bucket) {
		l.gatherLent(bucket)
		l.receiveLent(bucket)
	}
}

// gatherLent appends the begin of the all-gather of a bucket of variables, unless it is under way.
func (l *layouter) gatherLent(bucket int) {
	s := &l.bucketing.shards.lent
	if s.under(bucket) >= 0 {
		return
	}
	of := l.bucketing.buckets[bucket-1]
	first := l.bucketing.shards.updates[of[0]].Shard
	dtype := first.gathers(l.bucketDType(bucket))
	in := room{gathered: l.roomOf(bucket, Arena, first.Ranks, "variables of a bucket", dtype),
		chunk: l.roomOf(bucket, Arena, 1, "the shard of a bucket", dtype)}
	var args []Ref
	for _, update := range of {
		u := l.bucketing.shards.updates[update]
		if u.Shard.empty() {
			continue
		}
		part := Buffer{Kind: Scattered, Index: update, DType: dtype}
		in.place(&part, u.Shard)
		to := l.buffer(part, ir.Of(u.Shard.To-u.Shard.From), dtype, -1)
		like := to
		like.DType = l.bucketDType(bucket)
		w, _ := l.variable(u.Input, like) // which has these elements alone
		if ids := s.values[update]; ids != nil {
			l.plan.Buffers[w.Buffer].Name = l.program.Values[ids[0]].Name
		}
		b := newLoop(to.Shape, ir.Dims{})
		b.store(b.load(l.plan, w), to)
		l.join(l.plan.Buffers[w.Buffer].Name, "pack", b)
		args = append(args, b.dsts[0])
	}
	s.coming = append(s.coming, coming{bucket, in, l.exchange(Send{Bucket: bucket,
		Kind: backend.AllGather, Half: first.Half}, args, in.gathered, in.chunk)})
	l.plan.Steps[len(l.plan.Steps)-1].Runs = 0
}

// under returns which of those that are under way a bucket is, -1 if it is not.
func (s *lent) under(bucket int) int {
	return slices.IndexFunc(s.coming, func(c coming) bool { return c.bucket == bucket })
}

// receiveLent appends the end of the all-gather of a bucket, and says where its variables are.
func (l *layouter) receiveLent(bucket int) {
	s := &l.bucketing.shards.lent
	i := s.under(bucket)
	of := s.coming[i]
	s.coming = slices.Delete(s.coming, i, i+1)
	step := Step{Op: Receive{bucket, backend.AllGather}, Args: of.taken, Name: "exchange"}
	at := len(l.plan.Steps)
	for _, update := range l.bucketing.buckets[bucket-1] {
		v := l.program.Values[l.bucketing.gradients[update]] // is like the variable
		shard := l.bucketing.shards.updates[update].Shard
		part := Buffer{Kind: Gathered, Index: update, DType: shard.gathers(v.DType)}
		of.room.place(&part, shard)
		ids := s.values[update]
		if ids != nil {
			v = l.program.Values[ids[0]]
			part.Name = v.Name
		}
		to := l.buffer(part, v.Shape, part.DType, at)
		for _, id := range ids {
			l.setRef(id, to)
		}
		step.Dsts = append(step.Dsts, to)
	}
	l.plan.Steps = append(l.plan.Steps, step)
	s.present = append(s.present, bucket)
}

// lend gathers what a group reads, and begins what comes next, so that this runs beside the group.
// It forgets buckets that were not read lately: the next step that reads one gathers it again.
func (l *layouter) lend(group int) {
	s := &l.bucketing.shards.lent
	if len(s.of) == 0 {
		return
	}
	if len(s.coming) == 0 {
		l.gatherAhead(group)
	}
	for _, bucket := range s.needs[group] {
		l.hold(bucket)
		at := slices.Index(s.present, bucket)
		s.present = append(slices.Delete(s.present, at, at+1), bucket)
	}
	stays := func(bucket int) bool {
		first := l.bucketing.buckets[bucket-1][0]
		return s.small[bucket-1] || l.bucketing.shards.updates[first].Shard.Stays
	}
	passing := slices.DeleteFunc(slices.Clone(s.present), stays)
	for len(passing) > lentBuckets && !slices.Contains(s.needs[group], passing[0]) {
		l.forget(passing[0])
		s.present = slices.DeleteFunc(s.present, func(b int) bool { return b == passing[0] })
		passing = passing[1:]
	}
	l.gatherAhead(group + 1)
}

// gatherAhead begins what groups from one on read.
func (l *layouter) gatherAhead(group int) {
	s := &l.bucketing.shards.lent
	for _, needs := range s.needs[group:] {
		for _, bucket := range needs {
			if len(s.coming) >= lentAhead {
				return
			}
			if !slices.Contains(s.present, bucket) {
				l.gatherLent(bucket)
			}
		}
	}
}

// forget makes the next step that reads a bucket of variables gather it again.
func (l *layouter) forget(bucket int) {
	for id := range l.program.Values {
		update, ok := l.lends(ir.ID(id))
		if ok && l.bucketing.shards.updates[update].Bucket == bucket {
			l.placed[id] = false
		}
	}
}
