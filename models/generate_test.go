package models_test

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"path/filepath"
	"slices"
	"sync"
	"testing"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/autograd"
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/backend/host"
	"github.com/euryale-ml/euryale/internal/testing/fakedevice"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/layers"
	"github.com/euryale-ml/euryale/models"
	"github.com/euryale-ml/euryale/vm"
)

// generator loads a folder and makes a generator of it.
func generator(t testing.TB, folder string, d backend.Device,
	o models.GenerateOptions) *models.Generator {
	t.Helper()
	m := require.Value(models.Load(filepath.Join("testdata", folder)))(t)
	g := require.Value(models.NewGenerator(m, d, o))(t)
	t.Cleanup(func() { require.NoError(t, errors.Join(g.Close(), m.Close())) })
	return g
}

// generated returns continuations.
func generated(t testing.TB, g *models.Generator, s models.Sampling, prompts ...[]int) [][]int {
	t.Helper()
	rows := make([][]int, len(prompts))
	require.NoError(t, g.Generate(context.Background(), prompts, s, func(row, token int) error {
		rows[row] = append(rows[row], token)
		return nil
	}))
	return rows
}

// rows returns a tensor of integers.
func (e expected) rows(t testing.TB, name string) (rows [][]int) {
	t.Helper()
	x := require.Value(e.Read(name))(t)
	rows = make([][]int, x.Shape[0])
	for i, id := range backend.View[int64](x.Data) {
		rows[i/x.Shape[1]] = append(rows[i/x.Shape[1]], int(id))
	}
	return rows
}

func fakeDevice(t testing.TB) backend.Device {
	d := require.Value(fakedevice.New(host.Device{}))(t)
	t.Cleanup(func() { require.NoError(t, d.Close()) })
	return d
}

// TestHuggingFaceGreedyTokens: every folder continues texts as transformers does.
func TestHuggingFaceGreedyTokens(t *testing.T) { greedyTokens(t, nil, 64) }

func TestGreedyTokensOfADevice(t *testing.T) { greedyTokens(t, fakeDevice(t), 64) }

func greedyTokens(t *testing.T, d backend.Device, tokens int) {
	for _, folder := range folders {
		t.Run(folder, func(t *testing.T) {
			e := expect(t, folder)
			g := generator(t, folder, d, models.GenerateOptions{Batch: 2, Context: 72})
			prompts, want := e.rows(t, "tokens"), e.rows(t, "greedy")
			for i := range prompts {
				prompts[i], want[i] = prompts[i][:8], want[i][:tokens]
			}
			for range 3 {
				got := generated(t, g, models.Sampling{Max: tokens, Stop: []int{}}, prompts...)
				require.That(t, fmt.Sprint(got) == fmt.Sprint(want), "%v, want %v", got, want)
			}
		})
	}
}

// TestDeviceChoosesWhatTheHostWouldChoose: tokens that a device takes, of logits that stay there,
// are those that the host takes of all logits, which top-k leaves one token each.
func TestDeviceChoosesWhatTheHostWouldChoose(t *testing.T) {
	choosesAsTheHost(t, fakeDevice(t), "gpt2", "llama3")
}

func choosesAsTheHost(t *testing.T, d backend.Device, folders ...string) {
	for _, folder := range folders {
		for _, p := range []vm.Precision{vm.F32, vm.BF16} {
			g := generator(t, folder, d, models.GenerateOptions{Batch: 3, Context: 40,
				Precision: p})
			tokens := expect(t, folder).rows(t, "tokens")
			prompts := [][]int{tokens[0][:3], tokens[1][:7], tokens[0][5:6]}
			there := generated(t, g, models.Sampling{Max: 12}, prompts...)
			here := generated(t, g, models.Sampling{Max: 12, Temperature: 1, TopK: 1}, prompts...)
			require.Check(t, fmt.Sprint(there) == fmt.Sprint(here), "%s in %v: %v, on the host %v",
				folder, p, there, here)
		}
	}
}

// TestPlansOfPromptsShareWeights: each length of prompts adds its values to what a device holds,
// and neither weights nor caches.
func TestPlansOfPromptsShareWeights(t *testing.T) {
	d := fakeDevice(t)
	g := generator(t, "gpt2", d, models.GenerateOptions{})
	tokens := expect(t, "gpt2").rows(t, "tokens")[0]
	held := func() int {
		_, bytes := d.(*fakedevice.Device).Live()
		return bytes
	}
	generated(t, g, models.Sampling{Max: 3}, tokens[:1])
	const weights = 4 * (61*24 + 80*24 + 2*12*24*24)
	before := held()
	generated(t, g, models.Sampling{Max: 3}, tokens[:17])
	if added := held() - before; before < weights || added > weights/2 {
		t.Errorf("%d bytes, and %d for another length, of weights of %d", before, added, weights)
	}
}

// TestRowsOfABatchAreThoseOfPromptsAloneRaced: prompts of other lengths, and rows that end before,
// change nothing; batches have room for more.
func TestRowsOfABatchAreThoseOfPromptsAloneRaced(t *testing.T) {
	for _, folder := range []string{"gpt2", "llama3"} {
		t.Run(folder, func(t *testing.T) { rowsAreThoseOfPromptsAlone(t, folder, nil) })
	}
}

func rowsAreThoseOfPromptsAlone(t *testing.T, folder string, d backend.Device) {
	tokens := expect(t, folder).rows(t, "tokens")
	prompts := [][]int{tokens[0][:3], tokens[1][:20], tokens[0][5:6], tokens[1][:16]}
	many := generator(t, folder, d, models.GenerateOptions{Batch: 5, Context: 40})
	one := generator(t, folder, d, models.GenerateOptions{Context: 40})
	together := generated(t, many, models.Sampling{}, prompts...)
	sampled := models.Sampling{Temperature: 1.5, TopK: 20, TopP: 0.9, Seed: 3, Max: 12}
	drawn := generated(t, many, sampled, prompts...)
	for i, p := range prompts {
		alone := generated(t, one, models.Sampling{}, p)[0]
		if !slices.Equal(together[i], alone) || len(alone) != 40-len(p) {
			t.Errorf("prompt %d: %v, alone %v", i, together[i], alone)
		}
	}
	alone := generated(t, one, sampled, prompts[0])[0]
	require.Check(t, slices.Equal(drawn[0], alone), "sampled: %v, alone %v", drawn[0], alone)
	// that the first one ends at its third token changes no other
	stop := together[0][2]
	for i, row := range generated(t, many, models.Sampling{Stop: []int{stop}, Max: 15},
		prompts...) {
		want := together[i][:15]
		if at := slices.Index(want, stop); at >= 0 {
			want = want[:at]
		}
		require.Slices(t, fmt.Sprintf("prompt %d stopped", i), row, want)
	}
}

// TestGeneratorSharesTheTensorsOfTraining: it generates from what learnables are now.
func TestGeneratorSharesTheTensorsOfTraining(t *testing.T) {
	m := require.Value(models.Load(filepath.Join("testdata", "gpt2")))(t)
	defer m.Close()
	layout := require.Value(layers.NewLayout(autograd.Solo(), 1, 1, 1))(t)
	defer layout.Close()
	b := layers.NewBuilder(gorgonia.NewGraph(), layout, tensor.Float32, 1)
	require.NoError(t, require.Err(m.Logits(b, b.Tokens("tokens", 1, 1, 4))))
	g, err := models.NewGenerator(m, nil, models.GenerateOptions{Learnables: b.Learnables()})
	require.NoError(t, err)
	defer g.Close()
	e := expect(t, "gpt2")
	prompt, want := e.rows(t, "tokens")[0][:8], e.rows(t, "greedy")[0]
	s := models.Sampling{Max: 64}
	require.Slices(t, "generated", generated(t, g, s, prompt)[0], want)
	weights := b.Learnables()[0].Value().Data().([]float32)
	for i := range weights {
		weights[i] = -weights[i]
	}
	got := generated(t, g, s, prompt)[0]
	require.Check(t, !slices.Equal(got, want), "other weights change nothing")
}

// TestAdaptChangesNoGeneratorThatThereIs: graphs of prompts are built later, without the adapter.
func TestAdaptChangesNoGeneratorThatThereIs(t *testing.T) {
	m := load(t, filepath.Join("testdata", "llama3"))
	g := require.Value(models.NewGenerator(m, nil, models.GenerateOptions{}))(t)
	defer g.Close()
	require.NoError(t, m.LoadAdapter(filepath.Join("testdata", "llama3", "adapter")))
	e := expect(t, "llama3")
	prompt, want := e.rows(t, "tokens")[0][:8], e.rows(t, "greedy")[0]
	require.Slices(t, "generated", generated(t, g, models.Sampling{Max: 64}, prompt)[0], want)
}

// TestLearnablesOfAnotherModelAreRefused: the generator does not read the files in their place.
func TestLearnablesOfAnotherModelAreRefused(t *testing.T) {
	m := load(t, filepath.Join("testdata", "gpt2"))
	for name, dt := range map[string]tensor.Dtype{"gpt2": tensor.Float64,
		"llama3": tensor.Float32} {
		within(t, layers.Sizes{DP: 1, SP: 1, TP: 1}, func(l *layers.Layout,
			build sync.Locker) error {
			b := layers.NewBuilder(gorgonia.NewGraph(), l, dt, 1)
			if _, err := load(t, filepath.Join("testdata", name)).Logits(b,
				b.Tokens("tokens", 1, 1, 4)); err != nil {
				return err
			}
			_, err := models.NewGenerator(m, nil, models.GenerateOptions{
				Learnables: b.Learnables()})
			require.Check(t, errors.Is(err, backend.ErrArgument) && len(err.Error()) <= 300,
				"%s of %v: %v", name, dt, err)
			return nil
		})
	}
}

// TestGenerateEndsByItsContextAndItsCaller: no further step begins.
func TestGenerateEndsByItsContextAndItsCaller(t *testing.T) {
	g := generator(t, "gpt2", nil, models.GenerateOptions{})
	reason := errors.New("enough")
	for name, end := range map[string]func(cancel context.CancelCauseFunc) error{
		"caller":  func(context.CancelCauseFunc) error { return reason },
		"context": func(cancel context.CancelCauseFunc) error { cancel(reason); return nil },
	} {
		ctx, cancel := context.WithCancelCause(context.Background())
		n := 0
		err := g.Generate(ctx, [][]int{{1, 2}}, models.Sampling{}, func(_, _ int) error {
			if n++; n == 3 {
				return end(cancel)
			}
			return nil
		})
		require.Check(t, errors.Is(err, reason) && n == 3, "%s: %d tokens, and %v", name, n, err)
		cancel(nil)
	}
}

func TestGenerateRefuses(t *testing.T) {
	g := generator(t, "gpt2", nil, models.GenerateOptions{Batch: 2, Context: 10})
	p, long := []int{1}, make([]int, 11)
	for name, test := range map[string]struct {
		prompts [][]int
		s       models.Sampling
	}{
		"no prompt":            {nil, models.Sampling{}},
		"an empty one":         {[][]int{p, {}}, models.Sampling{}},
		"a long one":           {[][]int{long}, models.Sampling{}},
		"another vocabulary":   {[][]int{p, p, {3, 61}}, models.Sampling{}},
		"a negative token":     {[][]int{{-1, 3}}, models.Sampling{}},
		"a temperature":        {[][]int{p}, models.Sampling{Temperature: -1}},
		"greedy, and a draw":   {[][]int{p}, models.Sampling{Greedy: true, Temperature: 1}},
		"no temperature":       {[][]int{p}, models.Sampling{Temperature: math.NaN()}},
		"a probability":        {[][]int{p}, models.Sampling{TopP: 1.5}},
		"a negative number":    {[][]int{p}, models.Sampling{TopK: -1}},
		"a negative number of": {[][]int{p}, models.Sampling{Max: -1}},
	} {
		err := g.Generate(context.Background(), test.prompts, test.s, func(_, _ int) error {
			t.Errorf("%s: a token", name)
			return nil
		})
		require.Fails(t, name, err, backend.ErrArgument)
	}
	m := require.Value(models.Load(filepath.Join("testdata", "gpt2")))(t)
	defer m.Close()
	for _, o := range []models.GenerateOptions{{Batch: -1}, {Context: -1}, {Context: 81}} {
		require.Fails(t, fmt.Sprintf("%+v", o), require.Err(models.NewGenerator(m, nil, o)),
			backend.ErrArgument)
	}
	require.Report(t, g.Close())
	if err := g.Generate(context.Background(), [][]int{p}, models.Sampling{},
		func(_, _ int) error { return nil }); !errors.Is(err, backend.ErrArgument) {
		t.Errorf("closed: %v", err)
	}
}

// TestSamplingHasTheProbabilitiesOfTheLogits: how often each token is drawn is what the softmax of
// the logits says, of those that top-k and top-p leave.
func TestSamplingHasTheProbabilitiesOfTheLogits(t *testing.T) {
	logits := []float32{1, 3, -2, 2.5, 0, 3, float32(math.Inf(-1)), 2}
	for name, test := range map[string]struct {
		models.Sampling
		left []int
	}{
		"all":             {models.Sampling{Temperature: 1}, []int{0, 1, 2, 3, 4, 5, 7}},
		"hot":             {models.Sampling{Temperature: 2}, []int{0, 1, 2, 3, 4, 5, 7}},
		"top 3":           {models.Sampling{Temperature: 1, TopK: 3}, []int{1, 3, 5}},
		"top 2 of equals": {models.Sampling{Temperature: 0.5, TopK: 1}, []int{1}},
		// 0.311, 0.311, 0.189, 0.114, ...
		"top 0.7":           {models.Sampling{Temperature: 1, TopP: 0.7}, []int{1, 3, 5}},
		"top 0.1":           {models.Sampling{Temperature: 1, TopP: 0.1}, []int{1}},
		"top 0.75 of top 3": {models.Sampling{Temperature: 1, TopK: 3, TopP: 0.75}, []int{1, 5}},
		"more than there are": {models.Sampling{Temperature: 1, TopK: 99, TopP: 1},
			[]int{0, 1, 2, 3, 4, 5, 7}},
	} {
		t.Run(name, func(t *testing.T) {
			want, total := make([]float64, len(logits)), 0.0
			for _, i := range test.left {
				want[i] = math.Exp(float64(logits[i]) / test.Temperature)
				total += want[i]
			}
			const n = 20000
			counts, random := make([]float64, len(logits)), rand.New(rand.NewPCG(1, 2))
			for range n {
				token := require.Value(models.Draw(test.Sampling, logits, random))(t)
				counts[token]++
			}
			for i, w := range want {
				p := w / total
				if d := math.Abs(counts[i] - n*p); d > 4.5*math.Sqrt(n*p*(1-p)) {
					t.Errorf("token %d was drawn %v times of %d, want %v", i, counts[i], n, n*p)
				}
			}
		})
	}
	nan := float32(math.NaN())
	token, err := models.Draw(models.Sampling{}, []float32{nan, 1, 2}, nil)
	require.Check(t, token == 2, "NaN is the largest: %v, %v", token, err)
	require.Fails(t, "all are NaN, and there is no error",
		require.Err(models.Draw(models.Sampling{}, []float32{nan, nan}, nil)))
}

// TestDrawsAreThoseOfSortedTokens: selecting gives the tokens that sorting by probability gives.
func TestDrawsAreThoseOfSortedTokens(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 1))
	for i := range uint64(1000) {
		logits := make([]float32, 1+r.IntN(300))
		for j := range logits {
			if logits[j] = float32(3 * r.NormFloat64()); i%2 == 0 { // many are equal
				logits[j] = float32(math.Round(float64(logits[j])))
			}
		}
		s := models.Sampling{Temperature: 0.3 + r.Float64(), TopK: r.IntN(60),
			TopP: r.Float64()}
		got, err := models.Draw(s, logits, rand.New(rand.NewPCG(2, i)))
		want := drawnOfSorted(s, logits, rand.New(rand.NewPCG(2, i)))
		require.That(t, err == nil && got == want, "%+v of %v: token %d, want %d: %v", s, logits,
			got, want, err)
	}
}

// drawnOfSorted is Draw, the plain way.
func drawnOfSorted(s models.Sampling, logits []float32, r *rand.Rand) int {
	tokens := make([]int, len(logits))
	for i := range tokens {
		tokens[i] = i
	}
	slices.SortStableFunc(tokens, func(a, b int) int { return cmp.Compare(logits[b], logits[a]) })
	most := logits[tokens[0]]
	weight := func(token int) float64 {
		return math.Exp(float64(logits[token]-most) / s.Temperature)
	}
	sum := func(tokens []int) (total float64) {
		for _, token := range tokens {
			total += weight(token)
		}
		return total
	}
	if s.TopK > 0 && s.TopK < len(tokens) {
		tokens = tokens[:s.TopK]
	}
	n, total := 1, sum(tokens)
	for sum(tokens[:n]) < s.TopP*total {
		n++
	}
	tokens = tokens[:n]
	at := r.Float64() * sum(tokens)
	n = 1
	for n < len(tokens) && sum(tokens[:n]) <= at {
		n++
	}
	return tokens[n-1]
}
