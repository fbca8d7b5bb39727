package main

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/backend/host"
	"github.com/euryale-ml/euryale/internal/gpu"
	"github.com/euryale-ml/euryale/internal/testing/fakedevice"
	"github.com/euryale-ml/euryale/internal/testing/require"
)

// standIn is a GPU on guarded memory. All of a machine share one device, so that
// their kernels reach all memory.
type standIn struct {
	*fakedevice.Device
	number int
	apart  bool   // no peer access with the others
	spoils int    // a GPU to which copies from this one lose a byte, -1 for none
	broken string // why copies fail, "" if they do not
}

func (s *standIn) Name() string           { return fmt.Sprintf("cuda:%d", s.number) }
func (s *standIn) device() backend.Device { return s.Device }

func (s *standIn) facts() (string, error) { return "a stand-in", nil }

func (s *standIn) wires(other usableGPU) (string, error) {
	if s.broken != "" {
		return "failed", errors.New(s.broken)
	}
	return fmt.Sprint(10*s.number + other.(*standIn).number), nil
}

func (s *standIn) reach(other usableGPU) (bool, error) {
	return s == other.(*standIn) || !s.apart && !other.(*standIn).apart, nil
}

func (s *standIn) fetch(dst backend.Buffer, other usableGPU, src backend.Buffer) error {
	if s.broken != "" {
		return errors.New(s.broken)
	}
	k := s.Default()
	err := k.Copy(dst, src)
	if err == nil && other.(*standIn).spoils == s.number {
		err = k.Zero(dst.Slice(5, 6))
	}
	return err
}

// standIns returns n GPUs, whose memory must be free at the end.
func standIns(t *testing.T, n int) []*standIn {
	t.Helper()
	d := require.Value(fakedevice.New(host.Device{}))(t)
	t.Cleanup(func() { require.NoError(t, d.Close()) })
	var all []*standIn
	for i := range n {
		all = append(all, &standIn{Device: d, number: i, spoils: -1})
	}
	return all
}

func usableGPUs(all []*standIn) []usableGPU {
	var usable []usableGPU
	for _, s := range all {
		usable = append(usable, s)
	}
	return usable
}

// probed returns the report of a probe.
func probed(t *testing.T, all []*standIn) string {
	t.Helper()
	var b strings.Builder
	for _, f := range probe(context.Background(), usableGPUs(all), 1000) {
		require.NoError(t, f.write(&b))
	}
	return b.String()
}

func TestProbeTriesEveryPair(t *testing.T) {
	for _, n := range []int{1, 3} {
		report := probed(t, standIns(t, n))
		require.Check(t, strings.Count(report, " ok ") == 3 && !strings.Contains(report, " none"),
			"%d GPUs:\n%s", n, report)
		if rows := strings.Count(report, "\n"); rows != 3*(n+2) {
			t.Errorf("%d lines, want three tables of %d rows:\n%s", rows, n, report)
		}
	}
}

func TestProbeSaysWhereThereIsNoPeerAccess(t *testing.T) {
	all := standIns(t, 2)
	all[1].apart = true
	report := probed(t, all)
	require.Check(t, strings.Count(report, " none") == 4 && strings.Count(report, " ok ") == 3,
		"report:\n%s", report)
}

func TestProbeFindsWrongBytes(t *testing.T) {
	all := standIns(t, 3)
	all[0].spoils = 2
	report := probed(t, all)
	for _, want := range []string{"gpu copies      no ", "peer reads      ok ",
		"peer writes     ok ", " wrong\n", "cuda:0 to cuda:2: 1 of 1000 bytes arrived wrong, the " +
			"first at 5"} {
		require.Check(t, strings.Contains(report, want), "no %q in\n%s", want, report)
	}
	require.Check(t, strings.Count(report, "arrived wrong") == 1,
		"more pairs than one are wrong:\n%s", report)
}

func TestProbeGoesOnAfterAnError(t *testing.T) {
	all := standIns(t, 2)
	all[1].broken = "out of luck"
	report := probed(t, all)
	for _, want := range []string{"cuda:0 to cuda:1: out of luck", "cuda:1 to cuda:1: out of luck",
		"peer reads      ok "} {
		require.Check(t, strings.Contains(report, want), "no %q in\n%s", want, report)
	}
}

func TestProbeSaysWhyItStopped(t *testing.T) {
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(errors.New("it took longer than 1m0s"))
	for _, f := range probe(ctx, usableGPUs(standIns(t, 1)), 1000) {
		require.Fails(t, f.about, f.err, "longer than 1m0s")
	}
}

func TestMatrixNamesEveryPair(t *testing.T) {
	all := standIns(t, 3)
	all[2].broken = "out of luck"
	var b strings.Builder
	require.NoError(t, matrix(usableGPUs(all)).write(&b))
	for _, want := range []string{"nvlink          no ", "cuda:0         -         1         2",
		"cuda:1        10         -        12", "cuda:2 to cuda:0: out of luck"} {
		require.Check(t, strings.Contains(b.String(), want), "no %q in\n%s", want, b.String())
	}
}

func TestPatternsDiffer(t *testing.T) {
	a, b := patternOf(0, 4096), patternOf(1, 4096)
	require.Check(t, compare(a, b) != nil, "two GPUs have the same pattern")
	require.Check(t, compare(a[8:1032], a[:1024]) != nil, "the pattern repeats")
}

func TestGPUsAreExaminedByTheDoctor(t *testing.T) {
	all := standIns(t, 2)
	asked, closed := -1, false
	d := doctor{
		limit:  time.Minute,
		getenv: func(string) string { return "" },
		open: func() (*gpus, error) {
			return &gpus{
				driver: "580", usable: usableGPUs(all), probe: 1000,
				problems: []finding{{about: "cuda:2", err: errors.New("too old")}},
				close:    func() error { closed = true; return nil },
			}, nil
		},
		tests: func(gpus int) []selfTest {
			asked = gpus
			return []selfTest{{"nccl goroutines",
				func(context.Context) (string, error) { return "works", nil }}}
		},
	}
	var b strings.Builder
	require.Report(t, d.examine(context.Background(), &b))
	for _, want := range []string{"driver          ok  580\n", "cuda:1          ok  a stand-in\n",
		"cuda:2          no  too old\n", "gpu copies      ok ", "nccl goroutines ok "} {
		require.Check(t, strings.Contains(b.String(), want), "no %q in\n%s", want, b.String())
	}
	require.Check(t, asked == 2 && closed, "self tests were asked for %d GPUs; closed: %v", asked,
		closed)
}

func TestDoctorSaysWhatAllReducesRunOn(t *testing.T) {
	for _, test := range []struct {
		m    gpu.Survey
		want string
	}{
		{gpu.Survey{Model: "NVIDIA H200", Link: gpu.FullyConnected, Ranks: 2},
			"2 NVIDIA H200, fully-connected: nccl, ll, ll128-two-shot, one-shot, two-shot;"},
		{gpu.Survey{Model: "Tesla V100", Link: gpu.CubeMesh, Ranks: 8},
			"8 Tesla V100, cube-mesh: nccl, mesh;"},
		{gpu.Survey{Model: "Tesla V100", Link: gpu.CubeMesh, Ranks: 4},
			"4 Tesla V100, cube-mesh: nccl;"},
		{gpu.Survey{Model: "NVIDIA A40", Link: gpu.FullyConnected, Ranks: 2, Tears: true},
			"2 NVIDIA A40, fully-connected: nccl, ll, one-shot, two-shot;"},
		{gpu.Survey{Model: "Tesla T4", Link: gpu.PCIe, Ranks: 4},
			"4 Tesla T4, pcie: nccl, ll, one-shot, two-shot;"},
		{gpu.Survey{Model: "Tesla T4", Link: gpu.Unknown, Ranks: 4}, "4 Tesla T4, unknown: nccl;"},
		{gpu.Survey{Model: "NVIDIA H200", Link: gpu.FullyConnected, Ranks: 16},
			"16 NVIDIA H200, fully-connected: nccl;"},
	} {
		if got := algorithmsText(test.m); !strings.HasPrefix(got, "all-reduces among "+test.want) {
			t.Errorf("%+v: %q, want %q", test.m, got, test.want)
		}
	}
}
