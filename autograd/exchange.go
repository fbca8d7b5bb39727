package autograd

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"gorgonia.org/gorgonia"

	"github.com/euryale-ml/euryale/autograd/solver"
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/group"
	"github.com/euryale-ml/euryale/internal/residence"
)

// Buckets lets a vm.Machine write gradients straight into the buckets of a [DataParallel], start
// their all-reduces and apply the results. It replaces Sync, with the same all-reduces and bitwise
// identical results, except for tables whose rows the machine exchanges. One goroutine makes all
// its calls.
type Buckets struct {
	d     *DataParallel
	on    backend.Device     // where gradients are computed, nil for the host
	slots [][]backend.Buffer // by parameter, one for each sum that is sent
	trainer
	undeclared
}

// Buckets hands the buckets over to the caller: Sync returns an error from now on. on is the
// device, or nil for the host, that computes the gradients and starts the all-reduces.
//
// Errors: ErrUnsupported for [WithPartial], which exchanges no gradients, for [WithUnused], since a
// plan either has a gradient or does not, and for a device other than the communicator's, unless
// there is one rank.
func (d *DataParallel) Buckets(on backend.Device) (*Buckets, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if err := d.usable(); err != nil {
		return nil, err
	}
	refuse := func(why string) error {
		return d.named(fmt.Errorf("%w: %s", backend.ErrUnsupported, why))
	}
	switch device := d.comm.Device(); {
	case d.partial.on:
		return nil, refuse("with WithPartial ranks exchange no gradients: call Average after " +
			"each run")
	case d.tape.unused:
		return nil, refuse("WithUnused: a machine computes the gradients of its learnables in " +
			"each run: leave the option out, and learnables without a gradient out of WithSolver")
	case on != nil && on.Name() != device.Name() && d.comm.Size() > 1:
		return nil, refuse(fmt.Sprintf("gradients are computed on %s, and the communicator is on "+
			"%s: connect with a backend for %s", on.Name(), device.Name(), on.Name()))
	}
	x := &Buckets{d: d, on: on, slots: make([][]backend.Buffer, len(d.params))}
	for _, b := range d.buckets {
		memory, at := b.onHost, 0
		if on != nil {
			memory = b.sums
		}
		for _, p := range b.params {
			x.slots[p.index] = b.slots(memory, at, p.size)
			at += p.size
		}
	}
	d.planned = &x.trainer
	d.fresh.over()
	return x, nil
}

// Pulls sets how the machine brings parameters to where their values are. Save, Load, Check and
// Hash first call pull, on the goroutine that calls them, and Weights does so for each parameter,
// whose node it gives. If ranks shard the parameters, whole says whether it gathers all of each:
// then it is collective.
func (x *Buckets) Pulls(pull func(whole bool, of ...*gorgonia.Node) error) { x.pull = pull }

// Trains says which solver the machine applies the gradients by: Save and Load refuse another one,
// which has no state.
func (x *Buckets) Trains(by solver.Solver) { x.d.solver = by }

// Copies sets how the machine copies parameters and the vectors that the solver of a Fusion keeps
// for them, for [DataParallel.SaveAsync]. start starts copies on a device of what is newer there
// than in host memory, and copies other memory at once. The function that it returns brings the
// copies to the host, in the same order; another goroutine may call it, once.
func (x *Buckets) Copies(by *solver.Fusion, start copying) { x.by, x.copy = by, start }

// Copied waits until a SaveAsync has fetched its copies: the machine may free its memory.
func (x *Buckets) Copied() {
	x.d.mu.Lock()
	fetched := x.d.saver.Fetched()
	x.d.mu.Unlock()
	if fetched != nil {
		<-fetched
	}
}

// Params returns the parameters of each bucket, by their numbers in New, in the order in which
// buckets leave. It is nil on a single rank, which exchanges nothing.
func (x *Buckets) Params() [][]int {
	if len(x.d.queues) == 0 {
		return nil
	}
	all := make([][]int, len(x.d.buckets))
	for i, b := range x.d.buckets {
		for _, p := range b.params {
			all[i] = append(all[i], p.index)
		}
	}
	return all
}

// Parts returns the communicator whose ranks shard the parameters, nil without [WithParts], and
// whether each parameter is a part.
func (x *Buckets) Parts() (comm backend.Communicator, divided []bool) {
	s := x.d.parts
	if s == nil || !slices.ContainsFunc(s.lengths, func(l []int) bool { return l != nil }) {
		return nil, nil
	}
	divided = make([]bool, len(x.d.params))
	for i := range divided {
		divided[i] = s.isPart(i)
	}
	return s.comm, divided
}

// Early reports whether a parameter is in one of the first buckets: see [WithEarly].
func (x *Buckets) Early(param int) bool { return x.d.params[param].early }

// Halve lets the caller compute gradients in the 16 bits in which they are sent, so that no one
// casts buckets before and after their all-reduces. It reports whether the caller must do so. Slots
// are then BF16, except in buckets that are early and apart. All buckets come back as means, which
// [Buckets.Scale] turns into sums if ranks want sums.
//
// The caller must do so if all parameters are F32, the compression sends BF16 and keeps no
// residuals, and gradients are computed where they are reduced. Halve is not for callers of
// [Buckets.Shards], nor for sums of several runs.
func (x *Buckets) Halve() bool {
	d, mean := x.d, backend.Collective{Kind: backend.AllReduce, Op: backend.Avg}
	_, stateful := d.compression()
	sends := d.gradComm.Capabilities().TransportOf
	if len(d.queues) == 0 || stateful || slices.ContainsFunc(d.buckets, func(b *bucket) bool {
		return b.data.DType() != backend.F32 || x.on == nil && b.staged() ||
			sends(mean, backend.F32, b.count()) != backend.BF16
	}) {
		return false
	}
	for _, b := range d.buckets {
		if p := b.params[0]; p.early && p.apart {
			continue // as tables that are only looked up: rows are exchanged, and no bucket
		}
		b.half = b.data.As(backend.BF16).Slice(0, b.count())
		at := 0
		for _, p := range b.params {
			x.slots[p.index] = b.slots(b.half, at, p.size)
			at += p.size
		}
	}
	if d.half = true; d.op == backend.Sum {
		d.scale = float64(d.comm.Size())
	}
	return true
}

// Slot returns where the caller writes the gradient of a parameter, and later finds the combined
// one. With [WithTree] there is a sum for each branch that this rank adds up, and slot 0 has the
// combined one.
func (x *Buckets) Slot(param, branch int) backend.Buffer { return x.slots[param][branch] }

// Whole returns the memory of a bucket with room for a chunk of each rank: see [Buckets.Shards].
func (x *Buckets) Whole(bucket int) backend.Buffer {
	if x.on == nil {
		return x.d.buckets[bucket].wholeOnHost
	}
	return x.d.buckets[bucket].whole
}

// Start starts the all-reduce of a bucket, or with [Buckets.Shards] its reduce-scatter or
// all-gather, after the work already started on a queue; nil is the host, whose work is done. whole
// and chunk are the caller's memory for the call, empty if the bucket has memory itself. If the
// queue is being recorded, so is the call. beside says whether the queues of all ranks compute
// meanwhile, and must be the same on every rank.
//
// Errors name the bucket; ErrUnsupported if the queue is recorded and the communicator cannot be.
func (x *Buckets) Start(bucket int, kind backend.Kind, whole, chunk backend.Buffer,
	behind backend.Queue, beside bool) (w backend.Work, err error) {
	d, b := x.d, x.d.buckets[bucket]
	err = residence.Bound(d.comm.Device(), func() error {
		what := d.callOf(b, kind)
		if behind == nil && whole.Len() == 0 {
			w, err = b.start(d.gradComm, what)
			return err
		}
		if behind != nil {
			done, err := behind.Record()
			if err == nil {
				err = b.queue.Wait(done)
			}
			if err != nil {
				return err
			}
		}
		if kind == backend.AllGather && d.mirrors != nil {
			w, err = d.startParts(b, d.mirrors.now, whole, chunk, b.sync, beside)
			return err
		}
		what.Beside = beside
		dst, src := whole, chunk
		if kind == backend.ReduceScatter {
			dst, src = chunk, whole
		}
		if whole.Len() == 0 {
			dst, src = b.operands(what, false)
		}
		w, err = d.gradComm.Start(b.queue, what, dst, src)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("%v: %w", b, err)
	}
	return w, nil
}

// Rows starts to gather the rows of all ranks, in rank order, after the work already started on a
// queue, which then waits for them; on the host, for a nil queue, they are there on return. All
// ranks have the same number of rows.
func (x *Buckets) Rows(q backend.Queue, dst, src backend.Buffer) (w backend.Work, err error) {
	c := backend.Collective{Kind: backend.AllGather, Beside: true,
		Origin: &backend.Origin{Purpose: backend.ForSync}}
	if q == nil {
		err = group.RunOnHost(x.d.comm, c, dst, src)
	} else {
		err = residence.Bound(x.d.comm.Device(), func() (err error) {
			if w, err = x.d.comm.Start(q, c, dst, src); err == nil {
				err = w.Wait(q)
			}
			return err
		})
	}
	if err != nil {
		return w, fmt.Errorf("the rows of lookups: %w", err)
	}
	return w, nil
}

// Layer says that a queue which is being recorded goes on with a layer of the model, "" for the end
// of them. So whoever watches the communicator knows the time of each.
func (x *Buckets) Layer(q backend.Queue, name string) {
	if c, ok := backend.As[interface{ Layer(backend.Queue, string) }](x.d.comm); ok {
		c.Layer(q, name)
	}
}

// Finish waits for what Start has started, and returns its error, which names the bucket.
func (x *Buckets) Finish(bucket int, w backend.Work) error {
	b := x.d.buckets[bucket]
	err := residence.Bound(x.d.comm.Device(), func() error {
		if x.on != nil || b.whole.Len() == 0 {
			return w.Join(context.Background()) // communicators end their waits by themselves
		}
		return b.finish(w)
	})
	if err != nil {
		return fmt.Errorf("%v: %w", b, err)
	}
	return nil
}

// MicroBatches returns how many micro-batches a step has on all ranks with [WithTree], otherwise 0.
func (x *Buckets) MicroBatches() int {
	if x.d.tree == nil {
		return 0
	}
	return x.d.tree.all
}

// Accumulated notes how many of a step's runs have accumulated their gradients, 0 between steps. In
// the middle of a step Save, Load and Close return errors.
func (x *Buckets) Accumulated(done, of int) {
	x.d.mu.Lock()
	defer x.d.mu.Unlock()
	x.d.done, x.d.of = done, of
	if done == 0 {
		x.d.of = 0
	}
}

// Averaged notes whether learnables have averages as their values for a while: Save and Load then
// return errors.
func (x *Buckets) Averaged(is bool) {
	x.d.mu.Lock()
	defer x.d.mu.Unlock()
	x.d.averaged = is
}

// Applied counts a step whose gradients were applied, for [DataParallel.Save].
func (x *Buckets) Applied() {
	x.d.mu.Lock()
	defer x.d.mu.Unlock()
	x.d.saver.Steps++
}

// Scale returns the factor by which to multiply the combined gradients. It is 1, except with
// [WithTree], where they are sums, and after [Buckets.Halve], where they are means.
func (x *Buckets) Scale() float64 { return x.d.scale }

// Weight returns how much the gradient of one run of one rank counts in what the solver gets, the
// combined gradients times Scale: 1/P for the mean over P ranks, 1 for a sum, and 1/n with
// [WithTree] of n micro-batches.
func (x *Buckets) Weight() float64 {
	switch {
	case x.d.tree != nil:
		return x.d.scale
	case x.d.op == backend.Avg:
		return 1 / float64(x.d.comm.Size())
	}
	return 1
}

// Gather returns the notes of all ranks, in their order. It is collective.
func (x *Buckets) Gather(note []byte) (notes [][]byte, err error) {
	err = residence.Bound(x.d.comm.Device(), func() error {
		notes, err = group.FramedOver(backend.Label(x.d.comm, backend.ForMachine))(note)
		return err
	})
	return notes, err
}

// All reports whether a condition holds on all ranks. It is collective.
func (x *Buckets) All(condition bool) (bool, error) {
	not, err := Any(x.d.comm, !condition)
	return !not, err
}

// Compare finds the variables whose values differ between ranks, for [Buckets.Begin]. It is
// collective. Cost: a hash of each variable, and an all-gather of the hashes.
func (x *Buckets) Compare(variables gorgonia.Nodes) error {
	if x.d.comm.Size() == 1 {
		return nil
	}
	return x.compare(slices.DeleteFunc(slices.Clone(variables), x.d.model.declares), x.Gather,
		x.d.comm.Capabilities().Members)
}

// Begin is called before each run. Before the second run it reports the variables that differ
// between ranks and that the program has not changed: data that it set once, or parameters that it
// has not declared.
func (x *Buckets) Begin() {
	names := x.run()
	if names == nil {
		return
	}
	x.d.mu.Lock()
	defer x.d.mu.Unlock()
	x.d.say(fmt.Sprintf("ranks have different values of %s, which no run has changed: if these "+
		"are parameters that nothing trains, declare them by autograd.WithFrozen, and all ranks "+
		"and checkpoints have those of rank 0", strings.Join(names, ", ")))
}

// Fail ends the DataParallel with the error of a step, which the ranks may have exchanged in part,
// and returns it with the rank's name. Err returns it, too.
func (x *Buckets) Fail(err error) error {
	x.d.mu.Lock()
	defer x.d.mu.Unlock()
	if x.d.err != nil {
		return x.d.err
	}
	return x.d.fail(err)
}

// Comm returns the communicator that gradients travel through, for use with [backend.As]:
//
//	if c, ok := backend.As[*sparse.Communicator](dp.Comm()); ok {
//		fmt.Println(c.Counters().Bytes)
//	}
func (d *DataParallel) Comm() backend.Communicator { return d.gradComm }

// Shard says which elements of a parameter a rank updates: in row-major order, those from number
// From up to To, possibly none. They are in chunk Rank of a bucket of Ranks chunks, each of Chunk
// elements, in which the parameter's elements begin at number First.
type Shard struct{ From, To, Chunk, Rank, Ranks, First int }

// Shards splits the buckets among the ranks, and returns this rank's shard of each parameter: the
// rank must update these elements, and its solver must keep vectors for them
// ([solver.Fusion.Vectors]). The result is nil for a single rank, which has all. Start then takes
// reduce-scatters and all-gathers of a bucket: a reduce-scatter leaves the combined gradients of
// this rank's chunk at their places in the slots, an all-gather gives all ranks the content of
// these places.
//
// foreign says that the caller has memory for each call: the buckets free theirs, and there are no
// slots; the first call is then collective. alone says of which parameters ranks have only their
// shards between steps, all of a bucket or none: the caller gathers these itself, in its own
// memory. All other parameters are whole on all ranks between steps.
//
// In an [Elastic] training several ranks have the same shard, all-reduces leave whole gradients, an
// all-gather is a broadcast of each shard by the first of these ranks, and [Buckets.Spread] gives
// all ranks what each has updated, unless they have only shards; the result is nil where all have
// all.
//
// Save writes this rank's shards of parameters and of the solver's vectors to the rank's own file.
// Load reads the rank's shards from the files of any number of ranks.
//
// Errors: ErrUnsupported for [WithTree], whose branches are added by all-reduces, for a compression
// with residuals, which belong to whole buckets, and for the caller's host memory if the
// communicator is on a device.
func (x *Buckets) Shards(foreign bool, alone []bool) ([]Shard, error) {
	d := x.d
	if len(d.queues) == 0 {
		return nil, nil
	}
	refuse := func(why string) error {
		return d.named(fmt.Errorf("%w: shards: %s", backend.ErrUnsupported, why))
	}
	_, stateful := d.compression()
	switch {
	case d.tree != nil && d.mirrors == nil:
		return nil, refuse("with WithTree ranks add branches of a tree by all-reduces: leave one " +
			"of the two out")
	case stateful:
		return nil, refuse("the residuals of WithCompression are of whole buckets: compress to " +
			"16 bits, or not at all")
	case (foreign || slices.Contains(alone, true)) && x.on == nil && d.buckets[0].staged():
		return nil, refuse("gradients are computed on the host, and the communicator is on a " +
			"device: compute on that device, or shard the solver's state alone")
	}
	if d.sharded = d.mirrors == nil || d.sharded; !d.sharded {
		return nil, nil
	}
	d.alone = slices.Contains(alone, true)
	all := make([]Shard, len(d.params))
	for i, p := range d.params {
		of := d.shardOf(p, d.comm.Rank())
		in := fraction{d.comm.Rank(), d.comm.Size()}
		if d.mirrors != nil {
			in = d.mirrors.now[d.comm.Rank()]
		}
		chunk := chunkOf(p.bucket.count(), in.Number, in.Of)
		all[i] = Shard{of.from, of.to, chunk.to - chunk.from, in.Number, in.Of, p.bucket.before(p)}
	}
	if !foreign {
		return all, nil
	}
	d.tape.grads, x.slots = nil, nil
	return all, d.freeBuckets()
}

// ShardOf returns the shard of a rank of a parameter of n elements that is alone in its bucket.
func ShardOf(n, rank, ranks int) Shard {
	s := chunkOf(n, rank, ranks)
	return Shard{min(s.from, n), min(s.to, n), s.to - s.from, rank, ranks, 0}
}

// Unsharded returns the values for all elements of a parameter, given this rank's shard of them. It
// is collective.
func (x *Buckets) Unsharded(param int, shard backend.Buffer) (backend.Buffer, error) {
	if !x.d.sharded {
		return shard, nil
	}
	return x.d.gatherShards(backend.ForPull, x.d.params[param], shard)
}

// Spread gives all ranks the parts of the parameters that ranks have updated, and returns once all
// have them ([Elastic]). On a device own and whole say where a parameter's part and all of it
// are, and it follows the work started on a queue; for the host, with nil, they are the values.
func (x *Buckets) Spread(q backend.Queue, own, whole func(param int) backend.Buffer) error {
	d := x.d
	if !d.sharded {
		return nil
	}
	return residence.Bound(d.comm.Device(), func() error {
		for _, b := range d.buckets {
			share := func() error { return d.share(b, d.mirrors.now, backend.ForSync) }
			if q != nil {
				share = func() error { return d.shareOn(q, b, d.mirrors.now, own, whole) }
			}
			if err := share(); err != nil {
				return err
			}
		}
		d.hold(false)
		_, err := group.OverComm(backend.Label(d.comm, backend.ForSync))([]byte{0})
		return err
	})
}
