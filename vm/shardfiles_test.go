package vm_test

import (
	"errors"
	"fmt"
	"iter"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/autograd"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/internal/testing/testenv"
	"github.com/euryale-ml/euryale/internal/testing/testranks"
	"github.com/euryale-ml/euryale/vm"
)

// saving is a training that saves to directories in dir.
type saving struct {
	training
	t   *testing.T
	dir string
}

func (s saving) at(name string) string { return filepath.Join(s.dir, name) }

// run runs a body on P ranks, with machines that have loaded a checkpoint, "" for none.
func (s saving) run(k testenv.Kind, P int, from string, option []vm.Option,
	body func(r ranked, m *model, machine *vm.Machine) error) {
	s.t.Helper()
	if err := testranks.Join(together(s.t, k, P, func(r ranked) error {
		m, machine, err := r.start(s.training, option...)
		if err == nil && from != "" {
			err = machine.DataParallel().Load(s.at(from), machine.Solver(), nil)
		}
		testranks.NoError(err)
		return errors.Join(body(r, m, machine), machine.Close())
	})); err != nil {
		s.t.Fatal(err)
	}
}

// write trains on four ranks, saves, and saves again behind the training, which goes on.
func (s saving) write(name string, k testenv.Kind, option ...vm.Option) (loss float64) {
	s.t.Helper()
	s.run(k, 4, "", option, func(r ranked, m *model, machine *vm.Machine) error {
		dp := machine.DataParallel()
		err := errors.Join(s.steps(m, machine, 0, 5), dp.Save(s.at(name), machine.Solver(), 5),
			dp.SaveAsync(s.at(name+" behind"), machine.Solver(), 5))
		if x := evaluated(m, &err); r.Comm.Rank() == 0 {
			loss = x
		}
		return errors.Join(err, s.steps(m, machine, 5, 1))
	})
	return loss
}

// evaluated returns the loss by the learnables that the host has.
func evaluated(m *model, failed *error) float64 {
	machine, err := vm.New(m.g, nil, vm.Eval())
	if err == nil {
		err = errors.Join(machine.RunAll(), machine.Close())
	}
	if *failed = errors.Join(*failed, err); *failed != nil {
		return 0
	}
	return float64(m.loss.Data().(float32))
}

// whole returns the bytes of a model in a checkpoint, after a replica has loaded and saved it.
func (s saving) whole(name string) string {
	s.t.Helper()
	s.run(testenv.Hosts, 1, name, nil, func(_ ranked, _ *model, machine *vm.Machine) error {
		return machine.DataParallel().Save(s.at(name+" whole"), machine.Solver(), nil)
	})
	text, err := contentsOf(s.at(name + " whole"))
	if err != nil {
		s.t.Fatal(err)
	}
	return text
}

// TestShardsOfCheckpoints: each rank writes its own shards, and no file has the model. Any number
// of ranks goes on with it, in shards or not, with the bits of the checkpoint that replicas have
// written; also one that was written behind the training.
func TestShardsOfCheckpoints(t *testing.T) {
	s := saving{settings["groups"], t, t.TempDir()}
	want := s.write("replicas", testenv.Hosts)
	text := s.whole("replicas")
	for name, of := range map[string]struct {
		kind  testenv.Kind
		stage vm.Shards
	}{
		"state": {testenv.Hosts, stages[0]}, "parameters": {testenv.Hosts, stages[2]},
		"devices 1": {testenv.Devices, stages[1]}, "devices 2": {testenv.Devices, stages[2]},
	} {
		got := s.write(name, of.kind, vm.WithShards(of.stage))
		require.Check(t, got == want, "%s: loss %v, of replicas %v", name, got, want)
		for _, name := range []string{name, name + " behind"} {
			require.Check(t, s.whole(name) == text, "%s: other bits than of replicas", name)
			s.apart(name, len(text))
		}
	}
	for P := 1; P <= 3; P++ {
		var all [][][]float64
		for _, from := range []string{"replicas", "parameters", "devices 2 behind"} {
			for i := range 4 { // with no stage, and each
				if !full() && i > 1 && i != P || !full() && i == 0 && from != "replicas" {
					continue
				}
				var option []vm.Option
				if i > 0 {
					option = append(option, vm.WithShards(stages[i-1]))
				}
				s.run(testenv.Hosts, P, from, option,
					func(r ranked, m *model, machine *vm.Machine) (err error) {
						for step := range 5 { // to the batch of the writer
							m.shift(step)
						}
						got := evaluated(m, &err)
						err = errors.Join(err, s.steps(m, machine, 5, 3))
						if r.Comm.Rank() > 0 {
							return err
						}
						require.Check(t, got == want, "%d ranks, %s, %d: loss %v, want %v", P, from,
							i, got, want)
						all = append(all, m.weights(t))
						return err
					})
			}
		}
		for i, got := range all {
			if !slices.EqualFunc(got, all[0], slices.Equal) {
				t.Errorf("%d ranks, %d: %v, replicas go on with %v", P, i, got, all[0])
			}
		}
	}
}

// apart checks that each of four ranks has written a file, and about a quarter of the model.
func (s saving) apart(name string, whole int) {
	s.t.Helper()
	files, err := filepath.Glob(filepath.Join(s.at(name), "step-*", "*.safetensors"))
	if err != nil || len(files) != 5 {
		s.t.Fatalf("%s has %v, %v", name, files, err)
	}
	for _, file := range files {
		info, err := os.Stat(file)
		if err != nil {
			s.t.Fatal(err)
		}
		if most := int64(whole/3 + 1500); info.Size() > most { // of headers
			s.t.Errorf("%s has %d bytes, want %d at most: all have %d", file, info.Size(), most,
				whole)
		}
	}
}

// TestShardsThatAreMissing: a file of shards that is missing, damaged or of another Save is an
// error that names it, on all ranks, and the checkpoint before is loaded instead.
func TestShardsThatAreMissing(t *testing.T) {
	s := saving{settings["groups"], t, t.TempDir()}
	for _, name := range []string{"run", "other"} {
		s.run(testenv.Hosts, 4, "", []vm.Option{vm.WithShards(stages[2])},
			func(r ranked, m *model, machine *vm.Machine) (err error) {
				for step := range 2 {
					err = errors.Join(err, s.steps(m, machine, step, 1),
						machine.DataParallel().Save(s.at(name), machine.Solver(), step))
				}
				return err
			})
	}
	newest := s.at("run/step-00000002")
	file := filepath.Join(newest, "rank2.safetensors")
	text := require.Value(os.ReadFile(file))(t)
	foreign := require.Value(os.ReadFile(s.at("other/step-00000002/rank2.safetensors")))(t)
	flipped := slices.Clone(text)
	flipped[len(text)-1] ^= 1
	for what, content := range map[string][]byte{"load another checkpoint": nil, // none
		"it belongs to Save": foreign, "the file is damaged": flipped} {
		err := os.Remove(file)
		if err == nil && content != nil {
			err = os.WriteFile(file, content, 0o600)
		}
		require.NoError(t, err)
		for _, option := range [][]vm.Option{nil, {vm.WithShards(stages[0])}} {
			for rank, err := range together(t, testenv.Hosts, 2, func(r ranked) error {
				_, machine, err := r.start(s.training, option...)
				testranks.NoError(err)
				dp, step := machine.DataParallel(), 0
				err = dp.Load(newest, machine.Solver(), nil)
				older := dp.Load(s.at("run"), machine.Solver(), &step)
				require.Check(t, older == nil && step == 0, "%s: step %d of the one before, %v",
					what, step, older)
				return errors.Join(err, machine.Close())
			}) {
				require.Fails(t, fmt.Sprintf("%s: rank %d", what, rank), err, "rank2.safetensors",
					what)
			}
		}
		if content == nil { // for the next Remove
			require.NoError(t, os.WriteFile(file, text, 0o600))
		}
	}
}

// TestShardsOfALostRank: if a rank is lost in the middle of a Save, the checkpoint before is whole.
func TestShardsOfALostRank(t *testing.T) {
	s := saving{settings["groups"], t, t.TempDir()}
	for rank, err := range together(t, testenv.Hosts, 4, func(r ranked) error {
		m, machine, err := r.start(s.training, vm.WithShards(stages[2]))
		testranks.NoError(err)
		dp := machine.DataParallel()
		err = errors.Join(s.steps(m, machine, 0, 5), dp.Save(s.at("run"), machine.Solver(), 5),
			s.steps(m, machine, 5, 1), dp.SaveAsync(s.at("run"), machine.Solver(), 6))
		testranks.NoError(err)
		if r.Comm.Rank() == 3 {
			r.Comm.Abort(errors.New("lost"))
		}
		err = dp.Save(s.at("run"), machine.Solver(), 6)
		_ = machine.Close() // which ends SaveAsync, before the folder goes
		return err
	}) {
		require.Check(t, err != nil, "rank %d has saved with a rank that was lost", rank)
	}
	s.run(testenv.Hosts, 2, "", []vm.Option{vm.WithShards(stages[1])},
		func(r ranked, m *model, machine *vm.Machine) error {
			step := 0
			err := machine.DataParallel().Load(s.at("run"), machine.Solver(), &step)
			if step != 5 {
				err = errors.Join(err, fmt.Errorf("step %d was loaded", step))
			}
			return err
		})
}

// TestWeightsAreThoseOfACheckpoint: whole ones come on the first rank alone, from devices and from
// ranks that shard them, with the hash of Hash; an error of who takes them is one on all ranks.
func TestWeightsAreThoseOfACheckpoint(t *testing.T) {
	for _, kind := range []testenv.Kind{testenv.Hosts, testenv.Devices} {
		for stage := range 3 {
			s := saving{settings["groups"], t, t.TempDir()}
			option := []vm.Option{vm.WithShards(stages[stage])}
			if stage == 0 {
				option = nil
			}
			s.run(kind, 3, "", option, func(r ranked, m *model, machine *vm.Machine) error {
				dp, got := machine.DataParallel(), map[string]*tensor.Dense{}
				testranks.NoError(s.steps(m, machine, 0, 3))
				fails := func(says string,
					take func(all iter.Seq2[string, *tensor.Dense]) error) {
					_, err := dp.Weights(take)
					require.Check(t, err != nil && strings.Contains(err.Error(), says),
						"rank %d: %v, want %s", r.Comm.Rank(), err, says)
				}
				fails("the disk is full", func(all iter.Seq2[string, *tensor.Dense]) error {
					for range all {
						return errors.New("the disk is full")
					}
					return nil
				})
				first := m.params[0]
				was := first.Value()
				columns := tensor.New(tensor.WithShape(first.Shape()...),
					tensor.AsFortran(was.Data()))
				fails("another kind of value", func(all iter.Seq2[string, *tensor.Dense]) error {
					err := gorgonia.UnsafeLet(first, columns) // on this rank
					for range all {
					}
					return err
				})
				testranks.NoError(gorgonia.UnsafeLet(first, was))
				hash, err := dp.Weights(func(all iter.Seq2[string, *tensor.Dense]) error {
					for name, x := range all {
						got[name] = x.Clone().(*tensor.Dense)
					}
					return nil
				})
				testranks.NoError(errors.Join(err, dp.Save(s.at("saved"), machine.Solver(), nil)))
				whole := testranks.Must(dp.Hash())
				if r.Comm.Rank() > 0 {
					require.Check(t, len(got) == 0 && hash == "", "rank %d gets %d", r.Comm.Rank(),
						len(got))
					return nil
				}
				want := testranks.Must(autograd.ReadWeights(s.at("saved")))
				require.Check(t, len(got) == len(want) && hash == whole,
					"%v, stage %d: %d tensors, want %d; hash %s, want %s", kind, stage, len(got),
					len(want), hash, whole)
				for name, x := range want {
					require.Check(t, got[name] != nil && reflect.DeepEqual(got[name].Data(),
						x.Data()), "%v, stage %d: %s differs", kind, stage, name)
				}
				return nil
			})
		}
	}
}
