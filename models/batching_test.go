package models_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/autograd"
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/residence"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/internal/testing/testenv"
	"github.com/euryale-ml/euryale/layers"
	"github.com/euryale-ml/euryale/models"
	"github.com/euryale-ml/euryale/vm"
)

// mix is what a generator may be asked for.
type mix struct {
	folder, adapter string
	window          int // of mistral
	models.GenerateOptions
	models.Sampling
	prompts [][]int
}

func (x mix) String() string {
	return fmt.Sprintf("%s %s, window %d, %d rows of %d, %+v, prompts %v", x.folder, x.adapter,
		x.window, x.Batch, x.Context, x.Sampling, x.prompts)
}

// drawMix draws prompts of all lengths, of which some fill the context and some have several
// pieces; greedy or not, with a stop token or not.
func drawMix(r *rand.Rand) mix {
	x := mix{folder: folders[r.IntN(len(folders))]}
	x.Batch, x.Context = 1+r.IntN(6), 10+r.IntN(71)
	if x.folder != "gpt2" && r.IntN(4) == 0 {
		x.Context = 600 + r.IntN(600)
	}
	if x.folder == "mistral" {
		x.window = 1 + r.IntN(x.Context)
	}
	if (x.folder == "gpt2" || x.folder == "llama3") && r.IntN(2) == 0 {
		x.adapter = filepath.Join("testdata", x.folder, "adapter")
	}
	x.Seed, x.Max, x.Stop = r.Uint64(), 1+r.IntN(20), []int{}
	if r.IntN(2) == 0 {
		x.Temperature, x.TopK = 0.5+r.Float64(), r.IntN(20)
	}
	for range r.IntN(4) {
		x.Stop = append(x.Stop, r.IntN(61))
	}
	for range 1 + r.IntN(10) {
		p := make([]int, 1+r.IntN(min(x.Context, 40)))
		if r.IntN(5) == 0 {
			p = make([]int, 1+r.IntN(x.Context))
		}
		for i := range p {
			p[i] = r.IntN(61)
		}
		x.prompts = append(x.prompts, p)
	}
	return x
}

// cut makes the context, and prompts, no longer than some positions.
func (x *mix) cut(positions int) {
	x.Context = min(x.Context, positions)
	for i, p := range x.prompts {
		x.prompts[i] = p[:min(len(p), x.Context)]
	}
}

// model loads the folder of a mix.
func (x mix) model(t *testing.T) *models.Model {
	t.Helper()
	dir := filepath.Join("testdata", x.folder)
	if x.window > 0 {
		dir = copied(t, x.folder)
		configured("sliding_window", x.window)(t, dir)
	}
	m := require.Value(loaded(dir, x.adapter))(t)
	t.Cleanup(func() { m.Close() })
	return m
}

// generate returns the continuations of prompts by a generator with some options.
func (x mix) generate(m *models.Model, d backend.Device, o models.GenerateOptions,
	prompts ...[]int) ([][]int, error) {
	g, err := models.NewGenerator(m, d, o)
	if err != nil {
		return nil, err
	}
	rows := make([][]int, len(prompts))
	err = g.Generate(context.Background(), prompts, x.Sampling, func(row, token int) error {
		rows[row] = append(rows[row], token)
		return nil
	})
	return rows, errors.Join(err, g.Close())
}

// likeliest returns the likeliest token behind each of some tokens, by a graph without caches.
func likeliest(t *testing.T, m *models.Model, ids []int) []int {
	t.Helper()
	layout := require.Value(layers.NewLayout(autograd.Solo(), 1, 1, 1))(t)
	defer layout.Close()
	b := layers.NewBuilder(gorgonia.NewGraph(), layout, tensor.Float32, 1)
	tokens := b.Tokens("tokens", 1, 1, len(ids))
	y := require.Value(m.Logits(b, tokens))(t)
	machine := require.Value(vm.New(b.Graph(), nil, vm.Eval(), vm.Keep(y.Node)))(t)
	defer machine.Close()
	require.NoError(t, errors.Join(tokens.Set(ids), machine.RunAll()))
	logits, next := y.Value().Data().([]float32), make([]int, len(ids))
	for i := range next {
		row := logits[i*m.Vocabulary:][:m.Vocabulary]
		next[i] = slices.Index(row, slices.Max(row))
	}
	return next
}

// TestAMixIsWhatItsPromptsAreAloneRaced: more prompts than rows, of other lengths, that end before
// others or fill the context, drawn or not, change none. Alone they have the tokens that a graph
// without caches scores highest.
func TestAMixIsWhatItsPromptsAreAloneRaced(t *testing.T) { mixes(t, nil, 16, 1200) }

func TestAMixOnADeviceIsWhatItsPromptsAreAlone(t *testing.T) { mixes(t, fakeDevice(t), 8, 80) }

// mixes draws mixes of contexts up to one.
func mixes(t *testing.T, d backend.Device, seeds uint64, context int) {
	for seed := range seeds {
		x := drawMix(rand.New(rand.NewPCG(seed, 1)))
		x.cut(context)
		m := x.model(t)
		got, err := x.generate(m, d, x.GenerateOptions, x.prompts...)
		require.That(t, err == nil, "seed %d, %v: %v", seed, x, err)
		one := x.GenerateOptions
		one.Batch = 1
		want, err := x.generate(m, nil, one, x.prompts...)
		require.That(t, err == nil, "seed %d, %v: %v", seed, x, err)
		for i, p := range x.prompts {
			require.That(t, slices.Equal(got[i], want[i]), "seed %d, %v: row %d is %v, alone %v",
				seed, x, i, got[i], want[i])
			if x.Temperature > 0 {
				continue
			}
			next := likeliest(t, m, slices.Concat(p, want[i]))[len(p)-1:]
			most := min(x.Max, x.Context-len(p))
			if n := len(want[i]); n < most {
				require.Check(t, slices.Contains(x.Stop, next[n]),
					"seed %d, %v: row %d ends after %v, before %d", seed, x, i, want[i], next[n])
			}
			require.That(t, len(want[i]) <= most && slices.Equal(want[i], next[:len(want[i])]),
				"seed %d, %v: row %d is %v, without caches %v", seed, x, i, want[i], next)
		}
	}
}

// TestRowsTakeTurns: a row that ends makes room while the others go on, which wait for a piece of a
// long prompt, and not for all.
func TestRowsTakeTurns(t *testing.T) {
	g := generator(t, "llama3", nil, models.GenerateOptions{Batch: 2, Context: 1100})
	var turns []int
	require.NoError(t, g.Generate(context.Background(), [][]int{{3}, make([]int, 1098),
		make([]int, 1024)}, models.Sampling{Max: 9, Stop: []int{}}, func(row, _ int) error {
		turns = append(turns, row)
		return nil
	}))
	// three pieces, after which row 1 has room for two tokens, and then two pieces
	require.Slices(t, "rows", turns[:10], []int{0, 0, 0, 1, 0, 1, 0, 2, 0, 2})
}

// tensorParallel compares ranks that share the weights with one.
func tensorParallel(t *testing.T, k testenv.Kind, x mix, tp int) {
	t.Helper()
	want, err := x.generate(x.model(t), nil, x.GenerateOptions, x.prompts...)
	require.That(t, err == nil, "%v: %v", x, err)
	var build sync.Mutex
	ms := make([]*models.Model, tp)
	for i := range ms {
		ms[i] = x.model(t)
	}
	withinOf(t, k, layers.Sizes{DP: 1, SP: 1, TP: tp}, func(r *testenv.Rank,
		l *layers.Layout) error {
		o := x.GenerateOptions
		o.Layout, o.Build = l, &build
		got, err := x.generate(ms[r.Comm.Rank()], r.Comm.Device(), o, x.prompts...)
		if err == nil && fmt.Sprint(got) != fmt.Sprint(want) {
			err = fmt.Errorf("rank %d of %d, %v: %v, one has %v", r.Comm.Rank(), tp, x, got, want)
		}
		return err
	})
}

// TestRanksThatShareTheWeightsGenerateWhatOneDoesRaced: heads, hidden units and the vocabulary need
// not divide evenly.
func TestRanksThatShareTheWeightsGenerateWhatOneDoesRaced(t *testing.T) {
	for seed := range uint64(10) {
		r := rand.New(rand.NewPCG(seed, 2))
		x, tp := drawMix(r), 2+2*r.IntN(2)
		if x.cut(80); x.folder == "gpt2" {
			tp = 2 + r.IntN(3)
		}
		tensorParallel(t, testenv.Hosts, x, tp)
	}
}

func TestRanksThatShareTheWeightsOnDevices(t *testing.T) {
	shareOnDevices(t, testenv.Devices, "gpt2", "llama3", "mistral")
}

func shareOnDevices(t *testing.T, k testenv.Kind, folders ...string) {
	for i, folder := range folders {
		x := drawMix(rand.New(rand.NewPCG(uint64(i), 3)))
		x.folder, x.adapter, x.window, x.Context, x.Max = folder, "", 0, 40, 6
		if x.Temperature = float64(i % 2); folder == "mistral" {
			x.window = 7
		}
		x.prompts = [][]int{{1, 2, 3}, {4}, slices.Repeat([]int{5, 6, 7}, 6), {8, 9}}
		t.Run(folder, func(t *testing.T) { tensorParallel(t, k, x, 2) })
	}
}

// TestRanksEndAGenerationTogether: the context of one, or an error of its caller, ends it on all
// ranks after the same step, and other arguments are refused on all.
func TestRanksEndAGenerationTogether(t *testing.T) {
	reason, other := errors.New("enough"), errors.New("of another rank")
	var build sync.Mutex
	within(t, layers.Sizes{DP: 1, SP: 1, TP: 2}, func(l *layers.Layout, _ sync.Locker) error {
		rank := l.Comm(layers.Tensor).Rank()
		m := load(t, filepath.Join("testdata", "llama3"))
		defer m.Close()
		g, err := models.NewGenerator(m, nil, models.GenerateOptions{Layout: l, Build: &build})
		if err != nil {
			return err
		}
		defer g.Close()
		for _, by := range []string{"context", "caller", "last token", "prompts", "check",
			"closed"} {
			ctx, cancel := context.WithCancelCause(context.Background())
			n, s, prompt := 0, models.Sampling{Max: 20, Stop: []int{}}, []int{1, 2}
			switch {
			case by == "last token":
				s.Max = 3
			case by == "prompts" && rank == 1:
				prompt = []int{1, 3}
			case by == "check" && rank == 1:
				prompt = nil
			case by == "closed" && rank == 1:
				require.NoError(t, g.Close())
			}
			err := g.Generate(ctx, [][]int{prompt}, s, func(_, _ int) error {
				if n++; n == 3 && rank == 1 && by == "context" {
					cancel(reason)
				} else if n == 3 && rank == 1 {
					return reason
				}
				return nil
			})
			cancel(nil)
			if _, wrong := autograd.Gather(l.Comm(layers.Tensor), 1); wrong != nil {
				return fmt.Errorf("%s, rank %d: %w", by, rank, wrong) // which has stayed
			}
			want, tokens := []error{backend.ErrAborted, reason}[rank], 3+1-rank
			switch by {
			case "context":
				tokens = 3
			case "caller":
				tokens = 3
			case "last token":
				if tokens = 3; rank == 0 {
					want = nil
				}
			case "prompts":
				want, tokens = backend.ErrMismatch, 0
				if rank == 0 && err == nil {
					return errors.New("other prompts are not refused")
				}
			case "check", "closed":
				want, tokens = []error{other, backend.ErrArgument}[rank], 0
			}
			if rank == 0 && want == other {
				require.Fails(t, by, err, "rank 1 cannot go on", "bad argument")
				err = want
			}
			if !errors.Is(err, want) || n != tokens {
				return fmt.Errorf("%s, rank %d: %d tokens, want %d: %v, want %v", by, rank, n,
					tokens, err, want)
			}
		}
		return nil
	})
}

// TestRanksHearOfTheGeneratorThatOneCannotMake, and of the run that one cannot go on with.
func TestRanksHearOfTheGeneratorThatOneCannotMake(t *testing.T) {
	var build sync.Mutex
	within(t, layers.Sizes{DP: 1, SP: 1, TP: 2}, func(l *layers.Layout, _ sync.Locker) error {
		rank, m := l.Comm(layers.Tensor).Rank(), load(t, filepath.Join("testdata", "llama3"))
		defer m.Close()
		lacking := gorgonia.NewScalar(gorgonia.NewGraph(), tensor.Float32,
			gorgonia.WithName("none"))
		for _, wrong := range []struct {
			models.GenerateOptions // of rank 1
			says                   string
		}{
			{models.GenerateOptions{Batch: -1}, "rank 1 cannot go on: bad argument: a batch of -1"},
			{models.GenerateOptions{Learnables: gorgonia.Nodes{lacking}},
				"rank 1 cannot go on: bad argument: the model has no learnable none"},
			{models.GenerateOptions{Batch: 2}, "a batch of 2"},
		} {
			o := models.GenerateOptions{}
			if rank == 1 {
				o = wrong.GenerateOptions
			}
			o.Layout, o.Build = l, &build
			_, err := models.NewGenerator(m, nil, o)
			require.Fails(t, fmt.Sprint("rank ", rank), err, wrong.says)
		}
		b := layers.NewBuilder(gorgonia.NewGraph(), l, tensor.Float32, 0)
		build.Lock()
		require.NoError(t, require.Err(m.Logits(b, b.Tokens("tokens", 1, 1, 4))))
		build.Unlock()
		o := models.GenerateOptions{Layout: l, Build: &build, Learnables: b.Learnables()}
		g, err := models.NewGenerator(m, nil, o)
		require.NoError(t, err)
		defer g.Close()
		s := models.Sampling{Max: 9}
		err = g.Generate(t.Context(), [][]int{{1, 2}}, s, func(_, _ int) error {
			if rank == 1 {
				w := b.Learnables()[0].Value().(*tensor.Dense).Float32s()
				residence.LeaveToOthers(backend.Of(w), 0, 0)
			}
			return nil
		})
		require.Fails(t, fmt.Sprint("rank ", rank), err, "has only this rank's shard")
		require.Check(t, rank == 1 || strings.Contains(err.Error(), "rank 1"), "%v", err)
		return nil
	})
}

// TestLayoutsThatCannotGenerateAreRefused by a sentence.
func TestLayoutsThatCannotGenerateAreRefused(t *testing.T) {
	for s, says := range map[layers.Sizes]string{
		{DP: 1, SP: 2, TP: 1}: "shards positions, which come one at a time",
		{DP: 1, SP: 1, TP: 3}: "the tensor group shards",
		{DP: 1, SP: 1, TP: 8}: "each needs a part: use fewer ranks",
	} {
		var build sync.Mutex
		within(t, s, func(l *layers.Layout, _ sync.Locker) error {
			m := load(t, filepath.Join("testdata", "llama3"))
			_, err := models.NewGenerator(m, nil, models.GenerateOptions{Layout: l, Build: &build})
			require.Fails(t, fmt.Sprint(s), err, says)
			return nil
		})
	}
}
