//go:build linux

package layers_test

import (
	"context"
	"errors"
	"fmt"
	"runtime/debug"
	"slices"
	"sync"
	"testing"

	"golang.org/x/sys/unix"
	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/autograd/solver"
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/backend/host"
	"github.com/euryale-ml/euryale/internal/testing/fakedevice"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/internal/testing/testranks"
	"github.com/euryale-ml/euryale/layers"
	"github.com/euryale-ml/euryale/rendezvous"
	"github.com/euryale-ml/euryale/vm"
)

// lazy is the host with memory that takes none until it is written: arenas of plans that nobody
// runs.
type lazy struct{ host.Device }

func (lazy) Alloc(nbytes int) (backend.Buffer, error) {
	const lazily = unix.MAP_ANON | unix.MAP_PRIVATE | unix.MAP_NORESERVE
	m, err := unix.Mmap(-1, 0, max(nbytes, 1), unix.PROT_READ|unix.PROT_WRITE, lazily)
	return backend.Of(m[:min(len(m), nbytes)]), err
}

func (lazy) Free(b backend.Buffer) error {
	m := b.Bytes()
	return unix.Munmap(m[:max(len(m), 1)])
}

// measured is a rank on a device that counts its memory.
type measured struct {
	backend.Communicator
	device *fakedevice.Device
}

func (m *measured) Close() error { return errors.Join(m.Communicator.Close(), m.device.Close()) }

// peak returns the most bytes that a rank's device has held at a time: those of arenas, learnables,
// the solver, gradients, inputs, and what operations need besides.
func peak(ranks int, do func(comm backend.Communicator, build sync.Locker) error) (int, error) {
	var build sync.Mutex
	peaks := make([]int, ranks)
	errs := testranks.Run(ranks, func(w *rendezvous.World) (*measured, error) {
		comm := testranks.Must(host.Backend{}.Connect(context.Background(), w))
		d, err := fakedevice.New(lazy{})
		if err != nil {
			return nil, errors.Join(err, comm.Close())
		}
		return &measured{fakedevice.Over(comm, d), d}, nil
	}, func(m *measured) error {
		err := do(m.Communicator, &build)
		peaks[m.Rank()] = m.device.Peak()
		return err
	})
	return slices.Max(peaks), testranks.Join(errs)
}

// gpt is a transformer of 96 tokens, and how it is trained on sequences that ranks shard.
type gpt struct {
	blocks, width, context, ranks int
	learned                       bool // positions; else sinusoidal
}

// build builds the loss of one sequence.
func (g gpt) build(b *layers.Builder) (tokens, targets *layers.Tokens, loss layers.Node) {
	const vocabulary = 96
	tokens, targets = b.Tokens("tokens", 1, 1, g.context), b.Tokens("targets", 1, 1, g.context)
	embedding := b.Learn("words", layers.Normal(0.02), 0, vocabulary, g.width)
	x := b.To(b.Embedding(embedding, tokens), layers.Tensor, layers.Replicated)
	if g.learned {
		x = b.Positions("positions", x)
	} else {
		x = b.Sinusoids(0.02, x)
	}
	how := layers.AttentionOptions{Heads: 4, Causal: true}
	for i := range g.blocks {
		name := fmt.Sprint("block", i)
		x = b.Add(x, b.Attention(name+".a", b.LayerNorm(name+".n1", x), how))
		x = b.Add(x, b.MLP(name+".m", b.LayerNorm(name+".n2", x), 4*g.width))
	}
	return tokens, targets, b.CrossEntropy(b.Logits(b.LayerNorm("norm", x), embedding), targets)
}

// needs returns the bytes that training and evaluation in bfloat16 take until some steps are done:
// with none, those that are planned.
func (g gpt) needs(steps int) (int, error) {
	return peak(g.ranks, func(comm backend.Communicator, build sync.Locker) error {
		l, err := layers.NewLayout(comm, 1, g.ranks, 1)
		if err != nil {
			return err
		}
		build.Lock()
		b := layers.NewBuilder(gorgonia.NewGraph(), l, tensor.Float32, 1)
		tokens, targets, loss := g.build(b)
		build.Unlock()
		evaluation, err := vm.New(b.Graph(), comm.Device(), vm.Keep(loss.Node),
			vm.WithPrecision(vm.BF16), vm.Eval())
		if err != nil {
			return err
		}
		build.Lock()
		learnables, err := b.Grad(loss) // behind the evaluation, which has no gradients
		build.Unlock()
		if err != nil {
			return err
		}
		m, err := vm.New(b.Graph(), comm.Device(), vm.Keep(loss.Node), vm.WithPrecision(vm.BF16),
			vm.WithSolver(&solver.AdamW{Rate: 1e-3}, learnables...), b.Training(), vm.ClipNorm(1))
		if err != nil {
			return err
		}
		ids := make([]int, g.context)
		for range steps {
			err = errors.Join(err, tokens.Set(ids), targets.Set(ids), m.RunAll())
		}
		return errors.Join(err, m.Close(), evaluation.Close(), l.Close())
	})
}

// longest returns the model with the longest context that fits memory, to one part in 500, and its
// bytes. Bytes grow by nearly as much for each position, so a secant finds it.
func (g gpt) longest(memory int) (_ gpt, needed int, err error) {
	last, lastNeeded := 0, 0
	for range 10 {
		needed, err = g.needs(0)
		if err != nil || needed <= memory && needed > memory-memory/500 {
			return g, needed, err
		}
		if last == 0 {
			last, lastNeeded, g.context = g.context, needed, g.context/2
			continue
		}
		slope := float64(needed-lastNeeded) / float64(g.context-last)
		last, lastNeeded = g.context, needed
		g.context += int((float64(memory-needed) - float64(memory)/1000) / slope)
	}
	return g, 0, fmt.Errorf("no context has nearly %d bytes: %d has %d", memory, g.context, needed)
}

// TestLongestContextOnHost: W ranks that shard the positions fit contexts of 0.95 W times one
// rank's at least, and training needs no more memory than was planned. Learned positions, which
// every rank has, fit less.
func TestLongestContextOnHost(t *testing.T) {
	model, memory := gpt{blocks: 1, width: 64, context: 1 << 10}, 8<<20
	kinds := []bool{false}
	if full() {
		model, memory, kinds = gpt{blocks: 8, width: 512, context: 20 << 10}, 4<<30,
			[]bool{false, true}
		// Trainers that have closed would wait for the collector in as much memory as those at
		// work: 8 GiB instead of 4.
		defer debug.SetMemoryLimit(debug.SetMemoryLimit(3 << 30))
	}
	for _, learned := range kinds {
		one := 0 // context of one rank
		for _, W := range []int{1, 2, 4} {
			g := gpt{model.blocks, model.width, W * model.context, W, learned}
			g, needed, err := g.longest(memory)
			require.NoError(t, err)
			if W == 1 {
				one = g.context
			}
			growth := float64(g.context) / float64(one*W)
			t.Logf("learned %v: W=%d context=%d MiB=%d growth=%.3f W",
				learned, W, g.context, needed>>20, growth)
			require.Check(t, growth >= 0.95 || learned, "%d ranks fit a context of %d, one rank %d",
				W, g.context, one)
			if full() || W != 2 {
				continue
			}
			taken, err := g.needs(2)
			require.Check(t, err == nil && taken == needed,
				"training takes %d bytes, %d were planned: %v", taken, needed, err)
		}
	}
}
