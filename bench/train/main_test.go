package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"strings"
	"sync"
	"testing"

	"github.com/euryale-ml/euryale"
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/backend/compress/half"
	"github.com/euryale-ml/euryale/backend/compress/sparse"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/vm"
)

func TestModelsAreMeasured(t *testing.T) {
	for ranks := 1; ranks <= 2; ranks++ {
		measured(t, ranks)
	}
}

func measured(t *testing.T, ranks int) {
	var out strings.Builder
	require.NoError(t, run(&out, []string{"--device", "cpu", "-n", fmt.Sprint(ranks), "--models",
		"mlp", "--precisions", "f32,bf16", "--rounds", "1", "--profile"}))
	var results []result
	heads, profiled, want := 0, 0, 0 // lines; want at least
	for line := range strings.Lines(out.String()) {
		switch {
		case strings.Contains(line, " GB/s  "):
			profiled++
			continue
		case strings.HasPrefix(line, "#"):
			heads++
			var steps int
			if _, err := fmt.Sscanf(line, "# %d steps one by one", &steps); err == nil {
				want += min(steps, slowest) + 1 // and one operation
			}
			continue
		}
		var r result
		require.NoError(t, json.Unmarshal([]byte(line), &r))
		results = append(results, r)
	}
	require.That(t, len(results) == 2 && heads == 2*2 && want >= 2*2 && profiled >= want &&
		profiled <= 2*(slowest+
			operations), "%d results and %d lines of profiles in\n%s", len(results), heads+
		profiled, out.String())
	for i, precision := range []string{"f32", "bf16"} {
		if r := results[i]; r.Model != "mlp" || r.Ranks != ranks || r.Precision != precision ||
			r.StepUS <= 0 || r.Arena <= 0 || r.Fused <= 0 || r.HostOps != 0 ||
			!r.overlap.isOf(ranks) {
			t.Errorf("result %d is %+v", i, r)
		}
	}
	if a, b := results[0].Loss, results[1].Loss; math.Abs(a-b) > 0.01 || a < 1 || a > 4 {
		t.Errorf("the losses are %v and %v", a, b)
	}
}

// isOf reports whether all is there that some ranks measure, and the waits agree.
func (o overlap) isOf(ranks int) bool {
	if ranks == 1 {
		return o.Efficiency == 0 && o.ExposedUS == nil && o.Buckets == nil
	}
	return o.Efficiency > 0 && o.ExposedUS != nil && len(o.Buckets) > 0 && o.Buckets[0].MiB > 0 &&
		*o.ExposedUS == sumOf(o.Buckets)
}

// The rank that waited longest in all gives the waits, and a wait of 0 is printed, too.
func TestWaitsAreOfOneRank(t *testing.T) {
	for want, all := range map[string][]measurement{
		`{"efficiency":0.75,"exposed_us":5,"buckets":[` +
			`{"bucket":0,"mib":64,"products":5,"exposed_us":1.5},` +
			`{"bucket":1,"mib":1,"products":0,"exposed_us":3.5}]}`: {
			{waited: []bucket{{0, 64, 5, 2}, {1, 1, 0, 2}}},
			{waited: []bucket{{0, 64, 5, 1.5}, {1, 1, 0, 3.5}}}},
		`{"efficiency":0.75,"exposed_us":0,"buckets":[` +
			`{"bucket":0,"mib":64,"products":5,"exposed_us":0}]}`: {
			{waited: []bucket{{0, 64, 5, 0}}}, {waited: []bucket{{0, 64, 5, 0}}}},
		`{}`: {{}}, // of one rank
	} {
		o := overlap{one: 300}
		o.count(all, 400)
		if got, err := json.Marshal(o); err != nil || string(got) != want {
			t.Errorf("it prints %s, %v, want %s", got, err, want)
		}
	}
}

// Checkpoints are measured on one rank and on two.
func TestCheckpointsAreMeasured(t *testing.T) {
	for ranks := 1; ranks <= 2; ranks++ {
		var out strings.Builder
		args := []string{"--device", "cpu", "-n", fmt.Sprint(ranks), "--models", "mlp",
			"--rounds", "1",
			"--save-every", "2", "--save-async", t.TempDir()}
		require.NoError(t, run(&out, args))
		var r result
		require.NoError(t, json.Unmarshal([]byte(out.String()), &r))
		if r.AsyncMS <= 0 || r.AsyncMaxMS < r.AsyncMS || r.AsyncUS <= 0 || r.SaveMS <= 0 {
			t.Errorf("it prints %s", out.String())
		}
	}
}

// Ranks shard what the solver keeps, then have no memory for all gradients, and then divide the
// learnables.
func TestShardsAreMeasured(t *testing.T) {
	var all [4]result
	for stage := range all {
		var out strings.Builder
		require.NoError(t, run(&out, []string{"--device", "cpu", "-n", "2", "--models", "mlp",
			"--rounds", "1", "--alone=false", "--shards", fmt.Sprint(stage)}))
		require.NoError(t, json.Unmarshal([]byte(out.String()), &all[stage]))
	}
	whole, state, gradients := all[0], all[1], all[2]
	require.Check(t, whole.Efficiency == 0 && state.Solver*9/5 <= whole.Solver &&
		gradients.Solver == state.Solver && state.Gradients >= whole.Gradients &&
		gradients.Gradients == 0 && gradients.Shards == 2 && gradients.Params == whole.Params &&
		all[3].Params*9/5 <= whole.Params, "the results are %+v", all)
}

// Gradients travel in 16 bits, or few of them, if that is asked for.
func TestGradientsTravelAsTheFlagSays(t *testing.T) {
	for _, wire := range []string{"", "bf16", "topk=0.1"} {
		o := options{device: "cpu", wire: wire}
		require.NoError(t, euryale.Run(context.Background(), 2, func(comm backend.Communicator,
			build sync.Locker) error {
			machine, _, err := models["mlp"].machine(vm.F32, rank{comm: comm, build: build,
				wire: wire})
			if err != nil {
				return err
			}
			defer machine.Close()
			if err := machine.RunAll(); err != nil {
				return err
			}
			comm = machine.DataParallel().Comm()
			h, halved := backend.As[*half.Communicator](comm)
			s, few := backend.As[*sparse.Communicator](comm)
			if halved != (wire == "bf16") || few != (wire == "topk=0.1") ||
				halved && h.Counters().Calls == 0 || few && s.Counters().Calls == 0 {
				t.Errorf("--wire %q: 16 bits are %v, few gradients %v", wire, halved, few)
			}
			return nil
		}, o.backends()...))
	}
}

// A peer takes turns; the ratio is the ratio of the rounds.
func TestGorgoniaTakesTurns(t *testing.T) {
	var out strings.Builder
	require.NoError(t, run(&out, []string{"--device", "cpu", "--models", "mlp", "--rounds", "2",
		"--peer", "gorgonia"}))
	var r result
	require.NoError(t, json.Unmarshal([]byte(out.String()), &r))
	require.Check(t, r.Peer == "gorgonia" && !(r.PeerUS <= 0) && !(r.Ratio <= 0),
		"the result is %+v", r)
	got := medianRatio([]float64{1, 2, 6}, []float64{2, 2, 2})
	require.Check(t, got == 1, "the median of 0.5, 1 and 3 is %v", got)
	if err := run(&out, []string{"--device", "cpu", "--models", "mlp", "--rounds", "1", "--peer",
		"/dev/null", "--python", "false"}); err == nil {
		t.Error("a peer that ends is no error")
	}
}

// All that observes a training is on in one of two jobs.
func TestObservingIsMeasured(t *testing.T) {
	for _, ranks := range []string{"1", "2"} {
		var out strings.Builder
		require.NoError(t, run(&out, []string{"--device", "cpu", "--models", "mlp", "--rounds", "2",
			"-n", ranks, "--observe", strings.Join(watchers, ",")}))
		var r struct{ Ratio float64 }
		err := json.Unmarshal([]byte(out.String()), &r)
		require.Check(t, err == nil && !(r.Ratio <= 0), "the result is %s, %v", out.String(), err)
	}
}

// A late rank is named in the third step. On the host no step is recorded, and so no bucket is.
func TestTroubleIsNamed(t *testing.T) {
	var out strings.Builder
	require.NoError(t, run(&out, []string{"--device", "cpu", "--models", "mlp", "-n", "2",
		"--trouble", "rank"}))
	lines := strings.Split(strings.TrimSpace(out.String()), "\n")
	require.Check(t, len(lines) == stepsIn && strings.Contains(lines[2], "rank 1 was late by"),
		"the lines are %s", out.String())
	out.Reset()
	require.NoError(t, run(&out, []string{"--device", "cpu", "--models", "mlp", "-n", "2",
		"--trouble", "bucket"}))
	require.Equal(t, "lines", strings.Count(out.String(), "trouble bucket"), stepsIn)
}

// Nothing of a small model of each kind runs on the host, and its loss falls.
func TestModelsTrain(t *testing.T) {
	small := map[string]model{
		"perceptron": {perceptron(8, 6, 5, 3), sgd, nil, nil},
		"gpt": {transformer{vocabulary: 11, batch: 2, context: 6, width: 8, heads: 2,
			layers: 2}.loss, adamw, nil, nil},
		"resnet": {resnet{batch: 4, filters: 2, stages: []int{1, 1}}.loss, decayed, nil, nil},
		"lstm": {recurrent{vocabulary: 11, batch: 3, steps: 5, hidden: 6, layers: 2}.loss, adam,
			nil, nil},
	}
	for name, m := range small {
		for _, p := range []vm.Precision{vm.F32, vm.BF16} {
			b, loss, err := m.graph(1, &sync.Mutex{})
			require.NoError(t, err)
			machine := require.Value(vm.New(b.graph, nil, vm.WithPrecision(p),
				vm.WithSolver(m.solver(), b.learnables...)))(t)
			if plan := machine.Plan().String(); !strings.Contains(plan, " host_ops=0\n") {
				t.Errorf("%s in %v runs operations on the host:\n%s", name, p, plan)
			}
			var losses []float64
			for range 20 {
				require.NoError(t, machine.RunAll())
				losses = append(losses, value(loss))
			}
			if first, last := losses[0], losses[len(losses)-1]; !(last < first) {
				t.Errorf("%s in %v: the loss goes from %v to %v", name, p, first, last)
			}
			require.Report(t, machine.Close())
		}
	}
}

// TestTheLargestGPTHasMoreLayersIfStepsRunAgain: with 4 GiB.
func TestTheLargestGPTHasMoreLayersIfStepsRunAgain(t *testing.T) {
	var out strings.Builder
	require.NoError(t, run(&out, []string{"--largest", "--memory", "4"}))
	decoder := json.NewDecoder(strings.NewReader(out.String()))
	for decoder.More() {
		var without, with planned
		require.NoError(t, errors.Join(decoder.Decode(&without), decoder.Decode(&with)))
		if with.Layers < without.Layers || with.MiB > 4<<10 || without.Steps > 0 {
			t.Errorf("%+v, and with rematerialized steps %+v", without, with)
		}
	}
}

func TestArgumentsAreChecked(t *testing.T) {
	for _, args := range [][]string{{"--models", "bert"}, {"--precisions", "f16"},
		{"--device", "tpu"}, {"--rounds", "0"}, {"--steps", "0"}, {"more"}, {"--peer", "gorgonia"},
		{"--device", "cpu", "-n", "2", "--peer", "gorgonia"}, {"--memory", "-1"}, {"--largest"},
		{"--observe", "all"}, {"--trouble", "gpu"},
		{"--trouble", "time", "-n", "2"}, {"--observe", "metrics", "-n", "2"},
		{"--layers", "-1"}, {"--batch", "-1"}, {"--wire", "bf16"}, {"--wire", "f32", "-n", "2"}} {
		_, err := parse(args)
		require.Check(t, err != nil, "%q is no error", args)
	}
}
