//go:build linux

package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"sync"
	"time"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/backend/backendtest"
)

// verb is what a step does.
type verb string

const (
	call   verb = "call"   // a random collective
	queued verb = "queued" // the same on a queue
	train  verb = "train"  // a training
	alloc  verb = "alloc"  // a collective on memory from Alloc
	split  verb = "split"  // groups: a new layer
	meet   verb = "meet"   // a barrier
	part   verb = "part"   // rank 0 leaves, the others go on in a group
)

// action is one step of the program that all ranks run. A Split makes a new layer, in which each
// rank is in one group or in none. Layer 0 is the job.
type action struct {
	verb   verb
	layer  int    // on which it is
	seed   uint64 // of its random numbers
	colors []int  // of a split, by rank of the job
}

func (s action) String() string { return fmt.Sprintf("%s on layer %d", s.verb, s.layer) }

// newSteps makes a random program for ranks ranks.
func newSteps(rng *rand.Rand, ranks int) []action {
	steps := []action{{verb: meet}}
	layers := 1
	for range 5 + rng.IntN(40) {
		s := action{verb: pick(rng, call, call, call, call, call, call, queued, queued, alloc,
			train, split), layer: rng.IntN(layers), seed: rng.Uint64()}
		if s.verb == split {
			s.colors = make([]int, ranks)
			for r := range s.colors {
				s.colors[r] = rng.IntN(4) - 1
			}
			layers++
		}
		steps = append(steps, s)
	}
	if rng.IntN(12) > 0 {
		return append(steps, action{verb: meet})
	}
	s := action{verb: part, colors: make([]int, ranks)}
	s.colors[0] = -1
	return append(steps, s, action{verb: call, layer: layers, seed: rng.Uint64()},
		action{verb: meet, layer: layers})
}

// members returns which ranks are in a group of each layer.
func members(steps []action, ranks int) [][]bool {
	layers := [][]bool{slices.Repeat([]bool{true}, ranks)}
	for _, s := range steps {
		if s.colors == nil {
			continue
		}
		in := make([]bool, ranks)
		for r, color := range s.colors {
			in[r] = layers[s.layer][r] && color >= 0
		}
		layers = append(layers, in)
	}
	return layers
}

// calls returns how many collectives a rank starts at least: those of trainings
// are not counted.
func calls(steps []action, ranks, rank int) (n int) {
	in := members(steps, ranks)
	for _, s := range steps {
		if slices.Contains([]verb{call, queued, alloc, meet}, s.verb) && in[s.layer][rank] {
			n++
		}
	}
	return n
}

// stays returns how many steps a rank takes part in: rank 0 may leave early.
func stays(steps []action, rank int) int {
	if i := slices.IndexFunc(steps, func(s action) bool { return s.verb == part }); i >= 0 &&
		rank == 0 {
		return i
	}
	return len(steps)
}

// member is a rank that runs the program of a job.
type member struct {
	job    job
	rank   int
	build  sync.Locker
	layers []backend.Communicator // nil where the rank is in no group
}

// errLeft is the end of a rank that leaves in the middle.
var errLeft = errors.New("left")

// run runs the program on comm. It closes the groups, and not comm.
func (j job) run(comm backend.Communicator, build sync.Locker) (err error) {
	m := &member{job: j, rank: comm.Rank(), build: build, layers: []backend.Communicator{comm}}
	if j.mode == saves {
		return m.save()
	}
	defer func() {
		if err == nil || !j.abrupt {
			err = errors.Join(err, m.close())
		}
	}()
	for i, s := range j.steps {
		if i == j.failure.step && (m.rank == j.failure.rank || j.failure.name == inside) {
			if err := m.fail(); err != nil {
				return err
			}
		}
		if err := m.step(s); err != nil {
			return fmt.Errorf("step %d, %v: %w", i, s, err)
		}
		if s.verb == part && m.rank == 0 {
			return nil
		}
	}
	return nil
}

func (m *member) close() error {
	var errs []error
	for _, comm := range m.layers[1:] {
		if comm != nil {
			errs = append(errs, comm.Close())
		}
	}
	return errors.Join(errs...)
}

// fail is the failure of the rank, if it is one of those that the program makes.
func (m *member) fail() error {
	switch m.job.failure.name {
	case leave:
		return errLeft
	case closed:
		// what it returns, the run returns again
		time.AfterFunc(m.job.failure.after/100, func() { m.layers[0].Close() })
	case locked:
		m.build.Lock()
		return errors.New("the rank gives up and holds the lock")
	case inside:
		return m.panics()
	case goexit:
		runtime.Goexit()
	case stuck:
		select {}
	}
	return nil
}

// panics runs a collective that all ranks call. The rank that fails says that its call was checked,
// but its buffer is too short, in larger memory. Whoever checks it again refuses it.
func (m *member) panics() error {
	comm := m.layers[0]
	P := comm.Size()
	what := backend.Collective{Kind: backend.AllToAll, Splits: slices.Repeat([]int{3}, P*P)}
	dst, src := backend.Of(make([]float32, 3*P)), backend.Of(make([]float32, 3*P))
	if m.rank != m.job.failure.rank {
		return backend.Run(comm, what, dst, src)
	}
	base := backend.Wrap(comm)
	w, err := base.Pass(nil, what, P*P*3, dst, src.Slice(0, 2))
	if err == nil {
		err = w.Join(context.Background())
	}
	err = fmt.Errorf("a collective that should panic: %w", cmp.Or(err, errNoPanic))
	comm.Abort(err)
	return err
}

// errNoPanic is the error of a collective that took what it should not.
var errNoPanic = errors.New("it did not")

func (m *member) step(s action) error {
	comm := m.layers[s.layer]
	if comm == nil && s.colors != nil {
		m.layers = append(m.layers, nil)
	}
	if comm == nil {
		return nil
	}
	switch s.verb {
	case meet:
		return backend.Barrier(comm)
	case split, part:
		key := int(s.seed%3) * (comm.Size() - comm.Rank()) // the order of the ranks, or another
		group, err := comm.Split(s.colors[m.rank], key)
		if err == nil && s.verb == part && group != nil {
			time.Sleep(lingering)
		}
		m.layers = append(m.layers, group)
		return err
	case train:
		return m.train(comm, s.seed)
	case alloc:
		return shared(comm, s.seed)
	}
	return random(comm, s)
}

// random makes the collective of a step, and checks its result.
func random(comm backend.Communicator, s action) error {
	rng := rand.New(rand.NewPCG(s.seed, 1))
	P := comm.Size()
	what := backend.Collective{Kind: pick(rng, backend.Kinds()...)}
	if what.Kind.Reduces() {
		what.Op = pick(rng, backend.ReduceOps()...)
	}
	if what.Kind.Rooted() {
		what.Root = rng.IntN(P)
	}
	d := pick(rng, backend.F16, backend.BF16, backend.F32, backend.F64, backend.I32, backend.I64,
		backend.U8)
	count := pick(rng, 0, 1, P-1, P, P+1, 33, 1000, 10000)
	if what.Splits = splits(rng, what.Kind, P); what.Splits != nil {
		count = 0
		for _, n := range what.Splits {
			count += n
		}
	}
	if s.verb == call {
		return backendtest.Call(comm, nil, what, d, count, s.seed)
	}
	q, err := comm.Device().NewQueue()
	if err != nil {
		return err
	}
	return errors.Join(backendtest.Call(comm, q, what, d, count, s.seed), q.Close())
}

// splits returns random lengths for the kinds that take some, now and then.
func splits(rng *rand.Rand, kind backend.Kind, P int) []int {
	n := 0
	switch kind {
	case backend.ReduceScatter, backend.AllGather, backend.Gather, backend.Scatter:
		n = P
	case backend.AllToAll:
		n = P * P
	}
	if n == 0 || rng.IntN(3) > 0 {
		return nil
	}
	lengths := make([]int, n)
	for i := range lengths {
		lengths[i] = pick(rng, 0, 1, 7, 100, 1000)
	}
	return lengths
}

// shared sums ones in memory from Alloc.
func shared(comm backend.Communicator, seed uint64) error {
	n := 1 + int(seed%5000)
	memory, err := comm.Alloc(4 * n)
	if err != nil {
		return err
	}
	x := memory.As(backend.I32)
	for i := range n {
		backend.View[int32](x)[i] = int32(i + comm.Rank())
	}
	w, err := comm.Start(nil, backend.Collective{Kind: backend.AllReduce}, x, x)
	if err == nil {
		err = w.Join(context.Background())
	}
	if err != nil {
		return err
	}
	P := comm.Size()
	for i, got := range backend.View[int32](x) {
		if want := int32(P*i + P*(P-1)/2); got != want {
			return &wrongError{fmt.Sprintf("element %d of shared memory is %d, want %d", i, got,
				want)}
		}
	}
	return nil
}

// wrongError is a wrong result.
type wrongError struct{ text string }

func (e *wrongError) Error() string { return e.text }
