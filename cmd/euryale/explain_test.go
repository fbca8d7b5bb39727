package main

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/euryale-ml/euryale"
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/backend/host"
	"github.com/euryale-ml/euryale/backend/tcp"
	"github.com/euryale-ml/euryale/internal/env"
	"github.com/euryale-ml/euryale/internal/exit"
	"github.com/euryale-ml/euryale/internal/gpu"
	"github.com/euryale-ml/euryale/internal/hierarchy"
	"github.com/euryale-ml/euryale/internal/launch"
	"github.com/euryale-ml/euryale/internal/scale"
	"github.com/euryale-ml/euryale/internal/testing/require"
)

// noTuning makes the user one for whom nothing was measured, and returns where it
// would be kept.
func noTuning(t *testing.T) (file string) {
	t.Helper()
	file = filepath.Join(t.TempDir(), "tuning.json")
	t.Setenv(string(env.Tuning), file)
	return file
}

// explain runs the command; "_" in an argument stands for a space.
func explain(line string) (code int, out, err string) {
	var stdout, stderr bytes.Buffer
	args := strings.Fields(line)
	for i := range args {
		args[i] = strings.ReplaceAll(args[i], "_", " ")
	}
	code = run(context.Background(), append([]string{"explain"}, args...),
		&streams{nil, &stdout, &stderr}, func(int) {})
	return code, stdout.String(), stderr.String()
}

const h200 = " --device NVIDIA_H200"

// measured keeps a row of all-reduces among four H200s.
func measured(t *testing.T, source string, samples ...gpu.Sample) {
	t.Helper()
	row := gpu.Row{Model: "NVIDIA H200", Link: gpu.FullyConnected, Ranks: 4,
		Kind: backend.AllReduce, Source: source, Samples: samples}
	require.NoError(t, require.Err((gpu.Table{row}).Keep()))
}

func TestExplainSaysWhatIsChosenAndWhy(t *testing.T) {
	noTuning(t)
	measured(t, "test", gpu.Sample{Bytes: 2 << 20, NCCL: 26, OneShot: 29.9, TwoShot: 19})
	for _, test := range []struct {
		line  string
		wants []string
	}{
		{"allreduce 2M -n 4 --dtype bf16" + h200,
			[]string{"2 MiB bf16 among 4 ranks of NVIDIA H200, fully-connected: two-shot",
				"nccl 26.0 us", "one-shot 29.9 us", "two-shot 19.0 us"}},
		{"allreduce 1K --op max" + h200, []string{"allreduce(max) of 1 KiB f32 among 2 ranks",
			": nccl: there are kernels for sums"}},
		{"reducescatter 8M -n 4 --lowlatency one-shot" + h200,
			[]string{"reducescatter(sum) of 2 MiB f32", "push, where one-shot is forced"}},
		{"allreduce 1K --lowlatency off" + h200, []string{"nccl: it is switched off"}},
		{"allreduce 1K --link pcie" + h200, []string{"pcie: nccl", "euryale bench --tune"}},
		{"broadcast 1K" + h200, []string{"broadcast(root 0) of 1 KiB", "nccl"}},
		{"allreduce 24M --topology 2x4 --inside 2us+100GB/s --between 1/10" + h200, []string{
			"among 8 ranks of NVIDIA H200", "2 machines x 4 devices: hierarchical, because it is " +
				"predicted to be faster",
			"flat ", "hierarchical ", "inside 2µs + 100 GB/s, between 2µs + 10 GB/s",
			"as declared"}},
		{"allreduce 24M --topology 0,1,1,0 --between 10us+200Gbit/s --hierarchy never" + h200,
			[]string{"among 4 ranks", "flat, because hierarchical is switched off",
				"between 10µs + 25 GB/s"}},
		{"allreduce 24M --topology 2x2 --between 1/1" + h200,
			[]string{"flat, because links inside and between machines are equally fast"}},
		{"allreduce 24M --topology 2x2" + h200,
			[]string{"round numbers: euryale bench --tune measures"}},
	} {
		code, out, err := explain(test.line)
		require.Check(t, code == 0, "%s: %s", test.line, err)
		for _, want := range test.wants {
			require.Check(t, strings.Contains(out, want), "%s: no %q in\n%s", test.line, want, out)
		}
	}
}

func TestExplainUsesWhatWasMeasured(t *testing.T) {
	file := noTuning(t)
	measured(t, "this test", gpu.Sample{Bytes: 1024, NCCL: 9, OneShot: 4})
	links := hierarchy.DefaultLinks()
	links.Step = 77 * time.Microsecond
	require.NoError(t, require.Err(hierarchy.Measurement{Model: "NVIDIA H200", Machines: 2,
		Devices: 2, Links: links, Source: "that test"}.Keep()))
	code, out, err := explain("allreduce 1K --topology 2x2" + h200)
	for _, want := range []string{": one-shot", "(this test): nccl 9.0 us, one-shot 4.0 us",
		"77µs for a phase", "measured: that test"} {
		require.Check(t, code == 0 && strings.Contains(out, want), "code %d, no %q in\n%s%s", code,
			want, out, err)
	}
	require.NoError(t, os.WriteFile(file, []byte("no JSON"), 0o600))
	if code, out, err := explain("allreduce 1K" + h200); code != 1 || out != "" ||
		!strings.Contains(err, "delete it") {
		t.Errorf("code %d, %q, %q", code, out, err)
	}
}

func TestExplainReadsTheEnvironment(t *testing.T) {
	noTuning(t)
	t.Setenv("EURYALE_TOPOLOGY", "2x2")
	t.Setenv("EURYALE_HIERARCHY", "always")
	t.Setenv("EURYALE_LOWLATENCY", "ll")
	code, out, err := explain("allreduce 1K" + h200)
	for _, want := range []string{"among 4 ranks", "ll, where ll is forced",
		"hierarchical, because it is asked for always"} {
		require.Check(t, code == 0 && strings.Contains(out, want), "code %d, no %q in\n%s%s", code,
			want, out, err)
	}
}

// Where machines are declared, what is explained is what Init does.
func TestExplainSaysWhatInitDoes(t *testing.T) {
	noTuning(t)
	links := hierarchy.DefaultLinks()
	links.Inside, links.Step = hierarchy.Link{Latency: 9 * time.Microsecond, Bandwidth: 7e9},
		77*time.Microsecond
	m := hierarchy.Measurement{Model: host.Device{}.Name(), Machines: 2, Devices: 2, Declared: true,
		Links: links, Source: "this test"}
	require.NoError(t, require.Err(m.Keep()))
	for _, topology := range []string{"4x1", "2x2", "2x2:minor", "0,1,1,0", "1x4"} {
		for _, mode := range []string{"", "auto", "always", "never", "auto,exchange=bf16",
			"slice=65536,slots=2"} {
			t.Setenv("EURYALE_TOPOLOGY", topology)
			t.Setenv("EURYALE_HIERARCHY", mode)
			for _, size := range []int{1 << 10, 25 << 20} {
				var want string
				err := euryale.Run(context.Background(), 4, func(comm backend.Communicator,
					_ sync.Locker) error {
					if h, ok := backend.As[*hierarchy.Communicator](comm); ok && comm.Rank() == 0 {
						want = h.Explain(backend.Collective{Kind: backend.AllReduce}, backend.F32,
							size)
					}
					return nil
				}, host.Backend{})
				require.NoError(t, err)
				if want == "" { // Init has no hierarchy on one machine
					want = "flat, because there is one machine"
				}
				code, out, stderr := explain(fmt.Sprintf("allreduce %d -n 4", size))
				require.Check(t, code == 0 && strings.Contains(out, want),
					"topology %q, hierarchy %q: code %d, %s\n%s\nInit says\n%s", topology, mode,
					code, stderr, out, want)
			}
		}
	}
}

// Machines of the command line are there, whatever is declared.
func TestExplainedMachinesAreThereUnlessTheyAreDeclared(t *testing.T) {
	noTuning(t)
	t.Setenv("EURYALE_TOPOLOGY", "4x1")
	for line, want := range map[string]string{
		"allreduce 25M --topology 2x2": "hierarchical, because it is predicted " +
			"to be faster",
		"allreduce 25M --topology 2x2 --hierarchy never": "flat, " +
			"because hierarchical is switched off",
		"allreduce 25M": "4 machines x 1 device: " +
			"hierarchical, because it is asked for always",
		"allreduce 25M --hierarchy auto": "flat, because links inside and " +
			"between machines are equally fast",
		"allreduce 25M --hierarchy auto --inside 1us+1GB/s": "inside 1µs + 1 GB/s, " +
			"between 1µs + 1 GB/s",
		"allreduce 25M --hierarchy auto --between 1ms+1GB/s": "between 1ms + 1 GB/s",
	} {
		if code, out, err := explain(line + h200); code != 0 || !strings.Contains(out, want) {
			t.Errorf("%s: code %d, %s, no %q in\n%s", line, code, err, want, out)
		}
	}
}

// Numbers are bounded before memory is taken for them, and the bound is named.
func TestFoundExplainTakesAllMemory(t *testing.T) {
	noTuning(t)
	for line, want := range map[string]string{
		"allreduce 2M --topology 30000x30000": "900000000 ranks: there must be at least 1, " +
			"and at most 65536",
		"allreduce 2M --topology 9000000000000000000x9":                 "at most 65536",
		"allreduce 2M -n 100000000 --device x":                          "at most 65536",
		"allreduce 9000000G":                                            "it must be at most 1024G",
		"allreduce 2M --topology 2x2 --hierarchy always,slots=99999999": "1024 slots",
		"allreduce 2M --topology 2x2 " +
			"--hierarchy slots=1024,slice=999999999999": "more than any device has",
	} {
		code, out, err := explain(line)
		require.Check(t, code == exit.Usage && out == "" && strings.Contains(err, want),
			"%s: code %d, %q, %q, want %q", line, code, out, err, want)
	}
	code, _, err := explain("allreduce 1M --topology 256x256")
	require.Check(t, code == 0, "as many ranks as there may be: code %d, %s", code, err)
}

func TestFoundExplainIgnoresTheFirstSignal(t *testing.T) {
	noTuning(t)
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(&launch.Interrupted{Signal: syscall.SIGTERM})
	var out, notes bytes.Buffer
	if code := run(ctx, []string{"explain", "allreduce", "1M"}, &streams{nil, &out, &notes},
		func(int) {}); code != 143 || out.Len() > 0 {
		t.Errorf("code %d, %q, %q", code, out.String(), notes.String())
	}
}

// A new user has no GPUs: shared memory is explained, by the code that chooses there.
func TestFoundExplainSaysNothingAboutTheHost(t *testing.T) {
	noTuning(t)
	for line, call := range map[string]struct {
		what          backend.Collective
		nbytes, ranks int
	}{
		"allreduce 2M -n 4": {backend.Collective{Kind: backend.AllReduce}, 2 << 20, 4},
		"reduce 100":        {backend.Collective{Kind: backend.Reduce}, 100, 2},
		"allgather 1K -n 3": {backend.Collective{Kind: backend.AllGather}, 1024, 3},
	} {
		want, wantErr := host.Explain(call.what, backend.F32, call.nbytes, call.ranks)
		if code, out, err := explain(line); code != 0 || wantErr != nil ||
			!strings.HasPrefix(out, "in shared memory (backend host): "+want) {
			t.Errorf("%s: code %d, %q, %q, want %q", line, code, out, err, want)
		}
	}
	code, out, err := explain("allreduce 1K -n 257")
	require.Check(t, code == 0 && strings.Contains(out, "257 ranks, of at most 256"),
		"more ranks than the backend takes: code %d, %q, %q", code, out, err)
}

// Several machines without GPUs have sockets, which one machine may use, too.
func TestExplainSaysHowSocketsAreUsed(t *testing.T) {
	noTuning(t)
	for line, call := range map[string]struct {
		what          backend.Collective
		nbytes, ranks int
	}{
		"allreduce 2M --topology 2x2": {backend.Collective{Kind: backend.AllReduce},
			2 << 20, 4},
		"broadcast 1K -n 65 --backend tcp": {backend.Collective{Kind: backend.Broadcast},
			1024, 65},
		"reduce 100 --topology 3x1 --hierarchy auto": {backend.Collective{Kind: backend.Reduce},
			100, 3},
	} {
		want, wantErr := tcp.Explain(call.what, backend.F32, call.nbytes, call.ranks)
		if code, out, err := explain(line); code != 0 || wantErr != nil ||
			!strings.HasPrefix(out, "over sockets (backend tcp): "+want) {
			t.Errorf("%s: code %d, %q, %q, want %q", line, code, out, err, want)
		}
	}
	if code, out, err := explain("allreduce 2M --topology 2x2 --backend host"); code != 0 ||
		!strings.HasPrefix(out, "in shared memory") || strings.Contains(out, "no GPUs") {
		t.Errorf("code %d, %q, %q", code, out, err)
	}
}

// Every row is what explain says of a job of that size.
func TestScaleIsWhatExplainSaysOfEachJob(t *testing.T) {
	noTuning(t)
	picture := filepath.Join(t.TempDir(), "scale.svg")
	const links = " --inside 3us+200GB/s --between 10us+25GB/s"
	code, out, stderr := explain("allreduce 64M --topology 2x8 --scale --plot " + picture + links)
	require.That(t, code == 0, "code %d, %s", code, stderr)
	_, table, _ := strings.Cut(out, "  runs\n")
	table, starts, _ := strings.Cut(table, "  starts ")
	rows := strings.Split(strings.TrimSpace(table), "\n")
	require.That(t, len(rows) == 10 && strings.HasPrefix(strings.TrimSpace(rows[0]), "8 ") &&
		strings.HasPrefix(strings.TrimSpace(rows[9]),
			"4096 "), "rows of 8 to 4,096 ranks:\n%s", table)
	for _, row := range rows {
		var W, M, slices int
		var flat, layered, unit, runs string
		text := strings.Replace(row, " - ", " - us ", 1)
		_, err := fmt.Sscan(text, &W, &M, &flat, &unit, &layered, &unit, &slices, &runs)
		require.That(t, err == nil, "%s: %v", row, err)
		_, one, _ := explain(fmt.Sprintf("allreduce 64M --topology %dx8%s", M, links))
		require.Check(t, W == 8*M && strings.Contains(one, ": "+runs+", because") &&
			(slices <= 0 || strings.Contains(one, fmt.Sprintf("in %d slice", slices))), "%s, but "+
			"explain says\n%s", row, one)
	}
	net := scale.Network{Latency: 10 * time.Microsecond, Bandwidth: 8 * 25e9}
	for _, M := range []int{1, 16, 512} {
		start, recovery := scale.Start(M, 8, net), scale.Recovery(M, 8, net)
		row := strings.Join(strings.Fields(fmt.Sprintf("%d %d %d %.1f %.2f %d %.1f %.2f", 8*M, M,
			start.Messages, float64(start.Bytes)/1e6, start.Time.Seconds(), recovery.Messages,
			float64(recovery.Bytes)/1e6, recovery.Time.Seconds())), " +")
		found := regexp.MustCompile("\n +" + row + "\n").MatchString(starts)
		require.Check(t, found, "no row %s in\n%s", row, starts)
	}
	svg, err := os.ReadFile(picture)
	require.Check(t, err == nil && strings.Contains(string(svg), "<svg"), "no picture: %v", err)
}

// What bench --tune has measured with EURYALE_TOPOLOGY=2x2 is what --topology 2x2 goes by,
// unless machines that are there were measured.
func TestFoundExplainForgetsWhatWasTuned(t *testing.T) {
	noTuning(t)
	keep := func(declared bool, step time.Duration, source string) {
		links := hierarchy.DefaultLinks()
		links.Step = step
		m := hierarchy.Measurement{Model: "host", Machines: 2, Devices: 2, Declared: declared,
			Links: links, Source: source}
		require.NoError(t, require.Err(m.Keep()))
	}
	for _, test := range []struct {
		declared bool
		step     time.Duration
		source   string
	}{{true, 77 * time.Microsecond, "of one machine"}, {false, 78 * time.Microsecond,
		"of two machines"}} {
		keep(test.declared, test.step, test.source)
		code, out, err := explain("allreduce 2M --topology 2x2")
		require.Check(t, code == 0 && strings.Contains(out, test.step.String()+" for a phase") &&
			strings.Contains(out, "measured: "+
				test.source), "code %d, %s, %s in\n%s", code, err, test.source, out)
	}
}

func TestExplainSaysWhatIsWrong(t *testing.T) {
	noTuning(t)
	for line, want := range map[string]string{
		"sum 2M":                                       `unknown collective "sum"`,
		"allreduce 2M --dtype f7":                      `unknown dtype "f7"`,
		"allreduce 2M -n 4 --between 1/10":             "by --topology",
		"allreduce 2M -n 4 --inside 1us+1GB/s":         "by --topology",
		"allreduce 2M --topology 2x2 --between 1/0":    "such as 1/10",
		"allreduce 2M --op mean":                       `unknown reduction "mean"`,
		"allreduce 2M --n=-1":                          "there must be at least 1",
		"allreduce 2M --link rope":                     `no link class is called "rope"`,
		"allreduce 2M --lowlatency fast":               "auto or off",
		"allreduce 2M --topology 2x2 -n 3":             "start 4 ranks",
		"allreduce 2M --topology 2x":                   "write machines x devices",
		"allreduce 2M --topology 2x2 --hierarchy yes":  "use auto, always or never",
		"allreduce 2M --topology 2x2 --inside fast":    "--inside: ",
		"allreduce 2M --topology 2x2 --between 1/zero": "--between: ",
		"allreduce 2M --scale":                         "by --topology",
		"allreduce 2M --backend tcp":                   "--device is about GPUs",
		"allreduce 2M --topology 2x2 --plot x.svg":     "ask for both",
		"allreduce 2M --topology 0,0,1 -n 3 --scale":   "the same number of devices",
		"gather 2M --topology 2x2 --scale":             "nothing is hierarchical",
	} {
		if code, out, err := explain(line + h200); code != exit.Usage || out != "" ||
			!strings.Contains(err, "euryale: explain: ") || !strings.Contains(err, want) {
			t.Errorf("%s: code %d, %q, %q, want %q", line, code, out, err, want)
		}
	}
	code, _, err := explain("allreduce much")
	require.Check(t, code == exit.Usage && strings.Contains(err, "not a size"), "code %d, %q", code,
		err)
	if code, _, err := explain("allreduce 2M --backend mpi"); code != exit.Usage ||
		!strings.Contains(err, "use host or tcp") {
		t.Errorf("code %d, %q", code, err)
	}
}
