package plan

import (
	"fmt"
	"slices"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/vm/ir"
	"github.com/euryale-ml/euryale/internal/vm/lower"
)

// Send starts the exchange of the gradients of a bucket between ranks. Until its Receive no other
// step uses the memory of these gradients. Buckets are numbered from 1 here, and in what users read
// from 0, as in the errors of autograd.
type Send struct {
	Bucket int
	// Kind is AllReduce, or of shards ReduceScatter and then AllGather: see [lower.Shard].
	Kind backend.Kind
	// Half says that an AllReduce or an AllGather is of BF16.
	Half bool
	// Products is how many products and attentions run beside the exchange.
	Products int
}

// Receive ends the exchange of a bucket: the gradients are then combined.
type Receive struct {
	Bucket int
	Kind   backend.Kind // of the Send
}

// String implements [ir.Op].
func (o Send) String() string {
	what, in := "all-reduce", ""
	switch o.Kind {
	case backend.ReduceScatter:
		what = "reduce-scatter"
	case backend.AllGather:
		what = "all-gather"
	}
	if o.Half {
		in = " in bf16"
	}
	return fmt.Sprintf("%s bucket %d%s", what, o.Bucket-1, in)
}

// String implements [ir.Op].
func (o Receive) String() string {
	switch o.Kind {
	case backend.ReduceScatter:
		return fmt.Sprintf("receive shard of bucket %d", o.Bucket-1)
	case backend.AllGather:
		return fmt.Sprintf("receive shards of bucket %d", o.Bucket-1)
	}
	return fmt.Sprintf("receive bucket %d", o.Bucket-1)
}

// bucketing is what the ranks exchange.
type bucketing struct {
	gradients []ir.ID // by update
	lookups   []ir.ID // by update: what these add to the gradient that comes back, -1 for nothing
	buckets   [][]int // the updates of each bucket: the first one has number 1
	// values that are computed where an update exchanges them, or where a first run keeps them
	direct   map[ir.ID]int
	sent     [][]Ref // of the buckets that have left: the memory that is the exchange's
	received int     // buckets that have come back
	shards   shards

	first map[int]int // by update: the last step that has written it where it is kept
}

// exchanging finds the buckets, and the gradients that can be computed where they are exchanged:
// those that nothing else reads.
func exchanging(p *ir.Program, t *lower.Training, users [][]ir.ID) bucketing {
	x := bucketing{direct: map[ir.ID]int{}, first: map[int]int{}}
	x.gradients, x.lookups = t.Runs, t.Rows
	for i, u := range t.Updates {
		if u.Bucket == 0 && u.Lookups == nil && !t.Accumulation.Keeps() {
			continue
		}
		for len(x.buckets) < u.Bucket {
			x.buckets = append(x.buckets, nil)
		}
		if u.Bucket > 0 {
			x.buckets[u.Bucket-1] = append(x.buckets[u.Bucket-1], i)
		}
		id := x.gradients[i]
		alone := len(users[id]) == 1
		for _, reshape := p.Values[id].Op.(ir.Reshape); alone && reshape; _,
			reshape = p.Values[id].Op.(ir.Reshape) {
			id = p.Values[id].Args[0]
			alone = len(users[id]) == 1
		}
		if alone && !ir.View(p.Values[id].Op) && !given(p.Values[id].Op) {
			x.direct[id] = i
		}
	}
	return x
}

// send appends the exchange of those buckets whose gradients are computed, once so many groups are.
// Buckets leave in their order.
func (l *layouter) send(done int) {
	x := &l.bucketing
	for n := len(x.sent); n < len(x.buckets); n++ {
		if slices.ContainsFunc(x.buckets[n], func(update int) bool {
			return !l.computed(x.gradients[update])
		}) {
			break
		}
		var gradients []Ref
		for _, update := range x.buckets[n] {
			gradients = append(gradients, l.exchanged(update)...)
		}
		x.sent = append(x.sent, l.leave(n+1, gradients))
	}
	l.updateShards(done)
}

// leave appends the begin of the exchange of the gradients of a bucket, and returns the memory that
// is then the exchange's.
func (l *layouter) leave(bucket int, gradients []Ref) []Ref {
	if len(gradients) == 0 { // of lookups alone
		return nil
	}
	s := &l.shards
	of := &l.updates[l.buckets[bucket-1][0]]
	if !of.Shard.Divides() {
		return l.exchange(Send{Bucket: bucket, Kind: backend.AllReduce, Half: of.Half},
			slices.Clone(gradients), gradients)
	}
	for k, update := range l.buckets[bucket-1] {
		s.full[update] = gradients[k]
	}
	if of.Shard.Placed {
		defer l.receive(bucket - 1) // so that its memory is free
	}
	return l.exchange(Send{Bucket: bucket, Kind: backend.ReduceScatter},
		l.bucketOf(s.memory[bucket-1].full, s.memory[bucket-1].chunk), gradients)
}

// computed reports whether the steps so far compute a value.
func (l *layouter) computed(id ir.ID) bool {
	for ir.View(l.program.Values[id].Op) {
		id = l.program.Values[id].Args[0]
	}
	_, sharded := l.sharded(id)
	return given(l.program.Values[id].Op) || l.placed[id] || sharded
}

// countProducts notes what runs beside each exchange, in the runs that exchange.
func countProducts(p *Plan) {
	products, last, sent := 0, p.Accumulation.Kinds()-1, map[Receive]int{}
	for i, s := range p.Steps {
		if !s.Runs.Has(last) {
			continue
		}
		switch op := s.Op.(type) {
		case ir.MatMul, ir.Convolution, ir.Attention, ir.AttentionGrad, ir.LSTM:
			products++
		case Send:
			op.Products = products // before it, until it ends
			p.Steps[i].Op, sent[op.End()] = op, i
		case Receive:
			send := p.Steps[sent[op]].Op.(Send)
			send.Products = products - send.Products
			p.Steps[sent[op]].Op = send
		}
	}
}

// End returns the step that ends the exchange.
func (o Send) End() Receive { return Receive{o.Bucket, o.Kind} }

// exchanged returns a gradient where it is exchanged, after a copy if it was computed elsewhere:
// with several runs, the sums of some of them. The first one is where it comes back.
func (l *layouter) exchanged(update int) []Ref {
	id := l.gradients[update]
	r := l.ref(id)
	if l.training.Accumulation.Several() {
		return l.accumulate(update, l.program.Values[id].Name)
	}
	if b := l.plan.Buffers[r.Buffer]; b.Kind == Gradient && b.Index == update {
		return []Ref{r}
	}
	return []Ref{l.copyTo(l.buffer(Buffer{Kind: Gradient, Index: update}, r.Shape, r.DType,
		len(l.plan.Steps)), r, l.program.Values[id].Name)}
}

// receive appends the end of the exchange of a bucket, unless that is there, and says where its
// gradients, or this rank's shards of them, are then.
func (l *layouter) receive(bucket int) {
	x := &l.bucketing
	if bucket <= x.received {
		return
	}
	x.received = bucket
	of, sent := x.buckets[bucket-1], x.sent[bucket-1]
	switch {
	case sent == nil:
	case l.divides(of):
		var shards []Ref
		for _, update := range of {
			if s := l.updates[update].Shard; !s.Empty() {
				full := x.shards.full[update]
				shards = append(shards, l.part(x.shards.memory[bucket-1], Buffer{Kind: OwnShard,
					Index: update, Name: l.plan.Buffers[full.Buffer].Name}, ir.Of(s.To-s.From),
					full.DType))
				l.applies(update, shards[len(shards)-1])
			}
		}
		l.exchange(Receive{bucket, backend.ReduceScatter}, shards, sent)
	default:
		each := len(sent) / len(of)
		sums := l.exchange(Receive{bucket, backend.AllReduce}, slices.Clone(sent), sent)
		for k, update := range of {
			l.applies(update, sums[k*each])
		}
	}
}

// exchange appends the begin or the end of an exchange, and returns its results.
func (l *layouter) exchange(op ir.Op, dsts, args []Ref) []Ref {
	for i := range dsts {
		dsts[i].Step = len(l.plan.Steps)
	}
	l.plan.Steps = append(l.plan.Steps, Step{Op: op, Dsts: dsts, Args: args, Name: "exchange",
		Runs: l.training.Accumulation.LastRun()})
	return dsts
}

// ExchangedBytes returns the size of the bucket that a Receive ends the exchange of.
func (p *Plan) ExchangedBytes(step int) (n int) {
	end, half := p.Steps[step].Op.(Receive), false
	for _, s := range p.Steps {
		switch send, ok := s.Op.(Send); {
		case !ok || send.Bucket != end.Bucket:
		case send.Kind == backend.AllGather:
			half = send.Half && end.Kind == send.Kind
		default:
			n = Step{Args: s.Args}.Bytes()
		}
	}
	if half {
		n /= 2 // gradients are F32
	}
	return n
}

// Common describes the steps that ranks which exchange gradients must have in common: the
// exchanges, and operations that only the graph knows, which may be collectives, too.
func (p *Plan) Common() []string {
	var all []string
	for i, s := range p.Steps {
		switch op := s.Op.(type) {
		case Send, Receive:
			all = append(all, op.String())
		case ir.Opaque:
			if s.Runs != 0 && i > 0 && p.Steps[i-1].Op == s.Op && p.Steps[i-1].Name == s.Name {
				continue // the same in other runs: see firstRuns
			}
			where := "by its Do"
			if op.Placed {
				where = "on the device"
			}
			all = append(all, "an operation that runs "+where)
		}
	}
	return all
}
