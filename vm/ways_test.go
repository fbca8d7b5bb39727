package vm_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/autograd"
	"github.com/euryale-ml/euryale/autograd/solver"
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/backend/compress/half"
	"github.com/euryale-ml/euryale/backend/compress/sparse"
	"github.com/euryale-ml/euryale/internal/elastic"
	"github.com/euryale-ml/euryale/internal/testing/testenv"
	"github.com/euryale-ml/euryale/internal/testing/testranks"
	"github.com/euryale-ml/euryale/ops/nn"
	"github.com/euryale-ml/euryale/rendezvous"
	"github.com/euryale-ml/euryale/vm"
)

// way is a way to train: options of machines, drawn together.
type way struct {
	P        int
	kind     testenv.Kind
	alone    bool // one rank, without WithDataParallel
	shards   int  // a level
	least    bool // memory
	tiles    int  // 0 for none
	steps    string
	micros   int // of steps that are accumulated
	compress string
	frozen   bool // by this package
	declared bool // the frozen variable is part of the model, and so of checkpoints
	in       vm.Precision
	clip     bool
	norm     string
	solver   string
	reads    string // what else reads w0
	sum      bool
	bucket   int  // bytes
	rows     bool // are exchanged in place of the gradients of small tables, too
}

// What a step of a way is.
const (
	single, accumulated, inTree, isElastic = "single", "accumulated", "tree", "elastic"

	wayMicros = 4 // of a tree
	wayRows   = 8 // of a micro-batch
)

func (w way) tree() bool { return w.steps == inTree || w.steps == isElastic }

func drawWay(r *rand.Rand, kinds []testenv.Kind) way {
	of := func(list ...string) string { return list[r.IntN(len(list))] }
	yes := func() bool { return r.IntN(2) == 0 }
	w := way{P: 1 + r.IntN(3), shards: r.IntN(4), least: yes(), tiles: 4 * r.IntN(2),
		kind:  kinds[r.IntN(len(kinds))],
		steps: of(single, accumulated, inTree, isElastic), micros: 2 + r.IntN(2),
		compress: of("", "", "", "half", "half", "sparse"), frozen: yes(), declared: yes(),
		in: []vm.Precision{vm.F32, vm.BF16}[r.IntN(2)], clip: yes(),
		norm:   of("", "batch", "batch", "sync"),
		solver: of("momentum", "adam", "groups", "averages"),
		reads:  of("", "product", "loop", "lookup"),
		sum:    yes(), bucket: []int{1, 200, 1 << 20}[r.IntN(3)]}
	if w.compress == "half" && yes() { // tables and gradients in 16 bits, which little else allows
		w.P, w.shards, w.steps, w.reads = max(w.P, 2), 0, single, "lookup"
	}
	if w.kind == testenv.GPUs { // where NCCL adds more than two in an order of its own
		w.P = min(w.P, 2)
	}
	w.alone, w.rows = w.mayBeAlone(), w.shards == 0
	return w
}

// mayBeAlone reports whether nothing that is passed to WithDataParallel is in checkpoints.
func (w way) mayBeAlone() bool {
	return w.P == 1 && !w.declared && !w.sum && w.compress == "" && w.steps != isElastic
}

// refused says which words the error of New has, "" for none.
func (w way) refused() string {
	switch {
	case w.alone && (w.shards > 0 || w.norm == "sync"):
		return "use WithDataParallel, too"
	case w.steps == isElastic && w.shards > 0:
		return "takes its shards with it"
	case w.norm == "sync" && w.tree():
		return "leave out one of them"
	case w.compress != "" && w.tree():
		return "WithTree: "
	case w.P == 1:
		return ""
	case w.shards > 0 && w.steps == inTree:
		return "WithTree"
	case w.shards > 0 && w.compress == "sparse":
		return "residuals"
	case w.kind == testenv.Staged && (w.shards > 2 || w.shards > 1 && w.steps == single):
		return "compute on that device"
	}
	return ""
}

// plain returns the way whose bits this one has: without what does not change them.
func (w way) plain() way {
	w.shards, w.least, w.frozen = 0, false, false
	if w.compress != "sparse" {
		w.bucket = 1
	}
	if w.tree() {
		if w.P, w.steps = 1, inTree; w.kind != testenv.GPUs {
			w.kind = testenv.Hosts
		}
		w.alone = w.mayBeAlone()
	}
	return w
}

// alike is by how much a way may differ from its plain one: by roundings that docs/shards.md has.
func (w way) alike() float64 {
	switch {
	case w.compress == "half" && w.shards > 0:
		return 1e-2
	case w.clip && w.shards > 0:
		return 1e-6
	}
	return 0
}

// oneRank returns the plainest way to train on as many samples, in F32 on one rank that adds up
// micro-batches, and by how much this one may differ from it; -1 if there is none.
func (w way) oneRank() (one way, near float64) {
	one = way{P: 1, alone: true, kind: testenv.Hosts, steps: accumulated, micros: wayMicros,
		clip: w.clip, norm: w.norm, solver: w.solver, reads: w.reads}
	if !w.tree() {
		one.micros = w.P * w.runs()
	}
	switch {
	case w.compress == "sparse" || w.norm == "sync" || w.sum:
		return one, -1
	case w.in == vm.BF16 || w.compress == "half":
		return one, 0.05
	}
	return one, 1e-4
}

// runs is how many runs a step has on a rank, without a tree.
func (w way) runs() int {
	if w.steps == accumulated {
		return w.micros
	}
	return 1
}

// wayModel classifies rows, with a variable that nothing trains and many classes.
type wayModel struct {
	model
	x, labels, frozen *gorgonia.Node
	list              *gorgonia.Node // of rows of w0, where these are looked up
	norm              *gorgonia.BatchNormOp
	random            *nn.Random
}

func (w way) model(t testing.TB) *wayModel {
	const in, hidden, classes = 5, 6, 24
	m := &wayModel{model: model{g: gorgonia.NewGraph()}, random: nn.NewRandom(3)}
	dt := tensor.Float32
	m.x, m.frozen = m.variable("x", dt, wayRows, in), m.variable("frozen", dt, in, hidden)
	m.labels = gorgonia.NewVector(m.g, tensor.Int, gorgonia.WithShape(wayRows),
		gorgonia.WithName("labels"), gorgonia.WithValue(tensor.New(tensor.WithShape(wayRows),
			tensor.Of(tensor.Int))))
	w0, bias, head := m.variable("w0", dt, in, hidden), m.variable("bias", dt, 1, hidden),
		m.variable("head", dt, hidden, classes)
	m.params = gorgonia.Nodes{w0, bias, head}
	h := must(gorgonia.Add(must(gorgonia.Mul(m.x, w0)), must(gorgonia.Mul(m.x, m.frozen))))
	switch w.reads {
	case "product":
		h = must(gorgonia.Add(h, must(gorgonia.Mul(must(gorgonia.Square(m.x)), w0))))
	case "lookup":
		m.list = gorgonia.NewVector(m.g, tensor.Int, gorgonia.WithShape(wayRows),
			gorgonia.WithName("list"), gorgonia.WithValue(tensor.New(tensor.WithShape(wayRows),
				tensor.Of(tensor.Int))))
		h = must(gorgonia.Add(h, must(nn.Embedding(w0, m.list))))
	case "loop":
		h = must(gorgonia.Add(h, must(gorgonia.Mul(m.x, must(gorgonia.Tanh(w0))))))
	}
	h = must(gorgonia.BroadcastAdd(h, bias, nil, []byte{0}))
	if w.norm != "" {
		gain := m.variable("gain", dt, 1, hidden)
		shift := m.variable("shift", dt, 1, hidden)
		m.params = append(m.params, gain, shift)
		y, _, _, norm, err := gorgonia.BatchNorm(h, gain, shift, 0.25, 1e-1)
		h, m.norm = must(y, err), norm
	}
	h = must(nn.Dropout(0.25, m.random, must(gorgonia.Tanh(h))))
	loss := must(nn.CrossEntropy(nn.NoLabel, must(gorgonia.Mul(h, head)), m.labels))
	m.grad(t, must(gorgonia.Div(loss, gorgonia.NewConstant(float32(w.runs())))))
	return m
}

// feed gives the model micro-batch i of a step.
func (m *wayModel) feed(step, i int) {
	m.random.Seek(uint64(step), i*wayRows)
	x, labels := m.x.Value().Data().([]float32), m.labels.Value().Data().([]int)
	for k := range x {
		x[k] = float32(math.Sin(float64(1 + k + 37*i + 101*step)))
	}
	for k := range labels {
		labels[k] = (7*k + 5*i + 3*step) % 24
		if m.list != nil {
			m.list.Value().Data().([]int)[k] = (3*k + 2*i + step) % 5
		}
	}
}

// solvers returns what updates the parameters. Epsilons are so large that roundings of small
// gradients stay small.
func (w way) solvers(params gorgonia.Nodes) []vm.Option {
	adam := &solver.Adam{Rate: 0.05, Epsilon: 0.05}
	switch w.solver {
	case "momentum":
		return []vm.Option{vm.WithSolver(&solver.Momentum{Rate: 0.125, Momentum: 0.5,
			WeightDecay: 0.125}, params...)}
	case "groups":
		return []vm.Option{vm.WithSolver(&solver.AdamW{Rate: 0.05, Epsilon: 0.05,
			WeightDecay: 0.1}, params[1:]...), vm.WithSolver(&solver.SGD{Rate: 0.125}, params[0])}
	case "averages":
		return []vm.Option{vm.WithSolver(&solver.EMA{Solver: adam, Decay: 0.75}, params...)}
	}
	return []vm.Option{vm.WithSolver(adam, params...)}
}

// options returns the options of a machine.
func (w way) options(r ranked, m *wayModel) (options []vm.Option, err error) {
	data := []autograd.Option{autograd.WithBuckets(1, w.bucket), autograd.WithRandom(m.random)}
	if w.sum {
		data = append(data, autograd.WithSum())
	}
	switch w.compress {
	case "half":
		data = append(data, autograd.WithCompression(half.Wrap(backend.BF16)))
	case "sparse":
		data = append(data, autograd.WithCompression(sparse.Wrap(sparse.TopK(0.25))))
	}
	if w.declared {
		data = append(data, autograd.WithFrozen(m.frozen))
	}
	options = append(options, vm.WithPrecision(w.in), vm.Notice(func(string) {}))
	if w.frozen {
		options = append(options, vm.WithFrozen(m.frozen))
	}
	if w.shards > 0 {
		options = append(options, vm.WithShards(levels[w.shards-1]))
	}
	if w.rows {
		options = append(options, vm.WithAnyTable())
	}
	if w.tiles > 0 {
		options = append(options, vm.WithLossTiles(w.tiles))
	}
	if w.least {
		options = append(options, vm.WithLeastMemory())
	}
	if w.clip {
		options = append(options, vm.ClipNorm(0.125))
	}
	if w.norm == "sync" {
		options = append(options, vm.SyncBatchNorm())
	}
	options = append(options, w.solvers(m.params)...)
	switch w.steps {
	case accumulated:
		options = append(options, vm.Accumulate(w.runs()))
	case inTree:
		options = append(options, vm.WithTree(wayMicros))
	case isElastic:
		return append(options, vm.WithElastic(context.Background(), newGeneration(r), wayMicros,
			data...)), nil
	}
	if !w.alone {
		options = append(options, vm.WithDataParallel(r.Comm, data...))
	}
	return options, nil
}

// generation is an elastic job whose ranks do not change.
type generation struct {
	comm backend.Communicator
	job  *elastic.Job
}

func newGeneration(r ranked) *generation {
	ids := make([]elastic.ID, r.Comm.Size())
	for i := range ids {
		ids[i] = elastic.ID(i + 1)
	}
	job := elastic.Start(r.register, ids[r.Comm.Rank()],
		elastic.Limits{Least: len(ids), Most: len(ids)}, elastic.First(ids...), time.Minute, nil)
	return &generation{r.Comm, job}
}

// Next implements [autograd.Job].
func (g *generation) Next(ctx context.Context, leave func(elastic.View) error) (
	backend.Communicator, elastic.View, error) {
	v, _, err := g.job.Next(ctx)
	if err == nil {
		err = leave(v)
	}
	if err == nil {
		g.job.Connected(v.Generation)
	}
	return g.comm, v, err
}

func (g *generation) Job() *elastic.Job                  { return g.job }
func (g *generation) Release(backend.Communicator) error { return nil }

// Close implements [autograd.Job].
func (g *generation) Close(bool) error {
	g.job.Finish(0)
	g.job.Close()
	return nil
}

// machine makes the machine of a rank, with another frozen variable if it is to load a checkpoint.
func (w way) machine(r ranked, from string) (*wayModel, *vm.Machine, error) {
	r.lock.Lock()
	m := w.model(r.t)
	r.lock.Unlock()
	if from != "" && w.declared {
		m.frozen.Value().Data().([]float32)[0]++
	}
	options, err := w.options(r, m)
	if err != nil {
		return nil, nil, err
	}
	device := r.device
	if w.steps == isElastic {
		device = nil
	}
	machine, err := vm.New(m.g, device, options...)
	return m, machine, err
}

// step does a step.
func (w way) step(m *wayModel, machine *vm.Machine, step int) error {
	first, n, _ := machine.MicroBatches()
	if e := machine.Elastic(); e != nil {
		_, err := e.Step(func(i int) (float64, error) {
			m.feed(step, i)
			return 0, machine.RunAll()
		})
		return err
	}
	for i := range n {
		m.feed(step, first+i)
		if err := machine.RunAll(); err != nil {
			return err
		}
	}
	return nil
}

// left is what a training has left on a rank: parameters, and the averages of a batch norm.
func (m *wayModel) left(t testing.TB) [][]float64 {
	all := m.weights(t)
	if m.norm != nil {
		mean, variance := m.norm.Stats()
		all = append(all, floats(t, mean), floats(t, variance))
	}
	return append(all, floats(t, m.frozen.Value()))
}

// parameters is how many parameters the model has, which are what is left first.
func (w way) parameters() int {
	if w.norm == "" {
		return 3
	}
	return 5
}

// leg is a part of a training: from a checkpoint, "" for none, for some steps from number first on.
// It saves before the last one, if that is wanted.
type leg struct {
	from        string
	first, n    int
	save, async string // directories
}

// train trains and returns what is left, moving averages among it.
func (w way) train(t *testing.T, l leg) (left [][]float64, err error) {
	all := make([][][]float64, w.P)
	register := rendezvous.NewMemStore()
	errs := together(t, w.kind, w.P, func(r ranked) error {
		r.register = register
		m, machine, err := w.machine(r, l.from)
		if err != nil {
			return err
		}
		dp := machine.DataParallel()
		switch e := machine.Elastic(); {
		case l.from == "":
		case e != nil:
			err = e.Load(l.from)
		default: // and of a step from other parameters nothing is left
			err = errors.Join(w.step(m, machine, 7), dp.Load(l.from, machine.Solver(), nil))
		}
		for step := range l.n {
			if err != nil {
				break
			}
			if step == l.n-1 {
				if l.save != "" {
					err = dp.Save(l.save, machine.Solver(), nil)
				}
				if l.async != "" {
					err = errors.Join(err, dp.SaveAsync(l.async, machine.Solver(), nil))
				}
			}
			err = errors.Join(err, w.step(m, machine, l.first+step))
		}
		if err == nil {
			err = dp.Check()
		}
		var averages [][]float64
		if err == nil && w.solver == "averages" {
			err = machine.Averaged(func() error { averages = m.weights(t); return nil })
		}
		if err = errors.Join(err, machine.Close()); err == nil {
			all[r.Comm.Rank()] = append(m.left(t), averages...)
		}
		return err
	})
	if err := testranks.Join(errs); err != nil {
		return nil, err
	}
	same(t, all)
	return all[0], nil
}

// apart returns by how much two trainings differ.
func apart(a, b [][]float64) (most float64) {
	for i := range a {
		for k, x := range a[i] {
			if d := math.Abs(x - b[i][k]); !(d <= most) {
				most = d
			}
		}
	}
	return most
}

// TestWaysOfTraining draws two ways from each seed. The first one trains, and saves before its last
// step, behind the training, too. The other one loads that, and does this step. All is as in plain
// ways, bit for bit, or New refuses a way with words that say why.
func TestWaysOfTraining(t *testing.T) {
	seeds := uint64(15)
	if full() {
		seeds = 1500
	}
	for seed := range seeds {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			waysOfTraining(t, seed, testenv.Hosts, testenv.Devices, testenv.Staged)
		})
	}
}

func waysOfTraining(t *testing.T, seed uint64, kinds ...testenv.Kind) {
	const steps = 3
	r, dir := rand.New(rand.NewPCG(seed, 1)), t.TempDir()
	at := func(name string) string { return filepath.Join(dir, name) }
	w := drawWay(r, kinds)
	got, err := w.train(t, leg{n: steps, save: at("save"), async: at("async")})
	if why := w.refused(); why != "" {
		known := errors.Is(err, backend.ErrArgument) || errors.Is(err, backend.ErrUnsupported)
		if !known || !strings.Contains(err.Error(), why) {
			t.Errorf("%+v: %v, want an error with %q", w, err, why)
		}
		return
	}
	if err != nil {
		t.Fatalf("%+v: %v", w, err)
	}
	want := w.plain().must(t, leg{n: steps, save: at("plain")})
	if d := apart(got, want); !(d <= w.alike()) {
		t.Errorf("%+v differs by %g from the plain way", w, d)
	}
	if one, near := w.oneRank(); near > 0 {
		n := w.parameters()
		if d := apart(got[:n], one.must(t, leg{n: steps})[:n]); !(d <= near) {
			t.Errorf("%+v differs by %g from one rank", w, d)
		}
	}
	for _, from := range []string{"save", "async"} {
		o := w.other(r, kinds)
		got := o.must(t, leg{from: at(from), first: steps - 1, n: 1})
		want := o.plain().must(t, leg{from: at("plain"), first: steps - 1, n: 1})
		if d := apart(got, want); !(d <= max(w.alike(), o.alike())) {
			t.Errorf("%+v, from %s of %+v, differs by %g", o, from, w, d)
		}
	}
}

// other draws a way that can load checkpoints of this one.
func (w way) other(r *rand.Rand, kinds []testenv.Kind) way {
	o := drawWay(r, kinds)
	o.solver, o.compress, o.declared, o.sum = w.solver, w.compress, w.declared, w.sum
	o.reads = w.reads
	if o.compress == "sparse" { // residuals are of ranks, and of buckets
		o.P, o.bucket = w.P, w.bucket
	}
	if (o.norm == "") != (w.norm == "") {
		o.norm = w.norm
	}
	if w.tree() != o.tree() {
		o.steps = w.steps
	}
	if o.alone = o.mayBeAlone(); o.refused() != "" {
		return w.plain()
	}
	return o
}

// must is train of a way that nothing refuses.
func (w way) must(t *testing.T, l leg) [][]float64 {
	t.Helper()
	left, err := w.train(t, l)
	if err != nil {
		t.Fatalf("%+v: %v", w, err)
	}
	return left
}
