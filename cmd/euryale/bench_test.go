package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/alecthomas/kong"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/backend/host"
	"github.com/euryale-ml/euryale/internal/bench"
	"github.com/euryale-ml/euryale/internal/exit"
	"github.com/euryale-ml/euryale/internal/testing/fakedevice"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/rendezvous"
)

// parseBench parses the flags of the bench command.
func parseBench(t *testing.T, args ...string) (benchCmd, error) {
	t.Helper()
	var b benchCmd
	parser, err := kong.New(&b, kong.Name("bench"), vars())
	require.NoError(t, err)
	_, err = parser.Parse(args)
	return b, err
}

// quickBench is a benchmark that takes no time worth mentioning.
func quickBench(t *testing.T, args ...string) benchCmd {
	t.Helper()
	b := require.Value(parseBench(t, append([]string{"--inproc", "-n", "2", "--min=1K", "--max=4K",
		"--factor=4", "--iters=3"}, args...)...))(t)
	return b
}

func nowhere() *streams { return &streams{out: io.Discard, err: io.Discard} }

func TestBenchDefaultsAreThoseOfTheManual(t *testing.T) {
	b := require.Value(parseBench(t))(t)
	want := benchCmd{
		N: defaultRanks(), Collective: "allreduce", DType: "f32", Op: "sum", Min: 1 << 10,
		Max: 64 << 20, Factor: 2,
		Time: 300 * time.Millisecond, Algorithm: "auto",
	}
	require.Check(t, reflect.DeepEqual(b, want), "defaults are %+v, want %+v", b, want)
}

func TestBenchRanksMeasureTheSame(t *testing.T) {
	b, err := parseBench(t, "-n", "3", "--backend", "host", "--collective", "reduce", "--dtype",
		"bf16", "--op", "avg", "--root", "2",
		"--min", "3000", "--max", "1M", "--factor", "4", "--iters", "7", "--time", "5ms",
		"--algorithm", "two-shot", "--alloc", "--in-place", "--json", "--tune")
	require.NoError(t, err)
	again := require.Value(parseBench(t, b.args()[1:]...))(t)
	require.Check(t, reflect.DeepEqual(b, again), "a rank is told %+v, want %+v", again, b)
	fields := reflect.ValueOf(b)
	for i := range fields.NumField() {
		// which no rank is told of
		if name := fields.Type().Field(i).Name; fields.Field(i).IsZero() && name != "InProc" {
			t.Errorf("this test does not set %s", name)
		}
	}
}

func TestBenchWritesATable(t *testing.T) {
	b := quickBench(t, "-n", "3", "--collective", "allgather")
	var out, notes bytes.Buffer
	require.NoError(t, b.Run(context.Background(), &streams{out: &out, err: &notes}))
	for _, want := range []string{"# euryale bench: allgather of f32, 1K to 4K", "3 goroutines",
		"3 timed calls", "algbw = bytes / mean", " 1020 ", " 4092 ", " 0\n"} {
		require.Check(t, strings.Contains(out.String(), want), "no %q in\n%s", want, out.String())
	}
	require.Check(t, notes.Len() <= 0, "notes: %s", notes.String())
}

func TestBenchWritesJSONLines(t *testing.T) {
	b := quickBench(t, "--json", "--op", "max", "--dtype", "i32")
	var out, notes bytes.Buffer
	require.NoError(t, b.Run(context.Background(), &streams{out: &out, err: &notes}))
	lines := strings.Split(strings.TrimSpace(out.String()), "\n")
	require.That(t, len(lines) == 2, "%d lines, want 2:\n%s", len(lines), out.String())
	var r bench.Result
	require.NoError(t, json.Unmarshal([]byte(lines[1]), &r))
	require.Check(t, r.Collective == "allreduce" && r.Op == "max" && r.DType == "i32" &&
		r.Backend == "host" && r.Ranks == 2 && r.Bytes == 4096 && r.InProc &&
		r.Wrong == 0, "line is %+v", r)
	require.Check(t, strings.HasPrefix(notes.String(), "# euryale bench"), "notes: %q",
		notes.String())
}

// guarded is a backend whose ranks have memory that the host cannot touch, as a
// GPU's is.
type guarded struct{ host.Backend }

func (g guarded) Describe() (string, error) { return "guard 1.2.3", nil }

func (g guarded) Connect(ctx context.Context, w *rendezvous.World) (backend.Communicator, error) {
	comm, err := g.Backend.Connect(ctx, w)
	if err != nil {
		return nil, err
	}
	d, err := fakedevice.New(host.Device{})
	if err != nil {
		return nil, errors.Join(err, comm.Close())
	}
	return fakedevice.Over(comm, d), nil
}

func TestBenchOnADeviceTimesBatches(t *testing.T) {
	for _, asJSON := range []bool{false, true} {
		b := quickBench(t, "-n", "2", "--in-place", "--alloc")
		b.JSON = asJSON
		var out, notes bytes.Buffer
		c := require.Value(b.config(b.N))(t)
		require.NoError(t, b.goroutines(context.Background(), &streams{out: &out, err: &notes}, c,
			guarded{}))
		text := notes.String() + out.String()
		wants := []string{"backend host (guard 1.2.3)", "in memory from Alloc", "in batches",
			"backend host has no low-latency kernels", "3 timed calls", "algbw = bytes / stream"}
		if asJSON {
			wants = append(wants, `"stream_us":`, `"host_us":`, `"wrong":0`)
		} else {
			wants = append(wants, "      stream      host ", " 4096 ")
		}
		for _, want := range wants {
			require.Check(t, strings.Contains(text, want), "no %q in\n%s", want, text)
		}
	}
}

func TestBenchFailsIfElementsAreWrong(t *testing.T) {
	b := quickBench(t)
	s := b.output(nowhere())
	err := s.verdict()
	require.Check(t, err == nil, "verdict before any result: %v", err)
	for range 2 {
		require.NoError(t, s.add(bench.Result{Wrong: 3}))
	}
	require.Fails(t, "verdict", s.verdict(), "6 elements are wrong")
}

func TestBenchExplainsBadInput(t *testing.T) {
	for _, test := range []struct{ flag, want string }{
		{"--collective=sum", `unknown collective "sum": use one of [allreduce`},
		{"--op=mean", `unknown reduction "mean": use one of [sum`},
		{"--dtype=float", `unknown dtype "float": use one of [f16`},
		{"--algorithm=ring", `unknown algorithm "ring": use one of [auto one-shot two-shot]`},
		{"--n=0", "there must be at least 1"},
		{"--n=9223372036854775807", "at most 1024"},
		{"--max=9000000G", "at most 1024G"},
		{"--iters=9223372036854775807", "must be 1 to 20000"},
		{"--backend=ucc", `no backend "ucc" in this build: use one of `},
		{"--factor=1", "must be at least 2"},
		{"--min=5K", "below the smallest"},
	} {
		b := quickBench(t, test.flag)
		err := b.Run(context.Background(), nowhere())
		require.Fails(t, test.flag, err, test.want)
		code := exitCode(t.Context(), err, nowhere())
		require.Check(t, code == exit.Usage, "%s: exit code %d", test.flag, code)
	}
	for _, flag := range []string{"--min=1X", "--max=-1", "--max="} {
		require.Fails(t, flag, require.Err(parseBench(t, flag)), "not a size")
	}
}

func TestBenchRefusesGoroutinesUnderALauncher(t *testing.T) {
	t.Setenv("RANK", "0")
	t.Setenv("WORLD_SIZE", "2")
	t.Setenv("EURYALE_JOB", "by-hand")
	b := quickBench(t)
	err := b.Run(context.Background(), nowhere())
	require.Fails(t, "b.Run", err, "start it alone")
}
