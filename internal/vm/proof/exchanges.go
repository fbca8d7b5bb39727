package proof

import (
	"errors"
	"fmt"
	"slices"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/vm/lower"
	"github.com/euryale-ml/euryale/internal/vm/plan"
	"github.com/euryale-ml/euryale/kernels/fuse"
)

// transfer is what leaves in a bucket, and the memory that is the exchange's until it ends.
type transfer struct {
	sent   []tensor
	memory []plan.Ref
}

// exchanged is what ranks make of the sums of a gradient.
func (m *valueNumbers) exchanged(sums ...tensor) (x tensor) {
	for _, sum := range sums {
		value := m.number(&term{form: byExchange, args: [4]tensor{sum, x}})
		x = tensor{value, m.list(m.size(sum), 1)}
	}
	return x
}

// gathered is a variable of n elements of which this rank has a shard, and others the rest.
func (m *valueNumbers) gathered(update int, shard tensor, n int) tensor {
	value := m.number(&term{form: byGather, bits: uint64(update), args: [4]tensor{shard}})
	return tensor{value, m.list(n, 1)}
}

// shardOf returns a rank's part of what is like a variable.
func (r *proof) shardOf(s *lower.Shard, full tensor) tensor {
	a := axes{off: s.From}
	a.add(s.To-s.From, 1)
	return r.read(full, &a)
}

// elements returns the length of the variable of an update that ranks exchange.
func (r *proof) elements(update int) int {
	return r.plan.Program.Values[r.gradients[update]].Shape.Size()
}

// dtype returns its dtype, whatever ranks exchange its gradient in.
func (r *proof) dtype(update int) backend.DType {
	return fuse.Type(r.plan.Program.Values[r.gradients[update]].DType)
}

// members returns the updates of a bucket, and those of which this rank has a shard that is not
// empty.
func (r *proof) members(bucket int) (all, mine []int) {
	for i := range r.plan.Updates {
		if u := &r.plan.Updates[i]; u.Bucket == bucket {
			if all = append(all, i); !u.Shard.Empty() {
				mine = append(mine, i)
			}
		}
	}
	return all, mine
}

// send notes what leaves. From now on nobody can say what is in the memory of the exchange.
func (r *proof) send(op plan.Send, s *plan.Step) (err error) {
	this, divided := plan.Receive{Bucket: op.Bucket, Kind: op.Kind}, op.Kind != backend.AllReduce
	if _, sent := r.underWay[this]; sent {
		return errors.New("it has been sent")
	}
	if !divided && len(s.Dsts) != len(s.Args) {
		return fmt.Errorf("it sends %d gradients, and %d come back", len(s.Args), len(s.Dsts))
	}
	all, mine := r.members(op.Bucket)
	for _, update := range all {
		s := r.plan.Updates[update].Shard
		full := op.Kind == backend.AllGather && s != nil && s.FullyShard
		if !full && (s != nil && !s.Mirrored) != divided {
			return fmt.Errorf("the ranks divide the gradient of update %d: %v, want %v", update,
				!divided, divided)
		}
	}
	switch op.Kind {
	case backend.AllReduce:
		err = r.replicated(op, s, all)
	case backend.ReduceScatter:
		err = r.inBucket(op, all, s, plan.Gradient, all)
	default:
		err = r.inBucket(op, all, s, plan.OwnShard, mine)
	}
	x := transfer{memory: s.Dsts}
	for _, a := range r.args {
		x.sent = append(x.sent, a.tensor)
	}
	r.underWay[this] = x
	for _, d := range s.Dsts {
		value := r.number(&term{form: underWay, bits: uint64(op.Bucket)<<8 | uint64(op.Kind)})
		r.gives = append(r.gives, tensor{value, r.list(d.Span(), 1)})
	}
	return err
}

// replicated returns an error unless a bucket of which all ranks update all leaves from where its
// gradients are exchanged, in their order and behind the buckets before it.
func (r *proof) replicated(op plan.Send, s *plan.Step, updates []int) error {
	for before := r.sent + 1; before < op.Bucket; before++ {
		if all, _ := r.members(before); all == nil { // it is of lookups alone
			r.sent = before
		}
	}
	if op.Bucket != r.sent+1 {
		return fmt.Errorf("it comes as number %d", r.sent)
	}
	r.sent = op.Bucket
	var want []memory
	for _, update := range updates {
		for branch := range r.plan.Program.Values[r.gradients[update]].Args {
			want = append(want, memory{plan.Gradient, update, branch})
		}
	}
	at := func(s plan.Ref, of memory) bool {
		half := r.plan.Updates[of.index].Half
		return memoryOf(&r.plan.Buffers[s.Buffer]) == of && half == op.Half &&
			half == (s.DType == backend.BF16)
	}
	if !slices.EqualFunc(s.Args, want, at) || !slices.EqualFunc(s.Dsts, want, at) {
		return fmt.Errorf("it does not send the gradients %v as their updates say", want)
	}
	return nil
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
			if len(in) > 1 { // the chunk has its own memory
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

// inBucket returns an error unless an exchange has memory for a whole bucket, and for a chunk
// unless that is in place, and takes values of a kind from there.
func (r *proof) inBucket(op plan.Send, updates []int, s *plan.Step, kind plan.Kind,
	values []int) error {
	memory := s.Dsts
	if len(memory) == 0 || len(memory) > 2 {
		return fmt.Errorf("it takes %d pieces of memory", len(memory))
	}
	for _, update := range updates {
		s, d := r.plan.Updates[update].Shard, r.dtype(update)
		if op.Half != (op.Kind == backend.AllGather && s.Half) {
			return fmt.Errorf("the exchange is in BF16: %v, want %v for update %d", op.Half, s.Half,
				update)
		} else if op.Half {
			d = backend.BF16
		}
		for i, n := range []int{s.Chunk * s.Ranks, s.Chunk}[:len(memory)] {
			if m := &memory[i]; !r.writable(m) || m.Span() != n || m.DType != d {
				return fmt.Errorf("a bucket of %d chunks of %d elements is exchanged in %s",
					s.Ranks, s.Chunk, r.plan.Text(*m))
			}
		}
	}
	return r.lie(s.Args, kind, values, memory)
}

// receive adds what comes back.
func (r *proof) receive(op plan.Receive, s *plan.Step) error {
	x, sent := r.underWay[op]
	if !sent || !slices.Equal(x.memory, s.Args) {
		return errors.New("nothing has been sent in this memory")
	}
	delete(r.underWay, op)
	all, mine := r.members(op.Bucket)
	if op.Kind == backend.AllReduce {
		branches := len(x.sent) / len(all)
		for i, a := range r.args {
			if r.gives = append(r.gives, a.tensor); i%branches == 0 {
				r.gives[i] = r.exchanged(x.sent[i : i+branches]...)
			}
		}
		if !slices.EqualFunc(s.Dsts, s.Args, func(d, a plan.Ref) bool {
			return d.Buffer == a.Buffer
		}) {
			return errors.New("it comes back elsewhere")
		}
		return nil
	}
	kind, here := plan.OwnShard, mine
	if op.Kind == backend.AllGather {
		kind, here = plan.Unsharded, all
	}
	for _, update := range here {
		if op.Kind == backend.ReduceScatter {
			sum := r.exchanged(x.sent[slices.Index(all, update)])
			r.gives = append(r.gives, r.shardOf(r.plan.Updates[update].Shard, sum))
			continue
		}
		shard := tensor{}
		if at := slices.Index(mine, update); at >= 0 {
			shard = x.sent[at]
		}
		r.gives = append(r.gives, r.gathered(update, shard, r.elements(update)))
	}
	return r.lie(s.Dsts, kind, here, s.Args)
}
