package autograd

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
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
	"github.com/euryale-ml/euryale/internal/files"
	"github.com/euryale-ml/euryale/internal/safetensors"
	"github.com/euryale-ml/euryale/internal/testing/require"
)

// spoiled makes what Save keeps not finite, and says how the error names it.
type spoiled struct {
	name    string
	options []Option
	spoil   func(l *lesson) error
	want    string
}

// spoilState sets the last element of a state that was read by name.
func spoilState(of solver.Stateful, name string, x float32) error {
	all, err := of.State()
	for key, b := range all {
		if strings.HasPrefix(key, name) && b.DType() == backend.F32 && err == nil {
			backend.View[float32](b)[b.Len()-1] = x
			return of.SetState(all)
		}
	}
	return errors.Join(err, fmt.Errorf("no %s in %v", name, all))
}

func spoiledOnes() []spoiled {
	nan, inf := float32(math.NaN()), float32(math.Inf(-1))
	set := func(param, i int, x float32) func(l *lesson) error {
		return func(l *lesson) error {
			l.m.params[param].Value().Data().([]float32)[i] = x
			return nil
		}
	}
	return []spoiled{
		{"a parameter is NaN", nil, set(1, 2, nan), `element [0 2] of "b1" is NaN`},
		{"a parameter is infinite", nil, set(0, 0, inf), "is -Inf"},
		{"what the solver keeps", nil, func(l *lesson) error {
			return spoilState(l.solver.(solver.Stateful), "adam.v", nan)
		}, "of the solver's \"adam.v"},
		{"residuals", compressions["topk"], func(l *lesson) error {
			c, _ := l.d.compression()
			return spoilState(c, "", nan)
		}, "is NaN"},
	}
}

// TestNothingIsSavedThatIsNotFinite: Save, SaveAsync and CheckFinite name what it is on all ranks,
// also if one rank alone has it, and the checkpoint before is the newest one.
func TestNothingIsSavedThatIsNotFinite(t *testing.T) {
	for _, c := range spoiledOnes() {
		t.Run(c.name, func(t *testing.T) {
			dir := t.TempDir()
			adam := func() gorgonia.Solver { return &solver.Adam{Rate: 0.01} }
			teach(t, 2, adam, func(l *lesson) error {
				if err := errors.Join(l.steps(0, 2), l.d.CheckFinite(l.solver),
					l.d.Save(dir, l.solver, nil), l.step(2)); err != nil {
					return err
				}
				if l.comm.Rank() == 0 {
					if err := c.spoil(l); err != nil {
						return err
					}
				}
				for i, f := range []func() error{
					func() error { return l.d.Save(dir, l.solver, nil) },
					func() error { return l.d.CheckFinite(l.solver) },
					func() error {
						return errors.Join(l.d.SaveAsync(dir, l.solver, nil), l.d.saver.Finish())
					},
				} {
					if err := f(); err == nil || !strings.Contains(err.Error(), c.want) ||
						!strings.Contains(err.Error(), "after step 3: ") {
						return fmt.Errorf("call %d: want %q, got %v", i, c.want, err)
					}
				}
				return nil
			}, c.options...)
			all, err := checkpoint.List(files.Disk(dir))
			if err != nil || len(all) != 1 || all[0].Step != 2 {
				t.Errorf("%v, %v", all, err)
			}
		})
	}
}

// TestWhatNothingTrainsMayBeInfinite, but not NaN: masks are.
func TestWhatNothingTrainsMayBeInfinite(t *testing.T) {
	m := require.Value(newFormat1())(t)
	d := require.Value(New(Solo(), m.params, WithFrozen(m.frozen)))(t)
	defer d.Close()
	model, file := append(slices.Clone(m.params), m.frozen), filepath.Join(t.TempDir(), "w")
	mask, dir := m.frozen.Value().Data().([]float64), t.TempDir()
	for _, x := range []float64{math.Inf(-1), math.NaN()} {
		mask[len(mask)-1] = x
		for what, err := range map[string]error{
			"Save":        d.Save(dir, &solver.SGD{Rate: 1}, nil),
			"CheckFinite": d.CheckFinite(nil),
			"SaveWeights": SaveWeights(file, model),
			"Load":        d.Load(dir, &solver.SGD{Rate: 1}, nil),
			"LoadWeights": LoadWeights(file, model),
		} {
			wrong := math.IsNaN(x) && !strings.HasPrefix(what, "Load") // which has the one before
			if wrong != (err != nil) || err != nil && !strings.Contains(err.Error(), "is NaN") {
				t.Errorf("%s of %v: %v", what, x, err)
			}
		}
	}
}

// TestWeightsThatAreNotFiniteAreNotSaved: SaveWeights refuses NaN anywhere, and an infinity in what
// has a gradient; the file stays as it was. LoadWeights refuses a file with them.
func TestWeightsThatAreNotFiniteAreNotSaved(t *testing.T) {
	g := gorgonia.NewGraph()
	w := gorgonia.NewVector(g, gorgonia.Float64, gorgonia.WithShape(3), gorgonia.WithName("w"),
		gorgonia.WithInit(gorgonia.Ones()))
	require.NoError(t, require.Err(gorgonia.Grad(gorgonia.Must(gorgonia.Sum(w)), w)))
	file := filepath.Join(t.TempDir(), "w.safetensors")
	require.NoError(t, SaveWeights(file, gorgonia.Nodes{w}))
	x := w.Value().Data().([]float64)
	for _, wrong := range []float64{math.NaN(), math.Inf(1)} {
		x[1] = wrong
		want := fmt.Sprintf("element [1] of \"w\" is %v", wrong)
		require.Fails(t, "SaveWeights", SaveWeights(file, gorgonia.Nodes{w}), want)
		bad := filepath.Join(t.TempDir(), "bad.safetensors")
		b, err := os.ReadFile(file)
		copy(b[len(b)-16:], backend.Of(x[1:]).Bytes())
		b = []byte(strings.Replace(string(b), "crc32c", "other", 1)) // of another program
		b = []byte(strings.Replace(string(b), `"other"`, `"other!"`, 1))
		if err = errors.Join(err, os.WriteFile(bad, b, 0o600)); err != nil {
			t.Fatal(err)
		}
		require.Fails(t, "LoadWeights", LoadWeights(bad, gorgonia.Nodes{w}), want)
	}
	err := LoadWeights(file, gorgonia.Nodes{w})
	require.Check(t, err == nil && x[1] == 1, "%v, %v", x, err)
}

// diverge makes an element of a parameter of a checkpoint NaN, as versions have written it that did
// not look.
func diverge(t *testing.T, dir, name string) {
	t.Helper()
	path := filepath.Join(dir, checkpoint.ModelName)
	all := require.Value(checkpoint.ReadTensors(files.Disk(path), "."))(t)
	copy(all[name].Data.Bytes(), backend.Of([]float32{float32(math.NaN())}).Bytes())
	text, stamp, err := checkpoint.ReadRecord(files.Disk(dir))
	var record map[string]any
	if err = errors.Join(err, json.Unmarshal(text, &record), os.Remove(path)); err != nil {
		t.Fatal(err)
	}
	f, err := checkpoint.WriteFile(files.Disk(path+"2"), ".", func(w io.Writer) error {
		return safetensors.Write(w, all, map[string]string{"save": stamp.ID})
	})
	f.Name = checkpoint.ModelName
	record["files"] = []checkpoint.File{f}
	delete(record, "crc32c")
	text, err2 := json.Marshal(record)
	if err = errors.Join(err, err2, os.Rename(path+"2", path), os.WriteFile(filepath.Join(dir,
		checkpoint.RecordName), text, 0o600)); err != nil {
		t.Fatal(err)
	}
}

// TestLoadTakesTheNewestCheckpointThatIsFinite, and says so; one that is named is refused, and so
// is one that ReadWeights would take. What is saved from there on never removes it.
func TestLoadTakesTheNewestCheckpointThatIsFinite(t *testing.T) {
	dir := t.TempDir()
	sgd := func() gorgonia.Solver { return &solver.SGD{Rate: 0.01} }
	teach(t, 1, sgd, func(l *lesson) error {
		return errors.Join(l.steps(0, 2), l.d.Save(dir, l.solver, nil), l.step(2),
			l.d.Save(dir, l.solver, nil))
	})
	last := newest(t, dir)
	diverge(t, last, "w1")
	said := ""
	teach(t, 1, sgd, func(l *lesson) error {
		err := l.d.Load(last, l.solver, nil)
		if err == nil || !strings.Contains(err.Error(), `"w1" is NaN: its training had diverged`) {
			return fmt.Errorf("of the last one: %v", err)
		}
		if _, err := ReadWeights(dir); err == nil || !strings.Contains(err.Error(), "is NaN") {
			return fmt.Errorf("ReadWeights: %v", err)
		}
		if err := errors.Join(l.d.Load(dir, l.solver, nil), l.step(2), l.step(3),
			l.d.Save(dir, l.solver, nil, KeepLast(1))); err != nil {
			return err
		}
		return l.d.Load(dir, l.solver, nil)
	}, WithNotice(func(text string) { said += text }))
	if !strings.Contains(said, "step-00000002 is loaded") || strings.Count(said, "is NaN") != 1 {
		t.Error(said)
	}
}
