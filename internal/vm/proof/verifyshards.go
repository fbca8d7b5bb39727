package proof

import (
	"errors"
	"fmt"
	"slices"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/vm/plan"
)

// transfer is an exchange of a bucket.
type transfer struct {
	bucket int
	kind   backend.Kind
}

// divides returns an error unless ranks divide a bucket, or do not.
func (r *proof) divides(bucket int, want bool) error {
	for i, u := range r.plan.Updates {
		if u.Bucket == bucket && (u.Shard != nil) != want {
			return fmt.Errorf("the ranks divide the gradient of update %d: %v, want %v", i, !want,
				want)
		}
	}
	return nil
}

// replicated returns an error unless all ranks update all of a bucket, whose gradients are then
// exchanged where they are.
func (r *proof) replicated(op plan.Send, s *plan.Step) error {
	if len(s.Dsts) != len(s.Args) {
		return fmt.Errorf("it sends %d gradients, and %d come back", len(s.Args), len(s.Dsts))
	}
	return r.divides(op.Bucket, false)
}

// shardOf returns a rank's part of what is like a variable.
func (r *proof) shardOf(s *plan.Shard, whole tensor) tensor {
	if s == nil {
		return whole
	}
	a := axes{off: s.From}
	a.add(s.To-s.From, 1)
	return r.read(whole, &a)
}

// elements returns the length of the variable of an update.
func (r *proof) elements(update int) int {
	return r.plan.Program.Values[r.gradients[update]].Shape.Size()
}

// gathered is a variable of n elements of which this rank has updated a shard, and others the rest.
func (m *valueNumbers) gathered(update int, shard tensor, n int) tensor {
	value := m.number(&term{form: byGather, bits: uint64(update), args: [4]tensor{shard}})
	return tensor{value, m.list(n, 1)}
}

// sharded returns the update of a variable of which a rank has a part alone.
func (r *proof) sharded(b *plan.Buffer) (update int, ok bool) {
	update = slices.IndexFunc(r.plan.Updates, func(u plan.Update) bool {
		return b.Kind == plan.Input && u.Input == b.Index && fullySharded(u.Shard)
	})
	return update, update >= 0
}

// variable is the whole variable of an update, as it was before the run.
func (r *proof) variable(update int) tensor {
	return r.outside(memory{plan.Input, r.plan.Updates[update].Input, 0}, r.dtype(update),
		r.elements(update))
}

// members returns the updates of a bucket, and those of which this rank has a shard that is not
// empty.
func (r *proof) members(bucket int) (all, mine []int) {
	for i := range r.plan.Updates {
		if u := &r.plan.Updates[i]; u.Bucket == bucket {
			if all = append(all, i); !empty(u.Shard) {
				mine = append(mine, i)
			}
		}
	}
	return all, mine
}

// lie returns an error unless values of updates lie in the memory of an exchange where the call
// takes them from, or leaves them.
func (r *proof) lie(values []plan.Ref, kind plan.Kind, updates []int, in []plan.Ref) error {
	if !slices.EqualFunc(values, updates, func(v plan.Ref, update int) bool {
		b, s := &r.plan.Buffers[v.Buffer], r.plan.Updates[update].Shard
		n, at, of := r.elements(update), s.First, in[0].Buffer
		if from, to := elementsOf(s, n); from != s.From && s.From < s.To || to-from != s.To-s.From {
			return false
		}
		if kind == plan.OwnShard {
			n, at, of = s.To-s.From, at+s.From, in[len(in)-1].Buffer
			if len(in) > 1 { // the chunk has memory of its own
				at -= s.Rank * s.Chunk
			}
		}
		size := v.DType.Size()
		return v.DType == in[0].DType && memoryOf(b) == (memory{kind, update, 0}) &&
			b.Within == 1+of && b.At == at*size && v.Offset == 0 && v.Dense() && v.Span() == n &&
			b.Bytes == n*size
	}) {
		return fmt.Errorf("it does not exchange all of the updates %v", updates)
	}
	return nil
}

// takes returns an error unless an exchange has memory for a whole bucket, and for a chunk unless
// that is in place.
func (r *proof) takes(op plan.Send, memory []plan.Ref) error {
	all, _ := r.members(op.Bucket)
	if len(memory) == 0 || len(memory) > 2 {
		return fmt.Errorf("it takes %d pieces of memory", len(memory))
	}
	for _, update := range all {
		s, d := r.plan.Updates[update].Shard, r.dtype(update)
		if op.Half != (op.Kind == backend.AllGather && s.Half) {
			return fmt.Errorf("the exchange is in BF16: %v, want %v for update %d", op.Half, s.Half,
				update)
		} else if op.Half {
			d = backend.BF16
		}
		for i, n := range []int{s.Chunk * s.Ranks, s.Chunk}[:len(memory)] {
			if m := &memory[i]; !r.whole(m) || m.Span() != n || m.DType != d {
				return fmt.Errorf("a bucket of %d chunks of %d elements is exchanged in %s",
					s.Ranks, s.Chunk, r.plan.Text(*m))
			}
		}
	}
	return nil
}

// sendShards notes what leaves for a reduce-scatter or an all-gather. Its memory is then the
// exchange's, until Receive.
func (r *proof) sendShards(op plan.Send, s *plan.Step) error {
	this := transfer{op.Bucket, op.Kind}
	all, mine := r.members(op.Bucket)
	kind, leave := plan.Gradient, all
	if op.Kind == backend.AllGather {
		kind, leave = plan.OwnShard, mine
	}
	err := r.divides(op.Bucket, true)
	if err == nil {
		err = r.takes(op, s.Dsts)
	}
	if err == nil {
		err = r.lie(s.Args, kind, leave, s.Dsts)
	}
	if _, again := r.taken[this]; again {
		err = errors.New("it has been sent")
	}
	r.taken[this], r.shards[this] = s.Dsts, nil
	for k, x := range r.args {
		r.shards[this] = append(r.shards[this], x.tensor)
		if of := r.plan.Updates[leave[k]].Shard; kind == plan.OwnShard && of.FullyShard &&
			x.tensor != r.shardOf(of, r.variable(leave[k])) {
			err = errors.New("it gathers another variable, or one after its update")
		}
	}
	for _, d := range s.Dsts { // nobody can say what is there before Receive
		value := r.number(&term{form: underWay, bits: uint64(op.Bucket)<<8 | uint64(op.Kind)})
		r.gives = append(r.gives, tensor{value, r.list(d.Span(), 1)})
	}
	return err
}

// receiveShards adds what comes back.
func (r *proof) receiveShards(op plan.Receive, s *plan.Step) error {
	this := transfer{op.Bucket, op.Kind}
	if !slices.Equal(r.taken[this], s.Args) || s.Args == nil {
		return errors.New("nothing has been sent in this memory")
	}
	delete(r.taken, this)
	all, mine := r.members(op.Bucket)
	sent := r.shards[this]
	if op.Kind == backend.ReduceScatter {
		for k, update := range all {
			if of := r.plan.Updates[update].Shard; !empty(of) {
				r.gives = append(r.gives, r.shardOf(of, r.exchanged(op.Bucket, sent[k])))
			}
		}
		return r.lie(s.Dsts, plan.OwnShard, mine, s.Args)
	}
	for _, update := range all {
		if r.plan.Updates[update].Shard.FullyShard {
			x := r.variable(update)
			if r.plan.Updates[update].Shard.Half {
				x = r.rounded(x)
			}
			r.gives = append(r.gives, x)
			continue
		}
		shard := tensor{}
		if at := slices.Index(mine, update); at >= 0 {
			shard = sent[at]
		}
		r.gives = append(r.gives, r.gathered(update, shard, r.elements(update)))
	}
	return r.lie(s.Dsts, plan.Unsharded, all, s.Args)
}
