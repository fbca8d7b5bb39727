package plan

import (
	"fmt"
	"slices"

	"github.com/euryale-ml/euryale/backend"
)

// share notes that writing one of a [Shard] and the gradient around it, which have the same memory,
// writes over the other one.
func (r *proof) share(b *Buffer, step int) {
	other := memory{Scattered, b.Index, 0}
	switch b.Kind {
	default:
		return
	case Scattered:
		other.kind = Slot
	case Slot:
	}
	if n := r.origin(other, 0); int(n) < len(r.buffers) && r.buffers[n] > 0 {
		r.present[r.buffers[n]-1].gone = step
	}
}

// divides returns an error unless ranks divide a bucket, or do not.
func (r *proof) divides(bucket int, want bool) error {
	for i, u := range r.plan.updates {
		if u.Bucket == bucket && (u.Shard != nil) != want {
			return fmt.Errorf("the ranks divide the gradient of update %d: %v, want %v", i, !want,
				want)
		}
	}
	return nil
}

// shardOf returns a rank's part of what is like a variable.
func (r *proof) shardOf(s *Shard, whole tensor) tensor {
	if s == nil {
		return whole
	}
	a := axes{off: s.From}
	a.add(s.To-s.From, 1)
	return r.read(whole, &a)
}

// gathered is a variable of which this rank has updated a shard, and others the rest.
func (r *proof) gathered(update int, shard tensor) tensor {
	value := r.number(&term{form: byGather, bits: uint64(update), args: [4]tensor{shard}})
	return tensor{value, r.list(r.plan.of.Values[r.gradient(update)].Shape.Size(), 1)}
}

// shardsOf returns the memory of this rank's shards of a bucket, and the memory of the whole.
func (r *proof) shardsOf(bucket int) (shards, whole []memory) {
	for i, u := range r.plan.updates {
		if u.Bucket != bucket {
			continue
		}
		whole = append(whole, memory{Slot, i, 0})
		if !u.Shard.empty() {
			shards = append(shards, memory{Scattered, i, 0})
		}
	}
	return shards, whole
}

// lie returns an error unless values are all of some memory each.
func (r *proof) lie(values []Ref, want []memory) error {
	if !slices.EqualFunc(values, want, func(v Ref, of memory) bool {
		b := &r.plan.Buffers[v.Buffer]
		s := r.plan.updates[of.index].Shard
		return b.memory() == of && v.Offset == 0 && v.Dense() &&
			v.Span()*v.DType.Size() == b.Bytes &&
			(of.kind == Slot || b.From == s.From && v.Span() == s.To-s.From)
	}) {
		return fmt.Errorf("it does not exchange %v", want)
	}
	return nil
}

// sendShards notes what leaves for an all-gather. Until Receive nobody may read or write the
// bucket.
func (r *proof) sendShards(i int, op Send, s *Step) error {
	if err := r.divides(op.Bucket, true); err != nil {
		return err
	}
	shards, whole := r.shardsOf(op.Bucket)
	if err := r.lie(s.Args, shards); err != nil {
		return err
	}
	if err := r.lie(s.Dsts, whole); err != nil {
		return err
	}
	for k, of := range shards {
		r.shards[of.index] = r.args[k].tensor
	}
	for _, of := range whole {
		if _, ok := r.shards[of.index]; !ok {
			r.shards[of.index] = tensor{}
		}
	}
	for _, d := range s.Dsts {
		r.present[r.spaces[d.Buffer]].gone = i
	}
	return nil
}

// receiveShards adds what comes back of a reduce-scatter, or of an all-gather.
func (r *proof) receiveShards(op Receive, dsts []Ref) error {
	if err := r.divides(op.Bucket, true); err != nil {
		return err
	}
	shards, whole := r.shardsOf(op.Bucket)
	if op.Kind == backend.AllGather {
		for _, of := range whole {
			x, ok := r.shards[of.index]
			if !ok {
				return fmt.Errorf("nothing has been sent")
			}
			r.gives = append(r.gives, r.gathered(of.index, x))
		}
		return r.lie(dsts, whole)
	}
	for k, of := range whole {
		if s := r.plan.updates[of.index].Shard; !s.empty() {
			x := r.exchanged(op.Bucket, r.sent[op.Bucket-1][k])
			r.gives = append(r.gives, r.shardOf(s, x))
		}
	}
	return r.lie(dsts, shards)
}
