package vm_test

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/autograd"
	"github.com/euryale-ml/euryale/autograd/solver"
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/ops/nn"
	"github.com/euryale-ml/euryale/vm"
)

// cached is a cache of rows, and what a run reads of it: sum = the sum of the cache with one more.
type cached struct {
	g                     *gorgonia.ExprGraph
	cache, at, rows, next node
	sum                   gorgonia.Value
}

func newCached(t testing.TB, memory *tensor.Dense, rows int) *cached {
	c := &cached{g: gorgonia.NewGraph()}
	width := memory.Shape()[1]
	c.cache = gorgonia.NodeFromAny(c.g, memory, gorgonia.WithName("cache"))
	c.at = gorgonia.NewVector(c.g, tensor.Int, gorgonia.WithShape(rows), gorgonia.WithName("at"))
	c.rows = gorgonia.NewMatrix(c.g, tensor.Float32, gorgonia.WithShape(rows, width),
		gorgonia.WithName("rows"))
	c.next = must(nn.IndexCopy(0, c.cache, c.at, c.rows))
	next := c.next
	if next.Dtype() != tensor.Float32 {
		next = must(nn.Cast(tensor.Float32, next))
	}
	gorgonia.Read(sum(square(next)), &c.sum)
	return c
}

func (c *cached) put(t testing.TB, at []int, rows []float32) {
	t.Helper()
	let := func(n node, data any) {
		require.NoError(t, gorgonia.Let(n, tensor.New(tensor.WithShape(n.Shape()...),
			tensor.WithBacking(data))))
	}
	let(c.at, at)
	let(c.rows, rows)
}

// TestCacheIsWrittenInPlace: a run writes its rows and nothing else, and reads them; another
// machine with the same tensor reads and writes them, too. A cache may be of 16-bit floats.
func TestCacheIsWrittenInPlace(t *testing.T) {
	for name, d := range map[string]backend.Device{"host": nil, "fake": fake(t)} {
		for _, of := range []tensor.Dtype{tensor.Float32, bfloat16} {
			t.Run(fmt.Sprint(name, " ", of), func(t *testing.T) {
				cacheIsWrittenInPlace(t, d, tensor.New(tensor.WithShape(4, 2), tensor.Of(of)))
			})
		}
	}
}

func cacheIsWrittenInPlace(t *testing.T, d backend.Device, memory *tensor.Dense) {
	many, one := newCached(t, memory, 2), newCached(t, memory, 1)
	var machines [2]*vm.Machine
	for i, c := range []*cached{many, one} {
		m := machineOn(t, d, c.g, vm.Eval(), vm.WithState(c.cache, c.next))
		if machines[i] = m; strings.Contains(m.Plan().String(), "copy") ||
			strings.Contains(m.Plan().String(), "assign") {
			t.Errorf("the cache is copied:\n%v", m.Plan())
		}
	}
	for round := range 3 {
		many.put(t, []int{0, 3}, []float32{1, 2, 3, 4})
		run(t, machines[0])
		if last := elements(memory)[7]; d != nil && last == last {
			t.Errorf("the host has %v of a cache that is the device's", last)
		}
		for step := 1; step < 3; step++ {
			one.put(t, []int{step}, []float32{float32(round), float32(step)})
			run(t, machines[1])
		}
		if want := float32(1 + 4 + 9 + 16 + 2*round*round + 1 + 4); one.sum.Data() != want {
			t.Errorf("round %d: the sum is %v, want %v", round, one.sum, want)
		}
	}
	require.NoError(t, machines[0].Pull(many.cache))
	if want := []float64{1, 2, 2, 1, 2, 2, 3, 4}; !slices.Equal(elements(memory), want) {
		t.Errorf("the cache is %v, want %v", elements(memory), want)
	}
	for _, m := range machines {
		require.Report(t, m.Close())
	}
}

// TestStateIsWhatTheRunBeforeLeft: runs read what variables were before, also where two exchange
// their values; another tensor begins anew.
func TestStateIsWhatTheRunBeforeLeft(t *testing.T) {
	for name, d := range map[string]backend.Device{"host": nil, "fake": fake(t)} {
		t.Run(name, func(t *testing.T) {
			g := gorgonia.NewGraph()
			begin := func(x ...float64) *tensor.Dense {
				return tensor.New(tensor.WithShape(2), tensor.WithBacking(x))
			}
			a := gorgonia.NodeFromAny(g, begin(1, 2), gorgonia.WithName("a"))
			b := gorgonia.NodeFromAny(g, begin(10, 20), gorgonia.WithName("b"))
			fixed := gorgonia.NodeFromAny(g, begin(5, 5), gorgonia.WithName("fixed"))
			sum := add(add(a, b), fixed)
			var old gorgonia.Value
			gorgonia.Read(neg(a), &old)
			m := machineOn(t, d, g, vm.WithState(a, b), vm.WithState(b, sum), vm.Keep(sum),
				vm.WithFrozen(fixed))
			x, y := 1.0, 10.0
			for i := range 6 {
				if i == 4 {
					require.NoError(t, gorgonia.Let(a, begin(100, 2)))
					x = 100
				}
				run(t, m)
				got := old.Data().([]float64)[0]
				require.Check(t, got == -x, "run %d read %v, want %v", i, -got, x)
				if x, y = y, x+y+5; sum.Value().Data().([]float64)[0] != y {
					t.Errorf("run %d gives %v, want %v", i, sum.Value(), y)
				}
			}
			require.NoError(t, m.Pull(a, b))
			got := a.Value().Data().([]float64)[0]
			require.Equal(t, "a", got, x)
			if got := b.Value().Data().([]float64)[0]; got != y {
				t.Errorf("b is %v, want %v", got, y)
			}
			require.NoError(t, m.Close())
		})
	}
}

// TestFrozenVariablesAreReadFromTheDevice: until they are given another tensor.
func TestFrozenVariablesAreReadFromTheDevice(t *testing.T) {
	for name, d := range map[string]backend.Device{"host": nil, "fake": fake(t)} {
		t.Run(name, func(t *testing.T) {
			g := gorgonia.NewGraph()
			begin := func(x ...float64) *tensor.Dense {
				return tensor.New(tensor.WithShape(2), tensor.WithBacking(x))
			}
			w := gorgonia.NodeFromAny(g, begin(1, 2), gorgonia.WithName("w"))
			fixed := gorgonia.NodeFromAny(g, begin(3, 4), gorgonia.WithName("fixed"))
			cost := sum(times(w, fixed))
			require.NoError(t, require.Err(gorgonia.Grad(cost, w)))
			m := machineOn(t, d, g, vm.WithSolver(&solver.SGD{Rate: 1}, w), vm.Keep(cost),
				vm.WithFrozen(fixed))
			run(t, m) // 1*3 + 2*4; w is then -2, -2
			fixed.Value().Data().([]float64)[0] = 100
			run(t, m)
			want := -14.0
			if d == nil { // the host has nothing but the tensor
				want = -208
			}
			got := cost.Value().Data().(float64)
			require.Equal(t, "a run gives", got, want)
			require.NoError(t, gorgonia.Let(fixed, begin(1, 1)))
			run(t, m)
			want = -5 - 6 // w is -2-3, -2-4
			if d == nil {
				want = -102 - 6
			}
			if got := cost.Value().Data().(float64); got != want {
				t.Errorf("with another tensor a run gives %v, want %v", got, want)
			}
			require.Report(t, m.Close())
			if got := fixed.Value().Data().([]float64)[0]; got != 1 {
				t.Errorf("the variable is %v at the end", got)
			}
		})
	}
}

// TestFrozenVariablesOfCheckpointsAreLoaded: also where the device has them.
func TestFrozenVariablesOfCheckpointsAreLoaded(t *testing.T) {
	for name, d := range map[string]backend.Device{"host": nil, "fake": fake(t)} {
		g := gorgonia.NewGraph()
		begin := func(x ...float64) *tensor.Dense {
			return tensor.New(tensor.WithShape(2), tensor.WithBacking(x))
		}
		w := gorgonia.NodeFromAny(g, begin(1, 2), gorgonia.WithName("w"))
		frozen := gorgonia.NodeFromAny(g, begin(3, 4), gorgonia.WithName("frozen"))
		cost := sum(times(w, frozen))
		require.NoError(t, require.Err(gorgonia.Grad(cost, w)))
		sgd, dir := &solver.SGD{Rate: 1}, t.TempDir()
		m := machineOn(t, d, g, vm.WithSolver(sgd, w), vm.WithFrozen(frozen), vm.Keep(cost),
			vm.WithDataParallel(autograd.Solo(), autograd.WithFrozen(frozen)))
		run(t, m) // w is then -2, -2
		require.NoError(t, m.DataParallel().Save(dir, sgd, nil))
		require.NoError(t, gorgonia.Let(frozen, begin(100, 100)))
		run(t, m)
		require.NoError(t, m.DataParallel().Load(dir, sgd, nil))
		run(t, m)
		got := cost.Value().Data().(float64)
		require.Check(t, got == -14, "%s: %v, want -2 x 3 - 2 x 4", name, got)
		require.Report(t, m.Close())
	}
}

func TestStatesThatCannotBeAreRefused(t *testing.T) {
	g, w, _ := layer(t, costs["sum"])
	y, sum := neg(w), must(gorgonia.Sum(w))
	with := vm.WithState
	option := vm.WithSolver(&solver.SGD{Rate: 0.5}, w)
	for name, test := range map[string]struct {
		options []vm.Option
		want    error
	}{
		"two states":      {[]vm.Option{with(w, y), with(w, w)}, backend.ErrArgument},
		"no variable":     {[]vm.Option{with(y, y)}, backend.ErrArgument},
		"another shape":   {[]vm.Option{with(w, sum)}, backend.ErrArgument},
		"beside a solver": {[]vm.Option{with(w, y), option}, backend.ErrUnsupported},
		"no node":         {[]vm.Option{with(nil, y)}, backend.ErrArgument},
		"frozen":          {[]vm.Option{vm.WithFrozen(y)}, backend.ErrArgument},
		"frozen, learnt":  {[]vm.Option{vm.WithFrozen(w), option}, backend.ErrArgument},
	} {
		m, err := vm.New(g, nil, test.options...)
		require.Fails(t, name, err, test.want)
		if err == nil {
			_ = m.Close()
		}
	}
}

// TestIntegersOfAStateAreOnTheHostAfterEachRun: none could say that a device has newer ones. What
// the host writes counts.
func TestIntegersOfAStateAreOnTheHostAfterEachRun(t *testing.T) {
	g := gorgonia.NewGraph()
	one := func(name string) node {
		return gorgonia.NodeFromAny(g, tensor.New(tensor.WithShape(1),
			tensor.WithBacking([]int{1})), gorgonia.WithName(name))
	}
	count := one("count")
	m := machineOn(t, fake(t), g, vm.WithState(count, add(count, one("one"))))
	has := count.Value().Data().([]int)
	for want := 2; want < 5; want++ {
		if run(t, m); has[0] != want {
			t.Errorf("the host has %d, want %d", has[0], want)
		}
	}
	has[0] = 10
	if run(t, m); has[0] != 11 {
		t.Errorf("after 10 the host has %d", has[0])
	}
	require.NoError(t, m.Close())
}

// TestWhatAnotherMachineHasTrainedIsNotReadAsData: not by a machine that trains something else,
// until it is pulled.
func TestWhatAnotherMachineHasTrainedIsNotReadAsData(t *testing.T) {
	shared := tensor.New(tensor.WithShape(2), tensor.WithBacking([]float64{1, 2}))
	trains := func(d backend.Device, other string, learnable int) (*vm.Machine, nodes) {
		g := gorgonia.NewGraph()
		all := nodes{gorgonia.NodeFromAny(g, shared, gorgonia.WithName("shared")),
			gorgonia.NodeFromAny(g, tensor.New(tensor.WithShape(2),
				tensor.WithBacking([]float64{3, 4})), gorgonia.WithName(other))}
		cost := sum(times(all[0], all[1]))
		require.NoError(t, require.Err(gorgonia.Grad(cost, all[learnable])))
		m := require.Value(vm.New(g, d, vm.WithSolver(&solver.SGD{Rate: 1}, all[learnable])))(t)
		return m, all
	}
	first, params := trains(fake(t), "x", 0)
	second, _ := trains(nil, "w", 1)
	run(t, first)
	require.Fails(t, "old values are read", second.RunAll(), backend.ErrArgument, "shared")
	require.NoError(t, first.Pull(params[0]))
	run(t, second)
	require.NoError(t, errors.Join(first.Close(), second.Close()))
}

// TestAttentionReadsA16BitCacheAsItIs: a step writes a row that positions have turned, in two
// halves, and casts nothing but that; a cache of Float32 gives the same results.
func TestAttentionReadsA16BitCacheAsItIs(t *testing.T) {
	const keys, size = 6, 8
	step := func(of tensor.Dtype) (m *vm.Machine, result gorgonia.Value) {
		g := gorgonia.NewGraph()
		value := func(name string, n, width int) node {
			x := make([]float32, n*width)
			for i := range x {
				x[i] = float32(i%7-3) / 4
			}
			return gorgonia.NodeFromAny(g, tensor.New(tensor.WithShape(n, width),
				tensor.WithBacking(x)), gorgonia.WithName(name))
		}
		at := gorgonia.NodeFromAny(g, tensor.New(tensor.WithShape(1),
			tensor.WithBacking([]int{keys - 2})), gorgonia.WithName("at"))
		cache := gorgonia.NodeFromAny(g, tensor.New(tensor.WithShape(keys, size), tensor.Of(of)),
			gorgonia.WithName("cache"))
		row := must(nn.Concat(1, square(value("a", 1, size/2)), neg(value("b", 1, size/2))))
		next := must(nn.IndexCopy(0, cache, at, row))
		read := next
		if of != tensor.Float32 {
			read = must(nn.Cast(tensor.Float32, next))
		}
		heads := func(x node, n int) node { return reshape(x, tensor.Shape{1, 1, n, size}) }
		y := must(nn.Attention(heads(value("q", 1, size), 1), heads(read, keys), heads(read, keys),
			nn.AttentionOptions{}))
		gorgonia.Read(y, &result)
		m = machineOn(t, fake(t), g, vm.Eval(), vm.WithPrecision(vm.BF16),
			vm.WithState(cache, next))
		run(t, m)
		return m, result
	}
	half, got := step(bfloat16)
	wide, want := step(tensor.Float32)
	require.Check(t, !strings.Contains(half.Plan().String(), "cast of cache") &&
		strings.Contains(wide.Plan().String(), "cast of cache") &&
		strings.Contains(half.Plan().String(), "bf16(1,8) = epilogue concat"),
		"the cache is cast:\n%v", half.Plan())
	if !slices.Equal(elements(got), elements(want)) {
		t.Errorf("attention gives %v, of a cache of Float32 %v", got, want)
	}
	for _, m := range []*vm.Machine{half, wide} {
		require.Report(t, m.Close())
	}
}
