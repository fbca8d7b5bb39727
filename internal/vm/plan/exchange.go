package plan

import (
	"fmt"
	"slices"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/vm/ir"
)

// Send starts the exchange of the gradients of a bucket between ranks. Until its Receive no other
// step uses the memory of these gradients. Buckets are numbered from 1 here, and in what users read
// from 0, as in the errors of autograd.
type Send struct {
	Bucket int
	// Kind is AllReduce, or of shards ReduceScatter and then AllGather: see [Shard].
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
	what, in := "send", ""
	switch o.Kind {
	case backend.ReduceScatter:
		what = "scatter"
	case backend.AllGather:
		what = "gather"
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
	// values that are computed in the slot of an update, or where a first run keeps them
	direct map[ir.ID]int
	sent   [][]Ref // the gradients of the buckets that have left
	shards shards

	accumulation Accumulation  // of several runs
	sums         map[int][]Ref // by update: those of runs that are kept
	first        map[int]int   // by update: the last step that has written it where it is kept
}

// exchanging finds the buckets, and the gradients that can be computed where they are exchanged:
// those that nothing else reads.
func exchanging(p *ir.Program, updates []Update, users [][]ir.ID) bucketing {
	x := bucketing{shards: shards{updates: updates},
		direct: map[ir.ID]int{}, sums: map[int][]Ref{}, first: map[int]int{}}
	x.gradients, x.lookups = gradients(p, updates)
	if len(updates) > 0 {
		x.accumulation = updates[0].Accumulation
	}
	for i, u := range updates {
		if u.Bucket == 0 && u.Lookups == nil && !x.accumulation.keeps() {
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
		if alone && !ir.View(p.Values[id].Op) && !ir.Leaf(p.Values[id].Op) {
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
		if len(x.buckets[n]) == 0 { // of lookups alone
			x.sent = append(x.sent, nil)
			continue
		}
		var slots []Ref
		for _, update := range x.buckets[n] {
			slots = append(slots, l.slots(update)...)
		}
		if x.shards.divides(x.buckets[n]) {
			x.sent = append(x.sent, l.scatter(n+1, slots))
			continue
		}
		send := Send{Bucket: n + 1, Kind: backend.AllReduce,
			Half: x.shards.updates[x.buckets[n][0]].Half}
		x.sent = append(x.sent, l.exchanged(send, slots))
	}
	l.updateShards(done)
}

// computed reports whether the steps so far compute a value.
func (l *layouter) computed(id ir.ID) bool {
	for ir.View(l.program.Values[id].Op) {
		id = l.program.Values[id].Args[0]
	}
	_, sharded := l.sharded(id)
	return ir.Leaf(l.program.Values[id].Op) || l.placed[id] || sharded
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

// slots returns a gradient where it is exchanged, after a copy if it was computed elsewhere: with
// several runs, the sums of some of them. The first one is where it comes back.
func (l *layouter) slots(update int) []Ref {
	id := l.bucketing.gradients[update]
	r := l.ref(id)
	if l.bucketing.accumulation.Several() {
		return l.accumulate(update, r, l.program.Values[id].Name)
	}
	if b := l.plan.Buffers[r.Buffer]; b.Kind == Gradient && b.Index == update {
		return []Ref{r}
	}
	return []Ref{l.copyTo(l.buffer(Buffer{Kind: Gradient, Index: update}, r.Shape, r.DType,
		len(l.plan.Steps)), r, l.program.Values[id].Name)}
}

// receive appends the end of the exchange of a bucket, and says where its gradients are then.
func (l *layouter) receive(bucket int) {
	if l.bucketing.sent[bucket-1] == nil {
		return
	}
	if l.bucketing.shards.divides(l.bucketing.buckets[bucket-1]) {
		l.receiveShard(bucket)
		return
	}
	each := len(l.bucketing.accumulation.branches())
	for i, r := range l.exchanged(Receive{bucket, backend.AllReduce}, l.bucketing.sent[bucket-1]) {
		if i%each == 0 {
			l.applies(l.bucketing.buckets[bucket-1][i/each], r)
		}
	}
}

// exchanged appends a step that writes over gradients, and returns them.
func (l *layouter) exchanged(op ir.Op, slots []Ref) []Ref {
	results := slices.Clone(slots)
	for i := range results {
		results[i].Step = len(l.plan.Steps)
	}
	l.plan.Steps = append(l.plan.Steps, Step{Op: op, Dsts: results, Args: slots, Name: "exchange",
		Runs: l.bucketing.accumulation.lastRun()})
	return results
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
