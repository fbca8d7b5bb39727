package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/euryale-ml/euryale"
	"github.com/euryale-ml/euryale/internal/env"
	"github.com/euryale-ml/euryale/internal/testing/require"
)

// examine returns the report of a doctor whose self tests end as told, in an
// environment, on a machine without GPUs.
func examine(t *testing.T, goroutines, processes error, environ ...string) (string, error) {
	t.Helper()
	test := func(about string, err error) selfTest {
		return selfTest{about, func(context.Context) (string, error) {
			return "works", err
		}}
	}
	d := doctor{
		environ: environ,
		limit:   time.Minute,
		open:    func() (*gpus, error) { return nil, errors.New("no GPU") },
		tests: func(gpus int) []selfTest {
			return []selfTest{test("host goroutines", goroutines),
				test("host processes", processes)}
		},
		getenv: func(name string) string {
			for _, entry := range environ {
				if key, value, _ := strings.Cut(entry, "="); key == name {
					return value
				}
			}
			return ""
		},
	}
	var out bytes.Buffer
	err := d.examine(context.Background(), &out)
	return out.String(), err
}

func TestDoctorReportsEveryPart(t *testing.T) {
	report, err := examine(t, nil, nil)
	require.Check(t, err == nil, "error is %v", err)
	parts := []string{"build", "machine", "environment", "measurements", "shared memory",
		"loopback", "gpu", "host goroutines", "host processes"}
	for _, b := range euryale.Backends() {
		parts = append(parts, "backend "+b.Name())
	}
	for _, about := range parts {
		require.Check(t, strings.Contains(report, "\n"+about+" ") ||
			strings.HasPrefix(report, about+" "), "nothing about %s in\n%s", about, report)
	}
	for line := range strings.Lines(report) {
		if verdict := line[16:20]; verdict != "ok  " && verdict != "no  " &&
			strings.TrimSpace(line[:20]) != "" {
			t.Errorf("not aligned: %q", line)
		}
	}
	require.Check(t, !strings.Contains(report, "backend ucc"),
		"it reports a backend that does not exist:\n%s", report)
}

func TestDoctorFailsOnlyIfNothingWorks(t *testing.T) {
	broken := errors.New("first line\nsecond line")
	for _, test := range []struct {
		goroutines, processes error
		fails                 bool
	}{{nil, broken, false}, {broken, nil, false}, {broken, broken, true}} {
		report, err := examine(t, test.goroutines, test.processes)
		require.Check(t, (err != nil) == test.fails, "%+v: error is %v", test, err)
		require.Check(t, strings.Contains(report, "no  first line\n                    second "+
			"line\n"), "the reason is not there, or not aligned:\n%s", report)
	}
}

func TestDoctorReadsTheEnvironment(t *testing.T) {
	for _, test := range []struct {
		environ []string
		want    string
	}{
		{[]string{"RANK=1", "WORLD_SIZE=3", "MASTER_PORT=7"}, "rank 1 of 3"},
		{[]string{"RANK=5", "WORLD_SIZE=3", "MASTER_PORT=7"}, "no  rendezvous"},
		{[]string{"RANK=1"}, "WORLD_SIZE"},
		{[]string{"EURYALE_TIMEOUTS=1s"}, "is it misspelt?"},
		{[]string{"EURYALE_TRACE=/tmp/t"}, "/tmp/t"},
		{[]string{"EURYALE_SHM_DIR=/does/not/exist"}, "name a tmpfs in EURYALE_SHM_DIR"},
		{[]string{"EURYALE_SHM_DIR=/proc"}, "it is not a tmpfs"},
	} {
		report, _ := examine(t, nil, nil, test.environ...)
		require.Check(t, strings.Contains(report, test.want), "%v: no %q in\n%s", test.environ,
			test.want, report)
	}
}

func TestDoctorReadsWhatWasMeasured(t *testing.T) {
	file := filepath.Join(t.TempDir(), "tuning.json")
	t.Setenv(string(env.Tuning), file)
	for text, want := range map[string]string{"": "until euryale bench --tune", "{}": "ok  " + file,
		"no JSON": "delete it"} {
		if text != "" {
			require.NoError(t, os.WriteFile(file, []byte(text), 0o600))
		} else if err := os.RemoveAll(file); err != nil {
			t.Fatal(err)
		}
		report, _ := examine(t, nil, nil)
		require.Check(t, strings.Contains(report, want), "%q: no %q in\n%s", text, want, report)
	}
	t.Setenv(string(env.Tuning), "off")
	report, _ := examine(t, nil, nil)
	require.Check(t, strings.Contains(report, "EURYALE_TUNING=off: algor"), "off: %s", report)
}

func TestDoctorKeepsTheSecret(t *testing.T) {
	report, _ := examine(t, nil, nil, "EURYALE_TOKEN=swordfish")
	require.Check(t, !strings.Contains(report, "swordfish") &&
		strings.Contains(report, "EURYALE_TOKEN"), "report:\n%s", report)
}

func TestDoctorsSelfTestAllReduces(t *testing.T) {
	tests := selfTests(0)
	require.That(t, len(tests) == 2 && tests[0].about == "host goroutines" &&
		tests[1].about == "host processes", "without GPUs the self tests are %+v", tests)
	text, err := tests[0].run(context.Background())
	require.Check(t, err == nil && strings.Contains(text, "2 ranks all-reduce right on backend "+
		"host, 4K in "), "%q, %v", text, err)
}

func TestSelfTestSaysWhatTheRanksSaid(t *testing.T) {
	start := func(_ *benchCmd, _ context.Context, s *streams) error {
		fmt.Fprint(s.err, "# a title\neuryale: rank 1: out of luck\n")
		return errors.New("rank 1 failed: exit status 1")
	}
	_, err := benchCmd{}.selfTest(start)(context.Background())
	require.Check(t, err != nil && err.Error() == "rank 1 failed: exit status 1\neuryale: rank "+
		"1: out of luck", "error is %v", err)
}

// patient is a doctor whose self tests are those given, of checkups that take up to limit.
func patient(limit time.Duration, tests ...selfTest) doctor {
	return doctor{
		getenv: func(string) string { return "" },
		open:   func() (*gpus, error) { return nil, errors.New("no GPU") },
		tests:  func(int) []selfTest { return tests },
		limit:  limit,
		grace:  500 * time.Millisecond,
	}
}

func TestDoctorTriesOneThingAtATimeAndReportsInOrder(t *testing.T) {
	var busy atomic.Bool
	alone := func(about string) selfTest {
		return selfTest{about, func(context.Context) (string, error) {
			if !busy.CompareAndSwap(false, true) {
				return "", errors.New("its turn came too early")
			}
			for range 1000 {
				runtime.Gosched()
			}
			busy.Store(false)
			return "works", nil
		}}
	}
	var b strings.Builder
	two := patient(time.Minute, alone("first"), alone("second"))
	require.NoError(t, two.examine(t.Context(), &b))
	require.That(t, strings.HasSuffix(b.String(), fmt.Sprintf("%-15s ok  works\n%-15s ok  works\n",
		"first", "second")), "it reports\n%s", b.String())
}

func TestDoctorThatIsStoppedFails(t *testing.T) {
	ctx, stop := context.WithCancelCause(t.Context())
	stopped := errors.New("stopped")
	d := patient(time.Minute, selfTest{"host",
		func(context.Context) (string, error) {
			stop(stopped)
			return "works", nil
		}})
	err := d.examine(ctx, io.Discard)
	require.Check(t, errors.Is(err, stopped), "error is %v", err)
}

func TestDoctorNamesWhatHangs(t *testing.T) {
	forever := make(chan struct{})
	t.Cleanup(func() { close(forever) })
	d := patient(10*time.Millisecond,
		selfTest{"deaf", func(context.Context) (string, error) {
			<-forever
			return "", nil
		}},
		selfTest{"late", func(ctx context.Context) (string, error) {
			<-ctx.Done()
			return "", fmt.Errorf("rank 1 hangs: %w", context.Cause(ctx))
		}},
		selfTest{"after", func(ctx context.Context) (string, error) {
			return "works", nil
		}})
	d.open = func() (*gpus, error) { <-forever; return nil, errors.New("no GPU") }
	var b strings.Builder
	require.Report(t, d.examine(context.Background(), &b))
	for _, want := range []string{"gpu             no  it took longer than 10ms",
		"deaf            no  it took longer than 10ms",
		"late            no  rank 1 hangs: it took longer than 10ms", "after           ok  works"} {
		require.Check(t, strings.Contains(b.String(), want), "no %q in\n%s", want, b.String())
	}
}
