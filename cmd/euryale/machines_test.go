package main

import (
	"bytes"
	"fmt"
	"net"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/euryale-ml/euryale/backend/hierarchy"
	"github.com/euryale-ml/euryale/internal/proctest"
)

// Two launchers, each with two of the four ranks, as on two machines. That they share this one
// is known to the ranks, which here take sockets all the same.
func TestLaunchersShareAJob(t *testing.T) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	meeting := ln.Addr().String()
	ln.Close()
	var outs [2]bytes.Buffer
	ends := make(chan error, 2)
	for m := range outs {
		self := command(t)
		cmd := command(t, "run", "--nnodes=2", fmt.Sprint("--node-rank=", m), "--rendezvous="+meeting, "-n", "2",
			self.Path, "bench", "--backend=tcp", "--min=1K", "--max=4K", "--factor=4", "--iters=5")
		cmd.Env = append(cmd.Env, "EURYALE_TOKEN=0123456789abcdef0123456789abcdef")
		cmd.Stdout, cmd.Stderr = &outs[m], &outs[m]
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		go func() { ends <- cmd.Wait() }()
	}
	for range outs {
		if err := <-ends; err != nil {
			t.Errorf("%v\n%s\n%s", err, &outs[0], &outs[1])
		}
	}
	if out := outs[0].String(); !strings.Contains(out, "[0] # ranks: 4 processes") {
		t.Errorf("machine 0 printed\n%s", out)
	}
}

// startJob starts a benchmark on two machines, each with two ranks, and returns the launchers and
// what they print.
func startJob(t *testing.T, names, addrs []string, args ...string) (launchers [2]*exec.Cmd, outs [2]*bytes.Buffer) {
	t.Helper()
	for m := range launchers {
		self := command(t)
		run := []string{"run", "--nnodes=2", fmt.Sprint("--node-rank=", m), "--rendezvous=" + addrs[0] + ":29511", "-n", "2", self.Path, "bench", "--backend=tcp"}
		cmd := proctest.Elsewhere(t, names[m], command(t, append(run, args...)...))
		cmd.Env = append(cmd.Env, "EURYALE_TOKEN=0123456789abcdef0123456789abcdef", "EURYALE_TIMEOUT=3s")
		outs[m] = new(bytes.Buffer)
		cmd.Stdout, cmd.Stderr = outs[m], outs[m]
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { cmd.Process.Kill() }) // it may have ended
		launchers[m] = cmd
	}
	return launchers, outs
}

func TestJobOfTwoMachines(t *testing.T) {
	names, addrs := proctest.Networks(t)
	launchers, outs := startJob(t, names, addrs, "--min=4", "--max=4M", "--factor=32", "--iters=5")
	for m, l := range launchers {
		if err := l.Wait(); err != nil {
			t.Fatalf("machine %d: %v\n%s\n%s", m, err, outs[0], outs[1])
		}
	}
	if out := outs[0].String(); !strings.Contains(out, "[0] # ranks: 4 processes") {
		t.Errorf("machine 0 printed\n%s", out)
	}
}

// Links between machines are measured where they are, inside in shared memory, and explained afterwards.
func TestTuneMeasuresTheLinksOfTwoMachines(t *testing.T) {
	file := noTuning(t)
	names, addrs := proctest.Networks(t)
	launchers, outs := startJob(t, names, addrs, "--tune", "--min=64K", "--max=1M", "--factor=16", "--time=1ms")
	for m, l := range launchers {
		if err := l.Wait(); err != nil {
			t.Fatalf("machine %d: %v\n%s\n%s", m, err, outs[0], outs[1])
		}
	}
	kept, found, err := hierarchy.Measured("host", hierarchy.Grid(2, 2, hierarchy.MachineMajor), false)
	if err != nil || !found || !strings.Contains(kept.Source, "4 processes, tcp") {
		t.Fatalf("%s keeps %+v, %v", file, kept, err)
	}
	code, out, stderr := explain("allreduce 64M --topology 2x2")
	for _, want := range []string{"links         " + kept.Links.String() + "\n", "measured: " + kept.Source, "67.1 MB between machines from each rank"} {
		if code != 0 || !strings.Contains(out, want) {
			t.Errorf("code %d, %s, no %q in\n%s", code, stderr, want, out)
		}
	}
}

// The loss of a machine is seen by the end of its connections, that of the link by the timeout.
func TestLostMachineIsNamed(t *testing.T) {
	for name, lose := range map[string]func(second *exec.Cmd, network string) error{
		"killed": func(second *exec.Cmd, _ string) error { return second.Process.Kill() },
		"cut off": func(_ *exec.Cmd, network string) error {
			return exec.Command("ip", "-n", network, "link", "set", "eth0", "down").Run()
		},
	} {
		t.Run(name, func(t *testing.T) {
			names, addrs := proctest.Networks(t)
			launchers, outs := startJob(t, names, addrs, "--min=1M", "--max=1M", "--iters=20000")
			time.Sleep(2 * time.Second) // calls are under way
			if err := lose(launchers[1], names[1]); err != nil {
				t.Fatal(err)
			}
			began := time.Now()
			if err := launchers[0].Wait(); err == nil {
				t.Error("the job ended well")
			}
			if took := time.Since(began); took > 20*time.Second { // of the minutes that the job would take
				t.Errorf("it took %v", took)
			}
			if out := outs[0].String(); !strings.Contains(out, "rank 2") && !strings.Contains(out, "rank 3") && !strings.Contains(out, "ranks 2, 3") {
				t.Errorf("machine 0 printed\n%s", out)
			}
		})
	}
}

func TestMachinesThatCannotBeAreErrors(t *testing.T) {
	for args, want := range map[string]string{
		"--nnodes=2": "--rendezvous HOST:PORT",
		"--nnodes=2 --node-rank=2 --rendezvous=a:1":      "machines are numbered from 0",
		"--nnodes=2 --rendezvous=a:1 --max-restarts=1":   "one machine only",
		"--nnodes=2 --rendezvous=nowhere /bin/true":      "give HOST:PORT",
		"--nnodes=2 --rendezvous=127.0.0.1:1 /bin/true":  "set EURYALE_TOKEN",
		"--nnodes=0 --rendezvous=127.0.0.1:99 /bin/true": "machines are numbered from 0",
	} {
		cmd := command(t, append([]string{"run", "-n", "1"}, strings.Fields(args)...)...)
		cmd.Env = append(cmd.Env, "EURYALE_TOKEN=")
		if out, err := cmd.CombinedOutput(); err == nil || !strings.Contains(string(out), want) {
			t.Errorf("%s: %v, want %q\n%s", args, err, want, out)
		}
	}
}
