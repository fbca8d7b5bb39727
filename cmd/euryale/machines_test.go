package main

import (
	"bytes"
	"fmt"
	"net"
	"strings"
	"testing"
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
