//go:build linux

package main

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"sync"
	"syscall"
	"time"

	"github.com/euryale-ml/euryale/internal/testing/proctest"
)

// ground is what a job needs besides its processes: machines, relays, strangers. It is a
// [proctest.T] of a program that is no test.
type ground struct {
	mu       sync.Mutex
	cleanups []func()
	errs     []error
}

// unfit is what a ground panics with where a test ends.
type unfit struct{ error }

// Helper does nothing.
func (g *ground) Helper() {}

// Cleanup has leave call f.
func (g *ground) Cleanup(f func()) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.cleanups = append(g.cleanups, f)
}

// TempDir makes a directory that leave removes.
func (g *ground) TempDir() string {
	dir, err := os.MkdirTemp("", "soak-")
	if err != nil {
		g.Fatal(err)
	}
	g.Cleanup(func() { os.RemoveAll(dir) })
	return dir
}

// Errorf keeps an error for leave.
func (g *ground) Errorf(format string, args ...any) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.errs = append(g.errs, fmt.Errorf(format, args...))
}

// Fatal ends run.
func (g *ground) Fatal(args ...any) { panic(unfit{errors.New(fmt.Sprint(args...))}) }

// Fatalf ends run.
func (g *ground) Fatalf(format string, args ...any) { panic(unfit{fmt.Errorf(format, args...)}) }

// Skipf ends run.
func (g *ground) Skipf(format string, args ...any) { panic(unfit{fmt.Errorf(format, args...)}) }

// run runs f and returns its error, or what it has ended with.
func (g *ground) run(f func() error) (err error) {
	defer func() {
		if v := recover(); v != nil {
			end, ok := v.(unfit)
			if !ok {
				panic(v)
			}
			err = end.error
		}
	}()
	return f()
}

// leave cleans up, and returns the errors of it all.
func (g *ground) leave() error {
	for {
		g.mu.Lock()
		n := len(g.cleanups)
		if n == 0 {
			defer g.mu.Unlock()
			return errors.Join(g.errs...)
		}
		f := g.cleanups[n-1]
		g.cleanups = g.cleanups[:n-1]
		g.mu.Unlock()
		if err := g.run(func() error { f(); return nil }); err != nil {
			g.Errorf("clean up: %w", err)
		}
	}
}

// machines makes machines, or returns nil where that takes rights that the soak does not have.
func (g *ground) machines() (all []*proctest.Namespace, err error) {
	if os.Getuid() != 0 {
		return nil, nil
	}
	err = g.run(func() error {
		all = proctest.Machines(g, mostMachines, proctest.Wire{})
		return nil
	})
	return all, err
}

// besiege has strangers storm the port of rank 0, and puts the other ranks far from it.
func (r *running) besiege(ports []int) {
	addr := fmt.Sprintf("127.0.0.1:%d", ports[0])
	source := "127.0.0.1"
	if r.job.number%2 == 0 {
		source = "127.0.0.2"
	}
	words := speech(r.job.rng())
	came := proctest.Storm(r.ground, source, addr, r.job.strangers, func(conn net.Conn) {
		conn.SetWriteDeadline(time.Now().Add(time.Second))
		conn.Write(words)
	})
	r.ground.Cleanup(func() { r.visits.Store(came.Load()) })
	port := proctest.Far(r.ground, addr, 25*time.Millisecond)
	for rank := range ports[1:] {
		ports[1+rank] = port
	}
}

// freePort returns a port on which nobody listens now, and that no connection takes as its own end.
func freePort() (int, error) {
	for {
		port := 15000 + rand.IntN(15000)
		l, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", port))
		if errors.Is(err, syscall.EADDRINUSE) {
			continue
		}
		if err != nil {
			return 0, err
		}
		return port, l.Close()
	}
}
