//go:build linux

package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/euryale-ml/euryale/internal/testing/proctest"
	"github.com/euryale-ml/euryale/internal/testing/require"
)

// The processes of jobs are this test binary.
func TestMain(m *testing.M) {
	if role := os.Getenv(envRole); role != "" {
		os.Exit(play(role))
	}
	os.Exit(m.Run())
}

func TestRandomJobsEndAsTheyShould(t *testing.T) {
	c := config{minutes: 10, seed: 1, job: -1, jobs: 8, parallel: 2}
	if os.Getenv("EURYALE_FULL") == "1" {
		c.jobs = 20
	}
	var out bytes.Buffer
	sum, err := soak(t.Context(), c, &out)
	need(t, err)
	want := fmt.Sprintf("\njobs=%d hangs=0 unnamed=0 wrong=0 late=0 left=0", c.jobs)
	require.Check(t, strings.HasSuffix(sum.String(), want) && !sum.found(), "%v, want %v\n%s", sum,
		want, &out)
}

func TestJobsOfMachinesThatCannotBeMadeRunOnOne(t *testing.T) {
	t.Setenv("PATH", t.TempDir()) // there is no ip
	t.Setenv("REQUIRE_NETNS", "")
	number := find(t, func(j job) bool {
		return j.mode == machines && j.failure.name == kill && j.ranks < 4
	}).number
	var out bytes.Buffer
	sum, err := soak(t.Context(), config{minutes: 10, seed: 1, job: number, parallel: 1}, &out)
	need(t, err)
	said := "jobs of several machines run on one: "
	require.Check(t, sum.jobs == 1 && !sum.found() && strings.HasPrefix(out.String(), said),
		"%v; it lacks %q:\n%s", sum, said, &out)
}

// need skips a test where the system lacks something, and ends it at any other error.
func need(t *testing.T, err error) {
	t.Helper()
	switch {
	case errors.Is(err, proctest.ErrLacking):
		t.Skip(err)
	case err != nil:
		t.Fatal(err)
	}
}

// execute runs a job that is not as its number says.
func execute(t *testing.T, j job) outcome {
	t.Helper()
	shm, err := sharedMemory(1)
	need(t, err)
	t.Cleanup(func() { os.RemoveAll(shm) })
	return require.Value(j.execute(t.Context(),
		site{tmp: t.TempDir(), shm: shm, pulse: &pulse{}}))(t)
}

// find returns the first job of seed 1 that is as wanted.
func find(t *testing.T, wanted func(job) bool) job {
	t.Helper()
	for number := range 10000 {
		if j := newJob(1, number); wanted(j) {
			return j
		}
	}
	t.Fatal("there is no such job")
	return job{}
}

func TestHangIsFoundAndEnded(t *testing.T) {
	for _, m := range []mode{processes, launched, goroutines} {
		t.Run(string(m), func(t *testing.T) {
			t.Parallel()
			j := find(t, func(j job) bool {
				return j.mode == m && j.failure.name == leave && j.ranks < 4
			})
			j.failure.name, j.limit = stuck, 3*time.Second
			o := execute(t, j)
			found := j.judge(o)
			require.Check(t, len(found) == 1 && found[0].kind == hang, "found %v", found)
			stacks := ""
			for _, e := range o.ends {
				stacks += e.output
			}
			require.Check(t, strings.Contains(stacks, "goroutine "), "no stacks in %q", stacks)
		})
	}
}

func TestUnauthenticatedClientsVisitThePortOfAJob(t *testing.T) {
	// A rank that never comes keeps the port open until the time has passed.
	j := find(t, func(j job) bool {
		return j.visitors == 3 && j.mode == processes && j.failure.name == absent
	})
	o := execute(t, j)
	require.Check(t, o.visits >= 1, "nobody came to %v", j)
}

func TestLeftoversAreFound(t *testing.T) {
	r := &running{id: "TestLeftoversAreFound", site: site{tmp: t.TempDir(), shm: t.TempDir()}}
	require.NoError(t, os.WriteFile(filepath.Join(r.shm, "window"), nil, 0o600))
	require.NoError(t, os.MkdirAll(filepath.Join(r.tmp, fmt.Sprintf("euryale-%d", os.Getuid()),
		"KEY.lock"), 0o700))
	sleep := exec.Command("sleep", "100")
	sleep.Env = []string{"FIRST=1", envRun + "=" + r.id, "RANK=2"}
	require.NoError(t, sleep.Start())
	found := strings.Join(r.leftovers(), ", ")
	n := len(processesOf(r.id, "RANK=1"))
	require.Check(t, n == 0, "%d processes of rank 1", n)
	r.signalAll(syscall.SIGKILL)
	sleep.Wait()
	for _, want := range []string{fmt.Sprintf("process %d", sleep.Process.Pid), "file window",
		"KEY.lock"} {
		require.Check(t, strings.Contains(found, want), "%q is not in %q", want, found)
	}
}

func TestJobFollowsFromSeedAndNumber(t *testing.T) {
	seen := map[mode]map[string]bool{}
	for m := range often {
		seen[m] = map[string]bool{}
	}
	for number := range 2000 {
		j := newJob(7, number)
		require.That(t, reflect.DeepEqual(j, newJob(7, number)), "job %d differs from itself",
			number)
		seen[j.mode][j.failure.name] = true
		if n := calls(j.steps, j.ranks, j.failure.rank); j.failure.call < 1 || j.failure.call > n {
			t.Fatalf("%v: rank %d starts %d collectives", j, j.failure.rank, n)
		}
	}
	for m, names := range often {
		for _, name := range names {
			require.Check(t, seen[m][name], "no job as %s has the failure %s", m, name)
		}
	}
	require.Check(t, !reflect.DeepEqual(newJob(7, 1), newJob(7, 2)) &&
		!reflect.DeepEqual(newJob(7, 1), newJob(8, 1)), "different jobs are the same")
}

// quiet is a job of two ranks; what it is to come to is in the cases below.
func quiet(m mode, failure string) job {
	j := newJob(1, 1)
	j.mode, j.ranks, j.steps = m, 2, []action{{verb: meet}}
	j.failure.name, j.failure.rank = failure, 1
	return j
}

// ended is how the processes of two ranks ended, and what they have said.
func ended(code0, code1 int, said0, said1 string) []ending {
	return []ending{{0, code0, said0 + "\n"}, {1, code1, said1 + "\n"}}
}

func TestAnomaliesAreFound(t *testing.T) {
	const done0, done1 = `soak: rank=0 done ""`, `soak: rank=1 done ""`
	const names1 = `soak: rank=0 error "because of rank 1: closed"`
	together := func(code int, lines ...string) []ending {
		return []ending{{-1, code, strings.Join(lines, "\n") + "\n"}}
	}
	for _, test := range []struct {
		about string
		job   job
		out   outcome
		want  string // the kind of the first anomaly, "" for none
	}{
		{"all is well", quiet(processes, none), outcome{ends: ended(0, 0, done0, done1)}, ""},
		{"all is named", quiet(processes, kill), outcome{ends: ended(1, 137, names1, "")}, ""},
		{"a rank is down", quiet(processes, kill),
			outcome{ends: ended(1, 137, `soak: rank=0 error "rank 1 is down: killed"`, "")}, ""},
		{"a wrong rank", quiet(processes, kill),
			outcome{ends: ended(1, 137, `soak: rank=0 error "because of rank 2: rank 1 is down"`,
				"")}, unnamed},
		{"no rank", quiet(processes, kill),
			outcome{ends: ended(1, 137, `soak: rank=0 error "timeout"`, "")}, unnamed},
		{"a rank among several", quiet(processes, stop),
			outcome{ends: ended(1, 137,
				`soak: rank=0 error "because of rank 0: timeout: no sign of ranks 0, 1 for 3s"`,
				"")}, ""},
		{"others", quiet(processes, stop),
			outcome{ends: ended(1, 137,
				`soak: rank=0 error "because of rank 0: timeout: no sign of ranks 0, 11 for 3s"`,
				"")}, unnamed},
		{"a hang", quiet(processes, kill), outcome{hung: true, ends: ended(137, 137, "", "")},
			hang},
		{"a file", quiet(processes, none), outcome{stays: []string{"file x"},
			ends: ended(0, 0, done0, done1)}, left},
		{"a survivor ends well", quiet(processes, kill), outcome{ends: ended(0, 137, done0, "")},
			wrong},
		{"a failure that did not happen", quiet(processes, kill),
			outcome{ends: ended(1, 0, names1, done1)}, wrong},
		{"a survivor is silent", quiet(processes, kill), outcome{ends: ended(1, 137, "", "")},
			wrong},
		{"a wrong result", quiet(processes, none),
			outcome{ends: ended(1, 0, `soak: rank=0 wrong "element 1"`, done1)}, wrong},
		{"memory of the rank that closes", quiet(processes, closed),
			outcome{ends: ended(1, 1, names1,
				`soak: rank=1 wrong "element 0 of shared memory is 0, want 3"`)}, ""},
		{"memory of another rank", quiet(processes, closed),
			outcome{ends: ended(
				1, 1, `soak: rank=0 wrong "element 0 of shared memory is 0, want 3"`, "")}, wrong},
		{"an error without a failure", quiet(processes, none),
			outcome{ends: ended(1, 0, names1, done1)}, wrong},
		{"a fault of memory", quiet(processes, closed),
			outcome{ends: ended(1, 2, names1, "unexpected fault address 0x7f")}, wrong},
		{"a panic", quiet(processes, closed), outcome{ends: ended(1, 2, names1, "panic: oh")},
			wrong},
		{"a panic in a collective", quiet(processes, inside),
			outcome{ends: ended(1, 2, names1, "panic: oh")}, ""},
		{"a panic that is not printed", quiet(processes, inside),
			outcome{ends: ended(1, 2, names1, "")}, wrong},
		{"a survivor dies", quiet(processes, kill), outcome{ends: ended(139, 137, names1, "")},
			wrong},
		{"an exit code without a failure", quiet(processes, none),
			outcome{ends: ended(0, 1, done0, done1)}, wrong},
		{"the launcher is right", quiet(launched, kill),
			outcome{ends: together(137, names1, `soak: launcher rank=1 code=137 "x"`)}, ""},
		{"the launcher is wrong", quiet(launched, kill),
			outcome{ends: together(1, names1, `soak: launcher rank=0 code=1 "x"`)}, unnamed},
		{"the launcher's code is wrong", quiet(launched, exit),
			outcome{ends: together(1, names1, `soak: launcher rank=1 code=1 "x"`)}, unnamed},
		{"the launcher says nothing", quiet(launched, kill), outcome{ends: together(0, names1)},
			unnamed},
		{"Run says nothing", quiet(goroutines, leave),
			outcome{ends: together(0, names1, `soak: rank=1 left ""`)}, unnamed},
		{"Run is right", quiet(goroutines, leave),
			outcome{ends: together(1, names1, `soak: rank=1 left ""`,
				`soak: run error "rank 0: because of rank 1: closed"`)}, ""},
		{"Run is wrong", quiet(goroutines, leave),
			outcome{ends: together(1, names1, `soak: rank=1 left ""`,
				`soak: run error "rank 0: because of rank 3: closed"`)}, unnamed},
	} {
		found := test.job.judge(test.out)
		kind := ""
		if len(found) > 0 {
			kind = found[0].kind
		}
		require.Equal(t, fmt.Sprintf("%s: found %v", test.about, found), kind, test.want)
	}
}

func TestInterruptEndsEveryJob(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	time.AfterFunc(300*time.Millisecond, cancel)
	began := time.Now()
	require.Fails(t, "soak",
		require.Err(soak(ctx, config{minutes: 10, seed: 2, job: -1, parallel: 2}, &bytes.Buffer{})),
		context.Canceled)
	took := time.Since(began)
	require.Check(t, took <= 20*time.Second, "it took %v", took)
}
