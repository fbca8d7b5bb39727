//go:build linux

package autograd

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/testing/proctest"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/internal/testing/testenv"
	"github.com/euryale-ml/euryale/ops"
	"github.com/euryale-ml/euryale/rendezvous"
)

// The tests of this file start this test binary as the processes of a job.

func TestMain(m *testing.M) {
	proctest.Main(m, func(kind string) error {
		if kind == resumes {
			return resume()
		}
		err := process(testenv.Kind(kind))
		if err == nil {
			fmt.Println("done")
		}
		return err
	})
}

// process is one rank of a job. It says "ready" or what it lacks, then "done".
func process(k testenv.Kind) error {
	env, err := rendezvous.ReadEnv(os.Getenv)
	if err != nil {
		return err
	}
	connect := testenv.Host
	if k.OnGPU() {
		var lacks error
		if connect, lacks = testenv.OwnGPU(env.LocalRank); lacks != nil {
			fmt.Println("lacks:", lacks)
			return nil
		}
	}
	fmt.Println("ready")
	w, err := rendezvous.Join(context.Background(), env)
	if err != nil {
		return err
	}
	defer w.Close()
	own, err := connect(w)
	if err != nil {
		return err
	}
	r := rank{comm: own.Comm, build: new(sync.Mutex)}
	if err := errors.Join(runGraph(r), trainLinear(r)); err != nil {
		r.comm.Abort(err)
		return err
	}
	if os.Getenv("EURYALE_TEST_VICTIM") != "" {
		return trainForever(r)
	}
	return own.Close()
}

// runGraph runs a graph of an AllToAll and an AllReduce forward and backward:
//
//	loss = sum(w * AllReduce(AllToAll(x)^2)), x [2, 3, 2*P], w [2, 3*P, 2]
//
// Summed over the ranks, the gradient by x is 2*x*W with the sum W of all w,
// brought back by the inverse AllToAll.
func runGraph(r rank) error {
	P := r.comm.Size()
	g := gorgonia.NewGraph()
	x, w := r.counting(g, "x", r.comm.Rank(), 2, 3, 2*P), r.counting(g, "w", 10+r.comm.Rank(), 2,
		3*P, 2)
	y, err := ops.AllToAll(r.comm, 2, 1, x)
	if err != nil {
		return err
	}
	if y, err = ops.AllReduce(r.comm, backend.Sum, gorgonia.Must(gorgonia.Square(y))); err != nil {
		return err
	}
	grads, err := gorgonia.Grad(
		gorgonia.Must(gorgonia.Sum(gorgonia.Must(gorgonia.HadamardProd(y, w)))), x)
	if err != nil {
		return err
	}
	m := gorgonia.NewTapeMachine(g)
	defer m.Close()
	var want []float32
	for i := range 2 * 3 * 2 * P {
		b, j, c := i/(6*P), i/(2*P)%3, i%(2*P)
		total := 0
		for s := range P { // row j of this rank went to rank c/2, as row 3*rank+j
			total += count(10+s, (b*3*P+3*r.comm.Rank()+j)*2+c%2)
		}
		want = append(want, float32(2*count(r.comm.Rank(), i)*total))
	}
	for run := range 100 {
		if err := m.RunAll(); err != nil {
			return ops.Cause(err)
		}
		got, err := copied(grads[0].Value())
		if err != nil {
			return err
		}
		if dx := backend.View[float32](got); !slices.Equal(dx, want) {
			return fmt.Errorf("run %d: gradient %v, want %v", run, dx, want)
		}
		m.Reset()
	}
	return nil
}

// count is element i of a tensor of small integers.
func count(seed, i int) int { return (5*i+3*seed)%7 - 3 }

func (r rank) counting(g *gorgonia.ExprGraph, name string, seed int, shape ...int) *gorgonia.Node {
	data := make([]float32, tensor.Shape(shape).TotalSize())
	for i := range data {
		data[i] = float32(count(seed, i))
	}
	v := tensor.New(tensor.WithShape(shape...), tensor.WithBacking(data))
	return gorgonia.NewTensor(g, tensor.Float32, len(shape), gorgonia.WithName(name),
		gorgonia.WithShape(shape...), gorgonia.WithValue(v))
}

// trainForever trains until a peer is lost, and returns the error.
func trainForever(r rank) error {
	m, err := newLinear(r)
	if err != nil {
		return err
	}
	d, err := New(r.comm, m.params)
	if err != nil {
		return err
	}
	vm, err := m.build(d, false)
	if err != nil {
		return err
	}
	fmt.Println("under way")
	for step := 0; ; step++ {
		if err := m.step(d, vm, step); err != nil {
			return err
		}
	}
}

// startJob starts P ranks of a kind, and skips the test where they lack devices.
func startJob(t *testing.T, k testenv.Kind, P int, env ...string) []proctest.Rank {
	t.Helper()
	ranks := proctest.Start(t, string(k), P, env...)
	for r, rank := range ranks {
		said := rank.Next()
		if lacks, ok := strings.CutPrefix(said, "lacks: "); ok && r > 0 {
			t.Skip(lacks)
		} else if ok {
			testenv.Lacking(t, lacks)
		}
		require.That(t, said == "ready", "rank %d said %q", r, said)
	}
	return ranks
}

// processKinds are those that the ranks of a job can be of.
func processKinds() []testenv.Kind {
	return slices.DeleteFunc(testenv.OnHosts(), func(k testenv.Kind) bool {
		return k == testenv.Staged
	})
}

// TestProcesses runs a graph and trains with each rank in its own process.
func TestProcesses(t *testing.T) {
	testenv.Each(t, processKinds(), func(t *testing.T, k testenv.Kind) {
		for _, P := range []int{2, 4} {
			t.Run(fmt.Sprint(P), func(t *testing.T) {
				for r, rank := range startJob(t, k, P) {
					said := rank.Next()
					require.Check(t, said == "done", "rank %d said %q", r, said)
				}
			})
		}
	})
}

// TestKilledProcessEndsTheStep: the others' step fails, with its name.
func TestKilledProcessEndsTheStep(t *testing.T) {
	testenv.Each(t, processKinds(), func(t *testing.T, k testenv.Kind) {
		ranks := startJob(t, k, 2, "EURYALE_TEST_VICTIM=1")
		for r, rank := range ranks {
			said := rank.Next()
			require.That(t, said == "under way", "rank %d said %q", r, said)
		}
		ranks[1].Process.Kill()
		killed := time.Now()
		said := ranks[0].Next()
		took := time.Since(killed)
		require.Check(t, took <= proctest.Within(3*time.Second), "rank 0 ended after %v", took)
		require.Check(t, strings.Contains(said, "failed: ") && strings.Contains(said, "rank 1") &&
			strings.Contains(said, "bucket 0"), "rank 0 said %q", said)
	})
}
