//go:build gpu

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"strings"
	"testing"

	"github.com/euryale-ml/euryale/internal/bench"
	"github.com/euryale-ml/euryale/internal/cuda"
	"github.com/euryale-ml/euryale/internal/gpu/nvml"
	"github.com/euryale-ml/euryale/internal/testing/require"
)

// countGPUs skips the test without a GPU, or fails it where REQUIRE_GPU=1.
func countGPUs(t *testing.T) int {
	t.Helper()
	if err := cuda.Available(); err != nil {
		lacking(t, err)
	}
	g, err := openGPUs()
	require.NoError(t, err)
	require.Report(t, g.close())
	return len(g.usable)
}

func lacking(t *testing.T, err error) {
	t.Helper()
	if os.Getenv("REQUIRE_GPU") == "1" {
		t.Fatalf("REQUIRE_GPU=1: %v", err)
	}
	t.Skip(err)
}

// needNCCL is countGPUs where NCCL is needed, too.
func needNCCL(t *testing.T) int {
	t.Helper()
	n := countGPUs(t)
	if _, err := choose("nccl"); err != nil {
		lacking(t, err)
	}
	return n
}

func TestLinksAreCountedByWhereTheyLeadOffGPU(t *testing.T) {
	names := map[string]string{"0000:2A:00.0": "cuda:1"}
	for _, test := range []struct {
		links []nvml.Link
		want  string
	}{
		{nil, "no NVLink"},
		{[]nvml.Link{{Switch: true}, {Switch: true}}, "NVLink: 2 to NVSwitch"},
		{[]nvml.Link{{PCIBusID: "0000:2a:00.0"}, {}, {PCIBusID: "0000:2A:00.0"}},
			"NVLink: 2 to cuda:1, 1 to an unknown device"},
		{[]nvml.Link{{PCIBusID: "0000:3B:00.0"}}, "NVLink: 1 to 0000:3B:00.0, which this process " +
			"does not see"},
	} {
		if got := linksText(test.links, names); got != test.want {
			t.Errorf("%+v: %q, want %q", test.links, got, test.want)
		}
	}
}

func TestMatrixCountsLinksOffGPU(t *testing.T) {
	far, sw := nvml.Link{PCIBusID: "0000:2A:00.0"}, nvml.Link{Switch: true}
	for _, test := range []struct {
		mine, theirs []nvml.Link
		want         string
	}{
		{nil, nil, "none"},
		{[]nvml.Link{far, {}, far}, nil, "2"},
		{[]nvml.Link{sw, sw, sw}, []nvml.Link{sw, sw}, "2 switch"},
		{[]nvml.Link{sw}, nil, "none"},
		{[]nvml.Link{{PCIBusID: "0000:3B:00.0"}}, nil, "none"},
	} {
		if got := between(test.mine, test.theirs, "0000:2a:00.0"); got != test.want {
			t.Errorf("%+v and %+v: %q, want %q", test.mine, test.theirs, got, test.want)
		}
	}
}

func TestDoctorTriesThisMachineOnGPU(t *testing.T) {
	n := countGPUs(t)
	g, err := openGPUs()
	require.NoError(t, err)
	var b strings.Builder
	for _, f := range append(g.describe(), g.copies(context.Background())...) {
		require.NoError(t, f.write(&b))
		if f.err != nil && f.about != "nvml" { // which a container may lack
			t.Errorf("%s: %v", f.about, f.err)
		}
	}
	require.Report(t, g.close())
	t.Log("\n" + b.String())
	for i := range n {
		if !strings.Contains(b.String(), fmt.Sprintf("cuda:%d          ok  ", i)) {
			t.Errorf("nothing about GPU %d", i)
		}
	}
	if got := strings.Count(b.String(), "kernels: sm_"); got != n {
		t.Errorf("the kernels of %d GPUs are named, of %d", got, n)
	}
}

func TestDoctorsSelfTestsRunOnNCCL(t *testing.T) {
	n := needNCCL(t)
	if n < 2 {
		t.Skip("one GPU")
	}
	tried := 0
	for _, test := range selfTests(n) {
		if !strings.HasPrefix(test.about, "nccl ") || strings.HasSuffix(test.about, "processes") {
			continue // processes: the test below
		}
		tried++
		text, err := test.run(context.Background())
		if err != nil ||
			!strings.Contains(text, fmt.Sprintf("%d ranks all-reduce right on backend nccl, 4K in ",
				n)) {
			t.Errorf("%s: %q, %v", test.about, text, err)
		}
	}
	if tried != 1 {
		t.Errorf("%d self tests on nccl", tried)
	}
}

func TestDoctorRunsOnNCCL(t *testing.T) {
	n := needNCCL(t)
	out, err := command(t, "doctor").CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	t.Logf("\n%s", out)
	wants := []string{"host goroutines ok ", "backend nccl    ok  available: NCCL "}
	if n > 1 {
		wants = append(wants, "nccl goroutines ok ", "nccl processes  ok ")
	}
	for _, want := range wants {
		if !strings.Contains(string(out), want) {
			t.Errorf("no %q", want)
		}
	}
}

func TestBenchRunsOnNCCL(t *testing.T) {
	n := min(needNCCL(t), 4)
	args := []string{"bench", "--backend=nccl", fmt.Sprint("--n=", n), "--min=1K", "--max=1M",
		"--factor=32", "--time=40ms", "--json"}
	for _, extra := range [][]string{{"--inproc"}, {}, {"--alloc", "--in-place"}} {
		cmd := command(t, append(args, extra...)...)
		var notes bytes.Buffer
		cmd.Stderr = &notes
		out, err := cmd.Output()
		if err != nil {
			t.Fatalf("%v: %v\n%s", extra, err, notes.String())
		}
		lines := 0
		for in := json.NewDecoder(bytes.NewReader(out)); ; lines++ {
			var r bench.Result
			if err := in.Decode(&r); err == io.EOF {
				break
			} else if err != nil {
				t.Fatal(err)
			}
			if r.Backend != "nccl" || r.Ranks != n || r.Wrong != 0 || r.StreamMicros <= 0 ||
				r.HostMicros <= 0 || r.Device == "" || n > 1 && r.Used == "" {
				t.Errorf("%v: %+v", extra, r)
			}
		}
		if lines != 3 {
			t.Errorf("%v: %d lines, want 3:\n%s", extra, lines, out)
		}
	}
}
