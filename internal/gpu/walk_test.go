package gpu

import (
	"context"
	"errors"
	"fmt"
	"path"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/backend"
	peers "github.com/euryale-ml/euryale/internal/kernels/cuda"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/internal/testing/testranks"
	"github.com/euryale-ml/euryale/observe"
	"github.com/euryale-ml/euryale/ops"
)

// fakeDriver is where a walk ends: it keeps the functions that are on the stack when a kernel is
// launched, the outermost first.
type fakeDriver struct {
	mu    sync.Mutex
	walks [][]string
}

func (d *fakeDriver) Launch(peers.Launch) error {
	pcs := make([]uintptr, 100)
	frames := runtime.CallersFrames(pcs[:runtime.Callers(2, pcs)])
	var walk []string
	for more := true; more; {
		var f runtime.Frame
		if f, more = frames.Next(); strings.HasPrefix(f.Function,
			"github.com/euryale-ml/euryale/") && !strings.HasSuffix(f.File, "_test.go") {
			walk = append(walk, strings.TrimPrefix(f.Function, "github.com/euryale-ml/euryale/"))
		}
	}
	slices.Reverse(walk)
	walk = append(walk[slices.Index(walk, "ops.(*collectiveOp).StartOn"):], "driver.launch")
	d.mu.Lock()
	defer d.mu.Unlock()
	d.walks = append(d.walks, walk)
	return nil
}

// room is the package of a function.
func room(function string) string {
	dir, base := path.Split(function)
	base, _, _ = strings.Cut(base, ".")
	return dir + base
}

// TestBufferWalk counts what a buffer passes from the node of ops.AllReduce to the driver, on a
// device of the test with what Init puts around a communicator. The walk is the stack of the
// driver's launch, from the op's StartOn on, which plans of package vm call. A stop is a function
// that is called from another package than its own: a room that the reader has to enter. It is
// upward if the walk has been in that room before: a lower room then calls back into one above it.
// Functions are all of the walk.
func TestBufferWalk(t *testing.T) {
	g := newRig(t)
	d := &fakeDriver{}
	comms := g.group(t, 2, same(options()))
	each(t, comms, func(c *Communicator) error {
		return allReduceNode(c, func() { g.with(func() { g.driver = d }) })
	})
	require.That(t, len(d.walks) == 2, "%d kernels were launched, want one on each rank",
		len(d.walks))
	walk := d.walks[0]
	stops, upward, before := 1, 0, []string{room(walk[0])}
	for i, f := range walk[1:] {
		here := room(f)
		if here == room(walk[i]) {
			continue
		}
		stops++
		if slices.Contains(before, here) {
			upward++
		}
		before = append(before, here)
	}
	text := fmt.Sprintf("stops=%d upward=%d functions=%d", stops, upward, len(walk))
	t.Logf("%s\n%s", text, strings.Join(walk, "\n"))
	require.Check(t, stops <= 6 && upward <= 0, "%s, want at most stops=6 upward=0", text)
}

// allReduceNode runs the op of a node on memory of the device. It calls begin when everything
// but that is done.
func allReduceNode(c *Communicator, begin func()) error {
	whole := backend.WithHooks(c, observe.New(c.Rank(), 10))
	x := gorgonia.NewTensor(gorgonia.NewGraph(), tensor.Float32, 1, gorgonia.WithShape(1024),
		gorgonia.WithName("x"))
	y := testranks.Must(ops.AllReduce(whole, backend.Sum, x))
	memory := testranks.Must(c.Device().Alloc(2 * 4 * 1024))
	in, out := memory.Slice(0, 4*1024).As(backend.F32), memory.Slice(4*1024, 8*1024).As(backend.F32)
	testranks.NoError(backend.Barrier(c)) // ranks have their memory
	begin()
	op := y.Op().(interface {
		StartOn(q backend.Queue, y, scratch backend.Buffer, x ...backend.Buffer) (backend.Work,
			error)
	})
	w := testranks.Must(op.StartOn(c.Device().Default(), out, backend.Buffer{}, in))
	return errors.Join(w.Join(context.Background()), c.Device().Free(memory))
}
