//go:build gpu

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"sync"
	"testing"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale"
	"github.com/euryale-ml/euryale/autograd"
	"github.com/euryale-ml/euryale/autograd/solver"
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/gpu"
	"github.com/euryale-ml/euryale/internal/hierarchy"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/ops"
	"github.com/euryale-ml/euryale/vm"
)

// onGPUs runs rank on two GPUs, as Init composes their communicators.
func onGPUs(t *testing.T, rank func(comm backend.Communicator) error) {
	t.Helper()
	if needNCCL(t) < 2 {
		t.Skip("one GPU")
	}
	b, err := choose("nccl")
	require.NoError(t, err)
	err = euryale.Run(context.Background(), 2, func(comm backend.Communicator,
		_ sync.Locker) error {
		return rank(comm)
	}, b)
	if closer, ok := b.(io.Closer); ok {
		err = errors.Join(err, closer.Close())
	}
	require.NoError(t, err)
}

// sums checks an all-reduce of floats on the device.
func sums(comm backend.Communicator, n int) error {
	d := comm.Device()
	memory, err := d.Alloc(4 * n)
	if err != nil {
		return err
	}
	b := memory.As(backend.F32)
	x := make([]float32, n)
	for i := range x {
		x[i] = float32(i%7 + comm.Rank())
	}
	err = errors.Join(copyOn(d, b, backend.Of(x)),
		backend.Run(comm, backend.Collective{Kind: backend.AllReduce}, b, b), copyOn(
			d, backend.Of(x), b), d.Free(memory))
	for i, got := range x {
		if want := float32(2*(i%7) + 1); got != want && err == nil {
			err = fmt.Errorf("element %d is %v, want %v", i, got, want)
		}
	}
	return err
}

func TestAllReducesUseLowLatencyOnGPU(t *testing.T) {
	noTuning(t)
	for mode, used := range map[string]func(gpu.Usage) int64{
		"ll":       func(u gpu.Usage) int64 { return u.LL },
		"one-shot": func(u gpu.Usage) int64 { return u.OneShot },
		"two-shot": func(u gpu.Usage) int64 { return u.TwoShot },
		"off":      func(u gpu.Usage) int64 { return u.NCCL },
	} {
		t.Run(mode, func(t *testing.T) {
			t.Setenv("EURYALE_LOWLATENCY", mode)
			onGPUs(t, func(comm backend.Communicator) error {
				low, ok := backend.As[*gpu.Communicator](comm)
				if !ok || (low.Refused() == "") != (mode != "off") {
					return fmt.Errorf("refused: %q", low.Refused())
				}
				if err := sums(comm, 1000); err != nil {
					return err
				}
				if n := used(low.Usage()); n != 1 {
					return fmt.Errorf("%+v", low.Usage())
				}
				return nil
			})
		})
	}
}

// The flat communicator and those of the phases each have kernels.
func TestHierarchyUsesLowLatencyOnGPU(t *testing.T) {
	noTuning(t)
	t.Setenv("EURYALE_LOWLATENCY", "one-shot")
	for _, topology := range []string{"2x1", "1x2"} {
		t.Run(topology, func(t *testing.T) {
			t.Setenv("EURYALE_TOPOLOGY", topology)
			onGPUs(t, func(comm backend.Communicator) error {
				for range 3 {
					if err := sums(comm, 1001); err != nil {
						return err
					}
				}
				flat, _ := backend.As[*gpu.Communicator](comm)
				h, ok := backend.As[*hierarchy.Communicator](comm)
				if !ok { // one machine
					if n := flat.Usage().OneShot; n != 3 {
						return fmt.Errorf("flat: %+v", flat.Usage())
					}
					return nil
				}
				spread, ok := backend.As[*gpu.Communicator](h.Between())
				if !ok || spread.Usage().Push != 3 || h.Stats().Calls != 3 {
					return fmt.Errorf("%+v, %+v", spread.Usage(), h.Stats())
				}
				return nil
			})
		})
	}
}

// A node of a graph and the exchange of gradients, on the device, use the kernels without being
// told.
func TestGraphsAndTrainingUseLowLatencyOnGPU(t *testing.T) {
	noTuning(t)
	t.Setenv("EURYALE_LOWLATENCY", "ll")
	var build sync.Mutex
	onGPUs(t, func(comm backend.Communicator) error {
		low, _ := backend.As[*gpu.Communicator](comm)
		before := low.Usage().LL
		if err := sumAndTrain(comm, &build); err != nil {
			return err
		}
		// The parameter's first broadcast is no all-reduce.
		if n := low.Usage().LL - before; n != 3 {
			return fmt.Errorf("%d calls used the kernels, want that of the node, that of its "+
				"gradient and that of a bucket: %+v", n, low.Usage())
		}
		return nil
	})
}

// sumAndTrain takes a step with the loss sum(w * allreduce(x * w)), for w of ones and
// x of the rank's number plus one.
func sumAndTrain(comm backend.Communicator, build sync.Locker) (err error) {
	const n = 1000
	g := gorgonia.NewGraph()
	input := func(name string, value float32) *gorgonia.Node {
		v := tensor.New(tensor.WithShape(n), tensor.WithBacking(slices.Repeat([]float32{value}, n)))
		return gorgonia.NewVector(g, tensor.Float32, gorgonia.WithName(name), gorgonia.WithShape(n),
			gorgonia.WithValue(v))
	}
	build.Lock() // Gorgonia's table of operations is not for several goroutines
	x, w := input("x", float32(comm.Rank()+1)), input("w", 1)
	y, err := ops.AllReduce(comm, backend.Sum, gorgonia.Must(gorgonia.HadamardProd(x, w)))
	if err == nil {
		_, err = gorgonia.Grad(
			gorgonia.Must(gorgonia.Sum(gorgonia.Must(gorgonia.HadamardProd(w, y)))), w)
	}
	build.Unlock()
	if err != nil {
		return err
	}
	machine, err := vm.New(g, comm.Device(), vm.WithSolver(&solver.SGD{Rate: 1}, w),
		vm.WithDataParallel(comm, autograd.WithSum()))
	if err != nil {
		return err
	}
	if err := errors.Join(machine.RunAll(), machine.Close()); err != nil {
		return err
	}
	// Of a rank, the gradient is y = 1 + 2, and x times the sum of w over the ranks, 2.
	if got, want := w.Value().Data().([]float32),
		slices.Repeat([]float32{1 - (3 + 2*1) - (3 + 2*2)}, n); !slices.Equal(got, want) {
		return fmt.Errorf("w is %v, want %v", got[:3], want[:3])
	}
	return nil
}

func TestTuneMeasuresWhatExplainKnowsOnGPU(t *testing.T) {
	if needNCCL(t) < 2 {
		t.Skip("one GPU")
	}
	noTuning(t)
	var notes bytes.Buffer
	cmd := command(t, "bench", "--tune", "--inproc", "--backend=nccl", "-n", "2", "--min=4K",
		"--max=4K", "--time=1ms", "--json")
	cmd.Stderr = &notes
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("%v\n%s", err, notes.String())
	}
	rows := 0
	for in := json.NewDecoder(bytes.NewReader(out)); ; rows++ {
		var r gpu.Row
		if err := in.Decode(&r); err == io.EOF {
			break
		} else if err != nil {
			t.Fatal(err)
		}
		if len(r.Samples) != 1 || r.Samples[0].NCCL <= 0 ||
			r.Samples[0].OneShot <= 0 && r.Samples[0].Push <= 0 || r.Ranks != 2 ||
			r.Model == "" || !strings.Contains(r.Source, "NCCL") {
			t.Errorf("%+v", r)
		}
		t.Log(r)
	}
	if rows != 8 {
		t.Errorf("%d rows, want those of 3 types of 2 collectives, and one of 2 others", rows)
	}
	text, err := command(t, "explain", "allreduce", "4K", "--dtype=bf16").CombinedOutput()
	if err != nil || !strings.Contains(string(text), "measured (euryale bench --tune, ") {
		t.Errorf("%v: %s", err, text)
	}
}

// copyOn copies between the host and a device, to the end.
func copyOn(d backend.Device, dst, src backend.Buffer) error {
	if err := d.Default().Move(dst, src); err != nil {
		return err
	}
	e, err := d.Default().Record()
	if err != nil {
		return err
	}
	return e.Join(context.Background())
}
