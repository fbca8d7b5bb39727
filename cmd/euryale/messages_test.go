//go:build linux

package main

import (
	"context"
	"errors"
	"fmt"
	"math"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"testing"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale"
	"github.com/euryale-ml/euryale/autograd"
	"github.com/euryale-ml/euryale/autograd/solver"
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/fit"
	"github.com/euryale-ml/euryale/fit/data"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/layers"
	"github.com/euryale-ml/euryale/models"
	"github.com/euryale-ml/euryale/ops/nn"
	"github.com/euryale-ml/euryale/vm"
)

// mistake is what a user does wrong, as a command line or as a few lines of a program, in a folder
// of the files of testdata.
type mistake struct {
	what string
	line string               // of euryale, or
	do   func(m *maker) error // what a program does
	env  []string             // NAME=VALUE
}

// mistakes are the commonest, in the order in which a user meets them. testdata/messages.txt has
// what each is told.
var mistakes = []mistake{
	// the launcher
	{what: "no program", line: "run -n 2"},
	{what: "a command that does not exist", line: "rnu -n 2 ./train"},
	{what: "a flag that does not exist", line: "run --max-restart 2 ./train"},
	{what: "mpirun's flag", line: "run -np 2 ./train"},
	{what: "no ranks", line: "run -n 0 ./train"},
	{what: "a number in words", line: "run -n two ./train"},
	{what: "a flag behind the program", line: "run ./refuses -n 2"},
	{what: "a program that does not exist", line: "run -n 2 ./tarin"},
	{what: "a name that is nowhere", line: "run -n 2 tarin"},
	{what: "a file that is no program", line: "run -n 2 ./a.csv"},
	{what: "a program that fails", line: "run -n 2 ./fails"},
	{what: "a rank that is killed", line: "run -n 2 ./killed"},
	{what: "a folder of logs that is not empty", line: "run -n 2 --log-dir logs ./train"},
	{what: "hosts without enough ranks", line: "run -H a:2,b:2 -n 8 ./train"},
	{what: "a host without a number", line: "run -H a:two ./train"},
	{what: "a hostfile that does not exist", line: "run --hostfile hosts ./train"},
	{what: "a wrong line of a hostfile", line: "run --hostfile hostfile ./train"},
	{what: "a host that cannot be reached", line: "run -H gpu7:1 ./train"},
	{what: "several machines without a token", line: "run --nnodes 2 --rendezvous a:29400 ./train"},
	{what: "a standby without --elastic", line: "run -n 2 --standby 1 ./train"},
	{what: "a misspelt variable", line: "run -n 1 ./train", env: []string{"EURYALE_TIMOUT=5"}},
	{what: "a backend that does not exist", line: "bench -n 2 --backend nvlink"},
	{what: "a report of nothing", line: "report runs/1"},
	{what: "an operation that does not exist", line: "explain reduce-all 1M"},

	// Init
	{what: "EURYALE_BACKEND of none", do: connect, env: []string{"EURYALE_BACKEND=gloo"}},
	{what: "EURYALE_TIMEOUT of no time", do: connect, env: []string{"EURYALE_TIMEOUT=soon"}},
	{what: "RANK alone", do: connect, env: []string{"RANK=1"}},
	{what: "a rank that there is not", do: connect, env: []string{"RANK=2", "WORLD_SIZE=2",
		"MASTER_PORT=1"}},
	{what: "a rank whose others never start", do: connect, env: []string{"RANK=0", "WORLD_SIZE=2",
		"MASTER_PORT=FREE", "EURYALE_TIMEOUT=0.2"}},
	{what: "a port in use", do: connect, env: []string{"RANK=0", "WORLD_SIZE=2",
		"MASTER_ADDR=127.0.0.1", "LOCAL_RANK=0", "LOCAL_WORLD_SIZE=1", "GROUP_RANK=0",
		"MASTER_PORT=USED", "EURYALE_TOKEN=0123456789abcdef", "EURYALE_TIMEOUT=0.2"}},
	{what: "a meeting point that is not there", do: connect, env: []string{"RANK=1",
		"WORLD_SIZE=2", "MASTER_ADDR=127.0.0.1", "LOCAL_RANK=0", "LOCAL_WORLD_SIZE=1",
		"GROUP_RANK=1", "MASTER_PORT=1", "EURYALE_TOKEN=0123456789abcdef", "EURYALE_TIMEOUT=0.2"}},
	{what: "a weak token", do: connect, env: []string{"RANK=1", "WORLD_SIZE=2",
		"MASTER_ADDR=192.0.2.1", "LOCAL_RANK=0", "LOCAL_WORLD_SIZE=1", "GROUP_RANK=1",
		"MASTER_PORT=1", "EURYALE_TOKEN=abc"}},

	// collectives
	{what: "other lengths on ranks", do: on(2, func(c backend.Communicator, _ sync.Locker) error {
		return sum(c, make([]float32, 3+c.Rank()))
	})},
	{what: "a collective under if comm.Rank() == 0", do: on(2, func(c backend.Communicator,
		_ sync.Locker) error {
		if c.Rank() == 0 {
			return sum(c, make([]float32, 3))
		}
		return backend.Barrier(c)
	})},
	{what: "a rank that returns too early", do: on(2, func(c backend.Communicator,
		_ sync.Locker) error {
		if c.Rank() == 0 {
			return sum(c, make([]float32, 3))
		}
		return nil
	})},
	{what: "a rank that fails", do: on(2, func(c backend.Communicator, _ sync.Locker) error {
		if c.Rank() == 0 {
			return sum(c, make([]float32, 3))
		}
		return os.ErrNotExist
	})},
	{what: "a root that there is not", do: on(2, func(c backend.Communicator, _ sync.Locker) error {
		x := backend.Of(make([]float32, 3))
		return backend.Run(c, backend.Collective{Kind: backend.Broadcast, Root: 2}, x, x)
	})},

	// graphs
	{what: "labels of another batch", do: func(*maker) error {
		g := G.NewGraph()
		x := G.NewMatrix(g, G.Float32, G.WithShape(2, 3), G.WithName("x"))
		_, err := nn.CrossEntropy(nn.NoLabel, x, G.NewVector(g, tensor.Int, G.WithShape(3),
			G.WithName("y")))
		return err
	}},
	{what: "an input without a value", do: func(m *maker) error {
		g := G.NewGraph()
		x := G.NewMatrix(g, G.Float32, G.WithShape(2, 3), G.WithName("x"))
		G.Must(G.Sum(x))
		return m.machine(g).RunAll()
	}},
	{what: "a learnable without a gradient", do: func(m *maker) error {
		l := newLinear(2, 2)
		other := G.NewVector(l.x.Graph(), G.Float32, G.WithShape(2), G.WithName("bias"),
			G.WithInit(G.Zeroes()))
		_, err := vm.New(l.x.Graph(), nil, vm.WithSolver(&solver.SGD{Rate: 1}, l.w, other))
		return err
	}},
	{what: "a rate of 0", do: func(m *maker) error {
		l := newLinear(2, 2)
		_, err := vm.New(l.x.Graph(), nil, vm.WithSolver(&solver.Adam{}, l.w))
		return err
	}},
	{what: "a machine without a solver", do: func(m *maker) error {
		l := newLinear(2, 2)
		_, err := fit.Run(m.Context(), m.machine(l.x.Graph()), l.data(points(4)))
		return err
	}},
	{what: "a run after Close", do: func(m *maker) error {
		machine := m.machine(newLinear(2, 2).x.Graph())
		return errors.Join(machine.Close(), machine.RunAll())
	}},
	{what: "too little memory", do: func(m *maker) error {
		l := newLinear(64, 2)
		_, err := vm.New(l.x.Graph(), nil, vm.WithSolver(&solver.SGD{Rate: 1}, l.w),
			vm.WithMemory(100))
		return err
	}},
	{what: "micro-batches without ranks", do: func(m *maker) error {
		l := newLinear(2, 2)
		_, err := vm.New(l.x.Graph(), nil, vm.Accumulate(0),
			vm.WithSolver(&solver.SGD{Rate: 1}, l.w))
		return err
	}},
	{what: "other graphs on ranks", do: on(2, func(c backend.Communicator,
		build sync.Locker) error {
		_, _, err := together(c, build, 2+c.Rank(), &solver.SGD{Rate: 1})
		return err
	})},
	{what: "other solvers on ranks", do: on(2, func(c backend.Communicator,
		build sync.Locker) error {
		of := []solver.Solver{&solver.SGD{Rate: 1}, &solver.Adam{Rate: 1}}[c.Rank()]
		_, _, err := together(c, build, 2, of)
		return err
	})},
	{what: "a label out of range", do: func(m *maker) error {
		return m.classify(5)
	}},
	{what: "an index out of range", do: func(m *maker) error {
		g := G.NewGraph()
		table := G.NewMatrix(g, G.Float32, G.WithShape(10, 2), G.WithName("words"),
			G.WithInit(G.Zeroes()))
		ids := G.NewVector(g, tensor.Int, G.WithShape(2), G.WithName("ids"),
			G.WithValue(tensor.New(tensor.WithBacking([]int{3, 10}))))
		G.Must(nn.Embedding(table, ids))
		return m.machine(g).RunAll()
	}},

	// layers and models
	{what: "heads that do not divide", do: builds(func(b *layers.Builder, x layers.Node) {
		b.Attention("block0.attention", x, layers.AttentionOptions{Heads: 3})
	})},
	{what: "two layers of one name", do: builds(func(b *layers.Builder, x layers.Node) {
		b.Dense("mlp", b.Dense("mlp", x, 4), 4)
	})},
	{what: "a wrong placement", do: builds(func(b *layers.Builder, x layers.Node) {
		b.Add(x, b.Columns("mlp", x, 2, 8))
	})},
	{what: "a layout of more ranks", do: func(*maker) error {
		_, err := layers.NewLayout(autograd.Solo(), 1, 1, 2)
		return err
	}},
	{what: "a model that is not there", do: load("llama")},
	{what: "a folder without a model", do: load("logs")},
	{what: "a model of another kind", do: load("bert")},
	{what: "a model without its weights", do: load("gpt2")},

	// tables and fit
	{what: "a table that is not there", do: readsTable("customers.csv", "y")},
	{what: "a label that is no column", do: readsTable("a.csv", "Y")},
	{what: "a value that is missing", do: readsTable("gap.csv", "y")},
	{what: "a value that is no number", do: readsTable("typo.csv", "y")},
	{what: "a column of names", do: readsTable("names.csv", "y")},
	{what: "semicolons", do: readsTable("semicolons.csv", "y")},
	{what: "a table of other columns", do: func(m *maker) error {
		return m.train(must(m, "a.csv"), 3)
	}},
	{what: "fewer samples than a batch", do: func(m *maker) error { return m.fit(points(1)) }},
	{what: "no epochs", do: func(m *maker) error { return m.fit(points(4), fit.Epochs(0)) }},
	{what: "a loss that is NaN", do: func(m *maker) error {
		return m.fit(data.Of(4, func(i int, row []any) error {
			row[0].([]float32)[0] = float32(math.NaN())
			return nil
		}))
	}},
	{what: "a training that diverges", do: func(m *maker) error {
		return m.fit(points(4), fit.Epochs(100), fit.Schedule(solver.Constant(1e30)))
	}},
	{what: "a reader that fails", do: func(m *maker) error {
		return m.fit(data.Of(4, func(int, []any) error { return os.ErrPermission }))
	}},
	{what: "curves that cannot be written", do: func(m *maker) error {
		return m.fit(points(4), fit.TensorBoard("a.csv/curves"))
	}},
	{what: "a checkpoint that cannot be written", do: func(m *maker) error {
		return m.fit(points(4), fit.Checkpoint("a.csv/run1", 0))
	}},
	{what: "the best epoch without a checkpoint", do: func(m *maker) error {
		return m.fit(points(4), fit.RestoreBest())
	}},
	{what: "a metric that does not exist", do: func(m *maker) error {
		return m.fit(points(4), fit.Watch("accuracy"))
	}},
	{what: "a validation on the machine that trains", do: func(m *maker) error {
		l := newLinear(2, 2)
		machine := m.machine(l.x.Graph(), vm.WithSolver(&solver.SGD{Rate: 1}, l.w))
		_, err := fit.Run(m.Context(), machine, l.data(points(4)),
			fit.Validate(machine, l.data(points(4))))
		return err
	}},
	{what: "samples that differ by rank", do: on(2, func(c backend.Communicator,
		build sync.Locker) error {
		l, machine, err := together(c, build, 2, &solver.SGD{Rate: 1})
		if err == nil {
			_, err = fit.Run(context.Background(), machine, l.data(points(8+c.Rank())))
		}
		return err
	})},

	// checkpoints
	{what: "a checkpoint that is not there", do: func(m *maker) error {
		return autograd.LoadWeights("run1", G.Nodes{newLinear(2, 2).w})
	}},
	{what: "a prediction before the training", do: func(*maker) error {
		_, err := fit.ReadMapping("run1")
		return err
	}},
	{what: "a checkpoint of another size", do: func(m *maker) error {
		return errors.Join(m.saved(2), autograd.LoadWeights("run1", G.Nodes{newLinear(2, 3).w}))
	}},
	{what: "a checkpoint of another model", do: func(m *maker) error {
		l := newLinear(2, 2)
		other := G.NewMatrix(l.x.Graph(), G.Float32, G.WithShape(2, 1), G.WithName("dense.weight"),
			G.WithInit(G.Zeroes()))
		return errors.Join(m.saved(2), autograd.LoadWeights("run1", G.Nodes{other}))
	}},
	{what: "a training of another model in the same folder", do: func(m *maker) error {
		return errors.Join(m.saved(2), m.train(points(4), 3, fit.Checkpoint("run1", 0)))
	}},
	{what: "a training with another solver in the same folder", do: func(m *maker) error {
		l := newLinear(2, 2)
		machine := m.machine(l.x.Graph(), vm.WithSolver(&solver.Adam{Rate: 1}, l.w))
		saved := m.saved(2)
		_, err := fit.Run(m.Context(), machine, l.data(points(4)), fit.Checkpoint("run1", 0))
		return errors.Join(saved, err)
	}},
	{what: "a damaged checkpoint", do: func(m *maker) error {
		const file = "run1/step-00000002/model.safetensors"
		return errors.Join(m.saved(2), os.Truncate(file, 50),
			autograd.LoadWeights(filepath.Dir(file), G.Nodes{newLinear(2, 2).w}))
	}},
	{what: "two jobs in one folder", do: func(m *maker) error {
		one, err := autograd.New(autograd.Solo(), G.Nodes{newLinear(2, 2).w})
		two, err2 := autograd.New(autograd.Solo(), G.Nodes{newLinear(2, 2).w})
		s := &solver.SGD{Rate: 1}
		return errors.Join(err, err2, one.Save("run1", s, nil), two.Save("run1", s, nil),
			one.Close(), two.Close())
	}},
	{what: "a variable without a name", do: func(m *maker) error {
		g := G.NewGraph()
		w := G.NewVector(g, G.Float32, G.WithShape(2), G.WithName(""), G.WithInit(G.Zeroes()))
		return autograd.SaveWeights("w.safetensors", G.Nodes{w})
	}},
}

// maker makes what programs have.
type maker struct{ *testing.T }

func (m *maker) machine(g *G.ExprGraph, options ...vm.Option) *vm.Machine {
	machine := require.Value(vm.New(g, nil, options...))(m.T)
	m.Cleanup(func() { _ = machine.Close() })
	return machine
}

// line is a model of one layer.
type line struct{ x, y, w, loss *G.Node }

func newLinear(batch, columns int) *line {
	g := G.NewGraph()
	zeros := G.WithInit(G.Zeroes())
	l := &line{x: G.NewMatrix(g, G.Float32, G.WithShape(batch, columns), G.WithName("x"), zeros),
		y: G.NewVector(g, G.Float32, G.WithShape(batch), G.WithName("y"), zeros),
		w: G.NewVector(g, G.Float32, G.WithShape(columns), G.WithName("w"), zeros)}
	l.loss = G.Must(G.Mean(G.Must(G.Square(G.Must(G.Sub(G.Must(G.Mul(l.x, l.w)), l.y))))))
	if _, err := G.Grad(l.loss, l.w); err != nil {
		panic(err)
	}
	return l
}

// together makes the machine of a rank that trains with others.
func together(c backend.Communicator, build sync.Locker, columns int, s solver.Solver) (*line,
	*vm.Machine, error) {
	build.Lock()
	l := newLinear(2, columns)
	build.Unlock()
	m, err := vm.New(l.x.Graph(), nil, vm.WithSolver(s, l.w), vm.WithDataParallel(c))
	return l, m, err
}

func (l *line) data(s fit.Set) fit.Data {
	return fit.Data{Set: s, Inputs: G.Nodes{l.x, l.y}, Loss: l.loss}
}

func points(n int) fit.Set {
	return data.Of(n, func(i int, row []any) error {
		row[0].([]float32)[0], row[1].([]float32)[0] = float32(i), float32(3*i)
		return nil
	})
}

func (m *maker) fit(s fit.Set, options ...fit.Option) error { return m.train(s, 2, options...) }

func (m *maker) train(s fit.Set, columns int, options ...fit.Option) error {
	l := newLinear(2, columns)
	machine := m.machine(l.x.Graph(), vm.WithSolver(&solver.SGD{Rate: 1}, l.w))
	_, err := fit.Run(m.Context(), machine, l.data(s), options...)
	return err
}

func (m *maker) saved(columns int) error {
	return m.train(points(4), columns, fit.Checkpoint("run1", 0),
		fit.Schedule(solver.Constant(0.01)))
}

func (m *maker) classify(label int) error {
	g := G.NewGraph()
	x := G.NewMatrix(g, G.Float32, G.WithShape(2, 5), G.WithName("x"), G.WithInit(G.Zeroes()))
	y := G.NewVector(g, tensor.Int, G.WithShape(2), G.WithName("y"),
		G.WithValue(tensor.New(tensor.WithBacking([]int{0, label}))))
	G.Must(nn.CrossEntropy(nn.NoLabel, x, y))
	return m.machine(g).RunAll()
}

func must(m *maker, path string) fit.Set {
	s, _, err := data.CSV(path, "y")
	require.NoError(m.T, err)
	return s
}

func readsTable(path, label string) func(*maker) error {
	return func(*maker) error {
		_, _, err := data.CSV(path, label)
		return err
	}
}

func load(dir string) func(*maker) error {
	return func(m *maker) error {
		_, err := models.Load(dir)
		return err
	}
}

// builds builds a model of layers.
func builds(f func(b *layers.Builder, x layers.Node)) func(*maker) error {
	return func(m *maker) error {
		layout := require.Value(layers.NewLayout(autograd.Solo(), 1, 1, 1))(m.T)
		b := layers.NewBuilder(G.NewGraph(), layout, G.Float32, 1)
		x := b.Embedding(b.Learn("words", layers.Normal(0.02), 0, 10, 8),
			b.Tokens("tokens", 1, 2, 3))
		f(b, b.To(x, layers.Tensor, layers.Replicated))
		return b.Err()
	}
}

func connect(m *maker) error {
	comm, err := euryale.Init(m.Context())
	if err == nil {
		err = comm.Close()
	}
	return err
}

func sum(c backend.Communicator, x []float32) error {
	return backend.Run(c, backend.Collective{Kind: backend.AllReduce, Op: backend.Sum},
		backend.Of(x), backend.Of(x))
}

func on(ranks int, f func(c backend.Communicator, build sync.Locker) error) func(*maker) error {
	return func(m *maker) error {
		errs := make([]error, ranks)
		_ = euryale.Run(m.Context(), ranks, func(c backend.Communicator, build sync.Locker) error {
			errs[c.Rank()] = f(c, build)
			return errs[c.Rank()]
		})
		return errs[0]
	}
}

// given are the files in the folder of each mistake.
var given = map[string]string{
	"train":   "#!/bin/sh\n",
	"fails":   "#!/bin/sh\n[ $RANK = 1 ] || exec sleep 60\necho out of luck >&2; exit 3\n",
	"killed":  "#!/bin/sh\n[ $RANK = 1 ] || exec sleep 60\nkill -9 $$\n",
	"refuses": "#!/bin/sh\necho 'flag provided but not defined: -n' >&2; exit 2\n",
	"bin/ssh": "#!/bin/sh\n" +
		"echo 'ssh: Could not resolve hostname gpu7: Name or service not known' >&2; exit 255\n",
	"logs/attempt_0/rank_0.log": "",
	"hostfile":                  "a slots=2\nb slots=x\n",
	"a.csv":                     "a,b,y\n1,2,0\n3,4,1\n",
	"gap.csv":                   "a,b,y\n1,2,0\n3,,1\n",
	"typo.csv":                  "a,b,y\n1,2,0\n3,4O,1\n",
	"names.csv":                 names(),
	"semicolons.csv":            "a;b;y\n1;2;0\n",
	"bert/config.json":          `{"model_type": "bert"}`,
	"gpt2/config.json": `{"model_type": "gpt2", "n_layer": 1, "n_head": 1, "n_embd": 4,
		"vocab_size": 10, "n_positions": 8}`,
}

func names() string {
	text := "name,y\n"
	for i := range 101 {
		text += fmt.Sprintf("n%03d,1\n", i)
	}
	return text
}

// lay makes the folder of a mistake, and goes there.
func lay(t *testing.T) (dir string) {
	t.Helper()
	dir = t.TempDir()
	for name, text := range given {
		path, mode := filepath.Join(dir, name), os.FileMode(0o644)
		if strings.HasPrefix(text, "#!") {
			mode = 0o755
		}
		require.NoError(t, os.MkdirAll(filepath.Dir(path), 0o755))
		require.NoError(t, os.WriteFile(path, []byte(text), mode))
	}
	t.Chdir(dir)
	t.Setenv("PATH", filepath.Join(dir, "bin")+":"+os.Getenv("PATH"))
	for _, name := range []string{"TMPDIR", "XDG_RUNTIME_DIR"} {
		t.Setenv(name, dir)
	}
	return dir
}

// port returns a port of this machine that is in use until the test ends, or was.
func port(t *testing.T, inUse bool) string {
	t.Helper()
	l := require.Value(net.Listen("tcp", "127.0.0.1:0"))(t)
	if inUse {
		t.Cleanup(func() { _ = l.Close() })
	} else {
		require.NoError(t, l.Close())
	}
	return strings.TrimPrefix(l.Addr().String(), "127.0.0.1:")
}

// differs are parts of messages that are others each time.
var differs = regexp.MustCompile(`\b(?:local|torchrun)-[\w.-]+|euryale-\d+|` +
	`\(\S+, process [^)]*\)|connect: connection refused|i/o timeout`) // the last two by chance

// longest is how many bytes a message may have: a few lines of a terminal.
const longest = 450

// TestMistakesAreExplained: testdata/messages.txt has what a user is told, word for word.
func TestMistakesAreExplained(t *testing.T) {
	text := "\n" + string(require.Value(os.ReadFile("testdata/messages.txt"))(t)) + "\n"
	require.Check(t, len(mistakes) >= 60 && strings.Count(text, "\n\n") == len(mistakes)+1,
		"%d mistakes, and testdata/messages.txt has %d", len(mistakes),
		strings.Count(text, "\n\n")-1)
	for _, c := range mistakes {
		t.Run(c.what, func(t *testing.T) {
			dir, used, free := lay(t), port(t, true), port(t, false)
			for _, e := range c.env {
				name, value, _ := strings.Cut(e, "=")
				t.Setenv(name, strings.NewReplacer("USED", used, "FREE", free).Replace(value))
			}
			entry, says := c.what, ""
			if c.do == nil {
				entry += ": euryale " + c.line
				_, _, says = commandLine(strings.Fields(c.line)...)
			} else if err := c.do(&maker{t}); err != nil {
				says = err.Error()
			}
			says = strings.NewReplacer(dir, "DIR", ":"+used, ":PORT").Replace(says)
			says = "\n" + strings.TrimSpace(differs.ReplaceAllString(says, "..."))
			entry += strings.ReplaceAll(says, "\n", "\n    ")
			require.Check(t, len(says) <= longest, "%d bytes: %s", len(says), says)
			require.Check(t, strings.Contains(text, "\n\n"+entry+"\n\n"),
				"testdata/messages.txt has no such entry:\n%s\n", entry)
		})
	}
}
