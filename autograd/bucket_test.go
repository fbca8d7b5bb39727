package autograd

import (
	"bytes"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/backend/compress/half"
	"github.com/euryale-ml/euryale/internal/group"
	"github.com/euryale-ml/euryale/internal/residence"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/internal/testing/testenv"
	"github.com/euryale-ml/euryale/internal/testing/testranks"
)

// guarded is a communicator whose Alloc puts guard bytes around the memory.
type guarded struct {
	backend.Communicator
	memory backend.Buffer
}

const guard = 64

func (c *guarded) Alloc(nbytes int) (backend.Buffer, error) {
	b, err := c.Communicator.Alloc(nbytes + 2*guard)
	if err != nil {
		return b, err
	}
	c.memory = b
	return b.Slice(guard, guard+nbytes), c.copy(b, backend.Of(bytes.Repeat([]byte{0xAB}, b.Len())))
}

func (c *guarded) Free(backend.Buffer) error { return c.Communicator.Free(c.memory) }

// copy copies between the host and where the communicator is.
func (c *guarded) copy(dst, src backend.Buffer) error {
	q := c.Device().Default()
	return errors.Join(q.Move(dst, src), drain(q))
}

// check finds bytes that were written outside of the buckets.
func (c *guarded) check(d *DataParallel) error {
	used, now := make([]bool, c.memory.Len()), make([]byte, c.memory.Len())
	for _, b := range d.buckets {
		for i := range b.data.NBytes() {
			used[int(b.data.Addr()-c.memory.Addr())+i] = true
		}
	}
	testranks.NoError(c.copy(backend.Of(now), c.memory))
	for i, u := range used {
		if !u && now[i] != 0xAB {
			return fmt.Errorf("byte %d of the memory around buckets was written", i)
		}
	}
	return nil
}

// random returns a node of size elements bound to random values, a scalar if
// size is 0.
func random(g *gorgonia.ExprGraph, rng *rand.Rand, name string, dt tensor.Dtype,
	size int) *gorgonia.Node {
	return drawn(g, rng.NormFloat64, name, dt, size)
}

// drawn is random with numbers of any kind.
func drawn(g *gorgonia.ExprGraph, draw func() float64, name string, dt tensor.Dtype,
	size int) *gorgonia.Node {
	n := max(size, 1)
	f32, f64 := make([]float32, n), make([]float64, n)
	for i := range n {
		f64[i] = draw()
		f32[i] = float32(f64[i])
	}
	opts := []gorgonia.NodeConsOpt{gorgonia.WithName(name)}
	switch {
	case size == 0 && dt == tensor.Float32:
		return gorgonia.NewScalar(g, dt, append(opts, gorgonia.WithValue(f32[0]))...)
	case size == 0:
		return gorgonia.NewScalar(g, dt, append(opts, gorgonia.WithValue(f64[0]))...)
	case dt == tensor.Float32:
		return gorgonia.NewVector(g, dt, append(opts, gorgonia.WithShape(n),
			gorgonia.WithValue(tensor.New(tensor.WithShape(n), tensor.WithBacking(f32))))...)
	}
	return gorgonia.NewVector(g, dt, append(opts, gorgonia.WithShape(n),
		gorgonia.WithValue(tensor.New(tensor.WithShape(n), tensor.WithBacking(f64))))...)
}

// sizes has the lengths of 50 parameters, 0 for a scalar.
func sizes() []int {
	rng := rand.New(rand.NewPCG(5, 5))
	s := []int{0, 1, 0, 1, 5000}
	for len(s) < 50 {
		s = append(s, 1+rng.IntN(700))
	}
	return s
}

// copied returns a copy of a value.
func copied(v gorgonia.Value) (backend.Buffer, error) {
	b, _, err := residence.Floats(v)
	return residence.Clone(b), err
}

// TestBucketsEqualSingleReductionsRaced: on NCCL of integers, since it adds in an order
// that depends on where in a bucket a number is.
func TestBucketsEqualSingleReductionsRaced(t *testing.T) {
	testenv.Each(t, testenv.OnHosts(), func(t *testing.T, k testenv.Kind) {
		for _, size := range []int{1, 2, 3, 4} {
			t.Run(fmt.Sprint(size), func(t *testing.T) {
				allOn(t, k, size, func(r rank) error {
					rng := rand.New(rand.NewPCG(uint64(r.comm.Rank()), 3))
					draw := rng.NormFloat64
					if k.OnGPU() {
						draw = func() float64 { return float64(rng.IntN(9) - 4) }
					}
					for _, opts := range [][]Option{nil, {WithBuckets(1, 1)},
						{WithBuckets(1000, 3000), WithSum()}} {
						testranks.NoError(reduceFifty(r, draw, opts))
					}
					return nil
				})
			})
		}
	})
}

func reduceFifty(r rank, draw func() float64, opts []Option) error {
	c := &guarded{Communicator: r.comm}
	g := gorgonia.NewGraph()
	var params, grads gorgonia.Nodes
	r.build.Lock()
	for i, n := range sizes() {
		dt := tensor.Float32
		if i%3 == 0 {
			dt = tensor.Float64
		}
		params = append(params, drawn(g, draw, fmt.Sprintf("p%d", i), dt, n))
		grads = append(grads, drawn(g, draw, fmt.Sprintf("g%d", i), dt, n))
	}
	r.build.Unlock()
	d, err := New(c, params, opts...)
	if err != nil {
		return err
	}
	defer d.Close()
	testranks.NoError(errors.Join(d.Check(), d.UseGradients(grads)))
	before := make([]backend.Buffer, len(grads))
	for i := range grads {
		if before[i], err = copied(grads[i].Value()); err != nil {
			return err
		}
	}
	got, err := d.Sync()
	if err != nil {
		return err
	}
	for i := range grads {
		want := before[i]
		sum := backend.Collective{Kind: backend.AllReduce, Op: d.op}
		testranks.NoError(group.RunOnHost(r.comm, sum, want, want))
		v := testranks.Must(got[i].Grad())
		if fmt.Sprintf("%T", v) != fmt.Sprintf("%T", params[i].Value()) ||
			!v.Shape().Eq(params[i].Shape()) {
			return fmt.Errorf("gradient %d is a %T%v, its parameter a %T%v", i, v, v.Shape(),
				params[i].Value(), params[i].Shape())
		}
		reduced := testranks.Must(copied(v))
		if !bytes.Equal(reduced.Bytes(), want.Bytes()) {
			return fmt.Errorf("gradient %d of %d elements differs from its own all-reduce", i,
				want.Len())
		}
	}
	if c.memory.Len() == 0 {
		return nil // a single rank
	}
	return c.check(d)
}

// TestPlan checks the layout rule.
func TestPlan(t *testing.T) {
	of := func(dtypes string, sizes ...int) (params []*param) {
		for i, n := range sizes {
			d := backend.F32
			if dtypes[i] == 'd' {
				d = backend.F64
			}
			params = append(params, &param{index: i, dtype: d, size: n})
		}
		return params
	}
	for _, tt := range []struct {
		name        string
		params      []*param
		first, rest int
		want        string
	}{
		{"reverse order", of("fff", 1, 1, 1), 100, 100, "[2 1 0]"},
		{"first is small", of("ffff", 1, 1, 1, 1), 4, 8, "[3] [2 1] [0]"},
		{"exactly full", of("fff", 2, 1, 1), 8, 8, "[2 1] [0]"},
		{"larger than the cap", of("fff", 1, 100, 1), 8, 8, "[2] [1] [0]"},
		{"biases join their weights", of("ffffff", 300, 1, 300, 1, 300, 1), 64, 256,
			"[5 4] [3 2] [1 0]"},
		{"dtypes apart", of("fdfd", 1, 1, 1, 1), 100, 100, "[3 1] [2 0]"},
		{"leave when full", of("dfffd", 1, 1, 1, 1, 1), 100, 100, "[3 2 1] [4 0]"},
	} {
		var got []string
		for i, b := range plan(tt.params, tt.first, tt.rest, true) {
			var ps []int
			for _, p := range b.params {
				ps = append(ps, p.index)
				require.Check(t, p.dtype == b.params[0].dtype, "%s: bucket %d mixes dtypes",
					tt.name, i)
			}
			require.Check(t, b.index == i, "%s: bucket %d has index %d", tt.name, i, b.index)
			got = append(got, fmt.Sprint(ps))
		}
		require.Equal(t, tt.name, strings.Join(got, " "), tt.want)
	}
}

func TestDifferentLayoutsAreAnErrorOnAllRanks(t *testing.T) {
	type pair struct {
		name string
		dt   tensor.Dtype
		n    int
	}
	common := []pair{{"a", tensor.Float32, 4}, {"b", tensor.Float32, 4}, {"c", tensor.Float64, 2}}
	for name, tt := range map[string]struct {
		params []pair // of rank 2
		opts   []Option
		want   []string
	}{
		"order": {[]pair{common[1], common[0], common[2]}, nil,
			[]string{"parameter 0 is a f32(4) on rank 0", "parameter 0 is b f32(4) on rank 2"}},
		"shape": {[]pair{common[0], {"b", tensor.Float32, 5}, common[2]}, nil,
			[]string{"b f32(4) on rank 0", "b f32(5) on rank 2"}},
		"dtype": {[]pair{common[0], common[1], {"c", tensor.Float32, 2}}, nil,
			[]string{"c f64(2) on rank 0", "c f32(2) on rank 2"}},
		"fewer": {common[:2], nil, []string{"the number of parameters is 3 on rank 0",
			"is 2 on rank 2"}},
		"op": {common, []Option{WithSum()}, []string{"the reduction is avg on rank 0",
			"sum on rank 2"}},
		"sizes": {common, []Option{WithBuckets(7, 8)}, []string{"7 and 8 bytes on rank 2"}},
		"none":  {nil, nil, []string{"rank 2 cannot go on: there are no parameters"}},
		"bad": {common, []Option{WithBuckets(0, 8)},
			[]string{"rank 2 cannot go on: buckets of 0 and 8 bytes"}},
	} {
		testenv.Each(t, testenv.OnHosts(), func(t *testing.T, k testenv.Kind) {
			errs := eachOn(t, k, 3, func(r rank) error {
				mine, opts := common, []Option(nil)
				if r.comm.Rank() == 2 {
					mine, opts = tt.params, tt.opts
				}
				g := gorgonia.NewGraph()
				rng := rand.New(rand.NewPCG(1, 1))
				var params gorgonia.Nodes
				r.build.Lock()
				for _, p := range mine {
					params = append(params, random(g, rng, p.name, p.dt, p.n))
				}
				r.build.Unlock()
				_, err := New(r.comm, params, opts...)
				if err == nil {
					return fmt.Errorf("%s: no error", name)
				}
				for _, part := range append(tt.want, fmt.Sprintf("rank %d of", r.comm.Rank())) {
					require.Fails(r, fmt.Sprintf("%s: rank %d", name, r.comm.Rank()), err, part)
				}
				return backend.Barrier(r.comm) // the communicator is still usable
			})
			require.NoError(t, errors.Join(errs...))
		})
	}
}

// distant is the Engine of tensors in memory that the host cannot reach.
type distant struct{ tensor.StdEng }

func (distant) AllocAccessible() bool { return false }

func TestParametersThatDoNotQualify(t *testing.T) {
	g := gorgonia.NewGraph()
	rng := rand.New(rand.NewPCG(1, 1))
	good := random(g, rng, "good", tensor.Float32, 3)
	matrix := tensor.New(tensor.WithShape(2, 3), tensor.WithBacking([]float32{1, 2, 3, 4, 5, 6}))
	require.NoError(t, matrix.T())
	far := tensor.New(tensor.WithShape(2), tensor.WithBacking([]float32{1, 2}))
	tensor.WithEngine(distant{})(far)
	for name, tt := range map[string]struct {
		params gorgonia.Nodes
		want   string
	}{
		"nil":   {gorgonia.Nodes{nil}, "parameter 0 is nil"},
		"twice": {gorgonia.Nodes{good, good}, "parameters 0 and 1 are the same node, good"},
		"no value": {gorgonia.Nodes{gorgonia.NewVector(g, tensor.Float32, gorgonia.WithName("v"),
			gorgonia.WithShape(3))}, "v, has no value"},
		"a result": {gorgonia.Nodes{gorgonia.Must(gorgonia.Square(good))},
			"is the result of an operation"},
		"integers": {gorgonia.Nodes{gorgonia.NewVector(g, tensor.Int, gorgonia.WithName("i"),
			gorgonia.WithShape(2), gorgonia.WithValue(
				tensor.New(tensor.WithBacking([]int{1, 2}))))}, "tensor of int"},
		"far away": {gorgonia.Nodes{gorgonia.NewVector(g, tensor.Float32, gorgonia.WithName("far"),
			gorgonia.WithShape(2), gorgonia.WithValue(far))}, "is in the memory of a device"},
		"transposed": {gorgonia.Nodes{gorgonia.NewMatrix(g, tensor.Float32, gorgonia.WithName("t"),
			gorgonia.WithShape(3, 2), gorgonia.WithValue(matrix))},
			"must be contiguous, in row order"},
	} {
		all(t, 1, func(r rank) error {
			require.Fails(t, name, require.Err(New(r.comm, tt.params)), tt.want)
			return nil
		})
	}
}

// TestGradientsInAnyOrder: gradients can be views that are not contiguous.
func TestGradientsInAnyOrder(t *testing.T) {
	testenv.Each(t, testenv.OnHosts(), func(t *testing.T, k testenv.Kind) {
		allOn(t, k, 1, func(r rank) error { return inAnyOrder(r, nil) })
		allOn(t, k, 2, func(r rank) error {
			return inAnyOrder(r, []Option{WithCompression(half.Wrap(backend.BF16))})
		})
	})
}

func inAnyOrder(r rank, opts []Option) error {
	r.build.Lock()
	g := gorgonia.NewGraph()
	w := gorgonia.NewMatrix(g, tensor.Float32, gorgonia.WithName("w"), gorgonia.WithShape(3, 2),
		gorgonia.WithValue(tensor.New(tensor.WithShape(3, 2), tensor.Of(tensor.Float32))))
	r.build.Unlock()
	d := testranks.Must(New(r.comm, gorgonia.Nodes{w}, opts...))
	defer d.Close()
	transposed := tensor.New(tensor.WithShape(2, 3),
		tensor.WithBacking([]float32{1, 3, 5, 2, 4, 6}))
	transposed.T()
	whole := tensor.New(tensor.WithShape(3, 4),
		tensor.WithBacking([]float32{0, 1, 2, 0, 0, 3, 4, 0, 0, 5, 6, 0}))
	slice := testranks.Must(whole.Slice(nil, tensor.S(1, 3)))
	columns := tensor.New(tensor.WithShape(3, 2), tensor.AsFortran([]float32{1, 2, 3, 4, 5, 6}))
	for name, v := range map[string]gorgonia.Value{"transposed": transposed,
		"slice": slice.(*tensor.Dense), "by columns": columns} {
		r.build.Lock()
		dw := gorgonia.NewMatrix(g, tensor.Float32, gorgonia.WithName(name),
			gorgonia.WithShape(3, 2), gorgonia.WithValue(v))
		r.build.Unlock()
		testranks.NoError(d.UseGradients(gorgonia.Nodes{dw}))
		grads := testranks.Must(d.Sync())
		got, _ := grads[0].Grad()
		if !slices.Equal(got.Data().([]float32), []float32{1, 2, 3, 4, 5, 6}) {
			r.Errorf("%s: %v", name, got.Data())
		}
	}
	return nil
}

func TestScalarsConstantsAndUnusedParameters(t *testing.T) {
	for _, hooks := range []bool{false, true} {
		for _, dual := range []bool{false, true} {
			all(t, 2, func(r rank) error { return fitLine(r, hooks, dual) })
		}
	}
}

// fitLine trains scalars: loss = (w*x + b - y)^2 + c, and u is not in it. The
// gradient of c is a constant that all graphs of the process share.
func fitLine(r rank, hooks, dual bool) error {
	g := gorgonia.NewGraph()
	r.build.Lock()
	scalar := func(name string, v float64) *gorgonia.Node {
		return gorgonia.NewScalar(g, tensor.Float64, gorgonia.WithName(name), gorgonia.WithValue(v))
	}
	w, b, c, u := scalar("w", 0), scalar("b", 0), scalar("c", 1), scalar("u", 5)
	x, y := gorgonia.NewScalar(g, tensor.Float64, gorgonia.WithName("x")),
		gorgonia.NewScalar(g, tensor.Float64, gorgonia.WithName("y"))
	params := gorgonia.Nodes{w, u, b, c}
	r.build.Unlock()
	d, err := New(r.comm, params, WithUnused())
	if err != nil {
		return err
	}
	defer d.Close()
	use := func(n *gorgonia.Node) *gorgonia.Node {
		if !hooks {
			return n
		}
		return gorgonia.Must(d.Hook(n))
	}
	var vm gorgonia.VM
	r.build.Lock()
	err = must(func() {
		error := gorgonia.Must(
			gorgonia.Sub(gorgonia.Must(gorgonia.Add(gorgonia.Must(gorgonia.Mul(use(w), x)),
				use(b))), y))
		loss := gorgonia.Must(gorgonia.Add(gorgonia.Must(gorgonia.Square(error)), use(c)))
		if _, err := gorgonia.Grad(loss, w, b, c); err != nil {
			panic(err)
		}
		if dual {
			vm = gorgonia.NewTapeMachine(g, gorgonia.BindDualValues(w, b, c))
		} else {
			vm = gorgonia.NewTapeMachine(g)
		}
	})
	r.build.Unlock()
	if err != nil {
		return err
	}
	defer vm.Close()
	solver := gorgonia.NewVanillaSolver(gorgonia.WithLearnRate(0.05))
	for step := range 300 {
		at := float64((step + r.comm.Rank()) % 3)
		gorgonia.Let(x, at)
		gorgonia.Let(y, 2*at-1)
		testranks.NoError(vm.RunAll())
		grads := testranks.Must(d.Sync())
		if v, _ := grads[3].Grad(); v.Data().(float64) != 1 {
			return fmt.Errorf("step %d: the gradient of c is %v, want 1", step, v)
		}
		if v, _ := grads[1].Grad(); v.Data().(float64) != 0 {
			return fmt.Errorf("step %d: the gradient of u, which is not used, is %v", step, v)
		}
		testranks.NoError(solver.Step(grads))
		vm.Reset()
	}
	got := []float64{w.Value().Data().(float64), b.Value().Data().(float64),
		u.Value().Data().(float64)}
	for i, want := range []float64{2, -1, 5} {
		if math.Abs(got[i]-want) > 0.01 {
			return fmt.Errorf("hooks %v, dual values %v: w, b, u = %v, want 2, -1, 5", hooks,
				dual, got)
		}
	}
	return d.Check()
}

func TestMisuseIsAnError(t *testing.T) {
	for _, tt := range []struct {
		name, want string
		misuse     func(m *model, d *DataParallel, vm gorgonia.VM) error
	}{
		{"two runs", "has a second gradient in one step: call Sync after each RunAll; for steps " +
			"of several runs use vm.Accumulate, with vm.WithSolver and vm.WithDataParallel",
			func(m *model, d *DataParallel, vm gorgonia.VM) error {
				if err := vm.RunAll(); err != nil {
					return err
				}
				vm.Reset()
				return vm.RunAll()
			}},
		{"no run", "no parameter has a gradient", func(m *model, d *DataParallel,
			vm gorgonia.VM) error {
			_, err := d.Sync()
			return err
		}},
		{"unknown hook", "was not given to New", func(m *model, d *DataParallel,
			vm gorgonia.VM) error {
			_, err := d.Hook(m.x)
			return err
		}},
		{"too few gradients", "1 gradients for 4 parameters", func(m *model, d *DataParallel,
			vm gorgonia.VM) error {
			return d.UseGradients(gorgonia.Nodes{m.x})
		}},
		{"wrong gradient", "gradient of w1 f32(36, 16) is a f32(2, 4)",
			func(m *model, d *DataParallel, vm gorgonia.VM) error {
				for _, p := range d.params {
					p.hooked = nil
				}
				if err := d.UseGradients(gorgonia.Nodes{m.y, m.y, m.y, m.y}); err != nil {
					return err
				}
				_, err := d.Sync()
				return err
			}},
		{"after Close", "closed", func(m *model, d *DataParallel, vm gorgonia.VM) error {
			if err := d.Close(); err != nil {
				return err
			}
			return vm.RunAll()
		}},
		{"rebound", "bound to another kind of value", func(m *model, d *DataParallel,
			vm gorgonia.VM) error {
			v := tensor.New(tensor.WithShape(16, features), tensor.Of(tensor.Float32))
			if err := errors.Join(v.T(), gorgonia.Let(m.params[0], v)); err != nil {
				return err
			}
			_, err := d.params[0].value()
			return err
		}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			all(t, 1, func(r rank) error {
				m := newMLP(2, 1)
				d := testranks.Must(New(r.comm, m.params))
				defer d.Close()
				vm := testranks.Must(setting{hooks: "all"}.machine(m, d))
				defer vm.Close()
				m.feed(0, 2, 0)
				require.Fails(t, "misuse", tt.misuse(m, d, vm), tt.want)
				return nil
			})
		})
	}
}

func TestUseBesideTheHookIsAnError(t *testing.T) {
	all(t, 1, func(r rank) error {
		m := newMLP(2, 1)
		d, err := New(r.comm, m.params)
		if err != nil {
			return err
		}
		defer d.Close()
		// A read of the parameter is no use.
		var value gorgonia.Value
		gorgonia.Read(m.params[0], &value)
		w1, w2 := m.params[0], m.params[2]
		m.params = gorgonia.Nodes{w1, w2}
		m.forward = func(use func(*gorgonia.Node) *gorgonia.Node) error {
			return must(func() {
				h := gorgonia.Must(gorgonia.Mul(m.x, use(w1)))
				h = gorgonia.Must(gorgonia.Add(h, gorgonia.Must(gorgonia.Mul(m.x, w1))))
				m.meanSquare(gorgonia.Must(gorgonia.Mul(h, use(w2))))
			})
		}
		vm, err := setting{hooks: "all"}.machine(m, d)
		if err != nil {
			return err
		}
		defer vm.Close()
		m.feed(0, 2, 0)
		testranks.NoError(vm.RunAll())
		_, err = d.Sync()
		require.Fails(t, "d.Sync", err, "w1 f32(36, 16) has a hook, but")
		return nil
	})
}

func TestCheckNamesRankAndParameter(t *testing.T) { testenv.Each(t, testenv.OnHosts(), checkCheck) }

func checkCheck(t *testing.T, k testenv.Kind) {
	allOn(t, k, 3, func(r rank) error {
		r.build.Lock()
		m := newMLP(1, uint64(r.comm.Rank()))
		r.build.Unlock()
		d, err := New(r.comm, m.params)
		if err != nil {
			return err
		}
		defer d.Close()
		testranks.NoError(d.Check())
		if r.comm.Rank() == 2 {
			m.params[2].Value().Data().([]float32)[5]++
		}
		err = d.Check()
		require.Fails(r, "d.Check", err, backend.ErrMismatch,
			"w2 f32(16, 4) is not the same on rank 2 as on rank 0")
		return nil
	})
}

// TestApartParametersHaveOtherBuckets: of one dtype and large enough for all. Those of early ones
// come first.
func TestApartParametersHaveOtherBuckets(t *testing.T) {
	var params []*param
	for i := range 5 {
		params = append(params, &param{index: i, name: fmt.Sprint("p", i), dtype: backend.F32,
			size: 4, apart: i%2 == 0 && i > 0, early: i == 0})
	}
	var got [][]int
	for _, b := range plan(params, 1<<20, 1<<20, true) {
		var of []int
		for _, p := range b.params {
			of = append(of, p.index)
		}
		got = append(got, of)
	}
	if want := [][]int{{0}, {4, 2}, {3, 1}}; !slices.EqualFunc(got, want, slices.Equal) {
		t.Errorf("the buckets are of %v, want %v", got, want)
	}
}
