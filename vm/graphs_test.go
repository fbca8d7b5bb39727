package vm_test

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/autograd"
	"github.com/euryale-ml/euryale/autograd/solver"
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/backend/compress/half"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/internal/testing/testenv"
	"github.com/euryale-ml/euryale/internal/testing/testranks"
	"github.com/euryale-ml/euryale/internal/vm/graphs"
	"github.com/euryale-ml/euryale/internal/vm/interpret"
	"github.com/euryale-ml/euryale/internal/vm/ir"
	"github.com/euryale-ml/euryale/internal/vm/lower"
	"github.com/euryale-ml/euryale/internal/vm/plan"
	blocks "github.com/euryale-ml/euryale/layers"
	"github.com/euryale-ml/euryale/ops/nn"
	"github.com/euryale-ml/euryale/vm"
)

// trial is a graph and how it runs. What is not drawn is a function of the seed.
type trial struct {
	seed   uint64
	graph  *graphs.Graph
	graded bool
	solver string // "" for none
	micro  int    // runs of a step
	steps  int
	limits []plan.Limits // by devices
	frozen uint64        // with the hash of a name: which variables
}

// bench is where trials run: one rank of them.
type bench struct {
	comm    backend.Communicator // nil for one rank
	layout  *blocks.Layout
	devices []backend.Device
	lock    *sync.Mutex // to build graphs
	*figures
}

// figures say how much the trials compare.
type figures struct {
	graphs, elements, exact, vague             int
	trained, forward, refused, failed, doubled int
}

func (f *figures) String() string {
	return fmt.Sprintf("%d graphs, %d elements compared, %d bit for bit, %d vaguely; "+
		"%d graphs trained, %d without a gradient, %d that Gorgonia cannot build, "+
		"%d compared with Gorgonia's own results",
		f.graphs, f.elements, f.exact, f.vague, f.trained, f.forward, f.refused, f.doubled)
}

// exactSolvers have rates that are powers of two, so that integers stay exact for some steps.
var exactSolvers = map[string]func() solver.Solver{
	"sgd": func() solver.Solver { return &solver.SGD{Rate: 0.25} },
	"momentum": func() solver.Solver {
		return &solver.Momentum{Rate: 0.25, Momentum: 0.5, WeightDecay: 0.5}
	},
	"adam":  func() solver.Solver { return &solver.Adam{Rate: 0.25} },
	"adamw": func() solver.Solver { return &solver.AdamW{Rate: 0.25, WeightDecay: 0.5} },
}

func (b bench) place() graphs.Needs {
	return graphs.Needs{Comm: b.comm, Layout: b.layout, Random: nn.NewRandom(1)}
}

// draw draws the trial of a seed.
func (b bench) draw(seed uint64) trial {
	return b.drawBy(seed, rand.New(rand.NewPCG(seed, 11)).IntN)
}

func (b bench) drawBy(seed uint64, next graphs.Next) trial {
	b.lock.Lock()
	defer b.lock.Unlock()
	t := trial{seed: seed, graded: next(4) > 0, micro: 1, steps: 3}
	t.graph = graphs.Draw(b.place(), 3+next(18), next)
	if t.graded && (b.comm != nil || next(2) == 0) {
		t.solver = []string{"sgd", "momentum", "adam", "adamw"}[next(4)]
		if t.graph.Whole {
			t.solver = []string{"sgd", "momentum"}[next(2)]
		}
		t.micro = 1 + next(2)
	}
	for range b.devices {
		t.limits = append(t.limits, drawLimits(next))
	}
	t.frozen = uint64(next(1 << 16))
	return t
}

// drawLimits draws those of planning: small ones, with which small graphs take every decision
// of large ones.
func drawLimits(next graphs.Next) plan.Limits {
	of := func(list ...int) int { return list[next(len(list))] }
	if next(3) == 0 {
		l := plan.Standard()
		l.Memory = of(0, -1)
		return l
	}
	return plan.Limits{
		SmallLoop: of(0, 4, 16, 1<<13), LargeLoop: of(1, 8, 16, 1<<20),
		LoopValues: of(2, 4, 8, 64, 64), LoopOperands: of(4, 8, 24, 24),
		ShortRow: of(1, 2, 4, 8192), LongRow: of(2, 4, 65536), ManyRows: of(1, 2, 4),
		RematerializeBytes: of(4, 16, 64, 4<<20), RematerializeOps: of(2, 24, 24),
		Besides: of(1, 2, 64, 64), Search: of(1, 16, 1<<12, 1<<12), Memory: of(0, -1),
	}
}

// gradedGraph is a graph with its gradients, if it has any.
type gradedGraph struct {
	*graphs.Built
	learnables nodes
	variables  nodes
	place      graphs.Needs
	loss       gorgonia.Value
}

// errRefused is why there is nothing to test: Gorgonia cannot build the graph, or cannot
// differentiate it.
var errRefused = errors.New("gorgonia cannot")

func (b bench) build(t trial) (g *gradedGraph, err error) {
	b.lock.Lock()
	defer b.lock.Unlock()
	defer func() {
		if r := recover(); r != nil {
			err = fmt.Errorf("%w: %v", errRefused, r)
		}
	}()
	g = &gradedGraph{place: b.place()}
	if g.Built, err = t.graph.Build(g.place); err != nil {
		return nil, fmt.Errorf("%w: %w", errRefused, err)
	}
	g.variables = slices.Clone(g.Graph.Inputs())
	if t.graded {
		g.learnables = g.Learnables()
		if _, err := gorgonia.Grad(g.Loss(), g.learnables...); err != nil {
			return nil, fmt.Errorf("%w: %w", errRefused, err)
		}
	}
	gorgonia.Read(g.Loss(), &g.loss)
	return g, nil
}

// feed gives variables the small integers of a run: new tensors, or in place.
func (b bench) feed(t trial, g *gradedGraph, run int) error {
	for i, n := range g.variables {
		if run > 0 && t.solver != "" && slices.Contains(g.learnables, n) {
			continue
		}
		source := rand.New(rand.NewPCG(t.seed<<16|uint64(run)<<8, hashOf(n.Name())))
		if run > 0 && (t.solver == "" && source.IntN(3) == 0 || t.isFrozen(g, n) &&
			source.IntN(2) == 0) {
			continue // as it was
		}
		// All ranks begin with the same learnables.
		if t.solver == "" || !slices.Contains(g.learnables, n) {
			for range b.rank() {
				source.Uint64()
			}
		}
		limit := t.graph.Limit(n.Name())
		v := filled(n, func(int) float64 {
			if limit > 0 {
				return float64(source.IntN(limit))
			}
			return float64(source.IntN(5) - 2)
		})
		if old, ok := n.Value().(*tensor.Dense); ok && (i+run)%2 == 0 && !t.isFrozen(g, n) {
			for k, x := range elements(v) {
				set(old, k, x)
			}
			continue
		}
		if err := gorgonia.Let(n, v); err != nil {
			return err
		}
	}
	g.place.Random.Seek(uint64(run), 0)
	return nil
}

func hashOf(s string) (h uint64) {
	for _, c := range s {
		h = h*31 + uint64(c)
	}
	return h
}

func (b bench) rank() int {
	if b.comm == nil {
		return 0
	}
	return b.comm.Rank()
}

// expected is what is compared: values after each run, and learnables after all of them.
type expected struct {
	nodes  gorgonia.Nodes
	names  []string
	runs   [][]interpret.Array // by nodes
	params []interpret.Array
}

// try runs a trial, and returns what is wrong.
func (b bench) try(t trial) error {
	g, err := b.build(t)
	if errors.Is(err, errRefused) && t.graded {
		t.graded, t.solver = false, ""
		if g, err = b.build(t); err == nil {
			b.forward++
		}
	}
	if errors.Is(err, errRefused) {
		b.refused++
		return nil
	}
	if err != nil {
		return err
	}
	if t.solver != "" && len(g.learnables) == 0 {
		t.solver = ""
	}
	want, err := b.expect(t, g)
	if err != nil {
		return fmt.Errorf("the reference: %w", err)
	}
	if t.seed%8 == 0 && b.comm == nil && !t.graph.Writes() && len(nn.Defects(g.Graph)) == 0 {
		if err := b.byDo(t, g, want); err != nil {
			return fmt.Errorf("by the Do of each operation: %w", err)
		}
	}
	for i, d := range b.devices {
		if err := b.runOn(t, g, d, t.limits[i], want); err != nil {
			return fmt.Errorf("on %s: %w", deviceName(d), err)
		}
	}
	if t.solver != "" {
		b.trained++
	}
	return nil
}

// byDo compares the reference with the operations of Gorgonia themselves, one by one: that the
// program means the graph.
func (b bench) byDo(t trial, g *gradedGraph, want *expected) error {
	if err := b.feed(t, g, 0); err != nil {
		return err
	}
	values, err := func() (values map[node]gorgonia.Value, err error) {
		defer func() {
			if r := recover(); r != nil {
				err = fmt.Errorf("a panic: %v", r)
			}
		}()
		return byDo(g.Graph)
	}()
	if err != nil { // Gorgonia cannot run all that it builds
		return nil
	}
	apart := bench{figures: &figures{}}
	for i, n := range want.nodes {
		w := want.runs[0][i]
		w.Data = slices.Clone(w.Data)
		for k := range w.Data { // Gorgonia's formulas may round where ours do not
			w.Data[k].Err += tolerances[t.graph.DType] * max(1, math.Abs(w.Data[k].Value))
		}
		if err := apart.compare(values[n], w); err != nil {
			return fmt.Errorf("%s: %w", want.names[i], err)
		}
	}
	b.doubled++
	return nil
}

func deviceName(d backend.Device) string {
	if d == nil {
		return "host"
	}
	return d.Name()
}

// isFrozen reports whether a machine is told that nothing changes a variable.
func (t trial) isFrozen(g *gradedGraph, n node) bool {
	return t.frozen%3 > 0 && (hashOf(n.Name())^t.frozen)%5 < 3 &&
		(t.solver == "" || !slices.Contains(g.learnables, n))
}

// watched returns the nodes whose values are compared: the loss, kept values, and gradients.
func (t trial) watched(g *gradedGraph) *expected {
	e := &expected{}
	add := func(n node, name string) {
		e.nodes, e.names = append(e.nodes, n), append(e.names, name)
	}
	if g.Loss().Op() != nil { // a learnable is seen after its step
		add(g.Loss(), "the loss")
	}
	for _, k := range t.graph.Kept {
		if g.Nodes[k].Op() != nil {
			add(g.Nodes[k], fmt.Sprint("kept v", k))
		}
	}
	for i, n := range g.learnables {
		if t.solver == "" || i%3 == 0 && t.seed%2 == 0 {
			add(n.Deriv(), "the gradient of "+n.Name())
		}
	}
	return e
}

// expect runs the reference.
func (b bench) expect(t trial, g *gradedGraph) (*expected, error) {
	e := t.watched(g)
	if err := b.feed(t, g, 0); err != nil {
		return nil, err
	}
	var by solver.Solver
	if t.solver != "" {
		by = exactSolvers[t.solver]()
	}
	r, err := newPlainRun(*g, by, t.micro)
	if err != nil {
		return nil, err
	}
	if b.comm != nil {
		r.average = func(p part) error { return b.average(p.Array, t.halves() && !p.rows) }
		if t.halves() {
			if r.tables, err = b.tables(t, g, r); err != nil {
				return nil, err
			}
		}
	}
	for run := range t.steps * t.micro {
		if err := b.feed(t, g, run); err != nil {
			return nil, err
		}
		for _, n := range r.read.Inputs {
			if t.solver == "" || !slices.Contains(g.learnables, n) {
				r.values[n] = arrayOf(n.Value())
			}
		}
		values, err := r.run(e.nodes)
		if err != nil {
			return nil, err
		}
		e.runs = append(e.runs, values)
	}
	for _, n := range g.learnables {
		e.params = append(e.params, r.values[n])
	}
	return e, nil
}

// halves reports whether ranks exchange gradients in BF16.
func (t trial) halves() bool { return t.seed%3 == 1 }

// shards returns how ranks shard learnables, if they do.
func (t trial) shards(g *gradedGraph) []vm.Option {
	stage := len(g.learnables) % 4
	if stage == 0 || t.seed%2 == 0 {
		return nil
	}
	return []vm.Option{vm.WithShards(stages[stage-1])}
}

// tables returns the tables of which ranks exchange rows, which do not travel in BF16. There are
// none with shards, and where runs are added up.
func (b bench) tables(t trial, g *gradedGraph, r *plainRun) ([]lower.Table, error) {
	if b.comm == nil || t.micro > 1 || t.shards(g) != nil {
		return nil, nil
	}
	var gradients []ir.ID
	for _, n := range g.learnables {
		id, ok := r.read.Value(n.Deriv())
		if !ok {
			return nil, fmt.Errorf("%v has no gradient", n)
		}
		gradients = append(gradients, id)
	}
	return lower.Tables(&r.read.Program, gradients...), nil
}

// inHalf rounds x to BF16, to nearest even, and its bounds. A machine may round to F32 before.
func inHalf(x interpret.Number) interpret.Number {
	if !(math.Abs(x.Value)+x.Err < math.MaxFloat32/2) {
		return interpret.Number{Value: x.Value, Err: math.Inf(1)}
	}
	err := x.Err
	if err > 0 || float64(float32(x.Value)) != x.Value {
		err += math.Abs(x.Value)/(1<<24) + 0x1p-126
	}
	y := nearest(x.Value)
	return interpret.Number{
		Value: y, Err: max(nearest(x.Value+err)-y, y-nearest(x.Value-err)),
	}
}

// nearest is the number of BF16 next to x: it has eight digits, and ends where F32 does.
func nearest(x float64) float64 {
	_, exponent := math.Frexp(x)
	last := max(exponent-8, -133)
	return math.Ldexp(math.RoundToEven(math.Ldexp(x, -last)), last)
}

// average makes a gradient the mean over all ranks, which round it and then the mean, or neither.
func (b bench) average(a interpret.Array, rounds bool) error {
	var numbers []*float64
	if rounds {
		for i, x := range a.Data {
			a.Data[i] = inHalf(x)
		}
	}
	for i := range a.Data {
		numbers = append(numbers, &a.Data[i].Value, &a.Data[i].Err)
	}
	if err := autograd.Sum(b.comm, numbers...); err != nil {
		return err
	}
	for _, x := range numbers {
		*x /= float64(b.comm.Size())
	}
	if rounds {
		for i, x := range a.Data {
			a.Data[i] = inHalf(x)
		}
	}
	return nil
}

// options returns the options of a trial's machine.
func (b bench) options(t trial, g *gradedGraph, d backend.Device, limits plan.Limits,
	want *expected) []vm.Option {
	options := []vm.Option{vm.Keep(want.nodes...), vm.WithLimits(limits)}
	for _, n := range g.variables {
		if t.isFrozen(g, n) {
			options = append(options, vm.WithFrozen(n))
		}
	}
	if _, ok := d.(lastly); ok { // which does not round
		options = append(options, vm.WithPrecision(vm.TF32))
	}
	if t.solver == "" {
		return options
	}
	options = append(options, vm.WithSolver(exactSolvers[t.solver](), g.learnables...))
	if t.micro > 1 {
		options = append(options, vm.Accumulate(t.micro))
	}
	if b.comm != nil {
		data := []autograd.Option{autograd.WithBuckets(1, 40)}
		if t.halves() {
			data = append(data, autograd.WithCompression(half.Wrap(backend.BF16)))
		}
		options = append(options, vm.WithAnyTable(), vm.WithDataParallel(b.comm, data...))
		options = append(options, t.shards(g)...)
	}
	return options
}

// runOn runs a trial on a device. All that New may report are faults of Gorgonia.
func (b bench) runOn(t trial, g *gradedGraph, d backend.Device, limits plan.Limits,
	want *expected) (err error) {
	if err := b.feed(t, g, 0); err != nil {
		return err
	}
	var said []string
	notice := vm.Notice(func(text string) {
		ofGorgonia := strings.Contains(text, "operation of Gorgonia that is wrong") ||
			strings.Contains(text, "Gorgonia's own machines compute")
		if !ofGorgonia {
			said = append(said, text)
		}
	})
	m, err := vm.New(g.Graph, d, append(b.options(t, g, d, limits, want), notice)...)
	if err != nil {
		return err
	}
	defer func() {
		if err = errors.Join(err, m.Close()); err != nil {
			err = fmt.Errorf("%w\nlimits %+v\n%v", err, limits, m.Plan())
		}
	}()
	if said != nil {
		return fmt.Errorf("New says %q", said)
	}
	return b.runs(t, g, m, want)
}

// runs runs a machine, and returns the first difference: the other ranks go on.
func (b bench) runs(t trial, g *gradedGraph, m *vm.Machine, want *expected) (wrong error) {
	check := func(v gorgonia.Value, w interpret.Array, what string, run int) {
		if err := b.compare(v, w); err != nil && wrong == nil {
			wrong = fmt.Errorf("run %d, %s: %w", run, what, err)
		}
	}
	for run, values := range want.runs {
		if err := errors.Join(b.feed(t, g, run), m.RunAll()); err != nil {
			return err
		}
		for i, n := range want.nodes {
			check(n.Value(), values[i], want.names[i], run)
		}
		check(g.loss, values[0], "the loss that is read", run)
	}
	if t.solver == "" {
		return wrong
	}
	if err := m.Pull(g.learnables...); err != nil {
		return err
	}
	for i, n := range g.learnables {
		check(n.Value(), want.params[i], n.Name()+" after all steps", len(want.runs)-1)
	}
	return wrong
}

// compare returns an error if an element is not what it may be.
func (b bench) compare(v gorgonia.Value, want interpret.Array) error {
	if v == nil {
		return errors.New("there is no value")
	}
	got := elements(v)
	if len(got) != len(want.Data) {
		return fmt.Errorf("there are %d elements, want %d", len(got), len(want.Data))
	}
	for i, x := range got {
		w := want.Data[i]
		b.elements++
		switch {
		case w.Err == 0:
			b.exact++
		case !(w.Err <= 1e-3*max(1, math.Abs(w.Value))):
			b.vague++
		}
		if !w.Allows(x) {
			return fmt.Errorf("element %d is %v, want %v within %g", i, x, w.Value, w.Err)
		}
	}
	return nil
}

// check runs the trial of a seed. Of one that fails it prints the smallest graph that does, and
// how to run it again.
func (b bench) check(t *testing.T, seed uint64) {
	t.Helper()
	first := b.draw(seed)
	err := b.try(first)
	if err == nil {
		return
	}
	again := fmt.Sprintf("EURYALE_GRAPH=%d go test ./vm -run %s", seed, t.Name())
	if b.failed++; b.failed > 3 { // the first ones take time enough
		t.Errorf("seed %d: %v\n%s", seed, err, again)
		return
	}
	apart := b
	apart.figures = &figures{}
	small := first
	small.graph = graphs.Shrink(first.graph, func(g *graphs.Graph) bool {
		try := first
		try.graph = g
		return apart.try(try) != nil
	})
	t.Errorf("seed %d: %v\n%s\n\n"+
		"The smallest graph that fails, with solver %q, %d runs a step:\n%v%v",
		seed, err, again, small.solver, small.micro, small.graph, apart.try(small))
}

// longest is how long the full product may take.
const longest = 22 * time.Minute

// seeds are the graphs of a test: as many as a sample has, or the full product, or those of
// EURYALE_GRAPH: one, 17, or from one up to another, 0-20000.
type seeds struct {
	next  atomic.Uint64
	end   uint64
	until time.Time
}

func newSeeds(t testing.TB, sample, full uint64) *seeds {
	t.Helper()
	s := &seeds{end: sample, until: time.Now().Add(longest)}
	if os.Getenv("EURYALE_FULL") == "1" {
		s.end = full
	}
	if text := os.Getenv("EURYALE_GRAPH"); text != "" {
		from, to, several := strings.Cut(text, "-")
		seed, err := strconv.ParseUint(from, 10, 64)
		if s.end = seed + 1; several && err == nil {
			s.end, err = strconv.ParseUint(to, 10, 64)
			s.until = s.until.AddDate(1, 0, 0) // as long as it takes
		}
		require.NoError(t, err)
		s.next.Store(seed)
	}
	return s
}

// take returns the next seed; false if there is none, or the time is up.
func (s *seeds) take() (uint64, bool) {
	seed := s.next.Add(1) - 1
	return seed, seed < s.end && time.Now().Before(s.until)
}

// layout returns that of one rank, for blocks of package layers.
func layout(t testing.TB) *blocks.Layout {
	t.Helper()
	rank := testranks.New(t, 1, time.Minute, testenv.Hosts.Connect(t, 1)).Ranks[0]
	l := require.Value(blocks.NewLayout(rank.Comm, 1, 1, 1))(t)
	t.Cleanup(func() {
		require.NoError(t, l.Close())
	})
	return l
}

// TestRandomGraphsAreThePlainInterpretation runs random graphs, on the host and on a device whose
// memory the host cannot touch, and compares losses, gradients and trained learnables with an
// interpreter of one value at a time.
func TestRandomGraphsAreThePlainInterpretation(t *testing.T) {
	list, l, lock := newSeeds(t, 500, 100_000), layout(t), &sync.Mutex{}
	var all figures
	var workers sync.WaitGroup
	for range runtime.GOMAXPROCS(0) {
		devices := []backend.Device{nil, lastly{fake(t)}}
		b := bench{layout: l, devices: devices, lock: lock, figures: &figures{}}
		workers.Go(func() {
			b.checkAll(t, list)
			lock.Lock()
			defer lock.Unlock()
			all.add(b.figures)
		})
	}
	workers.Wait()
	all.sharp(t)
}

// checkAll runs the trials of all seeds.
func (b bench) checkAll(t *testing.T, list *seeds) {
	for seed, ok := list.take(); ok; seed, ok = list.take() {
		b.check(t, seed)
		b.graphs++
	}
}

// add adds the figures of some trials.
func (f *figures) add(g *figures) {
	f.graphs += g.graphs
	f.elements, f.exact, f.vague = f.elements+g.elements, f.exact+g.exact, f.vague+g.vague
	f.trained, f.forward, f.refused = f.trained+g.trained, f.forward+g.forward, f.refused+g.refused
	f.doubled += g.doubled
}

// sharp reports the figures, and an error if the trials compare too little, or with bounds that are
// too wide.
func (f *figures) sharp(t *testing.T) {
	t.Log(f)
	few := f.trained < f.graphs/5 || f.refused > f.graphs/20
	require.Check(t, f.graphs < 100 || !few && f.exact >= f.elements/4 && f.vague <= f.elements/10,
		"the trials are not sharp: %v", f)
}

// TestRandomGraphsOfRanksAreThePlainInterpretation: ranks exchange activations in the middle of
// their graphs, and gradients at the end.
func TestRandomGraphsOfRanksAreThePlainInterpretation(t *testing.T) {
	kinds := []testenv.Kind{testenv.Hosts, testenv.Devices}
	testenv.Each(t, kinds, func(t *testing.T, k testenv.Kind) {
		randomGraphsOfRanks(t, k, 50)
	})
}

func randomGraphsOfRanks(t *testing.T, k testenv.Kind, n uint64) {
	err := testranks.Join(together(t, k, 2, func(r ranked) error {
		l, err := blocks.NewLayout(r.Comm, 1, 1, 2)
		testranks.NoError(err)
		devices := []backend.Device{r.device}
		b := bench{comm: r.Comm, layout: l, devices: devices, lock: r.lock, figures: &figures{}}
		list := newSeeds(r.t, n, 20*n)
		list.until = list.until.Add(longest) // all ranks take as many
		for seed, ok := list.take(); ok && err == nil; seed, ok = list.take() {
			err = b.together(seed)
			b.graphs++
		}
		if r.Comm.Rank() == 0 {
			r.t.Log(b.figures)
		}
		return errors.Join(err, l.Close())
	}))
	require.Report(t, err)
}

// together runs the trial of a seed on all ranks, of which all have an error if one has.
func (b bench) together(seed uint64) error {
	t := b.draw(seed)
	if err := autograd.Agree(b.comm, "", b.try(t)); err != nil {
		return fmt.Errorf("seed %d, solver %q, %d runs a step: %w\n%v",
			seed, t.solver, t.micro, err, t.graph)
	}
	return nil
}

// FuzzGraphs lets the fuzzer choose the graph.
func FuzzGraphs(f *testing.F) {
	f.Add([]byte("0123456789abcdefghijklmnopqrstuvwxyz"))
	f.Fuzz(func(t *testing.T, choices []byte) {
		devices := []backend.Device{nil, lastly{fake(t)}}
		b := bench{layout: layout(t), devices: devices, lock: &sync.Mutex{}, figures: &figures{}}
		of := b.drawBy(0, func(n int) int {
			if len(choices) == 0 {
				return 0
			}
			c := int(choices[0])
			choices = choices[1:]
			return c % n
		})
		err := b.try(of)
		require.Check(t, err == nil, "%v\n%v", err, of.graph)
	})
}
