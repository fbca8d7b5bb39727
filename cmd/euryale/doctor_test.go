package main

import (
	"bytes"
	"context"
	"errors"
	"strings"
	"testing"
)

// examine returns the report of a doctor whose self tests end as told, in an
// environment.
func examine(t *testing.T, goroutines, processes error, environ ...string) (string, error) {
	t.Helper()
	test := func(err error) func(context.Context) (string, error) {
		return func(context.Context) (string, error) { return "works", err }
	}
	d := doctor{environ: environ, goroutines: test(goroutines), processes: test(processes), getenv: func(name string) string {
		for _, entry := range environ {
			if key, value, _ := strings.Cut(entry, "="); key == name {
				return value
			}
		}
		return ""
	}}
	var out bytes.Buffer
	err := d.examine(context.Background(), &out)
	return out.String(), err
}

func TestDoctorReportsEveryPart(t *testing.T) {
	report, err := examine(t, nil, nil)
	if err != nil {
		t.Errorf("error is %v", err)
	}
	for _, about := range []string{"build", "machine", "environment", "shared memory", "loopback", "backend host", "backend nccl", "backend mpi", "goroutines", "processes"} {
		if !strings.Contains(report, "\n"+about+" ") && !strings.HasPrefix(report, about+" ") {
			t.Errorf("nothing about %s in\n%s", about, report)
		}
	}
	for line := range strings.Lines(report) {
		if verdict := line[16:20]; verdict != "ok  " && verdict != "no  " {
			t.Errorf("not aligned: %q", line)
		}
	}
	if !strings.Contains(report, "not in this build") {
		t.Errorf("it does not say what the build lacks:\n%s", report)
	}
}

func TestDoctorFailsOnlyIfNothingWorks(t *testing.T) {
	broken := errors.New("first line\nsecond line")
	for _, test := range []struct {
		goroutines, processes error
		fails                 bool
	}{{nil, broken, false}, {broken, nil, false}, {broken, broken, true}} {
		report, err := examine(t, test.goroutines, test.processes)
		if (err != nil) != test.fails {
			t.Errorf("%+v: error is %v", test, err)
		}
		if !strings.Contains(report, "no  first line\n                    second line\n") {
			t.Errorf("the reason is not there, or not aligned:\n%s", report)
		}
	}
}

func TestDoctorReadsTheEnvironment(t *testing.T) {
	for _, test := range []struct {
		environ []string
		want    string
	}{
		{[]string{"RANK=1", "WORLD_SIZE=3"}, "rank 1 of 3"},
		{[]string{"RANK=5", "WORLD_SIZE=3"}, "no  rendezvous"},
		{[]string{"RANK=1"}, "WORLD_SIZE"},
		{[]string{"EURYALE_TIMEOUTS=1s"}, "is it misspelt?"},
		{[]string{"EURYALE_TRACE=/tmp/t"}, "/tmp/t"},
		{[]string{"EURYALE_SHM_DIR=/does/not/exist"}, "name a tmpfs in EURYALE_SHM_DIR"},
		{[]string{"EURYALE_SHM_DIR=/proc"}, "it is no tmpfs"},
	} {
		if report, _ := examine(t, nil, nil, test.environ...); !strings.Contains(report, test.want) {
			t.Errorf("%v: no %q in\n%s", test.environ, test.want, report)
		}
	}
}

func TestDoctorKeepsTheSecret(t *testing.T) {
	report, _ := examine(t, nil, nil, "EURYALE_TOKEN=swordfish")
	if strings.Contains(report, "swordfish") || !strings.Contains(report, "EURYALE_TOKEN") {
		t.Errorf("report:\n%s", report)
	}
}

func TestDoctorsSelfTestAllReduces(t *testing.T) {
	text, err := selfTest((*benchCmd).asGoroutines)(context.Background())
	if err != nil || !strings.Contains(text, "all-reduce right on backend host") {
		t.Errorf("%q, %v", text, err)
	}
}
