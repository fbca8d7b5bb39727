package plan

import (
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/vm/internal/ir"
)

// Shard is what one rank of several updates of a variable, and keeps vectors for: the elements in
// row-major order from number From up to To, which may be none. The ranks divide each bucket. Its
// gradients are reduce-scattered, each rank updates its shard in the memory of the bucket, and an
// all-gather gives all ranks the whole variables: the first stage of ZeRO (Rajbhandari et al.,
// arXiv:1910.02054, section 5.1).
//
// So every element has one rank that updates it, from the gradient which an all-reduce would give
// all: the variables have the bits of training without shards.
type Shard struct{ From, To int }

// empty reports whether other ranks update all of a variable.
func (s *Shard) empty() bool { return s != nil && s.From == s.To }

// shards are where the shards of a plan lie.
type shards struct {
	updates []Update
	slots   map[int]Ref // by update: the whole gradient, and later the whole variable
	updated map[int]Ref // by update: this rank's shard of what becomes of the variable
}

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

// receiveShard appends the end of the reduce-scatter of a bucket, and says where this rank's shards
// of its gradients are then.
func (l *layouter) receiveShard(bucket int, refs []Ref) {
	s, step := &l.bucketing.shards, len(l.plan.Steps)
	if s.slots == nil {
		s.slots, s.updated = map[int]Ref{}, map[int]Ref{}
	}
	sent := l.bucketing.sent[bucket-1]
	var dsts []Ref
	for k, update := range l.bucketing.buckets[bucket-1] {
		s.slots[update] = sent[k]
		if of := s.updates[update].Shard; !of.empty() {
			refs[update] = l.buffer(Buffer{Kind: Scattered, Index: update, From: of.From,
				Name: "shard of " + l.plan.Buffers[sent[k].Buffer].Name},
				ir.Of(of.To-of.From), sent[k].DType, step)
			dsts = append(dsts, refs[update])
		}
	}
	l.plan.Steps = append(l.plan.Steps, Step{Op: Receive{bucket, backend.ReduceScatter}, Dsts: dsts,
		Args: sent, Name: "exchange"})
}

// sendShards appends the begin of the all-gather of the variables of a bucket, if ranks divide it.
func (l *layouter) sendShards(bucket int) {
	s := &l.bucketing.shards
	if bucket == 0 || !s.divides(l.bucketing.buckets[bucket-1]) {
		return
	}
	send := Step{Op: Send{Bucket: bucket, Kind: backend.AllGather}, Name: "exchange"}
	for _, update := range l.bucketing.buckets[bucket-1] {
		slot := s.slots[update]
		slot.Step = len(l.plan.Steps)
		s.slots[update] = slot
		send.Dsts = append(send.Dsts, slot)
		if x, ok := s.updated[update]; ok {
			send.Args = append(send.Args, x)
		}
	}
	l.plan.Steps = append(l.plan.Steps, send)
}

// receiveShards appends the ends of the all-gathers, and gives the variables their values.
func (l *layouter) receiveShards() error {
	s := &l.bucketing.shards
	for i, bucket := range l.bucketing.buckets {
		if !s.divides(bucket) {
			continue
		}
		var slots []Ref
		for _, update := range bucket {
			slots = append(slots, s.slots[update])
		}
		for k, slot := range l.exchanged(Receive{i + 1, backend.AllGather}, slots) {
			u := s.updates[bucket[k]]
			w, err := l.variable(u.Input, slot)
			if err != nil {
				return err
			}
			name := l.program.Values[l.bucketing.gradients[bucket[k]]].Name
			slot, w = flat(slot), flat(w)
			if err := l.assign(w, slot, name); err != nil {
				return err
			}
		}
	}
	return nil
}
