package autograd

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"gorgonia.org/gorgonia"

	"github.com/euryale-ml/euryale/autograd/internal/checkpoint"
	"github.com/euryale-ml/euryale/autograd/solver"
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/internal/testing/testenv"
	"github.com/euryale-ml/euryale/internal/testing/testranks"
)

// valuesOf reads the float64 tensors of a safetensors file as its specification says, without the
// code that wrote it.
func valuesOf(t *testing.T, path string) map[string][]float64 {
	t.Helper()
	b := require.Value(os.ReadFile(path))(t)
	n := 8 + binary.LittleEndian.Uint64(b)
	var header map[string]struct {
		DType   string
		Offsets [2]uint64 `json:"data_offsets"`
	}
	require.NoError(t, json.Unmarshal(b[8:n], &header))
	all := map[string][]float64{}
	for name, e := range header {
		if e.DType != "F64" {
			continue
		}
		for part := range slices.Chunk(b[n+e.Offsets[0]:n+e.Offsets[1]], 8) {
			all[name] = append(all[name], math.Float64frombits(binary.LittleEndian.Uint64(part)))
		}
	}
	return all
}

// TestWeightsAreTheWholeModelByName: parameters, what is frozen, and running statistics come back
// from a file that others can read, with no solver and no communicator.
func TestWeightsAreTheWholeModelByName(t *testing.T) {
	m := require.Value(newFormat1())(t)
	model := append(slices.Clone(m.params), m.frozen)
	require.NoError(t, LoadWeights("testdata/format1/adam", model))
	require.Report(t, m.check())
	file := filepath.Join(t.TempDir(), "w.safetensors")
	for range 2 { // the second replaces the first
		require.NoError(t, SaveWeights(file, model))
	}
	want := map[string][]float64{"a.weight": {1, 2, 3, 4, 5, 6}, "a.bias": {10, 11, 12},
		"frozen": {100, 101}, "x_γ.running_mean": {1, 2, 3}, "x_γ.running_var": {4, 5, 6}}
	got := valuesOf(t, file)
	require.Check(t, maps.EqualFunc(got, want, slices.Equal), "the file has %v, want %v", got, want)
	require.Equal(t, "a.weight", headerOf(t, file)["a.weight"], "F64[2 3]")
	again, err := newFormat1()
	if err == nil {
		err = LoadWeights(file, gorgonia.Nodes{again.frozen, again.params[1], again.params[0]})
	}
	if err = errors.Join(err, again.check()); err != nil {
		t.Error(err)
	}
}

// TestWeightsAreReadFromCheckpoints: what the solver keeps is not among them.
func TestWeightsAreReadFromCheckpoints(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "checkpoint")
	model := []shaped{{"a", 1, []int{2}}, {"b", 10, []int{3}}}
	all(t, 1, func(r rank) error {
		p, s := nodes(model...), &solver.Adam{Rate: 1}
		d := testranks.Must(New(r.comm, p))
		return errors.Join(stepped(s, p, 1), d.Save(dir, s, nil), d.Close())
	})
	want := valuesOf(t, filepath.Join(newest(t, dir), checkpoint.ModelName))
	got := nodes(shaped{"b", 0, []int{3}}, shaped{"a", 0, []int{2}})
	require.NoError(t, LoadWeights(dir, got))
	for _, n := range got {
		require.Slices(t, n.Name(), numbers(n.Value()), want[n.Name()])
	}
}

// TestATensorThatNothingNeedsMayHaveAnyDType, as long as no variable has its name.
func TestATensorThatNothingNeedsMayHaveAnyDType(t *testing.T) {
	header := `{"a":{"dtype":"F64","shape":[1],"data_offsets":[0,8]},` +
		`"scale":{"dtype":"F8_E4M3","shape":[2],"data_offsets":[8,10]}}`
	file := filepath.Join(t.TempDir(), "w.safetensors")
	text := append(binary.LittleEndian.AppendUint64(nil, uint64(len(header))), header...)
	text = append(text, 0, 0, 0, 0, 0, 0, 0xf0, 0x3f, 0, 0)
	require.NoError(t, os.WriteFile(file, text, 0o600))
	a := nodes(shaped{"a", 0, []int{1}})
	require.Fails(t, "LoadWeights", LoadWeights(file, a), "named scale")
	if err := LoadWeights(file, a, NonStrict(nil)); err != nil || numbers(a[0].Value())[0] != 1 {
		t.Errorf("a is %v, %v", a[0].Value(), err)
	}
	err := LoadWeights(file, nodes(shaped{"scale", 0, []int{2}}), NonStrict(nil))
	require.Fails(t, "LoadWeights", err, "scale is F8_E4M3(2)")
	require.Fails(t, "ReadWeights", require.Err(ReadWeights(file)), "of F8_E4M3")
}

// TestWeightsThatDoNotFitChangeNothing: and the error names them.
func TestWeightsThatDoNotFitChangeNothing(t *testing.T) {
	file := filepath.Join(t.TempDir(), "w.safetensors")
	a, b := shaped{"a", 1, []int{2, 3}}, shaped{"b", 10, []int{3}}
	require.NoError(t, SaveWeights(file, nodes(a, b)))
	zero := func(name string, shape ...int) shaped { return shaped{name, 0, shape} }
	for name, tt := range map[string]struct {
		model []shaped
		wants []string
	}{
		"another name": {[]shaped{zero("a", 2, 3), zero("c", 3)},
			[]string{"the file has no c", "no variable is named b", "NonStrict"}},
		"more": {[]shaped{zero("a", 2, 3), zero("b", 3), zero("c", 3)},
			[]string{"the file has no c"}},
		"fewer": {[]shaped{zero("b", 3)}, []string{"no variable is named a, which the file has"}},
		"another shape": {[]shaped{zero("b", 3), zero("a", 3, 2)},
			[]string{"a is f64(2, 3), in this program f64(3, 2)"}},
	} {
		p := nodes(tt.model...)
		err := LoadWeights(file, p)
		for _, want := range append(tt.wants, file) {
			require.Fails(t, name, err, backend.ErrArgument, want)
		}
		for i, n := range p {
			if numbers(n.Value())[0] != tt.model[i].first {
				t.Errorf("%s: %s has changed", name, n.Name())
			}
		}
	}
	var missing, unexpected []string
	p := nodes(zero("c", 4), zero("a", 2, 3))
	err := LoadWeights(file, p, NonStrict(func(m, u []string) { missing, unexpected = m, u }))
	if err != nil || !slices.Equal(missing, []string{"c"}) ||
		!slices.Equal(unexpected, []string{"b"}) ||
		numbers(p[1].Value())[5] != 6 || numbers(p[0].Value())[3] != 3 {
		t.Errorf("%v: missing %v, unexpected %v, model %v", err, missing, unexpected, p[1].Value())
	}
	require.Fails(t, "another shape is loaded",
		LoadWeights(file, nodes(zero("a", 2, 2)), NonStrict(nil)))
}

// TestWeightsOnlyLoadsForAnotherSolver: whatever the options and the number of ranks that have
// saved, and the solver begins anew.
func TestWeightsOnlyLoadsForAnotherSolver(t *testing.T) {
	for _, saved := range []string{"plain", "topk", "partial"} {
		for _, loaded := range []string{"plain", "threshold", "partial"} {
			t.Run(saved+" to "+loaded,
				func(t *testing.T) { weightsOnly(t, compressions[saved], compressions[loaded]) })
		}
	}
}

func weightsOnly(t *testing.T, saved, loaded []Option) {
	dir := filepath.Join(t.TempDir(), "checkpoint")
	var want [][]float32
	teach(t, 2, heavyBall, func(l *lesson) error {
		err := errors.Join(l.steps(0, 3), l.d.Save(dir, l.solver, map[string]int{"step": 3}))
		if l.comm.Rank() == 0 {
			want = l.values()
		}
		return err
	}, saved...)
	adam := func() gorgonia.Solver { return &solver.Adam{Rate: 0.125} }
	teach(t, 3, adam, func(l *lesson) error {
		var progress struct{ Step int }
		err := l.steps(0, 2) // of which nothing is left
		refused := l.d.Load(dir, l.solver, &progress)
		if !errors.Is(refused, backend.ErrArgument) || !strings.Contains(refused.Error(),
			"WeightsOnly") {
			err = errors.Join(err, fmt.Errorf("Load of another solver's: %w", refused))
		}
		err = errors.Join(err, l.d.Load(dir, l.solver, &progress, WeightsOnly()),
			sameBits(l.values(), want))
		if steps := stepsOf(l.solver.(*solver.Adam)); steps != 0 || progress.Step != 3 {
			err = errors.Join(err, fmt.Errorf("after %d steps, with progress %d", steps,
				progress.Step))
		}
		return errors.Join(err, l.steps(2, 4), l.d.Load(dir, l.solver, nil, WeightsOnly()))
	}, loaded...)
}

// TestSaveWeightsTouchesNothingElse: it replaces a file as a whole or not at all, follows a link,
// and refuses what is no file.
func TestSaveWeightsTouchesNothingElse(t *testing.T) {
	dir := t.TempDir()
	file, link := filepath.Join(dir, "w.safetensors"), filepath.Join(dir, "link")
	p := nodes(shaped{"a", 1, []int{2}})
	testenv.Link(t, "w.safetensors", link)
	err := errors.Join(os.WriteFile(file+".new", []byte("the user's"), 0o666), SaveWeights(file, p))
	was, err2 := os.ReadFile(file)
	copy(p[0].Value().Data().([]float64), []float64{7, 8})
	if err = errors.Join(err, err2, SaveWeights(link, p)); err != nil {
		t.Fatal(err)
	}
	if now := valuesOf(t, file)["a"]; !slices.Equal(now, []float64{7, 8}) || len(was) == 0 {
		t.Errorf("through the link the file has %v", now)
	}
	info, err := os.Lstat(link)
	require.Check(t, err == nil && info.Mode()&os.ModeSymlink != 0, "the link is %v, %v", info, err)
	require.Fails(t, "a directory", SaveWeights(dir, p), backend.ErrArgument,
		filepath.Join(dir, checkpoint.ModelName))
	for _, bad := range []gorgonia.Nodes{nil, nodes(shaped{"bad\xff", 1, []int{2}}),
		{p[0], nodes(shaped{"a", 1, []int{2}})[0]}} {
		require.Fails(t, bad, SaveWeights(file, bad), backend.ErrArgument)
	}
	entries, err := os.ReadDir(dir)
	var left []string
	for _, e := range entries {
		left = append(left, e.Name())
	}
	want := []string{"link", "w.safetensors", "w.safetensors.new"}
	if now := valuesOf(t, file)["a"]; err != nil || !slices.Equal(left, want) || now[0] != 7 {
		t.Errorf("the directory has %v, %v", left, err)
	}
}
